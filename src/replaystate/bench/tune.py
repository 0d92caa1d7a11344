"""Measure which split of a step over blocks is fastest on the GPU at hand, and keep it in a tuning table."""

from __future__ import annotations

import json
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from ..cache import ReplayCache
from ..errors import ArgumentError
from ..functional import replay_step
from ..kernels.cuda import compiler, fast
from ..shapes import GDNShape

SPLITS = ((1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 4, 1), (2, 2, 1), (1, 1, 2), (2, 1, 2))
"""What is tried: (value heads a block, blocks a head's values are shared by, tiles of 32 values a warp)."""

BATCHES = (1, 4, 8, 16, 32, 64, 128, 256)
_COLD_BYTES = 400 << 20  # several times the L2 of any GPU


def candidates(lanes: int, splits: bool, group: int) -> list[tuple[int, int, int]]:
    """The splits that fit a kind of step: heads of one key head share a block; a split step has one tile a warp."""
    return [s for s in SPLITS if group % s[0] == 0 and not (splits and (s[2] > 1 or (lanes == 16 and s[1] == 1)))]


def rows_of(times: dict[int, dict[tuple[int, int, int], float]]) -> list[list[int]]:
    """Table rows from microseconds by value heads in the batch and split; neighbours with one answer are one row.

    >>> rows_of({32: {(1, 1, 1): 5.0, (2, 1, 1): 6.0}, 64: {(1, 1, 1): 7.0, (2, 1, 1): 8.0}})
    [[-1, 1, 1, 1]]
    """
    best = [(heads, min(found, key=lambda split: (found[split], split))) for heads, found in sorted(times.items())]
    kept = [best[i] for i in range(len(best)) if i + 1 == len(best) or best[i][1] != best[i + 1][1]]
    return [[heads if i + 1 < len(kept) else -1, *split] for i, (heads, split) in enumerate(kept)]


def tune(
    shape: GDNShape,
    *,
    width: int,
    window: int,
    state_dtype: torch.dtype,
    ring_dtype: torch.dtype,
    io_dtype: torch.dtype,
    batches: Sequence[int] = BATCHES,
    note: Callable[[str], None] = lambda line: None,
) -> tuple[str, list[list[int]]]:
    """Time every split at every batch; returns the kind of step as a table names it, and its rows.

    Raises:
        ArgumentError: the tensor-core steps do not take this configuration, so there is nothing to tune.
    """
    if (shape.head_k_dim, shape.head_v_dim) != (128, 128) or window > 32 or width > 16:
        raise ArgumentError(
            f"nothing to tune for K={shape.head_k_dim}, V={shape.head_v_dim}, window {window}, width {width}: "
            "only the tensor-core kernels have a choice, for K = V = 128, windows up to 32 and widths up to 16"
        )
    splits = torch.float32 in (state_dtype, ring_dtype, io_dtype)
    lanes = fast.lanes_of(width)
    times: dict[int, dict[tuple[int, int, int], float]] = {}
    for batch in batches:
        found = {}
        for split in candidates(lanes, splits, shape.num_v_heads // shape.num_k_heads):
            with _forced(split):
                found[split] = _time(shape, batch, width, window, state_dtype, ring_dtype, io_dtype)
        times[batch * shape.num_v_heads] = found
        best = min(found, key=lambda split: found[split])
        note(f"batch {batch}: {found[best]:.2f} us with {best}, worst {max(found.values()):.2f} us")
    return f"{compiler.architecture(torch.cuda.current_device())}/{fast.kind_of(lanes, splits)}", rows_of(times)


def write(kind: str, rows: list[list[int]]) -> str:
    """Put the rows of a kind into the user's table, keeping what else it has; returns the file's name."""
    path = fast.user_table()
    table = json.loads(path.read_text()) if path.is_file() else {}
    table[kind] = rows
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    with os.fdopen(handle, "w") as file:
        file.write(json.dumps(table, indent=1) + "\n")
    os.replace(temporary, path)
    return str(path)


@contextmanager
def _forced(split: tuple[int, int, int]) -> Iterator[None]:
    fast.forced = split
    try:
        yield
    finally:
        fast.forced = None


def _time(
    shape: GDNShape, batch: int, width: int, window: int, state: torch.dtype, ring: torch.dtype, io: torch.dtype
) -> float:
    """Median microseconds of a step whose rows are at the windows that full acceptance passes through, L2 cold."""
    HV, bytes_a_row = shape.num_v_heads, shape.num_v_heads * 128 * 128 * state.itemsize
    groups = max(2, min(200, _COLD_BYTES // (batch * bytes_a_row)))
    cache = ReplayCache(
        shape, 1, groups * batch + 1, window=window, max_query_len=width, state_dtype=state, ring_dtype=ring,
        device="cuda",
    )  # fmt: skip
    cache.checkpoint(0).normal_()
    for x in cache.rings(0):
        x.uniform_(-0.1, 0.0)
    stages = range(width, window + 1, width)
    cache.num_committed[1:] = torch.tensor([stages[i % len(stages)] for i in range(batch)]).repeat(groups)
    slots = torch.arange(1, groups * batch + 1, dtype=torch.int32, device="cuda").view(groups, batch)
    bounds = torch.arange(0, batch * width + 1, width, dtype=torch.int32, device="cuda")
    qkv = torch.randn(batch * width, shape.qkv_dim, device="cuda").to(io)
    a, b = torch.randn(2, batch * width, HV, device="cuda").to(io)
    A_log, dt_bias = torch.zeros(2, HV, device="cuda")
    out = torch.empty(batch * width, HV, 128, dtype=io, device="cuda")

    def run() -> None:
        cache._step_records.zero_()
        for group in slots:
            replay_step(
                qkv, a, b, A_log, dt_bias, cache, 0, group, bounds, executed_width=width, out=out, backend="cuda"
            )

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = []
    for _ in range(7):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / groups)
    return float(statistics.median(times))
