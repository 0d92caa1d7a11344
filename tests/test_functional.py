"""replay_step and gated_delta_rule: the numbers against float64, and everything that a call must not touch.

In plain words: a slot of a pool full of NaN gets a checkpoint and a window, one step is run, and its outputs, its
appended ring rows and its folded checkpoint are compared with the float64 reference run from the very same stored
values. Then come the ragged, empty, padded, strided, poisoned and wrong calls. Bits are compared wherever bits are
promised.
"""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from replaystate import GDNShape, ReplayCache, SlotStatus, backends, gated_delta_rule, reference, replay_step
from replaystate.errors import (
    ArgumentError,
    BackendError,
    DeadSlotError,
    DTypeError,
    ProtocolError,
    ReplayStateError,
    ShapeError,
    SlotError,
)
from replaystate.kernels import registry

from .helpers import (
    SHAPE,
    Inputs,
    assert_close,
    assert_same_bits,
    assert_unchanged,
    bounds_of,
    canary_cache,
    fill_with_nan,
    layer_tensors,
    nan_cache,
    put_window,
    raises_nothing_changed,
    random_inputs,
    random_state,
    same_bits,
    snapshot,
    truth_state,
    truth_step,
)

NAN = float("nan")
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16

# Relative error of one rounding to nearest, Frobenius norm over many values: at most half a unit in the last place.
ROUNDING = {F32: 2.0**-24, F16: 2.0**-11, BF16: 2.0**-8}


def tolerance(*dtypes: torch.dtype) -> float:
    """One rounding to the coarsest of these dtypes, and float32 arithmetic. Observed at most 1.6e-7 for float32."""
    return max(ROUNDING[dtype] for dtype in dtypes) + 4e-7


def fp32_cache(num_slots: int = 6, num_layers: int = 1, **options: Any) -> ReplayCache:
    return nan_cache(num_layers=num_layers, num_slots=num_slots, state_dtype=F32, **options)


# --- the numbers ---------------------------------------------------------------------------------------------------

# Head ratios 1, 2, 3, 8; K != V both ways; 96 and 12 are no powers of two; 1 is the smallest dim there is.
SHAPES = [GDNShape(2, 2, 64, 64), SHAPE, GDNShape(1, 3, 96, 32), GDNShape(1, 8, 32, 64), GDNShape(1, 1, 1, 1)]
# Window empty, mid-ring, wrapped at the ring's end, at the fold's threshold and full.
WINDOWS = [(0, 0), (5, 3), (7, 28), (8, 9), (9, 25), (16, 31)]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "-".join(map(str, s.sizes)))
@pytest.mark.parametrize(("count", "start"), WINDOWS)
def test_a_step_equals_float64(shape: GDNShape, count: int, start: int) -> None:
    cache = nan_cache(shape, num_slots=3, state_dtype=F32)
    put_window(cache, 1, count, start)
    x = random_inputs(shape, 4)
    expected, rows = truth_step(cache, 0, 1, x)
    folded = truth_state(cache, 0, 1)
    state, u, k, g = layer_tensors(cache, 0)
    before = state[1].clone()
    y = replay_step(*x, cache, 0, [1], bounds_of([4]), executed_width=8)

    assert_close(y, expected, 1e-6, "output")  # observed 2.2e-7
    at = [(start + count + s) % 32 for s in range(4)]
    assert_close(u[1][:, at].transpose(0, 1), rows.u, 1e-6, "u")  # observed 2.4e-7
    assert_close(k[1][:, at].transpose(0, 1), rows.k, 2e-7, "k")
    assert_close(g[1][:, at].T, rows.g, 2e-7, "g")
    if count >= 9:  # 16 + 1 - 8
        assert_close(state[1], folded, 5e-7, "folded checkpoint")  # observed 8e-8
    else:
        assert_same_bits(state[1], before, "checkpoint without a fold")
    assert (cache.ring_start[1], cache.num_committed[1]) == (start, count)


# Every dtype in every place, two pools of different dtype in one process, in any order (contract behaviour 12).
@pytest.mark.parametrize(
    ("io", "gate", "state", "ring"),
    [
        (F32, F32, F16, F16),
        (BF16, BF16, BF16, BF16),
        (F16, F16, F16, F16),
        (BF16, F32, F32, F32),
        (F32, BF16, BF16, F16),
        (F16, F32, F32, F16),
        (BF16, F16, F16, F32),
    ],
)
def test_every_dtype_is_rounded_once(io: torch.dtype, gate: torch.dtype, state: torch.dtype, ring: torch.dtype) -> None:
    cache = nan_cache(state_dtype=state, ring_dtype=ring)
    put_window(cache, 2, 11, 26)
    x = random_inputs(tokens=5, dtype=io, gate_dtype=gate)
    expected, rows = truth_step(cache, 0, 2, x)
    folded = truth_state(cache, 0, 2)
    y = replay_step(*x, cache, 0, [2], bounds_of([5]))
    assert y.dtype == io
    assert_close(y, expected, tolerance(io), "output")
    stored, u, k, g = layer_tensors(cache, 0)
    at = [(26 + 11 + s) % 32 for s in range(5)]
    assert_close(u[2][:, at].transpose(0, 1), rows.u, tolerance(ring), "u")
    assert_close(k[2][:, at].transpose(0, 1), rows.k, tolerance(ring), "k")
    assert_close(g[2][:, at].T, rows.g, tolerance(F32), "g")
    assert_close(stored[2], folded, tolerance(state), "folded checkpoint")


@pytest.mark.parametrize("width", [1, 2, 8, 16])
def test_the_launch_width_alone_decides_which_rows_fold(width: int) -> None:
    cache = nan_cache(num_slots=18, max_query_len=16, state_dtype=F32)
    for count in range(17):
        put_window(cache, count + 1, count, 7)
    before = cache.checkpoint(0).clone()
    lengths = [count % (width + 1) for count in range(17)]  # 0..width: a row's own length changes nothing
    x = random_inputs(tokens=sum(lengths))
    replay_step(*x, cache, 0, list(range(1, 18)), bounds_of(lengths), executed_width=width)
    folded = [count for count in range(17) if not same_bits(cache.checkpoint(0)[count + 1], before[count + 1])]
    assert folded == list(range(17 - width, 17))


