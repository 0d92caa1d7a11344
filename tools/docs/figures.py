"""The figures of the documentation, drawn when the site is built from the code and the committed measurements.

| figure | comes from |
|---|---|
| ring | a `ReplayCache` that runs the two steps |
| bytes | `replaystate.bench.step_bytes` |
| drift | benchmarks/results/h200_drift.json |
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from svg import WIDTH, Drawing

from replaystate import GDNShape, ReplayCache, replay_step
from replaystate.bench import StepBytes, step_bytes
from replaystate.shapes import flush_min

ROOT = Path(__file__).resolve().parents[2]
DRIFT = ROOT / "benchmarks/results/h200_drift.json"

SHAPE = GDNShape(16, 32, 128, 128)
"""The layer that the bytes figure and table are for: Qwen3-Next's and Qwen3.5-4B's."""
WINDOW = 16


# --- ring and cursors ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cursors:
    """What one slot's cursors say, and which ring rows the step wrote."""

    start: int
    committed: int


def run_step(window_rows: int, tokens: int, accepted: int) -> tuple[Cursors, Cursors, bool, int]:
    """(cursors before, after the commit, whether the step folded, ring slots) of a real step on a small cache."""
    shape = GDNShape(1, 1, 8, 8)
    cache = ReplayCache(shape, 1, 1, window=WINDOW, max_query_len=WINDOW, null_slot=None)
    rng = torch.Generator().manual_seed(0)

    def step(count: int, keep: int, width: int) -> None:
        qkv, a, b = (torch.randn(count, n, generator=rng) for n in (shape.qkv_dim, 1, 1))
        zero, bounds = torch.zeros(1), torch.tensor([0, count], dtype=torch.int32)
        replay_step(qkv, a, b, zero, zero, cache, 0, [0], bounds, executed_width=width)
        cache.commit([0], [keep])

    for _ in range(window_rows):
        step(1, 1, 1)
    before = Cursors(int(cache.ring_start[0]), int(cache.num_committed[0]))
    checkpoint = cache.checkpoint(0).clone()
    step(tokens, accepted, tokens)
    after = Cursors(int(cache.ring_start[0]), int(cache.num_committed[0]))
    return before, after, not torch.equal(checkpoint, cache.checkpoint(0)), cache.ring_slots


def ring() -> str:
    """Ring and cursors before a step, after it, and after its commit: once without a fold and once with one."""
    tokens, accepted = 4, 2
    drawing = Drawing(
        "Ring and cursors over a step of 4 tokens (one token and three drafts) of which 2 are accepted.",
        "",
    )
    words = []
    y = drawing.legend(
        6,
        [
            ("fill-window", "in the window"),
            ("fill-new", "appended by the step"),
            ("fill-folded", "folded into S₀"),
            ("fill-empty", "never looked at"),
        ],
    )
    for window_rows in (8, 14):
        before, after, folded, slots = run_step(window_rows, tokens, accepted)
        appended = before.start + before.committed
        y += 34
        heading = f"P = {before.committed}: the step " + (
            f"folds, as P ≥ {flush_min(WINDOW, tokens)}"
            if folded
            else f"does not fold, as P < {flush_min(WINDOW, tokens)}"
        )
        drawing.text(0, y, heading, kind="heading")
        window = {(before.start + j) % slots: "fill-window" for j in range(before.committed)}
        new = {(appended + s) % slots: "fill-new" for s in range(tokens)}
        old = dict.fromkeys(window, "fill-folded") if folded else window
        kept = {(after.start + j) % slots: "fill-window" for j in range(after.committed)}
        stages = [
            ("before", before, window, ""),
            ("after the step", before, {**old, **new}, "cursors not moved yet"),
            (f"after commit({accepted})", after, kept, "the two rejected rows are outside"),
        ]
        for name, cursors, cells, note in stages:
            y = strip(drawing, y + 12, name, note, cursors, cells, slots)
        words.append(
            f"With P = {before.committed} committed rows the step appends rows {appended} to {appended + tokens - 1}"
            + (
                f" and folds rows {before.start} to {appended - 1} into the checkpoint"
                if folded
                else " and folds nothing"
            )
            + f"; after the commit of {accepted} tokens ring_start is {after.start}, num_committed {after.committed}."
        )
    drawing.description = " ".join(words)
    return drawing.html()


