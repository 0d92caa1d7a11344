"""The kernel-level callables: the keywords and defaults of FlashInfer's, the numbers of the float64 truth.

In plain words: the pools of a cache are handed to the kernel with cursors per row, as an engine would. Outputs are
compared with float64, and bit by bit with `replay_step` on a copy of the same pools. Then come padding rows among NaN,
the restart convenience, the materializer's rules, and the g ring translated to cumulative sums and back.
"""

from __future__ import annotations

import copy
import inspect
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from replaystate import (
    GDNShape,
    ReplayCache,
    convert_g_ring,
    gated_delta_rule_mtp_ucache_flush,
    gdn_prefix_materialize,
    reference,
    replay_step,
)
from replaystate.errors import ArgumentError, DTypeError, GLayoutError, ReplayStateError, ShapeError, SlotError
from replaystate.kernel_api import require_same_g_layout

from .helpers import (
    SHAPE,
    Inputs,
    assert_close,
    assert_same_bits,
    bounds_of,
    canary_cache,
    layer_tensors,
    nan_cache,
    put_window,
    random_inputs,
    truth_state,
    truth_step,
)

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
NAN = float("nan")


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def filled(**options: Any) -> ReplayCache:
    """Slots 1..4 of a pool of NaN: windows empty, short, wrapped past the fold's threshold, full."""
    cache = nan_cache(**{"num_slots": 6, "state_dtype": F32, **options})
    for slot, (count, start) in {1: (0, 4), 2: (5, 30), 3: (11, 27), 4: (16, 9)}.items():
        put_window(cache, slot, count, start, seed=slot)
    return cache


def kernel_arguments(cache: ReplayCache, x: Inputs, slots: list[int], width: int) -> dict[str, Any]:
    """Keywords of one call: rows of `width` tokens each, cursors looked up per row (padding rows get 0, 0)."""
    q, k, v = reference.split_qkv(x.mixed_qkv, cache.shape)
    state, u_ring, k_ring, g_ring = layer_tensors(cache, 0)
    rows = len(slots)

    def padded(t: Tensor) -> Tensor:
        return t.reshape(rows, width, *t.shape[1:])

    return {
        "A_log": x.A_log, "a": padded(x.a), "dt_bias": x.dt_bias, "q": padded(q), "k": padded(k), "v": padded(v),
        "b": padded(x.b), "initial_state_source": state, "initial_state_indices": ints(*slots), "k_cache": k_ring,
        "u_cache": u_ring, "g_cache": g_ring,
        "hist_len": ints(*(int(cache.num_committed[slot]) if slot >= 0 else 0 for slot in slots)),
        "cache_base": ints(*(int(cache.ring_start[slot]) if slot >= 0 else 0 for slot in slots)),
        "restart_hist_on_flush": False,
    }  # fmt: skip


# --- keywords ------------------------------------------------------------------------------------------------------


def test_keywords_and_defaults_are_flashinfers() -> None:
    parameters = inspect.signature(gated_delta_rule_mtp_ucache_flush).parameters
    assert list(parameters) == (
        "A_log a dt_bias softplus_beta softplus_threshold q k v b initial_state_source initial_state_indices "
        "use_qk_l2norm_in_kernel scale output k_cache u_cache g_cache hist_len cache_base flush_min "
        "restart_hist_on_flush backend".split()
    )
    defaults = {name: p.default for name, p in parameters.items() if p.default not in (None, inspect.Parameter.empty)}
    assert defaults == {
        "softplus_beta": 1.0, "softplus_threshold": 20.0, "use_qk_l2norm_in_kernel": True,
        "restart_hist_on_flush": True, "backend": "auto",
    }  # fmt: skip
    assert list(inspect.signature(gdn_prefix_materialize).parameters) == (
        "state src_slots dst_slots k_cache u_cache g_cache cache_base count active_request_indices num_active "
        "backend".split()
    )


def test_both_carry_their_g_layout() -> None:
    assert gated_delta_rule_mtp_ucache_flush.g_layout == "per_token"
    assert gdn_prefix_materialize.g_layout == "per_token"


