"""Concurrency against draft length, as one self-contained SVG file: no script, no font, no network; light and dark."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from .planner import Plan

WIDTH, HEIGHT = 720, 420
LEFT, RIGHT, TOP, BOTTOM = 76, 24, 74, 58

STYLE = """
  svg { background: #fff; font: 14px system-ui, sans-serif; }
  text { fill: #24292f; } .quiet { fill: #57606a; }
  .grid { stroke: #d8dee4; } .axis { stroke: #57606a; }
  .native { stroke: #b35900; } .replay { stroke: #0b5cad; } .line { fill: none; stroke-width: 2.5; }
  .native.mark { fill: #b35900; } .replay.mark { fill: #0b5cad; }
  @media (prefers-color-scheme: dark) {
    svg { background: #0d1117; } text { fill: #e6edf3; } .quiet { fill: #9da7b1; }
    .grid { stroke: #30363d; } .axis { stroke: #9da7b1; }
    .native { stroke: #f0883e; } .replay { stroke: #58a6ff; }
    .native.mark { fill: #f0883e; } .replay.mark { fill: #58a6ff; }
  }
"""


def concurrency_chart(plan: Plan) -> str:
    """Requests that fit at once, native and replay, for every draft length of the plan."""
    s = plan.setting
    drafts = [length.drafts for length in plan.draft_lengths]
    native = [length.native.max_requests for length in plan.draft_lengths]
    replay = [length.replay.max_requests for length in plan.draft_lengths]
    step = _nice_step(max(*native, *replay, 1))
    top = step * -(-max(*native, *replay, 1) // step)

    def x(value: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * value / max(1, drafts[-1])

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * value / top

    title = f"{s.model.name} on {s.tp} x {s.device.name}: requests that fit at once"
    described = "; ".join(f"{d} drafts: native {n}, replay {r}" for d, n, r in zip(drafts, native, replay, strict=True))
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-labelledby="t d">',
        f'<title id="t">{escape(title)}</title>',
        f'<desc id="d">{escape(described)}</desc>',
        f"<style>{STYLE}</style>",
        f'<text x="{LEFT}" y="26" font-weight="600">{escape(title)}</text>',
        f'<text x="{LEFT}" y="47" class="quiet">{s.context_tokens} tokens a request; states {s.state_dtype}, native '
        f"{s.native_state_dtype}; weights {s.weight_dtype}</text>",
    ]
    for value in range(0, top + 1, step):
        out.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}"/>')
        out.append(f'<text x="{LEFT - 10}" y="{y(value) + 5:.1f}" text-anchor="end">{value}</text>')
    for value in drafts:
        out.append(f'<text x="{x(value):.1f}" y="{HEIGHT - BOTTOM + 22}" text-anchor="middle">{value}</text>')
    out.append(
        f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{HEIGHT - BOTTOM}" y2="{HEIGHT - BOTTOM}"/>'
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2:.0f}" y="{HEIGHT - 12}" text-anchor="middle" class="quiet">'
        "drafts per step</text>"
    )
    for name, values, round_mark in (("native", native, False), ("replay", replay, True)):
        points = [(x(d), y(value)) for d, value in zip(drafts, values, strict=True)]
        out.append(f'<polyline class="line {name}" points="{" ".join(f"{a:.1f},{b:.1f}" for a, b in points)}"/>')
        out += [_mark(name, a, b, round_mark) for a, b in points]
    out += _legend((("replay", True), ("native, a state per draft", False)))
    return "\n".join([*out, "</svg>"]) + "\n"


def _mark(name: str, x: float, y: float, round_mark: bool) -> str:
    if round_mark:
        return f'<circle class="mark {name}" cx="{x:.1f}" cy="{y:.1f}" r="4"/>'
    return f'<rect class="mark {name}" x="{x - 3.5:.1f}" y="{y - 3.5:.1f}" width="7" height="7"/>'


def _legend(entries: Sequence[tuple[str, bool]]) -> list[str]:
    out, x = [], WIDTH - RIGHT - 290
    for label, round_mark in entries:
        out.append(_mark(label.partition(",")[0], x, 64, round_mark))
        out.append(f'<text x="{x + 12}" y="69">{escape(label)}</text>')
        x += 90
    return out


def _nice_step(largest: int) -> int:
    """A step of 1, 2 or 5 times a power of ten that makes four to ten lines.

    >>> [_nice_step(n) for n in (1, 9, 47, 700)]
    [1, 1, 5, 100]
    """
    step = 1
    while True:
        for factor in (1, 2, 5):
            if largest <= 10 * step * factor:
                return step * factor
        step *= 10
