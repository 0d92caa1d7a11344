"""`replaystate bench compare`: two files of results, or this tree and another commit, and whether something got slower.

A time counts as changed when its median moved by more than the threshold and by more than the noise: the larger of the
mean of the two interquartile distances, and of the drift, by which times moved that do not depend on our kernels (the
copy, and the controls: plain torch, stock transformers). A machine that others use drifts by tens of percent between
two files. Against a commit both trees run in turn, several rounds each, and the spread between rounds is noise too.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from ..errors import ArgumentError, BackendError
from .results import CONTROLS, Result, ResultFile, read_results

EXTENSION = "_cpu_kernels.so"


@dataclass(frozen=True)
class Change:
    """One time in both.

    Args:
        title: what was timed.
        before_us, after_us: the medians.
        noise: relative to the time before; None where the files have neither spreads nor controls.
        verdict: "slower", "faster", "same", "noisy" (above the threshold, but not above the noise) or "control".
    """

    title: str
    before_us: float
    after_us: float
    noise: float | None
    verdict: str

    @property
    def change(self) -> float:
        """after / before - 1."""
        return self.after_us / self.before_us - 1


@dataclass(frozen=True)
class Comparison:
    """What `compare` found.

    Args:
        changes: one for each time that both have, the slowed ones first.
        only_before, only_after: titles of times that one of them lacks.
        same_device: whether both ran on the same kind of device.
        drift: by how much the machine changed, from the copy and the controls; None where the files have neither.
    """

    changes: tuple[Change, ...]
    only_before: tuple[str, ...]
    only_after: tuple[str, ...]
    same_device: bool
    drift: float | None

    @property
    def slower(self) -> tuple[Change, ...]:
        """What got slower."""
        return tuple(change for change in self.changes if change.verdict == "slower")


def compare(before: ResultFile, after: ResultFile, threshold: float = 0.05) -> Comparison:
    """Compare the times that both files have.

    Args:
        before, after: the files.
        threshold: relative change of a median that is worth reporting.

    Raises:
        ArgumentError: they have no time in common, or the threshold is negative.
    """
    if not 0 <= threshold < float("inf"):
        raise ArgumentError(f"compare: threshold: expected a share of 0 or more, got {threshold}")
    old, new = ({result.key: result for result in file.results} for file in (before, after))
    shared = [key for key in old if key in new]
    if not shared:
        raise ArgumentError(f"compare: {before.source} and {after.source} have no measurement in common")
    drift = _drift(before, after, [(old[key], new[key]) for key in shared if key[1] in CONTROLS])
    changes = [_change(old[key], new[key], threshold, drift) for key in shared]
    changes.sort(key=lambda change: -change.change)
    return Comparison(
        tuple(changes),
        tuple(old[key].title for key in old if key not in new),
        tuple(new[key].title for key in new if key not in old),
        before.device == after.device,
        drift,
    )


def _drift(before: ResultFile, after: ResultFile, controls: Sequence[tuple[Result, Result]]) -> float | None:
    """The larger of the copy's change and of the median change of the controls."""
    found = [statistics.median(new.us / old.us - 1 for old, new in controls)] if controls else []
    if before.copy_gb_per_s and after.copy_gb_per_s:
        found.append(before.copy_gb_per_s / after.copy_gb_per_s - 1)
    return max(found, key=abs, default=None)


def _change(before: Result, after: Result, threshold: float, drift: float | None) -> Change:
    spreads = [result.iqr_us for result in (before, after) if result.iqr_us is not None]
    sizes = [statistics.mean(spreads) / before.us] if spreads else []
    sizes += [] if drift is None else [abs(drift)]
    noise = max(sizes, default=None)
    change = after.us / before.us - 1
    # A slowdown by a factor and a speed-up by the same factor count alike.
    size = max(change, 1 / (1 + change) - 1)
    if before.variant in CONTROLS:
        verdict = "control"
    elif size <= threshold:
        verdict = "same"
    elif noise is not None and abs(change) <= noise:
        verdict = "noisy"
    else:
        verdict = "slower" if change > 0 else "faster"
    return Change(before.title, before.us, after.us, noise, verdict)


def pool(rounds: Sequence[ResultFile]) -> ResultFile:
    """One file from several runs of the same: the median of medians; the spread is at least that between the runs."""
    results = []
    for first in rounds[0].results:
        same = [result for file in rounds for result in file.results if result.key == first.key]
        medians = [result.us for result in same]
        within = statistics.mean(result.iqr_us or 0.0 for result in same)
        results.append(
            replace(first, us=statistics.median(medians), iqr_us=max(within, max(medians) - min(medians)))
        )  # fmt: skip
    return replace(rounds[0], results=tuple(results))