# --- the flush kernel ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [1, 4, 8, 16])
def test_padded_rows_equal_float64(width: int) -> None:
    cache = filled(max_query_len=16)
    slots = [3, 1, 4, 2]
    x = random_inputs(tokens=4 * width)
    expected, folded, appended = [], {}, {}
    for row, slot in enumerate(slots):
        out, window = truth_step(cache, 0, slot, x.rows(slice(row * width, (row + 1) * width)))
        expected.append(out)
        appended[slot] = window
        if int(cache.num_committed[slot]) >= 17 - width:
            folded[slot] = truth_state(cache, 0, slot)
    before = cache.checkpoint(0).clone()
    y = gated_delta_rule_mtp_ucache_flush(**kernel_arguments(cache, x, slots, width))
    assert y.shape == (4, width, 4, 10)
    assert_close(y, torch.stack(expected), 1e-6)  # observed 2.0e-7
    state, u, k, g = layer_tensors(cache, 0)
    for slot in slots:
        at = [(int(cache.ring_start[slot]) + int(cache.num_committed[slot]) + s) % 32 for s in range(width)]
        assert_close(u[slot][:, at].transpose(0, 1), appended[slot].u, 1e-6)
        assert_close(k[slot][:, at].transpose(0, 1), appended[slot].k, 5e-7)
        assert_close(g[slot][:, at].T, appended[slot].g, 5e-7)
        if slot in folded:
            assert_close(state[slot], folded[slot], 5e-7)
        else:
            assert_same_bits(state[slot], before[slot])


@pytest.mark.parametrize(("io", "state"), [(F32, F32), (BF16, F16), (F16, BF16)])
def test_the_same_bits_as_replay_step(io: torch.dtype, state: torch.dtype) -> None:
    cache = filled(state_dtype=state)
    twin = copy.deepcopy(cache)
    x = random_inputs(tokens=12, dtype=io, gate_dtype=F32)
    y = gated_delta_rule_mtp_ucache_flush(**kernel_arguments(cache, x, [4, 2, 3], 4))
    expected = replay_step(*x, twin, 0, [4, 2, 3], bounds_of([4, 4, 4]), executed_width=4)
    assert_same_bits(y.flatten(0, 1), expected)
    for mine, theirs in zip(layer_tensors(cache, 0), layer_tensors(twin, 0), strict=True):
        assert_same_bits(mine, theirs)


def test_padding_rows_are_untouched() -> None:
    # Negative rows: their inputs are NaN, their cursors are nonsense, and neither pools nor their output change.
    cache, buffers = canary_cache(num_slots=6)
    put_window(cache, 2, 11, 27)
    put_window(cache, 5, 3, 1)
    before = [x.clone() for x in buffers]
    x = random_inputs(tokens=8)
    x.mixed_qkv[2:6] = x.a[2:6] = NAN
    arguments = kernel_arguments(cache, x, [2, -1, -7, 5], 2)
    arguments["hist_len"][1:3] = ints(9999, -5)
    arguments["cache_base"][1:3] = ints(-9999, 77)
    output = torch.full((4, 2, 4, 10), 6.0)
    assert gated_delta_rule_mtp_ucache_flush(**arguments, output=output) is output
    assert output[1:3].eq(6).all()
    assert output[[0, 3]].isfinite().all()
    written = {2: [6, 7], 5: [4, 5]}  # (base + P + s) mod 32; a window of 11 does not fold at width 2
    expected = sum(2 * (4 * 10 + 2 * 12 + 4) for _ in written)
    changed = sum(int((now != then).sum()) for now, then in zip(buffers, before, strict=True))
    assert 0 < changed <= expected
    _, u, k, g = layer_tensors(cache, 0)
    for slot, rows in written.items():
        u[slot, :, rows], k[slot, :, rows], g[slot, :, rows] = 12345.0, 12345.0, 12345.0
    for now, then in zip(buffers, before, strict=True):
        assert_same_bits(now, then)


def test_an_output_of_its_own_is_fresh_and_zero_in_padding_rows() -> None:
    cache = filled()
    arguments = kernel_arguments(cache, random_inputs(tokens=4, dtype=BF16), [-1, 2], 2)
    first = gated_delta_rule_mtp_ucache_flush(**arguments)
    second = gated_delta_rule_mtp_ucache_flush(**arguments)
    assert first.dtype == BF16
    assert first[0].eq(0).all()
    assert first.data_ptr() != second.data_ptr()
    assert_same_bits(first, second)  # cursors did not move: the same rows were appended again


