"""Time the CUDA kernels on the GPU at hand: CUDA-graph replay over rotating slots (cold L2), medians, microseconds.

    python benchmarks/gpu.py --sets main,t1 --json benchmarks/results/h200.json

One graph holds one launch for each group of slots; the groups together are several times the L2. A time is that of a
replay over the number of launches. Bytes by the model of `step_bytes`; the ceiling is an elementwise copy in this run.

Fillings of a batch: "P=n" all rows at window length n; "steady" the lengths that rows pass through when every token is
accepted, in equal parts (T = 4, W = 16: 4, 8, 12, 16, of which the last folds).
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from replaystate import GDNShape, ReplayCache, replay_step

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
COLD_BYTES = 400 << 20


@dataclass(frozen=True)
class Workload:
    """Sizes and dtypes of a step, and the batches to time."""

    name: str
    batches: tuple[int, ...]
    fillings: tuple[str, ...]
    width: int = 4
    window: int = 16
    heads: tuple[int, int] = (16, 32)
    dims: tuple[int, int] = (128, 128)
    io: torch.dtype = BF16
    state: torch.dtype = F16
    ring: torch.dtype = F16
    ragged: bool = False


SETS: dict[str, list[Workload]] = {
    "main": [Workload("T=4", (1, 8, 32, 64, 128, 256, 512), ("P=8", "P=16", "steady"))],
    "quick": [Workload("T=4", (1, 8, 32, 256), ("P=8", "P=16", "steady"))],
    "ragged": [Workload("T=4 ragged", (8, 32, 64, 256), ("steady",), ragged=True)],
    "t1": [Workload("T=1", (1, 8, 64, 256), ("steady",), width=1)],
    "t8": [Workload("T=8", (8, 64, 256), ("steady",), width=8)],
    "t16": [Workload("T=16 W=32", (8, 64, 256), ("steady",), width=16, window=32)],
    "fp32": [
        Workload("fp32 state, fp16 rings", (8, 64, 256), ("steady",), state=F32),
        Workload("fp32 state, fp32 rings", (8, 64, 256), ("steady",), state=F32, ring=F32),
        Workload("fp32 state, fp16 rings, T=1", (64, 256), ("steady",), state=F32, width=1),
    ],
    "bf16": [Workload("bf16 state", (8, 64, 256), ("P=8", "P=16", "steady"), state=BF16)],
    "hv64": [Workload("HV=64", (1, 32, 256), ("steady",), heads=(16, 64))],
    "shard": [Workload("H=4 HV=8", (8, 32, 256), ("steady",), heads=(4, 8))],
    "other": [
        Workload("K=V=64", (64, 256), ("steady",), dims=(64, 64)),
        Workload("K=V=256", (64,), ("steady",), dims=(256, 256)),
        Workload("K=V=128 fp32 io", (64, 256), ("steady",), io=F32),
    ],
}


@dataclass
class Result:
    """One timed case."""

    name: str
    batch: int
    filling: str
    us: float
    model_bytes: int
    gb_per_s: float
    of_ceiling: float
    extra: dict[str, Any] = field(default_factory=dict)


def median_us(run: Callable[[], None], launches: int, repeats: int = 9) -> float:
    """Median microseconds of one launch, from a graph that holds `launches` of them."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for _ in range(2):
        graph.replay()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / launches)
    return statistics.median(times)


def copy_ceiling() -> float:
    """GB/s of an elementwise copy, bytes read and written."""
    x = torch.randn(1 << 29, device="cuda")
    y = torch.empty_like(x)
    us = median_us(lambda: torch.mul(x, 1.5, out=y), 1)
    return 2 * x.numel() * 4 / us / 1e3


def window_lengths(work: Workload, filling: str, B: int) -> list[int]:
    """P of each row."""
    if filling.startswith("P="):
        return [int(filling[2:])] * B
    stages = list(range(work.width, work.window + 1, work.width))
    return [stages[i % len(stages)] for i in range(B)]


def step_bytes(work: Workload, lengths: list[int], tokens: list[int]) -> int:
    """What a step must move: the state (twice when folding), live ring rows, appended rows, inputs and outputs."""
    (H, HV), (K, V) = work.heads, work.dims
    size = {F16: 2, BF16: 2, F32: 4}
    rows = H * K + HV * V
    total = 0
    for P, n in zip(lengths, tokens, strict=True):
        folds = P >= work.window + 1 - work.width
        total += HV * V * K * size[work.state] * (2 if folds else 1)
        total += (P + n) * (rows * size[work.ring] + 4 * HV)
        total += n * (2 * H * K + 2 * HV * V + 2 * HV) * size[work.io]
    return total


