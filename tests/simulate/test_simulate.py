"""The simulation: queueing formulas in the limits, a step-by-step twin, memory, and traces.

How this tests, in plain words: with a constant step time a replica with c rows is a queue with c servers, so waiting
times must be Erlang's (M/M/c) and Pollaczek and Khinchine's (M/D/1). A second simulator of forty lines, which goes
step by step, must give the same times as the one that takes many steps at once. hypothesis looks for a replica that
holds more than its memory.
"""

from __future__ import annotations

import json
import math
import random
from array import array
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replaystate.errors import ArgumentError
from replaystate.models import MODELS
from replaystate.plan import DEVICES, Setting, StepCost
from replaystate.simulate import (
    TRACES,
    Fleet,
    MeasuredTimes,
    RooflineTimes,
    Study,
    Workload,
    both,
    decode_steps,
    figures,
    poisson,
    read_measured,
    read_trace,
    simulate,
    synthetic,
)


@dataclass(frozen=True)
class Steady:
    """Every step takes as long; `per_token` for each token in the caches."""

    seconds_: float = 1.0
    per_token: float = 0.0

    def seconds(self, rows: int, kv_tokens: float, prefill_tokens: int) -> float:
        return self.seconds_ + self.per_token * kv_tokens


def workload(
    arrival: list[float], prompts: list[int], outputs: list[int], prefixes: list[int] | None = None
) -> Workload:
    count = len(arrival)
    marks = prefixes or [-1] * count
    shared = [p // 2 if m >= 0 else 0 for p, m in zip(prompts, marks, strict=True)]
    columns = (array("q", values) for values in (prompts, outputs, marks, shared))
    return Workload("test", array("d", arrival), *columns)


def one_token_steps(work: Workload) -> array[int]:
    return decode_steps(work, [1.0], seed=0)


def geometric(mean: float, count: int, seed: int) -> list[int]:
    chance = random.Random(seed)
    return [1 + int(math.log(1 - chance.random()) / math.log(1 - 1 / mean)) for _ in range(count)]


# --- closed forms -----------------------------------------------------------------------------------------------------


def erlang_c(servers: int, load: float) -> float:
    """Probability that all servers are busy, M/M/c."""
    busy = load**servers / math.factorial(servers) * servers / (servers - load)
    return busy / (sum(load**k / math.factorial(k) for k in range(servers)) + busy)


MEAN, COUNT = 200, 60_000


def mean_wait(servers: int, outputs: list[int], rate: float, replicas: int = 1) -> float:
    """Mean wait in the queue, in mean services, less the half step that the next step's beginning is away."""
    work = workload(list(poisson(COUNT, rate, seed=3)), [1] * COUNT, outputs)
    fleet = Fleet(replicas, servers, 1000, 1, router="round-robin")
    log = simulate(work, fleet, Steady(), one_token_steps(work))
    waits = [log.first_s[i] - work.arrival_s[i] - 1 for i in range(COUNT)]  # the first token takes a step
    assert min(waits) >= -1e-6
    return sum(waits) / COUNT / MEAN


@pytest.mark.parametrize(("servers", "load"), [(1, 0.5), (1, 0.8), (4, 0.8), (16, 0.9)])
def test_a_replica_with_c_rows_is_m_m_c(servers: int, load: float) -> None:
    expected = erlang_c(servers, servers * load) / (servers * (1 - load))
    found = mean_wait(servers, geometric(MEAN, COUNT, seed=5), servers * load / MEAN)
    assert found == pytest.approx(expected, rel=0.08, abs=1.5 / MEAN)  # seen: 0.056, of c = 4


def test_equal_requests_are_m_d_1() -> None:
    load = 0.7
    expected = load / (2 * (1 - load))
    assert mean_wait(1, [MEAN] * COUNT, load / MEAN) == pytest.approx(expected, rel=0.05, abs=1.5 / MEAN)  # seen: 0.012


def test_a_fleet_without_queues_has_the_throughput_of_its_arrivals() -> None:
    work = workload(list(poisson(5000, 2.0, seed=1)), [10] * 5000, [20] * 5000)
    log = simulate(work, Fleet(50, 8, 1000, 1), Steady(0.01), one_token_steps(work))
    found = figures(work, Fleet(50, 8, 1000, 1), log, 1)
    assert found.requests_per_s == pytest.approx(2.0, rel=0.05)
    assert found.tpot_s["p50"] == pytest.approx(0.01)
    assert found.ttft_s["p99"] <= 0.02 + 1e-9


def test_a_fleet_that_is_flooded_works_at_its_capacity() -> None:
    """All at once: full batches, so rows tokens a step but for the ends."""
    work = workload([0.0] * 4000, [1] * 4000, [100] * 4000)
    fleet = Fleet(2, 20, 10_000, 1)
    found = figures(work, fleet, simulate(work, fleet, Steady(), one_token_steps(work)), 1)
    assert found.tokens_per_s == pytest.approx(2 * 20, rel=1e-9)
    assert found.busy_share == pytest.approx(1)


# --- a step-by-step twin ----------------------------------------------------------------------------------------------


def step_by_step(work: Workload, rows: int, budget: int, times: Any) -> list[tuple[float, float]]:
    """(first, last) token of each request on one replica, one step after the other; a token a step."""
    now, arrived, queue, filling, running = 0.0, 0, [], [], {}
    spans: dict[int, list[float]] = {}
    while len(spans) < len(work) or running:
        if not (queue or filling or running):
            now = max(now, work.arrival_s[arrived])
        while arrived < len(work) and work.arrival_s[arrived] <= now:
            queue.append(arrived)
            arrived += 1
        while queue and len(filling) + len(running) < rows:
            filling.append([queue[0], work.prompt_tokens[queue.pop(0)]])
        left, done = budget - len(running), []
        for entry in filling:
            chunk = min(entry[1], left)
            entry[1] -= chunk
            left -= chunk
            if entry[1]:
                break
            done.append(entry)
        now += times.seconds(len(running), sum(running.values()), budget - len(running) - left)
        for i in list(running):
            running[i] += 1
            if running[i] == work.prompt_tokens[i] + work.output_tokens[i]:
                spans[i].append(now)
                del running[i]
        for entry in done:
            filling.remove(entry)
            i = entry[0]
            spans[i] = [now]
            if work.output_tokens[i] == 1:
                spans[i].append(now)
            else:
                running[i] = work.prompt_tokens[i] + 1
    return [(spans[i][0], spans[i][1]) for i in range(len(work))]


@pytest.mark.parametrize("seed", range(6))
def test_runs_of_steps_are_steps(seed: int) -> None:
    chance, count = random.Random(seed), 60
    arrival = sorted(chance.uniform(0, 300) for _ in range(count))
    work = workload(
        arrival, [chance.randint(1, 90) for _ in range(count)], [chance.randint(1, 60) for _ in range(count)]
    )
    times = Steady(0.5 + chance.random(), 1e-3 * (seed % 3))
    log = simulate(work, Fleet(1, 5, 40, 1), times, one_token_steps(work))
    for i, (first, last) in enumerate(step_by_step(work, 5, 40, times)):
        assert log.first_s[i] == pytest.approx(first, rel=1e-9)
        assert log.finish_s[i] == pytest.approx(last, rel=1e-9)


# --- memory, preemption, prefixes -------------------------------------------------------------------------------------


@given(
    st.lists(
        st.tuples(st.floats(0, 50), st.integers(1, 60), st.integers(1, 60), st.integers(-1, 2)), min_size=1, max_size=25
    ),
    st.floats(30, 400),
    st.floats(0, 40),
    st.integers(1, 4),
)
def test_no_replica_holds_more_than_its_memory(
    requests: list[tuple[float, int, int, int]], memory: float, fixed: float, T: int
) -> None:
    requests = sorted(requests)
    prefixes = [mark if prompt > 1 else -1 for _, prompt, _, mark in requests]
    work = workload(*([r[i] for r in requests] for i in range(3)), prefixes)
    most = []

    class Watching(Steady):
        def seconds(self, rows: int, kv_tokens: float, prefill_tokens: int) -> float:
            most.append(rows * fixed + kv_tokens)
            return 1.0

    fleet = Fleet(1, 6, 64, T, memory_bytes=memory, fixed_bytes=fixed, kv_bytes_per_token=1.0, prefix_bytes=fixed)
    accepted = [0.5] + [0.5 / (T - 1)] * (T - 1) if T > 1 else [1.0]
    log = simulate(work, fleet, Watching(), decode_steps(work, accepted, 1))
    served = [i for i in range(len(work)) if not math.isnan(log.finish_s[i])]
    assert len(served) + log.rejected == len(work)
    assert all(log.finish_s[i] >= log.first_s[i] > work.arrival_s[i] for i in served)
    assert max(most, default=0) <= memory * (1 + 1e-9)


def test_preempted_requests_come_back_and_finish() -> None:
    work = workload([0.0, 0.0], [50, 50], [60, 60])
    fleet = Fleet(1, 8, 1000, 1, memory_bytes=170.0, kv_bytes_per_token=1.0)
    log = simulate(work, fleet, Steady(), one_token_steps(work))
    assert log.preemptions >= 1
    assert log.finish_s[0] == 60  # the older one never waits
    assert log.finish_s[1] > 61
    roomy = simulate(work, replace(fleet, memory_bytes=math.inf), Steady(), one_token_steps(work))
    assert (roomy.preemptions, roomy.finish_s[1]) == (0, 60)


def test_a_request_that_cannot_fit_is_rejected_and_others_are_not() -> None:
    work = workload([0.0, 1.0], [500, 5], [5, 5])
    fleet = Fleet(1, 8, 1000, 1, memory_bytes=100.0, kv_bytes_per_token=1.0)
    log = simulate(work, fleet, Steady(), one_token_steps(work))
    assert log.rejected == 1
    assert math.isnan(log.finish_s[0])
    assert log.finish_s[1] == 6
    with pytest.raises(ArgumentError, match="no replica"):
        figures(
            workload([0.0], [500], [5]),
            fleet,
            simulate(workload([0.0], [500], [5]), fleet, Steady(), array("q", [4])),
            1,
        )


def test_a_prefix_is_filled_once() -> None:
    seen: list[int] = []

    class Watching(Steady):
        def seconds(self, rows: int, kv_tokens: float, prefill_tokens: int) -> float:
            seen.append(prefill_tokens)
            return 1.0

    work = workload([0.0, 10.0, 20.0], [40, 40, 40], [1, 1, 1], [7, 7, 8])
    log = simulate(work, Fleet(1, 4, 100, 1), Watching(), one_token_steps(work))
    assert seen == [40, 20, 40]
    assert (log.prefix_hits, log.prefix_misses) == (1, 2)


def test_routers() -> None:
    """Requests of 100 and 1 tokens in turn: round robin of two puts all long ones on one replica, which is too much."""
    work = workload([14.0 * i for i in range(200)], [1] * 200, [100, 1] * 100)
    slow, fast = (
        figures(work, fleet, simulate(work, fleet, Steady(), one_token_steps(work)), 1).latency_s["mean"]
        for fleet in (Fleet(2, 2, 50, 1, router=name) for name in ("round-robin", "least-loaded"))
    )
    assert fast < 0.8 * slow


# --- acceptance -------------------------------------------------------------------------------------------------------


def expected_steps(tokens: int, accepted: list[float]) -> float:
    """Renewal equation: E[n] = 1 + Σ p_c E[n - c]."""
    expected = [0.0] * (tokens + 1)
    for n in range(1, tokens + 1):
        expected[n] = 1 + sum(p * expected[max(0, n - c)] for c, p in enumerate(accepted, 1))
    return expected[tokens]


@pytest.mark.parametrize("accepted", [[0.3, 0.21, 0.49], [0.5, 0.5], [0.9, 0.0, 0.0, 0.1]])
@pytest.mark.parametrize("tokens", [2, 7, 400])
def test_steps_of_a_request_follow_the_renewal_equation(accepted: list[float], tokens: int) -> None:
    count = 30_000
    work = workload([0.0] * count, [1] * count, [tokens] * count)
    mean = sum(decode_steps(work, accepted, seed=2)) / count
    assert mean == pytest.approx(expected_steps(tokens - 1, accepted), rel=0.01)  # seen: 0.0033


def test_drafts_that_are_all_accepted() -> None:
    work = workload([0.0] * 4, [1] * 4, [1, 2, 4, 1000])
    assert list(decode_steps(work, [0.0, 0.0, 1.0], seed=0)) == [0, 1, 1, 333]


# --- studies ----------------------------------------------------------------------------------------------------------


def study(**options: Any) -> Study:
    setting = Setting(MODELS["Qwen3.5-27B"], DEVICES["H200"], drafts=3, acceptance=(0.7,))
    return Study(synthetic("chat", 1500, 30.0, seed=1), setting, replay=True, **options)


def test_the_same_bits_again() -> None:
    one, two = study().run(4), study().run(4)
    assert one == two
    assert json.dumps(one.as_json()) == json.dumps(two.as_json())
    assert study(seed=1).run(4) != one


def test_replay_serves_the_same_load_faster() -> None:
    native, replay = (side.run(4) for side in both(study()))
    assert replay.itl_s["mean"] < native.itl_s["mean"]
    assert replay.requests == native.requests == 1500


def test_memory_that_is_short_holds_more_under_replay() -> None:
    tight = study(max_rows=2000)
    tight = replace(tight, setting=replace(tight.setting, memory_share=0.41))
    native, replay = (side.run(1) for side in both(tight))
    assert replay.rows_per_step > 1.3 * native.rows_per_step
    assert replay.tokens_per_s > native.tokens_per_s


def test_the_fewest_replicas_are_enough_and_one_less_is_not() -> None:
    it = study()
    found = it.replicas_for(ttft_s=0.2, tpot_s=0.007)
    assert found is not None
    assert found.replicas > 1
    assert found.ttft_s["p99"] <= 0.2
    assert found.tpot_s["p99"] <= 0.007
    fewer = it.run(found.replicas - 1)
    assert fewer.ttft_s["p99"] > 0.2 or fewer.tpot_s["p99"] > 0.007
    assert it.replicas_for(ttft_s=1e-9, tpot_s=1e-9, most=4) is None


@pytest.mark.parametrize("name", ["Qwen3.5-27B", "Qwen3.5-35B-A3B"])
@pytest.mark.parametrize("replay", [True, False])
def test_the_folded_roofline_is_the_plans(name: str, replay: bool) -> None:
    cost = StepCost(Setting(MODELS[name], DEVICES["H200"], overhead_us=7.0), replay)
    times = RooflineTimes(cost)
    for rows, kv, prefill in ((1, 10.0, 0), (64, 1e6, 0), (0, 0.0, 512), (200, 3e5, 8000)):
        expected = cost.step(rows, kv_tokens=kv, prefill_tokens=prefill).total_s
        assert times.seconds(rows, kv, prefill) == pytest.approx(expected, rel=1e-12)


def test_measured_times_are_lines_between_points() -> None:
    times = MeasuredTimes(((1, 1.0), (3, 2.0)), ((10, 0.5),), per_kv_token=0.01)
    assert times.seconds(2, 0, 0) == 1.5
    assert times.seconds(5, 0, 0) == 3.0
    assert times.seconds(1, 100, 99) == 1.0 + 1.0 + 0.5


# --- traces and bad input ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TRACES)
def test_made_up_traces(name: str) -> None:
    work, mix = synthetic(name, 5000, 10.0, seed=4), TRACES[name]
    plain = sorted(p - s for p, s in zip(work.prompt_tokens, work.prefix_tokens, strict=True))
    assert plain[2500] == pytest.approx(mix.prompt_median, rel=0.1)
    assert sorted(work.output_tokens)[2500] == pytest.approx(mix.output_median, rel=0.1)
    assert work.arrival_s[-1] == pytest.approx(500, rel=0.06)
    assert min(work.output_tokens) >= 1
    assert all(s < p for s, p in zip(work.prefix_tokens, work.prompt_tokens, strict=True))
    assert work == synthetic(name, 5000, 10.0, seed=4)


def test_a_trace_file(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"arrival_s": 0, "prompt_tokens": 9, "output_tokens": 3, "prefix": "a", "prefix_tokens": 4}\n\n'
        '{"arrival_s": 1.5, "prompt_tokens": 5, "output_tokens": 1}\n'
    )
    work = read_trace(path)
    assert list(work.arrival_s) == [0, 1.5]
    assert (list(work.prefix), list(work.prefix_tokens)) == ([0, -1], [4, 0])
    assert list(read_trace(path, rate=2.0, seed=1).arrival_s) == list(poisson(2, 2.0, 1))
    assert len(read_trace(path, requests=1)) == 1


