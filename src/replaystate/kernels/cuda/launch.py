"""From tensors to kernel arguments: which kernel runs a call, with what grid, and the struct it is given.

The structs hold one 8-byte field for each name below, in the order of the .cu files.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from . import compiler, fast
from .compiler import Program

DTYPE_CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.float64: 3}
MAX_WIDTH = 16
MAX_K = 256
MAX_LAYERS = 48  # layers in one launch of fold_slots: its arguments fit 4 KB
MAX_ROWS = 4096  # rows in one launch of fold_slots: its list fits shared memory

_STEP = struct.Struct("<88qd")
_COMMIT = struct.Struct("<21q")
_PREFILL = struct.Struct("<32qd")
_FOLD = struct.Struct(f"<{11 + 6 + 10 + 18 + 8 * MAX_LAYERS}q")


@lru_cache(maxsize=64)
def _properties(device: int) -> tuple[int, int]:
    """(multiprocessors, shared memory that a block may have)."""
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count, int(getattr(properties, "shared_memory_per_block_optin"))  # noqa: B009


def shared_limit() -> int:
    """Bytes of shared memory that a block may have on the current device."""
    return _properties(torch.cuda.current_device())[1]


# --- the step ------------------------------------------------------------------------------------------------------


def token_lanes(width: int) -> int:
    """Token lanes of the compiled kernel that runs steps of this width."""
    return next(lanes for lanes in (2, 4, 8, 16) if width <= lanes)


def key_blocks(K: int) -> int:
    """K in blocks of 128."""
    return -(-K // 128)


def general_step(state_dtype: torch.dtype, width: int, K: int) -> Program:
    """The step kernel for any sizes and dtypes."""
    lanes, blocks = token_lanes(width), key_blocks(K)
    small = blocks == 1 and lanes == 4
    tuned = ("MIN_BLOCKS", 3 if small else 2), ("PREFETCH", int(blocks == 1 and lanes >= 4))
    macros = (("STATE_D", DTYPE_CODES[state_dtype]), ("TT", lanes), ("NKB", blocks))
    return Program("step_general.cu", "step_general", (*macros, *tuned), 256)


def general_step_shared_bytes(width: int, K: int, W: int, v_block: int) -> int:
    """Dynamic shared memory of `step_general`."""
    lanes, padded = token_lanes(width), 128 * key_blocks(K)
    rows = 2 * lanes + W
    tile = W * (v_block + 4) + 2 * lanes * (v_block + 1)
    return 4 * (rows * padded + (W + lanes) * 2 * lanes + tile + 2 * W + 2 * lanes)


def _v_block(work: int, V: int, device: int) -> int:
    """Values a block has: all of them when there are blocks enough. The result's bits do not depend on it."""
    multiprocessors, _ = _properties(device)
    for block in (V, 64):
        if block <= V and work * -(-V // block) >= 2 * multiprocessors:
            return block
    return min(V, 32)


class Operand(NamedTuple):
    """One of q, k, v, a, b, out as a kernel takes it: strides of row, token, head (and element), in elements."""

    ptr: int
    dtype: torch.dtype
    strides: tuple[int, ...]


def packed_operands(mixed_qkv: Tensor, H: int, HV: int, K: int, V: int) -> tuple[Operand, Operand, Operand]:
    """q, k and v of packed tokens, without a view of any."""
    (token, elem), ptr, dtype = mixed_qkv.stride(), mixed_qkv.data_ptr(), mixed_qkv.dtype
    key_bytes = H * K * elem * mixed_qkv.element_size()
    keys = (0, token, K * elem, elem)
    return (
        Operand(ptr, dtype, keys),
        Operand(ptr + key_bytes, dtype, keys),
        Operand(ptr + 2 * key_bytes, dtype, (0, token, V * elem, elem)),
    )


def operand(x: Tensor, dims: int) -> Operand:
    """A tensor of [rows, tokens, heads, ...] with `dims` dims, or of tokens without rows."""
    return Operand(x.data_ptr(), x.dtype, x.stride() if x.dim() == dims else (0, *x.stride()))


def step(
    qkv: tuple[Operand, Operand, Operand],
    a: Operand,
    b: Operand,
    out: Operand,
    A_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    u_ring: Tensor,
    k_ring: Tensor,
    g_ring: Tensor,
    ring_start: Tensor,
    num_committed: Tensor,
    step_records: Tensor | None,
    status: Tensor | None,
    state_indices: Tensor,
    query_start_loc: Tensor | None,
    *,
    num_tokens: int,
    layer: int,
    width: int,
    window: int,
    null_slot: int,
    flush_min: int,
    scale: float,
    cursors_per_row: bool,
    padded_out: bool,
    zero_rows: bool,
) -> None:
    """Launch one step of ragged rows (with query_start_loc) or of rows padded to `width` tokens (without)."""
    num_slots, HV, V, K = state.shape
    H, R = k_ring.shape[1:3]
    B, ragged = state_indices.shape[0], query_start_loc is not None
    if B == 0:
        return
    device = state.get_device()

    codes, (q, k, v) = DTYPE_CODES, qkv
    size = state.element_size()
    state_vec = K % 4 == 0 and state.data_ptr() % (4 * size) == 0 and (num_slots == 1 or state.stride(0) % 4 == 0)
    plain = (
        query_start_loc is not None and not padded_out and zero_rows and step_records is not None
        and state_indices.dtype == query_start_loc.dtype == torch.int32 and a.dtype == b.dtype == q.dtype
        and A_log.dtype == dt_bias.dtype == torch.float32
    )  # fmt: skip
    choice = fast.choose(
        (*qkv, out),
        state,
        u_ring,
        k_ring,
        B=B,
        H=H,
        HV=HV,
        K=K,
        V=V,
        W=window,
        R=R,
        width=width,
        device=device,
        shared_limit=_properties(device)[1],
        plain=plain,
    )
    v_block = _v_block(B * HV, V, device) if choice is None else choice.v_block
    arguments = _STEP.pack(
        q.ptr, k.ptr, v.ptr, a.ptr, b.ptr, A_log.data_ptr(), dt_bias.data_ptr(),
        state.data_ptr(), u_ring.data_ptr(), k_ring.data_ptr(), g_ring.data_ptr(),
        ring_start.data_ptr(), num_committed.data_ptr(),
        0 if step_records is None else step_records.data_ptr(), 0 if status is None else status.data_ptr(),
        out.ptr, state_indices.data_ptr(), 0 if query_start_loc is None else query_start_loc.data_ptr(),
        codes[q.dtype], codes[k.dtype], codes[v.dtype], codes[a.dtype], codes[b.dtype], codes[A_log.dtype],
        codes[dt_bias.dtype], codes[u_ring.dtype], codes[k_ring.dtype], codes[out.dtype],
        state_indices.dtype == torch.int64, query_start_loc is not None and query_start_loc.dtype == torch.int64,
        *q.strides, *k.strides, *v.strides, *a.strides, *b.strides, *out.strides,
        state.stride(0), u_ring.stride(0), k_ring.stride(0), g_ring.stride(0), A_log.stride(0), dt_bias.stride(0),
        ring_start.stride(0), num_committed.stride(0), 0 if status is None else status.stride(0),
        *((0, 0) if step_records is None else step_records.stride()),
        state_indices.stride(0), 0 if query_start_loc is None else query_start_loc.stride(0),
        B, num_tokens, H, HV, K, V, window, R, width, num_slots, null_slot, flush_min, layer,
        0 if step_records is None else step_records.shape[1],
        cursors_per_row, ragged, padded_out, zero_rows, state_vec, v_block,
        HV // H, -(-(1 << 20) // (HV // H)),
        0 if choice is None else choice.blocks_per_row, scale,
    )  # fmt: skip
    if choice is not None:
        compiler.launch(choice.program, device, choice.blocks_per_row, choice.shared_bytes, arguments, B)
        return
    shared = general_step_shared_bytes(width, K, window, v_block)
    blocks = B * HV * -(-V // v_block)
    compiler.launch(general_step(state.dtype, width, K), device, blocks, shared, arguments)


# --- the fold ------------------------------------------------------------------------------------------------------

MATERIALIZE, FLUSH, READ, PREFIX = range(4)


def fold_program(state_dtype: torch.dtype, K: int) -> Program:
    """The kernel behind materialize, flush, read_state and prefix_materialize."""
    return Program(
        "fold_rows.cuh+fold.cu", "fold_slots", (("STATE_D", DTYPE_CODES[state_dtype]), ("NKB", key_blocks(K))), 256
    )


FOLD_WARPS = 8


def fold_fast_program(state_dtype: torch.dtype, ring_dtype: torch.dtype, W: int) -> Program:
    """The fold on the tensor cores: K = V = 128, 16-bit dtypes, W <= 32, pools aligned to 16 bytes."""
    macros = (
        ("STATE_D", DTYPE_CODES[state_dtype]), ("RING_D", DTYPE_CODES[ring_dtype]), ("WIN", 16 if W <= 16 else 32),
        ("WARPS", FOLD_WARPS),
    )  # fmt: skip
    return Program("mma.cuh+fold_rows.cuh+fold_fast.cu", "fold_fast", macros, 32 * FOLD_WARPS)


def fold_fast_shared_bytes(W: int, rows: int) -> int:
    """Dynamic shared memory of `fold_fast`."""
    return FOLD_WARPS * (8192 + (16 if W <= 16 else 32) * 256) + 4 * rows


def fold_is_fast(sizes: tuple[int, int], W: int, dtypes: tuple[torch.dtype, torch.dtype, torch.dtype]) -> bool:
    """Whether sizes (K, V) and dtypes (state, u ring, k ring) suit `fold_fast`."""
    sixteen = (torch.float16, torch.bfloat16)
    return sizes == (128, 128) and W <= 32 and dtypes[0] in sixteen and dtypes[1] in sixteen and dtypes[1] == dtypes[2]


def fold_shared_bytes(K: int, W: int, v_block: int, rows: int) -> int:
    """Dynamic shared memory of `fold_slots`."""
    return 4 * (W * 128 * key_blocks(K) + W * (v_block + 8) + 2 * W + 2 * rows)


def fold(
    mode: int,
    states: list[Tensor],
    u_rings: list[Tensor],
    k_rings: list[Tensor],
    g_rings: list[Tensor],
    src: Tensor,
    dst: Tensor | None,
    start: Tensor | None,
    count: Tensor | None,
    *,
    ring_start: Tensor | None = None,
    num_committed: Tensor | None = None,
    step_records: Tensor | None = None,
    status: Tensor | None = None,
    active: Tensor | None = None,
    num_active: Tensor | None = None,
    out: Tensor | None = None,
    window: int,
    null_slot: int,
) -> None:
    """Launch the fold of all rows and layers; more than MAX_LAYERS layers or MAX_ROWS rows take several launches."""
    rows = src.shape[0]
    if rows == 0 or (out is not None and out.numel() == 0):
        return
    num_slots, HV, V, K = states[0].shape
    H, R = k_rings[0].shape[1:3]
    device = states[0].get_device()
    multiprocessors, _ = _properties(device)

    def ptr(x: Tensor | None) -> int:
        return 0 if x is None else x.data_ptr()

    def wide(x: Tensor | None) -> int:
        return int(x is not None and x.dtype == torch.int64)

    def stride(x: Tensor | None) -> int:
        return 0 if x is None else x.stride(0)

    if rows > MAX_ROWS and active is None:
        for begin in range(0, rows, MAX_ROWS):
            at = slice(begin, begin + MAX_ROWS)
            fold(
                mode, states, u_rings, k_rings, g_rings, src[at],
                *(None if x is None else x[at] for x in (dst, start, count)),
                ring_start=ring_start, num_committed=num_committed, step_records=step_records, status=status,
                out=None if out is None else out[at], window=window, null_slot=null_slot,
            )  # fmt: skip
        return
    layers = list(zip(states, u_rings, k_rings, g_rings, strict=True))
    work = rows * HV * min(len(layers), MAX_LAYERS)
    v_block = V if work >= 4 * multiprocessors else min(V, 32)
    blocks = min(2 * multiprocessors, work * -(-V // v_block))
    size = states[0].element_size()
    quick = mode != READ and fold_is_fast((K, V), window, (states[0].dtype, u_rings[0].dtype, k_rings[0].dtype))
    quick = (
        quick
        and R & (R - 1) == 0
        and all(
            x.data_ptr() % 16 == 0 and (num_slots == 1 or x.stride(0) % 8 == 0) for x in (*states, *u_rings, *k_rings)
        )
    )
    if quick:
        blocks = min(2 * multiprocessors, -(-work * 4 // FOLD_WARPS))
    for begin in range(0, len(layers), MAX_LAYERS):
        chunk = layers[begin : begin + MAX_LAYERS]
        table: list[int] = []
        vec = K % 4 == 0
        for state, u, k, g in chunk:
            table += (state.data_ptr(), u.data_ptr(), k.data_ptr(), g.data_ptr())
            table += (state.stride(0), u.stride(0), k.stride(0), g.stride(0))
            vec &= state.data_ptr() % (4 * size) == 0 and (num_slots == 1 or state.stride(0) % 4 == 0)
        table += [0] * (8 * MAX_LAYERS - len(table))
        arguments = _FOLD.pack(
            ptr(src), ptr(dst), ptr(start), ptr(count), ptr(active), ptr(num_active), ptr(ring_start),
            ptr(num_committed), ptr(step_records), ptr(status), ptr(out),
            wide(src), wide(dst), wide(start), wide(count), wide(active), wide(num_active),
            stride(src), stride(dst), stride(start), stride(count), stride(active), stride(ring_start),
            stride(num_committed), stride(status), *((0, 0) if step_records is None else step_records.stride()),
            mode, rows, 0 if active is None else active.shape[0], len(chunk),
            0 if step_records is None else step_records.shape[1], begin + MAX_LAYERS >= len(layers),
            DTYPE_CODES[u_rings[0].dtype], DTYPE_CODES[k_rings[0].dtype], H, HV, K, V, window, R, num_slots, null_slot,
            vec, v_block, *table,
        )  # fmt: skip
        if quick:
            program = fold_fast_program(states[0].dtype, k_rings[0].dtype, window)
            shared = fold_fast_shared_bytes(window, rows)
        else:
            program, shared = fold_program(states[0].dtype, K), fold_shared_bytes(K, window, v_block, rows)
        compiler.launch(program, device, blocks, shared, arguments)


# --- the small ones ------------------------------------------------------------------------------------------------


def commit_program() -> Program:
    """The kernel that publishes cursors."""
    return Program("commit.cu", "commit", (), 128)


def commit(
    state_indices: Tensor,
    num_accepted: Tensor,
    ring_start: Tensor,
    num_committed: Tensor,
    step_records: Tensor,
    status: Tensor,
    window: int,
    ring_slots: int,
    null_slot: int,
) -> None:
    """Launch a commit."""
    B = state_indices.shape[0]
    if B == 0:
        return
    arguments = _COMMIT.pack(
        state_indices.data_ptr(), num_accepted.data_ptr(), ring_start.data_ptr(), num_committed.data_ptr(),
        step_records.data_ptr(), status.data_ptr(), state_indices.dtype == torch.int64,
        num_accepted.dtype == torch.int64, state_indices.stride(0), num_accepted.stride(0), ring_start.stride(0),
        num_committed.stride(0), status.stride(0), *step_records.stride(), B, step_records.shape[1],
        ring_start.shape[0], null_slot, window, ring_slots,
    )  # fmt: skip
    compiler.launch(commit_program(), ring_start.get_device(), -(-B // 4), 0, arguments)


def prefill_program(K: int) -> Program:
    """The kernel that prefills."""
    return Program("prefill.cu", "prefill", (("NKB", key_blocks(K)),), 256)


def prefill_shared_bytes(K: int) -> int:
    """Dynamic shared memory of `prefill`."""
    return 4 * (2 * 16 * 128 * key_blocks(K) + 16 * 32 + 32)


def prefill(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    initial_state: Tensor | None,
    query_start_loc: Tensor,
    out: Tensor,
    final_state: Tensor,
    scale: float,
) -> None:
    """Launch a prefill; initial_state and out are dense."""
    B, HV, V, K = final_state.shape
    if B == 0:
        return
    H = (mixed_qkv.shape[1] - HV * V) // (2 * K)
    codes = DTYPE_CODES
    arguments = _PREFILL.pack(
        mixed_qkv.data_ptr(), a.data_ptr(), b.data_ptr(), A_log.data_ptr(), dt_bias.data_ptr(),
        0 if initial_state is None else initial_state.data_ptr(), query_start_loc.data_ptr(), out.data_ptr(),
        final_state.data_ptr(), codes[mixed_qkv.dtype], codes[a.dtype], codes[b.dtype], codes[A_log.dtype],
        codes[dt_bias.dtype], 0 if initial_state is None else codes[initial_state.dtype],
        query_start_loc.dtype == torch.int64, *mixed_qkv.stride(), *a.stride(), *b.stride(), A_log.stride(0),
        dt_bias.stride(0), query_start_loc.stride(0), out.stride(0), B, mixed_qkv.shape[0], H, HV, K, V, scale,
    )  # fmt: skip
    blocks = B * HV * -(-V // 32)
    compiler.launch(prefill_program(K), final_state.get_device(), blocks, prefill_shared_bytes(K), arguments)
