"""Hooks of mkdocs: the navigation follows the files, and pages take blocks from the code (`blocks.py`).

- A section lists its known pages in order, then every other page of its folder, so a new page needs no edit here.
- `<!-- build: NAME -->` becomes what `blocks.BLOCKS[NAME]()` returns.
- A fence of language `math` becomes MathML, which browsers draw themselves.
- `<!-- no-run: REASON -->` above a code block becomes a visible line: readers see that CI does not run it, and why.
- A link that leaves docs/ becomes the name of its file: the site holds only docs/.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import blocks
from latex2mathml.converter import convert
from mkdocs.structure.files import File

SECTIONS: list[tuple[str, str, list[str]]] = [
    (
        "How-to",
        "how-to",
        [
            "transformers.md",
            "vllm.md",
            "own-engine.md",
            "prefix-states.md",
            "export-import.md",
            "dtypes-and-window.md",
            "plan.md",
            "simulate.md",
            "bench.md",
            "debugging.md",
        ],
    ),
    ("Explanation", "explanation", ["mathematics.md", "numerics.md", "limits.md", "comparison.md"]),
    (
        "Reference",
        "reference",
        [
            *("index.md", "cache.md", "functional.md", "kernel-api.md", "replayssm.md", "transformers.md"),
            *("truth.md", "shapes-and-errors.md", "backends.md", "command-line.md", "tools.md", "contract.md"),
        ],
    ),
    ("Decisions", "decisions", ["README.md"]),
]
"""Title, folder under docs/, and the pages that come first, in this order."""

MATH = re.compile(r"^(?P<indent> *)```math\n(?P<latex>.*?)\n(?P=indent)```$", re.MULTILINE | re.DOTALL)
ACCENT = re.compile(
    r"<mover[^>]*><mrow><mi>(?P<letter>\w)</mi></mrow><mo[^>]*>(?P<accent>&#x0005E;|&#x0007E;)</mo></mover>"
)
COMBINING = {"&#x0005E;": "\u0302", "&#x0007E;": "\u0303"}
"""A hat or a tilde over one letter, as one character: browsers put a superscript beside it, not above the accent."""
NO_RUN = re.compile(r"^(?P<indent> *)<!--\s*no-run:\s*(?P<reason>.*?)\s*-->$", re.MULTILINE)
OUTSIDE = re.compile(r"\[(?P<words>[^\]]+)\]\((?P<target>\.\./[^)\s]+)\)")


def navigation(docs: Path) -> list[dict[str, Any]]:
    """Home, tutorial, the sections, results; only what exists."""
    sections: dict[str, list[str]] = {}
    for title, folder, first in SECTIONS:
        pages = sorted(page.name for page in (docs / folder).glob("*.md"))
        ordered = [name for name in first if name in pages] + [name for name in pages if name not in first]
        sections[title] = [f"{folder}/{name}" for name in ordered]
    return [
        {"Home": "index.md"},
        {"Tutorial": "tutorial.md"},
        {"How-to": sections["How-to"]},
        {"Explanation": sections["Explanation"]},
        {"Results": "results.md"},
        {"Reference": sections["Reference"]},
        {"Decisions": sections["Decisions"]},
    ]


def math(markdown: str) -> str:
    """Fences of language math as MathML, one block an equation."""

    def element(match: re.Match[str]) -> str:
        lines = [convert(line.strip(), display="block") for line in match["latex"].splitlines() if line.strip()]
        return f'<div class="math">{ACCENT.sub(_accented, "".join(lines))}</div>'

    return MATH.sub(element, markdown)


def _accented(match: re.Match[str]) -> str:
    return f"<mi style='font-style: italic'>{match['letter']}{COMBINING[match['accent']]}</mi>"


def outside_links(markdown: str, page: Path, docs: Path) -> str:
    """Replace links to files of the repository outside docs/ by their words."""

    def words(match: re.Match[str]) -> str:
        target = Path(os.path.normpath(page.parent / match["target"].partition("#")[0]))
        return match[0] if target.is_relative_to(docs) else match["words"]

    return OUTSIDE.sub(words, markdown)


def on_config(config: Any) -> Any:
    """Set the navigation."""
    config["nav"] = navigation(Path(config["docs_dir"]))
    return config


def on_files(files: Any, *, config: Any) -> Any:
    """Add the charts of the results."""
    files.append(File.generated(config, blocks.CHARTS, content=blocks.charts()))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Fill a page."""
    docs = Path(config["docs_dir"])
    markdown = outside_links(markdown, docs / page.file.src_uri, docs)
    markdown = NO_RUN.sub(r'\g<indent><p class="no-run">Not run in CI: \g<reason>.</p>\n', markdown)
    return blocks.fill(math(markdown))
