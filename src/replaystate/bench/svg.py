"""Charts as inline SVG: lines over a number of rows, and bars of ratios. No script, no font, no colour of its own.

Every chart is 360 units wide, so that its 12-unit text stays readable on a narrow screen. Colours are classes (`s0`,
`s1`, ...) that the page defines for light and dark; each series has a marker of its own shape too.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH = 360
LEFT, RIGHT, TOP, BOTTOM = 46, 12, 10, 36
MARKERS = 6
MIN_DECADES = 0.7
"""Least height of a logarithmic axis, so that a change of a few percent does not look like a slope."""
_ids = itertools.count()


@dataclass(frozen=True)
class Series:
    """A line: (x, y) points; dashed: a floor, drawn without markers. `color` is the number of its class."""

    name: str
    points: tuple[tuple[float, float], ...]
    color: int
    dashed: bool = False


@dataclass(frozen=True)
class Bar:
    """A ratio, and the words at its bar."""

    label: str
    times: float


def line_chart(
    title: str, description: str, series: Sequence[Series], *, y_name: str, log_y: bool, height: int = 220
) -> str:
    """Lines over rows on a logarithmic x axis.

    Args:
        title, description: the text alternative.
        series: lines; at least one point among them.
        y_name: name and unit of the y axis.
        log_y: logarithmic, or linear from 0.
        height: in units.
    """
    xs = sorted({x for line in series for x, _ in line.points})
    ys = [y for line in series for _, y in line.points]
    x_low, x_high = math.log2(xs[0]), math.log2(xs[-1])
    if log_y:
        y_low, y_high = math.log10(min(ys)), math.log10(max(ys))
        widen = max(0.0, MIN_DECADES - (y_high - y_low)) / 2
        y_low, y_high = y_low - widen, y_high + widen
        ticks = log_ticks(10**y_low, 10**y_high)
    else:
        ticks = linear_ticks(max(ys))
        y_low, y_high = 0.0, max(ticks[-1], *ys)

    def at_x(x: float) -> float:
        share = (math.log2(x) - x_low) / (x_high - x_low) if x_high > x_low else 0.5
        return LEFT + 8 + share * (WIDTH - LEFT - RIGHT - 16)

    def at_y(y: float) -> float:
        share = ((math.log10(y) if log_y else y) - y_low) / max(y_high - y_low, 1e-9)
        return height - BOTTOM - share * (height - TOP - BOTTOM)

    parts = []
    for tick in ticks:
        y = at_y(tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{short(tick)}</text>')
    last = -100.0
    for x in xs:
        if at_x(x) - last >= 26:
            last = at_x(x)
            parts.append(f'<text x="{last:.1f}" y="{height - BOTTOM + 16}" text-anchor="middle">{x:g}</text>')
    parts.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{height - BOTTOM}" y2="{height - BOTTOM}"/>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text class="name" x="{middle:.0f}" y="{height - 4}" text-anchor="middle">rows in the batch</text>')
    for line in sorted(series, key=lambda line: not line.dashed):
        points = [(at_x(x), at_y(y)) for x, y in line.points]
        kind = "floor" if line.dashed else "line"
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline class="{kind} s{line.color % MARKERS}" points="{path}"/>')
        if not line.dashed:
            parts += [marker(x, y, line.color) for x, y in points]
    return _svg(f"{title}: {y_name}", description, height, parts)


def bar_chart(
    title: str, description: str, bars: Sequence[Bar], *, lowest: float | None = None, highest: float | None = None
) -> str:
    """Horizontal bars of ratios on a logarithmic axis that begins at 1: right of it faster, left of it slower.

    Args:
        title, description: the text alternative.
        bars: at least one.
        lowest, highest: ratios that the axis must reach, so that several charts have one scale.
    """
    low = min(1.0, *(bar.times for bar in bars), lowest or 1.0)
    high = max(1.0, *(bar.times for bar in bars), highest or 1.0)
    edge = 72 if low < 1 else 4  # room for the number of a bar that goes left
    scale = (WIDTH - 68 - edge) / max(math.log(high / low), math.log(1.5))
    one = edge + math.log(1 / low) * scale
    step = 34
    height = len(bars) * step + 24
    parts = [f'<line class="axis" x1="{one:.1f}" x2="{one:.1f}" y1="4" y2="{height - 18}"/>']
    for i, bar in enumerate(bars):
        y = i * step + 14
        end = one + math.log(bar.times) * scale
        loses = bar.times < 1
        parts.append(f'<text class="label" x="8" y="{y}">{escape(shorten(bar.label, 56))}</text>')
        left, width = min(one, end), max(abs(end - one), 1.5)
        parts.append(
            f'<rect class="{"loss" if loses else "gain"}" x="{left:.1f}" y="{y + 4}" width="{width:.1f}" '
            f'height="11" rx="2"/>'
        )
        where = f'x="{left - 4:.1f}" text-anchor="end"' if loses else f'x="{left + width + 4:.1f}"'
        parts.append(f'<text class="value" {where} y="{y + 14}">{number(bar.times)}×</text>')
    anchor, x = ("start", 8.0) if one < 72 else ("middle", one)
    parts.append(
        f'<text class="name" x="{x:.1f}" y="{height - 4}" text-anchor="{anchor}">the line: 1×, the same</text>'
    )
    return _svg(title, description, height, parts)


def marker(x: float, y: float, color: int) -> str:
    """The mark of a series, of its own shape."""
    kind, name = color % MARKERS, f'class="mark s{color % MARKERS}"'
    if kind == 0:
        return f'<circle {name} cx="{x:.1f}" cy="{y:.1f}" r="3.6"/>'
    if kind == 1:
        return f'<rect {name} x="{x - 3.3:.1f}" y="{y - 3.3:.1f}" width="6.6" height="6.6"/>'
    shapes = {
        2: ((0, -4.6), (4.2, 3), (-4.2, 3)),
        3: ((0, -4.8), (4.8, 0), (0, 4.8), (-4.8, 0)),
        4: ((0, 4.6), (4.2, -3), (-4.2, -3)),
        5: ((-4, -1.6), (0, -4.6), (4, -1.6), (2.6, 3.6), (-2.6, 3.6)),
    }
    points = " ".join(f"{x + dx:.1f},{y + dy:.1f}" for dx, dy in shapes[kind])
    return f'<polygon {name} points="{points}"/>'


def legend(series: Sequence[Series]) -> str:
    """The names of the lines, as HTML that wraps."""
    items = []
    for line in series:
        color = line.color % MARKERS
        stroke = f'<line class="{"floor" if line.dashed else "line"} s{color}" x1="0" x2="24" y1="7" y2="7"/>'
        mark = "" if line.dashed else marker(12, 7, color)
        items.append(
            f'<li><svg width="24" height="14" aria-hidden="true">{stroke}{mark}</svg> {escape(line.name)}</li>'
        )
    return f'<ul class="legend">{"".join(items)}</ul>'


def log_ticks(low: float, high: float) -> list[float]:
    """At most six of 1, 2, 5, 10, ... that span low .. high.

    >>> log_ticks(4.8, 340)
    [5.0, 10.0, 20.0, 50.0, 100.0, 200.0]
    >>> log_ticks(1, 90000)
    [1.0, 10.0, 100.0, 1000.0, 10000.0]
    """
    for steps in ((1, 2, 5), (1,)):
        decades = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 2)
        ticks = [float(f"{step}e{decade}") for decade in decades for step in steps]
        inside = [tick for tick in ticks if low * 0.999 <= tick <= high * 1.001]
        if len(inside) <= 6:
            break
    else:
        inside = inside[:: math.ceil(len(inside) / 6)]
    return inside or [float(f"{low:.1g}")]


def linear_ticks(high: float) -> list[float]:
    """0 and up to five more.

    >>> linear_ticks(1.9)
    [0.0, 0.5, 1.0, 1.5, 2.0]
    """
    raw = high / 4
    size = 10 ** math.floor(math.log10(raw))
    step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= raw * 0.95)
    return [round(i * step, 10) for i in range(math.ceil(high / step - 0.02) + 1)]


def number(x: float) -> str:
    """Three digits.

    >>> number(0.1234), number(4.79), number(118.4), number(1234.5), number(2_500_000)
    ('0.123', '4.79', '118', '1,230', '2,500,000')
    """
    if x == 0:
        return "0"
    digits = 2 - math.floor(math.log10(abs(x)))
    text = f"{round(x, digits):,.{max(0, digits)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def short(x: float) -> str:
    """For a tick: thousands from 10,000 on, powers below 0.001.

    >>> short(5000), short(20_000), short(3_000_000), short(0.01), short(0.0002)
    ('5,000', '20k', '3M', '0.01', '2e-4')
    """
    if 0 < x < 1e-3:
        return f"{x:.0e}".replace("e-0", "e-")
    for size, unit in ((1e6, "M"), (1e4, "k")):
        if x >= size:
            return f"{x / (1e6 if unit == 'M' else 1e3):g}{unit}"
    return number(x)


def shorten(text: str, limit: int) -> str:
    """Cut at `limit` characters."""
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _svg(title: str, description: str, height: int, parts: Sequence[str]) -> str:
    name = f"figure-{next(_ids)}"
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-labelledby="{name}-title {name}-desc">'
        f'<title id="{name}-title">{escape(title)}</title><desc id="{name}-desc">{escape(description)}</desc>'
        f"{''.join(parts)}</svg>"
    )
