"""Tiny random models in which the Gated DeltaNet layers matter.

With the usual small init their output is dwarfed by the residual stream, and greedy tokens hardly notice a wrong
state. Here the matrices are scaled up and the decay is slow, so that the next token depends on tokens of long ago;
the tests that break the rollback on purpose show it. The small vocabulary makes some drafts right by chance and most
of them wrong.
"""

import inspect

import torch
from torch import nn
from transformers import (
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

VOCAB = 10
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,  # three Gated DeltaNet layers, then one of full attention
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": None,  # or generate takes a 0 in the text for padding
    "tie_word_embeddings": False,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
}
KINDS = ("qwen3_next", "qwen3_next_moe", "qwen3_5", "qwen3_5_moe")


def make_model(kind: str = "qwen3_next", seed: int = 0, scale: float = 8.0, **sizes: object) -> nn.Module:
    torch.manual_seed(seed)
    sizes = SIZES | sizes
    if kind == "qwen3_next":
        dense = {"num_experts": 0, "mlp_only_layers": list(range(int(sizes["num_hidden_layers"])))}
        model = Qwen3NextForCausalLM(Qwen3NextConfig(**dense, **sizes))
    elif kind == "qwen3_next_moe":
        model = Qwen3NextForCausalLM(Qwen3NextConfig(**EXPERTS, **sizes))
    elif kind == "qwen3_5":
        model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**sizes))
    else:
        model = Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(**EXPERTS, **sizes))
    return scaled(model, scale)


def scaled(model: nn.Module, scale: float) -> nn.Module:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.fill_(-2.0)  # g = -0.13 softplus(a + 1): a state is remembered for tens of tokens
            elif "conv1d" in name:
                parameter.mul_(3.0)
            elif parameter.dim() >= 2:
                parameter.mul_(scale)
    return model.eval()


def noisy_copy(model: nn.Module, noise: float = 0.15, seed: int = 1) -> nn.Module:
    """A model like the given one, but not quite: an assistant that is often right."""
    copy = type(model)(model.config).eval()
    copy.load_state_dict(model.state_dict())
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in copy.parameters():
            parameter.add_(noise * parameter.std() * torch.randn_like(parameter) if parameter.numel() > 1 else 0)
    return copy


def drafter(model, num_tokens):
    """Make it draft a fixed number of tokens, whatever it thinks of them."""
    model.generation_config.num_assistant_tokens = num_tokens
    model.generation_config.num_assistant_tokens_schedule = "constant"
    model.generation_config.assistant_confidence_threshold = 0.0
    return model


def make_llama(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=None,
    )
    return scaled(LlamaForCausalLM(config), 8.0)


def prompt(length: int = 20, rows: int = 1, seed: int = 0) -> torch.Tensor:
    return torch.randint(2, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


def greedy(model: nn.Module, ids: torch.Tensor, new_tokens: int = 72, **kwargs: object) -> torch.Tensor:
    return model.generate(ids, max_new_tokens=new_tokens, do_sample=False, **kwargs)


def stock_cache(model: nn.Module) -> DynamicCache:
    return DynamicCache(config=model.config)


# transformers 5.24 has another name for the argument that takes a cache, and for the field that returns it
CACHE = "cache" if "cache" in inspect.signature(Qwen3NextForCausalLM.forward).parameters else "past_key_values"


def returned_cache(output: object) -> object:
    return getattr(output, CACHE)
