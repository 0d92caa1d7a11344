"""The GDN layer of Qwen3-Next and Qwen3.5 in vLLM, decoding by replay. Projections, norm and output stay vLLM's."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from vllm.forward_context import get_forward_context
from vllm.logger import init_logger
from vllm.model_executor.custom_op import PluggableLayer, op_registry_oot
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
from vllm.platforms import current_platform

from .. import ops as _ops  # noqa: F401  registers torch.ops.replaystate
from ..kernels import Call, select
from .conv import causal_conv1d
from .metadata import PrefillRows, ReplayBackend, ReplayMetadata
from .settings import Settings
from .slots import NULL_SLOT, LayerPages

logger = init_logger("vllm.replaystate")


def swap_layer() -> None:
    """Let vLLM build `ReplayGatedDeltaNetAttention` wherever it means its own layer; once a process."""
    name = QwenGatedDeltaNetAttention.__name__
    if op_registry_oot.get(name) is not ReplayGatedDeltaNetAttention:
        PluggableLayer.register_oot(name=name)(ReplayGatedDeltaNetAttention)


def page_shapes(native: tuple[tuple[int, ...], ...], num_k_heads: int, vllm_config: Any) -> tuple[tuple[int, ...], ...]:
    """Shapes of a page's states: vLLM's conv inputs and state, then the u, k and g rings."""
    settings = Settings.of(vllm_config)
    if settings is None:
        return native
    conv, (num_v_heads, head_v_dim, head_k_dim) = native
    R = settings.ring_slots
    rings = ((num_v_heads, R, head_v_dim), (num_k_heads, R, head_k_dim), (num_v_heads, R))
    return (conv, (num_v_heads, head_v_dim, head_k_dim), *rings)


def page_dtypes(native: tuple[torch.dtype, ...], vllm_config: Any) -> tuple[torch.dtype, ...]:
    """Dtypes of a page's states."""
    settings = Settings.of(vllm_config)
    if settings is None:
        return native
    conv, vllm_state = native
    state, ring = settings.dtypes(vllm_state)
    return conv, state, ring, ring, torch.float32


