"""The serving adapter: packing, one decode step around any kernel, and the choice of kernel.

In plain words: packed rows are compared with a Python loop, and pointers say whether a view was kept.
`run_gdn_replayssm` is called with a fake kernel that records every keyword, and with ours next to a `ReplayCache` that
must get the same bits over many steps. For the loaders, FlashInfer is put in front of the import system as a fake
module with a fake version on a fake device.
"""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import inspect
import logging
import math
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from replaystate import (
    GDNShape,
    ReplayCache,
    gated_delta_rule_mtp_ucache_flush,
    gdn_prefix_materialize,
    reference,
    replay_step,
    replayssm,
)
from replaystate.errors import ArgumentError, DTypeError, GLayoutError, MissingDependencyError, ShapeError
from replaystate.replayssm import (
    GDN_REPLAYSSM_LOGICAL_WINDOW,
    GDN_REPLAYSSM_RING_SLOTS,
    NULL_BLOCK_ID,
    load_gdn_replayssm_kernel,
    load_gdn_replayssm_materializer,
    pack_replayssm_rows,
    run_gdn_replayssm,
)

from .helpers import (
    SHAPE,
    Inputs,
    assert_close,
    assert_same_bits,
    bounds_of,
    layer_tensors,
    nan_cache,
    put_window,
    random_inputs,
    truth_step,
)

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
NAN = float("nan")
# Every head's slice of a packed token is a multiple of 16 bytes: 2 * 64 + 2 * 64 + 4 * 32 numbers.
ALIGNED = GDNShape(2, 4, 64, 32)


def test_constants() -> None:
    assert (NULL_BLOCK_ID, GDN_REPLAYSSM_LOGICAL_WINDOW, GDN_REPLAYSSM_RING_SLOTS) == (0, 16, 32)


def test_keywords_and_defaults() -> None:
    pack = inspect.signature(pack_replayssm_rows).parameters
    assert {name: p.default for name, p in pack.items()} == {
        "values": inspect.Parameter.empty, "query_start_loc": inspect.Parameter.empty,
        "executed_width": inspect.Parameter.empty, "offsets": None, "padding_value": 0.0, "uniform": False,
        "allow_strided_rows": False,
    }  # fmt: skip
    run = inspect.signature(run_gdn_replayssm).parameters
    assert all(p.kind is inspect.Parameter.KEYWORD_ONLY for p in run.values())
    assert list(run) == (
        "kernel executed_width mixed_qkv a b A_log dt_bias checkpoint_state replayssm_cache ring_start num_committed "
        "query_start_loc state_indices output_indices num_k_heads num_v_heads head_k_dim head_v_dim offsets "
        "uniform_query_length".split()
    )
    assert {name for name, p in run.items() if p.default is None} == {"offsets", "uniform_query_length"}


# --- packing -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(), (3,), (2, 5)])
@pytest.mark.parametrize("dtype", [F32, BF16, torch.float64, torch.int64, torch.int32, torch.bool])
@pytest.mark.parametrize("lengths", [[2, 0, 3, 1], [0, 0, 1], [3, 3]])
def test_ragged_rows(size: tuple[int, ...], dtype: torch.dtype, lengths: list[int]) -> None:
    tokens = sum(lengths)
    values = (torch.arange(tokens * math.prod(size)).view(tokens, *size) + 1).to(dtype)
    packed = pack_replayssm_rows(values, bounds_of(lengths), 3)
    assert packed.dtype == dtype
    assert packed.shape == (len(lengths), 3, *size)
    bounds = bounds_of(lengths).tolist()
    for row, length in enumerate(lengths):
        assert torch.equal(packed[row, :length], values[bounds[row] : bounds[row] + length])
        assert packed[row, length:].eq(0).all()


@pytest.mark.parametrize("padding", [-math.inf, 7.0, NAN])
def test_padding_value(padding: float) -> None:
    packed = pack_replayssm_rows(torch.ones(3, 2), bounds_of([1, 2]), 2, padding_value=padding)
    assert_same_bits(packed[0, 1], torch.full((2,), padding))
    assert packed[1].eq(1).all()


def test_a_nan_token_does_not_leak_into_padding() -> None:
    # Padding lanes are gathered from somewhere; what lies there must not matter.
    packed = pack_replayssm_rows(torch.tensor([NAN, 1.0, NAN]), bounds_of([0, 2, 1]), 2)
    assert packed[0].eq(0).all()
    assert packed[2, 1] == 0