def test_a_batch_of_padding_or_nothing() -> None:
    cache = filled()
    before = [x.clone() for x in layer_tensors(cache, 0)]
    y = gated_delta_rule_mtp_ucache_flush(**kernel_arguments(cache, random_inputs(tokens=4), [-1, -1], 2))
    assert y.eq(0).all()
    y = gated_delta_rule_mtp_ucache_flush(**kernel_arguments(cache, random_inputs(tokens=0), [], 2))
    assert y.shape == (0, 2, 4, 10)
    for now, then in zip(layer_tensors(cache, 0), before, strict=True):
        assert_same_bits(now, then)


@pytest.mark.parametrize("flush_min", [1, 5, 11, 12, 13])
def test_flush_min_decides_which_rows_fold(flush_min: int) -> None:
    cache = filled()
    before = cache.checkpoint(0).clone()
    slots = [1, 2, 3, 4]
    arguments = kernel_arguments(cache, random_inputs(tokens=16), slots, 4)
    gated_delta_rule_mtp_ucache_flush(**arguments, flush_min=flush_min)
    for slot in slots:
        folded = not torch.equal(cache.checkpoint(0)[slot], before[slot])
        assert folded == (int(cache.num_committed[slot]) >= flush_min)


def test_flush_min_defaults_to_the_largest() -> None:
    results = []
    for flush_min in (None, 13):
        cache = filled()
        arguments = kernel_arguments(cache, random_inputs(tokens=16), [1, 2, 3, 4], 4)
        gated_delta_rule_mtp_ucache_flush(**arguments, flush_min=flush_min)
        results.append(cache.checkpoint(0))
    assert_same_bits(*results)


@pytest.mark.parametrize("restart", [False, True])
def test_restart_hist_on_flush(restart: bool) -> None:
    cache = filled()
    arguments = kernel_arguments(cache, random_inputs(tokens=20), [4, -1, 2, 3, 1], 4)
    arguments["hist_len"][1], arguments["cache_base"][1] = 16, 5  # a padding row keeps its words
    lens, bases = arguments["hist_len"].clone(), arguments["cache_base"].clone()
    arguments["restart_hist_on_flush"] = restart
    gated_delta_rule_mtp_ucache_flush(**arguments, flush_min=11)
    if restart:
        lens, bases = ints(0, 16, 5, 0, 0), ints(25, 5, 30, (27 + 11) % 32, 4)
    assert_same_bits(arguments["hist_len"], lens)
    assert_same_bits(arguments["cache_base"], bases)


def test_standalone_decoding_with_restart_equals_the_recurrence() -> None:
    # The convenience as a whole: the caller only adds what it accepts.
    cache = nan_cache(state_dtype=F32)
    cache.reset([1])
    x = random_inputs(tokens=40)
    expected, _ = reference.recurrent(*x.double(), SHAPE, bounds_of([40]))
    lens, base = ints(0), ints(0)
    for begin in range(0, 40, 4):
        arguments = kernel_arguments(cache, x.rows(slice(begin, begin + 4)), [1], 4)
        arguments |= {"hist_len": lens, "cache_base": base, "restart_hist_on_flush": True}
        y = gated_delta_rule_mtp_ucache_flush(**arguments)
        lens += 4
        assert_close(y[0], expected[begin : begin + 4], 1e-6)


def test_no_cache_base_means_zeros() -> None:
    cache, twin = (nan_cache(state_dtype=F32) for _ in range(2))
    for c in (cache, twin):
        put_window(c, 1, 6, 0)
    arguments = kernel_arguments(cache, random_inputs(tokens=2), [1], 2)
    y = gated_delta_rule_mtp_ucache_flush(**{**arguments, "cache_base": None})
    assert_same_bits(y, gated_delta_rule_mtp_ucache_flush(**kernel_arguments(twin, random_inputs(tokens=2), [1], 2)))
    with pytest.raises(ArgumentError, match=r"cache_base: expected a tensor with restart_hist_on_flush=True"):
        gated_delta_rule_mtp_ucache_flush(**{**arguments, "cache_base": None, "restart_hist_on_flush": True})