class ReplayGatedDeltaNetAttention(QwenGatedDeltaNetAttention):
    """vLLM's layer with the states of a page and the core of the forward replaced.

    Where the configuration does not ask for the plugin, the object becomes vLLM's own layer.
    """

    _config: Any = None  # vLLM's constructor asks for state dtypes before this is set, and expects its own

    def __init__(self, config: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, vllm_config, *args, **kwargs)
        settings = Settings.of(vllm_config)
        if settings is None:
            self.__class__ = QwenGatedDeltaNetAttention
            return
        self._config = vllm_config
        self.settings = settings
        # The generic forward: projections, the op that calls `_forward_core`, norm, output projection.
        self._forward_method = self.forward_cuda
        self.enable_fused_gdn_spec_decode = False
        self._check_page()
        self._announce()

    def get_state_shape(self) -> tuple[tuple[int, ...], ...]:
        """Conv inputs, checkpoint, u, k and g ring."""
        native = super().get_state_shape()
        return native if self._config is None else page_shapes(native, self.num_k_heads // self.tp_size, self._config)

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        """Of the same."""
        native = super().get_state_dtype()
        return native if self._config is None else page_dtypes(native, self._config)

    def get_prefill_checkpoint_alignment(self) -> int | None:
        """No checkpoint inside a prefill: vLLM splits prefills at block boundaries instead."""
        return None

    def get_kv_cache_spec(self, vllm_config: Any) -> Any:
        """One block a request, whatever the number of drafts: rejected ones are rows that a cursor does not pass."""
        return replace(super().get_kv_cache_spec(vllm_config), num_speculative_blocks=0)

    def get_attn_backend(self) -> type[ReplayBackend]:
        """Our metadata."""
        return ReplayBackend

    def _announce(self) -> None:
        """Say once, at start, what runs; the library's logger adds which kernels run it, and why not better ones."""
        library = logging.getLogger("replaystate")
        if not library.handlers:
            library.handlers, library.propagate = logging.getLogger("vllm").handlers, False
            library.setLevel(logging.INFO)
        state, ring = self.get_state_dtype()[1:3]
        settings, width = self.settings, self.settings.max_query_len
        logger.info_once(
            "replaystate: GDN layers decode by replay: window %d in rings of %d slots, up to %d token(s) a step, "
            "states %s, rings %s, one state block a request where vLLM's own layer holds %d",
            settings.window, settings.ring_slots, width, state, ring, width,
        )  # fmt: skip
        sizes = (self.num_k_heads // self.tp_size, self.num_v_heads // self.tp_size, self.head_k_dim, self.head_v_dim)
        io = self.model_config.dtype
        device = current_platform.device_type
        select("auto", Call("replay_step", device, io, state, ring, sizes, settings.window, width))

    def _check_page(self) -> None:
        """The states lie one after the other in a page; each must begin at a multiple of its element size."""
        offset = 0
        for shape, dtype in zip(self.get_state_shape(), self.get_state_dtype(), strict=True):
            if offset % dtype.itemsize:
                raise ValueError(
                    f"replaystate.vllm: {self.prefix}: a {dtype} state would begin at byte {offset} of the page; "
                    "choose state_dtype and ring_dtype no wider than the model's"
                )
            offset += torch.Size(shape).numel() * dtype.itemsize

    def _conv_weight(self) -> Tensor:
        """[dim, w]. Some CPUs hold it packed for vLLM's own kernel and keep a plain copy."""
        plain = getattr(self.conv1d, "_cpu_unpacked_conv_weight", None)
        weight: Tensor = self.conv1d.weight if plain is None else plain
        return weight.detach().flatten(1)

    def _forward_core(self, mixed_qkv: Tensor, b: Tensor, a: Tensor, core_attn_out: Tensor) -> None:
        """Convolution, then replay or prefill, for the real tokens of the batch; the rest of the output stays zero."""
        metadata = get_forward_context().attn_metadata
        if not isinstance(metadata, dict):
            return  # a profiling run without a cache
        m: ReplayMetadata = metadata[self.prefix]
        n = m.num_tokens
        layer = m.layer_index[self.prefix]
        pages = m.slots.layers[layer]
        qkv = causal_conv1d(mixed_qkv[:n], pages.conv, self._conv_weight(), self.conv1d.bias, self.activation, m.conv)
        a, b, out = a[:n], b[:n], core_attn_out[:n]
        if m.replay_slots is not None:
            slots = m.slots
            torch.ops.replaystate.replay_step(
                qkv, a, b, self.A_log.detach(), self.dt_bias.detach(), pages.state, pages.u_ring, pages.k_ring,
                pages.g_ring, slots.ring_start, slots.num_committed, slots.step_records, slots.status, out,
                m.replay_slots, m.query_start_loc, layer, m.width, slots.window, NULL_SLOT, self.head_k_dim**-0.5,
                "auto",
            )  # fmt: skip
        if m.prefill is not None:
            self._prefill(qkv, a, b, out, pages, m.prefill)

    def _prefill(self, qkv: Tensor, a: Tensor, b: Tensor, out: Tensor, pages: LayerPages, rows: PrefillRows) -> None:
        if rows.tokens is not None:
            qkv, a, b = qkv[rows.tokens], a[rows.tokens], b[rows.tokens]
        state = pages.state
        y, final = torch.ops.replaystate.gated_delta_rule(
            qkv, a, b, self.A_log.detach(), self.dt_bias.detach(),
            state[rows.slots].masked_fill_(rows.fresh[:, None, None, None], 0), rows.query_start_loc,
            self.num_k_heads // self.tp_size, self.num_v_heads // self.tp_size, self.head_k_dim, self.head_v_dim,
            self.head_k_dim**-0.5, "auto",
        )  # fmt: skip
        if state.dtype == torch.float16:
            limit = torch.finfo(torch.float16).max
            final.clamp_(-limit, limit)
        state[rows.slots] = final.to(state.dtype)
        if rows.tokens is None:
            out.copy_(y)
        else:
            out[rows.tokens] = y
