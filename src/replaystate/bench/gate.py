"""The gate: a call is timed only when what it wrote agrees with a float64 recurrence from the same stored bits.

For a step with state S (checkpoint and window, folded in float64), in float64:

    u_t = beta_t (v_t - e^{g_t} S k^_t)        S <- e^{g_t} S + u_t k^_t^T        y_t = S q~_t

The outputs are compared with y, and the state that the buffers hold after the step, all its rows kept, with S. An error
may be twice that of the same recurrence in float32 with k^, u, a folded checkpoint and the outputs rounded to their
storage dtypes, plus `FLOOR`: the rule of `replaystate verify`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..reference import Window, fold, gates, normalize, recurrent, split_qkv
from ..shapes import GDNShape

FLOOR = 1e-6
"""Added to limits, for float32 sums taken in another order."""

GATE_TOKENS = 128
"""Tokens of a prompt that are compared: float64 goes through them one by one."""


class Tokens(NamedTuple):
    """mixed_qkv [N, 2 H K + HV V], a and b [N, HV]."""

    mixed_qkv: Tensor
    a: Tensor
    b: Tensor

    def rows(self, begin: int, end: int) -> Tokens:
        """Tokens begin .. end - 1."""
        return Tokens(*(x[begin:end] for x in self))

    def to(self, where: torch.dtype | str) -> Tokens:
        """In another dtype, or on a device."""
        return Tokens(*(x.to(where) for x in self))


class Error(NamedTuple):
    """One comparison. The error is the largest of a row's, relative to the largest row of its head."""

    quantity: str
    error: float
    limit: float

    @property
    def ok(self) -> bool:
        """Whether the error is within the limit."""
        return self.error <= self.limit


class Storage(NamedTuple):
    """Dtypes that values are rounded to: outputs, checkpoints, k and u rings."""

    io: torch.dtype
    state: torch.dtype
    ring: torch.dtype


@dataclass(frozen=True)
class Row:
    """What one row of a step begins with, on the host.

    | field | shape | meaning |
    |---|---|---|
    | checkpoint | [HV, V, K] | as stored |
    | window | P rows | as stored |
    | tokens | [T, ..] | mixed_qkv, a, b of the row |
    | A_log, dt_bias | [HV] | parameters of the layer |

    Args:
        folds: whether the step writes the folded state to the checkpoint.
    """

    shape: GDNShape
    checkpoint: Tensor
    window: Window
    tokens: Tokens
    A_log: Tensor
    dt_bias: Tensor
    folds: bool


def sample(lengths: list[int]) -> list[int]:
    """Indices of the rows that are compared: the first, the last, and one of each window length."""
    return sorted({0, len(lengths) - 1, *(lengths.index(P) for P in set(lengths))})


def step_errors(
    before: list[Row], outputs: list[Tensor], after: list[tuple[Tensor, Window]], storage: Storage
) -> list[Error]:
    """Compare a step's outputs [T, HV, V], and its checkpoints and windows with all rows kept.

    Args:
        before: what each row began with.
        outputs: what the call gave for it.
        after: the checkpoint and the window that the call left in the buffers.
        storage: decides the limits.
    """
    found = {"output": (0.0, 0.0), "state": (0.0, 0.0)}
    for row, out, (checkpoint, window) in zip(before, outputs, after, strict=True):
        y, S = _exact(row)
        eager_y, eager_S = _eager(row, storage)
        state = fold(checkpoint.double(), Window(*(x.double() for x in window)))
        for name, got, eager, truth in (
            ("output", out.transpose(0, 1), eager_y.transpose(0, 1), y.transpose(0, 1)),
            ("state", state, eager_S, S),
        ):
            worst, plain = found[name]
            found[name] = max(worst, relative_error(got, truth)), max(plain, relative_error(eager, truth))
    return [Error(name, worst, 2 * plain + FLOOR) for name, (worst, plain) in found.items()]


def prefix_errors(rows: list[tuple[Tensor, Window, Tensor]]) -> list[Error]:
    """Compare materialized states: (checkpoint, window, the state that the call wrote) of each row."""
    worst = plain = 0.0
    for checkpoint, window, got in rows:
        truth = fold(checkpoint.double(), Window(*(x.double() for x in window)))
        eager = fold(checkpoint.float(), Window(*(x.float() for x in window))).to(got.dtype)
        worst, plain = max(worst, relative_error(got, truth)), max(plain, relative_error(eager, truth))
    return [Error("state", worst, 2 * plain + FLOOR)]


def prefill_errors(
    tokens: Tokens, A_log: Tensor, dt_bias: Tensor, shape: GDNShape, out: Tensor, final: Tensor
) -> list[Error]:
    """Compare one prompt's outputs, the first GATE_TOKENS of them, and its final state where it has no more tokens."""
    count = min(GATE_TOKENS, len(tokens.a))
    first, bounds = tokens.rows(0, count).to("cpu"), torch.tensor([0, count])
    y, S = recurrent(*first.to(torch.float64), A_log.double(), dt_bias.double(), shape, bounds)
    eager_y, eager_S = recurrent(*first.to(torch.float32), A_log.float(), dt_bias.float(), shape, bounds)
    pairs = [("output", out[:count].cpu().transpose(0, 1), eager_y.to(out.dtype).transpose(0, 1), y.transpose(0, 1))]
    if count == len(tokens.a):
        pairs.append(("state", final[0].cpu(), eager_S[0], S[0]))
    return [
        Error(name, relative_error(got, truth), 2 * relative_error(eager, truth) + FLOOR)
        for name, got, eager, truth in pairs
    ]


def relative_error(got: Tensor, truth: Tensor) -> float:
    """Largest norm of a row's error over the last dim, relative to the largest row of its head (dim 0); NaN is inf."""
    difference = (got.double() - truth).norm(dim=-1)
    scale = truth.norm(dim=-1).amax(dim=-1, keepdim=True).clamp(min=1e-30)
    error = float((difference / scale).max())
    return float("inf") if math.isnan(error) else error


def _exact(row: Row) -> tuple[Tensor, Tensor]:
    S = fold(row.checkpoint.double(), Window(*(x.double() for x in row.window)))
    bounds = torch.tensor([0, len(row.tokens.a)])
    y, states = recurrent(
        *row.tokens.to(torch.float64), row.A_log.double(), row.dt_bias.double(), row.shape, bounds,
        initial_state=S[None],
    )  # fmt: skip
    return y, states[0]


def _eager(row: Row, storage: Storage) -> tuple[Tensor, Tensor]:
    """The recurrence in float32 with values rounded where they are stored."""
    S = fold(row.checkpoint.float(), Window(*(x.float() for x in row.window)))
    if row.folds:
        S = S.to(storage.state).float()
    q, k, v = split_qkv(row.tokens.mixed_qkv.float(), row.shape)
    g, beta = gates(row.tokens.a.float(), row.tokens.b.float(), row.A_log, row.dt_bias)
    q, k = normalize(q, row.shape.head_k_dim**-0.5), normalize(k).to(storage.ring).float()
    q, k = (x.repeat_interleave(row.shape.heads_per_key, dim=1) for x in (q, k))
    y = torch.empty_like(v)
    for t in range(len(v)):
        S = torch.exp(g[t])[:, None, None] * S
        u = beta[t][:, None] * (v[t] - (S * k[t][:, None, :]).sum(-1))
        S = S + u.to(storage.ring).float()[:, :, None] * k[t][:, None, :]
        y[t] = (S * q[t][:, None, :]).sum(-1)
    return y.to(storage.io), S
