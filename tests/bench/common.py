"""A tiny layer, plans and files for the tests of `replaystate.bench`."""

from __future__ import annotations

from typing import Any

import torch

from replaystate import GDNShape
from replaystate.bench import Report
from replaystate.bench.run import Layer, Plan, run

SHAPE = GDNShape(2, 4, 32, 16)
MIXED = (torch.bfloat16, torch.float16, torch.float16)
WIDE = (torch.float32, torch.float32, torch.float32)


def plan(*workloads: str, **changes: Any) -> Plan:
    """Small enough for a second; a prompt longer than what the gate compares in one go."""
    options: dict[str, Any] = {
        "workloads": workloads,
        "layers": (Layer("tiny", 1, SHAPE, 3),),
        "batches": (1, 5),
        "dtypes": (MIXED,),
        "variants": ("torch",),
        "device": torch.device("cpu"),
        "threads": 1,
        "repeats": 2,
        "warmup": 0,
        "cold_bytes": 1 << 16,
        "prompt_tokens": 130,
    }
    return Plan(**{**options, **changes})


def run_plan(*workloads: str, **changes: Any) -> Report:
    report = Report("bench", command="replaystate bench run")
    run(plan(*workloads, **changes), report)
    return report
