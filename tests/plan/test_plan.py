"""The planner: golden sizes, the cost model against brute force, and what must hold for every setting.

How this tests, in plain words: sizes are literals from the documentation; how long windows are when steps find them is
counted in a simulated row; the experts that a batch visits are counted by enumeration; hypothesis looks for settings in
which more memory holds fewer requests, or a number is negative.
"""

from __future__ import annotations

import itertools
import math
import random
import xml.dom.minidom
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from replaystate import GDNShape
from replaystate.bench import step_bytes
from replaystate.errors import ArgumentError
from replaystate.models import MODELS, Experts
from replaystate.plan import (
    DEVICES,
    DTYPES,
    Setting,
    StepCost,
    best_window,
    concurrency_chart,
    find_device,
    make_plan,
    max_requests,
    request_bytes,
    request_memory_bytes,
    weight_bytes,
    window_distribution,
)

MIB = 2**20
H200 = DEVICES["H200"]


def setting(name: str = "Qwen3.5-27B", **options: Any) -> Setting:
    return Setting(MODELS[name], options.pop("device", H200), **options)


# --- golden values ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "fp32", "fp16", "rings"),
    [
        ("Qwen3.5-27B", 144, 72, 24.3),  # 48 layers x HV 48
        ("Qwen3-Next-80B-A3B", 72, 36, 13.6),  # 36 x 32
        ("Qwen3.5-397B-A17B", 180, 90, 28.5),  # 45 x 64
    ],
)
def test_states_and_rings_of_a_request(name: str, fp32: float, fp16: float, rings: float) -> None:
    half, full = (
        request_bytes(setting(name, state_dtype=dtype, ring_dtype="float16", native_state_dtype=dtype))
        for dtype in ("float16", "float32")
    )
    assert half.checkpoint == fp16 * MIB
    assert full.checkpoint == fp32 * MIB
    assert round(half.rings / MIB, 1) == round(full.rings / MIB, 1) == rings
    assert half.native_states == 4 * fp16 * MIB  # one, and a copy for each of three drafts


def test_attention_kv_and_convolutions() -> None:
    sizes = request_bytes(setting("Qwen3.5-27B", context_tokens=1000, drafts=3))
    assert sizes.kv_per_token == 16 * 2 * 4 * 256 * 2  # layers, k and v, heads, dim, bytes
    assert sizes.kv == sizes.kv_per_token * 1003
    assert sizes.conv == 48 * (2 * 16 * 128 + 48 * 128) * (3 + 3) * 2
    assert sizes.replay == sizes.kv + sizes.conv + sizes.checkpoint + sizes.rings
    assert sizes.native == sizes.kv + sizes.conv + sizes.native_states


@pytest.mark.parametrize("tp", [2, 4])
def test_shards_hold_their_part(tp: int) -> None:
    whole, part = request_bytes(setting()), request_bytes(setting(tp=tp))
    for name in ("kv", "conv", "checkpoint", "rings", "native_states"):
        assert getattr(part, name) * tp == getattr(whole, name)


def test_kv_heads_are_copied_where_devices_outnumber_them() -> None:
    whole, part = (request_bytes(setting("Qwen3.5-397B-A17B", tp=tp)) for tp in (1, 8))
    assert part.kv * 2 == whole.kv


# --- the cost model ---------------------------------------------------------------------------------------------------


def counted_windows(window: int, accepted: list[float], steps: int = 60_000) -> list[float]:
    chance, P, seen = random.Random(1), 0, [0] * (window + 1)
    for _ in range(steps):
        seen[P] += 1
        kept = chance.choices(range(1, len(accepted) + 1), accepted)[0]
        P = kept if P + len(accepted) > window else P + kept
    return [n / steps for n in seen]


@pytest.mark.parametrize(
    ("window", "accepted"),
    [(16, [1.0]), (16, [0.3, 0.21, 0.147, 0.343]), (8, [0.5, 0.5]), (4, [0.25] * 4), (16, [0.0, 1.0])],
)
def test_windows_are_as_long_as_a_counted_row_finds_them(window: int, accepted: list[float]) -> None:
    expected = window_distribution(window, tuple(accepted))
    assert sum(expected) == pytest.approx(1)
    for found, counted in zip(expected, counted_windows(window, accepted), strict=True):
        assert found == pytest.approx(counted, abs=0.006)  # seen: 0.0025


def test_replay_traffic_is_the_benchmarks_bytes_model() -> None:
    """One token a step with W = 4: lengths 1, 2, 3, 4 in turn, a fold at 4."""
    s = setting(drafts=0, window=4)
    shape = s.model.gdn
    options = {"state_dtype": torch.float16, "ring_dtype": torch.float16, "io_dtype": torch.bfloat16}
    layer = sum(step_bytes(shape, rows=1, tokens=1, window_rows=P, folds=P == 4, **options).total for P in (1, 2, 3, 4))
    conv = shape.qkv_dim * (2 * 3 + 1) * 2
    assert StepCost(s, replay=True).gdn_bytes == pytest.approx(48 * (layer / 4 + conv))
    assert StepCost(s, replay=True).fold_share == pytest.approx(0.25)


