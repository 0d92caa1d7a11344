"""The simulation against the CPU engine: predicted and measured time of requests that were not used to calibrate it.

    python benchmarks/simulate_cpu.py --out benchmarks/results/simulate/cpu.json

The engine is `replaystate.transformers` on examples/tiny_gdn, one thread. Step times are measured at some batches and
prompt lengths; the simulation, fed with them, then predicts waves of requests at other batches and lengths, and a queue
of single requests with drafts (prompt lookup) whose acceptances come from other prompts.
"""

from __future__ import annotations

import argparse
import statistics
import time
from array import array
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, StoppingCriteria, StoppingCriteriaList

import replaystate.transformers
from replaystate.bench import Report
from replaystate.simulate import Fleet, MeasuredTimes, Workload, decode_steps, figures, simulate

MODEL = Path("examples/tiny_gdn/model")
DRAFTS = 3
REPEATS = 3


class Clock(StoppingCriteria):
    """Never stops; notes when how many tokens were there."""

    def __init__(self) -> None:
        self.marks: list[tuple[float, int]] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        """Note the time and the length."""
        self.marks.append((time.perf_counter(), input_ids.shape[1]))
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


class Engine:
    """The enabled model, and timed calls of it."""

    def __init__(self) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(MODEL)
        replaystate.transformers.enable(self.model)
        self.model.generation_config.eos_token_id = None
        texts = [path.read_text()[:2000] for path in sorted(Path("src/replaystate").glob("*.py"))]
        self.ids = [self.tokenizer(t, return_tensors="pt")["input_ids"] for t in texts if len(t) == 2000]

    def run(
        self, first: int, rows: int, prompt: int, new: int, drafts: int = 0
    ) -> tuple[float, list[tuple[float, int]]]:
        """Seconds until the last token, and (seconds, tokens of a row) after every step."""
        ids = torch.cat([self.ids[(first + i) % len(self.ids)][:, :prompt] for i in range(rows)])
        clock, options = Clock(), {"prompt_lookup_num_tokens": drafts} if drafts else {}
        begin = time.perf_counter()
        with torch.no_grad():
            self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=new,
                do_sample=False,
                stopping_criteria=StoppingCriteriaList([clock]),
                **options,
            )
        end = time.perf_counter() - begin
        return end, [(at - begin, count - prompt) for at, count in clock.marks]


def steps_of(marks: list[tuple[float, int]]) -> list[float]:
    """Durations of the steps after the first."""
    return [b[0] - a[0] for a, b in pairwise(marks)]


def predict(
    times: MeasuredTimes, rows: int, waves: int, prompt: int, new: int, accepted: list[float], seed: int
) -> float:
    """Seconds that the simulation gives `waves` times `rows` requests which all wait at the start."""
    count = rows * waves
    columns = (array("q", [value]) * count for value in (prompt, new, -1, 0))
    work = Workload("waves", array("d", [0.0]) * count, *columns)
    fleet = Fleet(1, rows, 10**6, len(accepted))
    return figures(work, fleet, simulate(work, fleet, times, decode_steps(work, accepted, seed)), 1).seconds


def main() -> None:
    """Calibrate, predict, measure, compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/simulate/cpu.json"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    engine, report = Engine(), Report("simulate_cpu")
    engine.run(0, 8, 64, 20)  # warm up
    engine.run(0, 1, 64, 20, DRAFTS)

    # Means, not medians: what is predicted are sums of times, stalls of the machine among them. Before and after.
    before = calibrate(engine)
    cases = ((2, 128, 80, 4), (6, 64, 120, 3), (8, 192, 48, 3), (1, 128, 100, 4))
    totals: dict[tuple[int, ...], list[float]] = {case: [] for case in cases}
    for _ in range(REPEATS):
        for case in cases:
            rows, prompt, new, waves = case
            totals[case].append(sum(engine.run(5 * wave, rows, prompt, new)[0] for wave in range(waves)))
    decode, prefill = (
        [(a[0], (a[1] + b[1]) / 2) for a, b in zip(*both, strict=True)]
        for both in zip(before, calibrate(engine), strict=True)
    )
    plain = MeasuredTimes(tuple(decode), tuple(prefill))
    report.add("calibration, no drafts", decode=decode, prefill=prefill)
    for rows, prompt, new, waves in cases:
        times = sorted(totals[rows, prompt, new, waves])
        measured, tokens = statistics.median(times), rows * waves * new
        predicted = predict(plain, rows, waves, prompt, new, [1.0], seed=0)
        report.add(
            "waves, no drafts",
            rows=rows,
            waves=waves,
            prompt_tokens=prompt,
            output_tokens=new,
            measured_tokens_per_s=tokens / measured,
            measured_range_tokens_per_s=[tokens / times[-1], tokens / times[0]],
            predicted_tokens_per_s=tokens / predicted,
        )
        compare(report, f"{rows} rows, prompt {prompt}, output {new}", measured, predicted)

    half = len(engine.ids) // 2
    runs = [engine.run(i, 1, 160, 96, DRAFTS)[1] for i in range(half)]
    kept = Counter(b[1] - a[1] for marks in runs for a, b in pairwise(marks))
    accepted = [kept[c] / sum(kept.values()) for c in range(1, DRAFTS + 2)]
    drafting = MeasuredTimes(((1.0, statistics.mean(s for m in runs for s in steps_of(m))),), tuple(prefill))
    report.add("calibration, drafts", accepted=accepted, step_s=drafting.decode[0][1], prompts=half)
    others = range(half, len(engine.ids))
    times = sorted(sum(engine.run(i, 1, 120, 120, DRAFTS)[0] for i in others) for _ in range(REPEATS))
    measured = statistics.median(times)
    draws = sorted(predict(drafting, 1, len(others), 120, 120, accepted, seed) for seed in range(21))
    report.add(
        "queue of single requests with drafts, other prompts",
        requests=len(others),
        measured_tokens_per_s=120 * len(others) / measured,
        measured_range_tokens_per_s=[120 * len(others) / times[-1], 120 * len(others) / times[0]],
        predicted_tokens_per_s=120 * len(others) / draws[10],
        predicted_range_tokens_per_s=[120 * len(others) / draws[-1], 120 * len(others) / draws[0]],
    )
    compare(report, "drafts, other prompts", measured, draws[10])
    report.write(options.out)


def calibrate(engine: Engine) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """(rows, mean seconds of a step) and (prompt tokens, mean seconds), three runs each."""
    decode, prefill = [], []
    for rows in (1, 4, 8):
        marks = [engine.run(i, rows, 96, 64)[1] for i in range(3)]
        decode.append((float(rows), statistics.mean(s for m in marks for s in steps_of(m))))
    for rows, prompt in ((1, 32), (1, 256), (8, 256)):
        firsts = [engine.run(i, rows, prompt, 2)[1][0][0] for i in range(3)]
        prefill.append((float(rows * prompt), statistics.mean(firsts)))
    return decode, prefill


def compare(report: Report, name: str, measured: float, predicted: float) -> None:
    """Record the difference; 15 % is the target."""
    off = predicted / measured - 1
    print(f"{name}: measured {measured:.3f} s, predicted {predicted:.3f} s ({off:+.1%})", flush=True)
    report.at_most(f"{name}: |predicted / measured - 1|", abs(off), 0.15)


if __name__ == "__main__":
    main()
