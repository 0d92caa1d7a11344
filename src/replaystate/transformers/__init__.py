"""Replayed states for Gated DeltaNet models of Hugging Face transformers.

`enable(model)` lets `generate` speculate with Qwen3-Next and Qwen3.5 models (`prompt_lookup_num_tokens=`,
`assistant_model=`): rejected drafts are rolled back through the ring, and the text is that of the stock model.

Only this package imports transformers; it needs version 5.17 or newer, below 6.
"""

from .cache import ReplayDynamicCache
from .compat import SUPPORTED_VERSIONS
from .patch import disable, enable, is_enabled, make_cache, stats
from .states import GDNStates, Settings
from .stats import ReplayStats

__all__ = [
    "SUPPORTED_VERSIONS",
    "GDNStates",
    "ReplayDynamicCache",
    "ReplayStats",
    "Settings",
    "disable",
    "enable",
    "is_enabled",
    "make_cache",
    "stats",
]
