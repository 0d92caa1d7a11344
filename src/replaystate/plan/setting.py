"""What a plan is made for: a model on a device, with its dtypes, context, drafts and acceptance."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from ..errors import ArgumentError
from ..models import ModelShape
from ..shapes import check_window, require_int, ring_slots_for
from .devices import Device

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
"""Dtypes of states and rings, by name."""

WEIGHT_BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "float8": 1.0, "float4": 0.5}
"""Bytes of a weight, by the name of its dtype; scales of quantised weights are not counted."""

CACHE_BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "float8": 1.0}
"""Bytes of an element of the attention KV cache, by the name of its dtype."""


MOST_WINDOW = 1024
LEAST_SHARE = 1e-6


@dataclass(frozen=True)
class Setting:
    """A model on devices of one kind, and how it is served.

    Args:
        model: the whole model; `shard` is what one device holds.
        device: one of the devices that the model is split over.
        tp: how many of them.
        context_tokens: tokens that a request holds, prompt and answer.
        drafts: D, drafted tokens a step; a step runs T = D + 1 tokens a row.
        acceptance: for each draft position the probability that it is accepted when all before it were; the last one
            given stands for all later positions.
        state_dtype, ring_dtype: of replay's checkpoints, and of its k and u rings (g is float32).
        native_state_dtype: of the states of an engine without replay.
        kv_dtype, weight_dtype: of the attention KV cache, and of all weights.
        window: W.
        memory_share: part of the device's memory for weights and requests; the rest is for activations and the like.
        bandwidth_share: part of the peak bandwidth that kernels reach. 1 makes every time a lower bound.
        overhead_us: time of a step that no byte explains: launches, all-reduces, sampling, the draft model.

    Raises:
        ArgumentError: a number out of range, or a name that is not known.
        DTypeError: a number that is no int where one is needed.
    """

    model: ModelShape
    device: Device
    tp: int = 1
    context_tokens: int = 8192
    drafts: int = 3
    acceptance: tuple[float, ...] = (0.7,)
    state_dtype: str = "float16"
    ring_dtype: str = "float16"
    native_state_dtype: str = "float16"
    kv_dtype: str = "bfloat16"
    weight_dtype: str = "bfloat16"
    window: int = 16
    memory_share: float = 0.9
    bandwidth_share: float = 1.0
    overhead_us: float = 0.0
    shard: ModelShape = field(init=False)

    def __post_init__(self) -> None:
        for name in ("context_tokens", "window"):
            require_int("plan", name, getattr(self, name), minimum=1)
        require_int("plan", "drafts", self.drafts, minimum=0)
        check_window("plan", self.window, self.tokens)
        if self.window > MOST_WINDOW:
            raise ArgumentError(f"plan: window: expected at most {MOST_WINDOW}, got {self.window}")
        if not self.acceptance:
            raise ArgumentError("plan: acceptance: expected at least one probability")
        for value in self.acceptance:
            _in_range("acceptance", value, 0, 1)
        for name in ("memory_share", "bandwidth_share"):
            _in_range(name, getattr(self, name), 0, 1)
            if getattr(self, name) < LEAST_SHARE:
                raise ArgumentError(f"plan: {name}: expected at least {LEAST_SHARE:g}, got {getattr(self, name):g}")
        _in_range("overhead_us", self.overhead_us, 0, math.inf)
        for name, known in (
            ("state_dtype", DTYPES),
            ("ring_dtype", DTYPES),
            ("native_state_dtype", DTYPES),
            ("kv_dtype", CACHE_BYTES),
            ("weight_dtype", WEIGHT_BYTES),
        ):
            if getattr(self, name) not in known:
                raise ArgumentError(f"plan: {name}: expected one of {', '.join(known)}, got {getattr(self, name)!r}")
        object.__setattr__(self, "shard", self.model.shard(self.tp))

    @property
    def tokens(self) -> int:
        """T, tokens that a row runs in a step."""
        return self.drafts + 1

    @property
    def ring_slots(self) -> int:
        """R, physical ring slots."""
        return ring_slots_for(self.window, self.tokens)

    @property
    def bytes_per_s(self) -> float:
        """Bandwidth that kernels reach."""
        return self.device.bytes_per_s * self.bandwidth_share

    def accepted_distribution(self) -> list[float]:
        """Probabilities that a step keeps 1, 2, ..., T tokens: its first token, and the drafts before a wrong one.

        >>> from replaystate.models import MODELS
        >>> from replaystate.plan import DEVICES
        >>> setting = Setting(MODELS["Qwen3.5-4B"], DEVICES["H200"], drafts=2, acceptance=(0.5,))
        >>> setting.accepted_distribution(), setting.tokens_per_step
        ([0.5, 0.25, 0.25], 1.75)
        """
        reached, kept = 1.0, []
        for position in range(self.drafts):
            accepts = self.acceptance[min(position, len(self.acceptance) - 1)]
            kept.append(reached * (1 - accepts))
            reached *= accepts
        return [*kept, reached]

    @property
    def tokens_per_step(self) -> float:
        """Expected tokens that a row keeps of a step."""
        return sum((i + 1) * p for i, p in enumerate(self.accepted_distribution()))


def _in_range(name: str, value: float, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high or math.isnan(value):
        raise ArgumentError(f"plan: {name}: expected a number from {low:g} to {high:g}, got {value!r}")
    if math.isinf(value):
        raise ArgumentError(f"plan: {name}: expected a finite number")
