"""Sizes and windows: good ones are kept as given, bad ones are refused when they are made, naming the numbers.

In plain words: every size of `GDNShape` is tried at its limits and with other types; window, width and ring size are
tried against each other; the words that a step leaves for its commit survive packing for all widths and lengths.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from replaystate import GDNShape, ReplayCache
from replaystate.errors import ArgumentError, DTypeError
from replaystate.shapes import check_window, flush_min, read_step_record, ring_slots_for, step_record

SIZES = {"num_k_heads": 2, "num_v_heads": 6, "head_k_dim": 96, "head_v_dim": 64}


def test_sizes_are_kept_and_derived() -> None:
    shape = GDNShape(**SIZES)
    assert shape.sizes == (2, 6, 96, 64)
    assert shape.heads_per_key == 3
    assert shape.qkv_dim == 2 * 2 * 96 + 6 * 64
    assert shape == GDNShape(2, 6, 96, 64)
    assert hash(shape) == hash(GDNShape(2, 6, 96, 64))


def test_shape_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        GDNShape(**SIZES).num_k_heads = 3  # type: ignore[misc]


@pytest.mark.parametrize("ratio", [1, 2, 3, 4, 8])
def test_every_head_ratio_is_taken(ratio: int) -> None:
    assert GDNShape(2, 2 * ratio, 1, 1).heads_per_key == ratio


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("value", [0, -1])
def test_a_size_below_one_is_refused(name: str, value: int) -> None:
    with pytest.raises(ArgumentError, match=rf"^GDNShape: {name}: expected at least 1, got {value}$"):
        GDNShape(**{**SIZES, name: value})


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize(("value", "got"), [(True, "bool"), (2.0, "float"), ("2", "str"), (None, "NoneType")])
def test_a_size_that_is_not_an_int_is_refused(name: str, value: Any, got: str) -> None:
    with pytest.raises(DTypeError, match=rf"^GDNShape: {name}: expected an int, got {got}$"):
        GDNShape(**{**SIZES, name: value})


@pytest.mark.parametrize(("k_heads", "v_heads"), [(4, 2), (2, 3), (3, 8)])
def test_value_heads_must_be_a_multiple_of_key_heads(k_heads: int, v_heads: int) -> None:
    with pytest.raises(ArgumentError, match=rf"multiple of num_k_heads={k_heads}, got {v_heads}"):
        GDNShape(k_heads, v_heads, 8, 8)


# The smallest power of two that holds W + T: at W + T itself a power of two, one above it, and for the widest step.
@pytest.mark.parametrize(("window", "width", "slots"), [(16, 8, 32), (16, 16, 32), (1, 1, 2), (2, 1, 4), (32, 1, 64)])
def test_ring_slots(window: int, width: int, slots: int) -> None:
    assert ring_slots_for(window, width) == slots
    assert check_window("f", window, width) == slots
    assert ReplayCache(GDNShape(1, 1, 2, 2), 1, 1, window=window, max_query_len=width).ring_slots == slots


# Contract behaviour 18: a construction-time error naming the numbers.
@pytest.mark.parametrize(
    ("window", "width", "ring", "numbers"),
    [
        (12, 4, None, ["power of two", "12"]),
        (16, 17, None, ["window=16", "17"]),
        (16, 16, 48, ["power of two", "48"]),
        (16, 1, 16, ["16 + 1", "got 16"]),
        (16, 8, 8, ["16 + 8", "got 8"]),
    ],
)
def test_windows_that_do_not_fit_are_refused(window: int, width: int, ring: int | None, numbers: list[str]) -> None:
    with pytest.raises(ArgumentError, match=r"^where: ") as caught:
        check_window("where", window, width, ring)
    for number in numbers:
        assert number in str(caught.value)


@pytest.mark.parametrize(("window", "width"), [(0, 1), (16, 0), (-16, 4)])
def test_windows_below_one_are_refused(window: int, width: int) -> None:
    with pytest.raises(ArgumentError, match="expected at least 1"):
        check_window("where", window, width)


@pytest.mark.parametrize(("window", "width"), [(16.0, 1), (16, "8"), (True, 1)])
def test_windows_that_are_not_ints_are_refused(window: Any, width: Any) -> None:
    with pytest.raises(DTypeError, match="expected an int"):
        check_window("where", window, width)


def test_a_row_folds_exactly_when_the_next_commit_might_not_fit() -> None:
    for window in (1, 2, 16):
        for width in range(1, window + 1):
            fits = [held for held in range(window + 1) if held + width <= window]
            assert [held for held in range(window + 1) if held < flush_min(window, width)] == fits


def test_step_records_survive_packing_and_are_never_zero() -> None:
    for width in (1, 2, 8, 16, 1024):
        for length in {0, 1, width - 1, width}:
            record = step_record(width, length)
            assert record != 0  # zero means: no step is pending
            assert read_step_record(record) == (width, length)
            assert record < 2**31  # an int32
