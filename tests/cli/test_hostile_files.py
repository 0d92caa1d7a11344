"""Files that break readers: each is one clear line and exit 2, in every command that reads such a file.

How this tests: the files are written by hand, and the commands run in this process.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from replaystate.cli.app import run

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
SIMULATE = ["simulate", "--model", "Qwen3.5-27B", "--device", "H200"]
PLAN = ["plan", "--model", "Qwen3.5-27B", "--device", "H200"]


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str], *words: str) -> None:
    assert run(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = err.strip().splitlines()
    assert all(word in line for word in words), line


@pytest.mark.parametrize("text", ["[" * 100_000, '{"results": [1' + "0" * 400 + "]}"])
def test_deep_and_huge_json(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "f.json"
    path.write_text(text)
    refused([*SIMULATE, "--trace", str(path)], capsys, "f.json")
    refused([*SIMULATE, "--rate", "1", "--step-times", str(path)], capsys, "f.json")
    refused(["plan", "--model", str(path), "--device", "H200"], capsys, "f.json")
    refused(["bench", "report", str(path), "-o", str(tmp_path / "page.html")], capsys, "f.json")


def test_a_path_that_is_too_long(capsys: pytest.CaptureFixture[str]) -> None:
    refused(["plan", "--model", "a" * 5000, "--device", "H200"], capsys, "model")


@pytest.mark.parametrize(
    "change",
    [{"batch": -1}, {"us": -1}, {"us": 0}, {"of_ceiling": -1}, {"model_bytes": -1}, {"us": "fast"}, {"name": ""}],
)
def test_rows_that_cannot_be_drawn(
    change: dict[str, object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = json.loads((RESULTS / "h200.json").read_text())
    document["results"][0].update(change)
    path = tmp_path / "m.json"
    path.write_text(json.dumps(document))
    refused(["bench", "report", str(path), "-o", str(tmp_path / "page.html")], capsys, "m.json")


@pytest.mark.parametrize("change", [{"checks": 5}, {"checks": [1]}, {"environment": 5}, {"command": 5}])
def test_parts_of_another_type(change: dict[str, object], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "m.json"
    path.write_text(json.dumps({**json.loads((RESULTS / "cpu.json").read_text()), **change}))
    refused(["bench", "report", str(path), "-o", str(tmp_path / "page.html")], capsys, "m.json")


def test_results_that_cannot_be_written_are_not_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.json"

    def refuse(self: Path, *_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    refused(["bench", "run", "decode", "--out", str(path), "--shape", "1,1,16,16", "--batch", "1"], capsys, "x.json")


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ([*PLAN, "--window", "1073741824"], "window"),
        ([*PLAN, "--window", "4096"], "window"),
        ([*PLAN, "--bandwidth-share", "1e-320"], "bandwidth_share"),
        ([*SIMULATE, "--rate", "1", "--requests", "5", "--bandwidth-share", "1e-320"], "bandwidth_share"),
        ([*SIMULATE, "--rate", "1", "--requests", "100000000000000"], "requests"),
        ([*SIMULATE, "--rate", "1", "--requests", "5", "--replicas", "100000000000"], "replicas"),
    ],
)
def test_numbers_that_no_machine_holds(arguments: list[str], word: str, capsys: pytest.CaptureFixture[str]) -> None:
    refused(arguments, capsys, word)


def test_an_output_of_a_trace_has_a_limit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"arrival_s": 0, "prompt_tokens": 3, "output_tokens": 20000000}\n')
    refused([*SIMULATE, "--trace", str(path)], capsys, "t.jsonl", "output_tokens")
