"""Questions that a simulation answers: figures of one run, and how many replicas a load needs."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ..errors import ArgumentError
from ..plan import Setting, StepCost, request_bytes, request_memory_bytes
from .fleet import BINS_PER_DECADE, Fleet, Log, simulate
from .step_times import RooflineTimes, StepTimes
from .workload import Workload, decode_steps

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class Figures:
    """What one run showed; times in seconds, percentiles as {"p50": ..., "p90": ..., "p99": ..., "mean": ...}.

    Args:
        replicas, gpus: of the fleet.
        requests, rejected: that arrived; that no replica could ever hold.
        seconds: from the first arrival to the last token.
        tokens_per_s, tokens_per_s_per_gpu, requests_per_s: over that time.
        ttft_s: time to first token.
        itl_s: time between two deliveries of a request, which bring one to T tokens each.
        tpot_s: mean time per token after the first, of each request.
        latency_s: arrival to last token.
        preemptions, prefix_hit_rate: counts of the schedulers.
        rows_per_step: mean batch of the steps.
        busy_share: part of the time that replicas worked.
        steps, events: simulated, and how many times a replica acted for them.
    """

    replicas: int
    gpus: int
    requests: int
    rejected: int
    seconds: float
    tokens_per_s: float
    tokens_per_s_per_gpu: float
    requests_per_s: float
    ttft_s: dict[str, float]
    itl_s: dict[str, float]
    tpot_s: dict[str, float]
    latency_s: dict[str, float]
    preemptions: int
    prefix_hit_rate: float
    rows_per_step: float
    busy_share: float
    steps: int
    events: int

    def as_json(self) -> dict[str, Any]:
        """Plain numbers."""
        return asdict(self)


def figures(workload: Workload, fleet: Fleet, log: Log, gpus_per_replica: int) -> Figures:
    """Sum a log up."""
    served = [i for i in range(len(workload)) if not math.isnan(log.finish_s[i])]
    if not served:
        raise ArgumentError("simulate: no replica can hold any of the requests: more memory or shorter requests")
    arrival, first, finish = workload.arrival_s, log.first_s, log.finish_s
    seconds = max(finish[i] for i in served) - arrival[0]
    tokens = sum(workload.output_tokens[i] for i in served)
    longer = [i for i in served if workload.output_tokens[i] > 1]
    gpus = fleet.replicas * gpus_per_replica
    looked_up = log.prefix_hits + log.prefix_misses
    return Figures(
        replicas=fleet.replicas,
        gpus=gpus,
        requests=len(workload),
        rejected=log.rejected,
        seconds=seconds,
        tokens_per_s=tokens / seconds,
        tokens_per_s_per_gpu=tokens / seconds / gpus,
        requests_per_s=len(served) / seconds,
        ttft_s=_spread([first[i] - arrival[i] for i in served]),
        itl_s=_binned(log.gaps),
        tpot_s=_spread([(finish[i] - first[i]) / (workload.output_tokens[i] - 1) for i in longer]),
        latency_s=_spread([finish[i] - arrival[i] for i in served]),
        preemptions=log.preemptions,
        prefix_hit_rate=log.prefix_hits / looked_up if looked_up else 0.0,
        rows_per_step=log.rows / log.steps if log.steps else 0.0,
        busy_share=log.busy_s / (seconds * fleet.replicas),
        steps=log.steps,
        events=log.events,
    )


def _spread(values: list[float]) -> dict[str, float]:
    values.sort()
    if not values:
        return {f"p{p}": 0.0 for p in PERCENTILES} | {"mean": 0.0}
    ranks = {f"p{p}": values[max(0, math.ceil(p / 100 * len(values)) - 1)] for p in PERCENTILES}
    return ranks | {"mean": math.fsum(values) / len(values)}


def _binned(gaps: dict[int, int]) -> dict[str, float]:
    total, seen, found = sum(gaps.values()), 0, {}
    middles = {key: 10 ** ((key + 0.5) / BINS_PER_DECADE) for key in sorted(gaps)}
    left = list(PERCENTILES)
    for key, middle in middles.items():
        seen += gaps[key]
        while left and seen >= left[0] / 100 * total:
            found[f"p{left.pop(0)}"] = middle
    mean = math.fsum(middles[key] * gaps[key] for key in middles) / total if total else 0.0
    return {f"p{p}": found.get(f"p{p}", 0.0) for p in PERCENTILES} | {"mean": mean}


@dataclass(frozen=True)
class Study:
    """A workload on fleets of one kind of replica.

    Args:
        workload: the requests.
        setting: the model, device, drafts and acceptance; its context is not looked at.
        replay: with replay, or native.
        seed: of the drawn acceptances: the same ones with replay and without.
        max_rows, token_budget: of a step of a replica.
        router: see `Fleet`.
        times: measured step times; None: the plan's roofline.
    """

    workload: Workload
    setting: Setting
    replay: bool
    seed: int = 0
    max_rows: int = 256
    token_budget: int = 8192
    router: str = "least-loaded"
    times: StepTimes | None = None

    def fleet(self, replicas: int) -> Fleet:
        """Replicas of this kind."""
        sizes = request_bytes(self.setting)
        return Fleet(
            replicas=replicas,
            max_rows=self.max_rows,
            token_budget=self.token_budget,
            tokens=self.setting.tokens,
            memory_bytes=request_memory_bytes(self.setting),
            fixed_bytes=sizes.replay_fixed if self.replay else sizes.native_fixed,
            kv_bytes_per_token=sizes.kv_per_token,
            prefix_bytes=sizes.conv
            + (sizes.checkpoint if self.replay else sizes.native_states / (1 + self.setting.drafts)),
            router=self.router,
        )

    def steps(self) -> array[int]:
        """Decode steps of each request."""
        return decode_steps(self.workload, self.setting.accepted_distribution(), self.seed)

    def run(self, replicas: int, steps: array[int] | None = None) -> Figures:
        """Simulate so many replicas."""
        fleet = self.fleet(replicas)
        times = self.times or RooflineTimes(StepCost(self.setting, self.replay))
        log = simulate(self.workload, fleet, times, self.steps() if steps is None else steps)
        return figures(self.workload, fleet, log, self.setting.tp)

    def replicas_for(self, *, ttft_s: float, tpot_s: float, percentile: int = 99, most: int = 4096) -> Figures | None:
        """The fewest replicas that keep a percentile of both latencies; None where `most` do not.

        Doubles until one number is enough and halves back: it takes for granted that more replicas are never slower.

        Raises:
            ArgumentError: a limit that is not positive, or a percentile that is not kept.
        """
        for name, limit in (("ttft_s", ttft_s), ("tpot_s", tpot_s)):
            if not limit > 0:
                raise ArgumentError(f"simulate: {name}: expected a positive number of seconds, got {limit:g}")
        if percentile not in PERCENTILES:
            raise ArgumentError(f"simulate: percentile: expected one of {PERCENTILES}, got {percentile}")
        steps, key = self.steps(), f"p{percentile}"

        def enough(found: Figures) -> bool:
            return found.ttft_s[key] <= ttft_s and found.tpot_s[key] <= tpot_s

        low, high = 0, 1
        best = self.run(high, steps)
        while not enough(best):
            if high >= most:
                return None
            low, high = high, min(2 * high, most)
            best = self.run(high, steps)
        while high - low > 1:
            middle = (low + high) // 2
            found = self.run(middle, steps)
            if enough(found):
                high, best = middle, found
            else:
                low = middle
        return best


def both(study: Study) -> Sequence[Study]:
    """(native, replay) of a study."""
    return replace(study, replay=False), replace(study, replay=True)
