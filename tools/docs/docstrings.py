"""Docstrings as markdown: they are written to be read in a terminal, and a few of their habits mean other things there.

- A run of doctest lines becomes a code block (markdown would read `>>>` as a quotation).
- `::` before an indented block becomes `:` (a habit of reStructuredText).
- "contract section N" links to the page that has the section.
- An entry of Args for several names, "a, b: what they are", becomes one for each.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

CONTRACT = re.compile(r"\bcontract(?=,? sections? \d)")
SEVERAL = re.compile(r"^(?P<indent> +)(?P<names>\w+(?:, \w+)+)(?P<text>: .*(?:\n(?P=indent) +.*)*)$", re.MULTILINE)
SECTION = re.compile(r"^ *Args:\n(?:.+\n?)+", re.MULTILINE)
DOUBLE_COLON = re.compile(r"::[ \t]*$", re.MULTILINE)


def as_markdown(docstring: str) -> str:
    """The docstring with the replacements above."""
    docstring = SECTION.sub(lambda section: SEVERAL.sub(_one_each, section[0]), docstring)
    lines: list[str] = []
    fence: str | None = None  # the open one, with its indent
    for line in DOUBLE_COLON.sub(":", docstring).splitlines():
        indent = line[: len(line) - len(line.lstrip())]
        if line.lstrip().startswith(">>> ") and fence is None:
            fence = f"{indent}```"
            lines.append(f"{fence}pycon")
        elif fence is not None and not line.strip():
            lines.append(fence)
            fence = None
        lines.append(line if fence else CONTRACT.sub("[contract](contract.md)", line))
    return "\n".join([*lines, fence] if fence else lines)


def _one_each(entry: re.Match[str]) -> str:
    return "\n".join(f"{entry['indent']}{name}{entry['text']}" for name in entry["names"].split(", "))


class TerminalDocstrings(griffe.Extension):
    """Applies `as_markdown` to every docstring that griffe reads."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        """Called once for each object of the package."""
        if not obj.is_alias and obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)
