"""`replaystate verify` passes what is right and catches what is wrong.

How this tests, in plain words: the torch backend passes. Then it is damaged, one small mistake at a time, each of a
kind that kernels have: verify must fail and name the op. A second, made-up backend shows that all usable ones are run,
that reasons reach the report, and that a crash is a failure of that backend and not of the command.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import replaystate
from replaystate import verify
from replaystate.errors import ArgumentError, BackendError
from replaystate.kernels import registry, torch_backend
from replaystate.verify import checks, report

from .conftest import Finished

Command = Callable[..., Finished]
FP32 = checks.Dtypes(torch.float32, torch.float32, torch.float32)
FP16 = checks.Dtypes(torch.float16, torch.float16, torch.float16)
MIXED = checks.Dtypes(torch.bfloat16, torch.float16, torch.float16)


@pytest.fixture
def few_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sets of dtypes, two widths and two shapes: what a mistake shows in those it shows in all."""
    monkeypatch.setattr(checks, "DTYPES", (FP32, MIXED))
    monkeypatch.setattr(checks, "WIDTHS", (1, 4))
    every = checks.cases
    monkeypatch.setattr(report, "cases", lambda: (pair for pair in every() if pair[0].shape in checks.SHAPES[:2]))


@pytest.fixture
def second_backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Registers, before "torch", a backend "other" that does what torch does but for what is given."""

    def register(**changes: Any) -> None:
        names = "usable supports replay_step ucache_flush fold_slots read_state commit gated_delta_rule".split()
        functions = {name: getattr(torch_backend, name) for name in names}
        other = SimpleNamespace(NAME="other", **{**functions, **changes})
        monkeypatch.setattr(registry, "BY_PREFERENCE", (other, torch_backend))
        registry._select.cache_clear()

    yield register
    registry._select.cache_clear()


def failing(found: verify.Report) -> set[str]:
    return {check.op for check in found.failures}


# --- the whole of it ---------------------------------------------------------------------------------------------


def test_every_usable_backend_passes_everywhere(command: Command) -> None:
    """Also the only full run: every dtype, width and shape. Largest share of a limit seen: 0.59 (torch), 0.50 (cpu)."""
    done = command("verify", "--json")
    found = done.json()
    assert (done.code, found["ok"], found["command"], found["devices"][0]) == (0, True, "verify", "cpu")
    assert found["skipped"] == []
    keys = "backend device op io_dtype state_dtype ring_dtype width quantity error limit ok place".split()
    assert all(list(check) == keys for check in found["checks"])
    assert all(check["ok"] and check["error"] <= check["limit"] for check in found["checks"])
    steps = {
        (c["io_dtype"], c["state_dtype"], c["ring_dtype"], c["width"])
        for c in found["checks"]
        if c["op"] == "replay_step"
    }
    assert len(steps) == len(checks.DTYPES) * len(checks.WIDTHS)
    usable = {info.name for info in replaystate.backends() if info.usable}
    assert {check["backend"] for check in found["checks"]} == usable
    assert {check["op"] for check in found["checks"]} == {case.op for case, _ in checks.cases()}
    worst = max(check["error"] / check["limit"] for check in found["checks"])
    assert worst < 0.75


@pytest.mark.usefixtures("few_cases")
def test_the_table(command: Command) -> None:
    done = command("verify", "--backend", "torch")
    assert done.code == 0
    lines = done.out.splitlines()
    assert lines[0] == "backend torch on cpu: error as % of its limit, by tokens per row"
    assert any(line.startswith("replay_step") and "bf16/f16/f16" in line for line in lines)
    assert any(line.startswith("gated_delta_rule") for line in lines)
    assert "0 above their limits" in lines[-1]
    assert max(map(len, lines)) <= 80
    assert "verify: backend torch on cpu: replay_step" in done.err


# --- wrong kernels -------------------------------------------------------------------------------------------------


def skip_one_ring_row(monkeypatch: pytest.MonkeyPatch) -> None:
    right = torch_backend._read_window

    def read(u: Tensor, k: Tensor, g: Tensor, slots: Tensor, start: Tensor, count: Tensor, window: int) -> Any:
        rows = right(u, k, g, slots, start, count, window)
        rows.u[..., 2] = 0.0
        return rows

    monkeypatch.setattr(torch_backend, "_read_window", read)


def read_one_row_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    right = torch_backend._read_window

    def read(u: Tensor, k: Tensor, g: Tensor, slots: Tensor, start: Tensor, count: Tensor, window: int) -> Any:
        return right(u, k, g, slots, start, (count + 1).clamp(max=window), window)

    monkeypatch.setattr(torch_backend, "_read_window", read)


def forget_to_wrap(monkeypatch: pytest.MonkeyPatch) -> None:
    right = torch_backend._read_window

    def read(u: Tensor, k: Tensor, g: Tensor, slots: Tensor, start: Tensor, count: Tensor, window: int) -> Any:
        return right(u, k, g, slots, start.clamp(max=k.shape[2] - window), count, window)

    monkeypatch.setattr(torch_backend, "_read_window", read)


def differences_of_cumulative_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    right = torch_backend._read_window

    def read(u: Tensor, k: Tensor, g: Tensor, slots: Tensor, start: Tensor, count: Tensor, window: int) -> Any:
        rows = right(u, k, g, slots, start, count, window)
        at = (start[:, None] + torch.arange(window)) % k.shape[2]
        live = torch.arange(window) < count[:, None]
        per_token = torch.where(live[..., None], g[slots[:, None], :, at], 0.0)
        sums = per_token.cumsum(1)
        return rows._replace(weight=torch.exp(sums[:, -1:] - sums).transpose(1, 2))

    monkeypatch.setattr(torch_backend, "_read_window", read)


def decay_after_the_prediction(monkeypatch: pytest.MonkeyPatch) -> None:
    """u = beta (v - S k) in place of beta (v - e^g S k)."""
    right = torch_backend._step

    def step(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor, rows: Any) -> tuple[Tensor, Tensor]:
        S = torch_backend._fold(S, rows)
        y, u = torch.zeros_like(v), torch.zeros_like(v)
        group = v.shape[2] // k.shape[2]
        for t in range(v.shape[1]):
            wide_k, wide_q = (x[:, t].repeat_interleave(group, dim=1) for x in (k, q))
            u[:, t] = beta[:, t, :, None] * (v[:, t] - torch_backend._apply(S, wide_k))
            S = torch.exp(g[:, t])[..., None, None] * S + u[:, t, :, :, None] * wide_k[:, :, None, :]
            y[:, t] = torch_backend._apply(S, wide_q)
        return y, u

    monkeypatch.setattr(torch_backend, "_step", step)
    assert right is not step


def wrong_key_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """Value heads take key heads in turn (hv mod H) in place of hv // (HV / H)."""

    def per_value_head(x: Tensor, num_v_heads: int, dim: int) -> Tensor:
        repeats = [1] * x.dim()
        repeats[dim] = num_v_heads // x.shape[dim]
        return x.repeat(repeats)

    monkeypatch.setattr(torch_backend, "_per_value_head", per_value_head)


