"""The registry of backends: who is there, who runs a call, and what is said about the others.

In plain words: fake backends with fixed answers are put before the real one. Which of them is taken, what is logged,
and which error names which reason is then known beforehand.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch

import replaystate
from replaystate import BackendInfo, ReplayCache, backends, replay_step
from replaystate.errors import ArgumentError, BackendError
from replaystate.kernels import Call, registry, select, torch_backend

from .helpers import SHAPE, bounds_of, random_inputs

CALL = Call("replay_step", "cpu", torch.float32, torch.float16, torch.float16, SHAPE.sizes, 16, 8)


class Fake:
    """A backend that runs here or not, and supports a call or not."""

    def __init__(self, name: str, *, usable: str | None = None, supports: str | None = None) -> None:
        self.NAME = name
        self._usable, self._supports = usable, supports
        self.calls = 0

    def usable(self) -> str | None:
        return self._usable

    def supports(self, call: Call) -> str | None:
        return self._supports

    def replay_step(self, *arguments: object) -> None:
        self.calls += 1
        torch_backend.replay_step(*arguments)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def _forget_choices() -> Iterator[None]:
    """The registry remembers its choices. A test must neither find nor leave any."""
    for item in vars(registry).values():
        if hasattr(item, "cache_clear"):
            item.cache_clear()
    yield
    for item in vars(registry).values():
        if hasattr(item, "cache_clear"):
            item.cache_clear()


def prefer(monkeypatch: pytest.MonkeyPatch, *fakes: Fake) -> None:
    monkeypatch.setattr(registry, "BY_PREFERENCE", (*fakes, torch_backend))


def test_torch_is_there_and_usable() -> None:
    assert backends()[-1] == BackendInfo("torch", None)
    assert backends()[-1].usable
    assert replaystate.backends is backends
    assert torch_backend.supports(CALL) is None


def test_backends_lists_each_with_its_reason_best_first(monkeypatch: pytest.MonkeyPatch) -> None:
    prefer(monkeypatch, Fake("a", usable="no device"), Fake("b"))
    assert backends() == [BackendInfo("a", "no device"), BackendInfo("b", None), BackendInfo("torch", None)]
    assert [info.usable for info in backends()] == [False, True, True]


@pytest.mark.parametrize(
    ("first", "second", "taken"),
    [
        (Fake("a"), Fake("b"), "a"),
        (Fake("a", usable="no device"), Fake("b"), "b"),
        (Fake("a", supports="K too large"), Fake("b"), "b"),
        (Fake("a", usable="no device"), Fake("b", supports="T too large"), "torch"),
    ],
)
def test_auto_takes_the_first_that_can(monkeypatch: pytest.MonkeyPatch, first: Fake, second: Fake, taken: str) -> None:
    prefer(monkeypatch, first, second)
    assert select("auto", CALL).NAME == taken


def test_the_choice_and_what_was_passed_over_is_logged_once_per_kind_of_call(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    prefer(monkeypatch, Fake("a", usable="no device"), Fake("b", supports="K too large"))
    cache = ReplayCache(SHAPE, 1, 3)
    with caplog.at_level(logging.INFO, logger="replaystate"):
        for turn in range(4):
            replay_step(*random_inputs(tokens=2, seed=turn), cache, 0, [1 + turn % 2], bounds_of([2]))
            cache.commit([1 + turn % 2], [turn % 3])
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == len(set(messages)) == 2  # one for the step, one for the commit
    assert messages[0] == "replay_step on cpu runs on backend 'torch' (a: no device; b: K too large)"
    assert all(record.levelno == logging.INFO for record in caplog.records)


def test_a_backend_asked_for_runs_or_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    fakes = Fake("a", usable="no device"), Fake("b", supports="K too large"), Fake("c")
    prefer(monkeypatch, *fakes)
    for name, reason in (("a", "no device"), ("b", "K too large")):
        for _ in range(2):  # a refusal is not remembered as a choice
            with pytest.raises(
                BackendError, match=rf"^replay_step: backend '{name}' was asked for but cannot run this call: {reason}$"
            ):
                select(name, CALL)
    assert select("c", CALL) is fakes[2]
    assert select("torch", CALL) is torch_backend


def test_no_backend_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "BY_PREFERENCE", (Fake("a", usable="no device"), Fake("b", supports="K too large")))
    with pytest.raises(
        BackendError, match=r"^replay_step: no backend can run this call: a: no device; b: K too large$"
    ):
        select("auto", CALL)


def test_an_unknown_name(monkeypatch: pytest.MonkeyPatch) -> None:
    prefer(monkeypatch, Fake("a"))
    with pytest.raises(ArgumentError, match=r"^replay_step: backend: expected 'auto' or one of 'a', 'torch', got 'b'$"):
        select("b", CALL)


def test_calls_reach_the_backend_that_was_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Fake("a")
    prefer(monkeypatch, fake)
    cache = ReplayCache(SHAPE, 2, 2)
    x = random_inputs(tokens=1)
    replay_step(*x, cache, 0, [1], bounds_of([1]))
    assert fake.calls == 1
    replay_step(*x, cache, 1, [1], bounds_of([1]), backend="torch")
    assert fake.calls == 1


def test_a_backend_sees_the_call_it_is_asked_about(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Call] = []

    class Curious(Fake):
        def supports(self, call: Call) -> str | None:
            seen.append(call)
            return "only looking"

    prefer(monkeypatch, Curious("a"))
    cache = ReplayCache(SHAPE, 1, 2, window=8, max_query_len=4, state_dtype=torch.bfloat16)
    replay_step(*random_inputs(tokens=1, dtype=torch.bfloat16), cache, 0, [1], bounds_of([1]), executed_width=2)
    assert seen == [Call("replay_step", "cpu", torch.bfloat16, torch.bfloat16, torch.float16, SHAPE.sizes, 8, 2)]
