"""`enable` and `disable`: Gated DeltaNet layers of one model decode through replayed states, or as before."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import MethodType
from typing import Any, TypeVar

import torch

from .. import GDNShape
from ..errors import DTypeError, UnsupportedModelError
from ..shapes import check_window
from . import compat
from .cache import ReplayDynamicCache
from .enabled import Enabled, enabled_of
from .generation import candidate_generator, prepare_cache, prepare_inputs
from .layer import replay_forward
from .states import Settings
from .stats import ReplayStats

Model = TypeVar("Model")

STATE_DTYPES = (torch.float32, torch.float16, torch.bfloat16)

GENERATION_METHODS: dict[str, Callable[..., Any]] = {
    "_prepare_cache_for_generation": prepare_cache,
    "_get_candidate_generator": candidate_generator,
    "prepare_inputs_for_generation": prepare_inputs,
}


def enable(
    model: Model,
    *,
    window: int = 16,
    max_query_len: int = 16,
    state_dtype: torch.dtype | None = None,
    ring_dtype: torch.dtype | None = None,
) -> Model:
    """Let a model's Gated DeltaNet layers decode from a checkpoint and a ring, so that drafts can be rolled back.

    Each layer keeps a checkpoint S_0 and, for up to `window` tokens after it, keys, corrections and decays::

        S_P = e^{G_P} S_0 + sum_{j < P} e^{G_P - G_j} u_j k^_j^T

    Taking tokens back lowers P, nothing else. So `generate` runs with `prompt_lookup_num_tokens=` and
    `assistant_model=`, which transformers refuses for the stock model.

    Only this instance is changed. It keeps its class, weights and config, and `disable` undoes everything. A
    second `enable` with other arguments holds for caches made after it; caches made before keep theirs.

    Args:
        model: `Qwen3NextForCausalLM`, `Qwen3_5ForCausalLM` or `Qwen3_5MoeForCausalLM` (or the decoder of one:
            `Qwen3NextModel`, `Qwen3_5TextModel`, `Qwen3_5MoeTextModel`) of transformers >= 5.17, < 6.
        window: W, tokens between folds into the checkpoint; a power of two.
        max_query_len: tokens that one step verifies; longer candidate lists are cut to one less, with one log line.
        state_dtype: dtype of the checkpoints; None: float32 for a float32 model, float16 for a 16-bit one.
        ring_dtype: dtype of the k and u rings; None: as the default of `state_dtype`.

    Returns:
        The same model.

    Raises:
        UnsupportedModelError: another class or version, or weights that are not in memory. The message has the range.
        ArgumentError: window or max_query_len out of range.
        DTypeError: a dtype that states cannot have.

    Notes:
        Reads per token, row and layer the checkpoint (HV V K elements) and the window; writes one ring row, and the
        checkpoint once per window instead of once per token. On the model's devices, without host syncs. Generation
        equals the stock model's up to rounding; in float32 greedy tokens are equal. There is no backward pass through a
        cache. A GDN assistant must be enabled too; it may draft up to `window - 1` tokens. `copy.deepcopy` of an
        enabled model gives an enabled model; disable one before pickling it.

    Source: contract sections 3, 4 and 9.

    >>> import torch
    >>> from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig
    >>> from replaystate.transformers import disable, enable, stats
    >>> config = Qwen3_5TextConfig(vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=4)
    >>> model = enable(Qwen3_5ForCausalLM(config).eval())
    >>> prompt = torch.tensor([[5, 6, 7, 8, 5, 6, 7, 8]])
    >>> tokens = model.generate(prompt, max_new_tokens=8, do_sample=False, prompt_lookup_num_tokens=3)
    >>> stats(model).drafted > 0
    True
    >>> stock = disable(model).generate(prompt, max_new_tokens=8, do_sample=False)
    >>> bool((tokens == stock).all())
    True
    """
    compat.check_version(str(compat.transformers.__version__))
    layers = compat.gdn_layers_of(model)
    settings = _settings(model, window, max_query_len, state_dtype, ring_dtype)
    shape = _shape(layers)
    if "_replaystate" in vars(model):
        record = enabled_of(model, "enable")
        record.settings, record.draft_cut_reported = settings, False
        return model
    text_config = compat.text_model_of(model).config
    record = Enabled(shape, settings, text_config, layers)
    for index, module in layers.items():
        slot = _forward_slot(module)
        if slot in vars(module):
            record.replaced_forwards[index] = vars(module)[slot]
        setattr(module, slot, MethodType(replay_forward, module))
        module._replaystate = record
    target: Any = model
    target._replaystate = record
    if hasattr(model, "generate"):
        target._is_stateful = False  # upstream's guard: a stateful model cannot verify drafts; this one can
        for name, method in GENERATION_METHODS.items():
            setattr(model, name, _bound(method, model, name))
    return model


def disable(model: Model) -> Model:
    """Undo `enable`: the model runs its own code again, bit for bit. A model that is not enabled is left as it is.

    Caches made while it was enabled hold no stock states; using one with the stock model raises `ProtocolError`.

    Args:
        model: any model.

    Returns:
        The same model.

    >>> from torch import nn
    >>> disable(nn.Identity())
    Identity()
    """
    record = vars(model).get("_replaystate")
    if not isinstance(record, Enabled):
        return model
    for index, module in record.layers.items():
        slot = _forward_slot(module)
        vars(module).pop(slot, None)
        if index in record.replaced_forwards:
            setattr(module, slot, record.replaced_forwards[index])
        del module._replaystate
    for name in ("_replaystate", "_is_stateful", *GENERATION_METHODS):
        vars(model).pop(name, None)
    return model


def is_enabled(model: object) -> bool:
    """Whether `enable` holds for this model.

    >>> from torch import nn
    >>> is_enabled(nn.Identity())
    False
    """
    return isinstance(vars(model).get("_replaystate"), Enabled)


def make_cache(model: object) -> ReplayDynamicCache:
    """An empty cache for an enabled model, for `past_key_values=` (renamed `cache=` in later 5.x).

    Its batch size is that of its first forward. `generate` makes one by itself; a cache of one's own is for several
    calls that continue each other, for `crop`, or for `gdn.nbytes` and `stats`.

    Args:
        model: an enabled model.

    Raises:
        ProtocolError: the model is not enabled.
    """
    return ReplayDynamicCache(enabled_of(model, "make_cache"))


def stats(model: object) -> ReplayStats:
    """The counters of an enabled model, live: `clear()` starts them again.

    Args:
        model: an enabled model.

    Raises:
        ProtocolError: the model is not enabled.
    """
    return enabled_of(model, "stats").stats


def _bound(method: Callable[..., Any], model: Any, name: str) -> MethodType:
    """The method bound to the model, with the signature of the class's own, which `generate` inspects."""

    @wraps(getattr(type(model), name))
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return method(self, *args, **kwargs)

    return MethodType(call, model)


