"""`bench run` on the GPU: every workload passes its gate, is captured in a CUDA graph, and timed.

How this tests: small layers of the sizes that the tensor-core kernels take; no time is asserted beyond being positive.
"""

from __future__ import annotations

import pytest
import torch

from replaystate import GDNShape
from replaystate.bench.run import Layer
from replaystate.bench.workloads import WORKLOADS
from tests.bench.common import MIXED, WIDE, run_plan

pytestmark = pytest.mark.gpu


def test_every_workload_runs() -> None:
    """Largest share of a limit seen on an H200: 0.51 (steps of 1, 4 and 16 tokens)."""
    layers = (Layer("small", 1, GDNShape(2, 4, 128, 128), 3),)
    options = {"device": torch.device("cuda"), "layers": layers, "dtypes": (MIXED, WIDE), "cold_bytes": 1 << 24}
    report = run_plan(*WORKLOADS, variants=("cuda", "torch", "recurrence"), **options)
    assert report.checks == []
    ran = {(entry["name"], entry["what"]) for entry in report.results}
    for name, work in WORKLOADS.items():
        assert (name, "cuda") in ran
        assert ((name, "recurrence") in ran) == (work.baseline is not None)
    assert all(entry["time"]["median_us"] > 0 and entry["copy_gb_per_s"] > 100 for entry in report.results)
    assert {skip["what"] for skip in report.skipped} == {"torch"}
    reasons = {skip["reason"] for skip in report.skipped}
    assert any("cannot be captured" in reason for reason in reasons)