def strip(
    drawing: Drawing, y: float, name: str, note: str, cursors: Cursors, cells: dict[int, str], slots: int
) -> float:
    """One picture of the ring: a line of text, the slots, and a bracket under the window."""
    side = WIDTH / slots
    drawing.text(0, y + 11, name)
    drawing.text(WIDTH, y + 11, note, kind="note", anchor="end")
    for slot in range(slots):
        drawing.rect(slot * side + 0.5, y + 18, side - 1, 18, cells.get(slot, "fill-empty"), f"ring slot {slot}")
    left, right = cursors.start * side, (cursors.start + cursors.committed) * side
    drawing.line(left, y + 40, right, y + 40, "bracket")
    drawing.line(left, y + 36, left, y + 44, "bracket")
    label = f"ring_start {cursors.start}, num_committed {cursors.committed}"
    drawing.text(min(left, WIDTH - 215), y + 56, label, kind="code")
    return y + 60


# --- bytes a token ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PerToken:
    """Bytes of GDN state that one layer moves for an accepted token of one request."""

    state_read: float
    state_written: float
    ring_read: float
    ring_written: float

    @property
    def total(self) -> float:
        """All four."""
        return self.state_read + self.state_written + self.ring_read + self.ring_written


def _step(tokens: int, window_rows: int, folds: bool, state_dtype: torch.dtype, ring_dtype: torch.dtype) -> StepBytes:
    return step_bytes(
        SHAPE, rows=1, tokens=tokens, window_rows=window_rows, folds=folds, state_dtype=state_dtype,
        ring_dtype=ring_dtype, io_dtype=torch.bfloat16,
    )  # fmt: skip


def native(tokens: int, accepted: int, state_dtype: torch.dtype) -> PerToken:
    """The recurrence: a step reads the state once and writes it after every token, so that any can be the last."""
    step = _step(tokens, 0, True, state_dtype, torch.float16)
    return PerToken(step.state_read / accepted, tokens * step.state_written / accepted, 0, 0)


def replay(tokens: int, accepted: int, state_dtype: torch.dtype, ring_dtype: torch.dtype) -> PerToken:
    """Replay, averaged over the steps of a whole number of windows."""
    rows, steps = 0, []
    for _ in range(64 * WINDOW):
        folds = rows >= flush_min(WINDOW, tokens)
        steps.append(_step(tokens, rows, folds, state_dtype, ring_dtype))
        rows = accepted if folds else rows + accepted
    kept = accepted * len(steps)
    return PerToken(
        sum(s.state_read for s in steps) / kept,
        sum(s.state_written for s in steps) / kept,
        sum(s.ring_read for s in steps) / kept,
        sum(s.ring_written for s in steps) / kept,
    )


def bytes_per_token() -> str:
    """Bars: native against replay for T = 1, 2, 4, 8, every draft accepted, fp16 state and rings."""
    parts = [
        ("state_read", "fill-read", "state read"),
        ("state_written", "fill-write", "state written"),
        ("ring_read", "fill-ring", "ring read"),
        ("ring_written", "fill-append", "ring written"),
    ]
    bars, words = [], []
    for tokens in (1, 2, 4, 8):
        pair = native(tokens, tokens, torch.float16), replay(tokens, tokens, torch.float16, torch.float16)
        bars += [(tokens, name, cost) for name, cost in zip(("native", "replay"), pair, strict=True)]
        words.append(
            f"T = {tokens}: native {pair[0].total / 2**20:.2f} MiB, replay {pair[1].total / 2**20:.2f} MiB, "
            f"{pair[0].total / pair[1].total:.1f} times less."
        )
    H, HV, K, V = SHAPE.sizes
    drawing = Drawing(
        f"Bytes of GDN state per accepted token, one layer, one request (H = {H}, HV = {HV}, K = {K}, V = {V}, "
        "fp16 state and rings, window 16, every draft accepted).",
        " ".join(words),
    )
    y = drawing.legend(6, [(kind, name) for _, kind, name in parts]) + 6
    most = max(cost.total for _, _, cost in bars)
    left, scale = 58, (WIDTH - 58 - 62) / most
    for tokens, name, cost in bars:
        if name == "native":
            y += 18
            drawing.text(0, y + 6, f"T = {tokens}: {tokens} token{'s' * (tokens > 1)} a step", kind="heading")
            y += 14
        drawing.text(left - 8, y + 14, name, anchor="end")
        x = float(left)
        for part, kind, label in parts:
            width = getattr(cost, part) * scale
            drawing.rect(x, y, width, 18, kind, f"{label}: {getattr(cost, part) / 2**20:.3f} MiB")
            x += width
        drawing.text(x + 6, y + 14, f"{cost.total / 2**20:.2f} MiB")
        y += 23
    return drawing.html()


