"""The documentation is true: its examples run, its commands and links exist.

How this tests, in plain words: every page is found by itself: README.md, CONTRIBUTING.md and the others beside
them, all of docs/ and examples/. Its ```python blocks are executed in order and in one namespace, from the
repository root. Its shell blocks (```console and ```sh) are executed too: commands of `replaystate` and `python`,
each of which must exit with 0. A block that cannot run here is skipped by a comment on the line above its fence,
which says what it needs; the site shows it to the reader:

    <!-- no-run: needs a GPU -->
    <!-- no-run: needs a cluster -->

tests/gpu runs the blocks that need a GPU. Every fence names its language. Every `make` target that a shell block names
must be in the Makefile, every relative link must lead to a file, and the doctests of every public module of the package
must pass.
"""

from __future__ import annotations

import doctest
import importlib
import inspect
import os
import pkgutil
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

import replaystate

pytestmark = pytest.mark.docs

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")])
# A module that needs an extra, and the package to look for.
EXTRAS = {
    "replaystate.transformers": "transformers",
    "replaystate.vllm": "vllm",
    "replaystate.cli": "typer",
    "replaystate.simulate": "simpy",
}

FENCE = re.compile(r"^(?P<indent> *)(?P<ticks>```+)(?P<language>[\w-]*)")
NO_RUN = re.compile(r"<!--\s*no-run\b:?(?P<reason>.*?)-->")
LINK = re.compile(r"\]\((?P<target>[^)\s]+)\)")
SHELL = ("console", "bash", "sh", "shell")
PROSE = ("text", "math", "json", "toml", "yaml", "diff", "md", "http")
"""Languages of blocks that are read, not run."""
NEEDS_GPU = "needs a GPU"


@dataclass(frozen=True)
class Block:
    """One fenced block of a page; `line` is the number of its first line of code, from 1."""

    language: str
    code: str
    line: int
    no_run: str | None


def read_blocks(text: str) -> Iterator[Block]:
    """Yield the fenced blocks of a markdown text."""
    lines = text.splitlines()
    number = 0
    while number < len(lines):
        opening = FENCE.match(lines[number])
        if opening is None:
            number += 1
            continue
        first = number + 1
        last = first
        while last < len(lines) and lines[last].strip() != opening["ticks"]:
            last += 1
        if last == len(lines):
            raise ValueError(f"line {number + 1}: this block is never closed")
        above = next((line for line in reversed(lines[:number]) if line.strip()), "")
        skip = NO_RUN.fullmatch(above.strip())
        indent = len(opening["indent"])
        yield Block(
            language=opening["language"],
            code="\n".join(line[indent:] for line in lines[first:last]),
            line=first + 1,
            no_run=skip["reason"].strip() if skip else None,
        )
        number = last + 1


def commands(block: Block) -> list[str]:
    """The command lines of a shell block; where some begin with a prompt, the others are output."""
    lines = block.code.replace("\\\n", " ").splitlines()
    if any(line.lstrip().startswith("$ ") for line in lines):
        lines = [line.lstrip()[2:] for line in lines if line.lstrip().startswith("$ ")]
    words = [(shlex.split(line, comments=True), line.strip()) for line in lines]
    return [line for found, line in words if found]


def run_python_blocks(page: Path, *, reasons: tuple[str, ...] = ()) -> None:
    """Execute the python blocks of a page in one namespace, also those that are marked with one of the reasons."""
    namespace: dict[str, Any] = {"__name__": f"docs:{name_of(page)}"}
    for block in read_blocks(page.read_text(encoding="utf-8")):
        if block.language == "python" and (block.no_run is None or block.no_run in reasons):
            # The empty lines in front give a traceback the line numbers of the page.
            exec(compile("\n" * (block.line - 1) + block.code, str(page), "exec"), namespace)


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def modules() -> list[str]:
    """The names of the package's public modules, found without importing them (an extra may be missing)."""
    names = ["replaystate"]
    stack = [(list(replaystate.__path__), "replaystate.")]
    while stack:
        path, prefix = stack.pop()
        for info in pkgutil.iter_modules(path, prefix):
            if info.name.rpartition(".")[2].startswith("_"):
                continue
            names.append(info.name)
            if info.ispkg:
                stem = info.name.rpartition(".")[2]
                stack.append(([str(Path(entry) / stem) for entry in path], f"{info.name}."))
    return sorted(names)


