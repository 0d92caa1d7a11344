"""The truth: the Gated DeltaNet recurrence and its replay, in plain torch, for any float dtype.

Nothing here is fast and nothing is clever. Rows and tokens are Python loops over the equations of the docstrings, so
that a reader can check them by eye; float64 runs of these functions are what every kernel of this library is tested
against.
No other module's arithmetic is used.

Per value head, with S of shape [V, K]::

    g_t    = -exp(A_log) * softplus(a_t + dt_bias)         log-decay, <= 0
    beta_t = sigmoid(b_t)
    k^_t   = k_t / sqrt(sum(k_t^2) + 1e-6)                 q~_t = scale * q_t / sqrt(sum(q_t^2) + 1e-6)
    u_t    = beta_t * (v_t - e^{g_t} S_{t-1} k^_t)
    S_t    = e^{g_t} S_{t-1} + u_t k^_t^T
    y_t    = S_t q~_t

Source: contract sections 2 and 3; Yang et al., "Gated Delta Networks" (arXiv 2412.06464).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .errors import ArgumentError
from .shapes import QK_NORM_EPS, GDNShape


class Window(NamedTuple):
    """The live rows of one slot's ring, oldest first.

    | field | shape | meaning |
    |---|---|---|
    | k | [P, H, K] | normalised keys |
    | u | [P, HV, V] | corrections |
    | g | [P, HV] | log-decay of each token |
    """

    k: Tensor
    u: Tensor
    g: Tensor

    @property
    def length(self) -> int:
        """P."""
        return self.k.shape[0]


def window_of(u_ring: Tensor, k_ring: Tensor, g_ring: Tensor, ring_start: int, num_committed: int) -> Window:
    """The P live rows of one slot's rings [heads, R, dim] ([HV, R] for g); row j is at (ring_start + j) mod R."""
    ring_slots = k_ring.shape[1]
    rows = [(ring_start + j) % ring_slots for j in range(num_committed)]
    return Window(k_ring[:, rows].transpose(0, 1), u_ring[:, rows].transpose(0, 1), g_ring[:, rows].transpose(0, 1))


def split_qkv(mixed_qkv: Tensor, shape: GDNShape) -> tuple[Tensor, Tensor, Tensor]:
    """[N, 2 H K + HV V] -> q [N, H, K], k [N, H, K], v [N, HV, V]."""
    H, HV, K, V = shape.sizes
    q, k, v = mixed_qkv.split([H * K, H * K, HV * V], dim=-1)
    return q.unflatten(-1, (H, K)), k.unflatten(-1, (H, K)), v.unflatten(-1, (HV, V))


def log_softplus(x: Tensor) -> Tensor:
    """log(log(1 + e^x)), without loss at either end: it tends to x for x -> -inf and to log x for x -> inf."""
    cutoff = (
        -15.0 if x.dtype != torch.float64 else -37.0
    )  # below it, log1p(e^x) is e^x to the last bit of the logarithm
    return torch.where(x < cutoff, x, torch.log(torch.nn.functional.softplus(x.clamp(min=cutoff), threshold=40.0)))


