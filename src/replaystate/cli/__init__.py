"""The command `replaystate`: `generate`, `doctor`, `verify` and `bench`.

Results go to stdout, progress and errors to stderr. With `--json`, stdout holds exactly one JSON document, or nothing
when the command could not run. Nothing is fetched from a network.

| exit code | meaning |
|---|---|
| 0 | done, and every check that was asked for passed |
| 1 | a check failed: other tokens than stock greedy, an error above its limit, a time that got slower |
| 2 | wrong usage: an option, a path, a model that is not supported |
| 3 | this machine lacks something: a package, a device, a backend |

Only this package imports typer and rich.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

COMMAND_PACKAGES = ("typer", "rich", "click")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: without the program's name; None: `sys.argv`.

    Returns:
        The exit code.
    """
    try:
        from .app import run
    except ImportError as error:
        package = (error.name or "").partition(".")[0]
        if package not in COMMAND_PACKAGES:
            raise
        sys.stderr.write(f"replaystate: the command needs {package}: pip install 'replaystate[cli]'\n")
        return 3
    return run(arguments)