def time_step(work: Workload, B: int, filling: str, ceiling: float) -> Result:
    """Time one case."""
    (H, HV), (K, V) = work.heads, work.dims
    shape = GDNShape(H, HV, K, V)
    lengths = window_lengths(work, filling, B)
    tokens = [work.width - (i % work.width if work.ragged else 0) for i in range(B)]
    model = step_bytes(work, lengths, tokens)
    groups = max(2, min(400, -(-COLD_BYTES // model)))
    cache = ReplayCache(
        shape, 1, groups * B + 1, window=work.window, max_query_len=work.width, state_dtype=work.state,
        ring_dtype=work.ring, device="cuda",
    )  # fmt: skip
    cache.checkpoint(0).normal_()
    u, k, g = cache.rings(0)
    u.normal_()
    k.normal_().mul_(K**-0.5)
    g.uniform_(-0.1, 0.0)
    cache.ring_start.random_(0, cache.ring_slots)
    cache.num_committed[1:] = torch.tensor(lengths, dtype=torch.int32).repeat(groups).cuda()
    order = torch.randperm(groups * B, device="cuda", generator=None).view(groups, B) + 1
    slots = torch.arange(groups * B, device="cuda").view(groups, B) + 1
    # Rows of a group lie apart in the pool, with the group's own mixture of window lengths.
    cache.num_committed[order.flatten()] = torch.tensor(lengths, dtype=torch.int32).repeat(groups).cuda()
    slots = order.int()
    bounds = torch.tensor([0, *tokens]).cumsum(0).int().cuda()
    N = sum(tokens)
    sets = min(groups, 8)
    qkv = torch.randn(sets, N, shape.qkv_dim, device="cuda").to(work.io)
    a, b = torch.randn(2, sets, N, HV, device="cuda").to(work.io)
    out = torch.empty(sets, N, HV, V, dtype=work.io, device="cuda")
    A_log, dt_bias = torch.full((HV,), -2.0, device="cuda"), torch.zeros(HV, device="cuda")

    def run() -> None:
        cache._step_records.zero_()
        for i in range(groups):
            j = i % sets
            replay_step(
                qkv[j], a[j], b[j], A_log, dt_bias, cache, 0, slots[i], bounds, executed_width=work.width, out=out[j],
                backend="cuda",
            )  # fmt: skip

    us = median_us(run, groups)
    assert not int(cache.status.max()), f"status {int(cache.status.max())}"
    speed = model / us / 1e3
    return Result(work.name, B, filling, round(us, 2), model, round(speed), round(speed / ceiling, 3))


def time_ops(ceiling: float) -> list[Result]:
    """commit and materialize, B rows of the model's sizes."""
    results = []
    shape = GDNShape(16, 32, 128, 128)
    for layers, B, count in ((48, 0, 0), (1, 8, 16), (1, 64, 16), (1, 256, 16), (1, 256, 0)):
        groups = 2 if B == 256 else 8
        cache = ReplayCache(shape, layers, 8 if layers > 1 else 2 * groups * B + 1, device="cuda")
        for layer in range(layers):
            cache.checkpoint(layer).normal_()
            for x in cache.rings(layer):
                x.uniform_(-0.1, 0.0)
        cache.num_committed.fill_(16)
        rows = torch.arange(groups * B, device="cuda").view(groups, B) + 1
        idle = torch.full((64,), -1, device="cuda")
        counts = torch.full((max(B, 64),), count, device="cuda")

        def run(cache: ReplayCache = cache, rows: torch.Tensor = rows, groups: int = groups, B: int = B) -> None:
            for i in range(groups):
                if B:
                    cache.materialize(rows[i], rows[i] + groups * B, counts[:B])  # noqa: B023
                else:
                    cache.materialize(idle, idle, counts[:64])  # noqa: B023

        us = median_us(run, groups)
        model = B * layers * (32 * 128 * 128 * 2 * 2 + count * (16 * 128 + 32 * 128) * 2 + 4 * 32 * count)
        results.append(
            Result(
                f"materialize, {layers} layers, count {count}",
                B,
                "",
                round(us, 2),
                model,
                round(model / us / 1e3),
                round(model / us / 1e3 / ceiling, 3),
            )
        )
        del cache
    for B in (8, 256):
        cache = ReplayCache(GDNShape(1, 1, 8, 8), 48, 513, device="cuda")
        where = torch.randperm(512, device="cuda")[:B].int() + 1
        accepted = torch.ones(B, dtype=torch.int32, device="cuda")

        def publish(cache: ReplayCache = cache, where: torch.Tensor = where, accepted: torch.Tensor = accepted) -> None:
            for _ in range(20):
                cache.commit(where, accepted)

        results.append(Result("commit, 48 layers", B, "", round(median_us(publish, 20), 2), 0, 0, 0.0))
    return results


def main() -> int:
    """Run the sets asked for, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sets", default="main,ragged,t1,t8,t16,fp32,bf16,hv64,shard,other,ops")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    ceiling = copy_ceiling()
    device = torch.cuda.get_device_name()
    print(f"{device}, torch {torch.__version__}, copy {ceiling:.0f} GB/s")
    results: list[Result] = []
    for name in options.sets.split(","):
        if name == "ops":
            results += time_ops(ceiling)
            continue
        for work in SETS[name]:
            for filling in work.fillings:
                for B in work.batches:
                    try:
                        results.append(time_step(work, B, filling, ceiling))
                    except Exception as error:
                        print(f"{work.name} B={B} {filling}: {error}")
    for r in results:
        speed = f"{r.gb_per_s:6d} GB/s {100 * r.of_ceiling:5.1f} %"
        print(f"{r.name:32s} B={r.batch:4d} {r.filling:7s} {r.us:8.2f} us {speed}")
    if options.json:
        record = {
            "command": " ".join(sys.argv), "device": device, "torch": torch.__version__,
            "python": platform.python_version(),
            "copy_gb_per_s": round(ceiling), "results": [asdict(r) for r in results],
        }  # fmt: skip
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
