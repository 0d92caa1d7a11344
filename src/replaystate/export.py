"""One slot as a dict of tensors: what `ReplayCache.export` writes and `ReplayCache.load` reads.

| key | shape | dtype | meaning |
|---|---|---|---|
| format_version | [] | int64 | 1 |
| sizes | [5] | int64 | L (layers), H, HV, K, V |
| window | [] | int64 | W |
| ring_start | [] | int64 | 0..R-1 |
| status | [] | int64 | `SlotStatus` bits |
| checkpoint | [L, HV, V, K] | state dtype | S_0 |
| k | [L, H, P, K] | ring dtype | normalised keys of the P live rows, oldest first |
| u | [L, HV, P, V] | ring dtype | corrections |
| g | [L, HV, P] | float32 | log-decay of each token |

Only live rows travel: P is the length of dim 2. The dict holds no Python object and round-trips through safetensors. It
carries the content of a request; treat it like the request's text.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .checks import dtype_name
from .errors import FormatError, SlotStatus

if TYPE_CHECKING:
    from .cache import ReplayCache

FORMAT_VERSION = 1


def pack_slot(cache: ReplayCache, slot: int) -> dict[str, Tensor]:
    """Copy one slot to the host."""
    start, count = int(cache.ring_start[slot]), int(cache.num_committed[slot])
    rows = _live_rows(cache, start, count)
    layers = range(cache.num_layers)
    rings = [cache.rings(layer) for layer in layers]
    return {
        "format_version": torch.tensor(FORMAT_VERSION, dtype=torch.int64, device="cpu"),
        "sizes": torch.tensor([cache.num_layers, *cache.shape.sizes], dtype=torch.int64, device="cpu"),
        "window": torch.tensor(cache.window, dtype=torch.int64, device="cpu"),
        "ring_start": torch.tensor(start, dtype=torch.int64, device="cpu"),
        "status": torch.tensor(int(cache.status[slot]), dtype=torch.int64, device="cpu"),
        "checkpoint": torch.stack([cache.checkpoint(layer)[slot] for layer in layers]).cpu(),
        "k": torch.stack([k[slot][:, rows] for _, k, _ in rings]).cpu(),
        "u": torch.stack([u[slot][:, rows] for u, _, _ in rings]).cpu(),
        "g": torch.stack([g[slot][:, rows] for _, _, g in rings]).cpu(),
    }


def unpack_slot(cache: ReplayCache, slot: int, exported: dict[str, Tensor]) -> None:
    """Check everything, then overwrite one slot.

    Raises:
        FormatError: naming the first thing that does not fit.
    """
    start, count = _check(cache, exported)
    rows = _live_rows(cache, start, count)
    for layer in range(cache.num_layers):
        u, k, g = cache.rings(layer)
        cache.checkpoint(layer)[slot] = exported["checkpoint"][layer].to(cache.device)
        for ring, name in ((u, "u"), (k, "k"), (g, "g")):
            ring[slot, :, rows] = exported[name][layer].to(cache.device)
    cache.ring_start[slot], cache.num_committed[slot] = start, count
    cache.status[slot] = int(exported["status"])
    cache._step_records[slot] = 0


def _live_rows(cache: ReplayCache, start: int, count: int) -> Tensor:
    return (start + torch.arange(count, device=cache.device)) % cache.ring_slots


def _check(cache: ReplayCache, exported: dict[str, Tensor]) -> tuple[int, int]:
    """(ring_start, P) of a dict that fits the cache."""
    fn = "load"
    H, HV, K, V = cache.shape.sizes
    L = cache.num_layers
    names = ("format_version", "sizes", "window", "ring_start", "status", "checkpoint", "k", "u", "g")
    if not isinstance(exported, dict):
        raise FormatError(f"{fn}: exported: expected the dict that export gave, got {type(exported).__name__}")
    for name in names:
        x = exported.get(name)
        if not isinstance(x, Tensor):
            raise FormatError(f"{fn}: exported: expected a tensor {name!r}, got {type(x).__name__}")
        if x.is_meta:
            raise FormatError(f"{fn}: {name}: expected a tensor with data, got one on the meta device")
    unknown = sorted(set(exported) - set(names))
    if unknown:
        raise FormatError(f"{fn}: exported: unknown entries {unknown}")

    def number(name: str) -> int:
        if exported[name].numel() != 1 or exported[name].dtype != torch.int64:
            raise FormatError(
                f"{fn}: {name}: expected one int64, got {dtype_name(exported[name].dtype)} {list(exported[name].shape)}"
            )
        return int(exported[name])

    if number("format_version") != FORMAT_VERSION:
        raise FormatError(f"{fn}: format_version: expected {FORMAT_VERSION}, got {number('format_version')}")
    if exported["sizes"].dtype != torch.int64:
        raise FormatError(f"{fn}: sizes: expected int64, got {dtype_name(exported['sizes'].dtype)}")
    sizes = exported["sizes"].tolist()
    if sizes != [L, H, HV, K, V]:
        raise FormatError(f"{fn}: sizes (layers, H, HV, K, V): expected {[L, H, HV, K, V]}, got {sizes}")
    if number("window") != cache.window:
        raise FormatError(f"{fn}: window: expected {cache.window}, got {number('window')}")
    if exported["g"].dim() != 3:
        raise FormatError(f"{fn}: g: expected [{L}, {HV}, P], got {list(exported['g'].shape)}")
    start, count = number("ring_start"), exported["g"].shape[-1]
    if not 0 <= start < cache.ring_slots or count > cache.window:
        raise FormatError(
            f"{fn}: expected ring_start in 0..{cache.ring_slots - 1} and at most {cache.window} rows, "
            f"got {start} and {count}"
        )
    status = number("status")
    if status & SlotStatus.DEAD or not 0 <= status < 2 * max(SlotStatus):
        raise FormatError(f"{fn}: status: expected the bits of a living slot, got {status}")
    for name, shape, dtype in (
        ("checkpoint", [L, HV, V, K], cache.state_dtype),
        ("k", [L, H, count, K], cache.ring_dtype),
        ("u", [L, HV, count, V], cache.ring_dtype),
        ("g", [L, HV, count], torch.float32),
    ):
        x = exported[name]
        if list(x.shape) != shape or x.dtype != dtype:
            raise FormatError(
                f"{fn}: {name}: expected {shape} {dtype_name(dtype)}, got {list(x.shape)} {dtype_name(x.dtype)}"
            )
    return start, count
