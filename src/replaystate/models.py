"""Sizes of whole models with Gated DeltaNet layers: a table of published ones, any `config.json`, and their TP shards.

Nothing is downloaded: the table is data in this file, each row with the address of the config that it repeats and what
it was checked against; other models are read from a local `config.json`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from .checks import parse_json
from .errors import ArgumentError, UnsupportedModelError
from .shapes import GDNShape, require_int

FULL_ATTENTION_INTERVAL = 4
"""Every how manyth layer is full attention where a config does not say: the default of both model families."""


@dataclass(frozen=True)
class Experts:
    """Sizes of a mixture-of-experts block.

    Args:
        num_experts: routed experts of a layer.
        num_experts_per_tok: those that a token visits.
        moe_intermediate_size: inner width of a routed expert.
        shared_expert_intermediate_size: inner width of the expert that every token visits; 0: there is none.
    """

    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    shared_expert_intermediate_size: int


@dataclass(frozen=True)
class Parameters:
    """Counts of a model's elements, or of one shard's, by how a decode step reads them.

    Args:
        embedding: the input embedding, of which a step reads a row per token; 0 where it is tied to the output head.
        dense: what every step reads whole: mixers, norms, routers, shared experts, dense MLPs, and the output head.
        expert: one routed expert of one layer.
        routed: how many such experts there are, over all layers.
    """

    embedding: int
    dense: int
    expert: int
    routed: int

    @property
    def total(self) -> int:
        """All of them, as the model's name counts them."""
        return self.embedding + self.dense + self.expert * self.routed


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a hybrid decoder: Gated DeltaNet layers, full-attention layers, dense MLPs or experts.

    Args:
        name: of the model; a shard's has "/tpN" at its end.
        gdn: heads of a Gated DeltaNet layer.
        num_gdn_layers: how many of them.
        num_attention_layers: layers of full attention, whose KV cache grows with the context.
        hidden_size: width of the residual stream.
        num_attention_heads, num_key_value_heads, head_dim: of a full-attention layer.
        vocab_size: rows of the embedding.
        conv_kernel: taps of the causal convolution; its state holds one column fewer.
        intermediate_size: inner width of the dense MLP; 0 beside experts.
        experts: sizes of the mixture of experts, or None.
        tie_word_embeddings: the output head is the embedding.
        source: address of the published config.
        checked: what the numbers were compared with, and when.

    >>> model = MODELS["Qwen3.5-27B"]
    >>> model.num_gdn_layers, model.gdn.num_v_heads, model.shard(4).gdn.num_v_heads
    (48, 48, 12)
    """

    name: str
    gdn: GDNShape
    num_gdn_layers: int
    num_attention_layers: int
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    conv_kernel: int = 4
    intermediate_size: int = 0
    experts: Experts | None = None
    tie_word_embeddings: bool = False
    source: str = field(default="", compare=False)
    checked: str = field(default="", compare=False)

    def shard(self, tp: int) -> ModelShape:
        """The part of the model that one of `tp` tensor-parallel devices holds.

        Heads, MLP widths (of every expert), and the vocabulary are split; the residual stream, norms and routers are
        whole on each device, and so is a KV head where there are fewer of them than devices.

        Raises:
            ArgumentError: tp below 1, or heads or widths that tp does not divide.
        """
        require_int("shard", "tp", tp, minimum=1)
        if tp == 1:
            return self
        H, HV, K, V = self.gdn.sizes
        experts = self.experts
        sizes = {
            "linear_num_key_heads": H,
            "linear_num_value_heads": HV,
            "num_attention_heads": self.num_attention_heads,
            "intermediate_size": self.intermediate_size,
            "moe_intermediate_size": experts.moe_intermediate_size if experts else 0,
            "shared_expert_intermediate_size": experts.shared_expert_intermediate_size if experts else 0,
        }
        for name, size in sizes.items():
            if size % tp:
                raise ArgumentError(f"shard: tp: expected a divisor of {name}={size} of {self.name}, got {tp}")
        kv_heads = self.num_key_value_heads
        if kv_heads % tp and tp % kv_heads:
            raise ArgumentError(
                f"shard: tp: expected a divisor or multiple of num_key_value_heads={kv_heads} of {self.name}, got {tp}"
            )
        return replace(
            self,
            name=f"{self.name}/tp{tp}",
            gdn=GDNShape(H // tp, HV // tp, K, V),
            num_attention_heads=self.num_attention_heads // tp,
            num_key_value_heads=max(1, kv_heads // tp),
            vocab_size=-(-self.vocab_size // tp),
            intermediate_size=self.intermediate_size // tp,
            experts=experts
            and Experts(
                experts.num_experts,
                experts.num_experts_per_tok,
                experts.moe_intermediate_size // tp,
                experts.shared_expert_intermediate_size // tp,
            ),
        )

    @property
    def num_layers(self) -> int:
        """Layers of both kinds."""
        return self.num_gdn_layers + self.num_attention_layers

    @property
    def parameters(self) -> Parameters:
        """Element counts, from the layers as transformers builds them; vision tower and MTP head not counted.

        >>> f"{MODELS['Qwen3.5-397B-A17B'].parameters.total / 1e9:.1f} billion"
        '396.3 billion'
        """
        H, HV, K, V = self.gdn.sizes
        hidden, heads, kv_heads, dim = (
            self.hidden_size,
            self.num_attention_heads,
            self.num_key_value_heads,
            self.head_dim,
        )
        conv = self.gdn.qkv_dim * self.conv_kernel
        gdn_layer = hidden * (self.gdn.qkv_dim + HV * V + 2 * HV) + conv + 2 * HV + V + HV * V * hidden
        # The query projection makes the output gate too, hence 2 heads; the q and k norms have head_dim each.
        attention_layer = hidden * dim * (2 * heads + 2 * kv_heads) + heads * dim * hidden + 2 * dim
        layer = 2 * hidden  # its two norms
        expert = routed = 0
        if self.experts is None:
            layer += 3 * hidden * self.intermediate_size
        else:
            e = self.experts
            expert, routed = 3 * hidden * e.moe_intermediate_size, e.num_experts * self.num_layers
            layer += hidden * e.num_experts + 3 * hidden * e.shared_expert_intermediate_size
            layer += hidden if e.shared_expert_intermediate_size else 0  # the shared expert's gate
        table = self.vocab_size * hidden
        dense = (
            self.num_gdn_layers * gdn_layer
            + self.num_attention_layers * attention_layer
            + self.num_layers * layer
            + hidden
            + table
        )
        return Parameters(0 if self.tie_word_embeddings else table, dense, expert, routed)


def from_config(config: Mapping[str, Any], name: str) -> ModelShape:
    """Sizes from the content of a `config.json` of Qwen3-Next, Qwen3.5 or their MoE kin.

    Args:
        config: the JSON object; that of a vision model holds the decoder's under "text_config".
        name: what to call the model.

    Raises:
        ArgumentError: a size that is missing, no integer, or below 1; no object at all.
        UnsupportedModelError: no Gated DeltaNet layer, or a layer of a kind that is unknown here.

    >>> tiny = Path("examples/tiny_gdn/model/config.json")
    >>> from_config(parse_json(tiny.read_text()), "tiny").num_gdn_layers
    3
    """
    if not isinstance(config, Mapping):
        raise ArgumentError(f"{name}: expected a JSON object with the model's sizes, got {type(config).__name__}")
    text = config.get("text_config", config)
    if not isinstance(text, Mapping):
        raise ArgumentError(f"{name}: text_config: expected a JSON object, got {type(text).__name__}")
    if "linear_num_value_heads" not in text:
        raise UnsupportedModelError(
            f"{name}: no linear_num_value_heads in the config: expected a model with Gated DeltaNet layers "
            f"(Qwen3-Next, Qwen3.5), got model_type {text.get('model_type')!r}"
        )

    def size(key: str, default: int | None = None, minimum: int = 1) -> int:
        value = text.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise ArgumentError(f"{name}: {key}: expected an integer of at least {minimum}, got {value!r}")
        return value

    layers = size("num_hidden_layers")
    kinds = text.get("layer_types")
    if kinds is None:
        interval = size("full_attention_interval", FULL_ATTENTION_INTERVAL)
        kinds = ["full_attention" if (i + 1) % interval == 0 else "linear_attention" for i in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise ArgumentError(f"{name}: layer_types: expected a list of num_hidden_layers={layers} names")
    unknown = sorted({str(kind) for kind in kinds} - {"full_attention", "linear_attention"})
    if unknown:
        raise UnsupportedModelError(f"{name}: layer_types: unknown here: {', '.join(unknown)}")
    gdn_layers = kinds.count("linear_attention")
    if not gdn_layers:
        raise UnsupportedModelError(f"{name}: layer_types: no linear_attention layer, so nothing to replay")
    heads = size("num_attention_heads")
    hidden = size("hidden_size")
    experts = None
    if text.get("num_experts"):
        experts = Experts(
            size("num_experts"),
            size("num_experts_per_tok"),
            size("moe_intermediate_size"),
            size("shared_expert_intermediate_size", 0, minimum=0),
        )
        if experts.num_experts_per_tok > experts.num_experts:
            raise ArgumentError(f"{name}: num_experts_per_tok: expected at most num_experts={experts.num_experts}")
        if text.get("mlp_only_layers") or size("decoder_sparse_step", 1) != 1:
            raise UnsupportedModelError(f"{name}: a mixture of dense and expert layers is unknown here")
    try:
        gdn = GDNShape(
            size("linear_num_key_heads"),
            size("linear_num_value_heads"),
            size("linear_key_head_dim"),
            size("linear_value_head_dim"),
        )
    except ArgumentError as error:
        raise ArgumentError(str(error).replace("GDNShape", name)) from error
    return ModelShape(
        name=name,
        gdn=gdn,
        num_gdn_layers=gdn_layers,
        num_attention_layers=layers - gdn_layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=size("num_key_value_heads", heads),
        head_dim=size("head_dim", max(1, hidden // heads)),
        vocab_size=size("vocab_size"),
        conv_kernel=size("linear_conv_kernel_dim", 4),
        intermediate_size=0 if experts else size("intermediate_size"),
        experts=experts,
        tie_word_embeddings=bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))),
        source=name,
    )


def load_model_shape(name_or_path: str) -> ModelShape:
    """A model of the table by name (case does not matter), else a `config.json` or the folder that holds one.

    Raises:
        ArgumentError: neither a known name nor a file that can be read; broken JSON; a broken size.
        UnsupportedModelError: a model without Gated DeltaNet layers.

    >>> load_model_shape("qwen3.5-4b").name
    'Qwen3.5-4B'
    """
    for name, model in MODELS.items():
        if name_or_path.lower() in (name.lower(), f"qwen/{name}".lower()):
            return model
    path = Path(name_or_path)
    try:
        path = path / "config.json" if path.is_dir() else path
        config = parse_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ArgumentError(
            f"model: expected a name ({', '.join(MODELS)}) or a config.json, got {name_or_path!r}: no such file"
        ) from None
    except OSError as error:
        raise ArgumentError(f"model: {path}: {error.strerror or error}") from None
    except ValueError as error:
        raise ArgumentError(f"model: {path}: not JSON: {error}") from None
    return from_config(config, str(path))


def _card(name: str) -> str:
    return f"https://huggingface.co/Qwen/{name}/blob/main/config.json"


def _qwen(name: str, checked: str, **sizes: Any) -> ModelShape:
    value_heads, layers = sizes.pop("value_heads"), sizes.pop("layers")
    return ModelShape(
        name=name,
        gdn=GDNShape(16, value_heads, 128, 128),
        num_gdn_layers=layers - layers // FULL_ATTENTION_INTERVAL,
        num_attention_layers=layers // FULL_ATTENTION_INTERVAL,
        head_dim=256,
        source=_card(name if name != "Qwen3-Next-80B-A3B" else "Qwen3-Next-80B-A3B-Instruct"),
        checked=checked,
        **sizes,
    )


# The published files themselves were out of reach when this table was written. `checked` says what public text repeats
# each row's numbers; the tests also compare the parameter counts that follow with those in the models' names.
MODELS: dict[str, ModelShape] = {
    model.name: model
    for model in (
        _qwen(
            "Qwen3.5-4B",
            "2026-12-01: config.json of a fine-tune (huggingface.co/halen214/st01) for the layers, and a public test "
            "that repeats the config for attention heads, vocabulary and tied embeddings",
            value_heads=32,
            layers=32,
            hidden_size=2560,
            num_attention_heads=16,
            num_key_value_heads=4,
            vocab_size=248320,
            intermediate_size=9216,
            tie_word_embeddings=True,
        ),
        _qwen(
            "Qwen3.5-27B",
            "2026-12-01: config.json of a fine-tune (huggingface.co/EclipseMist/hababa), and public code with the "
            "whole text config",
            value_heads=48,
            layers=64,
            hidden_size=5120,
            num_attention_heads=24,
            num_key_value_heads=4,
            vocab_size=248320,
            intermediate_size=17408,
        ),
        _qwen(
            "Qwen3.5-35B-A3B",
            "2026-12-01: the defaults of Qwen3_5MoeTextConfig in transformers 5.19, and the card of Qwen3.6-35B-A3B, "
            "which has the same architecture",
            value_heads=32,
            layers=40,
            hidden_size=2048,
            num_attention_heads=16,
            num_key_value_heads=2,
            vocab_size=248320,
            experts=Experts(256, 8, 512, 512),
        ),
        _qwen(
            "Qwen3.5-122B-A10B",
            "2026-12-01: public code that checks the published config field by field, and the card of a quantisation "
            "(olka-fi/Qwen3.5-122B-A10B-MXFP4) for experts and vocabulary",
            value_heads=64,
            layers=48,
            hidden_size=3072,
            num_attention_heads=32,
            num_key_value_heads=2,
            vocab_size=248320,
            experts=Experts(256, 8, 1024, 1024),
        ),
        _qwen(
            "Qwen3.5-397B-A17B",
            "2026-12-01: apxml.com/models/qwen35-397b-a17b, and public code with the whole text config",
            value_heads=64,
            layers=60,
            hidden_size=4096,
            num_attention_heads=32,
            num_key_value_heads=2,
            vocab_size=248320,
            experts=Experts(512, 10, 1024, 1024),
        ),
        _qwen(
            "Qwen3-Next-80B-A3B",
            "2026-12-01: the model card as lmstudio.ai/models/qwen3-next repeats it; shared expert and vocabulary from "
            "the defaults of Qwen3NextConfig in transformers 5.19",
            value_heads=32,
            layers=48,
            hidden_size=2048,
            num_attention_heads=16,
            num_key_value_heads=2,
            vocab_size=151936,
            experts=Experts(512, 10, 512, 512),
        ),
    )
}
"""Published models by name."""