def test_outputs_do_not_depend_on_the_fold() -> None:
    # The same window and tokens at width 1 (no fold at P = 12) and 8 (fold): the same bits of token 0.
    outs = []
    for width in (1, 8):
        cache = fp32_cache()
        put_window(cache, 1, 12, 20)
        outs.append(replay_step(*random_inputs(tokens=1), cache, 0, [1], bounds_of([1]), executed_width=width))
    assert_same_bits(*outs)


@pytest.mark.parametrize("scale", [None, 1.0, 0.25])
def test_scale(scale: float | None) -> None:
    cache = fp32_cache()
    put_window(cache, 1, 3)
    x = random_inputs(tokens=2)
    expected, _ = truth_step(cache, 0, 1, x, scale=scale)
    assert_close(replay_step(*x, cache, 0, [1], bounds_of([2]), scale=scale), expected, 1e-6)


# --- which rows, which slots ---------------------------------------------------------------------------------------


def test_ragged_rows_of_mixed_kinds() -> None:
    # Permuted slots, an empty row, a -1 row and null rows, one of them with tokens (contract behaviour 5).
    cache = fp32_cache(num_slots=9)
    slots, lengths = [3, -1, 7, 0, 5, 2, 0], [3, 2, 0, 1, 8, 1, 0]
    for slot in (3, 7, 5, 2):
        put_window(cache, slot, slot * 2, 30 - slot, seed=slot)
    x = random_inputs(tokens=15)
    untouched = snapshot(cache)
    expected = torch.zeros(15, 4, 10, dtype=torch.float64)
    begin = 0
    for slot, length in zip(slots, lengths, strict=True):
        if slot > 0:
            expected[begin : begin + length], _ = truth_step(cache, 0, slot, x.rows(slice(begin, begin + length)))
        begin += length
    y = replay_step(*x, cache, 0, slots, bounds_of(lengths))
    assert_close(y, expected, 1e-6)
    assert y[3:5].eq(0).all()
    assert y[5].eq(0).all()
    for name, before in untouched.items():
        if isinstance(before, Tensor) and before.shape[:1] == (9,):
            now = snapshot(cache)[name]
            for slot in (0, 1, 4, 6, 8):
                assert_same_bits(now[slot], before[slot], f"{name}, slot {slot}")


def test_only_the_appended_rows_and_folded_checkpoints_change() -> None:
    cache, buffers = canary_cache(num_slots=5)
    put_window(cache, 1, 10, 27)  # folds
    put_window(cache, 4, 3, 31)  # does not
    before = [x.clone() for x in layer_tensors(cache, 0)]
    buffers_before = [x.clone() for x in buffers]
    replay_step(*random_inputs(tokens=5), cache, 0, [4, 1], bounds_of([2, 3]))
    changed = [(now != then) for now, then in zip(layer_tensors(cache, 0), before, strict=True)]
    state, u, k, g = changed
    assert [bool(x.any()) for x in state] == [False, True, False, False, False]
    rows = {1: [5, 6, 7], 4: [2, 3]}  # (start + P + s) mod 32
    for ring in (u, k, g):
        for slot in range(5):
            hit = ring[slot].flatten(2).any(2).any(0) if ring.dim() == 4 else ring[slot].any(0)
            assert hit.nonzero().flatten().tolist() == rows.get(slot, []), slot
    pool_changes = sum(int(x.sum()) for x in changed)
    assert sum(int((now != then).sum()) for now, then in zip(buffers, buffers_before, strict=True)) == pool_changes


def test_rejected_rows_and_stale_bits_never_show() -> None:
    # The same history twice: once in a ring of zeros, once where every bit outside the live window is NaN before each
    # step, rejected rows of the step before included.
    outs: list[list[Tensor]] = []
    for poison in (False, True):
        cache = ReplayCache(SHAPE, 1, 3, state_dtype=F32)
        results = []
        for turn, (length, accepted) in enumerate([(8, 3), (8, 0), (5, 5), (8, 2), (1, 1), (8, 7), (8, 4), (3, 3)]):
            if poison:
                start, count = int(cache.ring_start[1]), int(cache.num_committed[1])
                dead = [(start + j) % 32 for j in range(count, 32)]
                for ring in cache.rings(0):
                    ring[1, :, dead] = NAN
            x = random_inputs(tokens=length, seed=turn)
            results.append(replay_step(*x, cache, 0, [1], bounds_of([length])))
            cache.commit([1], [accepted])
        results.append(cache.state(0, [1]))
        outs.append(results)
    for clean, dirty in zip(*outs, strict=True):
        assert_same_bits(clean, dirty)


def test_a_recycled_slot_full_of_nan_starts_from_zero() -> None:
    cache = fp32_cache()
    slot = cache.allocate()
    x = random_inputs(tokens=1)
    y = replay_step(*x, cache, 0, [slot], bounds_of([1]), executed_width=1)
    expected, _ = reference.recurrent(*x.double(), SHAPE, bounds_of([1]))
    assert_close(y, expected, 1e-6)


@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 0]])
def test_no_tokens(lengths: list[int]) -> None:
    cache = fp32_cache()
    for slot in range(1, 4):
        put_window(cache, slot, 9, 5)
    slots = list(range(1, len(lengths) + 1))
    before = cache.checkpoint(0).clone()
    y = replay_step(*random_inputs(tokens=0), cache, 0, slots, bounds_of(lengths))
    assert y.shape == (0, 4, 10)
    for slot in range(1, 4):  # a named row folds even without a token
        assert same_bits(before[slot], cache.checkpoint(0)[slot]) == (slot not in slots)
    cache.commit(slots, 0)


