"""Importing the package is cheap and touches nothing: no extra, no GPU, no log output.

In plain words: fresh Python processes import it and report what they found in `sys.modules`, what torch says about
CUDA, and how long it took after torch was there. The median of three must be below the 0.2 s that were promised.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import replaystate

SOURCE = Path(replaystate.__file__).resolve().parents[1]

PROBE = """
import json, sys, time
import torch
before = set(sys.modules)
begin = time.perf_counter()
cpu = time.process_time()
import replaystate
elapsed, cpu = time.perf_counter() - begin, time.process_time() - cpu
import logging
print(json.dumps({
    "new": sorted(set(sys.modules) - before),
    "all": sorted(sys.modules),
    "seconds": elapsed,
    "cpu_seconds": cpu,
    "cuda": torch.cuda.is_initialized(),
    "handlers": len(logging.getLogger("replaystate").handlers) + len(logging.getLogger().handlers),
    "threads": torch.get_num_threads(),
    "deterministic": torch.are_deterministic_algorithms_enabled(),
    "dtype": str(torch.get_default_dtype()),
}))
"""


def probe(code: str = PROBE) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env={"PYTHONPATH": str(SOURCE), "PATH": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert done.stderr == ""
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def test_import_is_cheap_and_touches_nothing() -> None:
    runs = [probe() for _ in range(3)]
    for run in runs:
        packages = {name.partition(".")[0] for name in run["new"]}
        optional = {
            "transformers", "tokenizers", "safetensors", "typer", "click", "rich", "numpy", "triton", "flashinfer",
            "vllm",
        }  # fmt: skip
        assert not packages & optional
        assert "replaystate.transformers" not in run["all"]
        assert "replaystate.cli" not in run["all"]
        assert run["cuda"] is False
        assert run["handlers"] == 0
        assert (run["threads"], run["deterministic"], run["dtype"]) == (1, False, "torch.float32")
    # CPU time, which a busy machine does not stretch. Observed 0.014 s.
    assert statistics.median(run["cpu_seconds"] for run in runs) < 0.2


def test_every_public_name_is_there() -> None:
    for name in replaystate.__all__:
        assert getattr(replaystate, name) is not None
    assert {
        "GDNShape", "ReplayCache", "replay_step", "gated_delta_rule", "gated_delta_rule_mtp_ucache_flush",
        "gdn_prefix_materialize", "backends", "to_k_major", "from_k_major", "convert_g_ring",
    } <= set(replaystate.__all__)  # fmt: skip
    assert replaystate.__version__


def test_the_package_is_typed() -> None:
    assert (SOURCE / "replaystate" / "py.typed").exists()
