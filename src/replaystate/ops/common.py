"""Checks that several ops share."""

from __future__ import annotations

import torch
from torch import Tensor

from ..checks import FLOAT_DTYPES, check_pool, check_tensor, flag
from ..errors import DeadSlotError, ProtocolError, ShapeError, SlotError, SlotStatus


def on_host(*tensors: Tensor) -> bool:
    """Whether the values of all these tensors can be read without a sync."""
    return all(x.device.type == "cpu" for x in tensors)


def check_rings(
    fn: str, state: Tensor, u: Tensor, k: Tensor, g: Tensor, names: tuple[str, str, str]
) -> tuple[int, int, int, int]:
    """Check a checkpoint pool and its rings against each other; return (H, HV, K, V)."""
    check_tensor(fn, "state", state, ["pool", "HV", "V", "K"], FLOAT_DTYPES)
    pool, HV, V, K = state.shape
    u_name, k_name, g_name = names
    check_tensor(fn, k_name, k, [pool, "H", "R", K], FLOAT_DTYPES, state.device)
    H, R = k.shape[1:3]
    if H < 1 or HV < 1 or HV % H:
        raise ShapeError(f"{fn}: {k_name}: expected a number of key heads that divides HV={HV}, got H={H}")
    check_tensor(fn, u_name, u, [pool, HV, R, V], FLOAT_DTYPES, state.device)
    check_tensor(fn, g_name, g, [pool, HV, R], [torch.float32], state.device)
    for name, x in (("state", state), (u_name, u), (k_name, k), (g_name, g)):
        check_pool(fn, name, x)
    return H, HV, K, V


def check_slot_words(fn: str, pool: int, device: torch.device, words: dict[str, Tensor]) -> None:
    """One int32 word a slot for each of these."""
    for name, x in words.items():
        check_tensor(fn, name, x, [pool], [torch.int32], device)


def check_alive(
    fn: str,
    slots: list[int],
    step_records: Tensor,
    status: Tensor,
    ring_start: Tensor,
    num_committed: Tensor,
    ring_slots: int,
    window: int,
) -> None:
    """Host side: each of these live slots is alive, has no step pending, and cursors inside their range.

    Raises:
        DeadSlotError: a dead slot.
        ProtocolError: a pending step, or a cursor out of range.
    """
    where = torch.tensor(slots, dtype=torch.int64, device="cpu")
    pending: list[bool] = (step_records[where] != 0).any(1).tolist()
    words, starts, counts = (word[where].tolist() for word in (status, ring_start, num_committed))
    for slot, word, unfinished, start, count in zip(slots, words, pending, starts, counts, strict=True):
        if word & SlotStatus.DEAD:
            raise dead_slot_error(fn, slot)
        if unfinished:
            raise ProtocolError(f"{fn}: slot {slot} has a step that was not committed: commit it (0 is allowed) first")
        check_cursors(fn, slot, start, count, ring_slots, window)


def check_cursors(fn: str, slot: int, start: int, count: int, ring_slots: int, window: int) -> None:
    """Host side: cursors are addresses, and an engine may own them.

    Raises:
        ProtocolError: ring_start outside 0..R-1 or num_committed outside 0..W.
    """
    if not 0 <= start < ring_slots or not 0 <= count <= window:
        raise ProtocolError(
            f"{fn}: slot {slot}: cursors out of range: ring_start={start} (0..{ring_slots - 1}), "
            f"num_committed={count} (0..{window})"
        )


def usable(slots: Tensor, step_records: Tensor, status: Tensor) -> Tensor:
    """Device side of `check_alive`: which distinct slots are alive and committed; pending ones are flagged."""
    pending = (step_records[slots] != 0).any(1)
    flag(status, slots, pending, SlotStatus.NOT_COMMITTED)
    return ~pending & ((status[slots] & int(SlotStatus.DEAD)) == 0)


def dead_slot_error(fn: str, slot: int) -> DeadSlotError:
    """The one message for a call on a dead slot."""
    return DeadSlotError(f"{fn}: slot {slot} is dead (invalidated, or its protocol was broken): reset or load it first")


def live_slots(slots: list[int], null_slot: int) -> list[int]:
    """The slots that are not padding."""
    return [slot for slot in slots if slot >= 0 and slot != null_slot]


def check_src_dst(fn: str, src: list[int], dst: list[int], pool: int, null_slot: int) -> None:
    """No dst twice, and no dst that another row reads: a reader would depend on the order of rows."""
    for name, slots in (("src_slots", src), ("dst_slots", dst)):
        for slot in slots:
            if slot >= pool:
                raise SlotError(f"{fn}: {name}: expected slots below {pool}, got {slot}")
    rows = [(s, d) for s, d in zip(src, dst, strict=True) if s >= 0 and d >= 0 and s != null_slot and d != null_slot]
    written = [d for _, d in rows]
    for row, (_, d) in enumerate(rows):
        if written.count(d) > 1:
            raise SlotError(f"{fn}: dst_slots: slot {d} is named twice")
        if any(s == d for other, (s, _) in enumerate(rows) if other != row):
            raise SlotError(f"{fn}: dst_slots: slot {d} is also the source of another row")
