"""A real vLLM on the CPU: its tokens against stock transformers (float32), its logprobs against vLLM's own path (bf16).

The float32 engines must give stock greedy tokens. A trained model has few near ties, so no allowance is made for them.
"""

from __future__ import annotations

import subprocess
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest

from . import workloads
from .conftest import Stock

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


def assert_stock_tokens(batch: list[dict[str, Any]], stock: Stock) -> None:
    for i, got in enumerate(batch):
        expected = stock.continue_(got["prompt"], len(got["tokens"])) if got["tokens"] else []
        assert got["tokens"] == expected, f"request {i}, prompt of {len(got['prompt'])}"


def test_drafts_chunks_aborts_and_preemptions_give_stock_tokens(drafted: dict[str, Any], stock: Stock) -> None:
    counters = drafted["counters"]
    assert counters["vllm:num_preemptions"] > 0
    assert counters["vllm:spec_decode_num_accepted_tokens"] > 100
    assert counters["vllm:spec_decode_num_draft_tokens"] < 3 * counters["vllm:spec_decode_num_drafts"]  # ragged rows
    (batch,), requests = drafted["batches"], workloads.mixed()
    for got, asked in zip(batch, requests, strict=True):
        assert asked["aborted"] is not None or len(got["tokens"]) == asked["max_tokens"]
    assert_stock_tokens(batch, stock)


def test_two_shards_with_odd_heads_give_stock_tokens(sharded: dict[str, Any], odd_model: Path) -> None:
    (batch,) = sharded["batches"]
    assert_stock_tokens(batch, Stock(odd_model))


def test_an_engine_that_was_killed_leaves_nothing_behind(sharded: dict[str, Any], drafted: dict[str, Any]) -> None:
    """`drafted` started after `sharded` was killed while it decoded; no process of that is left."""
    assert drafted["batches"]
    left = subprocess.run(["ps", "-eo", "pid,args"], capture_output=True, text=True).stdout
    assert not [line for line in left.splitlines() if "sharded.job.json" in line]


def test_prefix_hits_give_stock_tokens(cached: dict[str, Any], stock: Stock) -> None:
    for batch in cached["batches"]:
        assert_stock_tokens(batch, stock)


def test_prefix_hits_are_those_of_vllm(cached: dict[str, Any], native_plain: dict[str, Any]) -> None:
    assert cached["block_size"] == native_plain["block_size"] == 256
    ours = [[got["cached"] for got in batch] for batch in cached["batches"]]
    theirs = [[got["cached"] for got in batch] for batch in native_plain["batches"][: len(ours)]]
    assert ours == theirs
    assert ours[1] == [512] * 4
    assert min(ours[3]) == 512  # a boundary that was passed while decoding


def gaps(got: list[dict[str, Any]], reference: list[dict[str, Any]]) -> list[float]:
    """Differences of logprob as long as both have chosen the same tokens: the same history, so teacher-forced."""
    found = []
    for one, other in zip(got, reference, strict=True):
        same = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(one["tokens"], other["tokens"], strict=True))))
        found += [abs(a - b) for a, b in zip(one["logprobs"][:same], other["logprobs"][:same], strict=True)]
    return found


def test_logprobs_with_drafts_are_as_near_as_vllms(
    replay_mtp: dict[str, Any], native_mtp: dict[str, Any], native_plain: dict[str, Any]
) -> None:
    plain = native_plain["batches"][-1]
    ours, theirs = gaps(replay_mtp["batches"][0], plain), gaps(native_mtp["batches"][0], plain)
    assert min(len(ours), len(theirs)) > 400
    assert max(ours) <= max(theirs)


def test_logprobs_are_nearer_to_float32_than_vllms(
    replay_mtp: dict[str, Any], native_mtp: dict[str, Any], stock: Stock
) -> None:
    def worst(batch: list[dict[str, Any]]) -> float:
        return max(
            abs(a - b)
            for got in batch
            for a, b in zip(got["logprobs"], stock.logprobs(got["prompt"], got["tokens"]), strict=True)
        )

    assert worst(replay_mtp["batches"][0]) <= worst(native_mtp["batches"][0])


def test_drafts_are_accepted_as_often(replay_mtp: dict[str, Any], native_mtp: dict[str, Any]) -> None:
    ours, theirs = (
        run["counters"]["vllm:spec_decode_num_accepted_tokens"] / run["counters"]["vllm:spec_decode_num_drafts"]
        for run in (replay_mtp, native_mtp)
    )
    assert ours > 0.2
    assert ours == pytest.approx(theirs, rel=0.1)


def test_capacity_with_drafts(replay_mtp: dict[str, Any], native_mtp: dict[str, Any]) -> None:
    assert replay_mtp["cache_tokens"] >= 2.5 * native_mtp["cache_tokens"]


def test_the_start_says_what_runs_and_why(replay_mtp: dict[str, Any], native_mtp: dict[str, Any]) -> None:
    log = replay_mtp["log"]
    assert log.count("decode by replay: window 16 in rings of 32 slots, up to 4 token(s) a step") == 1
    assert "replay_step on cpu runs on backend 'cpu'" in log
    assert "decode by replay" not in native_mtp["log"]
