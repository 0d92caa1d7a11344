"""`bench run` times what is right, refuses what is wrong, and says what it could not run.

How this tests, in plain words: every workload runs on tiny layers on every usable backend; no time is asserted. Then
the torch backend is damaged, one small mistake at a time: the gate must see it and the workload must not be timed. The
bytes of the model are compared with sums written out here.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

from replaystate import backends
from replaystate.bench import StepBytes, pinned_threads
from replaystate.bench import run as run_module
from replaystate.bench.cases import Materialize, Recurrence, Settings, Step, model_bytes
from replaystate.bench.gate import relative_error
from replaystate.bench.workloads import WORKLOADS, steady_lengths, workload
from replaystate.errors import ArgumentError, BackendError
from replaystate.kernels import torch_backend

from .common import MIXED, SHAPE, WIDE, run_plan

Damage = Callable[[pytest.MonkeyPatch], None]


def settings(rows: int = 3) -> Settings:
    return Settings(SHAPE, 3, rows, *MIXED, torch.device("cpu"), 1 << 16, 20)


# --- what is right is timed ------------------------------------------------------------------------------------------


def test_every_workload_runs_on_every_usable_backend() -> None:
    """Largest share of a limit seen: 0.93 (cpu, fold-16, float16 state; its checkpoint is rounded once)."""
    usable = tuple(info.name for info in backends() if info.usable and info.name != "cuda")
    report = run_plan(*WORKLOADS, variants=(*usable, "recurrence"), dtypes=(MIXED, WIDE), repeats=1)
    assert report.checks == []
    ran = {(entry["name"], entry["what"]) for entry in report.results}
    for name, work in WORKLOADS.items():
        expected = {(name, backend) for backend in usable if name != "adapter"}
        assert expected <= ran
        assert ((name, "recurrence") in ran) == (work.baseline is not None)
    # The adapter chooses its own backend: the others are listed with that reason.
    assert {skip["name"] for skip in report.skipped} <= {"adapter"}
    for entry in report.results:
        assert entry["time"]["median_us"] > 0
        assert entry["gate"]["error"] <= entry["gate"]["limit"]
        assert entry["model_bytes"] == StepBytes(**entry["bytes"]).total
        speed = entry["model_bytes"] / entry["time"]["median_us"] / 1e3
        assert entry["of_copy"] == pytest.approx(speed / entry["copy_gb_per_s"], rel=2e-3)


def test_a_result_says_what_was_timed() -> None:
    (entry,) = run_plan("steady", batches=(5,)).results
    found = {key: entry[key] for key in "name what model tp H HV K V rows io state ring T W filling".split()}
    assert found == {
        "name": "steady", "what": "torch", "model": "tiny", "tp": 1, "H": 2, "HV": 4, "K": 32, "V": 16, "rows": 5,
        "io": "bfloat16", "state": "float16", "ring": "float16", "T": 4, "W": 16, "filling": "steady",
    }  # fmt: skip


def test_auto_is_the_best_backend_by_name() -> None:
    best = next(info.name for info in backends() if info.usable and info.name != "cuda")
    assert {entry["what"] for entry in run_plan("decode", variants=("auto",)).results} == {best}


def test_progress_counts_every_point() -> None:
    seen: list[tuple[int, int]] = []
    report = run_module.Report("bench")
    from .common import plan

    run_module.run(plan("decode", "commit"), report, lambda done, total, what: seen.append((done, total)))
    assert seen == [(0, 4), (1, 4), (2, 4), (3, 4), (4, 4)]


def test_the_same_seed_gives_the_same_values() -> None:
    def errors() -> list[float]:
        return [entry["gate"]["error"] for entry in run_plan("steady").results]

    assert errors() == errors()


# --- what is wrong is not --------------------------------------------------------------------------------------------


def _steps_of(change: Callable[[tuple[Any, ...]], None]) -> Damage:
    """A `replay_step` after which something of its tensors is changed."""

    def damage(monkeypatch: pytest.MonkeyPatch) -> None:
        right = torch_backend.replay_step

        def wrong(*arguments: Any) -> None:
            right(*arguments)
            change(arguments)

        monkeypatch.setattr(torch_backend, "replay_step", wrong)

    return damage


def _first_slot(arguments: tuple[Any, ...]) -> int:
    return int(arguments[14][0])


def outputs_two_percent_off(arguments: tuple[Any, ...]) -> None:
    arguments[13].mul_(1.02)


def one_output_of_one_head_lost(arguments: tuple[Any, ...]) -> None:
    arguments[13][0, 1] = 0.0


def nan_in_an_output(arguments: tuple[Any, ...]) -> None:
    arguments[13][-1, -1, 0] = float("nan")


def rings_not_written(arguments: tuple[Any, ...]) -> None:
    arguments[6][:] = 0.5


def checkpoint_not_folded(arguments: tuple[Any, ...]) -> None:
    arguments[5][_first_slot(arguments)] *= 1.1


def one_decay_lost(arguments: tuple[Any, ...]) -> None:
    slot = _first_slot(arguments)
    arguments[8][slot, 0] = 0.0


@pytest.mark.parametrize(
    "change",
    [
        outputs_two_percent_off, one_output_of_one_head_lost, nan_in_an_output, rings_not_written,
        checkpoint_not_folded, one_decay_lost,
    ],
    ids=lambda change: change.__name__,
)  # fmt: skip
@pytest.mark.parametrize("name", ["verify-4", "fold", "steady"])
def test_a_wrong_step_is_not_timed(change: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _steps_of(change)(monkeypatch)
    report = run_plan(name, dtypes=(WIDE,))
    assert report.results == []
    assert len(report.checks) == 2
    assert not any(check.met for check in report.checks)
    assert name in report.checks[0].name
    assert max(check.value for check in report.checks) <= 1e30  # JSON has no infinity


def wrong_key_head(monkeypatch: pytest.MonkeyPatch) -> None:
    def per_value_head(x: torch.Tensor, num_v_heads: int, dim: int) -> torch.Tensor:
        repeats = [1] * x.dim()
        repeats[dim] = num_v_heads // x.shape[dim]
        return x.repeat(repeats)

    monkeypatch.setattr(torch_backend, "_per_value_head", per_value_head)


def always_fold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_backend, "flush_min", lambda window, width: 0)


def keys_rounded_through_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    right = torch_backend._normalize
    monkeypatch.setattr(torch_backend, "_normalize", lambda x, scale=1.0: right(x, scale).bfloat16().float())


@pytest.mark.parametrize("damage", [wrong_key_head, always_fold, keys_rounded_through_bfloat16])
def test_a_damaged_backend_is_refused(damage: Damage, monkeypatch: pytest.MonkeyPatch) -> None:
    damage(monkeypatch)
    report = run_plan("verify-4", dtypes=((torch.float32, torch.float16, torch.float16),), batches=(5,))
    assert report.results == []
    assert [check.met for check in report.checks] == [False]


@pytest.mark.parametrize(
    ("name", "function"), [("materialize", "fold_slots"), ("commit", "commit"), ("prefill", "gated_delta_rule")]
)
def test_a_call_that_does_nothing_is_not_timed(name: str, function: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_backend, function, lambda *_: None)
    report = run_plan(name)
    assert report.results == []
    assert not any(check.met for check in report.checks)


def test_prefill_that_is_wrong_after_a_while_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = torch_backend.gated_delta_rule

    def wrong(*arguments: Any) -> None:
        right(*arguments)
        arguments[7][100:] = 0.0

    monkeypatch.setattr(torch_backend, "gated_delta_rule", wrong)
    assert run_plan("prefill").results == []


def test_a_wrong_backend_does_not_stop_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    _steps_of(outputs_two_percent_off)(monkeypatch)
    report = run_plan("decode", variants=("torch", "recurrence"))
    assert {entry["what"] for entry in report.results} == {"recurrence"}


def test_errors_that_are_no_numbers_are_infinite() -> None:
    truth = torch.ones(2, 3, dtype=torch.float64)
    assert relative_error(truth, truth) == 0
    assert relative_error(torch.full((2, 3), float("nan")), truth) == float("inf")


# --- what cannot run -------------------------------------------------------------------------------------------------


def test_a_backend_that_cannot_run_is_listed_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    report = run_plan("decode", variants=("cuda", "torch"))
    assert {entry["what"] for entry in report.results} == {"torch"}
    assert {skip["what"] for skip in report.skipped} == {"cuda"}
    assert all(skip["reason"] for skip in report.skipped)


def test_nothing_that_can_run_is_an_error() -> None:
    with pytest.raises(BackendError, match="nothing could run"):
        run_plan("decode", variants=("cuda",))


def test_what_needs_too_much_memory_is_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_module, "free_memory", lambda device: 200_000)
    report = run_plan("verify-16", variants=("torch", "recurrence"), batches=(8,))
    assert {entry["what"] for entry in report.results} == {"torch"}
    assert "GB are free" in report.skipped[0]["reason"]


def test_an_unknown_backend_and_an_unknown_workload() -> None:
    with pytest.raises(ArgumentError, match="backend"):
        run_plan("decode", variants=("abacus",))
    with pytest.raises(ArgumentError, match=r"expected one of decode, .*got 'encode'"):
        workload("encode")


# --- threads ---------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system does not confine processes")
def test_threads_are_pinned_and_let_go() -> None:
    threads, cpus = torch.get_num_threads(), os.sched_getaffinity(0)
    with pinned_threads(1):
        assert torch.get_num_threads() == 1
        assert os.sched_getaffinity(0) == {min(cpus)}
    assert (torch.get_num_threads(), os.sched_getaffinity(0)) == (threads, cpus)


def test_more_threads_than_cpus() -> None:
    with pytest.raises(ArgumentError, match=r"threads: expected 1\.\."), pinned_threads(10_000):
        pass


# --- bytes -----------------------------------------------------------------------------------------------------------


def test_bytes_of_a_mixed_batch_are_those_of_its_rows() -> None:
    state, row = 4 * 16 * 32 * 2, (4 * 16 + 2 * 32) * 2 + 4 * 4
    lengths = steady_lengths(4, 16, 5)  # 4, 8, 12, 16, 4: one row folds
    found = model_bytes(settings(5), 4, 16, lengths)
    io = 5 * 4 * (2 * 2 * 32 + 4 * 16 + 4 * 16 + 2 * 4) * 2
    assert found == StepBytes(5 * state, state, (4 + 8 + 12 + 16 + 4) * row, 5 * 4 * row, io)


def test_bytes_of_the_recurrence_count_a_copy_for_each_draft() -> None:
    found = Recurrence(settings(), 4).model
    state = 3 * 4 * 16 * 32 * 4
    assert (found.state_read, found.state_written, found.ring_read, found.ring_written) == (state, 4 * state, 0, 0)


def test_bytes_of_materialize_count_both_states_and_the_window() -> None:
    found = Materialize(settings(), 16, "torch").model
    state, row = 4 * 16 * 32 * 2, (4 * 16 + 2 * 32) * 2 + 4 * 4
    assert found == StepBytes(3 * state, 3 * state, 3 * 16 * row, 0, 0)


def test_slots_rotate_over_cold_memory() -> None:
    case = Step(settings(), 4, 16, [8] * 3, "torch")
    assert case.groups * case.model.total >= 1 << 16
    used = case.slots.flatten().tolist()
    assert sorted(used) == list(range(1, 3 * case.groups + 1))
