"""Made-up layers, slots and tokens, and what float64 and plain torch make of them.

A slot starts with a checkpoint and a window whose rows lie where the scenario wants them, in the storage dtypes. From
those same bits start three recurrences: the backend's, the truth in float64, and the eager one in float32 that rounds
wherever storage rounds. Everything of a slot that is not live holds NaN, so that reading it shows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..reference import Window, append, fold, gates, normalize, recurrent, split_qkv
from ..shapes import GDNShape, flush_min

WINDOW = 16
RING_SLOTS = 32
NULL_SLOT = 0


class Dtypes(NamedTuple):
    """Dtypes of inputs and outputs, checkpoints, and k and u rings."""

    io: torch.dtype
    state: torch.dtype
    ring: torch.dtype


class Layer(NamedTuple):
    """A_log and dt_bias [HV] of one layer, float32."""

    shape: GDNShape
    A_log: Tensor
    dt_bias: Tensor


class Tokens(NamedTuple):
    """mixed_qkv [N, 2 H K + HV V], a and b [N, HV] of some tokens."""

    mixed_qkv: Tensor
    a: Tensor
    b: Tensor

    def to(self, where: torch.dtype | torch.device) -> Tokens:
        """In another dtype, or on a device."""
        return Tokens(*(x.to(where) for x in self))

    def rows(self, begin: int, end: int) -> Tokens:
        """Tokens begin .. end - 1."""
        return Tokens(*(x[begin:end] for x in self))


def make_layer(shape: GDNShape, generator: torch.Generator) -> Layer:
    """Heads that forget at different speeds: half of what they hold in about 50 tokens, down to one."""
    HV = shape.num_v_heads
    return Layer(shape, torch.linspace(-4.0, 0.0, HV), torch.randn(HV, generator=generator) * 0.5)


def make_tokens(
    shape: GDNShape, n: int, io: torch.dtype, generator: torch.Generator, *, extreme: bool = False
) -> Tokens:
    """n tokens with correlated keys. extreme: the second decays all to nothing, the third must change no state."""
    mixed_qkv = torch.randn(n, shape.qkv_dim, generator=generator)
    H, K, HV = shape.num_k_heads, shape.head_k_dim, shape.num_v_heads
    mixed_qkv[:, H * K : 2 * H * K] += torch.randn(H * K, generator=generator)
    a, b = torch.randn(n, HV, generator=generator), torch.randn(n, HV, generator=generator)
    if extreme and n > 2:
        a[1] = 90.0
        mixed_qkv[2], a[2], b[2] = 0.0, float("-inf"), 0.0
    return Tokens(mixed_qkv, a, b).to(io)


@dataclass
class Slot:
    """One live slot: its cursors, the float64 truth, and the eager recurrence with its rounded storage.

    Args:
        start: ring_start.
        checkpoint: S_0 as stored.
        window: live rows as stored.
        truth: the exact state, float64.
    """

    start: int
    checkpoint: Tensor
    window: Window
    truth: Tensor

    def eager_state(self, count: int | None = None) -> Tensor:
        """The state after `count` rows (all when None), folded in float32."""
        return fold(self.checkpoint.float(), Window(*(x.float() for x in self.window)), count)

    def step(self, tokens: Tokens, layer: Layer, dtypes: Dtypes, width: int, accepted: int) -> tuple[Tensor, Tensor]:
        """Outputs [T, HV, V] of the truth and of the eager recurrence; then commit the accepted tokens of the step."""
        before = self.eager_state()
        y, _, rows = eager_recurrence(tokens, layer, before)
        if self.window.length >= flush_min(WINDOW, width):
            self.checkpoint = before.to(dtypes.state)
            self.start = (self.start + self.window.length) % RING_SLOTS
            self.window = Window(*(x[:0] for x in self.window))
        stored = Window(rows.k.to(dtypes.ring), rows.u.to(dtypes.ring), rows.g)
        self.window = append(self.window, stored, accepted)
        kept, self.truth = self._exact(tokens.rows(0, accepted), layer)
        rejected, _ = self._exact(tokens.rows(accepted, len(tokens.a)), layer)
        return torch.cat([kept, rejected]), y.to(dtypes.io)

    def _exact(self, tokens: Tokens, layer: Layer) -> tuple[Tensor, Tensor]:
        wide, bounds = tokens.to(torch.float64), torch.tensor([0, len(tokens.a)])
        A_log, dt_bias = layer.A_log.double(), layer.dt_bias.double()
        y, states = recurrent(*wide, A_log, dt_bias, layer.shape, bounds, initial_state=self.truth[None])
        return y, states[0]


def eager_recurrence(tokens: Tokens, layer: Layer, S: Tensor) -> tuple[Tensor, Tensor, Window]:
    """Plain torch in float32: outputs [T, HV, V], the final state, and the rows (k, u, g) of the tokens."""
    shape = layer.shape
    q, k, v = split_qkv(tokens.mixed_qkv.float(), shape)
    g, beta = gates(tokens.a.float(), tokens.b.float(), layer.A_log, layer.dt_bias)
    q, k = normalize(q, shape.head_k_dim**-0.5), normalize(k)
    wide_q, wide_k = (x.repeat_interleave(shape.heads_per_key, dim=1) for x in (q, k))
    y, u = torch.zeros_like(v), torch.zeros_like(v)
    for t in range(v.shape[0]):
        S = torch.exp(g[t])[:, None, None] * S
        u[t] = beta[t][:, None] * (v[t] - (S * wide_k[t][:, None, :]).sum(-1))
        S = S + u[t][:, :, None] * wide_k[t][:, None, :]
        y[t] = (S * wide_q[t][:, None, :]).sum(-1)
    return y, S, Window(k, u, g)


@dataclass
class Pool:
    """The buffers of one layer as an engine owns them, and the live slots' twins.

    | field | shape | meaning |
    |---|---|---|
    | state, u_ring, k_ring, g_ring | as `ReplayCache` has them | slots that are not in `slots` are NaN |
    | ring_start, num_committed, status | [pool] | int32 words |
    | step_records | [pool, 1] | int32 words |
    """

    state: Tensor
    u_ring: Tensor
    k_ring: Tensor
    g_ring: Tensor
    ring_start: Tensor
    num_committed: Tensor
    status: Tensor
    step_records: Tensor
    slots: dict[int, Slot]

    @property
    def rings(self) -> tuple[Tensor, Tensor, Tensor]:
        """(u, k, g)."""
        return self.u_ring, self.k_ring, self.g_ring

    def bits(self) -> list[Tensor]:
        """A copy of the float buffers' bits on the host, to see which bytes a call changed."""
        integer = {2: torch.int16, 4: torch.int32}
        return [x.view(integer[x.element_size()]).cpu().clone() for x in (self.state, *self.rings)]


