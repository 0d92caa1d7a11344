"""`replaystate warmup` and `replaystate tune` where there is no GPU, and what `tune` makes of its times.

How this tests: the commands in this process; the compiler itself needs no GPU, so a warm-up for a named architecture is
real, on a small configuration. The measuring part of `tune` runs on a GPU only.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from replaystate import GDNShape
from replaystate.bench import tune
from replaystate.errors import ArgumentError
from replaystate.kernels.cuda import compiler, fast

from .conftest import Finished

Command = Callable[..., Finished]
LAYER = ("--key-heads", "1", "--value-heads", "2")

needs_compiler = pytest.mark.skipif(compiler.missing() is not None, reason="cuda-core is not installed")
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")


@no_gpu
@pytest.mark.parametrize("name", ["warmup", "tune"])
def test_without_a_gpu_one_line_and_exit_2(command: Command, name: str) -> None:
    done = command(name, *LAYER)
    assert done.code == 2
    assert done.out == ""
    assert done.err.count("\n") == 1
    assert f"{name} needs a CUDA GPU: " in done.err
    assert ("--arch" in done.err) == (name == "warmup")


@needs_compiler
def test_warmup_for_a_named_architecture_compiles_once(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REPLAYSTATE_CACHE_DIR", str(tmp_path))
    small = ("warmup", *LAYER, "--key-dim", "12", "--value-dim", "10", "--max-query-len", "1", "--arch", "sm_90")
    first, second = command(*small), command(*small)
    assert (first.code, second.code) == (0, 0)
    stored = len(list(tmp_path.glob("*.cubin")))
    assert stored > 3
    assert first.out.startswith(f"compiled {stored} kernels for sm_90 into ")
    assert second.out.startswith("compiled 0 kernels for sm_90 into ")


@pytest.mark.parametrize("arch", ["sm_75", "90", "sm_x"])
def test_warmup_refuses_what_is_no_architecture(command: Command, arch: str) -> None:
    done = command("warmup", *LAYER, "--arch", arch)
    assert (done.code, done.out) == (2, "")
    assert f"--arch: expected sm_80 or a later one, got {arch}" in done.err


def test_rows_take_the_fastest_split_and_end_open() -> None:
    a, b = (1, 1, 1), (2, 1, 1)
    times = {32: {a: 4.0, b: 5.0}, 64: {a: 6.0, b: 7.0}, 256: {a: 20.0, b: 18.0}}
    assert tune.rows_of(times) == [[64, 1, 1, 1], [-1, 2, 1, 1]]


def test_candidates_fit_the_kernels() -> None:
    for lanes in (4, 8, 16):
        for splits in (False, True):
            for group in (1, 2, 3, 4):
                found = tune.candidates(lanes, splits, group)
                assert found
                for nhv, vs, cpw in found:
                    assert group % nhv == 0
                    assert 4 % (vs * cpw) == 0
                    assert not splits or cpw == 1


def test_a_written_table_is_the_one_that_steps_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = tmp_path / "mine" / "tuning.json"
    monkeypatch.setenv("REPLAYSTATE_TUNING", str(table))
    caches = fast._table, fast.split
    try:
        for cached in caches:
            cached.cache_clear()
        tune.write("sm_90/4", [[64, 1, 2, 1], [-1, 1, 4, 1]])
        assert tune.write("sm_90/8", [[-1, 2, 1, 1]]) == str(table)
        assert set(json.loads(table.read_text())) == {"sm_90/4", "sm_90/8"}
        assert fast.split("sm_90", 4, False, 64, 2) == (1, 2, 1)
        assert fast.split("sm_90", 4, False, 65, 2) == (1, 4, 1)
        assert fast.split("sm_90", 8, False, 65, 3) == (1, 1, 1), "two heads a block need an even head ratio"
    finally:
        for cached in caches:
            cached.cache_clear()


def test_tune_says_what_has_no_choice() -> None:
    f16 = torch.float16
    with pytest.raises(ArgumentError, match="nothing to tune for K=64, V=128, window 16, width 4"):
        tune.tune(GDNShape(1, 2, 64, 128), width=4, window=16, state_dtype=f16, ring_dtype=f16, io_dtype=f16)
