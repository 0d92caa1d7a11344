"""Time of a decode step from the bytes it moves and the arithmetic it does: a roofline, part by part.

    time = overhead + Σ_part max(bytes_part / bandwidth, operations_part / arithmetic)

The parts are the weights, the attention KV cache, and the Gated DeltaNet states. They run one after the other. What a
Gated DeltaNet layer moves under replay is `replaystate.bench.step_bytes`, weighted with how long windows are when
steps find them. Not in the model: traffic between devices, activations, and the difference between peak arithmetic and
what small matrices reach. With `bandwidth_share=1` and `overhead_us=0` it is a bound that no engine goes below.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch

from ..bench import step_bytes
from ..shapes import flush_min
from .memory import RequestBytes, request_bytes
from .setting import DTYPES, WEIGHT_BYTES, Setting

IO_DTYPE = torch.bfloat16
"""Dtype of activations: inputs and outputs of a Gated DeltaNet layer, and its convolution's columns."""


@lru_cache(maxsize=1024)
def window_distribution(window: int, accepted: tuple[float, ...]) -> tuple[float, ...]:
    """How long windows are when steps find them: the stationary distribution of P over 0..W.

    A step of width T = len(accepted) keeps c tokens with probability accepted[c-1]. It leaves P + c rows, or c where
    P >= W + 1 - T, because it folds the P rows before.

    >>> window_distribution(2, (1.0,))  # one token a step: lengths 1 and 2 in turn, and every second step folds
    (0.0, 0.5, 0.5)
    """
    T = len(accepted)
    limit = flush_min(window, T)
    moves = torch.zeros(window + 1, window + 1, dtype=torch.float64)
    for P in range(window + 1):
        for c, probability in enumerate(accepted, 1):
            moves[P, c if limit <= P else P + c] += probability
    # The chain comes from 0 and never returns to it. Solve p (M - I) = 0 with Σ p = 1.
    system = moves.T - torch.eye(window + 1, dtype=torch.float64)
    system = torch.cat([system, torch.ones(1, window + 1, dtype=torch.float64)])
    wanted = torch.zeros(window + 2, 1, dtype=torch.float64)
    wanted[-1] = 1
    solution = torch.linalg.lstsq(system, wanted, driver="gelsd").solution.flatten()
    return tuple(max(0.0, round(x, 14)) for x in solution.tolist())


@dataclass(frozen=True)
class StepTime:
    """Seconds of one decode step of a batch on one device.

    Args:
        weights_s: reading the weights that the step's tokens visit, and their matrix products.
        kv_s: full attention over the KV cache.
        gdn_s: the Gated DeltaNet states, rings and convolutions.
        overhead_s: as given.
    """

    weights_s: float
    kv_s: float
    gdn_s: float
    overhead_s: float

    @property
    def total_s(self) -> float:
        """All of it."""
        return self.weights_s + self.kv_s + self.gdn_s + self.overhead_s