@pytest.mark.parametrize("bounds_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("offsets_dtype", [torch.int32, torch.int64])
def test_offsets(bounds_dtype: torch.dtype, offsets_dtype: torch.dtype) -> None:
    values, bounds = torch.randn(5, 2), bounds_of([2, 3]).to(bounds_dtype)
    offsets = torch.arange(7, dtype=offsets_dtype)  # longer than the width is fine
    assert_same_bits(pack_replayssm_rows(values, bounds, 3, offsets), pack_replayssm_rows(values, bounds, 3))


@pytest.mark.parametrize("uniform", [False, True])
def test_no_rows(uniform: bool) -> None:
    for values in (torch.zeros(0, 5, dtype=F16), torch.zeros(3, 5, dtype=F16)):
        packed = pack_replayssm_rows(values, bounds_of([]), 4, uniform=uniform)
        assert (packed.shape, packed.dtype) == ((0, 4, 5), F16)


def test_rows_without_any_token_cannot_be_packed() -> None:
    for uniform in (False, True):
        with pytest.raises(
            ValueError, match=r"^pack_replayssm_rows: values: an empty tensor cannot be packed into 2 rows"
        ):
            pack_replayssm_rows(torch.zeros(0, 5), bounds_of([0, 0]), 4, uniform=uniform)


def memory(elements: int, dtype: torch.dtype = F32, offset: int = 0) -> Tensor:
    """`elements` of memory whose pointer is `offset` elements past a 64-byte boundary."""
    whole = torch.arange(elements + 128).to(dtype)
    to_boundary = -whole.data_ptr() % 64 // whole.element_size()
    return whole[to_boundary + offset :][:elements]


# (tensor of 6 tokens, allow_strided_rows, is the packed result a view of it)
VIEWS: dict[str, tuple[Callable[[], Tensor], bool, bool]] = {
    "contiguous": (lambda: memory(6 * 8).view(6, 8), False, True),
    "contiguous 3-D": (lambda: memory(6 * 8).view(6, 2, 4), False, True),
    "contiguous 1-D": (lambda: memory(6), False, True),
    "contiguous rows that are no multiple of 16 bytes": (lambda: memory(6 * 3).view(6, 3), False, True),
    "an aligned storage offset": (lambda: memory(6 * 8, offset=4).view(6, 8), False, True),
    "an odd pointer": (lambda: memory(6 * 8, offset=1).view(6, 8), False, False),
    "an odd pointer of bf16": (lambda: memory(6 * 8, BF16, offset=4).view(6, 8), False, False),
    "an odd pointer with strided rows allowed": (lambda: memory(6 * 8, offset=2).view(6, 8), True, False),
    "strided rows, not allowed": (lambda: memory(6 * 12).view(6, 12)[:, :8], False, False),
    "strided rows, allowed": (lambda: memory(6 * 12).view(6, 12)[:, :8], True, True),
    "strided rows of bf16": (lambda: memory(6 * 24, BF16).view(6, 24)[:, 8:16], True, True),
    "strided rows at an odd pointer": (lambda: memory(6 * 12).view(6, 12)[:, 1:9], True, False),
    "strided rows with an odd stride": (lambda: memory(6 * 13).view(6, 13)[:, :8], True, False),
    "strided rows of 3-D": (lambda: memory(6 * 12).view(6, 3, 4)[:, :2], True, False),
    "rows that overlap": (lambda: memory(6 * 8).as_strided((6, 8), (4, 1)), True, False),
    "one row for all": (lambda: memory(8).view(1, 8).expand(6, 8), True, False),
    "a stride inside the row": (lambda: memory(6 * 16).view(6, 16)[:, ::2], True, False),
    "transposed": (lambda: memory(6 * 8).view(8, 6).T, True, False),
}


@pytest.mark.parametrize("case", VIEWS)
def test_uniform_rows_are_a_view_exactly_where_kernels_can_read_it(case: str) -> None:
    make, allow, is_view = VIEWS[case]
    values = make()
    packed = pack_replayssm_rows(values, bounds_of([3, 3]), 3, uniform=True, allow_strided_rows=allow)
    assert packed.shape == (2, 3, *values.shape[1:])
    assert_same_bits(packed.reshape(values.shape), values.contiguous())
    assert (packed.untyped_storage().data_ptr() == values.untyped_storage().data_ptr()) == is_view
    assert (packed.data_ptr() == values.data_ptr()) == is_view
    assert packed.data_ptr() % 16 == 0
    if is_view:
        values[0] = 99
        assert packed[0, 0].eq(99).all()
    else:
        assert packed.is_contiguous()


def test_uniform_applies_only_to_the_exact_number_of_tokens() -> None:
    values = memory(5 * 4).view(5, 4)
    packed = pack_replayssm_rows(values, bounds_of([3, 2]), 3, uniform=True)
    assert_same_bits(packed, pack_replayssm_rows(values, bounds_of([3, 2]), 3))
    assert packed[1, 2].eq(0).all()


def test_ragged_rows_are_always_fresh() -> None:
    values = memory(6 * 4).view(6, 4)
    packed = pack_replayssm_rows(values, bounds_of([3, 3]), 3)
    assert packed.untyped_storage().data_ptr() != values.untyped_storage().data_ptr()


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"executed_width": 1}, ArgumentError, "query_start_loc: row 1 has 2 tokens, more than executed_width=1"),
        ({"query_start_loc": torch.tensor([0, 2, 1])}, ArgumentError, "query_start_loc: row 1: expected bounds inside"),
        ({"query_start_loc": torch.tensor([0, 2, 4])}, ArgumentError, "query_start_loc: row 1: .* 3 tokens, got 2..4"),
        ({"query_start_loc": torch.tensor([-1, 1])}, ArgumentError, "query_start_loc: row 0: expected bounds inside"),
        ({"query_start_loc": torch.tensor([0.0, 3.0])}, DTypeError, "query_start_loc: expected int32 or int64"),
        ({"query_start_loc": torch.zeros(1, 2).int()}, ShapeError, "query_start_loc: expected shape"),
        ({"query_start_loc": torch.zeros(0).int()}, ShapeError, "query_start_loc: expected rows"),
        ({"query_start_loc": [0, 3]}, DTypeError, "query_start_loc: expected a tensor, got list"),
        ({"executed_width": 0}, ArgumentError, "executed_width: expected at least 1, got 0"),
        ({"executed_width": 2.0}, DTypeError, "executed_width: expected an int"),
        ({"offsets": torch.arange(1)}, ArgumentError, "offsets: expected at least executed_width=2 entries, got 1"),
        ({"offsets": torch.arange(2.0)}, DTypeError, "offsets: expected int32 or int64"),
        ({"offsets": torch.arange(4).view(2, 2)}, ShapeError, "offsets: expected shape"),
        ({"values": [1.0]}, DTypeError, "values: expected a tensor with at least one dim, got list"),
        ({"values": torch.tensor(1.0)}, DTypeError, "values: expected a tensor with at least one dim"),
    ],
)
def test_pack_refusals(arguments: dict[str, Any], error: type[Exception], match: str) -> None:
    good = {"values": torch.zeros(3, 4), "query_start_loc": bounds_of([1, 2]), "executed_width": 2}
    with pytest.raises(error, match=f"^pack_replayssm_rows: {match}") as caught:
        pack_replayssm_rows(**{**good, **arguments})
    assert type(caught.value) is error