def test_native_traffic_is_a_state_in_and_one_out_per_token() -> None:
    s = setting(drafts=3)
    H, HV, K, V = s.model.gdn.sizes
    io = 4 * (s.model.gdn.qkv_dim + HV * V + 2 * HV) * 2
    conv = s.model.gdn.qkv_dim * (6 + 4) * 2
    assert StepCost(s, replay=False).gdn_bytes == 48 * (5 * HV * V * K * 2 + io + conv)


def test_distinct_experts_by_enumeration() -> None:
    """Every way in which three tokens can pick 2 of 4 experts."""
    model = replace(MODELS["Qwen3.5-35B-A3B"], experts=Experts(4, 2, 512, 512))
    picks = list(itertools.combinations(range(4), 2))
    counts = [len(set().union(*choice)) for choice in itertools.product(picks, repeat=3)]
    assert StepCost(Setting(model, H200), True).distinct_experts(3) == pytest.approx(sum(counts) / len(counts))


def test_a_step_is_bytes_over_bandwidth() -> None:
    s = setting(bandwidth_share=0.5, overhead_us=100.0, drafts=0)
    time = StepCost(s, replay=True).step(1)
    assert time.weights_s == pytest.approx(s.model.parameters.dense * 2 / 2.4e12)
    assert time.kv_s == pytest.approx(8192 * 16 * 2 * 4 * 256 * 2 / 2.4e12)
    assert time.overhead_s == pytest.approx(1e-4)
    assert time.total_s == time.weights_s + time.kv_s + time.gdn_s + time.overhead_s


def test_many_tokens_are_bound_by_arithmetic() -> None:
    time = StepCost(setting(drafts=0), replay=True).step(0, prefill_tokens=8192)
    assert time.weights_s == pytest.approx(2 * MODELS["Qwen3.5-27B"].parameters.dense * 8192 / 989.4e12)


def test_the_best_window_is_the_smallest_near_the_least() -> None:
    s = setting(drafts=3)
    traffic = {w: StepCost(replace(s, window=w), True).gdn_bytes for w in (4, 8, 16, 32, 64)}
    near = [w for w, count in traffic.items() if count <= 1.01 * min(traffic.values())]
    assert best_window(s) == near[0] == 16


# --- plans ------------------------------------------------------------------------------------------------------------


def test_requests_that_fit() -> None:
    plan = make_plan(setting(memory_share=1.0))
    left = 141e9 - MODELS["Qwen3.5-27B"].parameters.total * 2
    assert plan.request_memory_bytes == left
    assert plan.replay.max_requests == left // plan.bytes.replay
    assert plan.native.max_requests == left // plan.bytes.native
    assert plan.native.rows == plan.replay.rows == plan.native.max_requests
    assert plan.replay.step_us < plan.native.step_us
    assert plan.verdict.worth


def test_when_replay_is_not_worth_it() -> None:
    """No drafts, a small batch, and weights that dwarf the states: rings only cost."""
    plan = make_plan(setting("Qwen3.5-122B-A10B", device=DEVICES["B300"], drafts=0, context_tokens=2048))
    assert not plan.verdict.worth
    assert plan.replay.max_requests < plan.native.max_requests
    assert any("rings take" in reason for reason in plan.verdict.reasons)


def test_break_even_is_the_first_batch_that_gains() -> None:
    plan = make_plan(setting())
    native, replay = (StepCost(plan.setting, side) for side in (False, True))
    gains = [n for n in range(1, 80) if native.step(n).total_s >= 1.03 * replay.step(n).total_s]
    assert plan.break_even_rows == gains[0] > 1


def test_one_small_request_gains_nothing() -> None:
    plan = make_plan(setting(drafts=0), rows=1)
    assert not plan.verdict.worth
    assert plan.native.rows == plan.replay.rows == 1


def test_more_drafts_than_native_can_hold() -> None:
    model = MODELS["Qwen3.5-4B"]
    weights = model.parameters.total * 2
    device = replace(H200, memory_bytes=weights + 150 * MIB)
    plan = make_plan(Setting(model, device, drafts=7, context_tokens=64, memory_share=1.0))
    assert plan.native.max_requests == 0 < plan.replay.max_requests
    assert plan.verdict.worth
    assert "not one request fits" in plan.verdict.reasons[0]


def test_the_chart_is_one_svg_with_a_text_alternative() -> None:
    plan = make_plan(setting())
    document = xml.dom.minidom.parseString(concurrency_chart(plan))
    described = document.getElementsByTagName("desc")[0].firstChild.data
    assert f"3 drafts: native {plan.native.max_requests}, replay {plan.replay.max_requests}" in described
    assert not document.getElementsByTagName("script")
    assert document.documentElement.getAttribute("role") == "img"


