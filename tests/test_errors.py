"""Errors: one tree, with the ancestors that a stranger would catch, and messages that say where, what and why.

In plain words: every exception class of the package is a `ReplayStateError` and also a ValueError, TypeError,
ImportError or RuntimeError. Then a list of wrong calls, one for each public function and kind of mistake, is made, and
each message must begin with the function's name, name the argument, and say what was expected and what came.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import replaystate
from replaystate import GDNShape, ReplayCache, SlotStatus, errors, gated_delta_rule, replay_step, replayssm
from replaystate.errors import STATUS_CAUSES, ReplayStateError, explain_status

from .helpers import SHAPE, bounds_of, random_inputs, random_state

ANCESTORS = {
    "ArgumentError": ValueError,
    "ShapeError": ValueError,
    "DTypeError": TypeError,
    "SlotError": ValueError,
    "ProtocolError": ValueError,
    "DeadSlotError": ValueError,
    "CapacityError": RuntimeError,
    "SlotStatusError": RuntimeError,
    "FormatError": ValueError,
    "BackendError": RuntimeError,
    "GLayoutError": ValueError,
    "AuditError": RuntimeError,
    "MissingDependencyError": ImportError,
    "UnsupportedModelError": ValueError,
}


def exceptions_of(module: Any) -> dict[str, type[Exception]]:
    return {
        name: item
        for name, item in vars(module).items()
        if inspect.isclass(item) and issubclass(item, Exception) and item.__module__ == module.__name__
    }


def test_the_tree_is_complete() -> None:
    found = exceptions_of(errors)
    assert found.pop("ReplayStateError") is ReplayStateError
    assert found.keys() == ANCESTORS.keys()


@pytest.mark.parametrize("name", ANCESTORS)
def test_every_error_has_the_ancestor_that_a_stranger_catches(name: str) -> None:
    error = getattr(errors, name)
    assert issubclass(error, ReplayStateError)
    assert issubclass(error, ANCESTORS[name])


def test_a_dead_slot_is_a_broken_protocol() -> None:
    assert issubclass(errors.DeadSlotError, errors.ProtocolError)


def test_no_other_module_makes_exceptions_of_its_own() -> None:
    for info in pkgutil.iter_modules(replaystate.__path__, "replaystate."):
        if info.name in ("replaystate.errors", "replaystate.transformers", "replaystate.cli"):
            continue  # the last two need extras
        if info.name in ("replaystate._cpu_kernels", "replaystate.__main__"):
            continue  # a shared library, and a script
        assert not exceptions_of(importlib.import_module(info.name)), info.name


def test_every_status_bit_is_one_bit_and_has_a_cause() -> None:
    flags = [flag for flag in SlotStatus if flag]
    assert set(STATUS_CAUSES) == set(flags)
    assert len({int(flag) for flag in flags}) == len(flags)
    for flag in flags:
        assert int(flag).bit_count() == 1
        assert explain_status(flag).startswith(f"{flag.name}: ")


def test_several_bits_are_all_explained() -> None:
    text = explain_status(SlotStatus.DEAD | SlotStatus.ROW_CUT)
    assert "DEAD: " in text
    assert "ROW_CUT: " in text
    assert explain_status(0) == ""


# --- messages ------------------------------------------------------------------------------------------------------

X = random_inputs(tokens=3)
CACHE = ReplayCache(SHAPE, 2, 4)
ROWS = bounds_of([3])


def step(**change: Any) -> None:
    arguments: dict[str, Any] = {
        "mixed_qkv": X.mixed_qkv, "a": X.a, "b": X.b, "A_log": X.A_log, "dt_bias": X.dt_bias, "cache": CACHE,
        "layer": 0, "state_indices": [1], "query_start_loc": ROWS,
    }  # fmt: skip
    replay_step(**{**arguments, **change})


def prefill(**change: Any) -> None:
    arguments: dict[str, Any] = {
        "mixed_qkv": X.mixed_qkv, "a": X.a, "b": X.b, "A_log": X.A_log, "dt_bias": X.dt_bias, "shape": SHAPE,
        "query_start_loc": ROWS,
    }  # fmt: skip
    gated_delta_rule(**{**arguments, **change})


# (function named, argument named, what came, the call)
MESSAGES: list[tuple[str, str, str, Callable[[], Any]]] = [
    ("replay_step", "mixed_qkv", "float64", lambda: step(mixed_qkv=X.mixed_qkv.double())),
    ("replay_step", "mixed_qkv", "list", lambda: step(mixed_qkv=[1.0])),
    ("replay_step", "mixed_qkv", "87", lambda: step(mixed_qkv=X.mixed_qkv[:, :-1])),
    ("replay_step", "a", "[2, 4]", lambda: step(a=X.a[:2])),
    ("replay_step", "b", "int64", lambda: step(b=X.b.long())),
    ("replay_step", "A_log", "[3]", lambda: step(A_log=X.A_log[:3])),
    ("replay_step", "dt_bias", "[1, 4]", lambda: step(dt_bias=X.dt_bias[None])),
    ("replay_step", "cache", "dict", lambda: step(cache={})),
    ("replay_step", "executed_width", "9", lambda: step(executed_width=9)),
    ("replay_step", "executed_width", "0", lambda: step(executed_width=0)),
    ("replay_step", "executed_width", "bool", lambda: step(executed_width=True)),
    ("replay_step", "query_start_loc", "float32", lambda: step(query_start_loc=ROWS.float())),
    ("replay_step", "query_start_loc", "[3]", lambda: step(query_start_loc=bounds_of([1, 2]))),
    ("replay_step", "state_indices", "str", lambda: step(state_indices="1")),
    ("replay_step", "state_indices", "4", lambda: step(state_indices=[4])),
    ("replay_step", "out", "float16", lambda: step(out=torch.zeros(3, 4, 10, dtype=torch.float16))),
    ("replay_step", "out", "[2, 4, 10]", lambda: step(out=torch.zeros(2, 4, 10))),
    ("replay_step", "out", "list", lambda: step(out=[])),
    ("replay_step", "backend", "'tpu'", lambda: step(backend="tpu")),
    ("replay_step", "backend", "None", lambda: step(backend=None)),
    ("replay_step", "scale", "str", lambda: step(scale="k")),
    ("gated_delta_rule", "mixed_qkv", "float64", lambda: prefill(mixed_qkv=X.mixed_qkv.double())),
    ("gated_delta_rule", "a", "[2, 4]", lambda: prefill(a=X.a[:2])),
    ("gated_delta_rule", "shape", "tuple", lambda: prefill(shape=(2, 4, 12, 10))),
    ("gated_delta_rule", "query_start_loc", "4", lambda: prefill(query_start_loc=bounds_of([4]))),
    ("gated_delta_rule", "initial_state", "[2, 4, 10, 12]", lambda: prefill(initial_state=random_state(rows=2))),
    ("gated_delta_rule", "initial_state", "int", lambda: prefill(initial_state=0)),
    ("gated_delta_rule", "backend", "'tpu'", lambda: prefill(backend="tpu")),
    ("ReplayCache", "shape", "tuple", lambda: ReplayCache((2, 4, 12, 10), 1, 1)),  # type: ignore[arg-type]
    ("ReplayCache", "num_layers", "0", lambda: ReplayCache(SHAPE, 0, 1)),
    ("ReplayCache", "num_slots", "float", lambda: ReplayCache(SHAPE, 1, 1.0)),  # type: ignore[arg-type]
    ("ReplayCache", "window", "12", lambda: ReplayCache(SHAPE, 1, 1, window=12)),
    ("ReplayCache", "max_query_len", "17", lambda: ReplayCache(SHAPE, 1, 1, max_query_len=17)),
    ("ReplayCache", "state_dtype", "float64", lambda: ReplayCache(SHAPE, 1, 1, state_dtype=torch.float64)),
    ("ReplayCache", "ring_dtype", "int8", lambda: ReplayCache(SHAPE, 1, 1, ring_dtype=torch.int8)),
    ("ReplayCache", "null_slot", "1", lambda: ReplayCache(SHAPE, 1, 1, null_slot=1)),
    ("checkpoint", "layer", "2", lambda: CACHE.checkpoint(2)),
    ("rings", "layer", "-1", lambda: CACHE.rings(-1)),
    ("reset", "slots", "4", lambda: CACHE.reset([4])),
    ("invalidate", "slots", "float32", lambda: CACHE.invalidate(torch.tensor([1.0]))),
    ("check", "slots", "9", lambda: CACHE.check([9])),
    ("free", "slot", "0", lambda: CACHE.free(0)),
    ("state", "slots", "9", lambda: CACHE.state(0, [9])),
    ("load_state", "state", "[1, 4, 12, 10]", lambda: CACHE.load_state(0, [1], random_state().mT)),
    ("flush", "slots", "4", lambda: CACHE.flush([4])),
    ("commit", "num_accepted", "NoneType", lambda: CACHE.commit([1], None)),  # type: ignore[arg-type]
    ("crop", "num_tokens", "1", lambda: CACHE.crop([1], 1)),
    ("crop", "num_tokens", "2", lambda: CACHE.crop([1], [0, 0])),
    ("materialize", "count", "1", lambda: CACHE.materialize([1], [2], 1)),
    ("materialize", "dst_slots", "[1]", lambda: CACHE.materialize([1, 2], [3], 0)),
    ("fork", "dst", "1", lambda: CACHE.fork([1, 2], [3])),
    ("export", "slot", "4", lambda: CACHE.export(4)),
    ("load", "exported", "list", lambda: CACHE.load(1, [])),  # type: ignore[arg-type]
    ("GDNShape", "head_k_dim", "0", lambda: GDNShape(1, 1, 0, 1)),
    ("pack_replayssm_rows", "executed_width", "0", lambda: replayssm.pack_replayssm_rows(X.a, ROWS, 0)),
    ("convert_g_ring", "to", "'sum'", lambda: replaystate.convert_g_ring(X.a, ROWS, ROWS, to="sum")),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(
    ("function", "argument", "came", "call"), MESSAGES, ids=[f"{m[0]}-{m[1]}-{m[2]}" for m in MESSAGES]
)
def test_messages_name_function_argument_expected_and_got(
    function: str, argument: str, came: str, call: Callable[[], Any]
) -> None:
    CACHE.reset([1, 2, 3])  # should a wrong call before this one have been taken
    with pytest.raises(ReplayStateError) as caught:
        call()
    text = str(caught.value)
    assert re.match(rf"{function}: [^:]*\b{argument}\b", text), text
    assert "expected" in text
    assert re.search(rf"\bgot .*{re.escape(came)}", text), text
