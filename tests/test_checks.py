"""Argument checks: what they let through, what they refuse, and how slots and counts become tensors.

In plain words: each check is called with one good value and with every kind of bad one.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from replaystate.checks import (
    as_index_tensor,
    byte_range,
    check_inference,
    check_no_overlap,
    check_pool,
    check_query_start_loc,
    check_slots,
    check_tensor,
    flag,
    saturate,
)
from replaystate.errors import ArgumentError, DTypeError, ShapeError, SlotError, SlotStatus

CPU = torch.device("cpu")


def test_check_tensor() -> None:
    x = torch.zeros(2, 3)
    check_tensor("f", "x", x, [2, "n"], [torch.float32], CPU)
    with pytest.raises(DTypeError, match=r"^f: x: expected a tensor, got list$"):
        check_tensor("f", "x", [1], [1], [torch.float32])  # type: ignore[arg-type]
    with pytest.raises(DTypeError, match=r"^f: x: expected float16 or bfloat16, got float32$"):
        check_tensor("f", "x", x, [2, 3], [torch.float16, torch.bfloat16])
    for shape in ([2], [2, 3, 1], [3, "n"]):
        with pytest.raises(ShapeError, match=r"^f: x: expected shape \[.*\], got \[2, 3\]$"):
            check_tensor("f", "x", x, shape, [torch.float32])
    with pytest.raises(ShapeError, match=r"^f: x: expected a tensor on meta, got one on cpu$"):
        check_tensor("f", "x", x, [2, 3], [torch.float32], torch.device("meta"))


def test_check_pool_takes_a_strided_slot_dim_only() -> None:
    pool = torch.zeros(4, 2, 6)
    for good in (pool, pool[::2], pool[1:], pool[:0], torch.zeros(4, 40)[:, :12].unflatten(1, (2, 6))):
        check_pool("f", "x", good)
    for bad in (pool.mT, torch.zeros(4, 4, 6)[:, ::2], pool[..., :3]):
        with pytest.raises(ShapeError, match=r"^f: x: expected dense slots"):
            check_pool("f", "x", bad)
    for bad in (pool[:1].expand(4, 2, 6), torch.zeros(100).as_strided((4, 2, 6), (11, 6, 1))):
        with pytest.raises(ShapeError, match=r"^f: x: expected slots that do not overlap"):
            check_pool("f", "x", bad)


def test_byte_range_covers_every_element() -> None:
    x = torch.zeros(10, dtype=torch.float16)
    assert byte_range(x) == (x.data_ptr(), x.data_ptr() + 20)
    assert byte_range(x[3:5]) == (x.data_ptr() + 6, x.data_ptr() + 10)
    assert byte_range(x[::4]) == (x.data_ptr(), x.data_ptr() + 18)
    assert byte_range(x[:0]) == (0, 0)


def test_check_no_overlap() -> None:
    x = torch.zeros(10)
    check_no_overlap("f", "out", x[5:], {"a": x[:5], "b": torch.zeros(3), "empty": x[:0]})
    with pytest.raises(ArgumentError, match=r"^f: out: expected no overlap with b, but they share memory$"):
        check_no_overlap("f", "out", x[5:], {"a": x[:5], "b": x[:6]})


@pytest.mark.parametrize(
    ("value", "expected"),
    [(3, [3]), ([1, -1], [1, -1]), ((2,), [2]), (range(3), [0, 1, 2]), ([], []), (torch.tensor(4), [4])],
)
def test_indices_in_every_form(value: Any, expected: list[int]) -> None:
    x = as_index_tensor("f", "slots", value, CPU)
    assert x.tolist() == expected
    assert x.dtype == torch.int64
    assert x.dim() == 1


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_index_tensors_keep_their_dtype(dtype: torch.dtype) -> None:
    x = torch.tensor([2, 1], dtype=dtype)
    assert as_index_tensor("f", "slots", x, CPU).dtype == dtype


@pytest.mark.parametrize(
    ("value", "error", "text"),
    [
        (True, DTypeError, "bool"),
        ([1, 2.0], DTypeError, "float"),
        ("12", DTypeError, "str"),
        (None, DTypeError, "NoneType"),
        ({1}, DTypeError, "set"),
        (torch.tensor([1.0]), DTypeError, "float32"),
        (torch.tensor([True]), DTypeError, "bool"),
        (torch.tensor([[1]]), ShapeError, r"shape \[1, 1\]"),
        ([2**63], ArgumentError, "9223372036854775808"),
    ],
)
def test_indices_of_another_kind_are_refused(value: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=f"^f: slots: expected .*got .*{text}"):
        as_index_tensor("f", "slots", value, CPU)


def test_check_slots() -> None:
    check_slots("f", "slots", [3, -1, 0, -1, 0, 1], 4, 0)  # padding may repeat
    check_slots("f", "slots", [0, 1], 4, None)
    with pytest.raises(SlotError, match=r"^f: slots: expected slots below num_slots=4, got 4$"):
        check_slots("f", "slots", [4], 4, 0)
    with pytest.raises(SlotError, match=r"^f: slots: slot 0 is named twice$"):
        check_slots("f", "slots", [0, 0], 4, None)


def test_check_query_start_loc() -> None:
    for good in ([0], [0, 0, 0], [0, 3, 3, 7], [0, 2]):
        check_query_start_loc("f", good, 7)
    for bad, text in (([1, 2], "start at 0, got 1"), ([0, 3, 2], r"got 3 then 2 \(row 1\)"), ([0, 8], "N=7 .*got 8")):
        with pytest.raises(ArgumentError, match=f"^f: query_start_loc: expected to .*{text}"):
            check_query_start_loc("f", bad, 7)


def test_check_inference() -> None:
    x = torch.zeros(2, requires_grad=True)
    check_inference("f", {"x": x.detach()})
    with torch.no_grad():
        check_inference("f", {"x": x})
    with pytest.raises(ArgumentError, match=r"^f: x: requires grad"):
        check_inference("f", {"y": x.detach(), "x": x})


# Every pair of dtypes that a pool and a given state may have: a Python limit of one dtype must not overflow in another.
@pytest.mark.parametrize("to", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("of", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_saturate(of: torch.dtype, to: torch.dtype) -> None:
    big = min(torch.finfo(of).max, 1e300)
    x = torch.tensor([[1.0, -2.0], [big, 0.0], [float("nan"), 1.0], [-big, 1.0]], dtype=of)
    stored, hit = saturate(x, to)
    overflows = big > torch.finfo(to).max
    assert stored.dtype == to
    assert hit.tolist() == [False, overflows, False, overflows]
    assert stored[0].tolist() == [1.0, -2.0]
    assert stored[1, 0] == min(big, torch.finfo(to).max)
    assert stored[3, 0] == -stored[1, 0]
    assert stored[2].isnan().tolist() == [True, False]


def test_flag_adds_a_bit_to_the_slots_that_were_hit() -> None:
    status = torch.tensor([1, 0, 4, 0], dtype=torch.int32)
    flag(status, torch.tensor([2, 0, 3]), torch.tensor([True, True, False]), SlotStatus.RING_SATURATED)
    assert status.tolist() == [3, 0, 6, 0]
    assert status.dtype == torch.int32
