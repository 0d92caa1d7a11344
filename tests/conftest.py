"""Settings for the whole suite: the same run every time, and no GPU test where there is no GPU."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

# Deterministic: the examples depend on the test alone, not on the day. `HYPOTHESIS_PROFILE=explore` searches
# with new random examples; a failure it finds becomes an @example of that test.
settings.register_profile(
    "fixed", derandomize=True, deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("explore", parent=settings.get_profile("fixed"), derandomize=False, max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` on a machine without a CUDA device."""
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_items and not torch.cuda.is_available():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(autouse=True)
def _seed() -> None:
    """Every test starts from the same torch seed, whichever process or order it runs in."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _nan_in_empty_memory() -> Iterator[None]:
    """Every `torch.empty` (`new_empty`, `empty_like`) is full of NaN, or of the largest int, in the whole suite.

    So a lane that a kernel forgets to write is seen. torch does this in its deterministic mode.
    """
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
