"""Checks of arguments, and how slots and counts given as ints, sequences or tensors become tensors.

Messages name the function, the argument, what was expected and what came.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .errors import ArgumentError, DTypeError, ShapeError, SlotError, SlotStatus

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
INT_DTYPES = (torch.int32, torch.int64)

Indices = int | Sequence[int] | Tensor
"""Slots, counts or accepted: an int, a sequence of ints, or an int32/int64 tensor."""


def dtype_name(dtype: torch.dtype) -> str:
    """'float16' for torch.float16."""
    return str(dtype).removeprefix("torch.")


def check_tensor(
    fn: str,
    name: str,
    x: Tensor,
    shape: Sequence[int | str],
    dtypes: Sequence[torch.dtype],
    device: torch.device | None = None,
) -> None:
    """Check shape, dtype and device of one tensor.

    Args:
        fn, name: for the message.
        x: the tensor.
        shape: a size for each dim; a string names a free dim.
        dtypes: the dtypes allowed.
        device: the device expected, when given.

    Raises:
        DTypeError: not a tensor, or another dtype.
        ShapeError: another shape or device.
    """
    if not isinstance(x, Tensor):
        raise DTypeError(f"{fn}: {name}: expected a tensor, got {type(x).__name__}")
    if x.dtype not in dtypes:
        allowed = " or ".join(dtype_name(dtype) for dtype in dtypes)
        raise DTypeError(f"{fn}: {name}: expected {allowed}, got {dtype_name(x.dtype)}")
    sizes = x.shape
    fits = len(sizes) == len(shape)
    if fits:
        for expected_size, size in zip(shape, sizes, strict=True):
            fits = fits and (size == expected_size or isinstance(expected_size, str))
    if not fits:
        expected = ", ".join(str(n) for n in shape)
        raise ShapeError(f"{fn}: {name}: expected shape [{expected}], got {list(x.shape)}")
    if device is not None and x.device != device:
        raise ShapeError(f"{fn}: {name}: expected a tensor on {device}, got one on {x.device}")


def check_pool(fn: str, name: str, x: Tensor) -> None:
    """A pool of slots: the slot dim may be strided, the dims inside a slot are dense and slots do not overlap."""
    if x.is_contiguous():
        return
    if x.shape[0] and not x[0].is_contiguous():
        raise ShapeError(f"{fn}: {name}: expected dense slots (only dim 0 strided), got strides {list(x.stride())}")
    if x.shape[0] > 1 and x.stride(0) < x[0].numel():
        raise ShapeError(f"{fn}: {name}: expected slots that do not overlap, got strides {list(x.stride())}")


def byte_range(x: Tensor) -> tuple[int, int]:
    """First byte and end of the memory that x touches; empty tensors touch none."""
    if x.numel() == 0:
        return 0, 0
    if x.is_contiguous():
        return x.data_ptr(), x.data_ptr() + x.numel() * x.element_size()
    last = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size()


def check_no_overlap(fn: str, name: str, x: Tensor, others: dict[str, Tensor]) -> None:
    """Raise when x shares memory with one of the others."""
    begin, end = byte_range(x)
    for other_name, other in others.items():
        other_begin, other_end = byte_range(other)
        if begin < other_end and other_begin < end and not _between_rows(x, other):
            raise ArgumentError(f"{fn}: {name}: expected no overlap with {other_name}, but they share memory")


def _between_rows(x: Tensor, other: Tensor) -> bool:
    """Whether two tensors with one row stride lie beside each other in every row, e.g. columns of one buffer."""
    if x.dim() == 0 or other.dim() == 0:
        return False
    stride = x.stride(0) * x.element_size()
    if stride <= 0 or stride != other.stride(0) * other.element_size():
        return False
    (begin, end), (other_begin, other_end) = byte_range(x[0]), byte_range(other[0])
    at = (other_begin - begin) % stride
    return end - begin <= at and at + other_end - other_begin <= stride


def check_rows(fn: str, name: str, x: Tensor) -> None:
    """An output: rows may be strided, each is dense and none overlaps another."""
    if x.is_contiguous():
        return
    if x.shape[0] and (not x[0].is_contiguous() or (x.shape[0] > 1 and x.stride(0) < x[0].numel())):
        raise ShapeError(f"{fn}: {name}: expected dense rows that do not overlap, got strides {list(x.stride())}")


def check_options(fn: str, scale: object, backend: object) -> None:
    """scale is None or a number, backend a name."""
    if scale is not None and (isinstance(scale, bool) or not isinstance(scale, int | float)):
        raise DTypeError(f"{fn}: scale: expected a float or None, got {type(scale).__name__}")
    if not isinstance(backend, str):
        raise DTypeError(f"{fn}: backend: expected a name, got {type(backend).__name__}")


def as_index_tensor(fn: str, name: str, value: Indices, device: torch.device) -> Tensor:
    """A 1-D int32/int64 tensor on the device.

    Raises:
        DTypeError: not an int, a sequence of ints or an int32/int64 tensor.
        ShapeError: a tensor with more than one dim.
    """
    if isinstance(value, Tensor):
        if value.dtype not in INT_DTYPES:
            raise DTypeError(f"{fn}: {name}: expected int32 or int64, got {dtype_name(value.dtype)}")
        if value.dim() > 1:
            raise ShapeError(f"{fn}: {name}: expected at most 1 dim, got shape {list(value.shape)}")
        return value.reshape(-1).to(device)
    values = [value] if isinstance(value, int) else value
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise DTypeError(f"{fn}: {name}: expected an int, a sequence of ints or a tensor, got {type(value).__name__}")
    for item in values:
        if isinstance(item, bool) or not isinstance(item, int):
            raise DTypeError(f"{fn}: {name}: expected ints, got {type(item).__name__}")
        if not -(2**63) <= item < 2**63:
            raise ArgumentError(f"{fn}: {name}: expected a 64-bit int, got {item}")
    return torch.tensor(values, dtype=torch.int64, device=device)


def parse_json(text: str) -> Any:
    """json.loads of a file that anyone may have written: what Python cannot hold well is a ValueError too.

    >>> parse_json('{"rows": [1, 2]}')
    {'rows': [1, 2]}

    Raises:
        ValueError: no JSON, nested too deeply, or an integer beyond 64 bits.
    """
    try:
        return json.loads(text, parse_int=_int64)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _int64(digits: str) -> int:
    if len(digits) > 20 or not -(2**63) <= int(digits) < 2**63:
        raise ValueError(f"an integer beyond 64 bits, {digits[:20]}...")
    return int(digits)


def flag(status: Tensor, slots: Tensor, hit: Tensor, bit: SlotStatus) -> None:
    """Set a status bit of the slots whose row was hit; a slot may be named by several rows."""
    where = slots[hit]
    status[where] = status[where] | int(bit)


def saturate(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(x in dtype, saturated to its finite range; which leading rows were saturated). NaN stays NaN."""
    wide = x if x.dtype == torch.float64 else x.float()
    if wide.dtype == dtype:
        return wide, torch.zeros(x.shape[0], dtype=torch.bool, device=x.device)
    limit = torch.finfo(dtype).max
    return wide.clamp(-limit, limit).to(dtype), (wide.abs() > limit).flatten(1).any(1)


