"""export and load: a slot continues elsewhere bit for bit, and nothing else gets in or out.

In plain words: a slot is exported at every possible cursor, loaded into another slot of another cache full of NaN, and
both run on with the same tokens; outputs and states must have the same bits. Then the dict is damaged in every way, and
each time `load` must refuse it and change nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from replaystate import GDNShape, ReplayCache, SlotStatus
from replaystate.errors import ArgumentError, DeadSlotError, DTypeError, FormatError, ProtocolError, SlotError

from .helpers import (
    assert_same_bits,
    layer_tensors,
    nan_cache,
    put_window,
    raises_nothing_changed,
    run_step,
    snapshot,
)

Exported = dict[str, Tensor]


def pair(**options: Any) -> tuple[ReplayCache, ReplayCache]:
    """Two caches of two layers, full of NaN, with different numbers of slots."""
    return nan_cache(num_layers=2, num_slots=4, **options), nan_cache(num_layers=2, num_slots=6, **options)


def filled(count: int = 5, start: int = 30, **options: Any) -> ReplayCache:
    cache = nan_cache(num_layers=2, num_slots=4, **options)
    put_window(cache, 1, count, start)
    return cache


def assert_both_continue(first: ReplayCache, one: int, second: ReplayCache, other: int) -> None:
    """Two slots have the same state and go on with the same bits, over a fold and a wrap."""
    for layer in range(2):
        assert_same_bits(first.state(layer, [one]), second.state(layer, [other]))
    for turn in range(5):
        mine = run_step(first, [one], [8], width=8, accepted=[7 - turn], seed=turn)
        theirs = run_step(second, [other], [8], width=8, accepted=[7 - turn], seed=turn)
        for x, y in zip(mine, theirs, strict=True):
            assert_same_bits(x, y)
        for word in ("ring_start", "num_committed", "status"):
            assert int(getattr(first, word)[one]) == int(getattr(second, word)[other])
    for layer in range(2):
        assert_same_bits(first.state(layer, [one]), second.state(layer, [other]))


# Every window length, at an origin before, at and after the ring's end (29..31 wrap for the longer windows).
@pytest.mark.parametrize("count", range(17))
def test_bit_exact_continuation_at_every_cursor(count: int) -> None:
    source, target = pair()
    start = (29 + 7 * count) % 32
    put_window(source, 1, count, start)
    exported = source.export(1)
    target.status[5] = int(SlotStatus.DEAD)  # what was in the slot, dead or alive, is overwritten
    target.ring_start[5], target.num_committed[5] = 3, 9
    target.load(5, exported)
    assert (int(target.ring_start[5]), int(target.num_committed[5]), int(target.status[5])) == (start, count, 0)
    assert_both_continue(source, 1, target, 5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("ring", [torch.float32, torch.float16, torch.bfloat16])
def test_every_dtype(dtype: torch.dtype, ring: torch.dtype) -> None:
    source, target = pair(state_dtype=dtype, ring_dtype=ring)
    put_window(source, 2, 11, 27)
    target.load(1, source.export(2))
    assert_both_continue(source, 2, target, 1)


def test_a_nan_state_travels_with_its_payload() -> None:
    source, target = pair(state_dtype=torch.float32)
    put_window(source, 1, 2)
    source.checkpoint(0)[1].view(torch.int32)[0, 0, 0] = 0x7FC12345
    target.load(1, source.export(1))
    assert_same_bits(target.checkpoint(0)[1], source.checkpoint(0)[1])


def test_export_is_a_copy_and_changes_nothing() -> None:
    cache = filled()
    before = snapshot(cache)
    exported = cache.export(1)
    for x in exported.values():
        x.zero_()
    for name, value in snapshot(cache).items():
        if isinstance(value, Tensor):
            assert_same_bits(value, before[name], name)


def test_load_writes_one_slot_and_only_its_live_rows() -> None:
    source, target = filled(count=3, start=31), nan_cache(num_layers=2, num_slots=4)
    for layer in range(2):
        for x in layer_tensors(target, layer):
            x.fill_(7.0)
    target.load(2, source.export(1))
    for layer in range(2):
        state, *rings = layer_tensors(target, layer)
        assert state[[0, 1, 3]].eq(7).all()
        for ring in rings:
            assert ring[[0, 1, 3]].eq(7).all()
            assert ring[2, :, 2:31].eq(7).all()
            assert ring[2, :, [31, 0, 1]].ne(7).any()


def test_stale_rows_are_never_exported() -> None:
    # Rows outside the window may be another request's. All of them hold a mark here, which must not be in the dict.
    cache = filled(count=0)
    for ring in cache.rings(0):
        ring[1] = 4321.0
    put_window(cache, 1, 4, 30)
    run_step(cache, [1], [8], accepted=[2])  # six rejected rows behind the window
    exported = cache.export(1)
    for name, x in exported.items():
        assert not x.double().eq(4321.0).any(), name
        assert not x.isnan().any(), name
    assert exported["k"].shape == (2, 2, 6, 12)
    assert exported["u"].shape == (2, 4, 6, 10)
    assert exported["g"].shape == (2, 4, 6)


def test_the_dict_is_what_the_documentation_says() -> None:
    exported = filled(count=5, start=30).export(1)
    assert list(exported) == ["format_version", "sizes", "window", "ring_start", "status", "checkpoint", "k", "u", "g"]
    assert exported["sizes"].tolist() == [2, 2, 4, 12, 10]
    assert [int(exported[name]) for name in ("format_version", "window", "ring_start", "status")] == [1, 16, 30, 0]
    assert exported["checkpoint"].shape == (2, 4, 10, 12)
    assert (exported["checkpoint"].dtype, exported["g"].dtype) == (torch.float16, torch.float32)
    assert all(x.device.type == "cpu" and x.is_contiguous() for x in exported.values())


@pytest.mark.parametrize("count", [0, 6])
def test_safetensors_round_trip(count: int, tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    source, target = pair()
    put_window(source, 1, count, 29)
    exported = source.export(1)
    safetensors.save_file(exported, tmp_path / "slot.safetensors")
    read = safetensors.load_file(tmp_path / "slot.safetensors")
    assert read.keys() == exported.keys()
    for name, x in exported.items():
        assert_same_bits(read[name], x, name)
    target.load(3, read)
    assert_both_continue(source, 1, target, 3)


def test_status_travels() -> None:
    source, target = pair()
    put_window(source, 1, 2)
    source.status[1] = int(SlotStatus.RING_SATURATED | SlotStatus.ROW_CUT)
    target.load(1, source.export(1))
    assert int(target.status[1]) == int(SlotStatus.RING_SATURATED | SlotStatus.ROW_CUT)


def test_load_forgets_a_pending_step() -> None:
    cache = filled()
    exported = cache.export(1)
    run_step(cache, [1], [2])
    cache.load(1, exported)
    run_step(cache, [1], [2], accepted=1)


def test_caches_that_differ_only_in_width_exchange_slots() -> None:
    # max_query_len is not part of the format as long as the ring has room.
    source, target = filled(max_query_len=8), nan_cache(num_layers=2, num_slots=3, max_query_len=16)
    target.load(1, source.export(1))
    assert_both_continue(source, 1, target, 1)


# --- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["export", "load"])
@pytest.mark.parametrize(
    ("slot", "error", "match"),
    [
        (0, SlotError, "expected below num_slots=4 and not null_slot=0, got 0"),
        (4, SlotError, "expected below num_slots=4"),
        (-1, ArgumentError, "expected at least 0, got -1"),
        ([1], DTypeError, "expected an int, got list"),
        (True, DTypeError, "expected an int, got bool"),
        (torch.tensor(1), DTypeError, "expected an int, got Tensor"),
    ],
)
def test_not_a_real_slot(method: str, slot: Any, error: type[Exception], match: str) -> None:
    cache = filled()
    exported = cache.export(1)
    arguments = (slot, exported) if method == "load" else (slot,)
    raises_nothing_changed(cache, error, f"^{method}: slot: {match}", lambda: getattr(cache, method)(*arguments))


def test_a_pending_or_dead_slot_cannot_be_exported() -> None:
    cache = filled()
    run_step(cache, [1], [1])
    raises_nothing_changed(cache, ProtocolError, "^export: slot 1 has a step", lambda: cache.export(1))
    cache.commit([1], [1])
    cache.invalidate([1])
    raises_nothing_changed(cache, DeadSlotError, "^export: slot 1 is dead", lambda: cache.export(1))


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"shape": GDNShape(2, 4, 10, 12)}, r"sizes .*expected \[2, 2, 4, 10, 12\], got \[2, 2, 4, 12, 10\]"),
        ({"shape": GDNShape(1, 4, 12, 10)}, "sizes"),
        ({"num_layers": 1}, "sizes"),
        ({"window": 32}, "window: expected 32, got 16"),
        ({"window": 8}, "window: expected 8, got 16"),
        ({"state_dtype": torch.bfloat16}, r"checkpoint: expected \[2, 4, 10, 12\] bfloat16, got .* float16"),
        ({"ring_dtype": torch.float32}, r"k: expected \[2, 2, 5, 12\] float32, got .* float16"),
    ],
)
def test_another_shape_window_or_dtype_is_refused(options: dict[str, Any], match: str) -> None:
    target = nan_cache(**{"num_layers": 2, "num_slots": 3, **options})
    exported = filled().export(1)
    raises_nothing_changed(target, FormatError, f"^load: {match}", lambda: target.load(1, exported))


def without(name: str) -> Callable[[Exported], Any]:
    return lambda exported: {key: value for key, value in exported.items() if key != name}


def changed(name: str, change: Callable[[Tensor], Any]) -> Callable[[Exported], Any]:
    return lambda exported: {**exported, name: change(exported[name])}


NAMES = ["format_version", "sizes", "window", "ring_start", "status", "checkpoint", "k", "u", "g"]
NUMBERS = ["format_version", "window", "ring_start", "status"]
DAMAGES: list[tuple[str, Callable[[Exported], Any], str]] = [
    ("not a dict", lambda exported: list(exported), "exported: expected the dict that export gave, got list"),
    ("none", lambda _: None, "exported: expected the dict"),
    ("an unknown entry", lambda exported: {**exported, "v": exported["u"]}, r"exported: unknown entries \['v'\]"),
    ("a newer version", changed("format_version", lambda x: x + 1), "format_version: expected 1, got 2"),
    ("sizes of float", changed("sizes", lambda x: x.float()), "sizes"),
    ("sizes without a dim", changed("sizes", lambda x: x[0]), "sizes"),
    ("a start past the ring", changed("ring_start", lambda x: x + 2), "expected ring_start in 0..31 .* got 32"),
    ("a negative start", changed("ring_start", lambda x: x - 31), "expected ring_start"),
    ("a dead status", changed("status", lambda x: x + 4), "status: expected the bits of a living slot, got 4"),
    ("an unknown status", changed("status", lambda x: x + 2**20), "status"),
    ("a negative status", changed("status", lambda x: x - 8), "status"),
    ("g of no dim", changed("g", lambda x: x[0, 0, 0]), "g"),
    (
        "too many rows",
        lambda e: {**e, **{n: e[n].repeat_interleave(4, 2) for n in "kug"}},
        "expected .* at most 16 rows, got .* 20",
    ),
    ("fewer rows of g", changed("g", lambda x: x[..., :-1]), "k: expected"),
    ("fewer rows of u", changed("u", lambda x: x[:, :, :-1]), "u: expected"),
    ("checkpoint of another dtype", changed("checkpoint", lambda x: x.float()), "checkpoint: expected"),
    ("checkpoint without a layer", changed("checkpoint", lambda x: x[:1]), "checkpoint: expected"),
    ("checkpoint of no data", changed("checkpoint", lambda x: x.to("meta")), "checkpoint: expected"),
    ("u of no data", changed("u", lambda x: x.to("meta")), "u: expected"),
    *[(f"no {name}", without(name), f"exported: expected a tensor '{name}', got NoneType") for name in NAMES],
    *[(f"{name} of floats", changed(name, lambda x: x.float()), f"{name}: expected one int64") for name in NUMBERS],
    *[(f"two of {name}", changed(name, lambda x: x.repeat(2)), f"{name}: expected one int64") for name in NUMBERS],
]


@pytest.mark.parametrize(("damage", "match"), [d[1:] for d in DAMAGES], ids=[d[0] for d in DAMAGES])
def test_a_damaged_dict_is_refused(damage: Callable[[Exported], Any], match: str) -> None:
    exported, target = damage(filled().export(1)), nan_cache(num_layers=2, num_slots=3)
    target.reset([1, 2])
    raises_nothing_changed(target, FormatError, f"^load: {match}", lambda: target.load(1, exported))