def bytes_table() -> str:
    """The same for T = 4 by accepted tokens and dtype, as a table."""
    half, single = torch.float16, torch.float32
    lines = [
        "| state, rings | accepted of 4 | native, MiB a token | replay, MiB a token | ratio |",
        "|---|---:|---:|---:|---:|",
    ]
    for state_dtype, ring_dtype in ((half, half), (single, half), (single, single)):
        for accepted in (1, 2, 3, 4):
            old = native(4, accepted, state_dtype).total / 2**20
            new = replay(4, accepted, state_dtype, ring_dtype).total / 2**20
            names = ", ".join(str(dtype).removeprefix("torch.") for dtype in (state_dtype, ring_dtype))
            lines.append(f"| {names} | {accepted} | {old:.2f} | {new:.2f} | {old / new:.1f}x |")
    return "\n".join(lines)


# --- drift -----------------------------------------------------------------------------------------------------------


def drift() -> str:
    """Errors after the first and the last 256 of the tokens, on a logarithmic axis."""
    if not DRIFT.exists():
        return f"*No measurement is committed ({DRIFT.relative_to(ROOT).as_posix()}).*"
    found: dict[str, Any] = json.loads(DRIFT.read_text(encoding="utf-8"))
    rows: list[dict[str, Any]] = found["rows"]
    words = [
        f"{_drift_name(row)}: output {row['first']:.1e}, then {row['last']:.1e}; state {row['end']:.1e}."
        for row in rows
    ]
    drawing = Drawing(
        f"Relative error against float64 over {found['tokens']} tokens in a chain ({found['device']}, torch "
        f"{found['torch']}).",
        " ".join(words),
    )
    y = drawing.legend(
        6,
        [
            ("fill-empty", "output, first 256 tokens"),
            ("fill-read", "output, last 256 tokens"),
            ("fill-new", "state at the end"),
        ],
    )
    values = [row[key] for row in rows for key in ("first", "last", "end")]
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    at: Callable[[float], float] = lambda value: 12 + (WIDTH - 24) * (math.log10(value) - low) / (high - low)  # noqa: E731
    powers = [10.0**power for power in range(low, high + 1)]
    for row in rows:
        y += 20
        drawing.text(0, y + 4, _drift_name(row))
        y += 18
        for power in powers:
            drawing.line(at(power), y - 8, at(power), y + 8, "rule")
        drawing.line(at(row["first"]), y, at(row["last"]), y, "bracket")
        drawing.rect(at(row["end"]) - 5, y - 5, 10, 10, "fill-new", f"state at the end {row['end']:.2e}")
        drawing.dot(at(row["first"]), y, "fill-empty", f"first 256 tokens {row['first']:.2e}", 6)
        drawing.dot(at(row["last"]), y, "fill-read", f"last 256 tokens {row['last']:.2e}", 4)
    y += 14
    for power in powers:
        anchor = "start" if power == powers[0] else "end" if power == powers[-1] else "middle"
        drawing.text(at(power), y + 10, f"{power:.0e}".replace("e-0", "e-"), kind="note", anchor=anchor)
    return drawing.html()


def _drift_name(row: dict[str, Any]) -> str:
    if row["form"] == "recurrence":
        return f"recurrence, state rounded to {row['state']} after each token"
    return f"replay: {row['state']} state, {row['ring']} rings, {row['io']} in and out"
