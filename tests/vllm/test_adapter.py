"""install_adapter on a stand-in for the module that vLLM's main branch has: same names, same way of being imported."""

from __future__ import annotations

import functools
import sys
from types import ModuleType

import pytest

from replaystate import replayssm
from replaystate.errors import ArgumentError, MissingDependencyError
from replaystate.vllm import install_adapter, register
from replaystate.vllm.adapter import ADAPTER_MODULE, LOADERS

PARENTS = [ADAPTER_MODULE.rsplit(".", n)[0] for n in range(ADAPTER_MODULE.count("."), 0, -1)]
LAYER_MODULE = "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn"


def refuse() -> None:
    raise ImportError("requires SM100")


@pytest.fixture
def upstream(monkeypatch: pytest.MonkeyPatch) -> tuple[ModuleType, ModuleType]:
    """The adapter, and a layer module that took its loaders by name, one under another name."""
    for name in [*PARENTS, ADAPTER_MODULE, LAYER_MODULE]:
        module = ModuleType(name)
        module.__path__ = []
        monkeypatch.setitem(sys.modules, name, module)
    adapter, layer = sys.modules[ADAPTER_MODULE], sys.modules[LAYER_MODULE]
    adapter.load_gdn_replayssm_kernel = functools.cache(refuse)
    adapter.load_gdn_replayssm_materializer = functools.cache(lambda: refuse())
    layer.load_gdn_replayssm_kernel = adapter.load_gdn_replayssm_kernel
    layer.load_materializer = adapter.load_gdn_replayssm_materializer
    return adapter, layer


def test_loaders_are_ours_wherever_they_were_imported(upstream: tuple[ModuleType, ModuleType]) -> None:
    adapter, layer = upstream
    for _ in range(2):
        install_adapter()
        assert (
            adapter.load_gdn_replayssm_kernel is layer.load_gdn_replayssm_kernel is replayssm.load_gdn_replayssm_kernel
        )
        assert adapter.load_gdn_replayssm_materializer is layer.load_materializer
        assert layer.load_materializer is replayssm.load_gdn_replayssm_materializer
    assert layer.load_gdn_replayssm_kernel().g_layout == layer.load_materializer().g_layout


def test_other_modules_keep_what_they_have(
    upstream: tuple[ModuleType, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    other = ModuleType("vllm_other")
    other.load = upstream[0].load_gdn_replayssm_kernel
    monkeypatch.setitem(sys.modules, "vllm_other", other)
    install_adapter()
    assert other.load is not replayssm.load_gdn_replayssm_kernel


def test_the_plugin_installs_it_when_asked(
    upstream: tuple[ModuleType, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    register()
    assert upstream[0].load_gdn_replayssm_kernel is not replayssm.load_gdn_replayssm_kernel
    monkeypatch.setenv("REPLAYSTATE_VLLM_ADAPTER", "1")
    register()
    assert upstream[0].load_gdn_replayssm_kernel is replayssm.load_gdn_replayssm_kernel


def test_without_the_module(upstream: tuple[ModuleType, ModuleType], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, ADAPTER_MODULE)
    with pytest.raises(MissingDependencyError, match=r"this vLLM has no vllm\.model_executor"):
        install_adapter()


def test_a_changed_surface(upstream: tuple[ModuleType, ModuleType]) -> None:
    del upstream[0].load_gdn_replayssm_materializer
    with pytest.raises(ArgumentError, match=f"has no {LOADERS[1]}"):
        install_adapter()