def test_no_indices_mean_row_i_is_slot_i() -> None:
    cache, twin = (nan_cache(state_dtype=F32, num_slots=3, null_slot=None) for _ in range(2))
    for c in (cache, twin):
        for slot in range(3):
            put_window(c, slot, 4 * slot, 29, seed=slot)
    x = random_inputs(tokens=6)
    y = gated_delta_rule_mtp_ucache_flush(**{**kernel_arguments(cache, x, [0, 1, 2], 2), "initial_state_indices": None})
    assert_same_bits(y, gated_delta_rule_mtp_ucache_flush(**kernel_arguments(twin, x, [0, 1, 2], 2)))


@pytest.mark.parametrize("scale", [None, 1.0, 0.5])
def test_scale(scale: float | None) -> None:
    cache = filled()
    x = random_inputs(tokens=2)
    expected, _ = truth_step(cache, 0, 2, x, scale=scale)
    y = gated_delta_rule_mtp_ucache_flush(**kernel_arguments(cache, x, [2], 2), scale=scale)
    assert_close(y[0], expected, 1e-6)


def test_padded_lanes_cannot_move_the_state() -> None:
    # a = -inf, q = k = v = b = 0: what the adapter pads with. Committed, they would change nothing.
    cache = filled()
    x = random_inputs(tokens=4)
    x.mixed_qkv[2:] = 0
    x.b[2:] = 0
    x.a[2:] = -math.inf
    gated_delta_rule_mtp_ucache_flush(**kernel_arguments(cache, x, [2], 4))
    cache.num_committed[2] = 5 + 2
    two = cache.state(0, [2])
    cache.num_committed[2] = 5 + 4
    assert torch.equal(cache.state(0, [2]), two)


def test_parameters_that_require_grad() -> None:
    cache, twin = filled(), filled()
    x = random_inputs(tokens=2)
    arguments = kernel_arguments(cache, x, [2], 2)
    arguments["A_log"], arguments["dt_bias"] = (torch.nn.Parameter(t.clone()) for t in (x.A_log, x.dt_bias))
    y = gated_delta_rule_mtp_ucache_flush(**arguments)
    assert not y.requires_grad
    assert_same_bits(y, gated_delta_rule_mtp_ucache_flush(**kernel_arguments(twin, x, [2], 2)))


