"""Engines of the session: each is started once, in a process of its own, and its results are shared by the tests."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from . import models, workloads

ROOT = Path(__file__).resolve().parents[2]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the engine tests where vLLM is not installed: they run in `.venv-vllm`, by `make test-vllm`."""
    if importlib.util.find_spec("vllm") is None:
        for item in items:
            if item.get_closest_marker("vllm"):
                item.add_marker(pytest.mark.skip(reason="vLLM is not installed here: make test-vllm"))


def plugin_environment(folder: Path, *, one_process: bool = True) -> dict[str, str]:
    """The environment of an engine, with our entry point as pyproject.toml declares it: nothing has to be installed."""
    import tomllib

    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    info = folder / "site" / "replaystate_under_test-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: replaystate-under-test\nVersion: 0\n")
    lines = [f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in names.items()) for group, names in groups.items()]
    (info / "entry_points.txt").write_text("\n".join(lines))
    paths = [str(ROOT / "src"), str(info.parent), str(ROOT)]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        "VLLM_PLUGINS": "replaystate",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # its default asks for a NUMA node per process
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if one_process else "1",
    }


class Engines:
    """Starts engines and keeps count."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.starts = 0

    def command(self, name: str, batches: list[list[dict]], engine: dict[str, Any]) -> tuple[list[str], Path]:
        """The command line of a job, and where its result will be."""
        job, result = self.folder / f"{name}.job.json", self.folder / f"{name}.json"
        defaults = {
            "enforce_eager": True, "max_num_seqs": 8, "seed": 0, "disable_log_stats": False,
            "kv_cache_memory_bytes": 32 << 20,
        }  # fmt: skip
        job.write_text(json.dumps({"engine": defaults | engine, "batches": batches}))
        self.starts += 1
        return [sys.executable, "-m", "tests.vllm.engine", str(job), str(result)], result

    def run(self, name: str, batches: list[list[dict]], **engine: Any) -> dict[str, Any]:
        """Run a job to its end."""
        command, result = self.command(name, batches, {"distributed_executor_backend": "uni"} | engine)
        log = self.folder / f"{name}.log"
        with log.open("w") as out:
            ended = subprocess.run(command, env=plugin_environment(self.folder), stdout=out, stderr=out, cwd=ROOT)
        assert ended.returncode == 0, log.read_text()[-4000:]
        return json.loads(result.read_text()) | {"log": log.read_text()}

    def run_and_kill(self, name: str, batches: list[list[dict]], **engine: Any) -> dict[str, Any]:
        """Run all batches but the last, then kill every process of the engine in the middle of the last."""
        command, result = self.command(name, batches, engine)
        log, progress = self.folder / f"{name}.log", result.with_suffix(".progress")
        with log.open("w") as out:
            process = subprocess.Popen(
                command, env=plugin_environment(self.folder, one_process=False), stdout=out, stderr=out, cwd=ROOT,
                start_new_session=True,
            )  # fmt: skip
            finished: list[Any] = []
            deadline = time.monotonic() + 400
            while len(finished) < len(batches) - 1 and process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.2)
                if progress.exists():
                    finished = json.loads(progress.read_text())
            ended = process.poll()
            if ended is None:
                time.sleep(1)
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        assert ended is None, log.read_text()[-4000:]
        assert len(finished) == len(batches) - 1, log.read_text()[-4000:]
        return {"batches": finished, "log": log.read_text()}


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Engines:
    """The session's engines."""
    return Engines(tmp_path_factory.mktemp("vllm"))


