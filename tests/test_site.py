"""The documentation site's own code (tools/docs): what it takes from the code and the measurements is right.

How this tests: figures against closed forms, the index and the navigation against the files, the readers of docstrings
and markdown on small texts. The strict build itself is `make docs`.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mkdocs")
pytestmark = pytest.mark.docs

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"


@pytest.fixture(autouse=True)
def tools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "tools/docs")


def module(name: str) -> Any:
    return __import__(name)


def test_native_bytes_are_a_read_and_a_write_of_the_state_per_token() -> None:
    figures = module("figures")
    state = 32 * 128 * 128 * 2
    assert figures.native(1, 1, figures.torch.float16).total == 2 * state
    assert figures.native(4, 1, figures.torch.float16).total == 5 * state  # one read, a write for each draft
    assert figures.native(4, 4, figures.torch.float32).total == 5 * 2 * state / 4


def test_replay_bytes_follow_the_cycle_of_a_window() -> None:
    """T = 4, all accepted, W = 16: windows of 4, 8, 12 and 16 rows take turns, and the last one is folded."""
    figures = module("figures")
    state, row = 32 * 128 * 128 * 2, (32 * 128 + 16 * 128) * 2 + 32 * 4
    cost = figures.replay(4, 4, figures.torch.float16, figures.torch.float16)
    assert cost.state_read == state / 4
    assert cost.ring_written == row
    assert math.isclose(cost.state_written, state / 16, rel_tol=0.01)
    assert math.isclose(cost.ring_read, 10 * row / 4, rel_tol=0.01)


def test_the_ring_figure_tells_what_a_cache_does() -> None:
    words = module("figures").ring()
    assert (
        "appends rows 8 to 11 and folds nothing; after the commit of 2 tokens ring_start is 0, num_committed 10"
        in words
    )
    assert "appends rows 14 to 17 and folds rows 0 to 13 into the checkpoint; after the commit of 2 tokens" in words
    assert "ring_start is 14, num_committed 2" in words


@pytest.mark.parametrize("name", ["ring", "bytes_per_token", "drift"])
def test_figures_have_text_alternatives_and_no_empty_line(name: str) -> None:
    html = getattr(module("figures"), name)()
    assert all(part in html for part in ('role="img"', 'aria-label="', "<figcaption>"))
    assert "\n\n" not in html  # markdown would end the block there


def test_a_missing_measurement_is_said_and_not_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    figures, blocks = module("figures"), module("blocks")
    monkeypatch.setattr(figures, "DRIFT", ROOT / "benchmarks/results/absent.json")
    assert "No measurement is committed" in figures.drift()
    monkeypatch.setattr(blocks, "RESULTS", tmp_path)
    assert "No results are committed" in blocks.measurements()


def test_every_number_of_a_result_file_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = module("blocks")
    monkeypatch.setattr(blocks, "ROOT", ROOT)
    shown = blocks.measurements()
    for result in json.loads((ROOT / "benchmarks/results/h200.json").read_text())["results"]:
        assert f"| {blocks._cell(result['us'])} |" in shown


def test_the_charts_are_those_of_bench_report() -> None:
    blocks = module("blocks")
    html = blocks.charts()
    assert html.startswith("<!doctype html>")
    assert "h200.json" in html
    assert f"({blocks.CHARTS})" in blocks.measurements()


def test_the_index_of_decisions_has_every_note() -> None:
    index = module("blocks").decisions()
    notes = sorted(page.name for page in (DOCS / "decisions").glob("[0-9]*.md"))
    assert notes
    assert all(f"]({name})" in index for name in notes)


def test_pages_ask_for_known_blocks_and_every_block_has_a_page() -> None:
    blocks = module("blocks")
    asked = [name for page in DOCS.glob("**/*.md") for name in blocks.markers(page.read_text(encoding="utf-8"))]
    assert sorted(asked) == sorted(blocks.BLOCKS)


def test_the_backend_table_names_what_select_would_take() -> None:
    table = module("blocks").backend_matrix()
    assert "| CPU tensors, any dtypes and sizes | `cpu` |" in table
    assert "| CUDA, K = 512 | `torch` | cuda: head_k_dim 512 is above 256" in table


def test_the_command_line_page_has_every_command() -> None:
    from replaystate.cli.app import app

    page = module("blocks").command_line()
    for command in app.registered_commands:
        assert f"## `replaystate {command.name}`" in page


def test_every_page_is_in_the_navigation(tmp_path: Path) -> None:
    hooks = module("hooks")

    def pages(items: Any) -> list[str]:
        if isinstance(items, str):
            return [items]
        return [page for item in items for page in pages(next(iter(item.values())) if isinstance(item, dict) else item)]

    assert sorted(pages(hooks.navigation(DOCS))) == sorted(
        page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")
    )
    for folder in ("how-to", "explanation", "reference", "decisions"):
        (tmp_path / folder).mkdir()
    (tmp_path / "how-to/a-new-page.md").touch()
    assert "how-to/a-new-page.md" in pages(hooks.navigation(tmp_path))


def test_docstrings_become_markdown() -> None:
    as_markdown = module("docstrings").as_markdown
    assert as_markdown("As::\n\n    x = 1\n") == "As:\n\n    x = 1"
    assert as_markdown("Text.\n\n>>> f(1)\n2\n\nSource: contract section 3.") == (
        "Text.\n\n```pycon\n>>> f(1)\n2\n```\n\nSource: [contract](contract.md) section 3."
    )
    assert as_markdown("Args:\n    a, b: two\n        lines.\n    c: one.\n") == (
        "Args:\n    a: two\n        lines.\n    b: two\n        lines.\n    c: one."
    )
    assert as_markdown("Raises:\n    AError, BError: why.") == "Raises:\n    AError, BError: why."
    assert as_markdown("    >>> f(1)\n    2") == "    ```pycon\n    >>> f(1)\n    2\n    ```"


def test_markdown_of_pages_is_filled() -> None:
    hooks = module("hooks")
    assert "<msub><mi>S</mi><mi>t</mi></msub>" in hooks.math("```math\nS_t\n```")
    assert "k\u0302</mi>" in hooks.math("```math\n\\hat{k}_t\n```")
    page = DOCS / "how-to/x.md"
    assert hooks.outside_links("[a](../../src/x.py) [b](../index.md)", page, DOCS) == "a [b](../index.md)"
