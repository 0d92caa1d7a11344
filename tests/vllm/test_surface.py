"""The surface of vLLM that the plugin touches, read from sources and not imported: the installed, and those of 0.33.

`make venv-vllm` puts the sources of 0.33 beside the installed 0.32. A line that fails here names what has changed; look
at what the plugin does with it before the line is changed.
"""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest

from .conftest import ROOT

GDN = "model_executor/layers/mamba/gdn/qwen_gdn_linear_attn.py"
BASE = "model_executor/layers/mamba/abstract.py"
BUILDER = "v1/attention/backends/gdn_attn.py"

# file: signatures ("Class.method(arguments)", "..." for more of them) and names that a class or module must have
SURFACE = {
    "plugins/__init__.py": ["load_general_plugins()", "DEFAULT_PLUGINS_GROUP"],
    "model_executor/custom_op.py": [
        "PluggableLayer.__new__(cls)",
        "PluggableLayer.register_oot(cls, _decorated_layer_cls, name)",
        "op_registry_oot",
    ],
    GDN: [
        "QwenGatedDeltaNetAttention.__init__(self, config, vllm_config, prefix, ...)",
        "QwenGatedDeltaNetAttention.get_state_shape(self)",
        "QwenGatedDeltaNetAttention.forward_cuda(self, hidden_states)",
        "QwenGatedDeltaNetAttention._forward_core(self, mixed_qkv, b, a, core_attn_out)",
        "qwen_gdn_attention_core(qkv_or_qkvz, b_or_ba, a_or_z_out, core_attn_out, layer_name, use_aiter)",
    ],
    "model_executor/layers/mamba/gdn/base.py": ["GatedDeltaNetAttention.get_state_dtype(self)"],
    BASE: [
        "MambaBase.bind_kv_cache(self, kv_cache)",
        "MambaBase.get_kv_cache_spec(self, vllm_config)",
        "MambaBase.get_attn_backend(self)",
    ],
    BUILDER: [
        "GDNAttentionBackend.get_builder_cls()",
        "GDNAttentionMetadataBuilder.__init__(self, kv_cache_spec, layer_names, vllm_config, device)",
        "GDNAttentionMetadataBuilder.build(self, common_prefix_len, common_attn_metadata, num_accepted_tokens, "
        "num_decode_draft_tokens_cpu, fast_build)",
        "GDNAttentionMetadataBuilder._cudagraph_support",
    ],
    "v1/attention/backend.py": [
        "AttentionCGSupport.NEVER",
        "CommonAttentionMetadata.query_start_loc",
        "CommonAttentionMetadata.query_start_loc_cpu",
        "CommonAttentionMetadata.seq_lens",
        "CommonAttentionMetadata.seq_lens_cpu_upper_bound",
        "CommonAttentionMetadata.block_table_tensor",
    ],
    "v1/kv_cache_interface.py": [
        "MambaSpec.shapes",
        "MambaSpec.dtypes",
        "MambaSpec.page_size_padded",
        "MambaSpec.mamba_cache_mode",
        "MambaSpec.num_speculative_blocks",
        "MambaSpec.num_prefill_checkpoint_blocks",
    ],
    "v1/worker/mamba_utils.py": [
        "preprocess_mamba(scheduler_output, kv_cache_config, cache_config, mamba_state_idx, ...)",
        "validate_mamba_state_copy_funcs(mamba_groups, copy_funcs)",
    ],
    "model_executor/layers/mamba/mamba_utils.py": [
        "is_conv_state_dim_first()",
        "MambaStateShapeCalculator.gated_delta_net_state_shape(cls, tp_world_size, num_k_heads, num_v_heads, "
        "head_k_dim, head_v_dim, conv_kernel_size, num_spec)",
    ],
    "model_executor/models/qwen3_next.py": [
        "Qwen3NextForCausalLM.get_mamba_state_shape_from_config(cls, vllm_config)",
        "Qwen3NextForCausalLM.get_mamba_state_dtype_from_config(cls, vllm_config)",
    ],
    "model_executor/models/qwen3_5.py": [
        "Qwen3_5ForCausalLMBase.get_mamba_state_shape_from_config(cls, vllm_config)",
        "Qwen3_5ForConditionalGeneration.get_mamba_state_shape_from_config(cls, vllm_config)",
        "Qwen3_5ForCausalLM",
        "Qwen3_5MoeForCausalLM",
        "Qwen3_5MoeForConditionalGeneration",
    ],
    "config/vllm.py": [
        "VllmConfig.__post_init__(self)",
        "VllmConfig.use_v2_model_runner(self)",
        "VllmConfig.additional_config",
        "VllmConfig.mamba_config",
        "VllmConfig.kv_transfer_config",
        "VllmConfig.lora_config",
    ],
    "config/cache.py": [
        "CacheConfig.mamba_cache_mode",
        "CacheConfig.use_replayssm",
        "CacheConfig.prefix_match_unit",
        "CacheConfig.enable_mamba_shared_prefix_checkpoint",
    ],
    "config/mamba.py": ["MambaConfig.enable_stochastic_rounding"],
    "config/parallel.py": [
        "ParallelConfig.pipeline_parallel_size",
        "ParallelConfig.data_parallel_size",
        "ParallelConfig.decode_context_parallel_size",
        "ParallelConfig.prefill_context_parallel_size",
        "ParallelConfig.use_ubatching(self)",
    ],
    "config/speculative.py": [
        "SpeculativeConfig.method",
        "SpeculativeConfig.num_speculative_tokens",
        "SpeculativeConfig.target_model_config",
        "SpeculativeConfig.draft_model_config",
    ],
    "model_executor/models/registry.py": ["_ModelRegistry.register_model(self, model_arch, model_cls)"],
}