# --- one decode step -----------------------------------------------------------------------------------------------


def engine(shape: GDNShape = SHAPE, slots: int = 6, **options: Any) -> ReplayCache:
    """An engine's pools, block 0 the null block: NaN but for the windows of 1 (empty), 2, 3 (wraps) and 5 (full)."""
    cache = nan_cache(shape, num_slots=slots, **{"state_dtype": F32, **options})
    for slot, (count, start) in {1: (0, 4), 2: (5, 30), 3: (11, 27), 5: (16, 9)}.items():
        put_window(cache, slot, count, start, seed=slot)
    return cache


def run(
    cache: ReplayCache,
    x: Inputs,
    slots: list[int],
    lengths: list[int],
    *,
    width: int,
    kernel: Callable[..., Any] = gated_delta_rule_mtp_ucache_flush,
    **change: Any,
) -> Tensor:
    H, HV, K, V = cache.shape.sizes
    state, u, k, g = layer_tensors(cache, 0)
    lanes = [row * width + lane for row, length in enumerate(lengths) for lane in range(length)]
    arguments: dict[str, Any] = {
        "kernel": kernel, "executed_width": width, "mixed_qkv": x.mixed_qkv, "a": x.a, "b": x.b, "A_log": x.A_log,
        "dt_bias": x.dt_bias, "checkpoint_state": state, "replayssm_cache": (u, k, g), "ring_start": cache.ring_start,
        "num_committed": cache.num_committed, "query_start_loc": bounds_of(lengths),
        "state_indices": torch.tensor(slots, dtype=torch.int32),
        "output_indices": torch.tensor(lanes, dtype=torch.int64),
        "num_k_heads": H, "num_v_heads": HV, "head_k_dim": K, "head_v_dim": V,
    }  # fmt: skip
    return run_gdn_replayssm(**{**arguments, **change})


class Recorder:
    """A kernel that remembers its keywords and writes a mark into every lane of rows that are not padding."""

    g_layout = "per_token"

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def __call__(self, **keywords: Any) -> None:
        self.calls.append({n: x.clone() if isinstance(x, Tensor) and n == "output" else x for n, x in keywords.items()})
        keywords["output"][keywords["initial_state_indices"] >= 0] = 5.0

    @property
    def last(self) -> dict[str, Any]:
        return self.calls[-1]


KEYWORDS = {
    "A_log", "a", "dt_bias", "q", "k", "v", "b", "initial_state_source", "initial_state_indices",
    "use_qk_l2norm_in_kernel", "scale", "output", "k_cache", "u_cache", "g_cache", "hist_len", "cache_base",
    "flush_min", "restart_hist_on_flush",
}  # fmt: skip


