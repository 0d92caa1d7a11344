"""The measuring tools: they call what they are given, in turn, and their files say what was measured where."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from replaystate import GDNShape
from replaystate.bench import Report, Timing, environment, measure, step_bytes


def test_candidates_run_in_turn_and_preparation_is_not_timed() -> None:
    calls: list[str] = []
    times = measure(
        {"a": lambda i: calls.append(f"a{i}"), "b": (lambda i: calls.append(f"p{i}"), lambda i: calls.append(f"b{i}"))},
        repeats=2,
        warmup=1,
    )
    assert calls == ["a0", "p0", "b0", "a1", "p1", "b1", "a2", "p2", "b2"]
    assert all(time.repeats == 2 and 0 <= time.min_us <= time.median_us for time in times.values())


def test_one_repeat_has_no_spread() -> None:
    time = measure({"a": lambda i: None}, repeats=1)["a"]
    assert time.iqr_us == 0


def test_bytes_of_a_step() -> None:
    shape = GDNShape(2, 4, 8, 16)
    options = {"state_dtype": torch.float16, "ring_dtype": torch.float16, "io_dtype": torch.bfloat16}
    kept = step_bytes(shape, rows=3, tokens=2, window_rows=5, folds=False, **options)  # type: ignore[arg-type]
    folded = step_bytes(shape, rows=3, tokens=2, window_rows=5, folds=True, **options)  # type: ignore[arg-type]
    assert kept.state_read == 3 * 4 * 16 * 8 * 2
    assert kept.ring_read == 3 * 5 * ((4 * 16 + 2 * 8) * 2 + 4 * 4)
    assert kept.read == kept.state_read + kept.ring_read
    assert (kept.state_written, folded.state_written) == (0, kept.state_read)
    assert folded.total - kept.total == kept.state_read


def test_a_report_tells_what_and_where(tmp_path: Path) -> None:
    report = Report("demo")
    report.add("step", rows=8, time=Timing(2.0, 0.5, 1.0, 20))
    report.at_least("fast", 2.5, 2.0)
    report.at_most("slow", 2.5, 2.0)
    report.write(tmp_path / "results" / "demo.json")
    found = json.loads((tmp_path / "results" / "demo.json").read_text())
    assert found["schema"] == 1
    assert found["results"] == [
        {"name": "step", "rows": 8, "time": {"median_us": 2.0, "iqr_us": 0.5, "min_us": 1.0, "repeats": 20}}
    ]
    assert [check["met"] for check in found["checks"]] == [True, False]
    assert found["environment"].keys() == environment().keys()
    assert found["command"].startswith("python ")


@pytest.mark.parametrize("key", ["cpu", "torch", "threads", "isa", "load"])
def test_the_environment_names(key: str) -> None:
    assert key in environment()
