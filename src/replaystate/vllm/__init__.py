"""vLLM runs its Gated DeltaNet layers on replaystate's cache and kernels: a plugin, off unless it is asked for.

`register` is the entry point (group `vllm.general_plugins`). It does something only where `VLLM_PLUGINS` names
`replaystate`, or `REPLAYSTATE_VLLM` or `REPLAYSTATE_VLLM_ADAPTER` is set. vLLM calls it in every process, so it imports
nothing that may touch a device: the layer comes with the model classes, which vLLM imports in its workers.
"""

from __future__ import annotations

import os

from .adapter import install_adapter
from .settings import ADAPTER_VARIABLE, ENVIRONMENT_VARIABLE, PLUGIN_NAME

__all__ = ["install_adapter", "register"]


def register() -> None:
    """Make the plugin known to this process's vLLM; calling it again changes nothing."""
    named = PLUGIN_NAME in os.environ.get("VLLM_PLUGINS", "").split(",")
    if named or os.environ.get(ENVIRONMENT_VARIABLE):
        from .startup import install

        install()
    if os.environ.get(ADAPTER_VARIABLE) == "1":
        install_adapter()