def test_tokens_of_no_row_get_zeros() -> None:
    cache = fp32_cache()
    put_window(cache, 1, 4)
    x = random_inputs(tokens=6)
    out = torch.full((6, 4, 10), NAN)
    y = replay_step(*x, cache, 0, [1], bounds_of([2]), out=out)
    expected, _ = reference.replay(
        *x.rows(slice(0, 2)).double(), SHAPE, cache.checkpoint(0)[1].double(), _window_before(cache, 1, 4)
    )
    assert_close(y[:2], expected, 1e-6)
    assert y[2:].eq(0).all()


def _window_before(cache: ReplayCache, slot: int, count: int) -> reference.Window:
    u, k, g = (ring[slot].double() for ring in cache.rings(0))
    return reference.window_of(u, k, g, int(cache.ring_start[slot]), count)


def test_a_batch_of_padding_only() -> None:
    cache = fp32_cache()
    before = snapshot(cache)
    y = replay_step(*random_inputs(tokens=3), cache, 0, [0, -5, 0], bounds_of([1, 1, 1]))
    assert y.eq(0).all()
    assert_unchanged(cache, before)


def test_without_a_null_slot_only_negative_indices_are_padding() -> None:
    cache = ReplayCache(SHAPE, 1, 2, state_dtype=F32, null_slot=None)
    y = replay_step(*random_inputs(tokens=2), cache, 0, [0, -1], bounds_of([1, 1]))
    assert y[0].ne(0).any()
    assert y[1].eq(0).all()


def test_the_null_slot_may_be_any_slot() -> None:
    cache = ReplayCache(SHAPE, 1, 4, state_dtype=F32, null_slot=3)
    y = replay_step(*random_inputs(tokens=2), cache, 0, [3, 0], bounds_of([1, 1]))
    assert y[0].eq(0).all()
    assert y[1].ne(0).any()


@pytest.mark.parametrize("form", ["list", "tuple", "int32", "int64", "int"])
def test_slots_in_every_form(form: str) -> None:
    cache = ReplayCache(SHAPE, 1, 4, state_dtype=F32)
    forms: dict[str, Any] = {
        "list": [2],
        "tuple": (2,),
        "int32": torch.tensor([2], dtype=torch.int32),
        "int64": torch.tensor([2]),
        "int": 2,
    }
    x = random_inputs(tokens=1)
    y = replay_step(*x, cache, 0, forms[form], bounds_of([1]).to(torch.int64 if form == "int64" else torch.int32))
    cache.commit(forms[form], forms["int32"] * 0 + 1 if form == "int32" else 1)
    expected, _ = reference.recurrent(*x.double(), SHAPE, bounds_of([1]))
    assert_close(y, expected, 1e-6)
    assert cache.num_committed.tolist() == [0, 0, 1, 0]


# --- the same bits -------------------------------------------------------------------------------------------------


# Small enough to be quick, odd enough that no vector width divides a row: batch invariance (contract behaviour 14).
@pytest.mark.parametrize("shape", [SHAPE, GDNShape(1, 1, 3, 1), GDNShape(1, 1, 96, 16)], ids=lambda s: str(s.sizes))
def test_a_row_has_the_same_bits_alone_in_a_batch_permuted_and_beside_padding(shape: GDNShape) -> None:
    lengths = [1 + i % 8 for i in range(64)]
    x = random_inputs(shape, sum(lengths))
    begins = bounds_of(lengths).tolist()

    together = nan_cache(shape, num_slots=65, state_dtype=F32)
    for i in range(64):
        put_window(together, i + 1, i % 17, i % 32, seed=i)
    permuted, alone = copy.deepcopy(together), copy.deepcopy(together)
    y = replay_step(*x, together, 0, list(range(1, 65)), bounds_of(lengths))

    order = torch.randperm(64, generator=torch.Generator().manual_seed(4)).tolist()
    tokens = [t for i in order for t in range(begins[i], begins[i + 1])]
    slots = [slot for i in order for slot in (-1, i + 1)]  # a padding row before every row
    y_permuted = replay_step(
        *x.rows(tokens), permuted, 0, slots, bounds_of([n for i in order for n in (0, lengths[i])])
    )
    assert_same_bits(y_permuted, y[tokens])

    for i in range(0, 64, 5):
        rows = slice(begins[i], begins[i + 1])
        y_alone = replay_step(*x.rows(rows), alone, 0, [i + 1], bounds_of([lengths[i]]))
        assert_same_bits(y_alone, y[rows], f"row {i}")
    for now, permuted_now, alone_now in zip(*(layer_tensors(c, 0) for c in (together, permuted, alone)), strict=True):
        assert_same_bits(permuted_now, now)
        assert_same_bits(alone_now[1::5], now[1::5])


def test_the_width_of_a_launch_does_not_change_a_token() -> None:
    # Padding goes to executed_width; a row of 2 has the same bits at every width that does not fold it.
    outs = []
    for width in (2, 3, 8):
        cache = fp32_cache()
        put_window(cache, 1, 4, 30)
        outs.append(replay_step(*random_inputs(tokens=2), cache, 0, [1], bounds_of([2]), executed_width=width))
    assert_same_bits(outs[0], outs[1])
    assert_same_bits(outs[0], outs[2])


@pytest.mark.parametrize("default", [torch.float64, BF16, F16])
def test_the_default_dtype_of_the_process_does_not_matter(default: torch.dtype) -> None:
    # Engines set it to the model's dtype. Intermediate results must not be rounded to it.
    x, state = random_inputs(tokens=4), random_state(rows=1)
    results = []
    for dtype in (F32, default):
        cache = fp32_cache()
        put_window(cache, 1, 12, 25)
        torch.set_default_dtype(dtype)
        try:
            y = replay_step(*x, cache, 0, [1], bounds_of([4]))
            cache.commit([1], [3])
            cache.materialize([1], [2], 2)
            prefill = gated_delta_rule(*x, SHAPE, bounds_of([4]), initial_state=state)
        finally:
            torch.set_default_dtype(F32)
        rows = cache.rings(0)[0][1, :, [(25 + 12 + s) % 32 for s in range(4)]]
        results.append([y, rows, cache.checkpoint(0)[1:3], cache.state(0, [1]), *prefill])
    for mine, plain in zip(results[1], results[0], strict=True):
        assert_same_bits(mine, plain)


