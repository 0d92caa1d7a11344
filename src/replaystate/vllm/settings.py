"""What a user may set, and what is refused at start, by name."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, fields
from typing import Any

import torch

from ..errors import ArgumentError, UnsupportedModelError
from ..pool import default_ring_dtype
from ..shapes import check_window, ring_slots_for

PLUGIN_NAME = "replaystate"
"""Name of the entry point, and the key in vLLM's `--additional-config`."""

ENVIRONMENT_VARIABLE = "REPLAYSTATE_VLLM"
"""A JSON object with the same options, where `--additional-config` cannot be given."""

ADAPTER_VARIABLE = "REPLAYSTATE_VLLM_ADAPTER"
"""1: call `install_adapter` in every process."""

ARCHITECTURES = (
    "Qwen3NextForCausalLM",
    "Qwen3_5ForCausalLM",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForCausalLM",
    "Qwen3_5MoeForConditionalGeneration",
)
DRAFT_METHODS = ("mtp", "ngram")
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Settings:
    """The plugin's options, checked against vLLM's configuration.

    Args:
        window: W, rows that a request may hold before they are folded into its checkpoint; a power of two.
        state_dtype: of the checkpoints. None: vLLM's own (`--mamba-ssm-cache-dtype`).
        ring_dtype: of the key and correction rings. None: float32 beside float32 states, else float16.
        max_query_len: T, 1 + drafts; from vLLM, not an option.
    """

    window: int = 16
    state_dtype: torch.dtype | None = None
    ring_dtype: torch.dtype | None = None
    max_query_len: int = 1

    @property
    def ring_slots(self) -> int:
        """R."""
        return ring_slots_for(self.window, self.max_query_len)

    def dtypes(self, vllm_state_dtype: torch.dtype) -> tuple[torch.dtype, torch.dtype]:
        """Dtypes of the checkpoints and of the rings, given the one that vLLM would have taken for its states."""
        state = self.state_dtype or vllm_state_dtype
        return state, self.ring_dtype or default_ring_dtype(state)

    @classmethod
    def of(cls, vllm_config: Any) -> Settings | None:
        """The options that this configuration asks for; None where it does not ask for the plugin.

        Raises:
            ArgumentError: an option that is not one, or a value that does not fit.
        """
        options, source = _options(vllm_config)
        if options is None:
            return None
        known = [field.name for field in fields(cls) if field.name != "max_query_len"]
        if not isinstance(options, dict):
            raise ArgumentError(f"{source}: expected a JSON object, got {options!r}")
        for name in options:
            if name not in known:
                raise ArgumentError(f"{source}: unknown option {name!r}; the options are {', '.join(known)}")
        values = dict(options)
        for name in ("state_dtype", "ring_dtype"):
            if values.get(name) is not None:
                values[name] = _dtype(f"{source}: {name}", values[name])
        speculation = vllm_config.speculative_config
        drafts = 0 if speculation is None else speculation.num_speculative_tokens
        settings = cls(**values, max_query_len=1 + drafts)
        if isinstance(settings.window, int) and settings.window < settings.max_query_len:
            raise ArgumentError(
                f"{source}: window={settings.window} does not hold one step of 1 + num_speculative_tokens="
                f"{drafts} tokens: expected a window of at least {settings.max_query_len}"
            )
        check_window(source, settings.window, settings.max_query_len)
        return settings


def refuse_unsupported(vllm_config: Any) -> None:
    """Refuse, by name, what the plugin does not support; silent wrong tokens are the alternative.

    Raises:
        UnsupportedModelError: an architecture without GDN layers that the plugin knows.
        ArgumentError: a feature of vLLM that the plugin does not support.
    """
    model, parallel, cache = vllm_config.model_config, vllm_config.parallel_config, vllm_config.cache_config
    if model.architecture not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"replaystate.vllm: architecture {model.architecture} is not supported; expected one of "
            f"{', '.join(ARCHITECTURES)}"
        )
    speculation = vllm_config.speculative_config
    drafts = 0 if speculation is None else speculation.num_speculative_tokens
    transfer = vllm_config.kv_transfer_config
    refused = {
        f"pipeline_parallel_size={parallel.pipeline_parallel_size}": parallel.pipeline_parallel_size > 1,
        f"data_parallel_size={parallel.data_parallel_size}": parallel.data_parallel_size > 1,
        "context parallelism": parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1,
        "microbatching (enable_dbo, ubatch_size)": parallel.use_ubatching,
        "a KV connector (kv_transfer_config)": transfer is not None and transfer.kv_connector is not None,
        "LoRA": vllm_config.lora_config is not None,
        "vLLM's own ReplaySSM (use_replayssm)": cache.use_replayssm,
        "stochastic rounding of states": vllm_config.mamba_config.enable_stochastic_rounding,
        f"mamba_cache_mode={cache.mamba_cache_mode}": cache.mamba_cache_mode not in ("none", "align"),
        "prefix caching together with speculative decoding (set enable_prefix_caching=False)": bool(drafts)
        and cache.mamba_cache_mode != "none",
        f"prefix_match_unit={cache.prefix_match_unit}": cache.prefix_match_unit is not None,
        "enable_mamba_shared_prefix_checkpoint": cache.enable_mamba_shared_prefix_checkpoint,
        f"speculative method {getattr(speculation, 'method', None)!r} (supported: {', '.join(DRAFT_METHODS)})": bool(
            drafts
        )
        and speculation.method not in DRAFT_METHODS,
        "Model Runner V2 (set VLLM_USE_V2_MODEL_RUNNER=0)": vllm_config.use_v2_model_runner,
    }
    for name, present in refused.items():
        if present:
            raise ArgumentError(f"replaystate.vllm: {name} is not supported")


def _options(vllm_config: Any) -> tuple[Any, str]:
    additional = vllm_config.additional_config
    if isinstance(additional, dict) and additional.get(PLUGIN_NAME) is not None:
        return additional[PLUGIN_NAME], f"additional_config[{PLUGIN_NAME!r}]"
    text = os.environ.get(ENVIRONMENT_VARIABLE)
    if not text:
        return None, ""
    try:
        return json.loads(text), ENVIRONMENT_VARIABLE
    except json.JSONDecodeError as error:
        raise ArgumentError(f"{ENVIRONMENT_VARIABLE}: expected a JSON object, got {text!r} ({error})") from None


def _dtype(name: str, value: object) -> torch.dtype:
    if not isinstance(value, str) or value not in DTYPES:
        raise ArgumentError(f"{name}: expected one of {', '.join(DTYPES)}, got {value!r}")
    return DTYPES[value]