def gates(a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """(g, beta) from the raw gate input a and the raw beta logit b, both [..., HV].

    g = -exp(A_log + log softplus(a + dt_bias)): the sum of logarithms has no inf * 0, so g = 0 exactly at a = -inf.
    """
    g = -torch.exp(A_log + log_softplus(a + dt_bias))
    return g, torch.sigmoid(b)


def normalize(x: Tensor, scale: float = 1.0) -> Tensor:
    """scale * x / sqrt(sum(x^2) + 1e-6) over the last dim."""
    return scale * x / torch.sqrt((x * x).sum(-1, keepdim=True) + QK_NORM_EPS)


def _prepare(
    mixed_qkv: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, shape: GDNShape, scale: float | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    q, k, v = split_qkv(mixed_qkv, shape)
    g, beta = gates(a, b, A_log, dt_bias)
    q = normalize(q, shape.head_k_dim**-0.5 if scale is None else scale)
    return q, normalize(k), v, g, beta


def recurrent(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    shape: GDNShape,
    query_start_loc: Tensor,
    *,
    initial_state: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Run the recurrence token by token over a ragged batch.

    | tensor | shape | meaning |
    |---|---|---|
    | mixed_qkv | [N, 2HK + HV V] | packed q, k, v heads of each token |
    | a, b | [N, HV] | raw gate input, raw beta logit |
    | A_log, dt_bias | [HV] | layer parameters |
    | query_start_loc | [B + 1] | row i holds tokens query_start_loc[i] .. query_start_loc[i + 1] - 1 |
    | initial_state | [B, HV, V, K] | zeros when None |
    | returns | [N, HV, V], [B, HV, V, K] | outputs y and final states, in mixed_qkv's dtype |

    All float tensors share one dtype, and all arithmetic is done in it.
    """
    H, HV, K, V = shape.sizes
    q, k, v, g, beta = _prepare(mixed_qkv, a, b, A_log, dt_bias, shape, scale)
    bounds = query_start_loc.tolist()
    rows = len(bounds) - 1
    out = mixed_qkv.new_zeros(mixed_qkv.shape[0], HV, V)
    states = mixed_qkv.new_zeros(rows, HV, V, K) if initial_state is None else initial_state.clone()
    for i in range(rows):
        for t in range(bounds[i], bounds[i + 1]):
            for hv in range(HV):
                h = hv // shape.heads_per_key
                S = torch.exp(g[t, hv]) * states[i, hv]
                u = beta[t, hv] * (v[t, hv] - S @ k[t, h])
                S = S + torch.outer(u, k[t, h])
                out[t, hv] = S @ q[t, h]
                states[i, hv] = S
    return out, states


def suffix_decay(g: Tensor) -> tuple[Tensor, Tensor]:
    """(w, total) for per-token log-decays g [P, ...]: w_j = e^{sum_{i>j} g_i}, total = e^{sum g}.

    Sums of suffixes, never differences of cumulative sums: those lose all precision once one token decays hard, and are
    NaN once one decays to nothing.
    """
    w = torch.ones_like(g)
    running = g.new_zeros(g.shape[1:])
    for j in range(g.shape[0] - 1, -1, -1):
        w[j] = torch.exp(running)
        running = running + g[j]
    return w, torch.exp(running)


def fold(checkpoint: Tensor, window: Window, count: int | None = None) -> Tensor:
    """The state after the first `count` rows of the window (all of them when None).

    S_C = e^{G_C} S_0 + sum_{j < C} e^{G_C - G_j} u_j k^_j^T, exact for every 0 <= C <= P.

    Args:
        checkpoint: S_0, [HV, V, K].
        window: the live rows.
        count: C.

    Raises:
        ArgumentError: count outside 0..P.
    """
    count = window.length if count is None else count
    if not 0 <= count <= window.length:
        raise ArgumentError(f"fold: count: expected 0..{window.length}, got {count}")
    w, total = suffix_decay(window.g[:count])
    group = checkpoint.shape[0] // window.k.shape[1]
    state = total[:, None, None] * checkpoint
    for j in range(count):
        k = window.k[j].repeat_interleave(group, dim=0)
        state = state + w[j][:, None, None] * window.u[j][:, :, None] * k[:, None, :]
    return state


def prefix_state(checkpoint: Tensor, window: Window, count: int) -> Tensor:
    """The exact state at a boundary inside the window: `fold` of its first `count` rows."""
    return fold(checkpoint, window, count)


def replay(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    shape: GDNShape,
    checkpoint: Tensor,
    window: Window,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Window]:
    """One row's step from a frozen checkpoint and its window; neither is changed.

    With c_t the cumulative log-decay of the new tokens::

        S_P x = e^{G_P} (S_0 x) + sum_j e^{G_P - G_j} u_j (k^_j . x)              for x in {k^_t, q~_t}
        u_t   = beta_t (v_t - e^{c_t} S_P k^_t - sum_{s<t} e^{c_t - c_s} (k^_s . k^_t) u_s)
        y_t   = e^{c_t} S_P q~_t + sum_{s<=t} e^{c_t - c_s} (k^_s . q~_t) u_s

    Args:
        mixed_qkv: [T, 2HK + HV V], the row's new tokens; a, b: [T, HV]; A_log, dt_bias: [HV].
        shape: sizes.
        checkpoint: S_0, [HV, V, K].
        window: P live rows.
        scale: K^-1/2 when None.

    Returns:
        Outputs [T, HV, V], and the T new ring rows in order (what a step appends).
    """
    q, k, v, g, beta = _prepare(mixed_qkv, a, b, A_log, dt_bias, shape, scale)
    tokens, HV = mixed_qkv.shape[0], shape.num_v_heads
    out, new_u = torch.zeros_like(v), torch.zeros_like(v)
    w, total = suffix_decay(window.g)
    for hv in range(HV):
        h = hv // shape.heads_per_key

        def window_product(x: Tensor, hv: int = hv, h: int = h) -> Tensor:
            result = total[hv] * (checkpoint[hv] @ x)
            for j in range(window.length):
                result = result + w[j, hv] * (window.k[j, h] @ x) * window.u[j, hv]
            return result

        for t in range(tokens):
            between, whole = suffix_decay(g[: t + 1, hv])  # e^{c_t - c_s} for s <= t, and e^{c_t}
            predicted = whole * window_product(k[t, h])
            for s in range(t):
                predicted = predicted + between[s] * (k[s, h] @ k[t, h]) * new_u[s, hv]
            new_u[t, hv] = beta[t, hv] * (v[t, hv] - predicted)
            y = whole * window_product(q[t, h])
            for s in range(t + 1):
                y = y + between[s] * (k[s, h] @ q[t, h]) * new_u[s, hv]
            out[t, hv] = y
    return out, Window(k, new_u, g)


def append(window: Window, rows: Window, count: int | None = None) -> Window:
    """The window after committing the first `count` of the appended rows (all of them when None)."""
    return Window(*(torch.cat([old, new[:count]]) for old, new in zip(window, rows, strict=True)))