# One entry for each `Raises` line, and one for each argument.
@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"softplus_beta": 2.0}, ArgumentError, "softplus_beta, softplus_threshold: expected 1.0 and 20.0, got 2.0"),
        ({"softplus_threshold": 10.0}, ArgumentError, "softplus_beta, softplus_threshold: .* and 10.0"),
        ({"use_qk_l2norm_in_kernel": False}, ArgumentError, "use_qk_l2norm_in_kernel: expected True, got False"),
        *[
            ({name: None}, DTypeError, f"{name}: expected a tensor, got NoneType")
            for name in "A_log a dt_bias q k v b initial_state_source k_cache u_cache g_cache hist_len".split()
        ],
        ({"q": torch.zeros(4, 2, 12)}, ShapeError, r"q, v: expected \[B, T, heads, dim\], got \[4, 2, 12\]"),
        ({"q": torch.zeros(2, 2, 2, 11)}, ShapeError, "q: expected shape"),
        ({"k": torch.zeros(2, 3, 2, 12)}, ShapeError, "k: expected shape"),
        ({"v": torch.zeros(2, 2, 3, 10)}, ShapeError, "v: expected shape"),
        ({"a": torch.zeros(2, 2, 4).double()}, DTypeError, "a: expected float32"),
        ({"b": torch.zeros(4, 4)}, ShapeError, "b: expected shape"),
        ({"A_log": torch.zeros(2)}, ShapeError, "A_log: expected shape"),
        ({"dt_bias": torch.zeros(1, 4)}, ShapeError, "dt_bias: expected shape"),
        ({"q": torch.zeros(2, 2, 2, 12, requires_grad=True)}, ArgumentError, "q: requires grad"),
        ({"initial_state_indices": ints(2)}, ShapeError, "initial_state_indices: expected shape"),
        ({"initial_state_indices": ints(2, 3).float()}, DTypeError, "initial_state_indices: expected int32"),
        ({"initial_state_indices": ints(2, 6)}, SlotError, "initial_state_indices: .* below num_slots=6, got 6"),
        ({"initial_state_indices": ints(2, 2)}, SlotError, "initial_state_indices: slot 2 is named twice"),
        ({"hist_len": ints(5, 11).long()}, DTypeError, "hist_len: expected int32"),
        ({"cache_base": ints(5)}, ShapeError, "cache_base: expected shape"),
        ({"hist_len": ints(5, 17)}, ArgumentError, "slot 3: expected hist_len in 0..16 .* got 17"),
        ({"hist_len": ints(-1, 3)}, ArgumentError, "slot 2: expected hist_len in 0..16"),
        ({"cache_base": ints(0, 32)}, ArgumentError, "slot 3: .* cache_base in 0..31, got 11 and 32"),
        ({"flush_min": 0}, ArgumentError, r"flush_min: expected 1..15 \(window 16 \+ 1 - T=2\), got 0"),
        ({"flush_min": 16}, ArgumentError, "flush_min: expected 1..15"),
        ({"output": torch.zeros(2, 2, 4, 9)}, ShapeError, "output: expected shape"),
        ({"output": torch.zeros(2, 2, 4, 10).long()}, DTypeError, "output: expected float32"),
        ({"output": torch.zeros(1, 2, 4, 10).expand(2, 2, 4, 10)}, ShapeError, "output: "),
        ({"backend": "tpu"}, ArgumentError, "backend: expected 'auto'"),
    ],
)
def test_refusals(change: dict[str, Any], error: type[ReplayStateError], match: str) -> None:
    cache = filled()
    arguments = kernel_arguments(cache, random_inputs(tokens=4), [2, 3], 2)
    before = [x.clone() for x in (*layer_tensors(cache, 0), arguments["hist_len"], arguments["cache_base"])]
    with pytest.raises(error, match=f"^(gated_delta_rule_mtp_)?ucache_flush: {match}") as caught:
        gated_delta_rule_mtp_ucache_flush(**{**arguments, **change})
    assert type(caught.value) is error
    after = (*layer_tensors(cache, 0), arguments["hist_len"], arguments["cache_base"])
    for now, then in zip(after, before, strict=True):
        assert_same_bits(now, then)


def test_pools_that_do_not_fit_each_other_are_refused() -> None:
    cache = filled()
    arguments = kernel_arguments(cache, random_inputs(tokens=4), [2, 3], 2)
    state, u, k, g = layer_tensors(cache, 0)
    for change, error, match in (
        ({"u_cache": u[:5]}, ShapeError, r"u_cache: expected shape \[6, 4, 32, 10\], got \[5, 4, 32, 10\]"),
        ({"k_cache": k[:, :, :31]}, ShapeError, "u_cache: expected shape"),
        ({"k_cache": torch.zeros(6, 3, 32, 12)}, ShapeError, "k_cache: expected a number of key heads"),
        ({"k_cache": k[0]}, ShapeError, "k_cache: expected shape"),
        ({"g_cache": g.half()}, DTypeError, "g_cache: expected float32"),
        ({"initial_state_source": state.double()}, DTypeError, "state: expected float32"),
        ({"initial_state_source": state.mT.contiguous().mT}, ShapeError, "state: expected dense slots"),
        ({"u_cache": u[..., :24, :], "k_cache": k[:, :, :24], "g_cache": g[..., :24]}, ReplayStateError, ""),
    ):
        with pytest.raises(error, match=f"^gated_delta_rule_mtp_ucache_flush: {match}"):
            gated_delta_rule_mtp_ucache_flush(**{**arguments, **change})


def test_more_tokens_than_the_window_are_refused() -> None:
    cache = filled()
    with pytest.raises(ArgumentError, match=r"max_query_len: expected at most window=16, got 17"):
        gated_delta_rule_mtp_ucache_flush(**kernel_arguments(cache, random_inputs(tokens=17), [2], 17))


