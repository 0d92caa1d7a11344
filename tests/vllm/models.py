"""The models of the engine tests: the trained tiny one, the same with an MTP head, and a random one with odd heads."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

TRAINED = Path(__file__).resolve().parents[2] / "examples" / "tiny_gdn" / "model"


def trained_with_mtp(folder: Path) -> Path:
    """The trained model with an MTP head that predicts the last token again: it passes the hidden state through.

    So drafts are accepted where the text repeats a byte (indentation), and rejected elsewhere.
    """
    return save(folder, *with_repeating_head(*_trained()))


def with_repeating_head(config: dict, weights: dict[str, torch.Tensor]) -> tuple[dict, dict[str, torch.Tensor]]:
    """Configuration and weights of a dense Qwen3.5 with an MTP head whose layer adds nothing."""
    hidden, last = config["hidden_size"], f"model.layers.{config['num_hidden_layers'] - 1}."
    head = {f"mtp.layers.0.{name.removeprefix(last)}": x for name, x in weights.items() if name.startswith(last)}
    for silent in ("mtp.layers.0.self_attn.o_proj.weight", "mtp.layers.0.mlp.down_proj.weight"):
        head[silent] = torch.zeros_like(head[silent])
    dtype = weights["model.norm.weight"].dtype
    head["mtp.fc.weight"] = torch.cat([torch.zeros(hidden, hidden), torch.eye(hidden)], 1).to(dtype)
    for norm in ("mtp.pre_fc_norm_hidden.weight", "mtp.pre_fc_norm_embedding.weight"):
        head[norm] = torch.zeros(hidden, dtype=dtype)  # these norms scale by 1 + weight
    head["mtp.norm.weight"] = weights["model.norm.weight"]
    return config | {"mtp_num_hidden_layers": 1}, weights | head


def random_odd_heads(folder: Path) -> Path:
    """Random weights, three value heads a key head, so that two shards hold 1 key and 3 value heads each."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(TRAINED)
    config.linear_num_value_heads = 6
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2 and "embed" not in name:
            torch.nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
        elif "embed" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    _tokenizer(folder)
    return folder


def _trained() -> tuple[dict, dict[str, torch.Tensor]]:
    return json.loads((TRAINED / "config.json").read_text()), load_file(TRAINED / "model.safetensors")


def save(folder: Path, config: dict, weights: dict[str, torch.Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: x.clone() for name, x in weights.items()}, folder / "model.safetensors", {"format": "pt"})
    _tokenizer(folder)
    return folder


def _tokenizer(folder: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TRAINED / name, folder / name)
