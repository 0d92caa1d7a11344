"""Which of the tensor-core step kernels runs a call, if any; the general one runs the rest.

`step_fast.cu` has 16-bit operands only; `step_split.cu` has a float32 one among them, and splits it. A variant is the
kernel's compile-time constants. `nhv` value heads share a block, `vs` blocks share their values, a warp has `cpw`
tiles of 32 values. The choice among these by batch (`tuning.json`, or a user's own table) changes the time only, never
a bit of the result.
"""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from . import compiler
from .compiler import Program

if TYPE_CHECKING:
    from .launch import Operand

_CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_F16, _BF16, _F32 = torch.float16, torch.bfloat16, torch.float32


class Choice(NamedTuple):
    """A fast kernel and how to launch it."""

    program: Program
    blocks_per_row: int
    shared_bytes: int
    v_block: int


class Variant(NamedTuple):
    """Compile-time constants of `step_fast.cu` or `step_split.cu`."""

    state: torch.dtype
    io: torch.dtype
    ring: torch.dtype
    lanes: int
    window: int
    nhv: int
    vs: int
    cpw: int
    vec: bool = True
    plain: bool = True

    @property
    def warps(self) -> int:
        """Warps in a block."""
        return self.nhv * 4 // self.vs // self.cpw

    @property
    def splits(self) -> bool:
        """Whether a float32 operand is there, which the tensor cores take in parts."""
        return _F32 in (self.state, self.io, self.ring)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        rows = 2 * self.lanes
        stride = 16 if self.lanes == 8 else rows + 4
        head = self.window + self.lanes * rows + rows + self.lanes + 4
        scores = 4 * ((self.window + self.lanes) * stride + self.nhv * head)
        tiles = self.warps * self.cpw * 32 * 128 * self.state.itemsize
        keys = 128 * self.window * self.ring.itemsize
        if self.splits:
            return tiles + keys + 512 * rows + scores
        pair = self.state, self.ring
        return tiles + keys + 256 * rows * ((_F16 in pair) + 2 * (_BF16 in pair)) + scores

    @property
    def resident(self) -> int:
        """Blocks that fit a multiprocessor of the H200 at once; fewer may elsewhere."""
        threads = 32 * self.warps
        registers = 128 if self.lanes == 16 or self.cpw == 2 or self.splits else 80
        blocks = min(12, 233472 // (self.shared_bytes + 1024), 65536 // (registers * threads))
        return max(1, blocks)

    @property
    def program(self) -> Program:
        """What to compile."""
        macros = (
            ("STATE_D", _CODES[self.state]), ("IO_D", _CODES[self.io]), ("RING_D", _CODES[self.ring]),
            ("TT", self.lanes), ("WIN", self.window), ("NHV", self.nhv), ("VS", self.vs), ("CPW", self.cpw),
            ("VEC", int(self.vec)), ("PLAIN", int(self.plain)), ("MIN_BLOCKS", self.resident),
        )  # fmt: skip
        entry = "step_split" if self.splits else "step_fast"
        return Program(f"mma.cuh+step_parts.cuh+{entry}.cu", entry, macros, 32 * self.warps)


def _rare_split(lanes: int, splits: bool) -> tuple[int, int, int]:
    """(nhv, vs, cpw) of forms that are not tuned, small enough for any GPU."""
    return (1, 2, 1) if lanes == 16 and splits else (1, 1, 1)


SHIPPED = tuple(
    Variant(state, io, ring, lanes, window, *split)
    for state, io, ring in ((_F16, _BF16, _F16), (_F16, _F16, _F16), (_BF16, _BF16, _BF16))
    for lanes, window in ((4, 16), (8, 16), (16, 32))
    for split in ((1, 1, 1), (2, 1, 1))
) + tuple(
    Variant(_F32, io, ring, lanes, window, 1, 2 if lanes == 16 else 1, 1)
    for io, ring in ((_BF16, _F16), (_BF16, _F32), (_F32, _F32))
    for lanes, window in ((4, 16), (8, 16), (16, 32))
)
"""Compiled for every architecture by the tests. Others (e.g. float16 state beside bfloat16 rings) compile on demand."""


@functools.cache
def _table() -> dict[str, list[list[int]]]:
    """Kind of step -> rows of [most value heads in the batch, nhv, vs, cpw], ascending; see `_rows` for the kinds.

    A user's table goes first: $REPLAYSTATE_TUNING, else tuning.json beside the compiled kernels.
    """
    shipped: dict[str, list[list[int]]] = json.loads((Path(__file__).parent / "tuning.json").read_text())
    user = user_table()
    if user.is_file():
        shipped.update(json.loads(user.read_text()))
    return shipped


def user_table() -> Path:
    """Where a user's own tuning table is looked for."""
    return Path(os.environ.get("REPLAYSTATE_TUNING") or compiler.cache_dir() / "tuning.json")


def kind_of(lanes: int, splits: bool) -> str:
    """The name of a kind of step in a tuning table: "4", "8" or "16" token lanes, with "/float32" where it splits."""
    return f"{lanes}/float32" if splits else str(lanes)


def _rows(arch: str, lanes: int, splits: bool) -> list[list[int]]:
    """The rows for a kind of step on an architecture, such as "sm_90/16", else the default ones."""
    table, kind = _table(), kind_of(lanes, splits)
    return table[next(name for name in (f"{arch}/{kind}", f"default/{kind}") if name in table)]


forced: tuple[int, int, int] | None = None
"""(nhv, vs, cpw) for every step while it is set: `replaystate tune` measures one after the other."""


@functools.lru_cache(maxsize=4096)
def split(arch: str, lanes: int, splits: bool, batch_heads: int, group: int) -> tuple[int, int, int]:
    """(nhv, vs, cpw) for a batch of so many value heads, `group` of them to a key head."""
    rows = _rows(arch, lanes, splits)
    nhv, vs, cpw = next(row[1:] for row in rows if batch_heads <= row[0] or row[0] < 0)
    return (nhv if group % nhv == 0 else 1), vs, cpw


def variants_for(
    state: torch.dtype, io: torch.dtype, ring: torch.dtype, width: int, W: int, arch: str, group: int
) -> list[Variant]:
    """Every variant that steps of this kind may use on an architecture: what a warm-up compiles."""
    if not {state, io, ring} <= set(_CODES) or W > 32 or width > 16:
        return []
    kind_splits = _F32 in (state, io, ring)
    rows = _rows(arch, lanes_of(width), kind_splits)
    splits = sorted({((nhv if group % nhv == 0 else 1), vs, cpw) for _, nhv, vs, cpw in rows})
    kind = (state, io, ring, lanes_of(width), 16 if W <= 16 else 32)
    least = _rare_split(lanes_of(width), kind_splits)
    rare = [Variant(*kind, *least, vec, plain) for vec in (True, False) for plain in (True, False)]
    return list(dict.fromkeys([*(Variant(*kind, *split) for split in splits), *rare]))


def lanes_of(width: int) -> int:
    """Token lanes of the compiled kernel for steps of this width."""
    return 4 if width <= 4 else 8 if width <= 8 else 16


def choose(
    operands: tuple[Operand, ...],
    state: Tensor,
    u_ring: Tensor,
    k_ring: Tensor,
    *,
    B: int,
    H: int,
    HV: int,
    K: int,
    V: int,
    W: int,
    R: int,
    width: int,
    device: int,
    shared_limit: int,
    plain: bool,
) -> Choice | None:
    """The fast kernel for a step, or None: K = V = 128, W <= 32, R a power of two, pools aligned to 16 bytes."""
    io = operands[0].dtype
    if K != 128 or V != 128 or B > 65535 or W > 32 or width > 16 or R & (R - 1):
        return None
    if io not in _CODES or state.dtype not in _CODES or k_ring.dtype not in _CODES or u_ring.dtype != k_ring.dtype:
        return None
    if any(x.dtype != io for x in operands):
        return None
    if any(x.data_ptr() % 16 or (x.shape[0] > 1 and x.stride(0) % 8) for x in (state, u_ring, k_ring)):
        return None
    if max(state.stride(0), u_ring.stride(0), k_ring.stride(0), *(s for x in operands for s in x.strides)) >= 1 << 31:
        return None
    arch = compiler.architecture(device)
    splits = _F32 in (state.dtype, io, k_ring.dtype)
    nhv, vs, cpw = forced or split(arch, lanes_of(width), splits, B * HV, HV // H)
    bytes_ = 4 * io.itemsize
    vector = all(x.strides[-1] == 1 and x.ptr % bytes_ == 0 and not any(s % 4 for s in x.strides[:3]) for x in operands)
    if not (vector and plain):
        # Rare forms are not tuned: one split keeps the number of compiled kernels small. The bits are the same.
        nhv, vs, cpw = _rare_split(lanes_of(width), splits)
    kind = state.dtype, io, k_ring.dtype, lanes_of(width), 16 if W <= 16 else 32
    variant = _variant(*kind, nhv, vs, cpw, vector, plain)
    if variant[1] > shared_limit:
        nhv, vs, cpw = _rare_split(lanes_of(width), splits)
        variant = _variant(*kind, nhv, vs, cpw, vector, plain)
    return Choice(variant[0], HV // nhv * vs, variant[1], V // vs)


@functools.lru_cache(maxsize=256)
def _variant(*constants: object) -> tuple[Program, int]:
    variant = Variant(*constants)  # type: ignore[arg-type]
    return variant.program, variant.shared_bytes
