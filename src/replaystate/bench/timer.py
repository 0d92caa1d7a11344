"""Wall time of calls that are compared: run in turn, in one process, on buffers that the last calls did not touch."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

Candidate = Callable[[int], object] | tuple[Callable[[int], object], Callable[[int], object]]
"""run(round), or (prepare(round), run(round)) where only the second is timed."""


@dataclass(frozen=True)
class Timing:
    """Times of one candidate in microseconds.

    Args:
        median_us: the number to quote.
        iqr_us: distance between the quartiles: what the machine's other work did.
        min_us: the fastest.
        repeats: how many were timed.
    """

    median_us: float
    iqr_us: float
    min_us: float
    repeats: int


def measure(candidates: Mapping[str, Candidate], *, repeats: int = 20, warmup: int = 2) -> dict[str, Timing]:
    """Time every candidate `repeats` times, one of each in turn: a slow moment of the machine meets all of them.

    Args:
        candidates: each is called with the number of the round, from which it picks its slots and buffers: with
            enough of them (256 MB and more) nothing is in a cache when its turn comes again.
        repeats: timed rounds.
        warmup: rounds before them, not timed.

    >>> times = measure({"nothing": lambda i: None, "sum": (lambda i: None, lambda i: sum(range(9)))}, repeats=5)
    >>> sorted(times), times["sum"].repeats
    (['nothing', 'sum'], 5)
    """
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for number in range(warmup + repeats):
        for name, candidate in candidates.items():
            prepare, run = candidate if isinstance(candidate, tuple) else (None, candidate)
            if prepare is not None:
                prepare(number)
            begin = time.perf_counter()
            run(number)
            took = time.perf_counter() - begin
            if number >= warmup:
                seconds[name].append(took)
    return {name: timing(took) for name, took in seconds.items()}


def timing(seconds: list[float]) -> Timing:
    """Median, spread and minimum of some measurements."""
    low, _, high = statistics.quantiles(seconds, n=4) if len(seconds) > 1 else [seconds[0]] * 3
    return Timing(
        round(statistics.median(seconds) * 1e6, 1),
        round((high - low) * 1e6, 1),
        round(min(seconds) * 1e6, 1),
        len(seconds),
    )
