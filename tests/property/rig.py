"""A cache under watch: pools full of NaN, canaries between strided slots, and snapshots of every bit.

`Rig` owns the memory behind a ReplayCache. `Snapshot(rig)` copies all of it; after a call, `allow` marks what the call
may have changed, and `check` compares the bits of all the rest.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from replaystate import GDNShape, ReplayCache
from replaystate.kernels import registry

NAN = float("nan")
WORDS = ("ring_start", "num_committed", "status", "records")

_STEP = registry.Call("replay_step", "cpu", *[torch.float32] * 3, sizes=(1, 1, 8, 8), window=16, executed_width=8)
USABLE_BACKENDS = [x.NAME for x in registry.BY_PREFERENCE if x.usable() is None and x.supports(_STEP) is None]
"""Backends that run CPU tensors on this machine: a new one is covered by every test that takes a `backend`."""


@contextmanager
def preferring(backend: str) -> Iterator[None]:
    """Inside, ops that take no backend of their own (commit, fold, state) prefer this one."""
    before = registry.BY_PREFERENCE
    registry.BY_PREFERENCE = tuple(sorted(before, key=lambda candidate: candidate.NAME != backend))
    registry._select.cache_clear()
    try:
        yield
    finally:
        registry.BY_PREFERENCE = before
        registry._select.cache_clear()


def bits(x: Tensor) -> Tensor:
    """The bits as integers: NaN payloads and signs of zero count."""
    return x.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def same_bits(x: Tensor, y: Tensor) -> bool:
    return x.dtype == y.dtype and torch.equal(bits(x), bits(y))


def relative_error(found: Tensor, truth: Tensor) -> float:
    """Frobenius norm of the difference over that of the truth; any NaN gives NaN, which no bound admits."""
    return float((found.double() - truth.double()).norm() / truth.double().norm().clamp(min=1e-12))


def state_error(found: Tensor, truth: Tensor) -> float:
    """`relative_error` of states; where cancellation left next to nothing, relative to what one token may add."""
    one_token = 0.5 * (truth.numel() / truth.shape[-1]) ** 0.5
    return float((found.double() - truth.double()).norm()) / max(float(truth.norm()), one_token)


def output_error(found: Tensor, truth: Tensor, head_k_dim: int) -> float:
    """`relative_error` of outputs; where cancellation left next to nothing, relative to what one token may add."""
    one_token = 0.5 * truth.numel() ** 0.5 / head_k_dim
    return float((found.double() - truth.double()).norm()) / max(float(truth.norm()), one_token)


def live_rows(start: int, count: int, ring_slots: int) -> list[int]:
    return [(start + j) % ring_slots for j in range(count)]


class Rig:
    """A ReplayCache and the memory behind it.

    Args:
        strided: pools are views with gaps between the slots and odd offsets, wrapped with `from_tensors`; cursors are
            every other word of one tensor. Otherwise the cache makes its own tensors.
        ring_slots: R of strided pools, when it is more than needed.
        fill: what the pools hold at first.
    """

    def __init__(
        self,
        shape: GDNShape,
        num_layers: int = 1,
        num_slots: int = 8,
        *,
        window: int = 16,
        max_query_len: int = 8,
        state_dtype: torch.dtype = torch.float32,
        ring_dtype: torch.dtype | None = None,
        null_slot: int | None = 0,
        strided: bool = False,
        ring_slots: int | None = None,
        debug: bool = False,
        fill: float = NAN,
    ) -> None:
        if ring_dtype is None:
            ring_dtype = torch.float32 if state_dtype == torch.float32 else torch.float16
        self.storages: list[Tensor] = []
        if strided:
            H, HV, K, V = shape.sizes
            R = ring_slots or 1 << (window + max_query_len - 1).bit_length()
            checkpoints, rings = [], []
            for _ in range(num_layers):
                checkpoints.append(self._pool(num_slots, HV, V, K, dtype=state_dtype))
                u, k = (self._pool(num_slots, *n, dtype=ring_dtype) for n in ((HV, R, V), (H, R, K)))
                rings.append((u, k, self._pool(num_slots, HV, R, dtype=torch.float32)))
            cursors = torch.zeros(num_slots, 2, dtype=torch.int32)
            self.cache = ReplayCache.from_tensors(
                shape, checkpoints, rings, cursors[:, 1], cursors[:, 0], window=window, max_query_len=max_query_len,
                null_slot=null_slot, debug=debug,
            )  # fmt: skip
        else:
            self.cache = ReplayCache(
                shape, num_layers, num_slots, window=window, max_query_len=max_query_len, state_dtype=state_dtype,
                ring_dtype=ring_dtype, null_slot=null_slot, debug=debug,
            )  # fmt: skip
            self.storages = [x.flatten() for x in self.pools]
        for whole in self.storages:
            whole.fill_(fill)

    def _pool(self, *size: int, dtype: torch.dtype) -> Tensor:
        numel, gap = torch.Size(size[1:]).numel(), 3 + len(self.storages) % 2
        whole = torch.empty(1 + size[0] * (numel + gap), dtype=dtype)
        self.storages.append(whole)
        inner = [torch.Size(size[i + 1 :]).numel() for i in range(1, len(size))]
        return whole.as_strided(size, (numel + gap, *inner), 1)

    @property
    def pools(self) -> list[Tensor]:
        """Layer by layer: checkpoint, u, k, g."""
        cache = self.cache
        return [x for layer in range(cache.num_layers) for x in (cache.checkpoint(layer), *cache.rings(layer))]

    @property
    def words(self) -> list[Tensor]:
        """In the order of WORDS."""
        return [self.cache.ring_start, self.cache.num_committed, self.cache.status, self.cache._step_records]

    def poison(self, windows: dict[int, tuple[int, int]], value: float = NAN) -> None:
        """Fill all that no call may read: dead ring rows of live slots, and all of every other slot with its cursors.

        Args:
            windows: (ring_start, P) of each live slot.
        """
        R = self.cache.ring_slots
        for slot in range(self.cache.num_slots):
            if slot not in windows:
                for x in self.pools:
                    x[slot] = value
                self.cache.ring_start[slot], self.cache.num_committed[slot] = -77, 1 << 20
                continue
            live = live_rows(*windows[slot], R)
            dead = [row for row in range(R) if row not in live]
            for layer in range(self.cache.num_layers):
                for ring in self.cache.rings(layer):
                    ring[slot, :, dead] = value


class Snapshot:
    """All bits of a rig at one moment."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.storages = [bits(x).clone() for x in rig.storages]
        self.words = [x.clone() for x in rig.words]
        self.num_free = rig.cache.num_free

    def pool(self, index: int) -> Tensor:
        """The bits of a pool as they were, seen like the pool."""
        x = self.rig.pools[index]
        offset = (x.data_ptr() - self.rig.storages[index].data_ptr()) // x.element_size()
        return self.storages[index].as_strided(x.shape, x.stride(), offset)

    def allow(self, index: int, *at: object) -> None:
        """Pool `index` may have changed at this place."""
        self.pool(index)[at] = bits(self.rig.pools[index])[at]

    def allow_slot(self, slot: int, rings: bool = True) -> None:
        """All checkpoints, and all rings, of the slot may have changed."""
        for index in range(len(self.storages)):
            if rings or index % 4 == 0:
                self.allow(index, slot)

    def allow_words(self, slot: int, *names: str) -> None:
        for then, now, name in zip(self.words, self.rig.words, WORDS, strict=True):
            if name in names:
                then[slot] = now[slot]

    def check(self, what: str) -> None:
        """Every bit that was not allowed to change is as it was."""
        for i, (then, now) in enumerate(zip(self.storages, self.rig.storages, strict=True)):
            assert torch.equal(then, bits(now)), f"{what}: {('checkpoint', 'u', 'k', 'g')[i % 4]}, layer {i // 4}"
        for name, then, now in zip(WORDS, self.words, self.rig.words, strict=True):
            assert torch.equal(then, now), f"{what}: {name}: {then.tolist()} -> {now.tolist()}"
        assert self.num_free == self.rig.cache.num_free, f"{what}: num_free"
