"""The tensors of a cache: made zero, or taken from an engine and checked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .checks import FLOAT_DTYPES, check_pool, check_tensor
from .errors import DTypeError, ShapeError
from .shapes import GDNShape, check_window, require_int


class Pool(NamedTuple):
    """Checkpoints and rings, one of each a layer, and the cursors that all layers share. Shapes: see `ReplayCache`."""

    states: list[Tensor]
    u_rings: list[Tensor]
    k_rings: list[Tensor]
    g_rings: list[Tensor]
    ring_start: Tensor
    num_committed: Tensor


def default_ring_dtype(state_dtype: torch.dtype) -> torch.dtype:
    """float32 beside a float32 state, else float16: normalised keys lose most when rounded to bfloat16."""
    return torch.float32 if state_dtype == torch.float32 else torch.float16


def zero_pool(
    shape: GDNShape,
    num_layers: int,
    num_slots: int,
    ring_slots: int,
    state_dtype: torch.dtype,
    ring_dtype: torch.dtype,
    device: torch.device | str,
) -> Pool:
    """A pool of zeros. Raises DTypeError for a dtype that a pool cannot have."""
    for name, dtype in (("state_dtype", state_dtype), ("ring_dtype", ring_dtype)):
        if dtype not in FLOAT_DTYPES:
            raise DTypeError(f"ReplayCache: {name}: expected float32, float16 or bfloat16, got {dtype}")
    H, HV, K, V = shape.sizes

    def zeros(*size: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(num_slots, *size, dtype=dtype, device=device)

    layers = range(num_layers)
    return Pool(
        [zeros(HV, V, K, dtype=state_dtype) for _ in layers],
        [zeros(HV, ring_slots, V, dtype=ring_dtype) for _ in layers],
        [zeros(H, ring_slots, K, dtype=ring_dtype) for _ in layers],
        [zeros(HV, ring_slots, dtype=torch.float32) for _ in layers],
        zeros(dtype=torch.int32),
        zeros(dtype=torch.int32),
    )


def wrap_pool(
    shape: GDNShape,
    checkpoints: Sequence[Tensor],
    rings: Sequence[tuple[Tensor, Tensor, Tensor]],
    ring_start: Tensor,
    num_committed: Tensor,
    window: int,
    max_query_len: int,
) -> Pool:
    """An engine's tensors, checked against shape, window and each other. See `ReplayCache.from_tensors`."""
    fn = "ReplayCache.from_tensors"
    checkpoints, rings = list(checkpoints), list(rings)
    if not checkpoints or len(checkpoints) != len(rings):
        raise ShapeError(
            f"{fn}: expected one checkpoint and one (u, k, g) a layer, got {len(checkpoints)} and {len(rings)}"
        )
    if any(len(ring) != 3 for ring in rings):
        raise ShapeError(f"{fn}: rings: expected (u, k, g) of every layer")
    H, HV, K, V = shape.sizes
    first, first_k = checkpoints[0], rings[0][1]
    check_tensor(fn, "checkpoints[0]", first, ["num_slots", HV, V, K], FLOAT_DTYPES)
    check_tensor(fn, "rings[0] k", first_k, [first.shape[0], H, "R", K], FLOAT_DTYPES)
    num_slots, ring_slots = first.shape[0], first_k.shape[2]
    require_int(fn, "num_slots", num_slots, minimum=1)
    check_window(fn, window, max_query_len, ring_slots)
    for layer, (state, (u, k, g)) in enumerate(zip(checkpoints, rings, strict=True)):
        for name, x, size, dtype in (
            (f"checkpoints[{layer}]", state, [num_slots, HV, V, K], first.dtype),
            (f"rings[{layer}] u", u, [num_slots, HV, ring_slots, V], first_k.dtype),
            (f"rings[{layer}] k", k, [num_slots, H, ring_slots, K], first_k.dtype),
            (f"rings[{layer}] g", g, [num_slots, HV, ring_slots], torch.float32),
        ):
            check_tensor(fn, name, x, size, [dtype], first.device)
            check_pool(fn, name, x)
    for name, x in (("ring_start", ring_start), ("num_committed", num_committed)):
        check_tensor(fn, name, x, [num_slots], [torch.int32], first.device)
    u_rings, k_rings, g_rings = ([ring[i] for ring in rings] for i in range(3))
    return Pool(checkpoints, u_rings, k_rings, g_rings, ring_start, num_committed)
