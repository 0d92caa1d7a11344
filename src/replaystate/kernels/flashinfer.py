"""FlashInfer's SM100 ReplaySSM kernel and materializer: whether they can run here, and loading them.

The only module that imports flashinfer. Their g ring is cumulative since the checkpoint, ours is per token: the two
kernels' rings are not interchangeable (`replaystate.convert_g_ring` translates).
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import re
from collections.abc import Callable
from typing import Any

import torch

from ..errors import ArgumentError, MissingDependencyError

G_LAYOUT = "cumulative"
KERNEL_MODULE = "flashinfer.gdn_kernels.gdn_replay_mtp_umma"
KERNEL_NAME = "gated_delta_rule_mtp_ucache_flush_umma"
MATERIALIZER_MODULE = "flashinfer.gdn_kernels.gdn_prefix_materialize"
MATERIALIZER_NAME = "gdn_prefix_materialize"
VERSION_FLOOR = "0.7.3"


def reason() -> str | None:
    """None when FlashInfer's SM100 kernel can run on this machine, else why not. Imports nothing of it."""
    if importlib.util.find_spec("flashinfer") is None:
        return "flashinfer is not installed"
    try:
        version = importlib.metadata.version("flashinfer-python")
    except importlib.metadata.PackageNotFoundError:
        return "the version of flashinfer cannot be read (no flashinfer-python distribution)"
    if _release(version) < _release(VERSION_FLOOR):
        return f"flashinfer {version} is older than {VERSION_FLOOR}"
    if not torch.cuda.is_available():
        return "no CUDA device"
    major, minor = torch.cuda.get_device_capability()
    if major != 10:
        return f"the device is sm_{major}{minor}, the kernel needs SM100"
    return None


def load_kernel() -> Callable[..., Any]:
    """FlashInfer's kernel.

    Raises:
        MissingDependencyError: it cannot run here; the message names the function, the version floor and the reason.
    """
    return _load(KERNEL_MODULE, KERNEL_NAME)


def load_materializer() -> Callable[..., Any]:
    """FlashInfer's materializer for fp16 checkpoints.

    Raises:
        MissingDependencyError: it cannot run here.
        ArgumentError: FlashInfer was imported for another state dtype, which is fixed from then on.
    """
    materializer = _load(MATERIALIZER_MODULE, MATERIALIZER_NAME)
    found = importlib.import_module(MATERIALIZER_MODULE).state_ty_torch()
    if found != torch.float16:
        raise ArgumentError(
            f"{MATERIALIZER_NAME}: FlashInfer was imported for {found} states, expected torch.float16. "
            "Set GDN_UCACHE_STATE_DTYPE=fp16 before starting the process"
        )
    return materializer


def _load(module: str, name: str) -> Callable[..., Any]:
    why = reason()
    cause: Exception | None = None
    if why is None:
        try:
            function: Callable[..., Any] = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError) as error:
            why, cause = str(error), error
        else:
            return function
    raise MissingDependencyError(f"GDN ReplaySSM requires {name} (FlashInfer >= {VERSION_FLOOR}): {why}") from cause


def _release(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: (0, 7, 3) for '0.7.3.post1'."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in match.group().split(".")) if match else (0,)