def _forward_slot(module: Any) -> str:
    """Attribute that a module's `forward` is found under: accelerate wraps `forward` and calls `_old_forward`."""
    return "_old_forward" if hasattr(module, "_hf_hook") else "forward"


def _shape(layers: dict[int, Any]) -> GDNShape:
    shapes = {(m.num_k_heads, m.num_v_heads, m.head_k_dim, m.head_v_dim) for m in layers.values()}
    if len(shapes) > 1:
        raise UnsupportedModelError(f"enable: model: expected Gated DeltaNet layers of one shape, got {sorted(shapes)}")
    if any(m.A_log.is_meta or m.conv1d.weight.is_meta for m in layers.values()):
        raise UnsupportedModelError(
            "enable: model: expected weights in memory, got Gated DeltaNet layers on the meta device (offloaded, or "
            "not loaded)"
        )
    return GDNShape(*shapes.pop())


def _settings(
    model: Any, window: int, max_query_len: int, state_dtype: torch.dtype | None, ring_dtype: torch.dtype | None
) -> Settings:
    check_window("enable", window, max_query_len)
    dtype: torch.dtype = model.dtype
    if dtype not in STATE_DTYPES:
        raise DTypeError(f"enable: model: expected a float32, bfloat16 or float16 model, got {dtype}")
    for name, given in (("state_dtype", state_dtype), ("ring_dtype", ring_dtype)):
        if given is not None and given not in STATE_DTYPES:
            raise DTypeError(f"enable: {name}: expected float32, float16, bfloat16 or None, got {given}")
    if state_dtype is None:
        state_dtype = torch.float32 if dtype == torch.float32 else torch.float16
    if ring_dtype is None:
        ring_dtype = torch.float32 if state_dtype == torch.float32 else torch.float16
    return Settings(window, max_query_len, state_dtype, ring_dtype)
