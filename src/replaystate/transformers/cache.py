"""The cache that an enabled model runs with: transformers' attention layers beside ours for Gated DeltaNet."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from ..errors import ArgumentError, ProtocolError, UnsupportedModelError
from .compat import transformers
from .states import GDNStates
from .stats import ReplayStats

if TYPE_CHECKING:
    from .enabled import Enabled

DynamicCache: Any = transformers.cache_utils.DynamicCache
LinearAttentionCacheLayerMixin: Any = transformers.cache_utils.LinearAttentionCacheLayerMixin


class _StateView(Mapping[int, Tensor]):
    """What readers of `recurrent_states` find: the current state, in transformers' layout, computed when asked."""

    def __init__(self, states: GDNStates, layer: int) -> None:
        self._states = states
        self._layer = layer

    def __getitem__(self, state_idx: int) -> Tensor:
        if state_idx != 0:
            raise KeyError(state_idx)
        return self._states.state(self._layer).transpose(-1, -2).contiguous()

    def __iter__(self) -> Iterator[int]:
        return iter((0,))

    def __len__(self) -> int:
        return 1


class ReplayLinearAttentionLayer(LinearAttentionCacheLayerMixin):
    """One Gated DeltaNet layer of a cache: the convolution's last inputs; the recurrent state is with `GDNStates`.

    `conv_states[0]` is [B, conv_dim, n]: the newest inputs of the causal convolution, n = its kernel size, and `window`
    more while the past is recorded, so that a crop takes back inputs and state by the same number of tokens.
    """

    is_compileable = False
    is_croppable = True

    def __init__(self, states: GDNStates, layer: int) -> None:
        self._states = states
        self._layer = layer
        super().__init__(number_of_states=1)
        self.recurrent_states = _StateView(states, layer)

    @property
    def record_past(self) -> bool:
        """Whether forwards keep what a crop needs; one flag for all layers of a cache."""
        return self._states.recording

    @record_past.setter
    def record_past(self, value: bool) -> None:
        self._states.recording = value

    def conv_history(self, x: Tensor, kernel_size: int) -> Tensor:
        """The stored inputs, or as many zeros before the first token: [B, conv_dim, >= kernel_size]."""
        if not self.has_previous_state[0]:
            shape = (x.shape[0], x.shape[1], kernel_size)
            with torch.inference_mode(False):  # as the states: a cache outlives the block it was made in
                self.conv_states[0] = torch.zeros(shape, dtype=x.dtype, device=x.device)
            self.conv_kernel_size[0] = kernel_size
            self.is_conv_states_initialized[0] = True
            self.has_previous_state[0] = True
            self.dtype, self.device = x.dtype, x.device
        history: Tensor = self.conv_states[0]
        return history

    def push_conv(self, x: Tensor, kernel_size: int) -> Tensor:
        """Append x [B, conv_dim, T] and return the last kernel_size - 1 inputs before it, then x itself."""
        full = torch.cat([self.conv_history(x, kernel_size), x], dim=-1)
        keep = kernel_size + (self._states.settings.window if self.record_past else 0)
        self.conv_states[0] = full[..., -keep:].contiguous()
        return full[..., -(kernel_size - 1 + x.shape[-1]) :]

    def crop_conv(self, num_tokens: int) -> None:
        """Take back the last num_tokens inputs."""
        if self.has_previous_state[0]:
            end = self.conv_states[0].shape[-1] - num_tokens
            self.conv_states[0] = self.conv_states[0][..., :end]

    def reset(self) -> None:
        """Forget the inputs; the states are reset by the cache."""
        self.has_previous_state[0] = False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorder the inputs; the states are reordered by the cache."""
        if self.has_previous_state[0]:
            self.conv_states[0] = self.conv_states[0].index_select(0, beam_idx.to(self.device))

    def crop(self, tokens_to_remove: int) -> None:
        """Refused: the layers share their cursors."""
        raise ProtocolError("crop: crop the cache as a whole, not one layer: its layers share one set of cursors")

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused, see `update_recurrent_state`."""
        self._refuse()

    def update_conv_state(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused, see `update_recurrent_state`."""
        self._refuse()

    def update_recurrent_state(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: only a model that is not enabled calls it.

        Raises:
            ProtocolError: always.
        """
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise ProtocolError(
            "this cache belongs to a model enabled by replaystate.transformers, and the model that runs with it "
            "is not: enable(model), or use a new cache"
        )


class ReplayDynamicCache(DynamicCache):
    """A `DynamicCache` whose Gated DeltaNet layers keep their state in a `ReplayCache`, so that it can be cropped.

    `make_cache(model)` builds one; `generate` and a forward with `use_cache=True` build it by themselves. Use it
    like any cache of transformers: pass it to `generate` or the model, `reset()` it, `copy.deepcopy` it.

    Args:
        enabled: what `enable` left on the model.

    Attributes:
        gdn: the recurrent states of all layers (`GDNStates`).

    Notes: host counters mirror the cursors, so nothing here waits for a device. Buffers are allocated at the first
    forward, for its batch size.
    """

    gdn: GDNStates

    def __init__(self, enabled: Enabled) -> None:
        super().__init__(config=enabled.text_config)
        _install(self, enabled)

    @property
    def stats(self) -> ReplayStats:
        """Counters of the model that ran this cache last."""
        return self.gdn.stats

    @property
    def is_croppable(self) -> bool:
        """True: a forward can be taken back up to its last `max_query_len` tokens, with the past recorded."""
        return True

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens: states, convolution inputs and attention keys alike.

        Args:
            tokens_to_remove: 0 or negative, transformers' count.

        Raises:
            ArgumentError: a positive count, or more tokens than the window holds. Nothing is changed then.
            ProtocolError: the past is not recorded (`activate_past_recording()`), or a forward did not finish.
        """
        tokens_to_remove = int(tokens_to_remove)  # transformers 5.17 gives a tensor
        if tokens_to_remove > 0:
            raise ArgumentError(f"crop: tokens_to_remove: expected 0 or a negative count, got {tokens_to_remove}")
        self.gdn.check_crop(-tokens_to_remove)
        for layer in self.layers:
            if isinstance(layer, ReplayLinearAttentionLayer):
                layer.crop_conv(-tokens_to_remove)
            else:
                layer.crop(tokens_to_remove)
        self.gdn.crop(-tokens_to_remove)

    def check_lengths(self, layer: int) -> None:
        """Refuse attention layers, from this layer on, that hold another number of tokens than the states.

        Raises:
            ProtocolError: the last forward broke off in an attention layer, or a layer was changed by itself.
        """
        for index in range(layer, len(self.layers)):
            length = self.gdn.tokens if index in self.gdn.devices else self.layers[index].get_seq_length()
            if length != self.gdn.tokens:
                raise ProtocolError(
                    f"replay: attention layer {index} holds {length} tokens, the states hold {self.gdn.tokens}: the "
                    "last forward did not finish. Call cache.reset(), or use a new cache"
                )

    def flush(self) -> None:
        """Fold the windows now, so that the next `window` tokens can be cropped, whatever steps they come in.

        Raises:
            ProtocolError: a forward did not finish.
        """
        self.gdn.flush()

    def reset(self) -> None:
        """Forget all tokens. Another batch size may follow; buffers are kept if it is the same."""
        super().reset()
        for layer in self.layers:
            # transformers before 5.19 zeroes the keys but keeps their length, and later tokens would attend to them
            if not isinstance(layer, ReplayLinearAttentionLayer) and layer.get_seq_length() > 0:
                layer.keys = layer.values = None
                layer.is_initialized = False
        self.gdn.reset()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Let row i continue from row beam_idx[i]; a row may be named several times.

        Raises:
            ProtocolError: a forward did not finish.
        """
        self.gdn.check_idle("reorder_cache")
        super().reorder_cache(beam_idx)
        self.gdn.reorder(beam_idx)


def adopt(cache: Any, enabled: Enabled) -> ReplayDynamicCache:
    """Return cache as one that the enabled model can run with.

    A `DynamicCache` made for the model's config that holds no token yet becomes a `ReplayDynamicCache` in place:
    that is what transformers makes inside `generate` and `forward`, and callers keep the object.

    Raises:
        UnsupportedModelError: another cache class, an offloaded cache, or one that holds states of the stock layers.
        ArgumentError: a cache of an enabled model of other sizes.
    """
    if isinstance(cache, ReplayDynamicCache):
        if cache.gdn.shape != enabled.shape or list(cache.gdn.devices) != list(enabled.layers):
            raise ArgumentError(
                f"cache: made for {cache.gdn.shape} in layers {list(cache.gdn.devices)}, but this model has "
                f"{enabled.shape} in layers {list(enabled.layers)}"
            )
        return cache
    if type(cache) is not DynamicCache or cache.offloading:
        kind = "an offloaded cache" if type(cache) is DynamicCache else type(cache).__name__
        raise UnsupportedModelError(
            "cache: expected a ReplayDynamicCache (make_cache(model)) or a new DynamicCache(config=model.config), got "
            f"{kind}; an enabled model runs with no other. disable(model) brings the stock caches back"
        )
    layers = [cache.layers[index] for index in enabled.layers if index < len(cache)]
    if len(layers) < len(enabled.layers) or not all(isinstance(x, LinearAttentionCacheLayerMixin) for x in layers):
        raise UnsupportedModelError(
            "cache: this DynamicCache was not made for the model's layers: use make_cache(model) or "
            "DynamicCache(config=model.config)"
        )
    if any(any(layer.has_previous_state.values()) for layer in layers):
        raise UnsupportedModelError(
            "cache: this DynamicCache holds states that a stock model computed; start an enabled model with an empty "
            "cache"
        )
    recording = any(layer.record_past for layer in layers)
    cache.__class__ = ReplayDynamicCache
    _install(cache, enabled)
    cache.gdn.recording = recording
    adopted: ReplayDynamicCache = cache
    return adopted


def _install(cache: ReplayDynamicCache, enabled: Enabled) -> None:
    cache.gdn = GDNStates(enabled.shape, enabled.devices(), enabled.settings, enabled.stats)
    for index in enabled.layers:
        cache.layers[index] = ReplayLinearAttentionLayer(cache.gdn, index)
