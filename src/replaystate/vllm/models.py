"""vLLM's models with our layer: pages are sized for checkpoint and rings. Importing this module swaps the layer.

The classes keep the names that checkpoints give.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.models import qwen3_5, qwen3_next

from .layer import page_dtypes, page_shapes, swap_layer

swap_layer()


class _ReplayPages:
    """The states of a page as the models announce them, before a layer exists: vLLM sizes its blocks by them."""

    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config: Any) -> tuple[tuple[int, ...], ...]:
        native = super().get_mamba_state_shape_from_config(vllm_config)  # type: ignore[misc]
        return page_shapes(native, _local_key_heads(vllm_config), vllm_config)

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: Any) -> tuple[torch.dtype, ...]:
        return page_dtypes(super().get_mamba_state_dtype_from_config(vllm_config), vllm_config)  # type: ignore[misc]


def _local_key_heads(vllm_config: Any) -> int:
    heads: int = vllm_config.model_config.hf_text_config.linear_num_key_heads
    return heads // int(vllm_config.parallel_config.tensor_parallel_size)


class Qwen3NextForCausalLM(_ReplayPages, qwen3_next.Qwen3NextForCausalLM):
    """vLLM's, with replay pages."""


class Qwen3_5ForCausalLM(_ReplayPages, qwen3_5.Qwen3_5ForCausalLM):  # noqa: N801
    """vLLM's, with replay pages."""


class Qwen3_5MoeForCausalLM(_ReplayPages, qwen3_5.Qwen3_5MoeForCausalLM):  # noqa: N801
    """vLLM's, with replay pages."""


class Qwen3_5ForConditionalGeneration(_ReplayPages, qwen3_5.Qwen3_5ForConditionalGeneration):  # noqa: N801
    """vLLM's, with replay pages."""


class Qwen3_5MoeForConditionalGeneration(_ReplayPages, qwen3_5.Qwen3_5MoeForConditionalGeneration):  # noqa: N801
    """vLLM's, with replay pages."""
