"""Backend "cpu": every op in C++ with SIMD, on CPU tensors. The kernels are in csrc/, one shared library.

The library is loaded at the first call that asks for it, not at import. It is built with the package where torch and a
compiler are at hand (see setup.py), and comes with the wheels of Linux and macOS.
"""

from __future__ import annotations

import os
import re
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from .. import errors

if TYPE_CHECKING:
    from .registry import Call

NAME = "cpu"
# REPLAYSTATE_CPU_KERNELS names another build of the library, e.g. one with sanitizers.
LIBRARY = Path(os.environ.get("REPLAYSTATE_CPU_KERNELS") or Path(__file__).parent.parent / "_cpu_kernels.so")
HOW_TO_BUILD = (
    "install a wheel that has it, or build it where torch and a C++20 compiler are installed: "
    "pip install --no-build-isolation --no-binary replaystate replaystate "
    "(in a checkout: pip install --no-build-isolation .)"
)


@lru_cache(maxsize=1)
def usable() -> str | None:
    """None when the library is there and loads, else what is missed and how to get it."""
    if not LIBRARY.exists():
        return f"the C++ extension is not built: {HOW_TO_BUILD}"
    try:
        torch.ops.load_library(LIBRARY)
    except OSError as error:
        return f"the C++ extension does not load into torch {torch.__version__}: {error}"
    return None


def supports(call: Call) -> str | None:
    """Every call on CPU tensors."""
    return None if call.device_type == "cpu" else f"runs on CPU tensors only, not on {call.device_type}"


def isa() -> str:
    """The instruction set whose kernels run: avx512, avx2, neon or scalar."""
    name: str = _ops().isa()
    return name


def use_isa(name: str) -> bool:
    """Run the kernels of another instruction set from now on, for tests; False when this machine has it not."""
    chosen: bool = _ops().use_isa(name)
    return chosen


def read_words(x: Tensor) -> int:
    """Sum of a dense int64 vector, read once by all threads: the memory speed that benchmarks compare with."""
    total: int = _ops().read_words(x)
    return total


def _ops() -> Any:
    reason = usable()
    if reason is not None:
        raise errors.BackendError(f"backend {NAME!r}: {reason}")
    return torch.ops.replaystate_cpu


def _raise_typed(error: RuntimeError) -> NoReturn:
    """The library's errors carry the name of their class: "ShapeError: replay_step: ..."."""
    match = re.search(r"\b(\w+Error): (\w+: .*)", str(error))
    kind = getattr(errors, match.group(1), None) if match else None
    if match is None or not (isinstance(kind, type) and issubclass(kind, errors.ReplayStateError)):
        raise error
    raise kind(match.group(2)) from None


def _dense_last(x: Tensor) -> Tensor:
    """x with elements of the last dim side by side; a copy only when they are not."""
    dense = x.dim() == 0 or x.shape[-1] <= 1 or x.stride(-1) == 1
    return x if dense else x.contiguous()


def step_holds(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    u_ring: Tensor,
    k_ring: Tensor,
    g_ring: Tensor,
    ring_start: Tensor,
    num_committed: Tensor,
    step_records: Tensor,
    status: Tensor,
    out: Tensor,
    state_indices: Tensor,
    query_start_loc: Tensor,
    layer: int,
    executed_width: int,
    window: int,
    null_slot: int,
) -> bool:
    """True when nothing is wrong with the arguments of a step, values included: one look in C++ in place of many.

    False says only that the checks in Python have to look closer: something is wrong, or the extension is not there, or
    a layout is unusual.
    """
    if usable() is not None or not state.is_cpu:
        return False
    try:
        holds: bool = _ops().step_holds(
            mixed_qkv, a, b, A_log, dt_bias, state, u_ring, k_ring, g_ring, ring_start, num_committed, step_records,
            status, out, state_indices, query_start_loc, layer, executed_width, window, null_slot,
        )  # fmt: skip
    except RuntimeError:  # a tensor that is not on the CPU
        return False
    return holds


def replay_step(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    u_ring: Tensor,
    k_ring: Tensor,
    g_ring: Tensor,
    ring_start: Tensor,
    num_committed: Tensor,
    step_records: Tensor,
    status: Tensor,
    out: Tensor,
    state_indices: Tensor,
    query_start_loc: Tensor,
    layer: int,
    executed_width: int,
    window: int,
    null_slot: int,
    scale: float,
) -> None:
    """One step of one layer from packed ragged rows. See `replaystate.replay_step`."""
    try:
        _ops().replay_step(
            _dense_last(mixed_qkv), a, b, A_log, dt_bias, state, u_ring, k_ring, g_ring, ring_start, num_committed,
            step_records, status, out, state_indices, query_start_loc, layer, executed_width, window, null_slot, scale,
        )  # fmt: skip
    except RuntimeError as error:
        _raise_typed(error)


def ucache_flush(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    u_cache: Tensor,
    k_cache: Tensor,
    g_cache: Tensor,
    state_indices: Tensor,
    hist_len: Tensor,
    cache_base: Tensor,
    output: Tensor,
    flush_min: int,
    window: int,
    scale: float,
) -> None:
    """One step from padded rows with per-row cursors. See `replaystate.gated_delta_rule_mtp_ucache_flush`."""
    dense = _dense_last(output)  # a copy of what is there: padding rows stay as they are
    try:
        _ops().ucache_flush(
            _dense_last(q), _dense_last(k), _dense_last(v), a, b, A_log, dt_bias, state, u_cache, k_cache, g_cache,
            state_indices, hist_len, cache_base, dense, flush_min, window, scale,
        )  # fmt: skip
    except RuntimeError as error:
        _raise_typed(error)
    if dense is not output:
        output.copy_(dense)


def fold_slots(
    states: list[Tensor],
    u_rings: list[Tensor],
    k_rings: list[Tensor],
    g_rings: list[Tensor],
    src_slots: Tensor,
    dst_slots: Tensor,
    start: Tensor,
    count: Tensor,
    window: int,
    status: Tensor | None,
) -> None:
    """Into slot dst of every layer, the state after `count` window rows of slot src; negative slots are skipped."""
    try:
        _ops().fold_slots(states, u_rings, k_rings, g_rings, src_slots, dst_slots, start, count, window, status)
    except RuntimeError as error:
        _raise_typed(error)


def read_state(
    state: Tensor,
    u_ring: Tensor,
    k_ring: Tensor,
    g_ring: Tensor,
    slots: Tensor,
    start: Tensor,
    count: Tensor,
    window: int,
    out: Tensor,
) -> None:
    """out[i] = the state of slot i after `count` rows, in float32; rows of negative slots are left as they are."""
    try:
        _ops().read_state(state, u_ring, k_ring, g_ring, slots, start, count, window, out)
    except RuntimeError as error:
        _raise_typed(error)


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
    """Publish the cursors of a step. See `ReplayCache.commit`."""
    try:
        _ops().commit(
            state_indices, num_accepted, ring_start, num_committed, step_records, status, window, ring_slots, null_slot
        )
    except RuntimeError as error:
        _raise_typed(error)


def gated_delta_rule(
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
    """Prefill: the recurrence over whole prompts. See `replaystate.gated_delta_rule`."""
    if initial_state is not None:
        final_state.copy_(initial_state)  # the kernel reads it there, and writes the final state over it
    try:
        _ops().gated_delta_rule(
            _dense_last(mixed_qkv),
            a,
            b,
            A_log,
            dt_bias,
            initial_state is not None,
            query_start_loc,
            out,
            final_state,
            scale,
        )
    except RuntimeError as error:
        _raise_typed(error)
