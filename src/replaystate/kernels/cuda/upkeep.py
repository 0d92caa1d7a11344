"""Slot upkeep on the GPU: reset, invalidate, crop, checkpoint load and fork, without a word from the host."""

from __future__ import annotations

import struct
from typing import Any

import torch
from torch import Tensor

from . import compiler
from .compiler import Program

ReplayCache = Any  # replaystate.cache.ReplayCache, which lies above this module

RESET, INVALIDATE, CROP, LOAD, GATHER, SCATTER = range(6)
MAX_TENSORS = 128
_ARGUMENTS = struct.Struct(f"<{9 + 11 + 11 + 3 * 160}q")
_CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.float64: 3}


def program() -> Program:
    """The one kernel."""
    return Program("slots.cu", "slot_upkeep", (), 256)


def _launch(
    mode: int,
    cache: ReplayCache,
    slots: Tensor,
    pools: list[Tensor],
    *,
    words: bool,
    other: Tensor | None = None,
    count: Tensor | None = None,
    src: Tensor | None = None,
    buffer: Tensor | None = None,
    layer: int = 0,
) -> None:
    rows = slots.shape[0]
    if rows == 0:
        return
    inside = [x[0].numel() for x in pools]
    if mode == LOAD:
        steps, sizes = [x.stride(0) for x in pools], inside
    else:
        steps = [x.stride(0) * x.element_size() for x in pools]
        sizes = [n * x.element_size() for n, x in zip(inside, pools, strict=True)]
    fill = [0] * (160 - len(pools))

    def ptr(x: Tensor | None) -> int:
        return 0 if x is None else x.data_ptr()

    def wide(x: Tensor | None) -> int:
        return int(x is not None and x.dtype == torch.int64)

    def stride(x: Tensor | None) -> int:
        return 0 if x is None else x.stride(0)

    arguments = _ARGUMENTS.pack(
        ptr(slots), ptr(other), ptr(count), ptr(src), cache.ring_start.data_ptr(), cache.num_committed.data_ptr(),
        cache._step_records.data_ptr(), cache.status.data_ptr(), ptr(buffer),
        wide(slots), wide(other), wide(count), stride(slots), stride(other), stride(count), cache.ring_start.stride(0),
        cache.num_committed.stride(0), cache.status.stride(0), *cache._step_records.stride(),
        mode, rows, len(pools), cache.num_layers, cache.num_slots, cache._null, words,
        0 if src is None else _CODES[src.dtype], _CODES[cache.state_dtype], 0 if buffer is None else buffer.stride(0),
        layer,
        *(x.data_ptr() for x in pools), *fill, *steps, *fill, *sizes, *fill,
    )  # fmt: skip
    parts = max(1, min(32, max(sizes, default=0) // 16384, 2048 // rows))
    compiler.launch(program(), cache.ring_start.get_device(), rows, 0, arguments, parts)


def reset(cache: ReplayCache, slots: Tensor) -> None:
    """Checkpoints zero in all layers, cursors, status and records 0."""
    for begin in range(0, len(cache._states), MAX_TENSORS):
        _launch(RESET, cache, slots, cache._states[begin : begin + MAX_TENSORS], words=begin == 0)


def invalidate(cache: ReplayCache, slots: Tensor) -> None:
    """Mark dead."""
    _launch(INVALIDATE, cache, slots, [], words=True)


def crop(cache: ReplayCache, slots: Tensor, counts: Tensor) -> None:
    """Forget the last rows of the windows; a count outside a window is clamped and flagged."""
    _launch(CROP, cache, slots, [], words=True, count=counts)


def load_state(cache: ReplayCache, layer: int, slots: Tensor, state: Tensor) -> None:
    """Write checkpoints of a layer where the window is empty; saturated values and live windows are flagged."""
    _launch(LOAD, cache, slots, [cache._states[layer]], words=True, src=state.detach().contiguous(), layer=layer)


def fork(cache: ReplayCache, src: Tensor, dst: Tensor) -> None:
    """Copy slots by way of a buffer, so that every source is read before anything is written."""
    pools = [*cache._states, *cache._u_rings, *cache._k_rings, *cache._g_rings]
    chunks = [pools[i : i + MAX_TENSORS] for i in range(0, len(pools), MAX_TENSORS)]
    buffers = []
    for i, chunk in enumerate(chunks):
        size = 16 + sum(-(-x[0].numel() * x.element_size() // 16) * 16 for x in chunk)
        buffers.append(torch.empty(src.shape[0], size, dtype=torch.uint8, device=src.device))
        _launch(GATHER, cache, src, chunk, words=i == 0, other=dst, buffer=buffers[i])
    for i, chunk in enumerate(chunks):
        _launch(SCATTER, cache, dst, chunk, words=i == 0, other=src, buffer=buffers[i])
