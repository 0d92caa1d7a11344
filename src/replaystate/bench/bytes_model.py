"""Bytes that a step cannot avoid to read and write: what its time is compared with."""

from __future__ import annotations

from dataclasses import astuple, dataclass

import torch

from ..shapes import GDNShape


@dataclass(frozen=True)
class StepBytes:
    """Bytes of one step of one layer.

    Args:
        state_read: checkpoints, once.
        state_written: checkpoints of folding rows.
        ring_read: the windows.
        ring_written: the appended rows.
        io: packed inputs and outputs.
    """

    state_read: int
    state_written: int
    ring_read: int
    ring_written: int
    io: int

    @property
    def read(self) -> int:
        """Bytes from memory, inputs not counted: they were just made and lie in a cache."""
        return self.state_read + self.ring_read

    @property
    def total(self) -> int:
        """All of it."""
        return self.read + self.state_written + self.ring_written + self.io

    def __add__(self, other: StepBytes) -> StepBytes:
        """Of two groups of rows in one step."""
        return StepBytes(*(mine + theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True)))


def step_bytes(
    shape: GDNShape,
    *,
    rows: int,
    tokens: int,
    window_rows: int,
    folds: bool,
    state_dtype: torch.dtype,
    ring_dtype: torch.dtype,
    io_dtype: torch.dtype,
) -> StepBytes:
    """Bytes of a step of `rows` rows with `tokens` tokens each after windows of `window_rows` rows.

    >>> shape = GDNShape(16, 32, 128, 128)
    >>> one = dict(rows=1, tokens=4, window_rows=8, folds=False, io_dtype=torch.bfloat16)
    >>> step_bytes(shape, state_dtype=torch.float16, ring_dtype=torch.float16, **one).state_read
    1048576
    """
    H, HV, K, V = shape.sizes
    state = rows * HV * V * K * state_dtype.itemsize
    ring_row = rows * ((HV * V + H * K) * ring_dtype.itemsize + HV * 4)
    io = rows * tokens * ((shape.qkv_dim + HV * V) * io_dtype.itemsize + 2 * HV * io_dtype.itemsize)
    return StepBytes(state, state if folds else 0, window_rows * ring_row, tokens * ring_row, io)
