"""Workloads by name: what a step, and everything around it, costs.

| name | what is timed |
|---|---|
| decode | one token a row, windows half full: no row folds |
| verify-2, -4, -8, -16 | so many tokens a row (one and its drafts), windows half full: no row folds |
| fold-1, -2, -4 (fold), -8, -16 | the same widths with full windows: every row folds |
| steady-1, -2, -4 (steady), -8, -16 | the windows that rows pass through when every token is accepted, in equal parts |
| materialize | prefix states: whole windows of the rows into other slots |
| commit | the cursors of one model step, records of all GDN layers |
| adapter | `run_gdn_replayssm` with four tokens a row: the call that a serving engine makes |
| prefill | `gated_delta_rule` over whole prompts |

The window W is 16, and 32 for 16 tokens a row: with W = 16 each such step folds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..errors import ArgumentError
from .cases import Adapter, Case, Commit, Materialize, Prefill, Recurrence, Settings, Step

WIDTHS = (1, 2, 4, 8, 16)
RECURRENCE = "recurrence"
"""The baseline's name among the variants."""


@dataclass(frozen=True)
class Workload:
    """What is timed, whatever the sizes.

    Args:
        name: as on the command line.
        what: in words.
        op: of `replaystate.kernels`, whose backends are asked whether they can run it.
        parameters: written beside each result.
        make: the case on a backend.
        baseline: the recurrence that does the same without replay, or None (with full windows it would be timed twice).
    """

    name: str
    what: str
    op: str
    parameters: dict[str, int | str]
    make: Callable[[Settings, str], Case]
    baseline: Callable[[Settings], Case] | None = None


def window_of_width(width: int) -> int:
    """W for steps of so many tokens."""
    return max(16, 2 * width)


def steady_lengths(width: int, window: int, rows: int) -> list[int]:
    """Window lengths of the rows of a batch in which every token is accepted.

    >>> steady_lengths(4, 16, 6)
    [4, 8, 12, 16, 4, 8]
    """
    stages = list(range(width, window + 1, width))
    return [stages[i % len(stages)] for i in range(rows)]


def _step(name: str, width: int, filling: str) -> Workload:
    window = window_of_width(width)

    def lengths(rows: int) -> list[int]:
        if filling == "steady":
            return steady_lengths(width, window, rows)
        return [int(filling.removeprefix("P="))] * rows

    words = {"steady": "the mixture of windows of steady decoding", f"P={window}": "full windows, every row folds"}
    return Workload(
        name,
        f"{width} {'token' if width == 1 else 'tokens'} a row, {words.get(filling, 'windows half full, no row folds')}",
        "replay_step",
        {"T": width, "W": window, "filling": filling},
        lambda settings, backend: Step(settings, width, window, lengths(settings.rows), backend),
        None if filling == f"P={window}" else lambda settings: Recurrence(settings, width),
    )


def _all() -> dict[str, Workload]:
    found: list[Workload] = []
    for T in WIDTHS:
        found.append(_step("decode" if T == 1 else f"verify-{T}", T, f"P={window_of_width(T) // 2}"))
    for kind in ("fold", "steady"):
        for T in WIDTHS:
            filling = f"P={window_of_width(T)}" if kind == "fold" else "steady"
            found.append(_step(kind if T == 4 else f"{kind}-{T}", T, filling))
    found += [
        Workload(
            "materialize",
            "whole windows into other slots, one layer",
            "materialize",
            {"W": 16, "count": 16},
            lambda settings, backend: Materialize(settings, 16, backend),
        ),
        Workload(
            "commit",
            "cursors of one model step",
            "commit",
            {"T": 4, "W": 16},
            lambda settings, backend: Commit(settings, 4, 16, backend),
        ),
        Workload(
            "adapter",
            "run_gdn_replayssm, 4 tokens a row, windows half full",
            "adapter",
            {"T": 4, "W": 16, "filling": "P=8"},
            lambda settings, _: Adapter(settings, 4, [8] * settings.rows),
        ),
        Workload(
            "prefill",
            "whole prompts from nothing",
            "gated_delta_rule",
            {},
            lambda settings, backend: Prefill(settings, backend),
        ),
    ]
    return {workload.name: workload for workload in found}


WORKLOADS = _all()

GENERATE = "generate"
"""A whole model from a folder (`replaystate.bench.generate`); not among `WORKLOADS`, which need sizes only."""

DEFAULT = ("decode", "verify-4", "fold", "steady", "materialize", "commit", "adapter")


def workload(name: str) -> Workload:
    """The workload of that name.

    Raises:
        ArgumentError: there is none.

    >>> workload("verify-4").parameters
    {'T': 4, 'W': 16, 'filling': 'P=8'}
    """
    if name not in WORKLOADS:
        raise ArgumentError(f"workload: expected one of {', '.join(WORKLOADS)}, {GENERATE}, got {name!r}")
    return WORKLOADS[name]