def test_an_output_that_overlaps_an_input_is_refused() -> None:
    cache = filled()
    arguments = kernel_arguments(cache, random_inputs(tokens=4), [2, 3], 2)
    for name in ("initial_state_source", "u_cache"):
        output = arguments[name].flatten()[:160].view(2, 2, 4, 10)
        with pytest.raises(ArgumentError, match=f"output: expected no overlap with {name}"):
            gated_delta_rule_mtp_ucache_flush(**arguments, output=output)
    with pytest.raises(ArgumentError, match=r"output: expected no overlap with v"):
        gated_delta_rule_mtp_ucache_flush(
            **{**arguments, "v": arguments["v"].clone()} | {"output": (v := torch.zeros(2, 2, 4, 10)), "v": v}
        )


# --- the materializer ----------------------------------------------------------------------------------------------


def materialize_arguments(cache: ReplayCache, src: list[int], dst: list[int], count: list[int]) -> dict[str, Any]:
    state, u, k, g = layer_tensors(cache, 0)
    base = [int(cache.ring_start[slot]) if slot >= 0 else 0 for slot in src]
    return {
        "state": state, "src_slots": ints(*src), "dst_slots": ints(*dst), "k_cache": k, "u_cache": u, "g_cache": g,
        "cache_base": ints(*base), "count": ints(*count),
    }  # fmt: skip


@pytest.mark.parametrize("dtype", [F32, F16, BF16])
def test_materialize_equals_float64(dtype: torch.dtype) -> None:
    cache = filled(num_slots=9, state_dtype=dtype)
    rows = [(3, 6, 8), (4, 7, 16), (2, 8, 1), (4, 5, 9)]
    truth = [truth_state(cache, 0, src, count) for src, _, count in rows]
    before = [x.clone() for x in layer_tensors(cache, 0)]
    state = gdn_prefix_materialize(
        **materialize_arguments(cache, *(list(column) for column in zip(*rows, strict=True)))
    )
    assert state is cache.checkpoint(0)
    for (_, dst, _), expected in zip(rows, truth, strict=True):
        assert_close(state[dst], expected, {F32: 5e-7, F16: 5e-4, BF16: 4e-3}[dtype])
    assert_same_bits(state[:5], before[0][:5])
    for now, then in zip(layer_tensors(cache, 0)[1:], before[1:], strict=True):
        assert_same_bits(now, then)


@pytest.mark.parametrize("dtype", [F32, F16, BF16])
def test_count_zero_copies_bits(dtype: torch.dtype) -> None:
    cache = filled(state_dtype=dtype)
    patterns = cache.checkpoint(0)[2].view(torch.int32 if dtype == F32 else torch.int16)
    patterns[0, 0, :3] = torch.tensor([-1, 1, -(2**15) if dtype != F32 else -(2**31)], dtype=patterns.dtype)
    gdn_prefix_materialize(**materialize_arguments(cache, [2], [5], [0]))  # NaN payload, a subnormal, minus zero
    assert_same_bits(cache.checkpoint(0)[5], cache.checkpoint(0)[2])


def test_rows_that_are_skipped() -> None:
    cache = filled()
    before = cache.checkpoint(0).clone()
    gdn_prefix_materialize(**materialize_arguments(cache, [-1, 3, 3, 4, 2], [5, -1, 0, 5, 0], [0, 0, -1, 17, -9]))
    assert_same_bits(cache.checkpoint(0), before)


def test_a_slot_may_fold_its_whole_window_in_place() -> None:
    cache = filled()
    truth = truth_state(cache, 0, 3)
    gdn_prefix_materialize(**materialize_arguments(cache, [3], [3], [11]))
    assert_close(cache.checkpoint(0)[3], truth, 5e-7)


def test_stale_rows_of_the_source_do_not_enter() -> None:
    cache = filled()
    gdn_prefix_materialize(**materialize_arguments(cache, [3], [5], [4]))
    fours = cache.checkpoint(0)[5].clone()
    cache.rings(0)[0][3, :, [(27 + j) % 32 for j in range(4, 32)]] = NAN
    gdn_prefix_materialize(**materialize_arguments(cache, [3], [5], [4]))
    assert_same_bits(cache.checkpoint(0)[5], fours)


