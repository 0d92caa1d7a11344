"""Everything that can go wrong: one exception tree, and the bits of the per-slot status word.

Every error raised on purpose is a `ReplayStateError`. Bad values also are `ValueError`, bad dtypes `TypeError`, a
missing optional package `ImportError`, so that callers who know nothing of this library catch what they expect.
"""

from __future__ import annotations

from enum import IntFlag


class ReplayStateError(Exception):
    """Root of all errors raised by replaystate."""


class ArgumentError(ReplayStateError, ValueError):
    """A value that no call could accept: a wrong number, a wrong combination, an overlap."""


class ShapeError(ArgumentError):
    """A tensor whose shape, strides or device do not fit the others."""


class DTypeError(ReplayStateError, TypeError):
    """A tensor or argument of a type that the call does not take."""


class SlotError(ArgumentError):
    """A slot outside the pool, named twice, or the null slot where a real one is needed."""


class ProtocolError(ArgumentError):
    """Calls in an order that the cursor protocol forbids, e.g. a commit without a step."""


class DeadSlotError(ProtocolError):
    """A slot whose checkpoint and cursors no longer agree; `reset` or `load` brings it back."""


class CapacityError(ReplayStateError, RuntimeError):
    """No free slot is left."""


class SlotStatusError(ReplayStateError, RuntimeError):
    """`ReplayCache.check` found status bits set; the message names slot and cause."""


class FormatError(ArgumentError):
    """An exported slot that this cache cannot load."""


class BackendError(ReplayStateError, RuntimeError):
    """An explicitly requested backend cannot run this call; the message says why."""


class GLayoutError(ArgumentError):
    """A per-token g ring met a consumer of cumulative ones, or the other way round."""


class AuditError(ReplayStateError, RuntimeError):
    """The audit's shadow recurrence and the replayed state parted."""


class MissingDependencyError(ReplayStateError, ImportError):
    """An optional package is needed for this call and cannot be imported."""


class UnsupportedModelError(ReplayStateError, ValueError):
    """A model class or a transformers version outside the supported range."""


class SlotStatus(IntFlag):
    """Bits of `ReplayCache.status`: set by kernels, read by `ReplayCache.check`, cleared by reset, load, overwrite."""

    OK = 0
    STATE_SATURATED = 1
    RING_SATURATED = 2
    DEAD = 4
    NOT_COMMITTED = 8
    NO_STEP = 16
    ACCEPTED_CLAMPED = 32
    ROW_CUT = 64
    BAD_CURSOR = 128
    BAD_COUNT = 256
    WINDOW_NOT_EMPTY = 512


STATUS_CAUSES: dict[SlotStatus, str] = {
    SlotStatus.STATE_SATURATED: "a checkpoint value left the range of its dtype and was saturated",
    SlotStatus.RING_SATURATED: "a correction left the range of the ring dtype and was saturated",
    SlotStatus.DEAD: "the slot is dead (invalidated, or its protocol was broken): reset or load it",
    SlotStatus.NOT_COMMITTED: "a step came before the last one was committed by every layer with one width",
    SlotStatus.NO_STEP: "a commit came without a step of every layer",
    SlotStatus.ACCEPTED_CLAMPED: "num_accepted was outside 0..row length and was clamped",
    SlotStatus.ROW_CUT: "a row was longer than executed_width and was cut",
    SlotStatus.BAD_CURSOR: "a cursor was out of range (ring_start 0..R-1, num_committed 0..W)",
    SlotStatus.BAD_COUNT: "a count was outside the window: a crop was clamped, a materialize skipped",
    SlotStatus.WINDOW_NOT_EMPTY: "a checkpoint load over a live window was skipped: flush or reset first",
}
"""What each bit means, in the words of `explain_status`."""


def explain_status(bits: int) -> str:
    """Spell out the set bits of one status word.

    >>> explain_status(SlotStatus.ROW_CUT)
    'ROW_CUT: a row was longer than executed_width and was cut'
    """
    return "; ".join(f"{flag.name}: {cause}" for flag, cause in STATUS_CAUSES.items() if bits & flag)