# --- NaN stays where it is -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["mixed_qkv", "a", "b"])
def test_a_nan_stays_in_its_request(where: str) -> None:
    cache, clean = fp32_cache(), fp32_cache()
    for c in (cache, clean):
        for slot in (1, 2, 3):
            put_window(c, slot, 10, 2 * slot, seed=slot)
    x = random_inputs(tokens=6)
    y_clean = replay_step(*x, clean, 0, [1, 2, 3], bounds_of([2, 2, 2]))
    getattr(x, where)[2:4] = NAN
    y = replay_step(*x, cache, 0, [1, 2, 3], bounds_of([2, 2, 2]))
    assert y[2:4].isnan().any()
    assert_same_bits(y[[0, 1, 4, 5]], y_clean[[0, 1, 4, 5]])
    for now, then in zip(layer_tensors(cache, 0), layer_tensors(clean, 0), strict=True):
        assert_same_bits(now[[1, 3]], then[[1, 3]])
    assert_same_bits(cache.checkpoint(0)[2], clean.checkpoint(0)[2], "the fold, which is older than the NaN")


@pytest.mark.parametrize("where", ["mixed_qkv", "a", "b"])
@pytest.mark.parametrize("value", [NAN, float("inf")])
def test_a_nan_does_not_reach_earlier_tokens_and_is_forgotten_when_rejected(where: str, value: float) -> None:
    cache, clean = fp32_cache(), fp32_cache()
    for c in (cache, clean):
        put_window(c, 1, 3, 30)
    x = random_inputs(tokens=4)
    y_clean = replay_step(*x, clean, 0, [1], bounds_of([4]))
    getattr(x, where)[2:] = value
    y = replay_step(*x, cache, 0, [1], bounds_of([4]))
    assert_same_bits(y[:2], y_clean[:2])
    for c in (cache, clean):
        c.commit([1], [2])
    after = random_inputs(tokens=3, seed=8)
    assert_same_bits(
        replay_step(*after, cache, 0, [1], bounds_of([3])), replay_step(*after, clean, 0, [1], bounds_of([3]))
    )
    for c in (cache, clean):
        c.commit([1], [3])
    assert_same_bits(cache.state(0, [1]), clean.state(0, [1]))


@pytest.mark.parametrize("a", [100.0, -100.0, float("inf"), float("-inf")])
@pytest.mark.parametrize("A_log", [100.0, 0.0, -100.0])
def test_gate_extremes(a: float, A_log: float) -> None:
    cache = fp32_cache()
    put_window(cache, 1, 6, 29)
    x = random_inputs(tokens=3)
    x.a[1] = a
    x.A_log.fill_(A_log)
    x.dt_bias.zero_()
    expected, rows = truth_step(cache, 0, 1, x)
    y = replay_step(*x, cache, 0, [1], bounds_of([3]))
    assert not y.isnan().any()
    assert_close(y, expected, 1e-6)
    decay = cache.rings(0)[2][1][:, [3, 4, 5]].double().exp()
    assert (decay - rows.g.T.exp()).abs().max() < 1e-6
    cache.commit([1], [3])
    assert_close(cache.state(0, [1])[0], truth_state(cache, 0, 1), 1e-6)


@pytest.mark.parametrize("hard", [-50.0, -1e4, -1e6, float("-inf")])
def test_one_hard_decay_in_the_window(hard: float) -> None:
    # Suffix sums of per-token decays keep float32; differences of cumulative sums would lose 2e-6 to everything.
    cache = fp32_cache()
    put_window(cache, 1, 16, 20)
    cache.rings(0)[2][1, :, (20 + 7) % 32] = hard
    x = random_inputs(tokens=4)
    expected, _ = truth_step(cache, 0, 1, x)
    folded = truth_state(cache, 0, 1)
    assert_close(replay_step(*x, cache, 0, [1], bounds_of([4])), expected, 1e-6)  # observed 2e-7
    assert_close(cache.checkpoint(0)[1], folded, 5e-7)


@pytest.mark.parametrize("A_log", [0.0, 100.0, -100.0])
def test_a_no_op_token_changes_nothing(A_log: float) -> None:
    cache = fp32_cache()
    put_window(cache, 1, 5)
    state = cache.state(0, [1])
    x = Inputs(
        torch.zeros(1, SHAPE.qkv_dim),
        torch.full((1, 4), float("-inf")),
        torch.zeros(1, 4),
        torch.full((4,), A_log),
        torch.zeros(4),
    )
    assert replay_step(*x, cache, 0, [1], bounds_of([1])).eq(0).all()
    cache.commit([1], [1])
    assert torch.equal(cache.state(0, [1]), state)


def test_saturation_of_state_and_ring_is_flagged() -> None:
    cache = ReplayCache(SHAPE, 1, 5, state_dtype=F16)
    for slot in (1, 2, 3, 4):
        put_window(cache, slot, 9)
    _, u, _, _ = layer_tensors(cache, 0)
    u[2, :, :9] = 60000.0  # nine of these in one direction leave float16's range when folded
    cache.rings(0)[1][2, :, :9] = 12**-0.5
    cache.rings(0)[2][2, :, :9] = 0.0
    x = random_inputs(tokens=4)
    x.mixed_qkv[2] *= 1e6  # row of slot 3
    x.mixed_qkv[3] *= NAN  # row of slot 4
    replay_step(*x, cache, 0, [1, 2, 3, 4], bounds_of([1, 1, 1, 1]))
    assert cache.status.tolist() == [0, 0, 1, 2, 0]  # STATE_SATURATED, RING_SATURATED; NaN is not out of range
    assert cache.checkpoint(0)[2].abs().max() == 65504
    assert u[3, :, 9].abs().max() == 65504
    assert u[4, :, 9].isnan().all()
    assert not u[:4].isinf().any()
    assert not cache.checkpoint(0).isinf().any()