@pytest.mark.parametrize(
    ("active", "number", "done"),
    [
        ([2, 0, -1], 2, [0, 2]),
        ([2, 0, -1], 1, [2]),
        ([2, 0, 1], 0, []),
        ([1, 1, -1], 3, [1]),
        ([-1, 2, -1], 3, [2]),
        ([], 0, []),
        ([0, 1, 2], 9, [0, 1, 2]),
        ([1, 12345, -7], 1, [1]),  # behind num_active there may be anything
    ],
)
def test_the_active_list_chooses_the_rows(active: list[int], number: int, done: list[int]) -> None:
    cache = filled(num_slots=9)
    before = cache.checkpoint(0).clone()
    gdn_prefix_materialize(
        **materialize_arguments(cache, [3, 4, 2], [6, 7, 8], [8, 9, 3]),
        active_request_indices=ints(*active), num_active=ints(number),
    )  # fmt: skip
    written = [row for row in range(3) if cache.checkpoint(0)[6 + row].isfinite().all()]
    assert written == done
    assert_same_bits(cache.checkpoint(0)[:6], before[:6])


def test_rows_that_are_not_active_may_name_anything() -> None:
    cache = filled(num_slots=9)
    gdn_prefix_materialize(
        **materialize_arguments(cache, [3, 3, 2], [6, 6, 3], [8, 1, 1]),
        active_request_indices=ints(0), num_active=ints(1),
    )  # fmt: skip
    assert cache.checkpoint(0)[6].isfinite().all()


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"src_slots": ints(3, 6)}, SlotError, "src_slots: expected slots below 6, got 6"),
        ({"dst_slots": ints(6, 5)}, SlotError, "dst_slots: expected slots below 6, got 6"),
        ({"dst_slots": ints(5, 5)}, SlotError, "dst_slots: slot 5 is named twice"),
        ({"dst_slots": ints(0, 3)}, SlotError, "dst_slots: slot 3 is also the source of another row"),
        ({"dst_slots": ints(5)}, ShapeError, "dst_slots: expected shape"),
        ({"count": ints(1)}, ShapeError, "count: expected shape"),
        ({"cache_base": ints(1).float()}, DTypeError, "cache_base: expected int32"),
        ({"src_slots": None}, DTypeError, "src_slots: expected a tensor, got NoneType"),
        ({"state": torch.zeros(6, 4, 10, 11)}, ShapeError, "k_cache: expected shape"),
        ({"g_cache": torch.zeros(6, 4, 31)}, ShapeError, "g_cache: expected shape"),
        ({"num_active": ints(1)}, ArgumentError, "active_request_indices and num_active: expected both or neither"),
        ({"active_request_indices": ints(1)}, ArgumentError, "active_request_indices and num_active"),
        (
            {"active_request_indices": ints(2), "num_active": ints(1)},
            ArgumentError,
            r"active_request_indices: expected rows below 2, got \[2\]",
        ),
        ({"active_request_indices": ints(0), "num_active": ints(1, 2)}, ShapeError, "num_active: expected shape"),
    ],
)
def test_materialize_refusals(change: dict[str, Any], error: type[ReplayStateError], match: str) -> None:
    cache = filled()
    before = cache.checkpoint(0).clone()
    with pytest.raises(error, match=f"^gdn_prefix_materialize: {match}") as caught:
        gdn_prefix_materialize(**{**materialize_arguments(cache, [3, 4], [5, 0], [8, 9]), **change})
    assert type(caught.value) is error
    assert_same_bits(cache.checkpoint(0), before)


# --- the g ring ----------------------------------------------------------------------------------------------------


def g_pool() -> tuple[Tensor, Tensor, Tensor]:
    """Rings of 8 slots: windows empty, in the middle, wrapped, and full of ring."""
    g = -torch.rand(4, 3, 8, generator=torch.Generator().manual_seed(0)) * 3
    g[0], g[1, :, [0, 1, 6, 7]] = NAN, NAN  # what is not live may be anything
    return g, ints(5, 2, 6, 3), ints(0, 4, 5, 8)


