"""Backend "cuda": every op as one CUDA kernel, compiled at run time for the GPU at hand.

No call waits for the host, allocates where the caller gave memory, or keeps scratch between calls, so each can be
captured in a CUDA graph once its kernels are compiled (`ReplayCache.warmup`). A row's bits do not depend on the batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...shapes import flush_min as _flush_min
from . import compiler, launch, upkeep
from .programs import compile_for, warmup

if TYPE_CHECKING:
    from ..registry import Call

NAME = "cuda"

__all__ = ["NAME", "compile_for", "supports", "upkeep", "usable", "warmup"]


def usable() -> str | None:
    """None when there is a GPU from Ampere on and cuda-core is installed."""
    if torch.version.cuda is None:
        return "this torch is built without CUDA"
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    reason = compiler.missing()
    if reason:
        return reason
    major, minor = torch.cuda.get_device_capability()
    if major < 8:
        return f"the GPU has compute capability {major}.{minor}; 8.0 (Ampere) or newer is needed"
    return None


def supports(call: Call) -> str | None:
    """Any dtypes and sizes on a GPU, K up to 256, steps up to 16 tokens, windows that fit the GPU's shared memory."""
    if call.device_type != "cuda":
        return f"the tensors are on {call.device_type}, this backend takes CUDA tensors"
    _, _, K, _ = call.sizes
    if K > launch.MAX_K:
        return f"head_k_dim {K} is above {launch.MAX_K}"
    if call.executed_width > launch.MAX_WIDTH:
        return f"executed_width {call.executed_width} is above {launch.MAX_WIDTH}"
    if K and call.window:
        limit = launch.shared_limit()
        needed = launch.general_step_shared_bytes(max(call.executed_width, 1), K, call.window, 32)
        if needed > limit:
            return f"window {call.window} with K={K} needs {needed} bytes of shared memory a block, the GPU has {limit}"
    return None


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
    if state_indices.shape[0] == 0:
        out.zero_()
        return
    HV, V, K = state.shape[1:]
    launch.step(
        launch.packed_operands(mixed_qkv, k_ring.shape[1], HV, K, V),
        launch.operand(a, 3),
        launch.operand(b, 3),
        launch.operand(out, 4),
        A_log, dt_bias, state, u_ring, k_ring, g_ring, ring_start, num_committed, step_records, status, state_indices,
        query_start_loc,
        num_tokens=mixed_qkv.shape[0],
        layer=layer,
        width=executed_width,
        window=window,
        null_slot=null_slot,
        flush_min=_flush_min(window, executed_width),
        scale=scale,
        cursors_per_row=False,
        padded_out=False,
        zero_rows=True,
    )  # fmt: skip


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
    rows, width = q.shape[:2]
    launch.step(
        (launch.operand(q, 4), launch.operand(k, 4), launch.operand(v, 4)),
        launch.operand(a, 3),
        launch.operand(b, 3),
        launch.operand(output, 4),
        A_log, dt_bias, state, u_cache, k_cache, g_cache, cache_base, hist_len, None, None, state_indices, None,
        num_tokens=rows * width,
        layer=0,
        width=width,
        window=window,
        null_slot=-1,
        flush_min=flush_min,
        scale=scale,
        cursors_per_row=True,
        padded_out=False,
        zero_rows=False,
    )  # fmt: skip


def adapter_step(
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
    output: Tensor,
    state_indices: Tensor,
    query_start_loc: Tensor,
    executed_width: int,
    window: int,
    null_slot: int,
    scale: float,
) -> None:
    """The serving adapter's step in one launch: ragged rows in, [rows, executed_width, HV, V] out, idle lanes zero."""
    HV, V, K = state.shape[1:]
    launch.step(
        launch.packed_operands(mixed_qkv, k_ring.shape[1], HV, K, V),
        launch.operand(a, 3),
        launch.operand(b, 3),
        launch.operand(output, 4),
        A_log, dt_bias, state, u_ring, k_ring, g_ring, ring_start, num_committed, None, None, state_indices,
        query_start_loc,
        num_tokens=mixed_qkv.shape[0],
        layer=0,
        width=executed_width,
        window=window,
        null_slot=null_slot,
        flush_min=_flush_min(window, executed_width),
        scale=scale,
        cursors_per_row=False,
        padded_out=True,
        zero_rows=True,
    )  # fmt: skip


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
    """Into slot dst of every layer, the state after `count` window rows of slot src; negative slots skip the row."""
    launch.fold(
        launch.PREFIX,
        states,
        u_rings,
        k_rings,
        g_rings,
        src_slots,
        dst_slots,
        start,
        count,
        window=window,
        null_slot=-1,
    )


