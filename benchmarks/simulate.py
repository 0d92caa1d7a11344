"""Size of the simulation: 1,000 replicas and 1,000,000 requests on one core.

Time and peak memory, and that a small one repeats to the bit:

    python benchmarks/simulate.py --out benchmarks/results/simulate/size.json

One thread; nothing is simulated in parallel. The target is 10 minutes.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from pathlib import Path

import torch

from replaystate.bench import Report
from replaystate.models import MODELS
from replaystate.plan import DEVICES, Setting
from replaystate.simulate import Study, synthetic


def peak_bytes() -> int:
    """The most memory that this process has had."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--replicas", type=int, default=1000)
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--rate", type=float, default=8.0, help="requests a second and replica")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/simulate/size.json"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    report = Report("simulate")
    before = peak_bytes()
    for trace, model, device in (("chat", "Qwen3.5-27B", "H200"),):
        setting = Setting(MODELS[model], DEVICES[device], drafts=3, acceptance=(0.8, 0.7, 0.6))
        for replay in (True, False):
            begin = time.perf_counter()
            workload = synthetic(trace, options.requests, options.rate * options.replicas, seed=0)
            made = time.perf_counter()
            study = Study(workload, setting, replay)
            steps = study.steps()
            drawn = time.perf_counter()
            found = study.run(options.replicas, steps)
            ended = time.perf_counter()
            report.add(
                f"{trace}, {'replay' if replay else 'native'}",
                model=model,
                device=device,
                requests=options.requests,
                rate_per_replica=options.rate,
                workload_s=round(made - begin, 2),
                acceptances_s=round(drawn - made, 2),
                simulation_and_figures_s=round(ended - drawn, 2),
                total_s=round(ended - begin, 2),
                peak_bytes=peak_bytes(),
                peak_bytes_before=before,
                output_tokens=sum(workload.output_tokens),
                figures=found,
            )
            name = f"{options.replicas} replicas, {options.requests} requests, {'replay' if replay else 'native'}"
            report.at_most(f"{name} [s]", ended - begin, 600)
            print(f"{name}: {ended - begin:.1f} s, peak {peak_bytes() / 1e9:.2f} GB", flush=True)
    small = Study(synthetic("chat", 5000, 40.0, seed=1), setting, replay=True)
    report.at_least("two runs with one seed are equal", float(small.run(8) == small.run(8)), 1)
    report.write(options.out)


if __name__ == "__main__":
    main()
