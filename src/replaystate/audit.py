"""The audit: a float32 recurrence kept beside the rings, which raises when the two part.

`ReplayCache(debug=True)` owns one. Every committed token also advances a plain shadow state per layer and slot,
computed from the step's inputs by the recurrence alone: no rings, no cursors, no folds. After every commit and flush
the replayed state is compared with it. Slow (Python over rows and layers, one host sync a call), and meant for
finding protocol errors: a rollback that rolled back the wrong rows, an engine that reused a slot, a kernel that
folded too much.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from .errors import AuditError
from .reference import gates, normalize, split_qkv, window_of

if TYPE_CHECKING:
    from .cache import ReplayCache

TOLERANCE = {torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 1e-1}
"""Largest relative error (Frobenius norm over a slot's heads) by the coarsest storage dtype: about 20 times what
rounding alone makes in thousands of tokens (contract section 9), and far below the error of a wrong rollback."""


class _Token(NamedTuple):
    """A token by its inputs: the recurrence finds its correction."""

    k: Tensor  # [HV, K] normalised, repeated to value heads
    v: Tensor  # [HV, V]
    g: Tensor  # [HV]
    beta: Tensor  # [HV]


class _Row(NamedTuple):
    """A token that was in the window before the audit began: only its ring row is known."""

    k: Tensor  # [HV, K]
    u: Tensor  # [HV, V]
    g: Tensor  # [HV]


class _Shadow:
    """One slot of one layer: a state, and the committed tokens after it that a crop may still take back."""

    def __init__(self, base: Tensor) -> None:
        self.base = base
        self.tokens: list[_Token | _Row] = []
        self.pending: list[_Token] = []

    def state(self, count: int | None = None) -> Tensor:
        S = self.base
        for token in self.tokens[:count]:
            S = _advance(S, token)
        return S

    def trim(self, keep: int) -> None:
        """Let all but the last `keep` tokens into the base: they cannot be cropped any more."""
        while len(self.tokens) > keep:
            self.base = _advance(self.base, self.tokens.pop(0))

    def copy(self, count: int | None = None) -> _Shadow:
        other = _Shadow(self.base.clone())
        other.tokens = self.tokens[:count]
        return other


def _advance(S: Tensor, token: _Token | _Row) -> Tensor:
    S = torch.exp(token.g)[:, None, None] * S
    if isinstance(token, _Row):
        u = token.u
    else:
        u = token.beta[:, None] * (token.v - (S * token.k[:, None, :]).sum(-1))
    return S + u[:, :, None] * token.k[:, None, :]


class Audit:
    """Shadow states of all layers and slots of one cache.

    Args:
        cache: the cache that owns this audit and calls it at every change.
    """

    def __init__(self, cache: ReplayCache) -> None:
        self._cache = cache
        self._tolerance = max(TOLERANCE[cache.state_dtype], TOLERANCE[cache.ring_dtype])
        # What is this small is rounded to the dtype's subnormals, whose relative error has no bound.
        H, HV, K, V = cache.shape.sizes
        self._floor = (HV * K * V) ** 0.5 * torch.finfo(cache.state_dtype).tiny
        self._shadows: dict[tuple[int, int], _Shadow] = {}

    def _shadow(self, layer: int, slot: int) -> _Shadow:
        """The shadow of a slot; one that does not exist yet starts from what the cache holds now."""
        key = (layer, slot)
        if key not in self._shadows:
            cache = self._cache
            u, k, g = (ring[slot].float() for ring in cache.rings(layer))
            window = window_of(u, k, g, int(cache.ring_start[slot]), int(cache.num_committed[slot]))
            shadow = _Shadow(cache.checkpoint(layer)[slot].float().clone())
            keys = window.k.repeat_interleave(cache.shape.heads_per_key, dim=1)
            shadow.tokens = [_Row(*row) for row in zip(keys, window.u, window.g, strict=True)]
            self._shadows[key] = shadow
        return self._shadows[key]

    def watch(self, slots: list[int]) -> None:
        """Something is about to change these slots: their shadows begin before it."""
        for layer in range(self._cache.num_layers):
            for slot in slots:
                self._shadow(layer, slot)

    def forget(self, slots: list[int], layer: int | None = None) -> None:
        """The slots were reset or loaded (in one layer, or in all): start again from what the cache then holds."""
        for index in range(self._cache.num_layers) if layer is None else (layer,):
            for slot in slots:
                self._shadows.pop((index, slot), None)

    def before_step(self, layer: int, slots: list[int]) -> None:
        """A step is about to run: shadows that do not exist yet start from the state before it."""
        for slot in slots:
            self._shadow(layer, slot)

    def step(
        self,
        layer: int,
        slots: list[int],
        bounds: list[tuple[int, int]],
        mixed_qkv: Tensor,
        a: Tensor,
        b: Tensor,
        A_log: Tensor,
        dt_bias: Tensor,
    ) -> None:
        """Remember the tokens of a step; row i of them is slots[i] with tokens bounds[i]."""
        shape = self._cache.shape
        _, k, v = split_qkv(mixed_qkv.float(), shape)
        g, beta = gates(a.float(), b.float(), A_log.detach().float(), dt_bias.detach().float())
        k = normalize(k).repeat_interleave(shape.heads_per_key, dim=1)
        for slot, (begin, end) in zip(slots, bounds, strict=True):
            tokens = [_Token(k[t].clone(), v[t].clone(), g[t].clone(), beta[t].clone()) for t in range(begin, end)]
            self._shadow(layer, slot).pending = tokens

    def commit(self, slots: list[int], accepted: list[int]) -> None:
        """Advance the shadows by the accepted tokens and compare."""
        for layer in range(self._cache.num_layers):
            for slot, kept in zip(slots, accepted, strict=True):
                shadow = self._shadow(layer, slot)
                shadow.tokens += shadow.pending[:kept]
                shadow.pending = []
                shadow.trim(int(self._cache.num_committed[slot]))
        self.compare(slots)

    def crop(self, slots: list[int], counts: list[int]) -> None:
        """Drop the last tokens, and compare."""
        for layer in range(self._cache.num_layers):
            for slot, count in zip(slots, counts, strict=True):
                shadow = self._shadow(layer, slot)
                shadow.tokens = shadow.tokens[: len(shadow.tokens) - count]
        self.compare(slots)

    def fork(self, src: list[int], dst: list[int]) -> None:
        """dst continues from src; all sources are read first."""
        for layer in range(self._cache.num_layers):
            copies = [self._shadow(layer, slot).copy() for slot in src]
            self._shadows.update({(layer, slot): shadow for slot, shadow in zip(dst, copies, strict=True)})
        self.compare(dst)

    def materialize(self, src: list[int], dst: list[int], counts: list[int]) -> None:
        """dst continues from the state after the first `count` window tokens of src."""
        for layer in range(self._cache.num_layers):
            for s, d, count in zip(src, dst, counts, strict=True):
                self._shadows[layer, d] = _Shadow(self._shadow(layer, s).state(count))
        self.compare(dst)

    def flush(self, slots: list[int]) -> None:
        """The window is gone: nothing can be cropped any more."""
        for layer in range(self._cache.num_layers):
            for slot in slots:
                self._shadow(layer, slot).trim(0)
        self.compare(slots)

    def compare(self, slots: list[int]) -> None:
        """Compare every layer of the slots.

        Raises:
            AuditError: shadow and replayed state differ by more than rounding explains.
        """
        for layer in range(self._cache.num_layers):
            for slot in slots:
                shadow = self._shadow(layer, slot).state()
                replayed = self._cache.state(layer, slot)[0]
                error = float((replayed - shadow).norm() / (shadow.norm() + self._floor))
                both_nan = bool(shadow.isnan().any()) and bool(
                    replayed.isnan().any()
                )  # a NaN input is not ours to judge
                if not error <= self._tolerance and not both_nan:
                    raise AuditError(
                        f"audit: slot {slot}, layer {layer}: the replayed state is {error:.3g} (relative) from the "
                        f"shadow recurrence, more than {self._tolerance:g}: rings, cursors or commits went wrong before"
                    )