def test_the_kernel_gets_these_keywords_and_values() -> None:
    cache, kernel = engine(), Recorder()
    x = random_inputs(tokens=6, dtype=BF16, gate_dtype=F32)
    y = run(cache, x, [3, 0, 5, -2, 2], [2, 1, 0, 1, 2], width=4, kernel=kernel)
    assert len(kernel.calls) == 1
    got = kernel.last
    assert got.keys() == KEYWORDS
    state, u, k, g = layer_tensors(cache, 0)
    for name, own in (("initial_state_source", state), ("u_cache", u), ("k_cache", k), ("g_cache", g)):
        assert got[name].data_ptr() == own.data_ptr()
        assert got[name].shape == own.shape
    assert got["use_qk_l2norm_in_kernel"] is True
    assert got["restart_hist_on_flush"] is False
    assert got["scale"] == 12**-0.5
    assert got["flush_min"] == 16 + 1 - 4
    # Cursors per slot become cursors per row; the null block and negative blocks are padding: -1, 0, 0.
    for name, values in (
        ("initial_state_indices", [3, -1, 5, -1, 2]),
        ("hist_len", [11, 0, 16, 0, 5]),
        ("cache_base", [27, 0, 9, 0, 30]),
    ):
        assert (got[name].dtype, got[name].tolist()) == (torch.int32, values), name
    # Padded lanes cannot move a state.
    q_real, k_real, v_real = reference.split_qkv(x.mixed_qkv, SHAPE)
    begin = 0
    for row, length in enumerate([2, 1, 0, 1, 2]):
        for name, real, padding in (
            ("q", q_real, 0.0), ("k", k_real, 0.0), ("v", v_real, 0.0), ("a", x.a, -math.inf), ("b", x.b, 0.0),
        ):  # fmt: skip
            assert got[name].dtype == real.dtype
            assert got[name].shape == (5, 4, *real.shape[1:])
            assert torch.equal(got[name][row, :length], real[begin : begin + length]), name
            assert got[name][row, length:].eq(padding).all(), name
        begin += length
    assert (got["A_log"].data_ptr(), got["dt_bias"].data_ptr()) == (x.A_log.data_ptr(), x.dt_bias.data_ptr())
    # The kernel leaves padding rows alone, so the buffer is zero before.
    assert (got["output"].shape, got["output"].dtype) == ((5, 4, 4, 10), BF16)
    assert got["output"].eq(0).all()
    assert (y.shape, y.dtype) == ((6, 4, 10), BF16)
    assert y.flatten(1).amax(1).tolist() == [5, 5, 0, 0, 5, 5]


def test_the_adapter_writes_no_pool() -> None:
    cache = engine()
    before = [x.clone() for x in (*layer_tensors(cache, 0), cache.ring_start, cache.num_committed)]
    run(cache, random_inputs(tokens=6), [3, 0, 5], [2, 2, 2], width=4, kernel=Recorder())
    for now, then in zip((*layer_tensors(cache, 0), cache.ring_start, cache.num_committed), before, strict=True):
        assert_same_bits(now, then)


@pytest.mark.parametrize("cursors", [torch.int32, torch.int64])
@pytest.mark.parametrize("indices", [torch.int32, torch.int64])
def test_index_dtypes(cursors: torch.dtype, indices: torch.dtype) -> None:
    cache, kernel = engine(), Recorder()
    run(
        cache, random_inputs(tokens=2), [3, 5], [1, 1], width=4, kernel=kernel,
        state_indices=torch.tensor([3, 5], dtype=indices), ring_start=cache.ring_start.to(cursors),
        num_committed=cache.num_committed.to(cursors), output_indices=torch.tensor([0, 4], dtype=indices),
        query_start_loc=bounds_of([1, 1]).to(indices),
    )  # fmt: skip
    assert kernel.last["hist_len"].dtype == torch.int32
    assert kernel.last["hist_len"].tolist() == [11, 16]


def test_the_cursor_look_up_never_leaves_the_pool() -> None:
    # A block id past the pool (a warm-up batch, say) is the kernel's to refuse; the adapter reads no cursor for it.
    cache, kernel = engine(), Recorder()
    run(cache, random_inputs(tokens=3), [6, -(2**31), 2**31 - 1], [1, 1, 1], width=1, kernel=kernel)
    assert kernel.last["initial_state_indices"].tolist() == [6, -1, 2**31 - 1]


def test_null_rows_are_zero_in_every_lane_and_leave_block_zero_alone() -> None:
    cache = engine()
    before = [x.clone() for x in layer_tensors(cache, 0)]
    x = random_inputs(tokens=6)
    y = run(cache, x, [0, -1, 0], [2, 3, 1], width=4, output_indices=torch.arange(12))
    assert y.shape == (12, 4, 10)
    assert y.eq(0).all()
    for now, then in zip(layer_tensors(cache, 0), before, strict=True):
        assert_same_bits(now, then)


def test_output_indices_choose_rows_of_the_padded_output() -> None:
    cache, twin = engine(), engine()
    x = random_inputs(tokens=5)
    lanes = torch.tensor([9, 0, 4, 8])
    full = run(cache, x, [3, 2, 5], [2, 1, 2], width=4, output_indices=torch.arange(12))
    some = run(twin, x, [3, 2, 5], [2, 1, 2], width=4, output_indices=lanes)
    assert_same_bits(some, full[lanes])
    assert run(twin, x, [3, 2, 5], [2, 1, 2], width=4, output_indices=lanes[:0]).shape == (0, 4, 10)


