"""The ops that fold a window: into another slot, in place, or into a returned state."""

from __future__ import annotations

import torch
from torch import Tensor

from ..checks import INT_DTYPES, check_slots, check_tensor, flag
from ..errors import ArgumentError, ShapeError, SlotError, SlotStatus
from ..kernels import Call, fused, select
from .common import check_alive, check_rings, check_slot_words, check_src_dst, live_slots, on_host, usable


def _check_layers(
    fn: str, states: list[Tensor], u_rings: list[Tensor], k_rings: list[Tensor], g_rings: list[Tensor], window: int
) -> Call:
    if not states or not len(states) == len(u_rings) == len(k_rings) == len(g_rings):
        raise ShapeError(f"{fn}: states, u_rings, k_rings, g_rings: expected one tensor a layer in each")
    sizes = (0, 0, 0, 0)
    for state, u, k, g in zip(states, u_rings, k_rings, g_rings, strict=True):
        sizes = check_rings(fn, state, u, k, g, ("u_rings", "k_rings", "g_rings"))
        if state.shape != states[0].shape or k.shape != k_rings[0].shape or state.device != states[0].device:
            raise ShapeError(f"{fn}: states, k_rings: expected the same shapes and device in every layer")
    return Call(fn, states[0].device.type, None, states[0].dtype, k_rings[0].dtype, sizes, window)


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
    backend: str,
) -> None:
    """Check, then write prefix states of all layers. See `ReplayCache.materialize`."""
    fn = "materialize"
    call = _check_layers(fn, states, u_rings, k_rings, g_rings, window)
    device, pool, ring_slots = states[0].device, states[0].shape[0], k_rings[0].shape[2]
    check_tensor(fn, "src_slots", src_slots, ["B"], INT_DTYPES, device)
    rows = src_slots.shape[0]
    check_tensor(fn, "dst_slots", dst_slots, [rows], INT_DTYPES, device)
    check_tensor(fn, "count", count, [rows], INT_DTYPES, device)
    check_slot_words(fn, pool, device, {"ring_start": ring_start, "num_committed": num_committed, "status": status})
    check_tensor(fn, "step_records", step_records, [pool, "num_layers"], [torch.int32], device)
    chosen = select(backend, call)
    whole = fused(chosen, "materialize")
    if whole is not None:
        whole(
            states, u_rings, k_rings, g_rings, src_slots, dst_slots, count, ring_start, num_committed, step_records,
            status, window, null_slot,
        )  # fmt: skip
        return
    src, dst, count = src_slots.long(), dst_slots.long(), count.long()
    if on_host(states[0]):
        src_list, dst_list, counts = src.tolist(), dst.tolist(), count.tolist()
        check_src_dst(fn, src_list, dst_list, pool, null_slot)
        for s, d, c in zip(src_list, dst_list, counts, strict=True):
            if s < 0 or d < 0 or null_slot in (s, d):
                continue
            check_alive(fn, [s], step_records, status, ring_start, num_committed, ring_slots, window)
            live = int(num_committed[s])
            if not 0 <= c <= live:
                raise ArgumentError(f"{fn}: count: expected 0..{live}, the window of slot {s}, got {c}")
            if s == d and c != live:
                raise ArgumentError(
                    f"{fn}: src and dst are both slot {s}: expected its whole window, count={live}, got {c}"
                )
    real = (src >= 0) & (dst >= 0) & (src < pool) & (dst < pool) & (src != null_slot) & (dst != null_slot)
    src, dst, count = src[real], dst[real], count[real]
    live_count = num_committed[src]
    bad = (count < 0) | (count > live_count) | ((src == dst) & (count != live_count))
    flag(status, src, bad, SlotStatus.BAD_COUNT)
    alive = usable(src, step_records, status)
    flag(status, dst, ~alive, SlotStatus.DEAD)  # whoever continues from dst must learn that it holds nothing new
    keep = ~bad & alive
    src, dst, count = src[keep], dst[keep], count[keep]
    start = ring_start[src].long()
    status[dst] = status[src]
    for word in (ring_start, num_committed, step_records):
        word[dst] = 0
    chosen.fold_slots(states, u_rings, k_rings, g_rings, src, dst, start, count, window, status)


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
    backend: str,
) -> None:
    """Check, then fold whole windows of all layers. See `ReplayCache.flush`."""
    fn = "flush"
    call = _check_layers(fn, states, u_rings, k_rings, g_rings, window)
    device, pool, ring_slots = states[0].device, states[0].shape[0], k_rings[0].shape[2]
    check_tensor(fn, "slots", slots, ["n"], INT_DTYPES, device)
    check_slot_words(fn, pool, device, {"ring_start": ring_start, "num_committed": num_committed, "status": status})
    check_tensor(fn, "step_records", step_records, [pool, "num_layers"], [torch.int32], device)
    chosen = select(backend, call)
    whole = fused(chosen, "flush")
    if whole is not None:
        whole(
            states, u_rings, k_rings, g_rings, slots, ring_start, num_committed, step_records, status, window, null_slot
        )
        return
    slots = slots.long()
    if on_host(states[0]):
        check_slots(fn, "slots", slots.tolist(), pool, null_slot)
        live = live_slots(slots.tolist(), null_slot)
        check_alive(fn, live, step_records, status, ring_start, num_committed, ring_slots, window)
    slots = slots[(slots >= 0) & (slots < pool) & (slots != null_slot)]
    slots = slots[usable(slots, step_records, status)]
    start, count = ring_start[slots].long(), num_committed[slots].long()
    chosen.fold_slots(states, u_rings, k_rings, g_rings, slots, slots, start, count, window, status)
    ring_start[slots] = ((start + count) % ring_slots).to(torch.int32)
    num_committed[slots] = 0


def read_state(
    state: Tensor,
    u_ring: Tensor,
    k_ring: Tensor,
    g_ring: Tensor,
    slots: Tensor,
    ring_start: Tensor,
    num_committed: Tensor,
    window: int,
    null_slot: int,
    backend: str,
) -> Tensor:
    """Check, then return current states of one layer. See `ReplayCache.state`."""
    fn = "read_state"
    sizes = check_rings(fn, state, u_ring, k_ring, g_ring, ("u_ring", "k_ring", "g_ring"))
    pool = state.shape[0]
    check_tensor(fn, "slots", slots, ["n"], INT_DTYPES, state.device)
    check_slot_words(fn, pool, state.device, {"ring_start": ring_start, "num_committed": num_committed})
    call = Call(fn, state.device.type, None, state.dtype, k_ring.dtype, sizes, window)
    chosen = select(backend, call)
    whole = fused(chosen, "read_slots")
    if whole is not None:
        out = state.new_empty(slots.shape[0], *state.shape[1:], dtype=torch.float32)
        whole(state, u_ring, k_ring, g_ring, slots, ring_start, num_committed, window, null_slot, out)
        return out
    slots = slots.long()
    if on_host(state) and any(slot >= pool for slot in slots.tolist()):
        raise SlotError(f"{fn}: slots: expected slots below {pool}, got {slots.tolist()}")
    slots = torch.where((slots < pool) & (slots != null_slot), slots, -1)
    safe = slots.clamp(min=0)
    out = state.new_zeros(slots.shape[0], *state.shape[1:], dtype=torch.float32)
    chosen.read_state(
        state, u_ring, k_ring, g_ring, slots, ring_start[safe].long(), num_committed[safe].long(), window, out
    )
    return out