def make_pool(
    layer: Layer,
    dtypes: Dtypes,
    places: dict[int, tuple[int, int]],
    num_slots: int,
    device: torch.device,
    generator: torch.Generator,
    *,
    extreme: int,
) -> Pool:
    """A pool whose slot s begins with the cursors places[s] = (ring_start, num_committed).

    A slot with an empty window starts from scratch: its checkpoint is zero. The fourth window row of slot `extreme`
    decays to nothing, which a kernel that takes differences of cumulative sums cannot follow.
    """
    H, HV, K, V = layer.shape.sizes
    state = torch.full((num_slots, HV, V, K), float("nan"), dtype=dtypes.state)
    u_ring = torch.full((num_slots, HV, RING_SLOTS, V), float("nan"), dtype=dtypes.ring)
    k_ring = torch.full((num_slots, H, RING_SLOTS, K), float("nan"), dtype=dtypes.ring)
    g_ring = torch.full((num_slots, HV, RING_SLOTS), float("nan"))
    words = torch.zeros(3, num_slots, dtype=torch.int32)
    slots: dict[int, Slot] = {}
    for slot, (start, count) in places.items():
        # Rows as earlier tokens would have left them: keys and corrections of a recurrence.
        S = torch.randn(HV, V, K, generator=generator) * 0.3 if count else torch.zeros(HV, V, K)
        checkpoint = S.to(dtypes.state)
        history = make_tokens(layer.shape, count, torch.float32, generator)
        _, _, rows = eager_recurrence(history, layer, S)
        if slot == extreme:
            rows.g[3] = -1e4
        window = Window(rows.k.to(dtypes.ring), rows.u.to(dtypes.ring), rows.g)
        at = [(start + j) % RING_SLOTS for j in range(count)]
        state[slot] = checkpoint
        k_ring[slot, :, at], u_ring[slot, :, at] = window.k.transpose(0, 1), window.u.transpose(0, 1)
        g_ring[slot, :, at] = window.g.transpose(0, 1)
        words[0, slot], words[1, slot] = start, count
        truth = fold(checkpoint.double(), Window(*(x.double() for x in window)))
        slots[slot] = Slot(start, checkpoint, window, truth)
    ring_start, num_committed, status = words.to(device).unbind(0)
    step_records = torch.zeros(num_slots, 1, dtype=torch.int32, device=device)
    return Pool(
        state.to(device), u_ring.to(device), k_ring.to(device), g_ring.to(device), ring_start, num_committed, status,
        step_records, slots,
    )  # fmt: skip


def relative_error(got: Tensor, truth: Tensor) -> float:
    """Largest norm of a row's error over the last dim, relative to the largest row of its head; heads are dim 0.

    NaN and infinities that the truth does not have give infinity.
    """
    if truth.numel() == 0:
        return 0.0
    difference = (got.detach().cpu().double() - truth).norm(dim=-1)
    scale = truth.norm(dim=-1).amax(dim=-1, keepdim=True).clamp(min=1e-30)
    error = float((difference / scale).max())
    return float("inf") if math.isnan(error) else error