def run_against(
    ref: str, arguments: Sequence[str], rounds: int, note: Callable[[str], None]
) -> tuple[ResultFile, ResultFile]:
    """Run `replaystate bench run ARGUMENTS` in this tree and in a temporary worktree of `ref`, in turn.

    The worktree's C++ kernels are this tree's where their sources are the same, and are built otherwise.

    Args:
        ref: what git calls a commit.
        arguments: for `bench run`.
        rounds: runs of each tree.
        note: called with lines of progress.

    Returns:
        (results of ref, results of this tree), each pooled over the rounds.

    Raises:
        ArgumentError: not in a clone of replaystate, no such commit, or one without `bench run`; wrong arguments.
        BackendError: git or a compiler is missing, or a run failed.
    """
    root = Path(_git(["rev-parse", "--show-toplevel"], Path.cwd(), "expected to run in a clone of replaystate"))
    if not (root / "src" / "replaystate" / "bench").is_dir():
        raise ArgumentError("compare --ref: expected to run in a clone of replaystate")
    commit = _git(
        ["rev-parse", "--verify", "--quiet", "--end-of-options", f"{ref}^{{commit}}"],
        root,
        f"git knows no commit {ref!r}",
    )
    with tempfile.TemporaryDirectory(prefix="replaystate-bench-") as folder, _worktree(root, commit, folder) as tree:
        if not (tree / "src" / "replaystate" / "bench" / "run.py").is_file():
            raise ArgumentError(f"compare --ref: {ref} has no `replaystate bench run` yet")
        _provide_extension(root, tree, commit, note)
        files: dict[Path, list[ResultFile]] = {tree: [], root: []}
        for number in range(rounds):
            for side in (tree, root) if number % 2 == 0 else (root, tree):
                note(f"round {number + 1} of {rounds}: {ref if side == tree else 'this tree'}")
                out = Path(folder) / f"{'ref' if side == tree else 'here'}-{number}.json"
                _run(side, [*arguments, "--out", str(out)])
                files[side].append(read_results(out))
    return replace(pool(files[tree]), source=ref), replace(pool(files[root]), source="this tree")


@contextmanager
def _worktree(root: Path, commit: str, folder: str) -> Iterator[Path]:
    tree = Path(folder) / "tree"
    _git(["worktree", "add", "--quiet", "--detach", str(tree), commit], root, "git worktree failed")
    try:
        yield tree
    finally:
        subprocess.run(["git", "worktree", "remove", "--force", str(tree)], cwd=root, capture_output=True, check=False)


def _git(arguments: list[str], where: Path, complaint: str) -> str:
    try:
        done = subprocess.run(["git", *arguments], cwd=where, capture_output=True, text=True, check=False)
    except OSError as error:
        raise BackendError("compare --ref: git cannot be run") from error
    if done.returncode:
        words = done.stderr.split("\n")[0]
        raise ArgumentError(f"compare --ref: {complaint}" + (f": {words}" if words else ""))
    return done.stdout.strip()


def _provide_extension(root: Path, tree: Path, commit: str, note: Callable[[str], None]) -> None:
    """The C++ kernels for the worktree, where this tree has them."""
    built = root / "src" / "replaystate" / EXTENSION
    if not built.is_file():
        return
    same = subprocess.run(["git", "diff", "--quiet", commit, "--", "csrc", "setup.py"], cwd=root, check=False)
    if same.returncode == 0:
        shutil.copy2(built, tree / "src" / "replaystate" / EXTENSION)
        return
    note("building the C++ kernels of the other commit")
    command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BackendError(f"compare --ref: the C++ kernels of {commit[:12]} cannot be built: {_last(done.stderr)}")


def _run(tree: Path, arguments: Sequence[str]) -> None:
    """One run in a process of its own, on the sources of that tree."""
    environment = {**os.environ, "PYTHONPATH": str(tree / "src")}
    where = "import replaystate, sys; sys.exit(not replaystate.__file__.startswith(sys.argv[1]))"
    checked = subprocess.run([sys.executable, "-c", where, str(tree)], env=environment, cwd=tree, check=False)
    if checked.returncode:
        raise BackendError("compare --ref: Python does not take replaystate from the tree that is to be measured")
    command = [sys.executable, "-m", "replaystate", "bench", "run", *arguments]
    done = subprocess.run(command, env=environment, cwd=tree, capture_output=True, text=True, check=False)
    if done.returncode:
        kind = ArgumentError if done.returncode == 2 else BackendError
        raise kind(f"compare --ref: bench run failed with exit code {done.returncode}: {_last(done.stderr)}")


def _last(text: str) -> str:
    return next((line for line in reversed(text.splitlines()) if line.strip()), "no message").strip()
