"""What the command prints: consoles, numbers for people, and tables."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..bench import Comparison
from ..verify import WIDTHS, Check, Report
from .generation import Outcome, Run

CONTROL_CHARACTERS = {code: "\ufffd" for code in [*range(32), 127, *range(128, 160)] if chr(code) not in "\n\t"}
"""A model may write any bytes; those that steer a terminal are not passed on."""


def results() -> Console:
    """The console for results: stdout. Plain text with NO_COLOR, or where stdout is no terminal."""
    plain = bool(os.environ.get("NO_COLOR"))
    return Console(file=sys.stdout, highlight=False, color_system=None if plain else "auto", no_color=plain or None)


def note(message: str) -> None:
    """A line of progress on stderr."""
    sys.stderr.write(f"replaystate: {message}\n")
    sys.stderr.flush()


def write_prompt(prompt: str) -> None:
    """The prompt, dim on a terminal, before the text that continues it."""
    results().print(prompt.translate(CONTROL_CHARACTERS), style="dim", end="", markup=False, soft_wrap=True)
    sys.stdout.flush()


def write_text(text: str) -> None:
    """Generated text on stdout, at once."""
    sys.stdout.write(text.translate(CONTROL_CHARACTERS))
    sys.stdout.flush()


def write_json(document: dict[str, Any]) -> None:
    """The one JSON document of a command, on stdout."""
    sys.stdout.write(json.dumps(document, indent=2, allow_nan=False) + "\n")


def size(count: float) -> str:
    """Bytes for people.

    >>> size(999), size(12_345), size(7_131_024)
    ('999 B', '12.3 kB', '7.1 MB')
    """
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count:.0f} B"


def ratio(larger: float | None, smaller: float | None, more: str, less: str) -> str:
    """How many times one number is the other, in words; empty where one is missing.

    >>> (
    ...     ratio(30, 10, "less", "more"),
    ...     ratio(10, 15, "less", "more"),
    ...     ratio(100, 100, "less", "more"),
    ...     ratio(None, 1, "", ""),
    ... )
    ('3.0x less', '1.5x more', 'the same', '')
    """
    if not larger or not smaller:
        return ""
    times, word = (larger / smaller, more) if larger >= smaller else (smaller / larger, less)
    return "the same" if times < 1.05 else f"{times:.1f}x {word}"


def generation_table(outcome: Outcome) -> Table:
    """The table that ends `generate`."""
    replay, stock, counters = outcome.replay, outcome.stock, outcome.counters
    drafting = outcome.settings["draft"] != "none"
    table = _table()
    table.add_column("")
    table.add_column("replaystate", justify="right")
    table.add_column("stock" if stock else "stock, computed", justify="right")
    table.add_column("")
    stock_tokens = stock.new_tokens if stock else replay.new_tokens
    stock_calls = stock.model_calls if stock else replay.new_tokens
    table.add_row("new tokens", str(replay.new_tokens), str(stock_tokens), "")
    table.add_row(
        "model calls",
        str(replay.model_calls),
        str(stock_calls),
        ratio(stock_calls, replay.model_calls, "fewer", "more"),
    )
    table.add_row("tokens per call", _per_call(replay), f"{stock_tokens / max(1, stock_calls):.2f}", "")
    if drafting:
        drafted, accepted = counters["drafted"], counters["accepted"]
        share = f" ({100 * accepted / drafted:.0f}%)" if drafted else ""
        table.add_row("drafted tokens accepted", f"{accepted} of {drafted}{share}", "-", "")
        table.add_row("  accepted per call", f"{counters['accepted_per_call']:.2f}", "-", "")
    if counters["draft_model_calls"] is not None:
        table.add_row("calls of the draft model", str(counters["draft_model_calls"]), "-", "")
    table.add_row("folds into the checkpoint", str(counters["folds"]), "-", "")
    for name, mine, theirs in zip(
        ("GDN state read", "GDN state written"),
        (counters["state_bytes_read"], counters["state_bytes_written"]),
        outcome.stock_state_bytes,
        strict=True,
    ):
        table.add_row(name, size(mine), size(theirs), ratio(theirs, mine, "less", "more"))
    table.add_row(
        "prompt",
        f"{replay.prompt_s:.2f} s",
        f"{stock.prompt_s:.2f} s" if stock else "",
        _speed_up(stock, replay, "prompt"),
    )
    table.add_row("decode", _speed(replay), _speed(stock) if stock else "", _speed_up(stock, replay, "decode"))
    table.add_row("identical to stock greedy", _verdict(outcome), "", "")
    return table


def _per_call(run: Run) -> str:
    return f"{run.new_tokens / max(1, run.model_calls):.2f}"


def _speed(run: Run) -> str:
    speed = run.decode_tokens_per_s
    return "-" if speed is None else f"{speed:.1f} tokens/s"


def _speed_up(stock: Run | None, replay: Run, part: str) -> str:
    if stock is None:
        return ""
    if part == "prompt":
        return ratio(stock.prompt_s, replay.prompt_s, "faster", "slower")
    return ratio(replay.decode_tokens_per_s, stock.decode_tokens_per_s, "faster", "slower")


def _verdict(outcome: Outcome) -> Text:
    if outcome.identical is None:
        return Text("not compared")
    return Text("yes", style="bold green") if outcome.identical else Text("NO", style="bold red")


LEGEND = (
    "decode: tokens after the first call. GDN state: bytes that each algorithm needs\n"
    "to move for the recurrent states; `replaystate generate --help` says how."
)
NOT_COMPARED = "stock: computed, not run; --compare runs it, and compares tokens and speed."


def print_generation(outcome: Outcome) -> None:
    """The table, and what its words mean."""
    console = results()
    _print_table(console, generation_table(outcome))
    console.print(LEGEND, style="dim")
    if outcome.stock is None:
        console.print(NOT_COMPARED, style="dim")


def verify_tables(report: Report) -> list[Table]:
    """One table for each backend and device: the share of its limit that each error takes, by width."""
    tables = []
    for backend, device in dict.fromkeys((check.backend, check.device) for check in report.checks):
        table = _table(title=f"backend {backend} on {device}: error as % of its limit, by tokens per row")
        table.add_column("op")
        table.add_column("io/state/ring")
        for width in WIDTHS:
            table.add_column(str(width), justify="right")
        table.add_column("any", justify="right")
        table.add_column("error", justify="right")
        table.add_column("limit", justify="right")
        mine = [check for check in report.checks if (check.backend, check.device) == (backend, device)]
        for op, dtypes in dict.fromkeys((check.op, check.dtypes) for check in mine):
            group = [check for check in mine if (check.op, check.dtypes) == (op, dtypes)]
            worst = max(group, key=lambda check: check.error / check.limit)
            cells = [_share([check for check in group if check.width == width]) for width in (*WIDTHS, None)]
            names = "/".join(SHORT[str(dtype)] for dtype in dtypes)
            table.add_row(op, names, *cells, f"{worst.error:.1e}", f"{worst.limit:.1e}")
        tables.append(table)
    return tables


SHORT = {"torch.float32": "f32", "torch.float16": "f16", "torch.bfloat16": "bf16"}


def _share(checks: list[Check]) -> Text:
    if not checks:
        return Text("")
    percent = 100 * max(check.error / check.limit for check in checks)
    return Text(f"{percent:.0f}" if percent < 999 else "!!!", style="bold red" if percent > 100 else "")


def verify_json(report: Report) -> dict[str, Any]:
    """The document of `verify --json`. An infinite error is null; its place says what happened."""
    return {
        "command": "verify",
        "ok": report.ok,
        "devices": list(report.devices),
        "seconds": round(report.seconds, 3),
        "checks": [
            {
                "backend": check.backend,
                "device": check.device,
                "op": check.op,
                "io_dtype": _name(check.dtypes.io),
                "state_dtype": _name(check.dtypes.state),
                "ring_dtype": _name(check.dtypes.ring),
                "width": check.width,
                "quantity": check.quantity,
                "error": check.error if check.error < float("inf") else None,
                "limit": check.limit,
                "ok": check.ok,
                "place": check.place,
            }
            for check in report.checks
        ],
        "skipped": [
            {
                "backend": skip.backend,
                "device": skip.device,
                "op": skip.op,
                "io_dtype": _name(skip.dtypes.io) if skip.dtypes else None,
                "state_dtype": _name(skip.dtypes.state) if skip.dtypes else None,
                "ring_dtype": _name(skip.dtypes.ring) if skip.dtypes else None,
                "reason": skip.reason,
            }
            for skip in report.skipped
        ],
    }


def _name(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


def _print_table(console: Console, table: Table) -> None:
    """Print without the blanks that rich puts at the end of lines."""
    with console.capture() as capture:
        console.print(table)
    sys.stdout.write("".join(f"{line.rstrip()}\n" for line in capture.get().splitlines()))


def _table(title: str | None = None) -> Table:
    return Table(
        box=SIMPLE_HEAD,
        title=title,
        title_justify="left",
        title_style="bold",
        show_edge=False,
        pad_edge=False,
        collapse_padding=True,
    )


def print_rows(console: Console, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """A table of text: the first column to the left where it has no name, the others to the right; a line after it."""
    table = _table()
    for name in columns:
        table.add_column(name, justify="right" if name else "left")
    for row in rows:
        table.add_row(*row)
    _print_table(console, table)
    console.print()


VERIFY_LEGEND = (
    "io/state/ring: dtypes of inputs and outputs, checkpoints, k and u rings. any:\n"
    "ops without a width. Above 100 an error misses its limit (!!!: above 999), which\n"
    "is twice the error of plain torch with the same storage, plus 1e-6."
)


def print_report(report: Report) -> None:
    """The tables of `verify`, then what failed and what was skipped."""
    console = results()
    for table in verify_tables(report):
        _print_table(console, table)
        console.print()
    if report.checks:
        console.print(VERIFY_LEGEND, style="dim")
        console.print()
    worst: dict[tuple[object, ...], Check] = {}
    for check in report.failures:
        group = (check.backend, check.device, check.op, check.dtypes)
        if group not in worst or check.error / check.limit > worst[group].error / worst[group].limit:
            worst[group] = check
    for failure in worst.values():
        names = "/".join(SHORT[str(dtype)] for dtype in failure.dtypes)
        width = "" if failure.width is None else f" width {failure.width}"
        what = f"{failure.backend} on {failure.device}: {failure.op} {names}{width}"
        error = f"{failure.quantity} error {failure.error:.2e}, limit {failure.limit:.2e}"
        console.print(f"FAIL {what}: {error}; {failure.place}", style="red", soft_wrap=True, markup=False)
    for reason in dict.fromkeys((skip.backend, skip.device, skip.op, skip.reason) for skip in report.skipped):
        console.print("not run: backend {} on {}, {}: {}".format(*reason), soft_wrap=True, markup=False)
    verdict = f"{len(report.checks)} checks, {len(report.failures)} above their limits, {report.seconds:.1f} s"
    console.print(verdict, style="bold green" if report.ok else "bold red")


def progress_console() -> Console:
    """The console for progress: stderr."""
    plain = bool(os.environ.get("NO_COLOR"))
    return Console(file=sys.stderr, highlight=False, color_system=None if plain else "auto", no_color=plain or None)


BENCH_LEGEND = (
    "us: median; IQR: distance of the quartiles. of copy: share of the copy bandwidth\n"
    "measured in turn with it, for the bytes that cannot be avoided."
)


def print_bench(document: dict[str, Any]) -> None:
    """The results of `bench run`, one table for each workload and model."""
    console = results()
    groups: dict[str, list[dict[str, Any]]] = {}
    for entry in document["results"]:
        shard = f" TP {entry['tp']}" if entry.get("tp", 1) != 1 else ""
        dtypes = "/".join(SHORT["torch." + entry[key]] for key in ("io", "state", "ring") if key in entry)
        groups.setdefault(f"{entry['name']}, {entry['model']}{shard}, io/state/ring {dtypes}", []).append(entry)
    for title, entries in groups.items():
        console.print(title, style="bold", soft_wrap=True, markup=False)
        table = _table()
        table.add_column("rows", justify="right")
        table.add_column("variant")
        for name in ("us", "IQR", "GB/s", "of copy"):
            table.add_column(name, justify="right")
        for entry in entries:
            share = entry.get("of_copy")
            table.add_row(
                str(entry["rows"]), entry["what"], f"{entry['time']['median_us']:,.1f}",
                f"{entry['time']['iqr_us']:,.1f}", f"{entry['gb_per_s']:.1f}" if "gb_per_s" in entry else "",
                "" if share is None else f"{100 * share:.0f}%",
            )  # fmt: skip
        _print_table(console, table)
        console.print()
    for skip in document.get("skipped", ()):
        words = f"not timed: {skip['name']}, {skip['rows']} rows, {skip['what']}: {skip['reason']}"
        console.print(words, soft_wrap=True, markup=False)
    console.print(BENCH_LEGEND, style="dim")


def print_comparison(found: Comparison, before: str, after: str) -> None:
    """The table of `bench compare`, and its verdict."""
    console = results()
    table = _table()
    table.add_column("case")
    for name in ("before us", "after us", "change", "noise"):
        table.add_column(name, justify="right")
    table.add_column("verdict")
    styles = {"slower": "bold red", "faster": "bold green"}
    for change in found.changes:
        noise = "" if change.noise is None else f"{100 * change.noise:.1f}%"
        verdict = Text(change.verdict, style=styles.get(change.verdict, ""))
        table.add_row(
            change.title, f"{change.before_us:,.1f}", f"{change.after_us:,.1f}", f"{100 * change.change:+.1f}%", noise,
            verdict,
        )  # fmt: skip
    _print_table(console, table)
    for name, titles in ((before, found.only_before), (after, found.only_after)):
        if titles:
            console.print(f"only in {name}: {len(titles)} times", soft_wrap=True, markup=False)
    if found.drift is not None:
        words = "what does not depend on our kernels (the copy, the controls) changed by"
        console.print(f"drift: {words} {100 * found.drift:+.1f}%", soft_wrap=True)
    counts = {name: sum(change.verdict == name for change in found.changes) for name in ("slower", "faster", "noisy")}
    words = ", ".join(f"{count} {name}" for name, count in counts.items())
    console.print(f"{len(found.changes)} compared: {words}", style="bold red" if found.slower else "bold green")
