"""The op of a decode step, and of the commit that publishes it."""

from __future__ import annotations

import torch
from torch import Tensor

from ..checks import (
    FLOAT_DTYPES,
    INT_DTYPES,
    check_inference,
    check_no_overlap,
    check_query_start_loc,
    check_rows,
    check_slots,
    check_tensor,
)
from ..errors import ArgumentError, ProtocolError, SlotStatus
from ..kernels import Call, select, step_holds
from ..shapes import check_window, read_step_record, step_record
from .common import check_cursors, check_rings, check_slot_words, dead_slot_error, live_slots, on_host


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
    backend: str,
) -> None:
    """Check a step, then run it on the backend. See `replaystate.replay_step`."""
    check_inference("replay_step", {"mixed_qkv": mixed_qkv, "a": a, "b": b})
    arguments = (
        mixed_qkv, a, b, A_log, dt_bias, state, u_ring, k_ring, g_ring, ring_start, num_committed, step_records,
        status, out, state_indices, query_start_loc, layer, executed_width, window, null_slot,
    )  # fmt: skip
    if not step_holds(*arguments):
        _check_step(*arguments)
    call = Call(
        "replay_step", state.device.type, mixed_qkv.dtype, state.dtype, k_ring.dtype,
        (k_ring.shape[1], state.shape[1], state.shape[3], state.shape[2]), window, executed_width,
    )  # fmt: skip
    select(backend, call).replay_step(*arguments, scale)


def _check_step(
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
) -> None:
    fn, device = "replay_step", state.device
    H, HV, K, V = check_rings(fn, state, u_ring, k_ring, g_ring, ("u_ring", "k_ring", "g_ring"))
    pool, ring_slots = state.shape[0], k_ring.shape[2]
    check_window(fn, window, executed_width, ring_slots)
    check_tensor(fn, "mixed_qkv", mixed_qkv, ["N", 2 * H * K + HV * V], FLOAT_DTYPES, device)
    tokens = mixed_qkv.shape[0]
    for name, x in (("a", a), ("b", b)):
        check_tensor(fn, name, x, [tokens, HV], FLOAT_DTYPES, device)
    for name, x in (("A_log", A_log), ("dt_bias", dt_bias)):
        check_tensor(fn, name, x, [HV], FLOAT_DTYPES, device)
    check_tensor(fn, "state_indices", state_indices, ["B"], INT_DTYPES, device)
    check_tensor(fn, "query_start_loc", query_start_loc, [state_indices.shape[0] + 1], INT_DTYPES, device)
    check_slot_words(fn, pool, device, {"ring_start": ring_start, "num_committed": num_committed, "status": status})
    check_tensor(fn, "step_records", step_records, [pool, "num_layers"], [torch.int32], device)
    if not 0 <= layer < step_records.shape[1]:
        raise ArgumentError(f"{fn}: layer: expected 0..{step_records.shape[1] - 1}, got {layer}")
    check_tensor(fn, "out", out, [tokens, HV, V], [mixed_qkv.dtype], device)
    check_rows(fn, "out", out)
    inputs = {"mixed_qkv": mixed_qkv, "a": a, "b": b, "A_log": A_log, "dt_bias": dt_bias, "state": state}
    check_no_overlap(fn, "out", out, {**inputs, "u_ring": u_ring, "k_ring": k_ring, "g_ring": g_ring})
    if on_host(state):
        _check_step_values(
            fn, ring_start, num_committed, step_records, status, state_indices, query_start_loc, tokens, layer,
            executed_width, window, ring_slots, null_slot,
        )  # fmt: skip


def _check_step_values(
    fn: str,
    ring_start: Tensor,
    num_committed: Tensor,
    step_records: Tensor,
    status: Tensor,
    state_indices: Tensor,
    query_start_loc: Tensor,
    tokens: int,
    layer: int,
    executed_width: int,
    window: int,
    ring_slots: int,
    null_slot: int,
) -> None:
    bounds: list[int] = query_start_loc.tolist()
    slots: list[int] = state_indices.tolist()
    check_query_start_loc(fn, bounds, tokens)
    check_slots(fn, "state_indices", slots, ring_start.shape[0], null_slot)
    live = live_slots(slots, null_slot)
    where = torch.tensor(live, dtype=torch.int64, device="cpu")
    starts, counts, words = ring_start[where].tolist(), num_committed[where].tolist(), status[where].tolist()
    records = step_records[where].tolist()
    lengths = [bounds[i + 1] - bounds[i] for i, slot in enumerate(slots) if slot >= 0 and slot != null_slot]
    for slot, length, start, count, word, record in zip(live, lengths, starts, counts, words, records, strict=True):
        if word & SlotStatus.DEAD:
            raise dead_slot_error(fn, slot)
        if length > executed_width:
            raise ArgumentError(
                f"{fn}: query_start_loc: slot {slot} has {length} tokens, more than executed_width={executed_width}"
            )
        if record[layer]:
            raise ProtocolError(f"{fn}: slot {slot}: layer {layer} was stepped already and not committed since")
        expected = step_record(executed_width, length)
        for other, value in enumerate(record):
            if value and value != expected:
                width, row_length = read_step_record(value)
                raise ProtocolError(
                    f"{fn}: slot {slot}: layer {other} was stepped with executed_width={width} and {row_length} "
                    f"tokens, layer {layer} now with {executed_width} and {length}: one step is the same for all layers"
                )
        check_cursors(fn, slot, start, count, ring_slots, window)


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
    backend: str,
) -> None:
    """Check a commit, then publish the cursors. See `ReplayCache.commit`."""
    fn, device = "commit", ring_start.device
    check_tensor(fn, "state_indices", state_indices, ["B"], INT_DTYPES, device)
    check_tensor(fn, "num_accepted", num_accepted, [state_indices.shape[0]], INT_DTYPES, device)
    check_tensor(fn, "ring_start", ring_start, ["num_slots"], [torch.int32], device)
    pool = ring_start.shape[0]
    check_slot_words(fn, pool, device, {"num_committed": num_committed, "status": status})
    check_tensor(fn, "step_records", step_records, [pool, "num_layers"], [torch.int32], device)
    if on_host(ring_start):
        slots, accepted = state_indices.tolist(), num_accepted.tolist()
        check_slots(fn, "state_indices", slots, pool, null_slot)
        for slot, kept in zip(slots, accepted, strict=True):
            if slot >= 0 and slot != null_slot:
                _check_commit_of(fn, slot, kept, step_records[slot].tolist(), int(status[slot]))
    call = Call(fn, device.type, None, None, None, (0, 0, 0, 0), window)
    select(backend, call).commit(
        state_indices, num_accepted, ring_start, num_committed, step_records, status, window, ring_slots, null_slot
    )


def _check_commit_of(fn: str, slot: int, accepted: int, records: list[int], status: int) -> None:
    if status & SlotStatus.DEAD:
        raise dead_slot_error(fn, slot)
    if not any(records):
        raise ProtocolError(f"{fn}: slot {slot} has no step to commit (each step is committed once)")
    missing = [layer for layer, record in enumerate(records) if not record]
    if missing:
        raise ProtocolError(f"{fn}: slot {slot}: layers {missing} did not step: commit comes after every layer ran")
    width, length = read_step_record(records[0])
    if not 0 <= accepted <= length:
        raise ProtocolError(
            f"{fn}: num_accepted: slot {slot}: expected 0..{length}, the tokens of its row "
            f"(executed_width={width}), got {accepted}"
        )
