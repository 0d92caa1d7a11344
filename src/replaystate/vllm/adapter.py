"""For a vLLM that brings its own GDN ReplaySSM: its path, with kernels that run on more than SM100.

That path asks two functions for its kernel and its materializer. They are pointed at ours, which take FlashInfer's
where the machine can run it and the library's own kernels elsewhere.
"""

from __future__ import annotations

import importlib
import sys

from .. import replayssm
from ..errors import ArgumentError, MissingDependencyError

ADAPTER_MODULE = "vllm.model_executor.layers.mamba.gdn.replayssm"
LOADERS = ("load_gdn_replayssm_kernel", "load_gdn_replayssm_materializer")


def install_adapter() -> None:
    """Point the loaders of vLLM's GDN ReplaySSM adapter at replaystate's, also where they were imported by name.

    Call it before vLLM builds its layers, in every process that does: with `REPLAYSTATE_VLLM_ADAPTER=1` the plugin does
    so. Calling it again changes nothing.

    Raises:
        MissingDependencyError: (an ImportError) this vLLM has no such adapter; no release up to 0.33 has one.
        ArgumentError: the adapter has other functions than those known here.
    """
    try:
        adapter = importlib.import_module(ADAPTER_MODULE)
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            f"install_adapter: this vLLM has no {ADAPTER_MODULE} ({error}); use the plugin's own layer instead"
        ) from error
    missing = [name for name in LOADERS if not callable(getattr(adapter, name, None))]
    if missing:
        raise ArgumentError(f"install_adapter: {ADAPTER_MODULE} has no {', '.join(missing)}: its surface has changed")
    for name in LOADERS:
        theirs, ours = getattr(adapter, name), getattr(replayssm, name)
        for module_name, module in list(sys.modules.items()):
            if module_name.partition(".")[0] == "vllm" and module is not None:
                for attribute, value in list(vars(module).items()):
                    if value is theirs:
                        setattr(module, attribute, ours)