@dataclass(frozen=True)
class StepCost:
    """Times of decode and prefill steps, with replay or without.

    Args:
        setting: the model, the device, and how it is served.
        replay: with replay; False: an engine that keeps one state per draft.

    >>> from replaystate.models import MODELS
    >>> from replaystate.plan import DEVICES
    >>> setting = Setting(MODELS["Qwen3.5-27B"], DEVICES["H200"])
    >>> StepCost(setting, replay=True).step(64).gdn_s < StepCost(setting, replay=False).step(64).gdn_s / 2
    True
    """

    setting: Setting
    replay: bool

    @cached_property
    def request(self) -> RequestBytes:
        """Bytes that a request holds."""
        return request_bytes(self.setting)

    @property
    def _window_lengths(self) -> tuple[float, ...]:
        return window_distribution(self.setting.window, tuple(self.setting.accepted_distribution()))

    @cached_property
    def fold_share(self) -> float:
        """Steps that fold, of all steps of a row; 0 without replay."""
        if not self.replay:
            return 0.0
        s = self.setting
        lengths = self._window_lengths
        return sum(lengths[flush_min(s.window, s.tokens) :])

    @cached_property
    def gdn_bytes(self) -> float:
        """Expected bytes that a row moves in a step, over all Gated DeltaNet layers."""
        s, model = self.setting, self.setting.shard
        if self.replay:
            lengths = self._window_lengths
            expected = sum(
                probability * self._replay_bytes(P, P >= flush_min(s.window, s.tokens))
                for P, probability in enumerate(lengths)
            )
        else:
            expected = native_step_bytes(s)
        conv = model.gdn.qkv_dim * (2 * (model.conv_kernel - 1) + s.tokens) * IO_DTYPE.itemsize
        return model.num_gdn_layers * (expected + conv)

    def _replay_bytes(self, window_rows: int, folds: bool) -> int:
        s = self.setting
        return step_bytes(
            s.shard.gdn,
            rows=1,
            tokens=s.tokens,
            window_rows=window_rows,
            folds=folds,
            state_dtype=DTYPES[s.state_dtype],
            ring_dtype=DTYPES[s.ring_dtype],
            io_dtype=IO_DTYPE,
        ).total

    @cached_property
    def gdn_operations(self) -> float:
        """Multiplications and additions of a row in a step, over all Gated DeltaNet layers.

        Without replay a token takes three products with the state (prediction, update, output). With replay a token
        takes two with the checkpoint and two with each ring row, and a fold one update per row.
        """
        s = self.setting
        H, HV, K, V = s.shard.gdn.sizes
        state, row = HV * V * K, HV * (K + V)
        if not self.replay:
            return s.shard.num_gdn_layers * s.tokens * 6.0 * state
        lengths = self._window_lengths
        rows = sum(P * probability for P, probability in enumerate(lengths)) + s.tokens / 2
        folded = sum(P * p for P, p in enumerate(lengths) if flush_min(s.window, s.tokens) <= P)
        return s.shard.num_gdn_layers * (s.tokens * (4.0 * state + 4.0 * rows * row) + 2.0 * folded * state)

    def distinct_experts(self, tokens: float) -> float:
        """Experts of a layer that so many tokens visit, when each token picks its own evenly and independently.

        E (1 - (1 - k/E)^n): exact for that choice; real routers are less even, and then fewer are read.
        """
        experts = self.setting.shard.experts
        if experts is None:
            return 0.0
        kept = 1 - experts.num_experts_per_tok / experts.num_experts
        return experts.num_experts * (1 - float(kept**tokens))

    def step(self, rows: float, *, kv_tokens: float | None = None, prefill_tokens: float = 0) -> StepTime:
        """Time of a step.

        Args:
            rows: requests that decode, each with its T tokens; expected values may be fractions.
            kv_tokens: tokens in their KV caches, over all rows; None: `context_tokens` for each.
            prefill_tokens: prompt tokens that run in the same step. Their attention is over a short past and is not
                counted, and their states stay in fast memory.
        """
        s, model = self.setting, self.setting.shard
        parameters, bandwidth, flops = model.parameters, s.bytes_per_s, s.device.flops
        tokens = rows * s.tokens + prefill_tokens
        experts = self.distinct_experts(tokens) * model.num_layers
        weights = (parameters.dense + experts * parameters.expert) * WEIGHT_BYTES[s.weight_dtype]
        visited = parameters.dense
        if model.experts:
            visited += model.num_layers * model.experts.num_experts_per_tok * parameters.expert
        kv_tokens = rows * s.context_tokens if kv_tokens is None else kv_tokens
        attention = 4.0 * model.num_attention_layers * model.num_attention_heads * model.head_dim * kv_tokens * s.tokens
        return StepTime(
            weights_s=max(weights / bandwidth, 2.0 * visited * tokens / flops) if tokens else 0.0,
            kv_s=max(kv_tokens * self.request.kv_per_token / bandwidth, attention / flops),
            gdn_s=rows * max(self.gdn_bytes / bandwidth, self.gdn_operations / flops),
            overhead_s=s.overhead_us / 1e6,
        )

    def tokens_per_s(self, rows: float) -> float:
        """Tokens that a batch of so many rows keeps, a second."""
        return rows * self.setting.tokens_per_step / self.step(rows).total_s if rows else 0.0


def native_step_bytes(setting: Setting) -> int:
    """Bytes of a row's step of one layer without replay: the state once, one new state per token, inputs, outputs."""
    shape = setting.shard.gdn
    H, HV, K, V = shape.sizes
    state = HV * V * K * DTYPES[setting.native_state_dtype].itemsize
    io = setting.tokens * (shape.qkv_dim + HV * V + 2 * HV) * IO_DTYPE.itemsize
    return state * (1 + setting.tokens) + io
