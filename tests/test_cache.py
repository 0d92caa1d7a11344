"""ReplayCache: what every method does, what it leaves alone, and what it refuses.

In plain words: the life of a slot is played through each method on its own, against float64 states read from the pools.
Every `Raises` line of the class has a call here that must raise that very class, with a message that names the slot,
and afterwards every tensor of the cache must hold the same bits as before. Values "on a device" cannot be refused: for
them the host checks are switched off, and the call must clamp or skip and set the status bit that `check` reports.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from replaystate import GDNShape, ReplayCache, SlotStatus, from_k_major, gated_delta_rule, replay_step, to_k_major
from replaystate.errors import (
    ArgumentError,
    CapacityError,
    DeadSlotError,
    DTypeError,
    ProtocolError,
    ShapeError,
    SlotError,
    SlotStatusError,
)
from replaystate.kernels import torch_backend
from replaystate.shapes import step_record

from .helpers import (
    SHAPE,
    assert_close,
    assert_same_bits,
    assert_unchanged,
    bounds_of,
    canary_cache,
    device_semantics,
    fill_with_nan,
    layer_tensors,
    nan_cache,
    put_window,
    raises_nothing_changed,
    random_inputs,
    random_state,
    run_step,
    same_bits,
    snapshot,
    truth_state,
)

F32, F16, BF16, F64 = torch.float32, torch.float16, torch.bfloat16, torch.float64
NAN = float("nan")


def small(num_layers: int = 2, num_slots: int = 5, **options: Any) -> ReplayCache:
    """Slots full of NaN, 0 is the null slot; slot 1 has an empty window, 2 a short one, 3 a full one that wraps."""
    cache = nan_cache(num_layers=num_layers, num_slots=num_slots, **{"state_dtype": F32, **options})
    for slot, (count, start) in {1: (0, 0), 2: (5, 3), 3: (16, 25)}.items():
        put_window(cache, slot, count, start, seed=slot)
    return cache


def words(cache: ReplayCache, slot: int) -> tuple[int, int, int]:
    """(ring_start, num_committed, status) of a slot."""
    return int(cache.ring_start[slot]), int(cache.num_committed[slot]), int(cache.status[slot])


def slot_bits(cache: ReplayCache, slot: int) -> list[Tensor]:
    return [x[slot].clone() for layer in range(cache.num_layers) for x in layer_tensors(cache, layer)]


def assert_slot(cache: ReplayCache, slot: int, before: list[Tensor]) -> None:
    for now, then in zip(slot_bits(cache, slot), before, strict=True):
        assert_same_bits(now, then, f"slot {slot}")


# --- construction --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "ring", "expected"),
    [(F16, None, F16), (BF16, None, F16), (F32, None, F32), (F32, F16, F16), (F16, BF16, BF16)],
)
def test_ring_dtype_follows_the_state(state: torch.dtype, ring: torch.dtype | None, expected: torch.dtype) -> None:
    cache = ReplayCache(SHAPE, 1, 2, state_dtype=state, ring_dtype=ring)
    assert (cache.state_dtype, cache.ring_dtype) == (state, expected)
    assert [x.dtype for x in layer_tensors(cache, 0)] == [state, expected, expected, F32]


def test_a_new_cache_is_zero_and_has_the_documented_shapes() -> None:
    cache = ReplayCache(SHAPE, 3, 7, window=8, max_query_len=4)
    assert (cache.num_layers, cache.num_slots, cache.window, cache.ring_slots, cache.max_query_len) == (3, 7, 8, 16, 4)
    assert (cache.null_slot, cache.num_free, cache.state_dtype) == (0, 6, F16)
    for layer in range(3):
        state, u, k, g = layer_tensors(cache, layer)
        assert state.shape == (7, 4, 10, 12)
        assert u.shape == (7, 4, 16, 10)
        assert k.shape == (7, 2, 16, 12)
        assert g.shape == (7, 4, 16)
        assert not any(x.any() for x in (state, u, k, g))
    for word in (cache.ring_start, cache.num_committed, cache.status):
        assert (word.dtype, word.tolist()) == (torch.int32, [0] * 7)


def test_nbytes_counts_pools_and_words() -> None:
    cache = ReplayCache(SHAPE, 2, 3)  # fp16 state and rings, fp32 g: 4 heads of 10 x 12, 32 ring rows
    a_layer = 3 * (4 * 10 * 12 * 2 + 4 * 32 * 10 * 2 + 2 * 32 * 12 * 2 + 4 * 32 * 4)
    assert cache.nbytes == 2 * a_layer + 3 * 3 * 4 + 3 * 2 * 4
    assert f"nbytes={cache.nbytes}" in repr(cache)
    assert "float16" in repr(cache)


def test_checkpoint_and_rings_are_the_caches_own_tensors() -> None:
    cache = ReplayCache(SHAPE, 2, 3)
    for get in (cache.checkpoint, lambda layer: cache.rings(layer)[0]):
        assert get(1).data_ptr() == get(1).data_ptr()
        assert get(0).data_ptr() != get(1).data_ptr()


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"shape": (2, 4, 12, 10)}, DTypeError, "shape: expected a GDNShape, got tuple"),
        ({"num_layers": 0}, ArgumentError, "num_layers: expected at least 1, got 0"),
        ({"num_slots": 0}, ArgumentError, "num_slots: expected at least 1, got 0"),
        ({"num_slots": 2.0}, DTypeError, "num_slots: expected an int, got float"),
        ({"window": 12}, ArgumentError, "window: expected a power of two, got 12"),
        ({"max_query_len": 17}, ArgumentError, "max_query_len: expected at most window=16, got 17"),
        ({"state_dtype": F64}, DTypeError, "state_dtype: expected float32, float16 or bfloat16, got torch.float64"),
        ({"state_dtype": "fp16"}, DTypeError, "state_dtype: .* got fp16"),
        ({"ring_dtype": torch.int8}, DTypeError, "ring_dtype: .* got torch.int8"),
        ({"null_slot": 5}, ArgumentError, "null_slot: expected below num_slots=5 or None, got 5"),
        ({"null_slot": -1}, ArgumentError, "null_slot: expected at least 0, got -1"),
        ({"null_slot": 0.0}, DTypeError, "null_slot: expected an int, got float"),
    ],
)
def test_constructor_refusals(arguments: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=f"^ReplayCache: {match}") as caught:
        ReplayCache(**{"shape": SHAPE, "num_layers": 1, "num_slots": 5, **arguments})
    assert type(caught.value) is error


# --- from_tensors --------------------------------------------------------------------------------------------------


def parts(layers: int = 1, slots: int = 3, ring: int = 32) -> dict[str, Any]:
    H, HV, K, V = SHAPE.sizes
    return {
        "shape": SHAPE,
        "checkpoints": [torch.zeros(slots, HV, V, K, dtype=F16) for _ in range(layers)],
        "rings": [
            (
                torch.zeros(slots, HV, ring, V, dtype=BF16),
                torch.zeros(slots, H, ring, K, dtype=BF16),
                torch.zeros(slots, HV, ring),
            )
            for _ in range(layers)
        ],
        "ring_start": torch.zeros(slots, dtype=torch.int32),
        "num_committed": torch.zeros(slots, dtype=torch.int32),
        "window": 16,
        "max_query_len": 8,
        "null_slot": 0,
    }


def test_from_tensors_wraps_and_writes_nothing() -> None:
    given = parts(2)
    given["num_committed"][1] = 3
    cache = ReplayCache.from_tensors(**given)
    assert cache.ring_start is given["ring_start"]
    assert cache.num_committed is given["num_committed"]
    for layer in range(2):
        assert cache.checkpoint(layer) is given["checkpoints"][layer]
        assert all(mine is theirs for mine, theirs in zip(cache.rings(layer), given["rings"][layer], strict=True))
    assert (cache.state_dtype, cache.ring_dtype, cache.ring_slots) == (F16, BF16, 32)
    assert words(cache, 1) == (0, 3, 0)


def test_strided_pools_behave_as_dense_ones_and_gaps_keep_their_bits() -> None:
    strided, buffers = canary_cache(num_layers=2, num_slots=5)
    dense = ReplayCache(SHAPE, 2, 5, state_dtype=F32)
    gaps = []
    for cache in (strided, dense):
        cache.reset(range(1, 5))
        for turn in range(4):
            run_step(cache, [1, 3], [8, 5], accepted=[8, 4], seed=turn)
        cache.materialize([1], [2], 3)
        cache.fork([3], [4])
        cache.crop([4], 2)
        cache.flush([3])
        cache.load_state(1, [3], random_state())
        cache.load(2, cache.export(4))
    for layer in range(2):
        for slot in range(1, 5):
            assert_same_bits(strided.state(layer, [slot]), dense.state(layer, [slot]))
        pools = layer_tensors(strided, layer)
        for pool, buffer in zip(pools, buffers[4 * layer : 4 * layer + 4], strict=True):
            inside = torch.zeros_like(buffer, dtype=torch.bool)
            inside.as_strided(pool.shape, pool.stride(), pool.storage_offset()).fill_(True)
            gaps.append(buffer[~inside])
            assert pool[0].eq(12345.0).all()  # the null slot
    assert all(gap.numel() > 0 and gap.eq(12345.0).all() for gap in gaps)


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        (lambda p: {"shape": None}, DTypeError, "shape: expected a GDNShape"),
        (lambda p: {"checkpoints": []}, ShapeError, "expected one checkpoint .* got 0 and 1"),
        (lambda p: {"rings": []}, ShapeError, "expected one checkpoint .* got 1 and 0"),
        (lambda p: {"rings": [p["rings"][0][:2]]}, ShapeError, r"rings: expected \(u, k, g\)"),
        (lambda p: {"checkpoints": [None]}, DTypeError, r"checkpoints\[0\]: expected a tensor"),
        (lambda p: {"checkpoints": [p["checkpoints"][0].mT]}, ShapeError, r"checkpoints\[0\]: expected shape"),
        (lambda p: {"checkpoints": [p["checkpoints"][0].double()]}, DTypeError, r"checkpoints\[0\]: .* got float64"),
        (
            lambda p: {"checkpoints": [p["checkpoints"][0].mT.contiguous().mT]},
            ShapeError,
            r"checkpoints\[0\]: expected dense slots",
        ),
        (
            lambda p: {"checkpoints": [p["checkpoints"][0][:1].expand(3, 4, 10, 12)]},
            ShapeError,
            r"checkpoints\[0\]: expected slots that do not overlap",
        ),
        (lambda p: {"rings": [(p["rings"][0][1], *p["rings"][0][1:])]}, ShapeError, r"rings\[0\] u: expected shape"),
        (lambda p: {"rings": [(p["rings"][0][0].half(), *p["rings"][0][1:])]}, DTypeError, r"rings\[0\] u: "),
        (lambda p: {"rings": [(None, *p["rings"][0][1:])]}, DTypeError, r"rings\[0\] u: expected a tensor"),
        (
            lambda p: {"rings": [(*p["rings"][0][:2], p["rings"][0][2].half())]},
            DTypeError,
            r"rings\[0\] g: expected float32",
        ),
        (lambda p: {"ring_start": p["ring_start"].long()}, DTypeError, "ring_start: expected int32"),
        (lambda p: {"num_committed": p["num_committed"][:2]}, ShapeError, r"num_committed: expected shape \[3\]"),
        (lambda p: {"window": 32}, ArgumentError, r"ring slots: expected R >= W \+ T = 32 \+ 8 .* got 32"),
        (lambda p: {"window": 8, "max_query_len": 9}, ArgumentError, "max_query_len: expected at most window=8"),
        (lambda p: parts(ring=24), ArgumentError, "ring slots: expected a power of two, got 24"),
        (lambda p: {"null_slot": 3}, ArgumentError, "null_slot: expected below num_slots=3"),
        (lambda p: parts(slots=0), ArgumentError, "num_slots: expected at least 1, got 0"),
    ],
)
def test_from_tensors_refusals(
    change: Callable[[dict[str, Any]], dict[str, Any]], error: type[Exception], match: str
) -> None:
    given = parts()
    with pytest.raises(error, match=f"^ReplayCache.*: {match}") as caught:
        ReplayCache.from_tensors(**{**given, **change(given)})
    assert type(caught.value) is error


def test_layers_of_different_dtype_are_refused() -> None:
    given = parts(2)
    given["checkpoints"][1] = given["checkpoints"][1].float()
    with pytest.raises(DTypeError, match=r"checkpoints\[1\]: expected float16, got float32"):
        ReplayCache.from_tensors(**given)


# --- allocate, free, reset, invalidate, check ----------------------------------------------------------------------


@pytest.mark.parametrize(("null_slot", "order"), [(0, [1, 2, 3]), (2, [0, 1, 3]), (None, [0, 1, 2, 3])])
def test_allocate_gives_the_lowest_free_slot_and_never_the_null_slot(null_slot: int | None, order: list[int]) -> None:
    cache = ReplayCache(SHAPE, 1, 4, null_slot=null_slot)
    assert [cache.allocate() for _ in order] == order
    assert cache.num_free == 0
    raises_nothing_changed(cache, CapacityError, "^allocate: all 4 slots are taken", cache.allocate)
    cache.free(order[2])
    cache.free(order[0])
    assert cache.num_free == 2
    assert [cache.allocate(), cache.allocate()] == [order[0], order[2]]


def test_an_allocated_slot_starts_from_zero_whatever_was_in_it() -> None:
    cache = small()
    cache.status[1] = int(SlotStatus.DEAD)
    cache.ring_start[1] = cache.num_committed[1] = 9
    slot = cache.allocate()
    assert slot == 1
    assert words(cache, 1) == (0, 0, 0)
    for layer in range(2):
        assert cache.checkpoint(layer)[1].eq(0).all()
        assert cache.state(layer, [1]).eq(0).all()
        assert cache.rings(layer)[0][1].isnan().all()  # stale rows are never read, so they need not be written


@pytest.mark.parametrize(
    ("slot", "error", "match"),
    [
        (1, SlotError, "slot 1 is not allocated"),
        (0, SlotError, "slot: expected below num_slots=5 and not null_slot=0, got 0"),
        (5, SlotError, "slot: expected below num_slots=5"),
        (-1, ArgumentError, "slot: expected at least 0, got -1"),
        (1.0, DTypeError, "slot: expected an int, got float"),
        ([2], DTypeError, "slot: expected an int, got list"),
    ],
)
def test_free_refusals(slot: Any, error: type[Exception], match: str) -> None:
    cache = small()
    raises_nothing_changed(cache, error, f"^free: {match}", lambda: cache.free(slot))


def test_freed_twice_is_refused() -> None:
    cache = ReplayCache(SHAPE, 1, 3)
    slot = cache.allocate()
    cache.free(slot)
    raises_nothing_changed(cache, SlotError, f"^free: slot {slot} is not allocated", lambda: cache.free(slot))


@pytest.mark.parametrize(
    "slots", [3, [3], (3, 3), [0, 3, -1], torch.tensor([3]), torch.tensor([3, 0], dtype=torch.int32)]
)
def test_reset(slots: Any) -> None:
    cache = small()
    run_step(cache, [3], [2])  # a pending step is forgotten too
    cache.status[3] = int(SlotStatus.DEAD | SlotStatus.STATE_SATURATED)
    others = {slot: slot_bits(cache, slot) for slot in (0, 1, 2, 4)}
    rings = [x[3].clone() for x in cache.rings(0)]
    cache.reset(slots)
    assert words(cache, 3) == (0, 0, 0)
    assert cache.checkpoint(0)[3].eq(0).all()
    assert cache.checkpoint(1)[3].eq(0).all()
    for now, then in zip(cache.rings(0), rings, strict=True):
        assert_same_bits(now[3], then)
    for slot, before in others.items():
        assert_slot(cache, slot, before)
    run_step(cache, [3], [2], accepted=1)


def test_invalidate_marks_and_folds_nothing() -> None:
    cache = small()
    before = snapshot(cache)
    cache.invalidate([3, -1, 0, 2])
    assert cache.status.tolist() == [0, 0, 4, 4, 0]
    assert_unchanged(cache, before, but=["status"])


@pytest.mark.parametrize("method", ["reset", "invalidate", "check"])
def test_slots_that_cannot_be(method: str) -> None:
    cache = small()
    for bad, error in (([5], SlotError), (torch.tensor([9]), SlotError), ([1.0], DTypeError), ("1", DTypeError)):
        raises_nothing_changed(cache, error, f"^{method}: slots: ", lambda bad=bad: getattr(cache, method)(bad))


def test_check_names_each_slot_and_cause() -> None:
    cache = small()
    cache.check()
    cache.status[2] = int(SlotStatus.ROW_CUT | SlotStatus.RING_SATURATED)
    cache.status[4] = int(SlotStatus.DEAD)
    cache.check([1, 3, -1])
    cache.check(torch.tensor([1], dtype=torch.int32))
    with pytest.raises(SlotStatusError, match=r"^check: slot 2: RING_SATURATED: .*ROW_CUT: .*; slot 4: DEAD: "):
        cache.check()
    with pytest.raises(SlotStatusError, match=r"^check: slot 4: DEAD"):
        cache.check([4, 1])
    cache.reset([2, 4])
    cache.check()


# --- state, load_state ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [F32, F16, BF16])
def test_state_is_checkpoint_and_window_in_float32(dtype: torch.dtype) -> None:
    cache = small(state_dtype=dtype)
    before = snapshot(cache)
    for layer in range(2):
        states = cache.state(layer, [3, 1, 2])
        assert states.dtype == F32
        for row, slot in enumerate([3, 1, 2]):
            assert_close(states[row], truth_state(cache, layer, slot), 5e-7)
    assert_unchanged(cache, before)
    states.zero_()  # a fresh tensor
    assert_unchanged(cache, before)


def test_state_of_padding_is_zero_and_slots_may_repeat() -> None:
    cache = small()
    states = cache.state(0, [0, 2, -7, 2])
    assert states[0].eq(0).all()
    assert states[2].eq(0).all()
    assert_same_bits(states[1], states[3])
    assert cache.state(0, []).shape == (0, 4, 10, 12)
    assert cache.state(0, 2).shape == (1, 4, 10, 12)


@pytest.mark.parametrize("of", [F64, F32, F16, BF16])
@pytest.mark.parametrize("into", [F32, F16, BF16])
def test_load_state_writes_one_layers_checkpoints(of: torch.dtype, into: torch.dtype) -> None:
    cache = small(state_dtype=into, num_slots=6)
    cache.reset([4, 5])
    other_layer, others = cache.checkpoint(0).clone(), [slot_bits(cache, slot) for slot in (0, 2, 3)]
    state = random_state(rows=4, dtype=of)
    cache.load_state(1, [5, 0, -1, 4], state)
    assert_same_bits(cache.checkpoint(1)[5], state[0].to(into))
    assert_same_bits(cache.checkpoint(1)[4], state[3].to(into))
    assert_same_bits(cache.checkpoint(0), other_layer)
    for slot, before in zip((0, 2, 3), others, strict=True):
        assert_slot(cache, slot, before)
    assert cache.status.eq(0).all()


@pytest.mark.parametrize("of", [F64, F32, BF16])
def test_load_state_saturates_and_flags(of: torch.dtype) -> None:
    cache = small(num_slots=6, state_dtype=F16)
    cache.reset([4, 5])
    state = random_state(rows=3, dtype=of)
    state[0, 0, 0, :2] = torch.tensor([1e5, -1e5], dtype=of)
    state[1, 0, 0, 0] = NAN
    cache.load_state(0, [4, 1, 5], state)
    assert cache.checkpoint(0)[4, 0, 0, :2].tolist() == [65504, -65504]
    assert cache.checkpoint(0)[1, 0, 0, 0].isnan()
    assert cache.status.tolist() == [0, 0, 0, 0, int(SlotStatus.STATE_SATURATED), 0]


def test_load_state_takes_a_state_that_requires_grad_or_is_strided() -> None:
    cache = small()
    state = random_state(rows=1).mT.contiguous().mT.requires_grad_()
    cache.load_state(0, [1], state)
    assert_same_bits(cache.checkpoint(0)[1], state[0].detach())
    assert not cache.checkpoint(0).requires_grad


def test_load_state_after_flush_continues_a_live_slot() -> None:
    cache = small()
    cache.flush([3])
    cache.load_state(0, [3], random_state())
    assert_close(cache.state(0, [3]), random_state(), 1e-7)


@pytest.mark.parametrize(
    ("layer", "slots", "state", "error", "match"),
    [
        (0, [2], random_state(), ProtocolError, "slot 2 has a live window of 5 tokens"),
        (0, [1, 2], random_state(rows=2), ProtocolError, "slot 2 has a live window"),
        (0, [1, 1], random_state(rows=2), SlotError, "slots: slot 1 is named twice"),
        (0, [5], random_state(), SlotError, "slots: expected slots below num_slots=5, got 5"),
        (0, [1], random_state(rows=2), ShapeError, r"state: expected shape \[1, 4, 10, 12\], got \[2, 4, 10, 12\]"),
        (0, [1], random_state().mT, ShapeError, "state: expected shape"),
        (0, [1], random_state().long(), DTypeError, "state: expected float32"),
        (0, [1], [[1.0]], DTypeError, "state: expected a tensor, got list"),
        (2, [1], random_state(), ArgumentError, r"layer: expected 0..1, got 2"),
    ],
)
def test_load_state_refusals(layer: int, slots: Any, state: Any, error: type[Exception], match: str) -> None:
    cache = small()
    raises_nothing_changed(cache, error, f"^load_state: {match}", lambda: cache.load_state(layer, slots, state))


@pytest.mark.parametrize("method", ["state", "checkpoint", "rings"])
@pytest.mark.parametrize(("layer", "error"), [(2, ArgumentError), (-1, ArgumentError), ("0", DTypeError)])
def test_layers_that_do_not_exist(method: str, layer: Any, error: type[Exception]) -> None:
    cache = small()
    arguments = (layer, [1]) if method == "state" else (layer,)
    raises_nothing_changed(cache, error, f"^{method}: layer: ", lambda: getattr(cache, method)(*arguments))


def test_k_major_helpers() -> None:
    state = random_state(rows=2)
    k_major = to_k_major(state)
    assert k_major.shape == (2, 4, 12, 10)
    assert k_major.is_contiguous()
    assert k_major[1, 3, 5, 7] == state[1, 3, 7, 5]
    assert_same_bits(from_k_major(k_major), state)
    assert from_k_major(k_major).is_contiguous()


# --- flush ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [F32, F16, BF16])
def test_flush_folds_whole_windows_in_all_layers(dtype: torch.dtype) -> None:
    cache = small(state_dtype=dtype)
    truth = {(layer, slot): truth_state(cache, layer, slot) for layer in range(2) for slot in (1, 2, 3)}
    checkpoint, rings = cache.checkpoint(0)[1].clone(), [x.clone() for x in cache.rings(1)]
    cache.flush([3, 0, 1, -1, 2])
    assert cache.ring_start.tolist() == [0, 0, 8, (25 + 16) % 32, 0]
    assert cache.num_committed.eq(0).all()
    half_an_ulp = {F32: 5e-7, F16: 5e-4, BF16: 4e-3}[dtype]  # observed 1e-7, 2.2e-4, 1.7e-3
    for (layer, slot), state in truth.items():
        assert_close(cache.checkpoint(layer)[slot], state, half_an_ulp)
    assert_same_bits(cache.checkpoint(0)[1], checkpoint, "an empty window folds to the same bits")
    for now, then in zip(cache.rings(1), rings, strict=True):
        assert_same_bits(now, then, "rings")


def test_flush_flags_saturation() -> None:
    cache = small(state_dtype=F16)
    u, k, g = cache.rings(1)
    u[2, :, 3:8], k[2, :, 3:8], g[2, :, 3:8] = 60000.0, 12**-0.5, 0.0
    cache.flush([2, 3])
    assert cache.status.tolist() == [0, 0, 1, 0, 0]
    assert cache.checkpoint(1)[2].abs().max() == 65504


# --- commit --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [1, 3, 8])
@pytest.mark.parametrize("count", [0, 8, 9, 13, 14, 15, 16])
def test_commit_publishes_the_cursors(width: int, count: int) -> None:
    for accepted in {0, 1, width}:
        cache = nan_cache(state_dtype=F32)
        put_window(cache, 2, count, 24)
        run_step(cache, [2], [width], width=width)
        assert words(cache, 2) == (24, count, 0)  # the step reads cursors only
        pools = snapshot(cache)
        cache.commit([2], [accepted])
        folded = count >= 17 - width
        expected = ((24 + count) % 32, accepted) if folded else (24, count + accepted)
        assert words(cache, 2) == (*expected, 0)
        for layer in range(cache.num_layers):
            for name, x in zip("state u k g".split(), layer_tensors(cache, layer), strict=True):
                assert_same_bits(x, pools[f"layer {layer} {name}"])


def test_counts_are_keyed_by_slot() -> None:
    # Rows may be permuted between step and commit (contract behaviour 3); padding is ignored, whatever its count.
    cache = small()
    run_step(cache, [3, 0, 1, 2], [4, 2, 1, 3])
    cache.commit([2, -1, 3, 0, 1], [3, 99, 2, -5, 1])
    assert words(cache, 3) == ((25 + 16) % 32, 2, 0)
    assert words(cache, 2) == (3, 8, 0)
    assert words(cache, 1) == (0, 1, 0)
    assert words(cache, 0) == (0, 0, 0)


def test_rows_may_be_committed_in_several_calls() -> None:
    cache = small()
    run_step(cache, [1, 2], [2, 2])
    cache.commit([2], [1])
    cache.commit([1], [2])
    assert cache.num_committed.tolist() == [0, 2, 6, 16, 0]


def test_one_count_for_all() -> None:
    cache = small()
    run_step(cache, [1, 2], [2, 1], accepted=1)
    assert cache.num_committed.tolist() == [0, 1, 6, 16, 0]
    run_step(cache, [1, 2], [0, 0], accepted=0)
    cache.commit([], [])
    cache.commit([], 3)
    cache.commit([0, -1], 9)


def test_nothing_accepted_changes_nothing_but_a_fold() -> None:
    # Contract behaviour 2.
    cache = small()
    states = [cache.state(layer, [1, 2, 3]) for layer in range(2)]
    checkpoints = cache.checkpoint(0)[[1, 2]].clone()
    run_step(cache, [1, 2, 3], [8, 8, 8], accepted=0)
    assert cache.num_committed.tolist() == [0, 0, 5, 0, 0]
    assert_same_bits(cache.checkpoint(0)[[1, 2]], checkpoints)
    for layer in range(2):
        assert_close(cache.state(layer, [1, 2, 3]), states[layer], 1e-6)
        assert_same_bits(cache.state(layer, [1, 2]), states[layer][:2])


def test_accepted_tokens_survive_a_step_without_drafts() -> None:
    # Contract behaviour 1: draft step, plain step, draft step.
    from replaystate import reference

    cache = ReplayCache(SHAPE, 1, 2, state_dtype=F32)
    x = random_inputs(tokens=30)
    kept: list[int] = []
    token = 0
    for length, accepted in [(4, 3), (1, 1), (4, 2), (1, 1), (1, 1), (8, 8), (4, 0), (1, 1)]:
        rows = list(range(token, token + length))
        replay_step(*x.rows(rows), cache, 0, [1], bounds_of([length]), executed_width=length)
        cache.commit([1], [accepted])
        kept += rows[:accepted]
        token += length
    expected = reference.recurrent(*x.rows(kept).double(), SHAPE, bounds_of([len(kept)]))[1]
    assert_close(cache.state(0, [1]), expected, 1e-6)


@pytest.mark.parametrize(
    ("slots", "accepted", "error", "match"),
    [
        ([1], [4], ProtocolError, r"num_accepted: slot 1: expected 0..3, the tokens of its row .*, got 4"),
        ([1], [-1], ProtocolError, "num_accepted: slot 1: expected 0..3"),
        ([1, 2], [3, 9], ProtocolError, "num_accepted: slot 2: expected 0..1"),
        ([3], [0], ProtocolError, "slot 3 has no step to commit"),
        ([1, 3], [1, 0], ProtocolError, "slot 3 has no step to commit"),
        ([1, 1], [1, 1], SlotError, "state_indices: slot 1 is named twice"),
        ([5], [1], SlotError, "state_indices: expected slots below num_slots=5, got 5"),
        ([1, 2], [1], ShapeError, r"num_accepted: expected shape \[2\], got \[1\]"),
        ([1], [1.0], DTypeError, "num_accepted: expected ints, got float"),
        ([1], torch.tensor([1.0]), DTypeError, "num_accepted: expected int32 or int64, got float32"),
        ("1", [1], DTypeError, "state_indices: .* got str"),
    ],
)
def test_commit_refusals(slots: Any, accepted: Any, error: type[Exception], match: str) -> None:
    # Contract behaviour 4, and a commit that no step asked for.
    cache = small()
    run_step(cache, [1, 2], [3, 1])
    raises_nothing_changed(cache, error, f"^commit: {match}", lambda: cache.commit(slots, accepted))
    cache.commit([1, 2], [3, 1])


def test_a_second_commit_is_refused() -> None:
    cache = small()
    run_step(cache, [1], [2], accepted=[1])
    raises_nothing_changed(
        cache, ProtocolError, "^commit: slot 1 has no step to commit", lambda: cache.commit([1], [1])
    )


def test_a_commit_before_every_layer_ran_is_refused() -> None:
    cache = small(num_layers=3)
    for layer in (0, 2):
        replay_step(*random_inputs(tokens=1), cache, layer, [1], bounds_of([1]))
    raises_nothing_changed(
        cache, ProtocolError, r"^commit: slot 1: layers \[1\] did not step", lambda: cache.commit([1], [1])
    )
    replay_step(*random_inputs(tokens=1), cache, 1, [1], bounds_of([1]))
    cache.commit([1], [1])


def test_a_dead_slot_cannot_commit() -> None:
    cache = small()
    run_step(cache, [1], [2])
    cache.invalidate([1])
    raises_nothing_changed(cache, DeadSlotError, "^commit: slot 1 is dead", lambda: cache.commit([1], [1]))


def test_commit_uses_the_width_of_the_step() -> None:
    # The same row and count: at width 8 the window of 9 had folded, at width 4 it had not.
    for width, expected in ((8, (9, 2)), (4, (0, 11))):
        cache = nan_cache(state_dtype=F32)
        put_window(cache, 1, 9)
        run_step(cache, [1], [2], width=width, accepted=[2])
        assert words(cache, 1)[:2] == expected


# --- crop ----------------------------------------------------------------------------------------------------------


def test_crop_touches_num_committed_only() -> None:
    cache = small()
    before = snapshot(cache)
    cache.crop([3, 0, 2, -1, 1], [7, 99, 5, -3, 0])
    assert cache.num_committed.tolist() == [0, 0, 0, 9, 0]
    assert_unchanged(cache, before, but=["num_committed"])
    cache.crop([3], 0)
    cache.crop(3, 9)
    assert cache.num_committed.eq(0).all()


def test_crop_is_as_if_the_tokens_had_never_been() -> None:
    cropped, never = small(), small()
    for cache, accepted in ((cropped, 6), (never, 4)):
        run_step(cache, [2], [6], accepted=[accepted])
    cropped.crop([2], 2)
    for layer in range(2):
        assert_same_bits(cropped.state(layer, [2]), never.state(layer, [2]))
    for mine, theirs in zip(run_step(cropped, [2], [3], seed=9), run_step(never, [2], [3], seed=9), strict=True):
        assert_same_bits(mine, theirs)


@pytest.mark.parametrize(
    ("slots", "counts", "error", "match"),
    [
        ([2], 6, ArgumentError, r"num_tokens: slot 2: expected 0..5 \(its window\), got 6"),
        ([3, 2], [1, 6], ArgumentError, "num_tokens: slot 2"),
        ([2], -1, ArgumentError, "num_tokens: slot 2: expected 0..5 .*, got -1"),
        ([2, 3], [1], ShapeError, "num_tokens: expected 2 counts or one int, got 1"),
        ([2, 2], [1, 1], SlotError, "slots: slot 2 is named twice"),
        ([5], 0, SlotError, "slots: expected slots below"),
        ([2], 1.0, DTypeError, "num_tokens: "),
    ],
)
def test_crop_refusals(slots: Any, counts: Any, error: type[Exception], match: str) -> None:
    cache = small()
    raises_nothing_changed(cache, error, f"^crop: {match}", lambda: cache.crop(slots, counts))


# --- materialize ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [F32, F16, BF16])
@pytest.mark.parametrize("count", [0, 1, 8, 15, 16])
def test_materialize_writes_the_prefix_state(dtype: torch.dtype, count: int) -> None:
    cache = small(state_dtype=dtype)
    source, source_words = slot_bits(cache, 3), words(cache, 3)
    truth = [truth_state(cache, layer, 3, count) for layer in range(2)]
    cache.ring_start[4], cache.num_committed[4], cache.status[4] = 7, 11, int(SlotStatus.DEAD)
    cache.materialize([3], [4], count)
    half_an_ulp = {F32: 5e-7, F16: 5e-4, BF16: 4e-3}[dtype]  # observed 1e-7, 2.2e-4, 1.7e-3
    for layer in range(2):
        assert_close(cache.checkpoint(layer)[4], truth[layer], half_an_ulp)
    assert words(cache, 4) == (0, 0, 0)
    assert_slot(cache, 3, source)
    assert words(cache, 3) == source_words
    if count == 0:
        assert_same_bits(cache.checkpoint(1)[4], cache.checkpoint(1)[3])
    run_step(cache, [3, 4], [2, 2], accepted=1)


def test_materialize_several_rows_with_padding() -> None:
    cache = small(num_slots=8)
    truth = [truth_state(cache, 0, slot, count) for slot, count in ((3, 9), (2, 4), (3, 0))]
    others = {slot: slot_bits(cache, slot) for slot in (0, 1, 2, 3, 6)}
    cache.materialize([3, 0, 2, -1, 3, 3], [7, 6, 5, 6, 0, 4], torch.tensor([9, 3, 4, 99, -1, 0]))
    for slot, state in zip((7, 5, 4), truth, strict=True):
        assert_close(cache.checkpoint(0)[slot], state, 5e-7)
    for slot, before in others.items():
        assert_slot(cache, slot, before)


def test_materialize_in_place_folds_the_whole_window() -> None:
    cache, flushed = small(), small()
    cache.materialize([3, 1], [3, 1], [16, 0])
    flushed.flush([3])
    for layer in range(2):
        assert_same_bits(cache.checkpoint(layer)[[1, 3]], flushed.checkpoint(layer)[[1, 3]])
    assert words(cache, 3) == (0, 0, 0)


def test_materialize_over_a_pending_destination() -> None:
    cache = small()
    cache.reset([4])
    run_step(cache, [4], [2])
    cache.materialize([2], [4], 5)
    run_step(cache, [4], [2], accepted=2)


def test_materialize_flags_saturation_on_the_destination() -> None:
    cache = small(state_dtype=F16)
    u, k, g = cache.rings(0)
    u[2, :, 3:8], k[2, :, 3:8], g[2, :, 3:8] = 60000.0, 12**-0.5, 0.0
    cache.materialize([2], [4], 5)
    assert cache.status.tolist() == [0, 0, 0, 0, int(SlotStatus.STATE_SATURATED)]


@pytest.mark.parametrize(
    ("src", "dst", "count", "error", "match"),
    [
        ([2], [4], 6, ArgumentError, "count: expected 0..5, the window of slot 2, got 6"),
        ([2], [4], -1, ArgumentError, "count: expected 0..5, the window of slot 2, got -1"),
        ([3, 2], [1, 4], [16, 6], ArgumentError, "count: expected 0..5"),
        ([2], [2], 4, ArgumentError, "src and dst are both slot 2: expected its whole window, count=5, got 4"),
        ([2, 3], [4, 4], 1, SlotError, "dst_slots: slot 4 is named twice"),
        ([2, 3], [4, 2], 1, SlotError, "dst_slots: slot 2 is also the source of another row"),
        ([5], [4], 0, SlotError, "src_slots: expected slots below 5, got 5"),
        ([2], [5], 0, SlotError, "dst_slots: expected slots below 5, got 5"),
        ([2, 3], [4], 0, ShapeError, r"dst_slots: expected shape \[2\], got \[1\]"),
        ([2, 3], [1, 4], [1], ShapeError, r"count: expected shape \[2\], got \[1\]"),
        ([2], [4], 1.0, DTypeError, "count: "),
    ],
)
def test_materialize_refusals(src: Any, dst: Any, count: Any, error: type[Exception], match: str) -> None:
    cache = small()
    raises_nothing_changed(cache, error, f"^materialize: {match}", lambda: cache.materialize(src, dst, count))


# --- fork ----------------------------------------------------------------------------------------------------------


def test_fork_carries_window_and_cursors() -> None:
    # Contract behaviour 7, wrap included; a destination in use, dead or pending, is overwritten.
    cache = small()
    cache.invalidate([1])
    cache.reset([4])
    run_step(cache, [4], [1])
    source = slot_bits(cache, 3)
    cache.fork([3, 2], [1, 4])
    assert_slot(cache, 3, source)
    assert_slot(cache, 1, source)
    assert words(cache, 1) == words(cache, 3) == (25, 16, 0)
    assert words(cache, 4) == words(cache, 2) == (3, 5, 0)
    outs = [run_step(cache, [slot], [4], accepted=3, seed=6) for slot in (3, 1)]
    for mine, theirs in zip(*outs, strict=True):
        assert_same_bits(mine, theirs)
    assert_same_bits(cache.state(1, [3]), cache.state(1, [1]))


def test_all_sources_are_read_before_any_write() -> None:
    # A beam reorder with repeats, and a swap.
    cache = small(num_slots=4)
    before = {slot: (slot_bits(cache, slot), words(cache, slot)) for slot in (1, 2, 3)}
    cache.fork([2, 2, 1], [1, 2, 3])
    for slot, source in ((1, 2), (2, 2), (3, 1)):
        assert_slot(cache, slot, before[source][0])
        assert words(cache, slot) == before[source][1]
    cache.fork([3, 1], [1, 3])
    assert_slot(cache, 1, before[1][0])
    assert_slot(cache, 3, before[2][0])


def test_fork_ignores_padding_and_carries_status() -> None:
    cache = small()
    cache.status[2] = int(SlotStatus.RING_SATURATED)
    before = snapshot(cache)
    cache.fork([0, 2, -1], [4, 0, 3])
    assert_unchanged(cache, before)
    cache.fork(2, 4)
    assert words(cache, 4) == (3, 5, int(SlotStatus.RING_SATURATED))


@pytest.mark.parametrize(
    ("src", "dst", "error", "match"),
    [
        ([2, 3], [4, 4], SlotError, "dst: slot 4 is named twice"),
        ([5], [4], SlotError, "src: expected slots below num_slots=5"),
        ([2], [5], SlotError, "dst: expected slots below num_slots=5"),
        ([2, 3], [4], ShapeError, r"dst: expected as many slots as src \(2\), got 1"),
        ([2.0], [4], DTypeError, "src: "),
        ([2], "4", DTypeError, "dst: "),
    ],
)
def test_fork_refusals(src: Any, dst: Any, error: type[Exception], match: str) -> None:
    cache = small()
    raises_nothing_changed(cache, error, f"^fork: {match}", lambda: cache.fork(src, dst))


# --- what no method does to a slot in a wrong state ----------------------------------------------------------------

NEEDS_A_LIVING_SLOT: dict[str, Callable[[ReplayCache, int], Any]] = {
    "state": lambda cache, slot: cache.state(0, [slot]),
    "load_state": lambda cache, slot: cache.load_state(0, [slot], random_state()),
    "flush": lambda cache, slot: cache.flush([slot]),
    "crop": lambda cache, slot: cache.crop([slot], 0),
    "materialize": lambda cache, slot: cache.materialize([slot], [4], 0),
    "fork": lambda cache, slot: cache.fork([slot], [4]),
    "export": lambda cache, slot: cache.export(slot),
}


@pytest.mark.parametrize("method", NEEDS_A_LIVING_SLOT)
def test_a_dead_slot_is_refused(method: str) -> None:
    cache = small()
    cache.invalidate([1])
    raises_nothing_changed(
        cache, DeadSlotError, f"^{method}: slot 1 is dead", lambda: NEEDS_A_LIVING_SLOT[method](cache, 1)
    )


@pytest.mark.parametrize("method", NEEDS_A_LIVING_SLOT)
@pytest.mark.parametrize("layer", [0, 1])
def test_a_pending_step_is_refused(method: str, layer: int) -> None:
    cache = small()
    replay_step(*random_inputs(tokens=0), cache, layer, [1], bounds_of([0]))  # even of no token, even in one layer only
    if method in ("state", "load_state") and layer == 1:
        NEEDS_A_LIVING_SLOT[method](cache, 1)  # layer 0, which these two are about, has not stepped yet
        return
    raises_nothing_changed(
        cache,
        ProtocolError,
        f"^{method}: slot 1 has a step that was not committed",
        lambda: NEEDS_A_LIVING_SLOT[method](cache, 1),
    )


# An engine owns the cursors of from_tensors. What it wrote there is checked before it is used as an address.
@pytest.mark.parametrize("method", ["state", "flush", "materialize", "export"])
@pytest.mark.parametrize(("start", "count"), [(0, 17), (32, 1), (-1, 3)])
def test_cursors_out_of_range_are_refused(method: str, start: int, count: int) -> None:
    cache = small()
    cache.ring_start[1], cache.num_committed[1] = start, count
    raises_nothing_changed(cache, ProtocolError, f"^{method}: .*slot 1", lambda: NEEDS_A_LIVING_SLOT[method](cache, 1))


def test_methods_that_need_the_host_refuse_inside_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = small(debug=True)
    exported = cache.export(2)
    cache.device = torch.device("cuda")  # as if; nothing below gets as far as the device
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    calls: dict[str, Callable[[], Any]] = {
        "allocate": cache.allocate,
        "free": lambda: cache.free(1),
        "check": cache.check,
        "export": lambda: cache.export(2),
        "load": lambda: cache.load(2, exported),
    }
    for method, call in calls.items():
        raises_nothing_changed(cache, ProtocolError, f"^{method}: needs values on the host .* captured", call)


# --- values on a device: clamped and flagged -----------------------------------------------------------------------


def test_device_commit_clamps_and_flags() -> None:
    cache = small()
    run_step(cache, [1, 2, 3], [3, 3, 3])
    with device_semantics():
        cache.commit([1, 2, 3, 9], [4, -1, 2, 1])
    assert cache.num_committed.tolist() == [0, 3, 5, 2, 0]
    assert cache.status.tolist() == [0, 32, 32, 0, 0]
    with pytest.raises(SlotStatusError, match="slot 1: ACCEPTED_CLAMPED"):
        cache.check()


def test_device_commit_without_a_step_or_twice_is_flagged() -> None:
    cache = small()
    run_step(cache, [1], [3], accepted=[2])
    before = snapshot(cache)
    with device_semantics():
        cache.commit([1, 2], [1, 0])
    assert_unchanged(cache, before, but=["status"])
    assert cache.status.tolist() == [0, 16, 16, 0, 0]


def test_device_commit_after_some_layers_kills_the_slot() -> None:
    cache = small()
    replay_step(*random_inputs(tokens=1), cache, 1, [1], bounds_of([1]))
    with device_semantics():
        cache.commit([1], [1])
    assert words(cache, 1) == (0, 0, int(SlotStatus.NO_STEP | SlotStatus.DEAD))


def test_device_step_over_a_pending_one_kills_the_slot_and_writes_nothing_more() -> None:
    cache = small()
    run_step(cache, [2, 3], [2, 2])
    pools = slot_bits(cache, 2)
    with device_semantics():
        y = replay_step(*random_inputs(tokens=3), cache, 0, [2, 1], bounds_of([2, 1]))
    assert y[:2].eq(0).all()
    assert y[2].ne(0).any()
    assert words(cache, 2) == (3, 5, int(SlotStatus.NOT_COMMITTED | SlotStatus.DEAD))
    assert_slot(cache, 2, pools)
    with device_semantics():
        cache.commit([2], [1])
    assert words(cache, 2)[:2] == (3, 5)


@pytest.mark.parametrize(("width", "length"), [(4, 2), (8, 3)])
def test_device_step_with_another_width_or_length_in_another_layer_kills_the_slot(width: int, length: int) -> None:
    cache = small()
    replay_step(*random_inputs(tokens=2), cache, 0, [1], bounds_of([2]), executed_width=8)
    with device_semantics():
        y = replay_step(*random_inputs(tokens=length), cache, 1, [1], bounds_of([length]), executed_width=width)
    assert y.eq(0).all()
    assert words(cache, 1)[2] == int(SlotStatus.NOT_COMMITTED | SlotStatus.DEAD)


def test_device_step_ignores_dead_slots_and_slots_past_the_pool() -> None:
    cache = small()
    cache.invalidate([2])
    pools = slot_bits(cache, 2)
    with device_semantics():
        y = replay_step(*random_inputs(tokens=3), cache, 0, [2, 7, 1], bounds_of([1, 1, 1]))
    assert y[:2].eq(0).all()
    assert y[2].ne(0).any()
    assert_slot(cache, 2, pools)


@pytest.mark.parametrize(("start", "count"), [(32, 0), (-1, 0), (0, 17), (0, -1)])
def test_device_step_with_bad_cursors_kills_the_slot(start: int, count: int) -> None:
    cache = small(num_layers=1)
    cache.ring_start[2], cache.num_committed[2] = start, count
    pools = slot_bits(cache, 2)
    with device_semantics():
        y = replay_step(*random_inputs(tokens=1), cache, 0, [2], bounds_of([1]))
    assert y.eq(0).all()
    assert words(cache, 2) == (start, count, int(SlotStatus.BAD_CURSOR | SlotStatus.DEAD))
    assert_slot(cache, 2, pools)


def test_device_step_cuts_long_rows() -> None:
    cache, cut = small(num_layers=1), small(num_layers=1)
    x = random_inputs(tokens=6)
    expected = replay_step(*x.rows(slice(0, 4)), cut, 0, [2], bounds_of([4]), executed_width=4, backend="torch")
    with device_semantics():
        y = replay_step(*x, cache, 0, [2], bounds_of([6]), executed_width=4)
    assert_same_bits(y[:4], expected)
    assert y[4:].eq(0).all()
    assert words(cache, 2)[2] == int(SlotStatus.ROW_CUT)
    with device_semantics():
        cache.commit([2], [6])
    assert words(cache, 2)[1:] == (9, int(SlotStatus.ROW_CUT | SlotStatus.ACCEPTED_CLAMPED))


@pytest.mark.parametrize("bounds", [[0, 5], [-2, 1], [2, 9], [7, 9]])
def test_device_bounds_that_leave_the_tokens_read_nothing_outside(bounds: list[int]) -> None:
    cache = small(num_layers=1)
    x = random_inputs(tokens=3)
    with device_semantics():
        y = replay_step(*x, cache, 0, [1], torch.tensor(bounds, dtype=torch.int32))
        out, state = gated_delta_rule(*x, SHAPE, torch.tensor(bounds, dtype=torch.int32))
    assert y.isfinite().all()
    assert out.isfinite().all()
    assert state.isfinite().all()


def test_device_crop_clamps_and_flags() -> None:
    cache = small()
    with device_semantics():
        cache.crop([2, 3], [6, -1])
    assert cache.num_committed.tolist() == [0, 0, 0, 16, 0]
    assert cache.status.tolist() == [0, 0, 256, 256, 0]


def test_device_materialize_skips_and_flags_bad_counts() -> None:
    cache = small(num_slots=8)
    before = {slot: slot_bits(cache, slot) for slot in range(8)}
    with device_semantics():
        cache.materialize([2, 3, 2], [4, 5, 2], [6, -1, 3])
    assert cache.status.tolist() == [0, 0, 256, 256, 0, 0, 0, 0]
    for slot, pools in before.items():
        assert_slot(cache, slot, pools)
    assert cache.num_committed.tolist() == [0, 0, 5, 16, 0, 0, 0, 0]
    with device_semantics():
        cache.materialize([9, 3], [4, 9], 0)  # past the pool: padding
    for slot, pools in before.items():
        assert_slot(cache, slot, pools)


@pytest.mark.parametrize("counts", [[6, 1], [1, 6]])
def test_device_materialize_flags_a_source_that_is_named_twice(counts: list[int]) -> None:
    cache = small(num_slots=6)
    with device_semantics():
        cache.materialize([2, 2], [4, 5], counts)
    assert int(cache.status[2]) == int(SlotStatus.BAD_COUNT)


def test_device_load_state_over_a_live_window_is_skipped_and_flagged() -> None:
    cache = small()
    pools = slot_bits(cache, 2)
    with device_semantics():
        cache.load_state(0, [2, 1], random_state(rows=2))
    assert_slot(cache, 2, pools)
    assert_same_bits(cache.checkpoint(0)[1], random_state(rows=2)[1])
    assert cache.status.tolist() == [0, 0, 512, 0, 0]


# The cursor protocol on a device: what the host would refuse must leave the slot flagged, never silently wrong.
@pytest.mark.parametrize("method", ["load_state", "flush", "crop", "materialize", "fork"])
def test_device_calls_over_a_pending_step_are_flagged(method: str) -> None:
    cache = small()
    cache.num_committed[3] = 0 if method == "load_state" else 16
    run_step(cache, [3], [2])  # folds: the checkpoint has moved, the cursors have not
    with device_semantics():
        NEEDS_A_LIVING_SLOT[method](cache, 3)
    assert int(cache.status[3]) or int(cache.status[4]), "nothing says that the result is wrong"


# --- the backend's functions on their own --------------------------------------------------------------------------


def test_backend_commit_clamps() -> None:
    records = torch.tensor(
        [[step_record(4, 3)] * 2, [step_record(8, 2)] * 2, [0, 0], [step_record(4, 1), 0]], dtype=torch.int32
    )
    start, count = torch.tensor([30, 31, 5, 6], dtype=torch.int32), torch.tensor([12, 9, 1, 2], dtype=torch.int32)
    status = torch.zeros(4, dtype=torch.int32)
    torch_backend.commit(
        torch.tensor([1, -1, 0, 3, 2, 8]), torch.tensor([7, 1, 3, 1, 1, 1]), start, count, records, status, 16, 32, -1
    )
    assert start.tolist() == [30, 8, 5, 6]  # 31 + 9 = 40 mod 32
    assert count.tolist() == [15, 2, 1, 2]
    assert status.tolist() == [0, 32, 16, 16 | 4]
    assert records.eq(0).all()


def test_backend_step_skips_what_must_not_run() -> None:
    cache = small(num_layers=1)
    cache.invalidate([3])
    before = {slot: slot_bits(cache, slot) for slot in (0, 3, 4)}
    x, records = random_inputs(tokens=6), torch.zeros(5, 1, dtype=torch.int32)
    state, u, k, g = layer_tensors(cache, 0)
    out = torch.full((6, 4, 10), NAN)
    torch_backend.replay_step(
        *x, state, u, k, g, cache.ring_start, cache.num_committed, records, cache.status, out,
        torch.tensor([3, 0, 2, 99, -4, 1]), bounds_of([1, 1, 1, 1, 1, 1]), 0, 8, 16, 0, 1.0,
    )  # fmt: skip
    assert out.isfinite().all()
    assert out.ne(0).any(-1).any(-1).tolist() == [False, False, True, False, False, True]
    for slot, pools in before.items():
        assert_slot(cache, slot, pools)
    assert records.flatten().tolist() == [0, step_record(8, 1), step_record(8, 1), 0, 0]


def test_backend_fold_skips_negative_slots() -> None:
    cache = small(num_layers=1)
    state, u, k, g = layer_tensors(cache, 0)
    before = {slot: slot_bits(cache, slot) for slot in (0, 1, 2, 3)}
    truth = truth_state(cache, 0, 3, 7)
    torch_backend.fold_slots(
        [state], [u], [k], [g], torch.tensor([-1, 3, 2]), torch.tensor([1, 4, -1]), torch.tensor([0, 25, 3]),
        torch.tensor([3, 7, 2]), 16, cache.status,
    )  # fmt: skip
    assert_close(state[4], truth, 5e-7)
    for slot, pools in before.items():
        assert_slot(cache, slot, pools)


# --- the whole life ------------------------------------------------------------------------------------------------


def test_the_life_of_a_slot_in_a_pool_of_nan() -> None:
    # Prefill, decode with drafts, fork, materialize, crop, reuse. Slots that are not named keep their NaN.
    cache = nan_cache(GDNShape(1, 2, 8, 8), num_layers=2, num_slots=8, state_dtype=F32)
    shape = cache.shape
    slot = cache.allocate()
    for layer in range(2):
        x = random_inputs(shape, 11, seed=layer)
        cache.load_state(layer, [slot], gated_delta_rule(*x, shape, bounds_of([11]))[1])
    for turn in range(6):
        run_step(cache, [slot], [5], accepted=[turn % 6], seed=turn)
    child, block = cache.allocate(), cache.allocate()
    cache.fork([slot], [child])
    cache.materialize([slot], [block], int(cache.num_committed[slot]))
    for layer in range(2):
        assert_same_bits(cache.state(layer, [slot]), cache.state(layer, [child]))
        assert_same_bits(cache.state(layer, [slot]), cache.state(layer, [block]))
        assert cache.state(layer, [slot]).isfinite().all()
    cache.free(slot)
    assert cache.allocate() == slot
    assert cache.state(0, [slot]).eq(0).all()
    for layer in range(2):
        for x in layer_tensors(cache, layer):
            assert x[[0, 4, 5, 6, 7]].isnan().all()
    cache.check()


def test_the_default_device_of_the_process_does_not_matter() -> None:
    cache, twin = small(), small()
    x = random_inputs(tokens=2)
    bounds = bounds_of([2])
    for c, default in ((cache, "meta"), (twin, "cpu")):  # a tensor made on the wrong device would be one without data
        with torch.device(default):
            for layer in range(2):
                replay_step(*x, c, layer, [3], bounds)
            c.commit([3], [1])
            c.crop([2], 1)
            c.fork([2], [4])
            c.check()
            exported = c.export(4)
            c.load(1, exported)
        assert all(t.device.type == "cpu" for t in exported.values())
    for layer in range(2):
        assert_same_bits(cache.state(layer, [1, 2, 3, 4]), twin.state(layer, [1, 2, 3, 4]))


def test_two_pools_of_different_dtype_do_not_disturb_each_other() -> None:
    # Contract behaviour 12: dtypes are arguments, calls in any order.
    pools = [ReplayCache(SHAPE, 1, 2, state_dtype=dtype) for dtype in (F32, F16, BF16, F16)]
    alone = [copy.deepcopy(pool) for pool in pools]
    for turn in range(5):
        for pool in pools if turn % 2 else reversed(pools):
            run_step(pool, [1], [4], accepted=[3], seed=turn)
    for pool, single in zip(pools, alone, strict=True):
        for turn in range(5):
            run_step(single, [1], [4], accepted=[3], seed=turn)
        assert_same_bits(pool.state(0, [1]), single.state(0, [1]))


def test_a_cache_full_of_nan_is_a_good_one() -> None:
    # The helper of this suite: nothing that is not live may matter.
    clean, dirty = ReplayCache(SHAPE, 1, 2), fill_with_nan(ReplayCache(SHAPE, 1, 2))
    for cache in (clean, dirty):
        slot = cache.allocate()
        run_step(cache, [slot], [3], accepted=[2])
    assert same_bits(clean.state(0, [1]), dirty.state(0, [1]))