ONE = '{"arrival_s": 0, "prompt_tokens": 1, "output_tokens": 1}\n'


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("", "no requests"),
        ("{", "not JSON"),
        ("[]", "object"),
        ('{"arrival_s": 0, "prompt_tokens": 0, "output_tokens": 1}', "prompt_tokens"),
        ('{"arrival_s": 0, "prompt_tokens": 1}', "output_tokens"),
        ('{"prompt_tokens": 1, "output_tokens": 1}', "arrival_s"),
        ('{"arrival_s": -1, "prompt_tokens": 1, "output_tokens": 1}', "arrival_s"),
        ('{"arrival_s": 0, "prompt_tokens": 4, "output_tokens": 1, "prefix_tokens": 2}', "prefix"),
        ('{"arrival_s": 0, "prompt_tokens": 4, "output_tokens": 1, "prefix": "a", "prefix_tokens": 4}', "less than"),
        (ONE.replace("0", "2") * 2 + "{}", "jsonl:3: prompt_tokens"),
        (ONE.replace("0", "2") + ONE, "jsonl:2: arrival_s"),
    ],
)  # fmt: skip
def test_lines_that_are_refused(tmp_path: Path, text: str, word: str) -> None:
    (tmp_path / "t.jsonl").write_text(text)
    with pytest.raises(ArgumentError, match=word):
        read_trace(tmp_path / "t.jsonl")


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"decode": [[1, 1]]}', '{"decode": [[2, 1], [1, 1]], "prefill": [[1, 1]]}',
     '{"decode": [[1, -1]], "prefill": [[1, 1]]}', '{"decode": [[1, 1]], "prefill": [[1, 1]], "per_kv_token": -1}'],
)  # fmt: skip
def test_step_times_that_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "t.json").write_text(text)
    with pytest.raises(ArgumentError, match="step times"):
        read_measured(tmp_path / "t.json")


@pytest.mark.parametrize(
    "make",
    [
        lambda: synthetic("chat", 10, -1.0, 0),
        lambda: synthetic("chat", 10, math.nan, 0),
        lambda: synthetic("chat", 0, 1.0, 0),
        lambda: synthetic("gossip", 10, 1.0, 0),
        lambda: Fleet(0, 1, 10, 1),
        lambda: Fleet(1, 8, 8, 1),
        lambda: Fleet(1, 1, 10, 1, router="none"),
        lambda: Fleet(1, 1, 10, 1, memory_bytes=-1.0),
        lambda: study().replicas_for(ttft_s=-1, tpot_s=1),
        lambda: study().replicas_for(ttft_s=1, tpot_s=1, percentile=98),
        lambda: read_trace(Path("nowhere.jsonl")),
    ],
)
def test_what_is_refused(make: Callable[[], object]) -> None:
    with pytest.raises(ArgumentError):
        make()
