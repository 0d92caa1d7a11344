"""A few helpers to draw figures as SVG: legible on light and on dark pages, and with a text alternative."""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape

WIDTH = 480
"""Units across every figure. A phone shows them at about three quarters of a pixel each: no text below size 12."""


@dataclass
class Drawing:
    """Collects shapes; colours are classes, which docs/assets/site.css gives a light and a dark value.

    Args:
        title: what the figure shows, in one sentence (the caption).
        description: what a reader who cannot see it should know: the content, in words.
    """

    title: str
    description: str
    height: float = 0.0
    shapes: list[str] = field(default_factory=list)

    def rect(self, x: float, y: float, width: float, height: float, kind: str, hint: str = "") -> None:
        """A box of a class; `hint` shows when the pointer rests on it."""
        inner = f"<title>{escape(hint)}</title>" if hint else ""
        self._add(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0):.1f}" height="{height:.1f}" '
            f'class="{kind}">{inner}</rect>',
            y + height,
        )

    def text(self, x: float, y: float, words: str, *, kind: str = "label", anchor: str = "start") -> None:
        """A line of text with its baseline at y."""
        self._add(f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}">{escape(words)}</text>', y + 4)

    def line(self, x1: float, y1: float, x2: float, y2: float, kind: str = "rule") -> None:
        """A straight line."""
        self._add(f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{kind}"/>', max(y1, y2))

    def path(self, points: list[tuple[float, float]], kind: str) -> None:
        """A line through points."""
        at = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self._add(f'<polyline points="{at}" class="{kind}"/>', max(y for _, y in points))

    def dot(self, x: float, y: float, kind: str, hint: str = "", radius: float = 5) -> None:
        """A filled circle."""
        inner = f"<title>{escape(hint)}</title>" if hint else ""
        self._add(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" class="{kind}">{inner}</circle>', y + radius)

    def legend(self, y: float, entries: list[tuple[str, str]], *, columns: int = 2) -> float:
        """Swatches with names, in columns; returns the y below them."""
        for index, (kind, name) in enumerate(entries):
            x = (index % columns) * WIDTH / columns
            row = y + (index // columns) * 20
            self.rect(x, row, 12, 12, kind)
            self.text(x + 18, row + 11, name)
        return y + ((len(entries) + columns - 1) // columns) * 20

    def html(self) -> str:
        """The figure as one HTML block without empty lines, as markdown wants it."""
        shapes = "\n".join(self.shapes)
        return (
            f'<figure class="drawing">\n<svg viewBox="0 0 {WIDTH} {self.height + 6:.0f}" role="img" '
            f'xmlns="http://www.w3.org/2000/svg" aria-label="{escape(self.title)} {escape(self.description)}">\n'
            f"{shapes}\n</svg>\n<figcaption>{escape(self.title)}\n"
            f"<details><summary>In words</summary><p>{escape(self.description)}</p></details>\n</figcaption>\n</figure>"
        )

    def _add(self, shape: str, bottom: float) -> None:
        self.shapes.append(shape)
        self.height = max(self.height, bottom)
