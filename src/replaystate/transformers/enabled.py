"""What `enable` leaves on a model: how its caches are made, and what to put back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from .. import GDNShape
from ..errors import ProtocolError
from .states import Settings
from .stats import ReplayStats


@dataclass
class Enabled:
    """The record of one enabled model, an attribute `_replaystate` of the model and of each Gated DeltaNet module.

    Args:
        shape: head counts and dims of its Gated DeltaNet layers.
        settings: window, width and dtypes of caches made from now on.
        text_config: the decoder's config, from which transformers derives a cache's layers.
        layers: the Gated DeltaNet modules by layer index, in the order of a forward.
        replaced_forwards: instance-level forwards that ours stand in for (set by accelerate or kernels), by layer.
        stats: counters over all caches.
        draft_cut_reported: whether the log line about long candidate lists was written.
        assisted_past: tokens already in the cache when assisted generation begins; see `prepare_inputs`.
    """

    shape: GDNShape
    settings: Settings
    text_config: Any
    layers: dict[int, Any]
    replaced_forwards: dict[int, Any] = field(default_factory=dict)
    stats: ReplayStats = field(default_factory=ReplayStats)
    draft_cut_reported: bool = False
    assisted_past: int = 0

    def devices(self) -> dict[int, torch.device]:
        """The device on which each Gated DeltaNet layer runs, by layer index."""
        found: dict[int, torch.device] = {}
        for index, module in self.layers.items():
            hook = getattr(module, "_hf_hook", None)  # accelerate's, for models spread over devices
            device = getattr(hook, "execution_device", None)
            found[index] = module.A_log.device if device is None else torch.empty(0, device=device).device
        return found


def enabled_of(model: Any, fn: str) -> Enabled:
    """The record of an enabled model.

    Raises:
        ProtocolError: the model is not enabled.
    """
    record = vars(model).get("_replaystate")
    if not isinstance(record, Enabled):
        raise ProtocolError(
            f"{fn}: model: this {type(model).__name__} is not enabled: call replaystate.transformers.enable(model)"
        )
    return record