@pytest.mark.parametrize(
    "options",
    [
        {"context_tokens": 0},
        {"drafts": -1},
        {"drafts": 16},
        {"window": 12},
        {"acceptance": ()},
        {"acceptance": (1.2,)},
        {"acceptance": (math.nan,)},
        {"memory_share": 0.0},
        {"memory_share": -1.0},
        {"bandwidth_share": 2.0},
        {"overhead_us": -5.0},
        {"overhead_us": math.inf},
        {"state_dtype": "int8"},
        {"tp": 7},
    ],
    ids=str,
)
def test_settings_that_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError):
        setting(**options)


def test_weights_that_do_not_fit() -> None:
    with pytest.raises(ArgumentError, match=r"792\.7 GB"):
        make_plan(setting("Qwen3.5-397B-A17B"))


def test_devices() -> None:
    assert find_device("rtx-4090") is DEVICES["RTX4090"]
    assert set(DEVICES) == {"A100", "H100", "H200", "B200", "B300", "L40S", "RTX4090", "MI300X", "EPYC-9654"}
    assert all(device.source.startswith("https://") and device.checked for device in DEVICES.values())
    assert all(
        1e10 < d.memory_bytes < 1e12 and 1e11 < d.bytes_per_s < 1e13 and d.flops > 1e13 for d in DEVICES.values()
    )
    with pytest.raises(ArgumentError, match="H200"):
        find_device("abacus")


# --- for every setting ------------------------------------------------------------------------------------------------

SETTINGS = st.builds(
    Setting,
    st.sampled_from(list(MODELS.values())),
    st.sampled_from(list(DEVICES.values())),
    tp=st.sampled_from([1, 2, 4, 8]),
    context_tokens=st.integers(1, 300_000),
    drafts=st.integers(0, 15),
    acceptance=st.lists(st.floats(0, 1), min_size=1, max_size=4).map(tuple),
    state_dtype=st.sampled_from(list(DTYPES)),
    ring_dtype=st.sampled_from(list(DTYPES)),
    native_state_dtype=st.sampled_from(list(DTYPES)),
    weight_dtype=st.sampled_from(["bfloat16", "float8", "float4"]),
    memory_share=st.floats(0.1, 1),
)


@given(SETTINGS, st.floats(1, 10))
def test_more_memory_never_holds_fewer(s: Setting, factor: float) -> None:
    assume(weight_bytes(s) < s.device.memory_bytes * s.memory_share)
    larger = replace(s, device=replace(s.device, memory_bytes=s.device.memory_bytes * factor))
    sizes = request_bytes(s)
    for size in (sizes.native, sizes.replay):
        few, many = (max_requests(request_memory_bytes(it), size) for it in (s, larger))
        assert 0 <= few <= many


@given(SETTINGS, st.integers(1, 500))
def test_numbers_are_positive_and_more_costs_more(s: Setting, rows: int) -> None:
    assert 1 <= s.tokens_per_step <= s.tokens
    assert sum(s.accepted_distribution()) == pytest.approx(1)
    sizes = request_bytes(s)
    assert min(sizes.kv, sizes.conv, sizes.checkpoint, sizes.rings, sizes.native_states) > 0
    for replay in (False, True):
        cost = StepCost(s, replay)
        one, more = cost.step(rows), cost.step(rows + 1)
        assert 0 < one.total_s < more.total_s
        assert cost.gdn_bytes > 0
        assert 0 <= cost.fold_share <= 1
    longer = replace(s, context_tokens=s.context_tokens + 1)
    assert request_bytes(longer).replay > sizes.replay


@given(SETTINGS)
def test_a_wider_state_moves_more(s: Setting) -> None:
    half, full = (replace(s, state_dtype=dtype, native_state_dtype=dtype) for dtype in ("float16", "float32"))
    for replay in (False, True):
        assert StepCost(half, replay).gdn_bytes < StepCost(full, replay).gdn_bytes
    assert request_bytes(full).checkpoint == 2 * request_bytes(half).checkpoint


@given(st.floats(-1e15, 1e15), st.floats(1, 1e12))
def test_concurrency_is_never_negative(memory: float, request: float) -> None:
    found = max_requests(memory, request)
    assert found >= 0
    assert found * request <= max(memory, 0) * (1 + 1e-12)


def test_shape_of_a_made_up_model() -> None:
    """K != V, and ratios that are not published, go through the same arithmetic."""
    model = replace(MODELS["Qwen3.5-4B"], gdn=GDNShape(4, 12, 96, 192))
    sizes = request_bytes(Setting(model, H200, drafts=0))
    assert sizes.checkpoint == 24 * 12 * 192 * 96 * 2
    assert sizes.rings == 24 * 32 * ((12 * 192 + 4 * 96) * 2 + 12 * 4)
