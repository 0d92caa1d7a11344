"""What pages of the documentation take from the code, the command and the committed measurements, as markdown.

A page asks for a block with a line of its own, `<!-- build: NAME -->`; `BLOCKS` at the end has the names.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import figures
import torch

from replaystate import backends
from replaystate.bench import page, read_results
from replaystate.errors import ArgumentError
from replaystate.kernels import Call, registry
from replaystate.kernels.cuda import launch

ROOT = figures.ROOT
DECISIONS = ROOT / "docs/decisions"
RESULTS = ROOT / "benchmarks/results"
CHARTS = "charts.html"


def table(header: list[str], rows: list[list[str]], *, numbers: int = 0) -> str:
    """A markdown table; the last `numbers` columns are aligned to the right."""
    rule = ["---"] * (len(header) - numbers) + ["---:"] * numbers
    cells = [header, rule, *([cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


# --- which backend ---------------------------------------------------------------------------------------------------

HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32
LIMITS = (launch.MAX_K, launch.MAX_WIDTH)

CALLS = [
    ("CPU tensors, any dtypes and sizes", Call("replay_step", "cpu", BRAIN, HALF, HALF, (16, 32, 128, 128))),
    ("CUDA, K = V = 128, fp16 state", Call("replay_step", "cuda", BRAIN, HALF, HALF, (16, 32, 128, 128))),
    ("CUDA, K = V = 128, float32 state", Call("replay_step", "cuda", BRAIN, SINGLE, SINGLE, (16, 32, 128, 128))),
    ("CUDA, K = 96, V = 192", Call("replay_step", "cuda", BRAIN, HALF, HALF, (16, 32, 96, 192))),
    (
        f"CUDA, K = {2 * launch.MAX_K}",
        Call("replay_step", "cuda", BRAIN, HALF, HALF, (16, 32, 2 * launch.MAX_K, 128)),
    ),
    (
        f"CUDA, steps of {2 * launch.MAX_WIDTH} tokens",
        Call("replay_step", "cuda", BRAIN, HALF, HALF, (16, 32, 128, 128), executed_width=2 * launch.MAX_WIDTH),
    ),
    ("another device of torch (mps, xpu, ...)", Call("replay_step", "mps", BRAIN, HALF, HALF, (16, 32, 128, 128))),
]


def backend_matrix() -> str:
    """For some calls, what each backend says, best first, and which one runs where all of them are usable."""
    rows = []
    for words, call in CALLS:
        answers = [(backend.NAME, backend.supports(call)) for backend in registry.BY_PREFERENCE]
        chosen = next(name for name, reason in answers if reason is None)
        passed_over = [f"{name}: {reason}" for name, reason in answers[: [n for n, _ in answers].index(chosen)]]
        rows.append([words, f"`{chosen}`", "; ".join(passed_over) or "–"])
    return table(["call of `replay_step`", "backend", "passed over, because"], rows)


def backend_reasons() -> str:
    """The backends on the machine that builds these pages."""
    rows = [[f"`{info.name}`", "usable" if info.usable else f"not usable: {info.reason}"] for info in backends()]
    return table(["backend, best first", "on the machine that built this page"], rows)


def ops() -> str:
    """Every op of torch.ops.replaystate with what it writes."""
    rows = []
    for schema in sorted(torch._C._jit_get_all_schemas(), key=lambda found: found.name):
        if not schema.name.startswith("replaystate::"):
            continue
        written = [f"`{x.name}`" for x in schema.arguments if x.alias_info is not None and x.alias_info.is_write]
        returns = ", ".join(str(x.type) for x in schema.returns) or "–"
        rows.append([f"`{schema.name.partition('::')[2]}`", ", ".join(written) or "nothing", returns])
    return table(["op", "writes", "returns"], rows)


# --- the command -----------------------------------------------------------------------------------------------------


def command_line() -> str:
    """The help of every command, by typer's own writer of documentation."""
    words = [sys.executable, "-m", "typer", "replaystate.cli.app", "utils", "docs", "--name", "replaystate"]
    done = subprocess.run(
        words, capture_output=True, text=True, cwd=ROOT, env={**os.environ, "NO_COLOR": "1"}, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(words[1:])}: {done.stderr.strip()}")
    _, _, body = done.stdout.partition("\n")  # the page has a title of its own
    return body.strip()


# --- decisions -------------------------------------------------------------------------------------------------------


def decisions() -> str:
    """The index of docs/decisions, from the first lines of the notes."""
    rows = []
    for note in sorted(DECISIONS.glob("[0-9]*.md")):
        number, _, title = heading_of(note).partition(": ")
        date = re.search(r"^Date: (\d{4}-\d\d-\d\d)\b", note.read_text(encoding="utf-8"), re.MULTILINE)
        if date is None or not re.fullmatch(r"\d{4}", number):
            raise ValueError(f"{note.name}: expected '# NNNN: title' and a line 'Date: YYYY-MM-DD'")
        rows.append([f"[{number}]({note.name})", date[1], title])
    return table(["note", "date", "decision"], rows)