# --- views and outputs ---------------------------------------------------------------------------------------------


def test_any_element_aligned_view_of_an_argument() -> None:
    # Contract behaviour 11: odd storage offsets, strided rows, transposed and non-contiguous last dims.
    x, plain = random_inputs(tokens=5, dtype=BF16), nan_cache()
    put_window(plain, 1, 10, 25)
    expected = replay_step(*x, plain, 0, [1], bounds_of([5]))

    def odd(t: Tensor) -> Tensor:
        buffer = torch.full((2 * t.numel() + 1,), NAN).to(t.dtype)
        view = buffer[1:].view(*t.shape, 2)[..., 0]
        view.copy_(t)
        assert not view.is_contiguous()
        assert view.storage_offset() == 1
        return view

    cache, _ = canary_cache(state_dtype=F16, ring_dtype=F16)
    put_window(cache, 1, 10, 25)
    y = replay_step(*(odd(t) for t in x), cache, 0, torch.tensor([9, 1])[1:], torch.tensor([7, 0, 5])[1:])
    assert_same_bits(y, expected)
    for now, then in zip(layer_tensors(cache, 0), layer_tensors(plain, 0), strict=True):
        live = [(25 + j) % 32 for j in range(15)]
        assert_same_bits(*((t[1, :, live] if t.shape[2] == 32 else t[1]) for t in (now, then)))


def test_out_is_returned_and_every_lane_written() -> None:
    x, lengths, slots = random_inputs(tokens=6), [2, 1, 2], [1, 0, 2]
    plain = ReplayCache(SHAPE, 1, 3, state_dtype=F32)
    expected = replay_step(*x, plain, 0, slots, bounds_of(lengths))
    assert expected.is_contiguous()
    for out in (torch.full((6, 4, 10), NAN), torch.full((6, 47), NAN)[:, 3:43].view(6, 4, 10)):
        whole = out if out._base is None else out._base
        outside = whole.isnan().sum() - out.numel()
        cache = ReplayCache(SHAPE, 1, 3, state_dtype=F32)
        assert replay_step(*x, cache, 0, slots, bounds_of(lengths), out=out) is out
        assert_same_bits(out, expected)
        assert whole.isnan().sum() == outside


def test_an_earlier_output_is_never_overwritten() -> None:
    cache = ReplayCache(SHAPE, 1, 3, state_dtype=F32)
    first = replay_step(*random_inputs(tokens=2), cache, 0, [1], bounds_of([2]))
    kept = first.clone()
    cache.commit([1], [2])
    second = replay_step(*random_inputs(tokens=2, seed=5), cache, 0, [1], bounds_of([2]))
    assert_same_bits(first, kept)
    assert first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr()


def test_out_between_the_rows_of_an_input_shares_no_memory_with_it() -> None:
    # One buffer of an engine, [N, qkv | out]: the byte ranges interleave, but no byte is shared.
    x = random_inputs(tokens=3)
    buffer = torch.zeros(3, SHAPE.qkv_dim + 40)
    buffer[:, : SHAPE.qkv_dim] = x.mixed_qkv
    mixed, out = buffer[:, : SHAPE.qkv_dim], buffer[:, SHAPE.qkv_dim :].view(3, 4, 10)
    plain, cache = (ReplayCache(SHAPE, 1, 3, state_dtype=F32) for _ in range(2))
    expected = replay_step(*x, plain, 0, [1], bounds_of([3]))
    replay_step(mixed, x.a, x.b, x.A_log, x.dt_bias, cache, 0, [1], bounds_of([3]), out=out)
    assert_same_bits(out, expected)


@pytest.mark.parametrize("name", ["mixed_qkv", "a", "b", "A_log", "dt_bias", "state", "u_ring", "k_ring", "g_ring"])
def test_out_that_overlaps_an_input_is_refused(name: str) -> None:
    cache = ReplayCache(SHAPE, 1, 3, state_dtype=F32)
    x = random_inputs(tokens=2)
    memory = torch.zeros(4000)
    if name in ("mixed_qkv", "a", "b", "A_log", "dt_bias"):
        old = getattr(x, name)
        shared = memory[: old.numel()].view(old.shape)
        shared.copy_(old)
        x = replace(x, **{name: shared})
        out = memory[:80].view(2, 4, 10)
    else:
        pools = dict(zip("state u_ring k_ring g_ring".split(), layer_tensors(cache, 0), strict=True))
        out = pools[name].flatten()[:80].view(2, 4, 10)
    raises_nothing_changed(
        cache,
        ArgumentError,
        rf"^replay_step: out: expected no overlap with {name}\b",
        lambda: replay_step(*x, cache, 0, [1], bounds_of([2]), out=out),
    )


@pytest.mark.parametrize(
    ("out", "error"),
    [
        (torch.zeros(1, 4, 10).expand(2, 4, 10), ShapeError),
        (torch.zeros(2, 10, 4).mT, ShapeError),
        (torch.zeros(60).as_strided((2, 4, 10), (20, 10, 1)), ShapeError),
        (torch.zeros(2, 40), ShapeError),
        (torch.zeros(2, 4, 10, dtype=F16), DTypeError),
    ],
    ids=["expanded", "transposed", "overlapping rows", "flat", "dtype"],
)
def test_an_out_that_cannot_be_written_is_refused(out: Tensor, error: type[Exception]) -> None:
    cache = ReplayCache(SHAPE, 1, 3, state_dtype=F32)
    raises_nothing_changed(
        cache,
        error,
        "^replay_step: out: expected ",
        lambda: replay_step(*random_inputs(tokens=2), cache, 0, [1], bounds_of([2]), out=out),
    )


