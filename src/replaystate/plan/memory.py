"""Bytes that a device holds: the weights, and what each request adds, with replay and without."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..errors import ArgumentError
from .setting import CACHE_BYTES, DTYPES, WEIGHT_BYTES, Setting


@dataclass(frozen=True)
class RequestBytes:
    """Bytes of one request on one device, over all layers.

    Args:
        kv_per_token: attention KV of one token.
        kv: attention KV of the context and a step's drafts.
        conv: columns of the causal convolutions: one fewer than taps, and one per draft, which both designs need to
            undo drafts.
        checkpoint: replay's frozen states.
        rings: replay's k, u and g rings.
        native_states: states of an engine without replay: one, and a copy per draft.
    """

    kv_per_token: float
    kv: float
    conv: float
    checkpoint: float
    rings: float
    native_states: float

    @property
    def replay_fixed(self) -> float:
        """What a request takes whatever its context, with replay."""
        return self.conv + self.checkpoint + self.rings

    @property
    def native_fixed(self) -> float:
        """The same without replay."""
        return self.conv + self.native_states

    @property
    def replay(self) -> float:
        """All of a request, with replay."""
        return self.kv + self.replay_fixed

    @property
    def native(self) -> float:
        """All of a request, without replay."""
        return self.kv + self.native_fixed


def request_bytes(setting: Setting) -> RequestBytes:
    """Bytes of one request.

        checkpoint = L HV V K state_bytes         rings = L R ((HV V + H K) ring_bytes + 4 HV)
        native     = L HV V K native_bytes (1 + D)

    Two int32 cursors per request are left out.

    >>> from replaystate.models import MODELS
    >>> from replaystate.plan import DEVICES
    >>> sizes = request_bytes(Setting(MODELS["Qwen3.5-27B"], DEVICES["H200"]))
    >>> sizes.checkpoint / 2**20, round(sizes.rings / 2**20, 1), sizes.native_states / 2**20
    (72.0, 24.3, 288.0)
    """
    model = setting.shard
    H, HV, K, V = model.gdn.sizes
    layers, state = model.num_gdn_layers, HV * V * K
    ring_row = (HV * V + H * K) * DTYPES[setting.ring_dtype].itemsize + HV * 4
    kv_bytes = CACHE_BYTES[setting.kv_dtype]
    kv_per_token = model.num_attention_layers * 2 * model.num_key_value_heads * model.head_dim * kv_bytes
    conv_columns = model.conv_kernel - 1 + setting.drafts
    return RequestBytes(
        kv_per_token=kv_per_token,
        kv=kv_per_token * (setting.context_tokens + setting.drafts),
        conv=layers * model.gdn.qkv_dim * conv_columns * 2,
        checkpoint=layers * state * DTYPES[setting.state_dtype].itemsize,
        rings=layers * setting.ring_slots * ring_row,
        native_states=layers * state * DTYPES[setting.native_state_dtype].itemsize * (1 + setting.drafts),
    )


def weight_bytes(setting: Setting) -> float:
    """Bytes of the weights on one device."""
    return setting.shard.parameters.total * WEIGHT_BYTES[setting.weight_dtype]


def request_memory_bytes(setting: Setting) -> float:
    """What is left for requests on one device.

    Raises:
        ArgumentError: the weights alone do not fit.
    """
    memory, weights = setting.device.memory_bytes * setting.memory_share, weight_bytes(setting)
    if weights >= memory:
        raise ArgumentError(
            f"plan: {setting.model.name} in {setting.weight_dtype} needs {weights / 1e9:.1f} GB a device for weights "
            f"with tp={setting.tp}, and {setting.device.name} has {memory / 1e9:.1f} GB for them "
            f"(memory_share {setting.memory_share:g}): use more devices (tp) or smaller weights"
        )
    return memory - weights


def max_requests(memory_bytes: float, bytes_per_request: float) -> int:
    """Requests that fit at once; 0 where not even one does.

    >>> max_requests(10, 3), max_requests(-1, 3)
    (3, 0)
    """
    return max(0, math.floor(memory_bytes / bytes_per_request))