def beta_in_16_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    right = torch_backend._gates

    def gates(a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
        g, beta = right(a, b, A_log, dt_bias)
        return g, beta.half().float()

    monkeypatch.setattr(torch_backend, "_gates", gates)


def no_epsilon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Zero keys (a padded lane, a token that must not move the state) become NaN."""
    monkeypatch.setattr(torch_backend, "QK_NORM_EPS", 0.0)


def always_fold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_backend, "flush_min", lambda window, width: 0)


def append_one_row_late(monkeypatch: pytest.MonkeyPatch) -> None:
    right = torch_backend._advance

    def advance(*arguments: Any) -> Tensor:
        k_ring = arguments[9]
        before = k_ring.clone()
        y = right(*arguments)
        written = (before.view(torch.uint8) != k_ring.view(torch.uint8)).any(-1)
        k_ring[written] = k_ring[written].roll(1, 0)
        return y

    monkeypatch.setattr(torch_backend, "_advance", advance)


DAMAGES: list[tuple[Callable[[pytest.MonkeyPatch], None], set[str]]] = [
    (skip_one_ring_row, {"replay_step", "ucache_flush", "materialize", "read_state"}),
    (read_one_row_too_many, {"replay_step", "ucache_flush", "materialize", "read_state"}),
    (forget_to_wrap, {"replay_step", "ucache_flush", "materialize", "read_state"}),
    (differences_of_cumulative_sums, {"replay_step", "ucache_flush", "materialize", "read_state"}),
    (decay_after_the_prediction, {"replay_step", "ucache_flush"}),
    (wrong_key_head, {"replay_step", "ucache_flush", "materialize", "read_state", "gated_delta_rule"}),
    (beta_in_16_bit, {"replay_step", "ucache_flush", "gated_delta_rule"}),
    (no_epsilon, {"replay_step", "ucache_flush", "gated_delta_rule"}),
    (always_fold, {"replay_step"}),
    (append_one_row_late, {"replay_step", "ucache_flush"}),
]


@pytest.mark.usefixtures("few_cases")
@pytest.mark.parametrize(("damage", "ops"), DAMAGES, ids=[damage.__name__ for damage, _ in DAMAGES])
def test_a_wrong_kernel_is_found(
    damage: Callable[[pytest.MonkeyPatch], None], ops: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    damage(monkeypatch)
    found = verify.verify("torch")
    assert failing(found) == ops
    assert not found.ok


def test_keys_rounded_through_bfloat16_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss that contract section 9 warns of: normalised keys of a float16 ring that were bfloat16 on the way."""
    monkeypatch.setattr(checks, "DTYPES", (FP16,))
    monkeypatch.setattr(checks, "WIDTHS", (4,))
    right = torch_backend._normalize
    monkeypatch.setattr(torch_backend, "_normalize", lambda x, scale=1.0: right(x, scale).bfloat16().float())
    assert {"replay_step", "ucache_flush"} <= failing(verify.verify("torch"))


@pytest.mark.usefixtures("few_cases")
def test_the_command_reports_a_wrong_kernel(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    skip_one_ring_row(monkeypatch)
    done = command("verify", "--backend", "torch")
    assert done.code == 1
    failures = [line for line in done.out.splitlines() if line.startswith("FAIL")]
    assert len(failures) == 8  # the worst of each op and set of dtypes
    assert failures[0].startswith("FAIL torch on cpu: replay_step f32/f32/f32 width ")
    assert "slot " in failures[0]
    assert "ring_start" in failures[0]
    assert max(len(line) for line in done.out.splitlines() if line not in failures) <= 80
    found = command("verify", "--backend", "torch", "--json")
    assert (found.code, found.json()["ok"]) == (1, False)


# --- which backends ------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("few_cases")
def test_every_usable_backend_is_run(command: Command, second_backend: Callable[..., None]) -> None:
    def writes_a_neighbour(*arguments: Any) -> None:
        torch_backend.replay_step(*arguments)
        arguments[5][6, 0, 0, 0] = 1.0  # state of a slot that was not named

    second_backend(replay_step=writes_a_neighbour)
    done = command("verify", "--json")
    found = done.json()
    assert done.code == 1
    assert {check["backend"] for check in found["checks"]} == {"other", "torch"}
    failed = [check for check in found["checks"] if not check["ok"]]
    assert {(check["backend"], check["op"]) for check in failed} == {("other", "replay_step")}
    assert all(check["error"] is None and "not named" in check["place"] for check in failed)


@pytest.mark.usefixtures("few_cases")
@pytest.mark.parametrize("error", [RuntimeError("illegal instruction"), BackendError("the kernel did not compile")])
def test_a_crash_is_a_failure_of_the_backend(second_backend: Callable[..., None], error: Exception) -> None:
    def crash(*_: Any) -> None:
        raise error

    second_backend(gated_delta_rule=crash)
    found = verify.verify("other")
    assert failing(found) == {"gated_delta_rule"}
    assert f"raised {type(error).__name__}: {error}" in found.failures[0].place
    assert found.skipped == ()


@pytest.mark.usefixtures("few_cases")
def test_the_number_of_threads_is_put_back() -> None:
    threads = torch.get_num_threads()
    seen: list[int] = []
    torch.set_num_threads(2)
    try:
        verify.verify("torch", progress=lambda _: seen.append(torch.get_num_threads()))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    assert set(seen) == {1}


@pytest.mark.usefixtures("few_cases")
def test_what_a_backend_cannot_run_is_skipped_with_its_reason(
    command: Command, second_backend: Callable[..., None]
) -> None:
    def supports(call: registry.Call) -> str | None:
        return None if call.state_dtype in (None, torch.float16) else "only float16 states"

    second_backend(supports=supports)
    done = command("verify", "--backend", "other")
    assert done.code == 0
    assert "not run: backend other on cpu, replay_step: only float16 states" in done.out
    assert "f32/f32/f32" not in "".join(line for line in done.out.splitlines() if line.startswith("replay_step"))
    skipped = command("verify", "--backend", "other", "--json").json()["skipped"]
    assert {skip["reason"] for skip in skipped} == {"only float16 states"}


@pytest.mark.usefixtures("few_cases")
def test_a_backend_that_runs_nothing_has_not_passed(command: Command, second_backend: Callable[..., None]) -> None:
    second_backend(supports=lambda call: "not on a Monday")
    done = command("verify", "--backend", "other")
    assert done.code == 3
    assert "no backend can run anything" in done.err


@pytest.mark.usefixtures("few_cases")
def test_a_backend_of_one_device_is_run_on_that_device(
    second_backend: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    second_backend(supports=lambda call: None if call.device_type == "cpu" else "CPU tensors only")
    monkeypatch.setattr(report, "_devices", lambda device: [torch.device("cpu"), torch.device("cuda")])
    found = verify.verify("other")
    assert found.ok
    assert found.devices == ("cpu", "cuda")
    assert {check.device for check in found.checks} == {"cpu"}
    assert found.skipped == ()
    second_backend(supports=lambda call: "no tensors at all")
    found = verify.verify("other")
    assert [(skip.device, skip.op, skip.reason) for skip in found.skipped] == [
        ("cpu", report.EVERY_OP, "no tensors at all"),
        ("cuda", report.EVERY_OP, "no tensors at all"),
    ]


def test_a_backend_that_is_not_usable(command: Command, second_backend: Callable[..., None]) -> None:
    second_backend(usable=lambda: "no such hardware")
    with pytest.raises(BackendError, match="no such hardware"):
        verify.verify("other")
    done = command("verify", "--backend", "other")
    assert (done.code, done.out) == (3, "")
    assert "no such hardware" in done.err


def test_an_unknown_backend(command: Command) -> None:
    with pytest.raises(ArgumentError, match=r"expected one of .*torch, got 'nonsense'"):
        verify.verify("nonsense")
    assert command("verify", "--backend", "nonsense").code == 2


def test_an_unknown_device(command: Command) -> None:
    with pytest.raises(ArgumentError, match="device"):
        verify.verify(device="nonsense")
    assert command("verify", "--device", "nonsense").code == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_a_device_that_is_not_there(command: Command) -> None:
    with pytest.raises(BackendError, match="cuda"):
        verify.verify(device="cuda")
    assert command("verify", "--device", "cuda").code == 3
