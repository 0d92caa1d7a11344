"""Once per step and KV-cache group: which rows replay, which prefill, and the commit of the step before."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.gdn_attn import GDNAttentionBackend, GDNAttentionMetadataBuilder

from . import conv
from .settings import Settings
from .slots import NULL_SLOT, LayerPages, ReplaySlots


class ReplayBackend(GDNAttentionBackend):
    """Gives vLLM the builder below."""

    @staticmethod
    def get_name() -> str:
        """As in vLLM's logs."""
        return "REPLAYSTATE_GDN"

    @staticmethod
    def get_builder_cls() -> type[ReplayMetadataBuilder]:
        """Of one KV-cache group."""
        return ReplayMetadataBuilder


@dataclass(frozen=True)
class PrefillRows:
    """Rows that run the whole-prompt op: those longer than a step.

    | tensor | shape | meaning |
    |---|---|---|
    | tokens | [n] or None | their tokens in the batch; None: all of them |
    | query_start_loc | [rows + 1] | their bounds |
    | slots | [rows] | where the state is read (unless fresh) and written |
    | fresh | [rows] | rows that start from a zero state |
    """

    tokens: Tensor | None
    query_start_loc: Tensor
    slots: Tensor
    fresh: Tensor


@dataclass(frozen=True)
class ReplayMetadata:
    """What the layers of a group need in one step.

    Args:
        slots: cursors and pages of the group.
        layer_index: of each layer's name, its column in the records.
        num_tokens: N, real tokens of the batch.
        width: T, the launch width of every step.
        replay_slots: [B] slot of each row that replays, else -1; None where no row does.
        query_start_loc: [B + 1] row bounds.
        conv: plan of the convolution.
        prefill: the other rows, if any.
    """

    slots: ReplaySlots
    layer_index: dict[str, int]
    num_tokens: int
    width: int
    replay_slots: Tensor | None
    query_start_loc: Tensor
    conv: conv.ConvPlan
    prefill: PrefillRows | None


class ReplayMetadataBuilder(GDNAttentionMetadataBuilder):
    """Settles the last step of every row by its position, then lays out this one.

    A row replays when it fits a step (1 + drafts tokens), be they drafts, a token without drafts or a short prompt
    chunk. Also from a zero checkpoint: vLLM may put drafts behind a request's first token, and they can be rejected
    there. Every longer row prefills: from zero, or from its checkpoint after its window was folded.
    """

    # A step takes decisions on the host (does a row prefill?), so vLLM captures graphs around it, not through it.
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.NEVER

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        settings = Settings.of(vllm_config)
        assert settings is not None  # the layer names this backend only where the plugin is on
        self.settings = settings
        self.layer_names = list(layer_names)
        self._slots: ReplaySlots | None = None

    def _bound_slots(self) -> ReplaySlots:
        """The group's slots; made anew when vLLM binds other pages."""
        layers = self.vllm_config.compilation_config.static_forward_context
        pages = [LayerPages(*layers[name].kv_cache) for name in self.layer_names]
        if is_conv_state_dim_first():
            pages = [replace(page, conv=page.conv.transpose(1, 2)) for page in pages]
        if self._slots is None or self._slots.layers[0].state.data_ptr() != pages[0].state.data_ptr():
            self._slots = ReplaySlots(pages, self.settings.window)
            self._conv_width = layers[self.layer_names[0]].conv_kernel_size
        return self._slots

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: Any,
        num_accepted_tokens: Tensor | None = None,
        num_decode_draft_tokens_cpu: Tensor | None = None,
        fast_build: bool = False,
    ) -> ReplayMetadata:
        """See the class. The counts of drafts that vLLM offers are not used: positions say more."""
        m, slots, width = common_attn_metadata, self._bound_slots(), self.settings.max_query_len
        lengths_cpu = m.query_start_loc_cpu.diff()
        rows = int((lengths_cpu > 0).sum())  # rows without tokens are padding, behind the others
        lengths_cpu = lengths_cpu[:rows]
        num_tokens = int(m.query_start_loc_cpu[rows])
        resumed_cpu = m.seq_lens_cpu_upper_bound[:rows] > lengths_cpu
        replays_cpu = lengths_cpu <= width

        device = m.query_start_loc.device
        resumed, replays = (x.to(device, non_blocking=True) for x in (resumed_cpu, replays_cpu))
        bounds = m.query_start_loc[: rows + 1]
        seq_lens = m.seq_lens[:rows].to(torch.int32)
        computed = (seq_lens - bounds.diff()).to(torch.int32)
        src, dst = self._blocks(m.block_table_tensor[:rows], computed, seq_lens)
        src = torch.where(resumed, src, NULL_SLOT)

        aligned = self.kv_cache_spec.mamba_cache_mode == "align"
        slots.settle(src, computed, unique=not aligned)
        if aligned:
            moved = (src != NULL_SLOT) & (src != dst)
            if device.type != "cpu" or bool(moved.any()):
                slots.move(torch.where(moved, src, NULL_SLOT), torch.where(moved, dst, NULL_SLOT), computed)
        if bool((resumed_cpu & ~replays_cpu).any()):
            slots.fold(torch.where(resumed & ~replays, dst, NULL_SLOT))
        plan = conv.plan(
            dst.long(), slots.conv_column[dst.long()], ~resumed, ~replays, bounds, num_tokens, self._conv_width,
            slots.layers[0].conv.shape[1],
        )  # fmt: skip
        prefill = None
        if not bool((resumed_cpu & replays_cpu).all()):
            goes_on = resumed & replays
            slots.restart(torch.where(goes_on, NULL_SLOT, dst), torch.where(replays, computed, seq_lens))
        if bool((~resumed_cpu & replays_cpu).any()):
            slots.clear(torch.where(~resumed & replays, dst, NULL_SLOT))
        if not bool(replays_cpu.all()):
            prefill = _prefill_rows(dst, ~resumed, lengths_cpu, replays_cpu, bounds)
        return ReplayMetadata(
            slots=slots,
            layer_index={name: i for i, name in enumerate(self.layer_names)},
            num_tokens=num_tokens,
            width=width,
            replay_slots=torch.where(replays, dst, -1) if bool(replays_cpu.any()) else None,
            query_start_loc=bounds,
            conv=plan,
            prefill=prefill,
        )

    def _blocks(self, table: Tensor, computed: Tensor, seq_lens: Tensor) -> tuple[Tensor, Tensor]:
        """Of each row, the block with its state so far and the one that this step works in."""
        if self.kv_cache_spec.mamba_cache_mode == "none":
            return table[:, 0], table[:, 0]
        size = self.kv_cache_spec.block_size
        src, dst = (
            table.gather(1, ((tokens - 1).clamp(min=0) // size).long()[:, None])[:, 0]
            for tokens in (computed, seq_lens)
        )
        return src, dst


def _prefill_rows(dst: Tensor, fresh: Tensor, lengths_cpu: Tensor, replays_cpu: Tensor, bounds: Tensor) -> PrefillRows:
    if not bool(replays_cpu.any()):
        return PrefillRows(None, bounds, dst.long(), fresh)
    device = dst.device
    prefills = ~replays_cpu
    tokens = torch.repeat_interleave(prefills, lengths_cpu).nonzero()[:, 0]
    start = torch.zeros(int(prefills.sum()) + 1, dtype=torch.int32)
    torch.cumsum(lengths_cpu[prefills], 0, out=start[1:])
    rows = prefills.nonzero()[:, 0].to(device, non_blocking=True)
    return PrefillRows(
        tokens.to(device, non_blocking=True), start.to(device, non_blocking=True), dst[rows].long(), fresh[rows]
    )