def test_the_result_is_fresh_each_time() -> None:
    cache = engine()
    first = run(cache, random_inputs(tokens=2), [2], [2], width=2)
    kept = first.clone()
    second = run(cache, random_inputs(tokens=2, seed=4), [2], [2], width=2)
    assert_same_bits(first, kept)
    assert first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr()


@pytest.mark.parametrize("gate_dtype", [F32, BF16])
def test_a_and_b_are_packed_apart_and_aligned(gate_dtype: torch.dtype) -> None:
    # Engines slice a and b out of one projection: b then starts at an odd pointer, also on the uniform path.
    cache, kernel = engine(ALIGNED), Recorder()
    x = random_inputs(ALIGNED, 6, dtype=BF16, gate_dtype=gate_dtype)
    both = torch.cat([x.a, x.b], dim=1)
    for uniform in (None, 3):
        run(
            cache, x, [2, 3], [3, 3], width=3, kernel=kernel, a=both[:, :4], b=both[:, 4:], uniform_query_length=uniform
        )
        for name, real in (("a", x.a), ("b", x.b)):
            got = kernel.last[name]
            assert got.data_ptr() % 16 == 0
            assert got.is_contiguous()
            assert torch.equal(got.flatten(0, 1), real)
        assert kernel.last["a"].untyped_storage().data_ptr() != kernel.last["b"].untyped_storage().data_ptr()


def test_a_uniform_batch_is_read_in_place() -> None:
    cache, kernel = engine(ALIGNED), Recorder()
    H, HV, K, V = ALIGNED.sizes
    x = random_inputs(ALIGNED, 6, dtype=BF16)
    # Strided rows: the projection holds more than q, k, v.
    wide = torch.zeros(6, ALIGNED.qkv_dim + 64, dtype=BF16)
    wide[:, : ALIGNED.qkv_dim] = x.mixed_qkv
    for mixed in (x.mixed_qkv, wide[:, : ALIGNED.qkv_dim]):
        run(cache, x, [2, 0], [3, 3], width=3, kernel=kernel, mixed_qkv=mixed, uniform_query_length=3)
        got = kernel.last
        for name, offset in (("q", 0), ("k", H * K), ("v", 2 * H * K)):
            assert got[name].data_ptr() == mixed.data_ptr() + 2 * offset
            assert got[name].data_ptr() % 16 == 0
        assert got["a"].data_ptr() == x.a.data_ptr()


@pytest.mark.parametrize("promise", [None, 2, 4])
def test_another_uniform_length_is_ignored(promise: int | None) -> None:
    cache, kernel = engine(ALIGNED), Recorder()
    x = random_inputs(ALIGNED, 6)
    run(cache, x, [2, 3], [3, 3], width=3, kernel=kernel, uniform_query_length=promise)
    assert kernel.last["q"].data_ptr() != x.mixed_qkv.data_ptr()


def test_uniform_and_ragged_packing_give_the_same_bits() -> None:
    cache, twin = engine(ALIGNED), engine(ALIGNED)
    x = random_inputs(ALIGNED, 12, dtype=BF16)
    outs = [
        run(c, x, [3, 5, 2, 0], [3, 3, 3, 3], width=3, uniform_query_length=promise)
        for c, promise in ((cache, 3), (twin, None))
    ]
    assert_same_bits(*outs)
    for mine, theirs in zip(layer_tensors(cache, 0), layer_tensors(twin, 0), strict=True):
        assert_same_bits(mine, theirs)


def test_offsets_are_passed_on() -> None:
    cache, twin = engine(), engine()
    x = random_inputs(tokens=3)
    first = run(cache, x, [3, 2], [2, 1], width=4, offsets=torch.arange(16, dtype=torch.int32))
    assert_same_bits(first, run(twin, x, [3, 2], [2, 1], width=4))


def test_parameters_that_require_grad_and_are_reloaded_in_place() -> None:
    cache, kernel = engine(), Recorder()
    x = random_inputs(tokens=2)
    A_log, dt_bias = torch.nn.Parameter(x.A_log.clone()), torch.nn.Parameter(x.dt_bias.clone())
    for _ in range(2):
        run(cache, x, [2], [2], width=2, kernel=kernel, A_log=A_log, dt_bias=dt_bias)
        for name, parameter in (("A_log", A_log), ("dt_bias", dt_bias)):
            assert not kernel.last[name].requires_grad
            assert kernel.last[name].data_ptr() == parameter.data_ptr()  # a captured graph sees the reload
        with torch.no_grad():
            A_log.add_(1.0)
    assert torch.equal(kernel.calls[0]["A_log"], kernel.calls[1]["A_log"])
    twin, plain = engine(), engine()
    y = run(twin, x, [2], [2], width=2, A_log=A_log, dt_bias=dt_bias)
    assert_same_bits(y, run(plain, x, [2], [2], width=2, A_log=A_log.detach().clone()))
    assert not y.requires_grad