def materialize(
    states: list[Tensor],
    u_rings: list[Tensor],
    k_rings: list[Tensor],
    g_rings: list[Tensor],
    src_slots: Tensor,
    dst_slots: Tensor,
    count: Tensor,
    ring_start: Tensor,
    num_committed: Tensor,
    step_records: Tensor,
    status: Tensor,
    window: int,
    null_slot: int,
) -> None:
    """Prefix states and cursors of all layers and rows in one launch. See `ReplayCache.materialize`."""
    launch.fold(
        launch.MATERIALIZE, states, u_rings, k_rings, g_rings, src_slots, dst_slots, None, count, ring_start=ring_start,
        num_committed=num_committed, step_records=step_records, status=status, window=window, null_slot=null_slot,
    )  # fmt: skip


def flush(
    states: list[Tensor],
    u_rings: list[Tensor],
    k_rings: list[Tensor],
    g_rings: list[Tensor],
    slots: Tensor,
    ring_start: Tensor,
    num_committed: Tensor,
    step_records: Tensor,
    status: Tensor,
    window: int,
    null_slot: int,
) -> None:
    """Whole windows of all layers and rows in one launch. See `ReplayCache.flush`."""
    launch.fold(
        launch.FLUSH, states, u_rings, k_rings, g_rings, slots, slots, None, None, ring_start=ring_start,
        num_committed=num_committed, step_records=step_records, status=status, window=window, null_slot=null_slot,
    )  # fmt: skip


def prefix_materialize(
    state: Tensor,
    src_slots: Tensor,
    dst_slots: Tensor,
    k_cache: Tensor,
    u_cache: Tensor,
    g_cache: Tensor,
    cache_base: Tensor,
    count: Tensor,
    active_request_indices: Tensor | None,
    num_active: Tensor | None,
    window: int,
) -> None:
    """Prefix states of one layer, with a list of active rows on the device. See `gdn_prefix_materialize`."""
    launch.fold(
        launch.PREFIX, [state], [u_cache], [k_cache], [g_cache], src_slots, dst_slots, cache_base, count,
        active=active_request_indices, num_active=num_active, window=window, null_slot=-1,
    )  # fmt: skip


def read_slots(
    state: Tensor,
    u_ring: Tensor,
    k_ring: Tensor,
    g_ring: Tensor,
    slots: Tensor,
    ring_start: Tensor,
    num_committed: Tensor,
    window: int,
    null_slot: int,
    out: Tensor,
) -> None:
    """Current states of one layer into out, float32; rows of no slot become zero. See `ReplayCache.state`."""
    launch.fold(
        launch.READ, [state], [u_ring], [k_ring], [g_ring], slots, None, None, None, ring_start=ring_start,
        num_committed=num_committed, out=out, window=window, null_slot=null_slot,
    )  # fmt: skip


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
    """Not used: `read_slots` takes the cursors themselves."""
    raise NotImplementedError


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
    launch.commit(
        state_indices, num_accepted, ring_start, num_committed, step_records, status, window, ring_slots, null_slot
    )


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
    """Prefill. See `replaystate.gated_delta_rule`."""
    out.zero_()  # tokens of no row
    initial_state = None if initial_state is None else initial_state.contiguous()
    launch.prefill(mixed_qkv, a, b, A_log, dt_bias, initial_state, query_start_loc, out, final_state, scale)
