"""Exit codes, and which error means which."""

from __future__ import annotations

from enum import IntEnum

from ..errors import (
    ArgumentError,
    AuditError,
    BackendError,
    DTypeError,
    MissingDependencyError,
    ProtocolError,
    ReplayStateError,
    SlotStatusError,
    UnsupportedModelError,
)


class Exit(IntEnum):
    """Exit codes of the command."""

    OK = 0
    FAILED = 1
    USAGE = 2
    ENVIRONMENT = 3
    INTERRUPTED = 130


EXIT_CODES: tuple[tuple[type[ReplayStateError], Exit], ...] = (
    (MissingDependencyError, Exit.ENVIRONMENT),
    (BackendError, Exit.ENVIRONMENT),
    (AuditError, Exit.FAILED),
    (SlotStatusError, Exit.FAILED),
    (UnsupportedModelError, Exit.USAGE),
    (ArgumentError, Exit.USAGE),
    (DTypeError, Exit.USAGE),
)


def exit_code_of(error: ReplayStateError) -> Exit | None:
    """The code for an error of ours; None for one that no user can cause, which is shown with its traceback."""
    if isinstance(error, ProtocolError):
        return None
    return next((code for kind, code in EXIT_CODES if isinstance(error, kind)), None)
