"""The ops behind `kernel_api`: padded rows, cursors per row, no cache."""

from __future__ import annotations

import torch
from torch import Tensor

from ..checks import FLOAT_DTYPES, INT_DTYPES, check_inference, check_no_overlap, check_rows, check_slots, check_tensor
from ..errors import ArgumentError, SlotError
from ..kernels import Backend, Call, fused, select
from ..shapes import check_window, flush_min
from .common import check_rings, check_src_dst, on_host


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
    flush_min_: int,
    restart: bool,
    scale: float,
    backend: str,
) -> None:
    """Check, then step padded rows. See `replaystate.gated_delta_rule_mtp_ucache_flush`."""
    fn, device = "gated_delta_rule_mtp_ucache_flush", state.device
    H, HV, K, V = check_rings(fn, state, u_cache, k_cache, g_cache, ("u_cache", "k_cache", "g_cache"))
    pool, ring_slots = state.shape[0], k_cache.shape[2]
    check_tensor(fn, "q", q, ["B", "T", H, K], FLOAT_DTYPES, device)
    rows, width = q.shape[:2]
    window = ring_slots // 2
    check_window(fn, window, max(width, 1), ring_slots)
    check_tensor(fn, "k", k, [rows, width, H, K], FLOAT_DTYPES, device)
    check_tensor(fn, "v", v, [rows, width, HV, V], FLOAT_DTYPES, device)
    for name, x in (("a", a), ("b", b)):
        check_tensor(fn, name, x, [rows, width, HV], FLOAT_DTYPES, device)
    for name, x in (("A_log", A_log), ("dt_bias", dt_bias)):
        check_tensor(fn, name, x, [HV], FLOAT_DTYPES, device)
    check_inference(fn, {"q": q, "k": k, "v": v, "a": a, "b": b})
    check_tensor(fn, "initial_state_indices", state_indices, [rows], INT_DTYPES, device)
    for name, x in (("hist_len", hist_len), ("cache_base", cache_base)):
        check_tensor(fn, name, x, [rows], [torch.int32], device)
    check_tensor(fn, "output", output, [rows, width, HV, V], FLOAT_DTYPES, device)
    if rows and width:
        check_rows(fn, "output", output)
    inputs = {"q": q, "k": k, "v": v, "a": a, "b": b, "A_log": A_log, "dt_bias": dt_bias, "initial_state_source": state}
    check_no_overlap(fn, "output", output, {**inputs, "u_cache": u_cache, "k_cache": k_cache, "g_cache": g_cache})
    top = flush_min(window, width)
    if not 1 <= flush_min_ <= top:
        raise ArgumentError(f"{fn}: flush_min: expected 1..{top} (window {window} + 1 - T={width}), got {flush_min_}")
    if on_host(state):
        slots, lens, bases = state_indices.tolist(), hist_len.tolist(), cache_base.tolist()
        check_slots(fn, "initial_state_indices", slots, pool, None)
        for slot, count, base in zip(slots, lens, bases, strict=True):
            if slot >= 0 and (not 0 <= count <= window or not 0 <= base < ring_slots):
                raise ArgumentError(
                    f"{fn}: slot {slot}: expected hist_len in 0..{window} and cache_base in 0..{ring_slots - 1}, "
                    f"got {count} and {base}"
                )
    if rows and width:
        call = Call("ucache_flush", device.type, q.dtype, state.dtype, k_cache.dtype, (H, HV, K, V), window, width)
        select(backend, call).ucache_flush(
            q, k, v, a, b, A_log, dt_bias, state, u_cache, k_cache, g_cache, state_indices, hist_len, cache_base,
            output, flush_min_, window, scale,
        )  # fmt: skip
    if restart and rows and width:
        folded = (state_indices >= 0) & (hist_len >= flush_min_)
        cache_base.copy_(torch.where(folded, (cache_base + hist_len) % ring_slots, cache_base))
        hist_len.copy_(torch.where(folded, 0, hist_len))