# --- grad ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mixed_qkv", "a", "b"])
def test_an_input_that_requires_grad_is_refused(name: str) -> None:
    cache = ReplayCache(SHAPE, 1, 3, state_dtype=F32)
    x = random_inputs(tokens=2)
    getattr(x, name).requires_grad_()
    raises_nothing_changed(
        cache,
        ArgumentError,
        f"^replay_step: {name}: requires grad",
        lambda: replay_step(*x, cache, 0, [1], bounds_of([2])),
    )
    with pytest.raises(ArgumentError, match=f"^gated_delta_rule: {name}: requires grad"):
        gated_delta_rule(*x, SHAPE, bounds_of([2]))
    with torch.no_grad():
        assert not replay_step(*x, cache, 0, [1], bounds_of([2])).requires_grad
        assert not gated_delta_rule(*x, SHAPE, bounds_of([2]))[0].requires_grad


def test_parameters_may_require_grad_and_be_reloaded_in_place() -> None:
    x = random_inputs(tokens=2)
    parameters = replace(
        x, A_log=torch.nn.Parameter(torch.zeros(4)), dt_bias=torch.nn.Parameter(torch.zeros(4, dtype=BF16))
    )
    for A_log, dt_bias in ((x.A_log, x.dt_bias.to(BF16)), (x.A_log + 1, -x.dt_bias.to(BF16))):
        with torch.no_grad():
            parameters.A_log.copy_(A_log)
            parameters.dt_bias.copy_(dt_bias)
        plain = replace(x, A_log=A_log, dt_bias=dt_bias)
        results = []
        for inputs in (parameters, plain):
            cache = ReplayCache(SHAPE, 1, 2, state_dtype=F32)
            y = replay_step(*inputs, cache, 0, [1], bounds_of([2]))
            prefill, state = gated_delta_rule(*inputs, SHAPE, bounds_of([2]))
            assert not any(t.requires_grad for t in (y, prefill, state))
            results.append((y, prefill, state))
        for mine, theirs in zip(*results, strict=True):
            assert_same_bits(mine, theirs)


# --- refusals of replay_step ---------------------------------------------------------------------------------------


def refused(error: type[Exception], match: str, cache: ReplayCache | None = None, **change: Any) -> None:
    """The call, changed in these arguments, raises and changes nothing."""
    if cache is None:
        cache = ReplayCache(SHAPE, 2, 4, state_dtype=F32)
        put_window(cache, 1, 10)
    x = random_inputs(tokens=3)
    arguments: dict[str, Any] = {
        "mixed_qkv": x.mixed_qkv, "a": x.a, "b": x.b, "A_log": x.A_log, "dt_bias": x.dt_bias, "cache": cache,
        "layer": 0, "state_indices": [1], "query_start_loc": bounds_of([3]),
    }  # fmt: skip
    raises_nothing_changed(cache, error, f"^replay_step: {match}", lambda: replay_step(**{**arguments, **change}))


@pytest.mark.parametrize("name", ["mixed_qkv", "a", "b", "A_log", "dt_bias"])
def test_tensors_that_do_not_fit_are_refused(name: str) -> None:
    good = getattr(random_inputs(tokens=3), name)
    refused(DTypeError, f"{name}: expected a tensor, got float", **{name: 1.0})
    refused(DTypeError, f"{name}: expected float32 or bfloat16 or float16, got float64", **{name: good.double()})
    refused(ShapeError, f"{name}: expected shape", **{name: good[..., :-1]})
    refused(ShapeError, f"{name}: expected shape", **{name: good[None]})


@pytest.mark.parametrize("name", ["a", "b"])
def test_gates_of_another_number_of_tokens_are_refused(name: str) -> None:
    refused(
        ShapeError, rf"{name}: expected shape \[3, 4\], got \[2, 4\]", **{name: getattr(random_inputs(tokens=2), name)}
    )


def test_wrong_layers_widths_and_bounds_are_refused() -> None:
    cache = ReplayCache(SHAPE, 2, 4)
    x = random_inputs(tokens=3)
    for layer, error in ((2, ArgumentError), (-1, ArgumentError), (1.0, DTypeError), (True, DTypeError)):
        raises_nothing_changed(
            cache, error, "layer", lambda layer=layer: replay_step(*x, cache, layer, [1], bounds_of([3]))
        )
    refused(ArgumentError, r"executed_width: expected 1..8 \(max_query_len\), got 9", executed_width=9)
    refused(ArgumentError, "executed_width: expected at least 1, got 0", executed_width=0)
    refused(DTypeError, "executed_width", executed_width=2.0)
    refused(ArgumentError, "query_start_loc: slot 1 has 3 tokens, more than executed_width=2", executed_width=2)
    refused(DTypeError, "query_start_loc: expected a tensor, got list", query_start_loc=[0, 3])
    refused(DTypeError, "query_start_loc: expected int32", query_start_loc=torch.tensor([0.0, 3.0]))
    refused(ShapeError, r"query_start_loc: expected shape \[2\], got \[3\]", query_start_loc=bounds_of([1, 2]))
    refused(ShapeError, r"query_start_loc: expected shape \[2\]", query_start_loc=bounds_of([3])[None])
    refused(ArgumentError, "query_start_loc: expected to start at 0", query_start_loc=torch.tensor([1, 3]))
    refused(ArgumentError, "query_start_loc: expected to end at N=3", query_start_loc=torch.tensor([0, 4]))
    refused(
        ArgumentError,
        "query_start_loc: expected to never fall",
        state_indices=[1, 2],
        query_start_loc=torch.tensor([0, 3, 1]),
    )
    refused(ShapeError, "query_start_loc", state_indices=[], query_start_loc=torch.zeros(0, dtype=torch.int32))


def test_wrong_slots_are_refused() -> None:
    refused(SlotError, "state_indices: expected slots below num_slots=4, got 4", state_indices=[4])
    refused(SlotError, "state_indices: slot 1 is named twice", state_indices=[1, 1], query_start_loc=bounds_of([1, 2]))
    refused(DTypeError, "state_indices", state_indices=[1.0])


