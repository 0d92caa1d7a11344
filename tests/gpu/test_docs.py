"""The documentation's blocks that need a GPU run on one, after the other blocks of their page."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.test_docs import NEEDS_GPU, PAGES, ROOT, name_of, read_blocks, run_python_blocks

pytestmark = pytest.mark.gpu

GPU_PAGES = [page for page in PAGES if any(b.no_run == NEEDS_GPU for b in read_blocks(page.read_text("utf-8")))]


@pytest.mark.parametrize("page", GPU_PAGES, ids=name_of)
def test_gpu_blocks_run(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    run_python_blocks(page, reasons=(NEEDS_GPU,))
