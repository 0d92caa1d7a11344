"""What `register` does to vLLM: the configuration is checked as it is made, and the models come with our layer.

vLLM has a hook for the models (its registry takes a class by name, and imports it in the workers only) but none for the
configuration, so `VllmConfig.__post_init__` is wrapped: unsupported combinations end before any process is started.
"""

from __future__ import annotations

import functools
from typing import Any

from vllm import ModelRegistry
from vllm.config import VllmConfig
from vllm.logger import init_logger

from .settings import ARCHITECTURES, Settings, refuse_unsupported

logger = init_logger("vllm.replaystate")


def install() -> None:
    """Once a process, however often it is called."""
    if getattr(VllmConfig.__post_init__, "replaystate", False):
        return
    for architecture in ARCHITECTURES:
        ModelRegistry.register_model(architecture, f"replaystate.vllm.models:{architecture}")
    VllmConfig.__post_init__ = _checked(VllmConfig.__post_init__)


def _checked(post_init: Any) -> Any:
    @functools.wraps(post_init)
    def checked(config: Any) -> None:
        post_init(config)
        settings = Settings.of(config)
        if settings is not None and _is_served(config):
            refuse_unsupported(config)

    checked.replaystate = True  # type: ignore[attr-defined]
    return checked


def _is_served(config: Any) -> bool:
    """Not a part of vLLM without a model, a view of a submodel, or the configuration of the drafter."""
    model, speculation = config.model_config, config.speculative_config
    if model is None or model.is_submodel_config:
        return False
    if speculation is None or model is speculation.target_model_config:  # without a draft model both are the target
        return True
    return model is not speculation.draft_model_config
