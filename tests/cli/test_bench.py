"""The contract of `replaystate bench`: one JSON document, exit codes, one line for bad input, no network, no colour.

How this tests, in plain words: tiny layers, two repeats; no time is asserted. conftest.py refuses every connection.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from replaystate.cli import bench as cli_bench
from replaystate.kernels import torch_backend

from .conftest import Finished

Command = Callable[..., Finished]
ROOT = Path(__file__).parents[2]
TINY = ("--shape", "2,4,32,16", "--batch", "1,3", "--repeats", "2", "--cold-mb", "0.1", "--threads", "1")
H200 = ROOT / "benchmarks" / "results" / "h200.json"


@pytest.mark.parametrize("arguments", [[], ["run"], ["compare"], ["report"]], ids=" ".join)
def test_help(command: Command, arguments: list[str]) -> None:
    done = command("bench", *arguments, "--help")
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith("Usage: replaystate bench")
    assert max(map(len, done.out.splitlines())) <= 80


# --- run -------------------------------------------------------------------------------------------------------------


def test_run_prints_one_document(command: Command, tmp_path: Path) -> None:
    out = tmp_path / "new" / "run.json"
    done = command("bench", "run", "decode", "commit", *TINY, "--json", "--out", out)
    found = done.json()
    assert done.code == 0
    assert (found["command"], found["schema"], found["benchmark"]) == ("bench run", 1, "bench")
    assert found["command_line"] == f"replaystate bench run decode commit {' '.join(TINY)} --json --out {out}"
    assert {entry["name"] for entry in found["results"]} == {"decode", "commit"}
    assert found["checks"] == []
    assert all(entry["gate"]["error"] <= entry["gate"]["limit"] for entry in found["results"])
    assert found["environment"]["threads"] == 1
    written = json.loads(out.read_text())
    assert written["results"] == found["results"]
    assert written["command"] == found["command_line"]
    assert "1 of 4: decode" in done.err


def test_run_prints_tables(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    done = command("bench", "run", "decode", *TINY, "--variants", "torch,recurrence")
    assert done.code == 0
    assert "decode, H=2 HV=4 K=32 V=16, io/state/ring bf16/f16/f16" in done.out
    assert "recurrence" in done.out
    assert "\x1b" not in done.out + done.err
    assert max(map(len, done.out.splitlines())) <= 80


def test_run_takes_models_and_shards(command: Command) -> None:
    words = ("--model", "qwen3.5-27b", "--tp", "4,8", "--batch", "1", "--repeats", "1", "--cold-mb", "0.1")
    found = command("bench", "run", "commit", *words, "--threads", "1", "--json").json()
    shards = [(entry["model"], entry["tp"], entry["H"], entry["HV"], entry["layers"]) for entry in found["results"]]
    assert shards == [("Qwen3.5-27B", 4, 4, 12, 48), ("Qwen3.5-27B", 8, 2, 6, 48)]


def test_run_with_a_config_file(command: Command) -> None:
    config = ROOT / "examples" / "tiny_gdn" / "model" / "config.json"
    sizes = json.loads(config.read_text())
    found = command("bench", "run", "commit", "--model", config, *TINY[2:], "--json").json()
    assert found["results"][0]["HV"] == sizes["linear_num_value_heads"]


def test_run_refuses_to_time_a_wrong_kernel(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    right = torch_backend.replay_step

    def wrong(*arguments: Any) -> None:
        right(*arguments)
        arguments[13].mul_(1.1)

    monkeypatch.setattr(torch_backend, "replay_step", wrong)
    done = command("bench", "run", "decode", *TINY, "--variants", "torch", "--json")
    assert done.code == 1
    assert done.json()["results"] == []
    assert not any(check["met"] for check in done.json()["checks"])
    assert "not timed, wrong: decode" in done.err
    assert "Traceback" not in done.err


def test_run_generate(command: Command, model_folder: Path) -> None:
    words = ("--model-folder", model_folder, "--new-tokens", "6", "--repeats", "1", "--warmup", "0", "--threads", "1")
    done = command("bench", "run", "generate", *words, "--json")
    found = done.json()
    assert done.code == 0
    variants = {entry["what"]: entry for entry in found["results"]}
    assert list(variants) == ["stock", "replay", "replay with prompt-lookup drafts"]
    assert all(entry["new_tokens"] == 6 and entry["tokens_per_s"] > 0 for entry in variants.values())
    assert [check["value"] for check in found["checks"]] == [0, 0]


def test_generate_with_other_tokens_is_not_timed(
    command: Command, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = torch_backend.replay_step

    def wrong(*arguments: Any) -> None:
        right(*arguments)
        arguments[13].mul_(-3)

    from replaystate.kernels import cpu_backend

    monkeypatch.setattr(torch_backend, "replay_step", wrong)
    monkeypatch.setattr(cpu_backend, "replay_step", wrong)
    words = ("--model-folder", model_folder, "--new-tokens", "12", "--repeats", "1", "--warmup", "0")
    done = command("bench", "run", "generate", *words, "--json")
    assert done.code == 1
    assert [entry["what"] for entry in done.json()["results"]] == ["stock"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["encode"], "expected workloads among decode"),
        (["generate"], "needs --model-folder"),
        (["generate", "--model-folder", "nowhere"], "does not exist"),
        (["decode", "--model", "GPT-2"], "GPT-2"),
        (["decode", "--model", ""], "at least one"),
        (["decode", "--tp", "3"], "divisor"),
        (["decode", "--tp", "0"], "--tp"),
        (["decode", "--shape", "2,4,32"], "--shape"),
        (["decode", "--shape", "2,3,32,32"], "multiple"),
        (["decode", "--shape", "2,4,x,32"], "--shape"),
        (["decode", "--batch", "1,-2"], "--batch"),
        (["decode", "--batch", ""], "--batch"),
        (["decode", "--batch", "1.5"], "--batch"),
        (["decode", "--io", "int8"], "--io"),
        (["decode", "--ring", "float64"], "--ring"),
        (["decode", "--ring", ""], "--ring"),
        (["decode", "--variants", ""], "--variants"),
        (["decode", "--variants", "abacus"], "abacus"),
        (["decode", "--device", "tpu9"], "--device"),
        (["decode", "--device", "meta"], "expected cpu or cuda"),
        (["decode", "--threads", "100000"], "threads"),
        (["decode", "--out", "README.md/x.json"], "cannot be made"),
        (["decode", "--out", "."], "is a folder"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_run_bad_input_is_one_line(
    command: Command, arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    done = command("bench", "run", *arguments)
    assert (done.code, done.out) == (2, "")
    lines = [line for line in done.err.splitlines() if " of " not in line or "expected" in line]
    assert len(lines) == 1
    assert message in lines[0]


@pytest.mark.parametrize("arguments", [["--repeats", "0"], ["--cold-mb", "0"], ["--threads", "-1"], ["--nonsense"]])
def test_run_wrong_usage(command: Command, arguments: list[str]) -> None:
    done = command("bench", "run", "decode", *arguments)
    assert (done.code, done.out) == (2, "")
    assert "Traceback" not in done.err


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_run_on_a_device_that_is_not_there(command: Command) -> None:
    assert command("bench", "run", "decode", "--device", "cuda").code == 3
    done = command("bench", "run", "decode", *TINY, "--variants", "cuda")
    assert (done.code, done.out) == (3, "")
    assert "nothing could run" in done.err


# --- compare ---------------------------------------------------------------------------------------------------------


def results_file(path: Path, **factors: float) -> Path:
    """What `bench run` writes, times multiplied by row count."""
    entries = [
        {
            "name": "decode", "what": "cpu", "rows": rows,
            "time": {"median_us": 100.0 * factors.get(f"rows{rows}", 1.0), "iqr_us": 1.0, "min_us": 90, "repeats": 20},
        }
        for rows in (1, 8)
    ]  # fmt: skip
    environment = {"cpu": "abacus", "threads": 1}
    document = {"schema": 1, "version": "0", "command": "", "environment": environment, "results": entries}
    path.write_text(json.dumps(document))
    return path


def test_compare(command: Command, tmp_path: Path) -> None:
    before, after = results_file(tmp_path / "a.json"), results_file(tmp_path / "b.json", rows8=1.3)
    done = command("bench", "compare", before, after)
    assert done.code == 1
    assert "+30.0%" in done.out
    assert "2 compared: 1 slower, 0 faster, 0 noisy" in done.out
    found = command("bench", "compare", before, after, "--json")
    assert (found.code, found.json()["ok"], found.err) == (1, False, "")
    assert [change["verdict"] for change in found.json()["changes"]] == ["slower", "same"]
    assert command("bench", "compare", before, after, "--threshold", "0.4").code == 0
    assert command("bench", "compare", after, before).code == 0
    assert command("bench", "compare", before, before, "--json").json()["ok"]


def test_compare_of_other_devices_says_so(command: Command, tmp_path: Path) -> None:
    before, after = results_file(tmp_path / "a.json"), results_file(tmp_path / "b.json")
    after.write_text(after.read_text().replace("abacus", "loom"))
    done = command("bench", "compare", before, after, "--json")
    assert "the devices differ: abacus, 1 thread; loom, 1 thread" in done.err
    assert not done.json()["same_device"]


@pytest.mark.parametrize(
    "arguments",
    [
        [], ["a.json"], ["a.json", "b.json", "c.json"], ["a.json", "none.json"], ["a.json", "text.json"],
        ["a.json", "other.json"], ["--ref", "no-such-commit"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_compare_bad_input_is_one_line(
    command: Command, arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a.json", "b.json", "c.json"):
        results_file(tmp_path / name)
    (tmp_path / "text.json").write_text("no results")
    (tmp_path / "other.json").write_text((tmp_path / "a.json").read_text().replace("decode", "encode"))
    done = command("bench", "compare", *arguments)
    assert (done.code, done.out) == (2, "")
    assert len(done.err.splitlines()) == 1


def test_compare_a_negative_threshold(command: Command) -> None:
    assert command("bench", "compare", "a.json", "b.json", "--threshold", "-1").code == 2


# --- report ----------------------------------------------------------------------------------------------------------


def test_report(command: Command, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    done = command("bench", "report", H200, results_file(tmp_path / "a.json"), "-o", page)
    assert (done.code, done.out) == (0, "")
    assert f"wrote {page}" in done.err
    assert page.read_text().startswith("<!doctype html>")
    found = command("bench", "report", H200, "-o", page, "--json")
    times = len(json.loads(H200.read_text())["results"])
    assert found.json() == {
        "command": "bench report", "page": str(page),
        "files": [{"file": "h200.json", "device": "NVIDIA H200", "times": times}],
    }  # fmt: skip


@pytest.mark.parametrize(
    "arguments",
    [["none.json", "-o", "x.html"], ["text.json", "-o", "x.html"], ["a.json", "-o", "text.json/x.html"],
     ["a.json", "-o", "."]],
    ids=" ".join,
)  # fmt: skip
def test_report_bad_input_is_one_line(
    command: Command, arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    results_file(tmp_path / "a.json")
    (tmp_path / "text.json").write_text("no results")
    done = command("bench", "report", *arguments)
    assert (done.code, done.out) == (2, "")
    assert len(done.err.splitlines()) == 1


def test_report_wrong_usage(command: Command) -> None:
    assert command("bench", "report").code == 2
    assert command("bench", "report", H200).code == 2


# --- the terminal ----------------------------------------------------------------------------------------------------


def test_progress_is_a_bar_on_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("FORCE_COLOR", "1")
    with cli_bench._progress() as progress:
        progress(1, 4, "decode")
        progress(2, 4, "fold")
    shown = capsys.readouterr()
    assert "fold" in shown.err
    assert "2/4" in shown.err
    assert shown.out == ""
