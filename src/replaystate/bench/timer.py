"""Wall time of calls that are compared: run in turn, in one process, on buffers that the last calls did not touch."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import torch

from ..errors import ArgumentError

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


def measure_graphs(
    candidates: Mapping[str, tuple[Callable[[], object], int]], *, repeats: int = 20, warmup: int = 2
) -> dict[str, Timing]:
    """The same on a CUDA device: each candidate is captured in a CUDA graph, and the graphs are replayed in turn.

    Args:
        candidates: (run, launches): run makes `launches` calls, each on slots that the others do not touch; a time is
            that of a replay over `launches`. It has run before, so that nothing compiles under capture.
        repeats: timed replays of each.
        warmup: replays before them.
    """
    graphs: dict[str, torch.cuda.CUDAGraph] = {}
    for name, (run, _) in candidates.items():
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run()
        torch.cuda.current_stream().wait_stream(stream)
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name]):
            run()
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for number in range(warmup + repeats):
        for name, (_, launches) in candidates.items():
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graphs[name].replay()
            end.record()
            end.synchronize()
            if number >= warmup:
                seconds[name].append(begin.elapsed_time(end) / 1e3 / launches)
    return {name: timing(took) for name, took in seconds.items()}


@contextmanager
def pinned_threads(threads: int) -> Iterator[None]:
    """Run with so many torch threads, on as many CPUs and no others where the system can confine a process (Linux).

    Raises:
        ArgumentError: more threads than CPUs that this process may use.
    """
    before = torch.get_num_threads()
    cpus = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    if not 1 <= threads <= len(cpus):
        raise ArgumentError(f"threads: expected 1..{len(cpus)} (the CPUs of this process), got {threads}")
    torch.set_num_threads(threads)
    _confine(cpus[:threads])
    try:
        yield
    finally:
        _confine(cpus)
        torch.set_num_threads(before)


def _confine(cpus: list[int]) -> None:
    """All threads of this process: those that torch has started before are among them."""
    if hasattr(os, "sched_setaffinity"):
        for thread in os.listdir("/proc/self/task") if os.path.isdir("/proc/self/task") else ["0"]:
            with suppress(ProcessLookupError):  # it ended meanwhile
                os.sched_setaffinity(int(thread), cpus)


def timing(seconds: list[float]) -> Timing:
    """Median, spread and minimum of some measurements."""
    low, _, high = statistics.quantiles(seconds, n=4) if len(seconds) > 1 else [seconds[0]] * 3
    return Timing(
        round(statistics.median(seconds) * 1e6, 2),
        round((high - low) * 1e6, 2),
        round(min(seconds) * 1e6, 2),
        len(seconds),
    )