def test_the_numbers_are_right() -> None:
    cache = engine()
    slots, lengths = [5, 0, 3, 2, 1], [4, 2, 1, 0, 3]
    x = random_inputs(tokens=10)
    expected, begin = torch.zeros(10, 4, 10, dtype=torch.float64), 0
    for slot, length in zip(slots, lengths, strict=True):
        if slot:
            rows = slice(begin, begin + length)
            expected[rows], _ = truth_step(cache, 0, slot, x.rows(rows))
        begin += length
    assert_close(run(cache, x, slots, lengths, width=4), expected, 1e-6)  # observed 1.7e-7


@pytest.mark.parametrize(("io", "state"), [(F32, F32), (BF16, F16)])
def test_many_steps_equal_a_replay_cache_bit_for_bit(io: torch.dtype, state: torch.dtype) -> None:
    # The engine keeps its own cursors by the commit rule; ReplayCache keeps them by itself.
    cache = ReplayCache(SHAPE, 1, 6, state_dtype=state)
    pools = ReplayCache(SHAPE, 1, 6, state_dtype=state)
    rng = torch.Generator().manual_seed(7)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (1,), generator=rng))

    for turn in range(30):
        width = draw(1, 8)
        slots = [*(torch.randperm(5, generator=rng) + 1).tolist()[: draw(1, 5)], 0, -1]
        lengths = [draw(0, width) for _ in slots]
        accepted = [draw(0, length) for length in lengths]
        x = random_inputs(tokens=sum(lengths), dtype=io, seed=turn)
        expected = replay_step(*x, cache, 0, slots, bounds_of(lengths), executed_width=width)
        cache.commit(slots, accepted)
        assert_same_bits(run(pools, x, slots, lengths, width=width), expected, f"turn {turn}")
        for slot, kept in zip(slots, accepted, strict=True):
            if slot > 0:
                held = int(pools.num_committed[slot])
                folds = held >= 17 - width
                pools.ring_start[slot] = (int(pools.ring_start[slot]) + held * folds) % 32
                pools.num_committed[slot] = kept if folds else held + kept
        for mine, theirs in zip(
            (pools.ring_start, pools.num_committed), (cache.ring_start, cache.num_committed), strict=True
        ):
            assert_same_bits(mine, theirs)
    for slot in range(1, 6):
        assert_same_bits(pools.state(0, [slot]), cache.state(0, [slot]))
    assert_same_bits(pools.checkpoint(0), cache.checkpoint(0))


def test_no_rows_and_no_tokens() -> None:
    kernel = Recorder()
    y = run(engine(), random_inputs(tokens=0), [], [], width=4, kernel=kernel)
    assert y.shape == (0, 4, 10)
    y = run(engine(), random_inputs(tokens=0), [2, 0], [0, 0], width=4, kernel=kernel)
    assert y.shape == (0, 4, 10)
    assert not kernel.calls  # nothing to do
    cache, twin = engine(), engine()
    run(cache, random_inputs(tokens=0), [2, 5], [0, 0], width=4)
    replay_step(*random_inputs(tokens=0), twin, 0, [2, 5], bounds_of([0, 0]), executed_width=4)
    assert_same_bits(cache.checkpoint(0), twin.checkpoint(0), "slot 5 folds, even without a token")


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"executed_width": 17}, ArgumentError, "executed_width: expected 1..16, got 17"),
        ({"executed_width": 0}, ArgumentError, "executed_width: expected at least 1, got 0"),
        ({"mixed_qkv": torch.zeros(2, 87)}, ShapeError, "mixed_qkv: expected shape"),
        ({"mixed_qkv": torch.zeros(2, 88).double()}, DTypeError, "mixed_qkv: expected float32"),
        ({"a": torch.zeros(3, 4)}, ShapeError, "a: expected shape"),
        ({"b": torch.zeros(2, 4).long()}, DTypeError, "b: expected float32"),
        ({"checkpoint_state": torch.zeros(6, 4, 12, 10)}, ShapeError, "checkpoint_state: expected shape"),
        ({"replayssm_cache": ()}, ShapeError, r"replayssm_cache: expected \(u, k, g\), got 0 tensors"),
        ({"replayssm_cache": "kug"}, ShapeError, "replayssm_cache k: expected shape"),
        ({"replayssm_cache": 16}, ShapeError, "replayssm_cache u: expected shape"),
        ({"ring_start": torch.zeros(5).int()}, ShapeError, "ring_start: expected shape"),
        ({"num_committed": torch.zeros(6)}, DTypeError, "num_committed: expected int32"),
        ({"state_indices": torch.tensor([[2]])}, ShapeError, "state_indices: expected shape"),
        ({"query_start_loc": torch.tensor([0, 1, 2])}, ShapeError, "query_start_loc: expected shape"),
        ({"query_start_loc": torch.tensor([0, 3])}, ArgumentError, "query_start_loc"),
        ({"output_indices": torch.tensor([0.0])}, DTypeError, "output_indices: expected int32"),
        ({"num_v_heads": 3}, ArgumentError, "num_v_heads: expected a multiple"),
        ({"A_log": torch.zeros(3)}, ShapeError, "A_log: expected shape"),
        ({"dt_bias": None}, DTypeError, "dt_bias: expected a tensor, got NoneType"),
    ],
)
def test_run_refusals(change: dict[str, Any], error: type[Exception], match: str) -> None:
    cache = engine()
    _, u, k, g = layer_tensors(cache, 0)
    if change.get("replayssm_cache") == "kug":  # another order than (u, k, g)
        change = {"replayssm_cache": (u, u, g)}
    elif change.get("replayssm_cache") == 16:  # another number of ring slots
        change = {"replayssm_cache": (u[:, :, :16], k[:, :, :16], g[:, :, :16])}
    before = [x.clone() for x in layer_tensors(cache, 0)]
    with pytest.raises(error, match=f"^(run_gdn_replayssm|pack_replayssm_rows|GDNShape): {match}") as caught:
        run(cache, random_inputs(tokens=2), [2], [2], width=2, kernel=(kernel := Recorder()), **change)
    assert type(caught.value) is error
    assert not kernel.calls
    for now, then in zip(layer_tensors(cache, 0), before, strict=True):
        assert_same_bits(now, then)