class Stock:
    """Greedy decoding of the same weights by stock transformers in float32: the oracle of the float32 engines."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.inference_mode()
    def continue_(self, prompt: list[int], tokens: int) -> list[int]:
        """The next tokens."""
        out = self.model(torch.tensor([prompt]), use_cache=True)
        chosen = [int(out.logits[0, -1].argmax())]
        while len(chosen) < tokens:
            out = self.model(torch.tensor([chosen[-1:]]), past_key_values=out.past_key_values, use_cache=True)
            chosen.append(int(out.logits[0, -1].argmax()))
        return chosen

    @torch.inference_mode()
    def logprobs(self, prompt: list[int], tokens: list[int]) -> list[float]:
        """Of these tokens after this prompt, teacher-forced."""
        logits = self.model(torch.tensor([prompt + tokens])).logits[0].log_softmax(-1)
        return [float(logits[len(prompt) - 1 + i, token]) for i, token in enumerate(tokens)]


@pytest.fixture(scope="session")
def stock() -> Stock:
    """Stock transformers with the trained model."""
    return Stock(models.TRAINED)


REPLAY = {"additional_config": {"replaystate": {}}}
# A retention interval of one block keeps every boundary, also those that decoding passes; the default keeps prompts'.
CACHING = {"enable_prefix_caching": True, "block_size": 256, "prefix_cache_retention_interval": 256}
NGRAM = {
    "speculative_config": {
        "method": "ngram", "num_speculative_tokens": workloads.DRAFTS, "prompt_lookup_max": 4, "prompt_lookup_min": 1,
    },
    "enable_prefix_caching": False,
}  # fmt: skip
MTP = {
    "speculative_config": {"method": "mtp", "num_speculative_tokens": workloads.DRAFTS},
    "enable_prefix_caching": False,
}


@pytest.fixture(scope="session")
def odd_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a random model, 1 key and 3 value heads in each of two shards."""
    return models.random_odd_heads(tmp_path_factory.mktemp("model") / "odd")


@pytest.fixture(scope="session")
def sharded(engines: Engines, odd_model: Path) -> dict[str, Any]:
    """Ours, float32, ngram drafts, two tensor-parallel processes; killed in the middle of its second batch."""
    endless = [request | {"max_tokens": 400} for request in workloads.plain(8)]
    return engines.run_and_kill(
        "sharded", [workloads.plain(6, 30), endless], model=str(odd_model), dtype="float32", max_model_len=1024,
        tensor_parallel_size=2, **REPLAY, **NGRAM,
    )  # fmt: skip


@pytest.fixture(scope="session")
def drafted(engines: Engines, sharded: dict[str, Any]) -> dict[str, Any]:
    """Ours, float32, ngram drafts, chunked prefill, aborts, and too few blocks for all requests.

    It starts after another engine was killed (`sharded`).
    """
    return engines.run(
        "drafted", [workloads.mixed()], model=str(models.TRAINED), dtype="float32", max_model_len=512,
        max_num_batched_tokens=workloads.CHUNK, num_gpu_blocks_override=26, **REPLAY, **NGRAM,
    )  # fmt: skip


@pytest.fixture(scope="session")
def cached(engines: Engines) -> dict[str, Any]:
    """Ours, float32, no drafts, prefix caching."""
    return engines.run(
        "cached", workloads.shared_prefixes(), model=str(models.TRAINED), dtype="float32", max_model_len=1024,
        **CACHING, **REPLAY,
    )  # fmt: skip


@pytest.fixture(scope="session")
def mtp_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of the trained model with an MTP head."""
    return str(models.trained_with_mtp(tmp_path_factory.mktemp("model") / "mtp"))


@pytest.fixture(scope="session")
def native_plain(engines: Engines, mtp_model: str) -> dict[str, Any]:
    """vLLM's own path, bfloat16, no drafts, prefix caching."""
    batches = [*workloads.shared_prefixes(), workloads.plain()]
    return engines.run(
        "native-plain", batches, model=mtp_model, dtype="bfloat16", max_model_len=1024, **CACHING
    )  # fmt: skip


@pytest.fixture(scope="session")
def native_mtp(engines: Engines, mtp_model: str) -> dict[str, Any]:
    """vLLM's own path, bfloat16, MTP drafts."""
    return engines.run(
        "native-mtp", [workloads.plain()], model=mtp_model, dtype="bfloat16", max_model_len=512, **MTP
    )  # fmt: skip


@pytest.fixture(scope="session")
def replay_mtp(engines: Engines, mtp_model: str) -> dict[str, Any]:
    """Ours, bfloat16, MTP drafts."""
    return engines.run(
        "replay-mtp", [workloads.plain()], model=mtp_model, dtype="bfloat16", max_model_len=512, **REPLAY, **MTP
    )  # fmt: skip