def make_targets() -> set[str]:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    return set(re.findall(r"^([a-z][\w-]*):(?!=)", text, flags=re.MULTILINE))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_python_blocks_run(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    run_python_blocks(page)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_shell_blocks_run(page: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])}
    for block in read_blocks(page.read_text(encoding="utf-8")):
        if block.language not in SHELL or block.no_run is not None:
            continue
        for line in commands(block):
            program, *arguments = shlex.split(line, comments=True)
            if program == "make":  # its targets are other steps of CI: see the next test
                continue
            start = {"replaystate": [sys.executable, "-m", "replaystate"], "python": [sys.executable]}.get(program)
            assert start is not None, f"{name_of(page)}:{block.line}: {program}: say above the block what it needs"
            done = subprocess.run([*start, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True)
            assert done.returncode == 0, f"{name_of(page)}:{block.line}: {line}\n{done.stderr}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_blocks_say_what_they_are_and_why_they_do_not_run(page: Path) -> None:
    for block in read_blocks(page.read_text(encoding="utf-8")):
        where = f"{name_of(page)}:{block.line}"
        assert block.language in ("python", *SHELL, *PROSE), f"{where}: the fence names no known language"
        if block.no_run is not None:
            assert re.match(r"needs \w", block.no_run), f"{where}: no-run: say what the block needs"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_make_targets_exist(page: Path) -> None:
    known = make_targets()
    for block in read_blocks(page.read_text(encoding="utf-8")):
        if block.language in SHELL:
            for words in re.findall(r"^\s*(?:\$ )?make ([^#&|;\n]*)", block.code, flags=re.MULTILINE):
                named = {word for word in words.split() if re.fullmatch(r"[a-z][\w-]*", word)}
                assert named <= known, f"{name_of(page)}:{block.line}: make {sorted(named - known)}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_relative_links_lead_somewhere(page: Path) -> None:
    for target in LINK.findall(page.read_text(encoding="utf-8")):
        if not re.match(r"[a-z]+:|#", target):
            assert (page.parent / target.partition("#")[0]).exists(), f"{name_of(page)}: {target}"


def test_readme_has_an_example_that_runs() -> None:
    blocks = read_blocks((ROOT / "README.md").read_text(encoding="utf-8"))
    assert any(block.language == "python" and block.no_run is None for block in blocks)


@pytest.mark.parametrize("name", modules())
def test_doctests_pass(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for prefix, extra in EXTRAS.items():
        if name == prefix or name.startswith(f"{prefix}."):
            pytest.importorskip(extra)
    monkeypatch.chdir(ROOT)
    module = importlib.import_module(name)
    result = doctest.testmod(module, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert result.failed == 0, f"{result.failed} of {result.attempted} examples of {name} failed, see above"


@pytest.mark.parametrize("name", sorted(replaystate.__all__))
def test_public_name_has_an_example(name: str) -> None:
    item = getattr(replaystate, name)
    if not callable(item) or (inspect.isclass(item) and issubclass(item, BaseException | Enum)):
        pytest.skip("only functions and classes that do something need one")
    assert ">>> " in (inspect.getdoc(item) or ""), f"replaystate.{name}: its docstring has no example"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("```python\na = 1\n```\n", [("python", "a = 1", 2, None)]),
        ("<!-- no-run: needs a GPU -->\n```python\na\n```\n", [("python", "a", 3, "needs a GPU")]),
        ("<!-- no-run -->\n\n```python\na\n```\n", [("python", "a", 4, "")]),
        ("1. item\n\n   ```sh\n   make test\n   ```\n", [("sh", "make test", 4, None)]),
        ("````md\n```python\na\n```\n````\n", [("md", "```python\na\n```", 2, None)]),
    ],
)
def test_block_reader(text: str, expected: list[tuple[str, str, int, str | None]]) -> None:
    assert [(b.language, b.code, b.line, b.no_run) for b in read_blocks(text)] == expected


def test_block_reader_refuses_an_open_block() -> None:
    with pytest.raises(ValueError, match="line 2: this block is never closed"):
        list(read_blocks("text\n```python\na = 1\n"))