def can_step_for_adapter(mixed_qkv: Tensor, state: Tensor, k_ring: Tensor, window: int, width: int) -> bool:
    """Whether the backend that would run this steps straight from ragged rows (`adapter_step`)."""
    return fused(_adapter_backend(mixed_qkv, state, k_ring, window, width), "adapter_step") is not None


def _adapter_backend(mixed_qkv: Tensor, state: Tensor, k_ring: Tensor, window: int, width: int) -> Backend:
    HV, V, K = state.shape[1:]
    sizes = (k_ring.shape[1], HV, K, V)
    return select(
        "auto",
        Call("adapter_step", state.device.type, mixed_qkv.dtype, state.dtype, k_ring.dtype, sizes, window, width),
    )


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
    """The serving adapter's step from ragged rows into padded output; arguments are checked by the adapter."""
    check_rings("run_gdn_replayssm", state, u_ring, k_ring, g_ring, ("u", "k", "g"))
    step = fused(_adapter_backend(mixed_qkv, state, k_ring, window, executed_width), "adapter_step")
    step(
        mixed_qkv, a, b, A_log, dt_bias, state, u_ring, k_ring, g_ring, ring_start, num_committed, output,
        state_indices, query_start_loc, executed_width, window, null_slot, scale,
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
    backend: str,
) -> None:
    """Check, then write prefix states of one layer. See `replaystate.gdn_prefix_materialize`."""
    fn, device = "gdn_prefix_materialize", state.device
    sizes = check_rings(fn, state, u_cache, k_cache, g_cache, ("u_cache", "k_cache", "g_cache"))
    pool, ring_slots = state.shape[0], k_cache.shape[2]
    window = ring_slots // 2
    check_tensor(fn, "src_slots", src_slots, ["B"], INT_DTYPES, device)
    rows = src_slots.shape[0]
    for name, x in (("dst_slots", dst_slots), ("cache_base", cache_base), ("count", count)):
        check_tensor(fn, name, x, [rows], INT_DTYPES, device)
    if (active_request_indices is None) != (num_active is None):
        raise ArgumentError(f"{fn}: active_request_indices and num_active: expected both or neither")
    if active_request_indices is not None and num_active is not None:
        check_tensor(fn, "active_request_indices", active_request_indices, ["n"], INT_DTYPES, device)
        check_tensor(fn, "num_active", num_active, [1], INT_DTYPES, device)
    call = Call("fold_slots", device.type, None, state.dtype, k_cache.dtype, sizes, window)
    kernels = select(backend, call)
    whole = fused(kernels, "prefix_materialize")
    if whole is not None:
        whole(
            state, src_slots, dst_slots, k_cache, u_cache, g_cache, cache_base, count, active_request_indices,
            num_active, window,
        )  # fmt: skip
        return
    src, dst, count = src_slots.long(), dst_slots.long(), count.long()
    skip = (src < 0) | (dst < 0) | (count < 0) | (count > window) | (src >= pool) | (dst >= pool)
    if active_request_indices is not None and num_active is not None:
        listed = active_request_indices.long()
        if on_host(state):
            active = listed.tolist()[: max(0, int(num_active))]
            if any(i >= rows for i in active):
                raise ArgumentError(f"{fn}: active_request_indices: expected rows below {rows}, got {active}")
        named = (torch.arange(listed.shape[0], device=device) < num_active) & (listed >= 0) & (listed < rows)
        chosen = torch.zeros(rows + 1, dtype=torch.bool, device=device)
        chosen[torch.where(named, listed, rows)] = True
        skip = skip | ~chosen[:rows]
    if on_host(state):
        for name, slots in (("src_slots", src), ("dst_slots", dst)):
            past = [slot for slot in slots.tolist() if slot >= pool]
            if past:
                raise SlotError(f"{fn}: {name}: expected slots below {pool}, got {past[0]}")
        check_src_dst(fn, torch.where(skip, -1, src).tolist(), torch.where(skip, -1, dst).tolist(), pool, -1)
    src, dst = torch.where(skip, -1, src), torch.where(skip, -1, dst)
    start = cache_base.long() % ring_slots
    kernels.fold_slots([state], [u_cache], [k_cache], [g_cache], src, dst, start, count, window, None)