def heading_of(page: Path) -> str:
    """The first heading of a page, without its mark."""
    return next(line for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("# "))[2:].strip()


# --- measurements ----------------------------------------------------------------------------------------------------

UNITS = {"us": "µs", "median_us": "median µs", "iqr_us": "IQR µs", "min_us": "min µs", "gb_per_s": "GB/s"}


def result_files() -> dict[Path, dict[str, Any]]:
    """The files of benchmarks/results that hold a list of results, by path."""
    found = {path: json.loads(path.read_text(encoding="utf-8")) for path in sorted(RESULTS.glob("*.json"))}
    return {path: data for path, data in found.items() if isinstance(data.get("results"), list)}


def charts() -> str:
    """The page of `replaystate bench report`, a file of its own on the site (`CHARTS`).

    Times of kernels are drawn. Results of another kind, such as a simulation's, stand in the tables only.
    """
    times = []
    for path in result_files():
        with suppress(ArgumentError):
            times.append(read_results(path))
    return page(times)


def measurements() -> str:
    """Every file of results: where it was measured, and its numbers."""
    parts = [_one_file(path, data) for path, data in result_files().items()]
    if not parts:
        return "*No results are committed.*"
    link = f"[Charts of these files]({CHARTS})"
    return "\n\n".join([f"{link}: what loses, time against batch with the floor of memory speed, speed-ups.", *parts])


def _one_file(path: Path, data: dict[str, Any]) -> str:
    environment = data.get("environment", {})
    facts = {**{key: value for key, value in data.items() if not isinstance(value, (list, dict))}, **environment}
    lines = [f"## {path.stem}", ""]
    lines += [f"- **{key}**: {_cell(value)}" for key, value in facts.items() if value not in (None, "")]
    lines += [f"- **file**: `{path.relative_to(ROOT).as_posix()}`", ""]
    checks = data.get("checks", [])
    if checks:
        rows = [[x["name"], x["target"], _cell(x["value"]), "yes" if x["met"] else "**no**"] for x in checks]
        lines += [table(["target", "wanted", "measured", "met"], rows), ""]
    groups: dict[str, list[dict[str, Any]]] = {}
    for result in map(_flat, data["results"]):
        groups.setdefault(str(result.pop("name", "")), []).append(result)
    for name, results in groups.items():
        found = dict.fromkeys(key for result in results for key in result)
        same = {key for key in found if len(results) > 1 and len({str(r.get(key)) for r in results}) == 1}
        keys = [key for key in found if key not in same]
        numeric = [key for key in keys if all(isinstance(r.get(key, 0), (int, float)) for r in results)]
        order = [key for key in keys if key not in numeric] + numeric
        rows = [[_cell(result.get(key, "")) for key in order] for result in results]
        body = table([UNITS.get(key, key.replace("_", " ")) for key in order], rows, numbers=len(numeric))
        fold = "???+" if name == next(iter(groups)) else "???"  # the first is open
        lines += [f'{fold} note "{name}"', ""]
        if same:
            common = (f"{key.replace('_', ' ')} {_cell(results[0][key])}" for key in found if key in same)
            lines += [f"    All of these: {', '.join(common)}.", ""]
        lines += [*(f"    {line}" for line in body.splitlines()), ""]
    return "\n".join(lines)


def _flat(result: dict[str, Any]) -> dict[str, Any]:
    """Scalars of a result, those of a nested object (its timing) under their own names; empty objects vanish."""
    flat: dict[str, Any] = {}
    for key, value in result.items():
        if isinstance(value, dict):
            flat.update({k if k not in result else f"{key} {k}": v for k, v in _flat(value).items()})
        else:
            flat[key] = value
    return flat


def _cell(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    if isinstance(value, int) or value == 0 or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def markers(markdown: str) -> Iterator[str]:
    """Names of the blocks that a page asks for."""
    return iter(MARKER.findall(markdown))


def fill(markdown: str) -> str:
    """Replace every marker by its block.

    Raises:
        KeyError: a name that no block has.
    """
    return MARKER.sub(lambda match: BLOCKS[match[1]](), markdown)


MARKER = re.compile(r"^<!-- build: ([a-z-]+) -->$", re.MULTILINE)
BLOCKS: dict[str, Callable[[], str]] = {
    "backend-matrix": backend_matrix,
    "backend-reasons": backend_reasons,
    "bytes-figure": figures.bytes_per_token,
    "bytes-table": figures.bytes_table,
    "command-line": command_line,
    "decisions": decisions,
    "drift-figure": figures.drift,
    "measurements": measurements,
    "ops": ops,
    "ring-figure": figures.ring,
}
