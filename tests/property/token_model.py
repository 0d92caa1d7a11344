"""A model of the cache that is too simple to be wrong: for every slot, the list of its accepted tokens.

A state is never a checkpoint plus a ring here. It is what the plain float64 recurrence makes of the list, starting from
the state that the slot was given (zeros, or a loaded one). The cursors are two integers that follow contract section 4.
`prefix[layer][i]` keeps the state after i tokens of the window, so that a step costs one token of the reference each;
`recompute` does it all again from the list.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from replaystate import GDNShape
from replaystate.reference import recurrent


@dataclass
class Layer:
    """Parameters of one layer."""

    A_log: Tensor
    dt_bias: Tensor


@dataclass
class Tokens:
    """Inputs of one layer for n tokens, in the dtypes that the step gets; or of one token for all layers."""

    mixed_qkv: Tensor  # [n, 2HK + HV V]
    a: Tensor  # [n, HV]
    b: Tensor  # [n, HV]

    def __getitem__(self, at: slice | int | Tensor) -> Tokens:
        return Tokens(self.mixed_qkv[at], self.a[at], self.b[at])

    def __len__(self) -> int:
        return self.a.shape[0]


def cat(parts: Sequence[Tokens]) -> Tokens:
    return Tokens(*(torch.cat([getattr(part, name) for part in parts]) for name in ("mixed_qkv", "a", "b")))


def stack(parts: Sequence[Tokens]) -> Tokens:
    return Tokens(*(torch.stack([getattr(part, name) for part in parts]) for name in ("mixed_qkv", "a", "b")))


def make_layers(shape: GDNShape, count: int, rng: torch.Generator, dtype: torch.dtype = torch.float32) -> list[Layer]:
    """Heads from slow (e^{-0.005} a token) to fast (e^{-1} a token)."""
    HV = shape.num_v_heads
    return [
        Layer((torch.rand(HV, generator=rng) * 5 - 5).to(dtype), torch.randn(HV, generator=rng).to(dtype))
        for _ in range(count)
    ]


def make_tokens(
    shape: GDNShape,
    n: int,
    rng: torch.Generator,
    dtype: torch.dtype = torch.float32,
    gate_dtype: torch.dtype = torch.float32,
) -> Tokens:
    """Random tokens whose keys share a direction; now and then a gate that forgets all, or nothing."""
    H, HV, K, V = shape.sizes
    qkv = torch.randn(n, shape.qkv_dim, generator=rng)
    qkv[:, H * K : 2 * H * K] += 0.5
    a, b = torch.randn(n, HV, generator=rng), torch.randn(n, HV, generator=rng)
    which = torch.rand(n, HV, generator=rng)
    a = torch.where(which < 0.02, 90.0, torch.where(which > 0.98, float("-inf"), a))
    return Tokens(qkv.to(dtype), a.to(gate_dtype), b.to(gate_dtype))


@dataclass
class Slot:
    """One slot: per layer the state before the list, the accepted tokens, and the states along the window."""

    base: list[Tensor]  # [layer] float64
    tokens: list[Tokens] = field(default_factory=list)  # one entry a token, all layers
    prefix: list[list[Tensor]] = field(default_factory=list)  # [layer][0..P]
    start: int = 0  # ring_start

    @property
    def window(self) -> int:
        """P."""
        return len(self.prefix[0]) - 1

    def copy(self) -> Slot:
        return Slot(list(self.base), list(self.tokens), [list(states) for states in self.prefix], self.start)


class TokenModel:
    """What a cache of these sizes must hold and answer."""

    def __init__(
        self, shape: GDNShape, layers: list[Layer], window: int, ring_slots: int, scale: float | None = None
    ) -> None:
        self.shape, self.layers, self.W, self.R, self.scale = shape, layers, window, ring_slots, scale
        self.slots: dict[int, Slot] = {}

    def new(self, slot: int) -> None:
        _, HV, K, V = self.shape.sizes
        base = [torch.zeros(HV, V, K, dtype=torch.float64) for _ in self.layers]
        self.slots[slot] = Slot(base, [], [[state] for state in base])

    def load_state(self, slot: int, layer: int, state: Tensor) -> None:
        """Only over an empty window; the list of the slot starts anew."""
        s = self.slots[slot]
        assert s.window == 0
        s.base = [states[-1] for states in s.prefix]
        s.base[layer] = state.double()
        s.tokens, s.prefix = [], [[base] for base in s.base]

    def flush(self, slot: int) -> None:
        s = self.slots[slot]
        s.start = (s.start + s.window) % self.R
        s.prefix = [states[-1:] for states in s.prefix]

    def crop(self, slot: int, n: int) -> None:
        s = self.slots[slot]
        keep = s.window - n
        s.tokens = s.tokens[: len(s.tokens) - n]
        s.prefix = [states[: keep + 1] for states in s.prefix]

    def fork(self, src: Sequence[int], dst: Sequence[int]) -> None:
        copies = [self.slots[slot].copy() for slot in src]
        self.slots.update(zip(dst, copies, strict=True))

    def materialize(self, src: int, dst: int, count: int) -> None:
        s = self.slots[src]
        tokens = s.tokens[: len(s.tokens) - (s.window - count)]
        self.slots[dst] = Slot(list(s.base), tokens, [[states[count]] for states in s.prefix])

    def step_rows(self, slots: Sequence[int], layer: int, rows: Sequence[Tokens]) -> list[tuple[Tensor, list[Tensor]]]:
        """For each row its outputs [n, HV, V], and the states after each of its tokens."""
        _, HV, K, V = self.shape.sizes
        states = [[self.slots[slot].prefix[layer][-1]] for slot in slots]
        outputs: list[list[Tensor]] = [[] for _ in slots]
        for t in range(max((len(row) for row in rows), default=0)):
            running = [i for i, row in enumerate(rows) if len(row) > t]
            tokens = cat([rows[i][t : t + 1] for i in running])
            before = torch.stack([states[i][-1] for i in running])
            y, after = self._recurrent(layer, tokens, torch.arange(len(running) + 1), before)
            for j, i in enumerate(running):
                outputs[i].append(y[j])
                states[i].append(after[j])
        nothing = torch.zeros(0, HV, V, dtype=torch.float64)
        return [(torch.stack(y) if y else nothing, s[1:]) for y, s in zip(outputs, states, strict=True)]

    def commit(self, slot: int, width: int, accepted: list[Tokens], states: list[list[Tensor]]) -> None:
        """accepted: the kept tokens, all layers each; states[layer]: the states after each token of the step."""
        s = self.slots[slot]
        if s.window >= self.W + 1 - width:
            self.flush(slot)
        s.tokens = s.tokens + accepted
        for layer, after in enumerate(states):
            s.prefix[layer] = s.prefix[layer] + after[: len(accepted)]

    def state(self, slot: int, layer: int) -> Tensor:
        return self.slots[slot].prefix[layer][-1]

    def recompute(self, slot: int, layer: int) -> Tensor:
        """The state from nothing but the list."""
        s = self.slots[slot]
        if not s.tokens:
            return s.base[layer]
        tokens = stack([token[layer] for token in s.tokens])
        return self._recurrent(layer, tokens, torch.tensor([0, len(tokens)]), s.base[layer][None])[1][0]

    def _recurrent(self, layer: int, tokens: Tokens, bounds: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        weights = self.layers[layer]
        inputs = (tokens.mixed_qkv, tokens.a, tokens.b, weights.A_log, weights.dt_bias)
        return recurrent(*(x.double() for x in inputs), self.shape, bounds, initial_state=states, scale=self.scale)