# Lines that our code relies on, whatever is around them.
LINES = {
    GDN: [
        "self._forward_method = self.forward_cuda",
        "self.enable_fused_gdn_spec_decode = (",
        "return self._forward_method(hidden_states)",
        "torch.ops.vllm.qwen_gdn_attention_core(",
        "self.conv1d.weight.data = self.conv1d.weight.data.unsqueeze(1)",
    ],
    BASE: ["for shape, dtype in zip(self.get_state_shape(), self.get_state_dtype())"],
    # the states that are copied for a prefix hit may be fewer than the page has: conv inputs and checkpoint
    "v1/worker/mamba_utils.py": [
        "assert 0 < len(state_copy_funcs) <= len(mamba_spec.shapes)",
        "for state, state_copy_func in zip(kv_caches, state_copy_funcs)",
    ],
}


def sources() -> dict[str, Path | None]:
    installed = importlib.util.find_spec("vllm")
    unpacked = ROOT / ".venv-vllm" / "vllm-0.33" / "vllm"
    return {
        "installed": Path(installed.origin).parent if installed is not None and installed.origin else None,
        "0.33": unpacked if unpacked.is_dir() else None,
    }


@pytest.fixture(scope="module", params=["installed", "0.33"])
def vllm_sources(request: pytest.FixtureRequest) -> Path:
    found = sources()[request.param]
    if found is None:
        pytest.skip("these sources of vLLM are not here: make test-vllm")
    return found


def describe(path: Path) -> dict[str, list[str] | None]:
    """Of a source file: the arguments of each function and method, and None for each other name."""
    names: dict[str, list[str] | None] = {}

    def visit(body: list[ast.stmt], owner: str) -> None:
        for node in body:
            if isinstance(node, ast.FunctionDef):
                arguments = node.args
                names[owner + node.name] = [
                    a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
                ]
            elif isinstance(node, ast.ClassDef):
                names[owner + node.name] = None
                visit(node.body, f"{owner}{node.name}.")
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                names[owner + node.target.id] = None
            elif isinstance(node, ast.Assign):
                names.update({owner + target.id: None for target in node.targets if isinstance(target, ast.Name)})

    visit(ast.parse(path.read_text()).body, "")
    return names


@pytest.mark.parametrize("file", sorted(SURFACE))
def test_names_and_signatures(vllm_sources: Path, file: str) -> None:
    names = describe(vllm_sources / file)
    for entry in SURFACE[file]:
        name, is_function, arguments = entry.partition("(")
        assert name in names, f"{file}: no {name}"
        if is_function:
            expected = [a for a in arguments.rstrip(")").split(", ") if a]
            got = names[name]
            assert got is not None, f"{file}: {name} is no function"
            if expected[-1:] == ["..."]:
                assert got[: len(expected) - 1] == expected[:-1], f"{file}: {name}{tuple(got)}"
            else:
                assert got == expected, f"{file}: {name}{tuple(got)}"


@pytest.mark.parametrize("file", sorted(LINES))
def test_lines(vllm_sources: Path, file: str) -> None:
    text = " ".join((vllm_sources / file).read_text().split())
    for line in LINES[file]:
        assert line in text, f"{file}: {line}"


def test_no_release_has_the_adapter_yet(vllm_sources: Path) -> None:
    """When one has, `install_adapter` is to be tested against it, not only against a stand-in."""
    assert not (vllm_sources / "model_executor/layers/mamba/gdn/replayssm.py").exists()
