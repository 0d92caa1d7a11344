"""What every command shares: the option --json, and errors as exit codes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from ..errors import ReplayStateError
from . import output
from .exits import Exit, exit_code_of
from .models import one_line

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]


@contextmanager
def errors_as_exit_codes() -> Iterator[None]:
    """One line on stderr and an exit code for what a user can do something about."""
    try:
        yield
    except KeyboardInterrupt:
        output.note("interrupted")
        raise typer.Exit(Exit.INTERRUPTED) from None
    except ReplayStateError as error:
        code = exit_code_of(error)
        if code is None:
            raise
        output.note(one_line(error, limit=1000))
        raise typer.Exit(code) from None