def check_slots(fn: str, name: str, slots: Sequence[int], num_slots: int, null_slot: int | None) -> None:
    """Host-side check of slots: inside the pool, and no live slot twice. Negative and null slots are padding.

    Raises:
        SlotError: a slot past the pool, or a live slot named twice.
    """
    seen: set[int] = set()
    for slot in slots:
        if slot >= num_slots:
            raise SlotError(f"{fn}: {name}: expected slots below num_slots={num_slots}, got {slot}")
        if slot < 0 or slot == null_slot:
            continue
        if slot in seen:
            raise SlotError(f"{fn}: {name}: slot {slot} is named twice")
        seen.add(slot)


def check_query_start_loc(fn: str, bounds: Sequence[int], num_tokens: int) -> None:
    """Host-side check of row bounds: they start at 0, never fall, and end inside the tokens.

    Raises:
        ArgumentError: otherwise.
    """
    if bounds[0] != 0:
        raise ArgumentError(f"{fn}: query_start_loc: expected to start at 0, got {bounds[0]}")
    for i in range(len(bounds) - 1):
        if bounds[i + 1] < bounds[i]:
            raise ArgumentError(
                f"{fn}: query_start_loc: expected to never fall, got {bounds[i]} then {bounds[i + 1]} (row {i})"
            )
    if bounds[-1] > num_tokens:
        raise ArgumentError(f"{fn}: query_start_loc: expected to end at N={num_tokens} or before, got {bounds[-1]}")


def check_inference(fn: str, tensors: dict[str, Tensor]) -> None:
    """Refuse activations that require grad: nothing here has a backward pass."""
    if torch.is_grad_enabled():
        for name, x in tensors.items():
            if x.requires_grad:
                raise ArgumentError(
                    f"{fn}: {name}: requires grad, but this op is inference only: call it under torch.no_grad()"
                )
