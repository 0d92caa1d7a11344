"""How long a simulated step takes: from the plan's roofline, or from points that were measured."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Protocol

from ..checks import parse_json
from ..errors import ArgumentError
from ..plan import WEIGHT_BYTES, StepCost


class StepTimes(Protocol):
    """Seconds of a step."""

    def seconds(self, rows: int, kv_tokens: float, prefill_tokens: int) -> float:
        """Time of a step.

        Args:
            rows: requests that decode.
            kv_tokens: tokens in their caches, over all of them.
            prefill_tokens: prompt tokens that run in the same step.
        """


class RooflineTimes:
    """The plan's roofline, its constants folded: the same numbers as `StepCost.step(...).total_s`.

    Args:
        cost: of the design to simulate.
    """

    def __init__(self, cost: StepCost) -> None:
        s, model = cost.setting, cost.setting.shard
        p, bandwidth, flops = model.parameters, s.bytes_per_s, s.device.flops
        weight = WEIGHT_BYTES[s.weight_dtype]
        self._tokens = s.tokens
        self._overhead = s.overhead_us / 1e6
        self._row = max(cost.gdn_bytes / bandwidth, cost.gdn_operations / flops)
        one = cost.step(1, kv_tokens=1.0)
        self._kv = one.kv_s  # proportional to the tokens
        self._dense = p.dense * weight / bandwidth
        experts, visited = model.experts, p.dense
        self._experts, self._stays = 0.0, 0.0
        if experts:
            self._experts = p.routed * p.expert * weight / bandwidth
            self._stays = 1 - experts.num_experts_per_tok / experts.num_experts
            visited += model.num_layers * experts.num_experts_per_tok * p.expert
        self._compute = 2.0 * visited / flops

    def seconds(self, rows: int, kv_tokens: float, prefill_tokens: int) -> float:
        """Time of a step, see `StepTimes`."""
        tokens = rows * self._tokens + prefill_tokens
        read = self._dense
        if self._experts:
            read += self._experts * (1 - self._stays**tokens)
        return max(read, self._compute * tokens) + self._kv * kv_tokens + self._row * rows + self._overhead


@dataclass(frozen=True)
class MeasuredTimes:
    """Straight lines between measured points, and on beyond the last; below the first, its time.

    A step with both parts takes their sum.

    Args:
        decode: (rows, seconds of a step) in rising order of rows.
        prefill: (prompt tokens, seconds), likewise.
        per_kv_token: seconds that each token in the caches adds; 0 where the points have the right contexts already.
    """

    decode: tuple[tuple[float, float], ...]
    prefill: tuple[tuple[float, float], ...]
    per_kv_token: float = 0.0

    def seconds(self, rows: int, kv_tokens: float, prefill_tokens: int) -> float:
        """Time of a step, see `StepTimes`."""
        time = _line(self.decode, rows) + self.per_kv_token * kv_tokens if rows else 0.0
        return time + (_line(self.prefill, prefill_tokens) if prefill_tokens else 0.0)


def read_measured(path: Path) -> MeasuredTimes:
    """Measured points from a JSON file: {"decode": [[rows, seconds], ...], "prefill": [[tokens, seconds], ...]}.

    "per_kv_token" may be given too.

    Raises:
        ArgumentError: a file that cannot be read or does not hold that.
    """
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ArgumentError(f"step times: {path}: {error.strerror or error}") from None
    except ValueError:
        raise ArgumentError(f"step times: {path}: not JSON") from None
    if not isinstance(content, dict):
        raise ArgumentError(f"step times: {path}: expected an object with decode and prefill")
    per_token = content.get("per_kv_token", 0.0)
    if not _number(per_token) or per_token < 0:
        raise ArgumentError(f"step times: {path}: per_kv_token: expected seconds from 0 on, got {per_token!r}")
    decode, prefill = (_points(content.get(key), key, path) for key in ("decode", "prefill"))
    return MeasuredTimes(decode, prefill, float(per_token))


def _points(found: object, key: str, path: Path) -> tuple[tuple[float, float], ...]:
    pairs = found if isinstance(found, list) else []
    if not pairs or not all(isinstance(p, list) and len(p) == 2 and all(map(_number, p)) for p in pairs):
        raise ArgumentError(f"step times: {path}: {key}: expected a list of [amount, seconds]")
    points = tuple((float(a), float(b)) for a, b in pairs)
    rising = all(a[0] < b[0] for a, b in pairwise(points))
    if points[0][0] <= 0 or not rising or any(seconds <= 0 for _, seconds in points):
        raise ArgumentError(f"step times: {path}: {key}: expected rising positive amounts with positive seconds")
    return points


def _number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _line(points: Sequence[tuple[float, float]], x: float) -> float:
    if len(points) == 1 or x <= points[0][0]:
        return points[0][1]
    i = min(max(bisect_right(points, (x, math.inf)), 1), len(points) - 1)
    (x0, y0), (x1, y1) = points[i - 1], points[i]
    return max(0.0, y0 + (y1 - y0) * (x - x0) / (x1 - x0))
