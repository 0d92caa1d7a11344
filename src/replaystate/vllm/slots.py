"""What is known of each block of a KV-cache group beside its page: cursors, records, and how many tokens it stands at.

All layers of a group share these words. vLLM does not say how many drafts of a step it kept; at the next step it says
how many tokens of a request are computed. A slot remembers where its last step began; the difference is how many
rows to commit, for whatever reason the engine kept them: accepted drafts, a prompt chunk, a step without drafts. This
also proves that slot and request fit: a block that stands elsewhere than the engine continues is an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import ProtocolError

NULL_SLOT = 0
"""vLLM's padding block."""


@dataclass(frozen=True)
class LayerPages:
    """A layer's views of the pages, as vLLM binds them: slots of conv inputs, checkpoints and rings."""

    conv: Tensor
    state: Tensor
    u_ring: Tensor
    k_ring: Tensor
    g_ring: Tensor


class ReplaySlots:
    """Cursors and bookkeeping of the blocks of one KV-cache group.

    Args:
        layers: the pages of the group's layers.
        window: W.

    Attributes:
        ring_start, num_committed, step_records, status: see `ReplayCache`.
        position: [num_slots] int32, tokens that the slot's state (and window) stood at before its last step.
        conv_column: [num_slots] int32, column of the conv slot where the earlier inputs begin.
    """

    def __init__(self, layers: Sequence[LayerPages], window: int) -> None:
        self.layers = list(layers)
        self.window = window
        state = self.layers[0].state
        self.num_slots, self.ring_slots = state.shape[0], self.layers[0].k_ring.shape[2]

        def words(*size: int) -> Tensor:
            return torch.zeros(self.num_slots, *size, dtype=torch.int32, device=state.device)

        self.ring_start, self.num_committed, self.status = words(), words(), words()
        self.position, self.conv_column = words(), words()
        self.step_records = words(len(self.layers))

    def settle(self, slots: Tensor, computed: Tensor, *, unique: bool) -> None:
        """Commit the last step of each slot, so that it stands at `computed` tokens; null slots are skipped.

        Args:
            slots: [B] int32; a slot may be named twice unless `unique`, then with the same `computed`.
            computed: [B] int32.
            unique: a promise that no live slot is named twice.

        Raises:
            ProtocolError: (host values) a slot that cannot stand there. On a device an assertion ends the process.
        """
        at = slots.long()
        live = slots != NULL_SLOT
        records = self.step_records[at]
        pending = live & (records != 0).any(1)
        kept = computed - self.position[at]
        fits = torch.where(pending, (kept >= 1) & (kept <= records[:, 0] & 0xFFFF), kept == 0) | ~live
        if slots.device.type == "cpu":
            if not bool(fits.all()):
                self._raise_misfit(slots, computed, pending, fits)
            if not bool(pending.any()):
                return
        else:
            torch._assert_async(fits.all(), "replaystate.vllm: a block does not stand where its request continues")
        committed = pending
        if not unique:
            same = slots[:, None] == slots[None, :]
            committed = pending & ~torch.tril(same, -1).any(1)
        torch.ops.replaystate.commit(
            torch.where(committed, slots, NULL_SLOT), torch.where(committed, kept, 0).to(torch.int32), self.ring_start,
            self.num_committed, self.step_records, self.status, self.window, self.ring_slots, NULL_SLOT, "auto",
        )  # fmt: skip
        self.conv_column[at] = torch.where(pending, kept - 1, self.conv_column[at])
        self.position[at] = torch.where(live, computed, 0)

    def move(self, src: Tensor, dst: Tensor, computed: Tensor) -> None:
        """Write the state of slot src into slot dst, its window folded; src stays as it is. Null pairs are skipped."""
        pages = self.layers
        torch.ops.replaystate.materialize(
            [p.state for p in pages], [p.u_ring for p in pages], [p.k_ring for p in pages], [p.g_ring for p in pages],
            src, dst, self.num_committed[src.long()], self.ring_start, self.num_committed, self.step_records,
            self.status, self.window, NULL_SLOT, "auto",
        )  # fmt: skip
        to = dst.long()
        self.position[to] = computed
        self.conv_column[to] = self.conv_column[src.long()]

    def fold(self, slots: Tensor) -> None:
        """Fold the whole windows of these slots into their checkpoints; null slots are skipped."""
        pages = self.layers
        torch.ops.replaystate.flush(
            [p.state for p in pages], [p.u_ring for p in pages], [p.k_ring for p in pages], [p.g_ring for p in pages],
            slots, self.ring_start, self.num_committed, self.step_records, self.status, self.window, NULL_SLOT, "auto",
        )  # fmt: skip

    def restart(self, slots: Tensor, position: Tensor) -> None:
        """These slots get a checkpoint of their own at `position`, with an empty window: whatever they held is gone."""
        at = slots.long()
        for word in (self.ring_start, self.num_committed, self.status, self.step_records, self.conv_column):
            word[at] = 0
        self.position[at] = position

    def clear(self, slots: Tensor) -> None:
        """Zero the checkpoints of these slots (and of the null slot): a request starts there."""
        for page in self.layers:
            page.state.index_fill_(0, slots.long(), 0)

    def _raise_misfit(self, slots: Tensor, computed: Tensor, pending: Tensor, fits: Tensor) -> None:
        row = int((~fits).nonzero()[0])
        slot = int(slots[row])
        step = int(self.step_records[slot, 0]) & 0xFFFF if bool(pending[row]) else 0
        raise ProtocolError(
            f"replaystate.vllm: block {slot} stands at {int(self.position[slot])} tokens"
            f"{f' and a step of {step}' if step else ''}, but its request continues after {int(computed[row])}"
        )