def test_a_cache_that_is_none_is_refused() -> None:
    with pytest.raises(DTypeError, match=r"^replay_step: cache: expected a ReplayCache, got NoneType"):
        replay_step(*random_inputs(tokens=1), None, 0, [1], bounds_of([1]))  # type: ignore[arg-type]


def test_a_slot_is_stepped_once_per_layer_with_one_width_and_length() -> None:
    cache = ReplayCache(SHAPE, 2, 4, state_dtype=F32)
    replay_step(*random_inputs(tokens=3), cache, 0, [1], bounds_of([3]), executed_width=4)
    refused(ProtocolError, "slot 1: layer 0 was stepped already and not committed since", cache)
    refused(
        ProtocolError,
        "slot 1: layer 0 was stepped with executed_width=4 and 3 tokens, layer 1 now with 8 and 3",
        cache,
        layer=1,
    )
    refused(
        ProtocolError, "slot 1: layer 0 .* layer 1 now with 4 and 2", cache, layer=1, executed_width=4,
        query_start_loc=bounds_of([2]),
    )  # fmt: skip
    replay_step(*random_inputs(tokens=3), cache, 1, [1], bounds_of([3]), executed_width=4)
    refused(ProtocolError, "slot 1: layer 1 was stepped already", cache, layer=1, executed_width=4)
    cache.commit([1], [3])
    replay_step(*random_inputs(tokens=3), cache, 0, [1], bounds_of([3]))


def test_a_dead_slot_is_refused_until_reset() -> None:
    cache = ReplayCache(SHAPE, 1, 4, state_dtype=F32)
    cache.invalidate([1])
    refused(DeadSlotError, "slot 1 is dead", cache)
    cache.reset([1])
    replay_step(*random_inputs(tokens=3), cache, 0, [1], bounds_of([3]))


@pytest.mark.parametrize(("start", "count"), [(32, 0), (-1, 0), (0, 17), (0, -1)])
def test_cursors_out_of_range_are_refused(start: int, count: int) -> None:
    cache = ReplayCache(SHAPE, 1, 4, state_dtype=F32)
    cache.ring_start[1], cache.num_committed[1] = start, count
    refused(ProtocolError, f"slot 1: cursors out of range: ring_start={start} .*num_committed={count}", cache)


def test_one_bad_row_stops_the_whole_call() -> None:
    cache = ReplayCache(SHAPE, 1, 4, state_dtype=F32)
    put_window(cache, 1, 10)
    put_window(cache, 2, 10)
    cache.invalidate([2])
    refused(DeadSlotError, "slot 2", cache, state_indices=[1, 2], query_start_loc=bounds_of([1, 2]))


# --- backends ------------------------------------------------------------------------------------------------------


def test_backend_by_name() -> None:
    x = random_inputs(tokens=2)
    results = []
    usable = [info.name for info in backends() if info.usable]
    assert "torch" in usable
    for backend in ("auto", *usable):
        cache = ReplayCache(SHAPE, 1, 2, state_dtype=F32)
        results.append(replay_step(*x, cache, 0, [1], bounds_of([2]), backend=backend))
        gated_delta_rule(*x, SHAPE, bounds_of([2]), backend=backend)
    assert_same_bits(results[0], results[1])  # "auto" takes the first that can


def test_an_unknown_backend_is_refused() -> None:
    refused(ArgumentError, "backend: expected 'auto' or one of 'cuda', 'cpu', 'torch', got 'metal'", backend="metal")
    with pytest.raises(ArgumentError, match=r"^gated_delta_rule: backend: .* got 'metal'"):
        gated_delta_rule(*random_inputs(tokens=2), SHAPE, bounds_of([2]), backend="metal")


def test_a_backend_that_cannot_run_the_call_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Picky:
        NAME = "picky"

        def usable(self) -> str | None:
            return None

        def supports(self, call: registry.Call) -> str | None:
            return f"no {call.op} with K = {call.sizes[2]}"

    monkeypatch.setattr(registry, "BY_PREFERENCE", (Picky(), *registry.BY_PREFERENCE))
    refused(
        BackendError,
        "backend 'picky' was asked for but cannot run this call: no replay_step with K = 12",
        backend="picky",
    )
    with pytest.raises(BackendError, match="no gated_delta_rule with K = 12"):
        gated_delta_rule(*random_inputs(tokens=2), SHAPE, bounds_of([2]), backend="picky")


# --- gated_delta_rule ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "-".join(map(str, s.sizes)))
def test_prefill_equals_float64(shape: GDNShape) -> None:
    lengths = [5, 0, 9, 1]
    x, state = random_inputs(shape, 15), random_state(shape, 4)
    out, final = gated_delta_rule(*x, shape, bounds_of(lengths), initial_state=state)
    expected, expected_final = reference.recurrent(*x.double(), shape, bounds_of(lengths), initial_state=state.double())
    assert_close(out, expected, 1e-6)
    assert_close(final, expected_final, 1e-6)
    assert_same_bits(final[1], state[1], "an empty row's state")
    zeros, from_zero = gated_delta_rule(*x, shape, bounds_of(lengths))
    expected, expected_final = reference.recurrent(*x.double(), shape, bounds_of(lengths))
    assert_close(zeros, expected, 1e-6)
    assert_close(from_zero, expected_final, 1e-6)
    assert from_zero[1].eq(0).all()


@pytest.mark.parametrize("io", [F32, F16, BF16])
@pytest.mark.parametrize("state", [torch.float64, F32, F16, BF16])
def test_prefill_dtypes(io: torch.dtype, state: torch.dtype) -> None:
    x, initial = random_inputs(tokens=6, dtype=io), random_state(rows=2, dtype=state)
    kept = initial.clone()
    out, final = gated_delta_rule(*x, SHAPE, bounds_of([2, 4]), initial_state=initial)
    expected, expected_final = reference.recurrent(
        *x.double(), SHAPE, bounds_of([2, 4]), initial_state=initial.double()
    )
    assert (out.dtype, final.dtype) == (io, F32)
    assert_close(out, expected, tolerance(io))
    assert_close(final, expected_final, 1e-6)
    assert_same_bits(initial, kept)


