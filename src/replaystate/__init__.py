"""replaystate: the decode-state runtime for Gated DeltaNet language models."""

from .cache import ReplayCache, from_k_major, to_k_major
from .errors import ReplayStateError, SlotStatus
from .functional import gated_delta_rule, replay_step
from .kernel_api import convert_g_ring, gated_delta_rule_mtp_ucache_flush, gdn_prefix_materialize
from .kernels import BackendInfo, backends
from .shapes import GDNShape

__version__ = "0.1.0"

__all__ = [
    "BackendInfo",
    "GDNShape",
    "ReplayCache",
    "ReplayStateError",
    "SlotStatus",
    "__version__",
    "backends",
    "convert_g_ring",
    "from_k_major",
    "gated_delta_rule",
    "gated_delta_rule_mtp_ucache_flush",
    "gdn_prefix_materialize",
    "replay_step",
    "to_k_major",
]
