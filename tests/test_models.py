"""Sizes of models: the table against the models' names, configs read from files, shards, and what is refused.

How this tests, in plain words: head counts are repeated here as literals; parameter counts are compared with
transformers' own modules (built without memory) and with the number in each model's name; a broken config must name the
broken field.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from replaystate.errors import ArgumentError, UnsupportedModelError
from replaystate.models import MODELS, ModelShape, from_config, load_model_shape

TINY = Path(__file__).parent.parent / "examples" / "tiny_gdn" / "model"

GOLDEN = {  # (GDN layers, attention layers, H, HV), (billions of parameters, billions that a token visits)
    "Qwen3.5-4B": ((24, 8, 16, 32), (4, 4)),
    "Qwen3.5-27B": ((48, 16, 16, 48), (27, 27)),
    "Qwen3.5-35B-A3B": ((30, 10, 16, 32), (35, 3)),
    "Qwen3.5-122B-A10B": ((36, 12, 16, 64), (122, 10)),
    "Qwen3.5-397B-A17B": ((45, 15, 16, 64), (397, 17)),
    "Qwen3-Next-80B-A3B": ((36, 12, 16, 32), (80, 3)),
}


def broken(**changes: Any) -> dict[str, Any]:
    config = json.loads((TINY / "config.json").read_text())
    config.update(changes)
    return {key: value for key, value in config.items() if value != "absent"}


@pytest.mark.parametrize("name", GOLDEN)
def test_head_and_layer_counts(name: str) -> None:
    model = MODELS[name]
    assert (model.num_gdn_layers, model.num_attention_layers, *model.gdn.sizes[:2]) == GOLDEN[name][0]
    assert model.gdn.sizes[2:] == (128, 128)
    assert model.source.startswith("https://")
    assert model.checked


def test_the_table_has_the_models_of_the_documentation() -> None:
    assert list(MODELS) == list(GOLDEN)


@pytest.mark.parametrize("name", GOLDEN)
def test_parameter_counts_are_those_in_the_name(name: str) -> None:
    """Without the vision tower and the MTP head, which the names leave out of or round into their numbers."""
    model = MODELS[name]
    total, active = (billions * 1e9 for billions in GOLDEN[name][1])
    parameters = model.parameters
    visited = parameters.embedding + parameters.dense
    if model.experts:
        visited += parameters.expert * model.experts.num_experts_per_tok * model.num_layers
    assert parameters.total == pytest.approx(total, rel=0.06)  # seen: at most 0.052, of the 4B
    assert visited == pytest.approx(active, rel=0.35)  # seen: 0.29, of Next: names round and leave tables out


def stock_parameters(config: Any, kind: type) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in kind(config).parameters())


def test_parameter_count_of_a_dense_model_is_transformers_own() -> None:
    from transformers import AutoConfig, Qwen3_5ForCausalLM

    model = load_model_shape(str(TINY))
    assert model.parameters.total == stock_parameters(AutoConfig.from_pretrained(TINY), Qwen3_5ForCausalLM)


@pytest.mark.parametrize("family", ["Qwen3Next", "Qwen3_5Moe"])
def test_parameter_count_of_experts_is_transformers_own(family: str) -> None:
    import transformers

    config_kind = getattr(transformers, {"Qwen3Next": "Qwen3NextConfig", "Qwen3_5Moe": "Qwen3_5MoeTextConfig"}[family])
    config = config_kind(
        hidden_size=96,
        num_hidden_layers=8,
        num_experts=12,
        num_experts_per_tok=3,
        moe_intermediate_size=40,
        shared_expert_intermediate_size=56,
        linear_num_key_heads=2,
        linear_num_value_heads=6,
        linear_key_head_dim=16,
        linear_value_head_dim=24,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        vocab_size=500,
    )
    model = from_config(config.to_dict(), "made up")
    assert model.num_gdn_layers == 6
    assert model.parameters.total == stock_parameters(config, getattr(transformers, f"{family}ForCausalLM"))


@pytest.mark.parametrize("name", GOLDEN)
@pytest.mark.parametrize("tp", [2, 4, 8])
def test_a_shard_holds_its_part(name: str, tp: int) -> None:
    whole, part = MODELS[name], MODELS[name].shard(tp)
    assert part.name == f"{name}/tp{tp}"
    assert part.gdn.sizes == (16 // tp, whole.gdn.num_v_heads // tp, 128, 128)
    assert part.num_key_value_heads == max(1, whole.num_key_value_heads // tp)
    assert part.parameters.expert * tp == whole.parameters.expert
    assert whole.parameters.total <= part.parameters.total * tp < 1.02 * whole.parameters.total


def test_tp1_is_the_model() -> None:
    model = MODELS["Qwen3.5-4B"]
    assert model.shard(1) is model


@pytest.mark.parametrize(("name", "tp"), [("Qwen3.5-27B", 16), ("Qwen3.5-4B", 3), ("Qwen3.5-4B", 0)])
def test_a_split_that_does_not_come_out_even(name: str, tp: int) -> None:
    with pytest.raises(ArgumentError, match="tp"):
        MODELS[name].shard(tp)


def test_names_and_paths(tmp_path: Path) -> None:
    assert load_model_shape("Qwen/qwen3.5-27b") is MODELS["Qwen3.5-27B"]
    by_folder, by_file = load_model_shape(str(TINY)), load_model_shape(str(TINY / "config.json"))
    assert by_folder == by_file
    assert by_folder.gdn.sizes == (2, 4, 64, 64)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_5", "text_config": broken()}))
    nested = load_model_shape(str(tmp_path))
    assert nested.parameters == by_folder.parameters


def test_layers_by_interval_where_the_config_lists_none() -> None:
    model = from_config(broken(layer_types="absent", full_attention_interval=2), "m")
    assert (model.num_gdn_layers, model.num_attention_layers) == (2, 2)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"num_hidden_layers": 5}, "layer_types"),
        ({"hidden_size": -1}, "hidden_size"),
        ({"hidden_size": "wide"}, "hidden_size"),
        ({"vocab_size": True}, "vocab_size"),
        ({"linear_num_value_heads": 3}, "num_v_heads"),
        ({"intermediate_size": "absent"}, "intermediate_size"),
        ({"num_experts": 4, "num_experts_per_tok": 8, "moe_intermediate_size": 8}, "num_experts_per_tok"),
        ({"text_config": 3}, "text_config"),
    ],
    ids=str,
)
def test_a_broken_config_names_the_field(changes: dict[str, Any], word: str) -> None:
    with pytest.raises(ArgumentError, match=word):
        from_config(broken(**changes), "m")


@pytest.mark.parametrize(
    "changes",
    [
        {"linear_num_value_heads": "absent"},
        {"layer_types": ["full_attention"] * 4},
        {"layer_types": ["linear_attention"] * 3 + ["sliding_attention"]},
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "mlp_only_layers": [0]},
    ],
    ids=str,
)
def test_models_that_are_not_supported(changes: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModelError):
        from_config(broken(**changes), "m")


@pytest.mark.parametrize("text", ["", "{", "[1]", "null"])
def test_files_that_hold_no_config(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ArgumentError):
        load_model_shape(str(tmp_path))


def test_a_name_that_is_nothing() -> None:
    with pytest.raises(ArgumentError, match=r"Qwen3\.5-4B.*no such file"):
        load_model_shape("Qwen9")
    assert isinstance(load_model_shape("Qwen3.5-4B"), ModelShape)
