"""Options, and what is refused at start: on a stand-in configuration, and by a real vLLM as it makes its own."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from replaystate.errors import ArgumentError, UnsupportedModelError
from replaystate.vllm.settings import ENVIRONMENT_VARIABLE, Settings, refuse_unsupported

from . import models
from .conftest import ROOT, plugin_environment


def configuration(options: Any = None, drafts: int = 0) -> SimpleNamespace:
    """The parts of a VllmConfig that are read, of a combination that is supported."""
    return SimpleNamespace(
        additional_config={} if options is None else {"replaystate": options},
        speculative_config=SimpleNamespace(num_speculative_tokens=drafts, method="ngram") if drafts else None,
        model_config=SimpleNamespace(architecture="Qwen3_5ForCausalLM"),
        parallel_config=SimpleNamespace(
            pipeline_parallel_size=1, data_parallel_size=1, decode_context_parallel_size=1,
            prefill_context_parallel_size=1, use_ubatching=False,
        ),
        cache_config=SimpleNamespace(
            use_replayssm=False, mamba_cache_mode="none", prefix_match_unit=None,
            enable_mamba_shared_prefix_checkpoint=False,
        ),
        mamba_config=SimpleNamespace(enable_stochastic_rounding=False),
        kv_transfer_config=None,
        lora_config=None,
        use_v2_model_runner=False,
    )  # fmt: skip


@pytest.fixture(autouse=True)
def _no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENVIRONMENT_VARIABLE, raising=False)


def test_off_unless_asked_for() -> None:
    assert Settings.of(configuration()) is None


def test_defaults() -> None:
    settings = Settings.of(configuration({}, drafts=3))
    assert settings == Settings(window=16, max_query_len=4)
    assert settings.ring_slots == 32
    assert settings.dtypes(torch.float32) == (torch.float32, torch.float32)
    assert settings.dtypes(torch.bfloat16) == (torch.bfloat16, torch.float16)


def test_options_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, '{"window": 8, "state_dtype": "float16"}')
    settings = Settings.of(configuration(drafts=3))
    assert settings is not None
    assert (settings.window, settings.ring_slots) == (8, 16)
    assert settings.dtypes(torch.float32) == (torch.float16, torch.float16)
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "{window: 8}")
    with pytest.raises(ArgumentError, match=f"^{ENVIRONMENT_VARIABLE}: expected a JSON object"):
        Settings.of(configuration())


@pytest.mark.parametrize(
    ("options", "drafts", "message"),
    [
        (True, 0, "expected a JSON object, got True"),
        ({"windows": 16}, 0, "unknown option 'windows'; the options are window, state_dtype, ring_dtype"),
        ({"max_query_len": 2}, 0, "unknown option 'max_query_len'"),
        ({"window": 12}, 0, "window: expected a power of two, got 12"),
        ({"window": 2}, 3, "window=2 does not hold one step of 1 \\+ num_speculative_tokens=3 tokens"),
        ({"state_dtype": "fp8"}, 0, "state_dtype: expected one of float32, float16, bfloat16, got 'fp8'"),
        ({"ring_dtype": ["float16"]}, 0, "ring_dtype: expected one of float32, float16, bfloat16"),
    ],
)
def test_options_that_do_not_fit(options: Any, drafts: int, message: str) -> None:
    with pytest.raises(ArgumentError, match=rf"^additional_config\['replaystate'\].*{message}"):
        Settings.of(configuration(options, drafts))


def test_supported_configurations_pass() -> None:
    refuse_unsupported(configuration({}))
    refuse_unsupported(configuration({}, drafts=3))


@pytest.mark.parametrize(
    ("path", "value", "drafts", "name"),
    [
        ("parallel_config.pipeline_parallel_size", 2, 0, "pipeline_parallel_size=2"),
        ("parallel_config.data_parallel_size", 2, 0, "data_parallel_size=2"),
        ("parallel_config.decode_context_parallel_size", 2, 0, "context parallelism"),
        ("parallel_config.prefill_context_parallel_size", 2, 0, "context parallelism"),
        ("parallel_config.use_ubatching", True, 0, "microbatching"),
        ("kv_transfer_config", SimpleNamespace(kv_connector="NixlConnector"), 0, "a KV connector"),
        ("lora_config", object(), 0, "LoRA"),
        ("cache_config.use_replayssm", True, 0, "vLLM's own ReplaySSM"),
        ("cache_config.mamba_cache_mode", "all", 0, "mamba_cache_mode=all"),
        ("cache_config.mamba_cache_mode", "align", 3, "prefix caching together with speculative decoding"),
        ("cache_config.prefix_match_unit", 16, 0, "prefix_match_unit=16"),
        ("cache_config.enable_mamba_shared_prefix_checkpoint", True, 0, "enable_mamba_shared_prefix_checkpoint"),
        ("mamba_config.enable_stochastic_rounding", True, 0, "stochastic rounding"),
        ("speculative_config.method", "eagle3", 3, "speculative method 'eagle3' \\(supported: mtp, ngram\\)"),
        ("use_v2_model_runner", True, 0, "Model Runner V2"),
    ],
)
def test_refusals(path: str, value: Any, drafts: int, name: str) -> None:
    config = configuration({}, drafts)
    *parents, last = path.split(".")
    target = config
    for parent in parents:
        target = getattr(target, parent)
    setattr(target, last, value)
    with pytest.raises(ArgumentError, match=f"^replaystate.vllm: {name}.* is not supported"):
        refuse_unsupported(config)


def test_other_architectures_are_refused() -> None:
    config = configuration({})
    config.model_config.architecture = "LlamaForCausalLM"
    with pytest.raises(
        UnsupportedModelError, match="architecture LlamaForCausalLM is not supported; expected one of Qwen3"
    ):
        refuse_unsupported(config)


LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 64,
    "num_attention_heads": 1, "num_key_value_heads": 1, "num_hidden_layers": 1, "vocab_size": 264,
    "max_position_embeddings": 512, "torch_dtype": "float32",
}  # fmt: skip


@pytest.mark.vllm
@pytest.mark.timeout(300)
def test_a_real_vllm_refuses_as_it_is_configured(tmp_path: Path) -> None:
    """Before any engine starts: the same configurations pass without the plugin's option."""
    llama = tmp_path / "llama"
    models.save(llama, LLAMA, {"unused": torch.zeros(1)})
    on = {"additional_config": {"replaystate": {}}}
    ngram = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}}
    cases: list[tuple[dict[str, Any], str | None]] = [
        ({"enable_prefix_caching": False, **on}, None),
        ({"enable_prefix_caching": True, **on}, None),
        ({"enable_prefix_caching": False, **ngram, **on}, None),
        ({"model": str(llama), "max_model_len": 128}, None),
        ({"model": str(llama), "max_model_len": 128, **on}, "architecture LlamaForCausalLM is not supported"),
        ({"enable_prefix_caching": True, **ngram, **on}, "prefix caching together with speculative decoding"),
        ({"enable_prefix_caching": True, **ngram}, None),
        ({"pipeline_parallel_size": 2, **on}, "pipeline_parallel_size=2 is not supported"),
        (
            {"kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}, **on},
            "a KV connector (kv_transfer_config) is not supported",
        ),
        ({"additional_config": {"replaystate": {"window": 2}}, "enable_prefix_caching": False, **ngram}, "window=2"),
        ({"additional_config": {"replaystate": {"windows": 2}}}, "unknown option 'windows'"),
    ]
    base = {"model": str(models.TRAINED), "dtype": "float32", "max_model_len": 512, "enforce_eager": True}
    jobs = [{"engine": copy.deepcopy(base | engine)} for engine, _ in cases]
    (tmp_path / "cases.json").write_text(json.dumps(jobs))
    command = [
        sys.executable,
        "-m",
        "tests.vllm.configure",
        str(tmp_path / "cases.json"),
        str(tmp_path / "results.json"),
    ]
    ended = subprocess.run(command, env=plugin_environment(tmp_path), cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[-3000:]
    results = json.loads((tmp_path / "results.json").read_text())
    for (engine, expected), got in zip(cases, results, strict=True):
        if expected is None:
            assert got is None, (engine, got)
        else:
            assert expected in (got or ""), (engine, got)
