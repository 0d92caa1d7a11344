"""The contract of `plan` and `simulate`: one JSON document, exit codes, one line for bad input, no colour, no network.

The fixtures refuse any look-up or connection.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import replaystate
from replaystate.models import MODELS

from .conftest import Finished

Command = Callable[..., Finished]
PLAN = ("plan", "--model", "Qwen3.5-27B", "--device", "H200")
SIMULATE = ("simulate", "--model", "Qwen3.5-27B", "--device", "H200", "--requests", "200", "--rate", "5")
ROOT = Path(__file__).parents[2]
TINY = ROOT / "examples" / "tiny_gdn" / "model"


@pytest.mark.parametrize("arguments", [("plan",), ("simulate",)], ids=" ".join)
def test_help(command: Command, arguments: tuple[str, ...]) -> None:
    done = command(*arguments, "--help")
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith(f"Usage: replaystate {arguments[0]}")
    assert max(map(len, done.out.splitlines())) <= 80


def test_plan_json_has_the_golden_values(command: Command) -> None:
    done = command(*PLAN, "--state-dtype", "float32", "--ring-dtype", "float16", "--window", 16, "--json")
    assert (done.code, done.err) == (0, "")
    found = done.json()
    assert found["command"] == "plan"
    assert found["bytes_per_request"]["checkpoint"] == 144 * 2**20
    assert round(found["bytes_per_request"]["rings"] / 2**20, 1) == 24.3
    assert found["bytes_per_request"]["native_states"] == 4 * 144 * 2**20
    assert found["model"]["source"] == MODELS["Qwen3.5-27B"].source
    assert found["device"]["source"].startswith("https://")
    assert found["verdict"]["worth"] is True
    assert [length["drafts"] for length in found["draft_lengths"]] == list(range(16))


def test_plan_table(command: Command) -> None:
    done = command(*PLAN)
    assert (done.code, done.err) == (0, "")
    assert "\x1b" not in done.out
    assert max(map(len, done.out.splitlines())) <= 80
    for words in ("requests that fit", "  rings", "24.3 MiB", "72.0 MiB", "Replay is worth it:", "* 16"):
        assert words in done.out


def test_plan_says_when_replay_does_not_pay(command: Command) -> None:
    done = command("plan", "--model", "Qwen3.5-122B-A10B", "--device", "B300", "--drafts", 0, "--context", 2048)
    assert done.code == 0
    assert "Replay is NOT worth it:" in done.out


def test_plan_of_a_config_file(command: Command) -> None:
    by_folder = command("plan", "--model", TINY, "--device", "EPYC-9654", "--json").json()
    by_file = command("plan", "--model", TINY / "config.json", "--device", "epyc 9654", "--json").json()
    assert by_folder["bytes_per_request"] == by_file["bytes_per_request"]
    assert by_folder["model"]["gdn"] == {"num_k_heads": 2, "num_v_heads": 4, "head_k_dim": 64, "head_v_dim": 64}


def test_plan_plot(command: Command, tmp_path: Path) -> None:
    done = command(*PLAN, "--plot", tmp_path / "plan.svg", "--json")
    assert done.code == 0
    assert (tmp_path / "plan.svg").read_text().startswith("<svg")


def test_simulate_json_repeats(command: Command) -> None:
    one, two = command(*SIMULATE, "--json"), command(*SIMULATE, "--json")
    assert (one.code, one.err) == (0, "")
    assert one.out == two.out
    found = one.json()
    assert found["command"] == "simulate"
    assert found["native"]["requests"] == found["replay"]["requests"] == 200
    assert found["replay"]["itl_s"]["mean"] < found["native"]["itl_s"]["mean"]
    assert command(*SIMULATE, "--seed", 1, "--json").out != one.out


def test_simulate_table(command: Command) -> None:
    done = command(*SIMULATE)
    assert (done.code, done.err) == (0, "")
    assert "\x1b" not in done.out
    for words in ("native", "replay", "time to first token, p99", "preemptions", "tokens/s"):
        assert words in done.out


def test_simulate_looks_for_replicas(command: Command) -> None:
    found = command(*SIMULATE, "--rate", 30, "--ttft-ms", 300, "--tpot-ms", 8, "--json").json()
    assert found["limits"] == {"ttft_ms": 300, "tpot_ms": 8, "percentile": 99}
    assert 1 <= found["replay"]["gpus"] <= found["native"]["gpus"]


def test_simulate_where_no_fleet_is_enough(command: Command) -> None:
    done = command(*SIMULATE, "--requests", 5, "--ttft-ms", 1e-6, "--tpot-ms", 1e-6)
    assert done.code == 0
    assert "no number of replicas" in done.out


def test_simulate_a_file_with_measured_steps(command: Command, tmp_path: Path) -> None:
    trace, times = tmp_path / "trace.jsonl", tmp_path / "times.json"
    trace.write_text('{"arrival_s": 0, "prompt_tokens": 9, "output_tokens": 11}\n')
    times.write_text('{"decode": [[1, 0.5]], "prefill": [[9, 2.0]]}')
    options = ("--trace", trace, "--step-times", times, "--drafts", 0, "--json")
    found = command("simulate", "--model", TINY, "--device", "EPYC-9654", *options).json()
    assert found["replay"]["seconds"] == found["native"]["seconds"] == 2.0 + 10 * 0.5


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ((*PLAN, "--model", "missing/config.json"), "no such file"),
        ((*PLAN, "--device", "abacus"), "H200"),
        ((*PLAN, "--memory-gb", "10"), "needs 53.8 GB"),
        ((*PLAN, "--memory-gb", "-1"), "memory_gb"),
        ((*PLAN, "--drafts", "-1"), "drafts"),
        ((*PLAN, "--drafts", "64"), "at most 63"),
        ((*PLAN, "--tp", "5"), "tp"),
        ((*PLAN, "--acceptance", "x"), "acceptance"),
        ((*PLAN, "--acceptance", "-0.5"), "acceptance"),
        ((*PLAN, "--acceptance", "nan"), "acceptance"),
        ((*PLAN, "--context", "0"), "context_tokens"),
        ((*PLAN, "--batch", "0"), "rows"),
        ((*PLAN, "--window", "12"), "window"),
        ((*PLAN, "--state-dtype", "int8"), "state_dtype"),
        ((*PLAN, "--overhead-us", "-1"), "overhead_us"),
        ((*PLAN, "--plot", "no/such/folder/plan.svg"), "plot"),
        ((*SIMULATE, "--rate", "-1"), "rate"),
        ((*SIMULATE, "--requests", "0"), "requests"),
        ((*SIMULATE, "--replicas", "0"), "replicas"),
        ((*SIMULATE, "--seed", "-1"), "seed"),
        ((*SIMULATE, "--drafts", "64"), "at most 63"),
        ((*SIMULATE, "--router", "none"), "router"),
        ((*SIMULATE, "--trace", "missing.jsonl"), "missing.jsonl"),
        ((*SIMULATE, "--step-times", "missing.json"), "missing.json"),
        ((*SIMULATE, "--token-budget", "10"), "token_budget"),
        ((*SIMULATE, "--ttft-ms", "10"), "--tpot-ms"),
        ((*SIMULATE, "--ttft-ms", "-10", "--tpot-ms", "10"), "ttft_s"),
        ((*SIMULATE, "--memory-gb", "53.9", "--memory-share", "1"), "no replica can hold"),
        (("simulate", "--model", "Qwen3.5-27B", "--device", "H200"), "rate"),
    ],
    ids=lambda value: " ".join(value[5:]) if isinstance(value, tuple) else value,
)
@pytest.mark.parametrize("as_json", [True, False], ids=["json", "table"])
def test_bad_input_is_one_line_and_exit_2(
    command: Command, arguments: tuple[str, ...], word: str, as_json: bool
) -> None:
    done = command(*arguments, *(["--json"] if as_json else []))
    assert (done.code, done.out) == (2, "")
    assert done.err.count("\n") == 1
    assert done.err.startswith("replaystate: ")
    assert word in done.err


@pytest.mark.parametrize("text", ["", "{", "[]", '{"linear_num_value_heads": 4}', '{"model_type": "llama"}'])
def test_a_broken_config_is_one_line_and_exit_2(command: Command, tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    done = command("plan", "--model", tmp_path, "--device", "H200")
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)


def test_simulate_without_simpy_is_exit_3(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("replaystate.simulate")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr(replaystate, "simulate", raising=False)
    monkeypatch.setitem(sys.modules, "simpy", None)  # type: ignore[arg-type]
    done = command(*SIMULATE)
    assert (done.code, done.out) == (3, "")
    assert "pip install 'replaystate[simulate]'" in done.err


@pytest.mark.parametrize("arguments", [PLAN, SIMULATE], ids=lambda value: value[0])
def test_no_color_in_a_real_process(arguments: tuple[str, ...]) -> None:
    environment: dict[str, Any] = {
        **os.environ,
        "NO_COLOR": "1",
        "FORCE_COLOR": "1",
        "PYTHONPATH": str(Path(replaystate.__file__).parents[1]),
    }
    done = subprocess.run(
        [sys.executable, "-m", "replaystate", *arguments],
        env=environment, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert "\x1b[3" not in done.stdout  # no colour; bold is not one
    assert done.stderr == ""
