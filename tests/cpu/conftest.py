"""Every test here runs on the C++ kernels; `isa` repeats it on each instruction set that this machine has."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from replaystate.kernels import cpu_backend

ISAS = ("neon", "scalar") if platform.machine() in ("aarch64", "arm64") else ("avx512", "avx2", "scalar")
HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Without the extension there is nothing to test here; what is said about it then is tested in test_build.py."""
    reason = cpu_backend.usable()
    if reason is None:
        return
    for item in items:
        if HERE in item.path.parents and item.path.name != "test_build.py":
            item.add_marker(pytest.mark.skip(reason=f"backend cpu: {reason}"))


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Inside, the kernels of this instruction set run."""
    before = cpu_backend.isa()
    if not cpu_backend.use_isa(request.param):
        pytest.skip(f"this machine has no {request.param}")
    yield request.param
    cpu_backend.use_isa(before)


@pytest.fixture
def restore_threads() -> Iterator[None]:
    """Restores the number of threads."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