@pytest.mark.parametrize("lengths", [[], [0], [0, 0]])
def test_prefill_of_nothing(lengths: list[int]) -> None:
    state = random_state(rows=len(lengths))
    out, final = gated_delta_rule(*random_inputs(tokens=0), SHAPE, bounds_of(lengths), initial_state=state)
    assert out.shape == (0, 4, 10)
    assert_same_bits(final, state)
    assert final.data_ptr() != state.data_ptr() or not lengths


def test_prefill_leaves_tokens_of_no_row_zero() -> None:
    out, _ = gated_delta_rule(*random_inputs(tokens=5), SHAPE, bounds_of([1, 2]))
    assert out[:3].ne(0).any(-1).all()
    assert out[3:].eq(0).all()


def test_prefill_rows_have_the_same_bits_alone() -> None:
    lengths = [3, 7, 1, 0, 7, 2]
    x, state = random_inputs(tokens=20), random_state(rows=6)
    out, final = gated_delta_rule(*x, SHAPE, bounds_of(lengths), initial_state=state)
    bounds = bounds_of(lengths).tolist()
    for i, (begin, end) in enumerate(itertools.pairwise(bounds)):
        alone, last = gated_delta_rule(
            *x.rows(slice(begin, end)), SHAPE, bounds_of([end - begin]), initial_state=state[i : i + 1]
        )
        assert_same_bits(alone, out[begin:end])
        assert_same_bits(last[0], final[i])


def test_prefill_keeps_a_nan_in_its_row_and_later_tokens() -> None:
    x = random_inputs(tokens=6)
    clean, clean_final = gated_delta_rule(*x, SHAPE, bounds_of([3, 3]))
    x.mixed_qkv[1] = NAN
    out, final = gated_delta_rule(*x, SHAPE, bounds_of([3, 3]))
    assert_same_bits(out[[0, 3, 4, 5]], clean[[0, 3, 4, 5]])
    assert_same_bits(final[1], clean_final[1])
    assert final[0].isnan().any()


def test_prefill_then_decode_equals_the_recurrence() -> None:
    x = random_inputs(tokens=12)
    expected, _ = reference.recurrent(*x.double(), SHAPE, bounds_of([12]))
    cache = ReplayCache(SHAPE, 1, 2, state_dtype=F32)
    out, final = gated_delta_rule(*x.rows(slice(0, 7)), SHAPE, bounds_of([7]))
    cache.load_state(0, [1], final)
    outs = [out]
    for t in range(7, 12):
        outs.append(replay_step(*x.rows(slice(t, t + 1)), cache, 0, [1], bounds_of([1])))
        cache.commit([1], [1])
    assert_close(torch.cat(outs), expected, 1e-6)


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"mixed_qkv": torch.zeros(3, 87)}, ShapeError, "mixed_qkv: expected shape"),
        ({"mixed_qkv": torch.zeros(3, 88, dtype=torch.float64)}, DTypeError, "mixed_qkv: expected float32"),
        ({"mixed_qkv": None}, DTypeError, "mixed_qkv: expected a tensor"),
        ({"a": torch.zeros(2, 4)}, ShapeError, "a: expected shape"),
        ({"A_log": torch.zeros(5)}, ShapeError, "A_log: expected shape"),
        ({"dt_bias": torch.zeros(4, dtype=torch.int32)}, DTypeError, "dt_bias: expected float32"),
        ({"shape": (2, 4, 12, 10)}, DTypeError, "shape: expected a GDNShape"),
        ({"query_start_loc": torch.tensor([0, 4])}, ArgumentError, "query_start_loc: expected to end at N=3"),
        ({"query_start_loc": torch.tensor([0, 2, 1])}, ArgumentError, "query_start_loc: expected to never fall"),
        ({"query_start_loc": torch.tensor([1, 3])}, ArgumentError, "query_start_loc: expected to start at 0"),
        ({"query_start_loc": torch.zeros(0, dtype=torch.int32)}, ShapeError, "query_start_loc"),
        ({"query_start_loc": torch.tensor([0.0])}, DTypeError, "query_start_loc: expected int32"),
        ({"initial_state": torch.zeros(2, 4, 10, 12)}, ShapeError, "initial_state: expected shape"),
        ({"initial_state": torch.zeros(1, 4, 12, 10)}, ShapeError, "initial_state: expected shape"),
        ({"initial_state": torch.zeros(1, 4, 10, 12).long()}, DTypeError, "initial_state: expected float32"),
        (
            {"initial_state": torch.zeros(1, 4, 10, 12, requires_grad=True)},
            ArgumentError,
            "initial_state: requires grad",
        ),
    ],
)
def test_prefill_refusals(change: dict[str, Any], error: type[ReplayStateError], match: str) -> None:
    x = random_inputs(tokens=3)
    arguments: dict[str, Any] = {
        "mixed_qkv": x.mixed_qkv, "a": x.a, "b": x.b, "A_log": x.A_log, "dt_bias": x.dt_bias, "shape": SHAPE,
        "query_start_loc": bounds_of([3]),
    }  # fmt: skip
    with pytest.raises(error, match=f"^gated_delta_rule: {match}") as caught:
        gated_delta_rule(**{**arguments, **change})
    assert type(caught.value) is error


def test_status_stays_clear_in_a_good_step() -> None:
    cache = fill_with_nan(ReplayCache(SHAPE, 1, 3))
    slot = cache.allocate()
    replay_step(*random_inputs(tokens=8), cache, 0, [slot], bounds_of([8]))
    cache.commit([slot], [8])
    assert SlotStatus(int(cache.status[slot])) == SlotStatus.OK
    cache.check()