# --- the loaders ---------------------------------------------------------------------------------------------------

KERNEL = "gated_delta_rule_mtp_ucache_flush_umma"
MATERIALIZER = "gdn_prefix_materialize"
MODULES = ("flashinfer.gdn_kernels.gdn_replay_mtp_umma", "flashinfer.gdn_kernels.gdn_prefix_materialize")


@pytest.fixture(autouse=True)
def _forget_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loaders decide once a process. Each test here is a new process to them."""
    for item in vars(replayssm).values():
        if hasattr(item, "cache_clear"):
            item.cache_clear()
    monkeypatch.setattr(replayssm, "_last_kernel_name", None)


def pretend(
    monkeypatch: pytest.MonkeyPatch,
    *,
    version: str | None = "0.7.3",
    capability: tuple[int, int] | None = (10, 0),
    state_dtype: torch.dtype = F16,
    without: str = "",
) -> dict[str, Callable[..., Any]]:
    """Put a FlashInfer of this version on this device before the import system; `without` leaves out a function."""
    functions: dict[str, Callable[..., Any]] = {
        KERNEL: lambda *args, **keywords: ("kernel", args, keywords),
        MATERIALIZER: lambda *args, **keywords: ("materializer", args, keywords),
    }
    contents = {
        "flashinfer": {"__path__": []},
        "flashinfer.gdn_kernels": {"__path__": []},
        MODULES[0]: {KERNEL: functions[KERNEL]},
        MODULES[1]: {MATERIALIZER: functions[MATERIALIZER], "state_ty_torch": lambda: state_dtype},
    }
    for name, attributes in contents.items():
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package="__path__" in attributes)
        for attribute, value in attributes.items():
            if attribute != without:
                setattr(module, attribute, value)
        monkeypatch.setitem(sys.modules, name, module)

    def version_of(distribution: str) -> str:
        if version is None or distribution != "flashinfer-python":
            raise importlib.metadata.PackageNotFoundError(distribution)
        return version

    monkeypatch.setattr(importlib.metadata, "version", version_of)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    return functions


def no_flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "flashinfer" else find_spec(name, *rest)
    )


def test_without_flashinfer_it_is_our_kernel(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    no_flashinfer(monkeypatch)
    with caplog.at_level(logging.INFO, logger="replaystate"):
        assert load_gdn_replayssm_kernel() is gated_delta_rule_mtp_ucache_flush
        assert load_gdn_replayssm_kernel() is gated_delta_rule_mtp_ucache_flush
        assert load_gdn_replayssm_materializer() is gdn_prefix_materialize
    assert len(caplog.records) == 1
    assert "flashinfer is not installed" in caplog.text


def test_where_flashinfer_can_run_it_is_preferred_and_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    functions = pretend(monkeypatch)
    kernel, materializer = load_gdn_replayssm_kernel(), load_gdn_replayssm_materializer()
    assert kernel(1, x=2) == ("kernel", (1,), {"x": 2})
    assert materializer(3) == ("materializer", (3,), {})
    assert kernel.g_layout == materializer.g_layout == "cumulative"
    assert load_gdn_replayssm_kernel() is kernel is load_gdn_replayssm_kernel("flashinfer")
    assert load_gdn_replayssm_materializer() is materializer
    assert functions[KERNEL] is not kernel  # ours carries the layout; theirs is left as it is
    assert not hasattr(functions[KERNEL], "g_layout")


def test_run_works_with_a_loaded_foreign_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)
    y = run(engine(), random_inputs(tokens=2), [2], [2], width=2, kernel=load_gdn_replayssm_kernel())
    assert y.shape == (2, 4, 10)


@pytest.mark.parametrize("version", ["0.7.3", "0.7.3.post1", "0.7.10", "0.8.0rc1", "1.0", "0.7.3+cu130"])
def test_versions_that_suffice(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    pretend(monkeypatch, version=version)
    assert load_gdn_replayssm_kernel().g_layout == "cumulative"


# What is wrong -> (how to pretend it, what the message says about it)
UNUSABLE: dict[str, tuple[dict[str, Any], str]] = {
    "too old": ({"version": "0.7.2"}, "flashinfer 0.7.2 is older than 0.7.3"),
    "much too old": ({"version": "0.6.10.post2"}, "flashinfer 0.6.10.post2 is older than 0.7.3"),
    "unknown version": ({"version": None}, "version of flashinfer cannot be read"),
    "no device": ({"capability": None}, "no CUDA device"),
    "Hopper": ({"capability": (9, 0)}, "sm_90, the kernel needs SM100"),
    "consumer Blackwell": ({"capability": (12, 0)}, "sm_120, the kernel needs SM100"),
    "no such function": ({"without": KERNEL}, KERNEL),
}


@pytest.mark.parametrize("case", UNUSABLE)
def test_where_flashinfer_cannot_run_ours_is_taken_and_insisting_raises(
    monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    how, why = UNUSABLE[case]
    pretend(monkeypatch, **how)
    assert load_gdn_replayssm_kernel() is gated_delta_rule_mtp_ucache_flush
    assert load_gdn_replayssm_materializer() is gdn_prefix_materialize
    for _ in range(2):  # a failure is not cached as a success
        with pytest.raises(ImportError, match=rf"requires {KERNEL} \(FlashInfer >= 0.7.3\): .*{why}") as caught:
            load_gdn_replayssm_kernel("flashinfer")
        assert type(caught.value) is MissingDependencyError
    assert load_gdn_replayssm_kernel() is gated_delta_rule_mtp_ucache_flush


def test_insisting_without_flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    no_flashinfer(monkeypatch)
    with pytest.raises(MissingDependencyError, match=rf"{KERNEL} \(FlashInfer >= 0.7.3\): flashinfer is not installed"):
        load_gdn_replayssm_kernel("flashinfer")
    with pytest.raises(MissingDependencyError, match=r"FlashInfer >= 0.7.3"):
        load_gdn_replayssm_materializer("flashinfer")


def test_a_flashinfer_that_fails_to_import(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)
    monkeypatch.setitem(sys.modules, MODULES[0], None)  # `import` of it raises ImportError
    assert load_gdn_replayssm_kernel() is gated_delta_rule_mtp_ucache_flush
    with pytest.raises(MissingDependencyError, match=KERNEL) as caught:
        load_gdn_replayssm_kernel("flashinfer")
    assert isinstance(caught.value.__cause__, ImportError)


def test_insisting_on_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)
    assert load_gdn_replayssm_kernel("replaystate") is gated_delta_rule_mtp_ucache_flush
    assert load_gdn_replayssm_materializer() is gdn_prefix_materialize  # follows the kernel, not the preference
    assert load_gdn_replayssm_materializer("replaystate") is gdn_prefix_materialize


def test_the_materializer_alone_chooses_as_the_kernel_would(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)
    assert load_gdn_replayssm_materializer().g_layout == "cumulative"
    assert load_gdn_replayssm_kernel().g_layout == "cumulative"


@pytest.mark.parametrize(("kernel", "materializer"), [("replaystate", "flashinfer"), ("flashinfer", "replaystate")])
def test_a_materializer_of_another_layout_is_refused(
    monkeypatch: pytest.MonkeyPatch, kernel: str, materializer: str
) -> None:
    pretend(monkeypatch)
    load_gdn_replayssm_kernel(kernel)
    with pytest.raises(GLayoutError, match="disagree on the g ring"):
        load_gdn_replayssm_materializer(materializer)
    load_gdn_replayssm_materializer(kernel)


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_a_flashinfer_of_another_state_dtype_is_refused(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    pretend(monkeypatch, state_dtype=dtype)
    load_gdn_replayssm_kernel("flashinfer")
    with pytest.raises(ValueError, match=rf"{dtype}.*GDN_UCACHE_STATE_DTYPE=fp16") as caught:
        load_gdn_replayssm_materializer()
    assert type(caught.value) is ArgumentError
    load_gdn_replayssm_kernel("replaystate")
    assert load_gdn_replayssm_materializer() is gdn_prefix_materialize  # ours has no dtype of its own


@pytest.mark.parametrize("name", ["cuda", "FlashInfer", 3])
def test_another_name_is_refused(name: Any) -> None:
    for load in (load_gdn_replayssm_kernel, load_gdn_replayssm_materializer):
        with pytest.raises(
            ArgumentError, match=rf"^{load.__name__}: name: expected None, 'flashinfer' or 'replaystate', got"
        ):
            load(name)