def test_to_cumulative_and_back() -> None:
    g, start, count = g_pool()
    kept = g.clone()
    cumulative = convert_g_ring(g, start, count, to="cumulative")
    for slot in range(4):
        rows = [(int(start[slot]) + j) % 8 for j in range(int(count[slot]))]
        assert_close(cumulative[slot][:, rows], g[slot][:, rows].double().cumsum(1), 2e-7)
        dead = [row for row in range(8) if row not in rows]
        assert_same_bits(cumulative[slot][:, dead], g[slot][:, dead])
    back = convert_g_ring(cumulative, start, count, to="per_token")
    assert torch.allclose(back, g, rtol=0, atol=2e-6, equal_nan=True)  # differences of sums up to 24 in float32
    assert_same_bits(g, kept)


def test_a_decay_to_nothing_at_the_windows_end_survives_the_round_trip() -> None:
    g, start, count = g_pool()
    g[2, 1, (6 + 4) % 8] = -math.inf
    cumulative = convert_g_ring(g, start, count, to="cumulative")
    assert torch.isneginf(convert_g_ring(cumulative, start, count, to="per_token")[2, 1, 2])


def test_a_decay_to_nothing_inside_the_window_cannot_be_undone() -> None:
    g, start, count = g_pool()
    g[2, 1, 7] = -math.inf
    cumulative = convert_g_ring(g, start, count, to="cumulative")
    assert torch.isneginf(cumulative[2, 1, [7, 0, 1, 2]]).all()
    with pytest.raises(ArgumentError, match=r"^convert_g_ring: slot 2: a token decayed to nothing"):
        convert_g_ring(cumulative, start, count, to="per_token")


def test_a_strided_pool_is_converted_too() -> None:
    g, start, count = g_pool()
    strided = torch.zeros(4, 40)[:, :24].view(4, 3, 8)
    strided.copy_(g)
    assert_same_bits(
        convert_g_ring(strided, start, count, to="cumulative"), convert_g_ring(g, start, count, to="cumulative")
    )


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"to": "sum"}, ArgumentError, "to: expected 'per_token' or 'cumulative', got 'sum'"),
        ({"g": torch.zeros(4, 8)}, ShapeError, "g: expected shape"),
        ({"g": torch.zeros(4, 3, 8).half()}, DTypeError, "g: expected float32, got float16"),
        ({"ring_start": ints(1)}, ShapeError, "ring_start: expected shape"),
        ({"num_committed": ints(0, 0, 0, 0).long()}, DTypeError, "num_committed: expected int32, got int64"),
    ],
)
def test_convert_refusals(change: dict[str, Any], error: type[ReplayStateError], match: str) -> None:
    g, start, count = g_pool()
    arguments = {"g": g, "ring_start": start, "num_committed": count, "to": "cumulative", **change}
    with pytest.raises(error, match=f"^convert_g_ring: {match}"):
        convert_g_ring(**arguments)


def test_a_kernel_and_a_materializer_must_agree() -> None:
    def other(*_: Any) -> None: ...

    require_same_g_layout(gated_delta_rule_mtp_ucache_flush, gdn_prefix_materialize)
    with pytest.raises(GLayoutError, match="'per_token' and None"):
        require_same_g_layout(gated_delta_rule_mtp_ucache_flush, other)
    other.g_layout = "cumulative"  # type: ignore[attr-defined]
    with pytest.raises(GLayoutError, match="'cumulative' and 'per_token'"):
        require_same_g_layout(other, gdn_prefix_materialize)
    require_same_g_layout(other, other)


@pytest.mark.parametrize("shape", [GDNShape(1, 1, 128, 128), GDNShape(1, 8, 96, 192)], ids=lambda s: str(s.sizes))
def test_none_of_flashinfers_limits(shape: GDNShape) -> None:
    # K = V = 128 is theirs; HV / H = 8, dims of 96 and 192, T = 5 and a bf16 state are not.
    cache = nan_cache(shape, num_slots=2, state_dtype=BF16)
    put_window(cache, 1, 14, 24)
    x = random_inputs(shape, 5)
    expected, _ = truth_step(cache, 0, 1, x)
    assert_close(gated_delta_rule_mtp_ucache_flush(**kernel_arguments(cache, x, [1], 5))[0], expected, 1e-6)
