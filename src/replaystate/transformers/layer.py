"""The forward of a Gated DeltaNet layer on replayed states.

It does what the stock forward does: projections, causal convolution, recurrence, gated norm, output projection.
Only the recurrence differs, and the convolution keeps inputs that a crop gives back. Without a cache the stock
forward runs.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from ..errors import ArgumentError
from .cache import ReplayLinearAttentionLayer, adopt

PACKED_SEQUENCE_ARGUMENTS = ("cu_seq_lens_q", "seq_idx")


def replay_forward(
    self: Any,
    hidden_states: Tensor,
    cache_params: Any = None,
    attention_mask: Tensor | None = None,
    *,
    cache: Any = None,
    **kwargs: Any,
) -> Tensor:
    """Stand in for the `forward` of one Gated DeltaNet module of an enabled model.

    | tensor | shape | meaning |
    |---|---|---|
    | hidden_states | [B, T, hidden_size] | the layer's input |
    | attention_mask | [B, T] or None | 0 where a token is padding: its input is zeroed, as in the stock layer |
    | returns | [B, T, hidden_size] | the layer's output |

    Raises:
        ArgumentError: gradients are asked for, or packed sequences, together with a cache.
        UnsupportedModelError: a cache that is neither ours nor new.
        ProtocolError: the forward before this one did not finish.
    """
    cache = cache_params if cache is None else cache
    if cache is None:
        return stock_forward(self, hidden_states, attention_mask, kwargs)
    out: Tensor = _cached_forward(self, hidden_states, cache, attention_mask, kwargs)
    return out


def stock_forward(module: Any, hidden_states: Tensor, attention_mask: Tensor | None, kwargs: dict[str, Any]) -> Tensor:
    """Run the forward that the module had before `enable`, without a cache."""
    before = module._replaystate.replaced_forwards.get(module.layer_idx)
    forward = before if before is not None else type(module).forward.__get__(module)
    out: Tensor = forward(hidden_states, None, attention_mask, **kwargs)
    return out


@torch.compiler.disable  # host-side cursors: a compiled model breaks its graph here and stays right
def _cached_forward(
    module: Any, hidden_states: Tensor, cache: Any, attention_mask: Tensor | None, kwargs: dict[str, Any]
) -> Tensor:
    enabled = module._replaystate
    if torch.is_grad_enabled() and (hidden_states.requires_grad or module.A_log.requires_grad):
        raise ArgumentError(
            "forward: an enabled model has no backward pass through a cache: pass use_cache=False to train, or call it "
            "under torch.no_grad()"
        )
    for name in PACKED_SEQUENCE_ARGUMENTS:
        if kwargs.get(name) is not None:
            raise ArgumentError(f"forward: {name}: packed sequences cannot run with a cache; pass use_cache=False")
    cache = adopt(cache, enabled)
    if attention_mask is not None:
        hidden_states = (hidden_states * attention_mask[:, :, None]).to(hidden_states.dtype)
    B, T, _ = hidden_states.shape
    index = module.layer_idx
    if cache.gdn.is_first(index):
        cache.check_lengths(index)
    cache.gdn.enter(index, B, T, enabled.stats)
    mixed_qkv, z, a, b = _project(module, hidden_states)
    mixed_qkv = _convolve(module, mixed_qkv.transpose(1, 2), cache.layers[index]).transpose(1, 2)
    y = cache.gdn.run(index, mixed_qkv, a, b, module.A_log, module.dt_bias)
    y = module.norm(y.reshape(-1, module.head_v_dim), z.reshape(-1, module.head_v_dim))
    out: Tensor = module.out_proj(y.reshape(B, T, -1))
    return out


def _project(module: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (mixed_qkv [B, T, 2 H K + HV V] as q heads, k heads, v heads; z [B, T, HV V]; a, b [B, T, HV])."""
    if hasattr(module, "in_proj_qkvz"):  # Qwen3-Next interleaves the projections by key head
        q, k, v, z, b, a = module.fix_query_key_value_ordering(module.in_proj_qkvz(x), module.in_proj_ba(x))
        return torch.cat([t.flatten(2) for t in (q, k, v)], dim=-1), z.flatten(2), a, b
    return module.in_proj_qkv(x), module.in_proj_z(x), module.in_proj_a(x), module.in_proj_b(x)


def _convolve(module: Any, x: Tensor, layer: ReplayLinearAttentionLayer) -> Tensor:
    """Causal convolution and activation over x [B, conv_dim, T], continued from the layer's inputs.

    The functions are the modelling file's own, so a kernel that transformers loaded from the hub is used here as well.
    """
    functions = _modelling_file(module)
    size, weight, bias = module.conv_kernel_size, module.conv1d.weight.squeeze(1), module.conv1d.bias
    T = x.shape[-1]
    if T == 1 and not layer.record_past:
        history = layer.conv_history(x, size)
        if history.shape[-1] == size:
            out: Tensor = functions.causal_conv1d_update(x, history, weight, bias, module.activation)
            return out
    out = functions.causal_conv1d_fn(layer.push_conv(x, size), weight, bias, activation=module.activation)
    return out[..., -T:]


def _modelling_file(module: Any) -> Any:
    base = next(cls for cls in type(module).__mro__ if cls.__module__.startswith("transformers.models."))
    return sys.modules[base.__module__]
