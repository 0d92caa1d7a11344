"""The HTML page of results: what it says, what it loads (nothing), and how it looks in a real browser.

How this tests, in plain words: pages are made of the committed results, of a tiny run, and of made-up files with losing
cases and awkward names. Their structure is read with an HTML parser. A headless Chromium, where the machine has one,
opens them at 400 and 1200 px, in light and dark: nothing may be requested, logged as an error, or be wider than the
window; text must keep its size and stay inside its figure. Colours are held to the contrast that WCAG asks for.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from replaystate.bench import page, read_results
from replaystate.bench.svg import Bar, Series, bar_chart, line_chart

from .common import MIXED, WIDE, run_plan
from .test_results import COMMITTED, entry, write

VOID = {"meta", "link", "br", "img", "input", "hr"}


class Outline(HTMLParser):
    """Elements with their attributes and text; refuses tags that do not nest."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.texts.append((self.open[-1] if self.open else "", data.strip()))

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def losing_file(folder: Path) -> Path:
    """Slower than its baseline in one case, a missed target, a skipped variant, and a name that HTML must escape."""
    return write(
        folder / "losing.json",
        entry(200.0, rows=1, of_copy=0.02, model_bytes=1000, copy_gb_per_s=10.0),
        entry(400.0, rows=8, of_copy=0.4, model_bytes=8000, copy_gb_per_s=10.0),
        entry(100.0, rows=1, what="recurrence"),
        entry(900.0, rows=8, what="recurrence"),
        entry(5.0, rows=1, name="commit <b>&", filling=None, T=4),
        checks=[{"name": "fast <enough>", "target": ">= 2", "value": 1.5, "met": False}],
        skipped=[{"name": "verify-16", "model": "m", "rows": 8, "what": "cuda", "reason": "no device"}],
    )


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    names = "decode", "verify-4", "verify-16", "fold", "steady", "commit", "prefill"
    report = run_plan(*names, variants=("torch", "recurrence"), dtypes=(MIXED, WIDE), repeats=1)
    report.write(folder / "run.json")
    committed = [path for path in sorted(COMMITTED.glob("*.json")) if '"results"' in path.read_text()]
    sources = {"committed": committed, "run": [folder / "run.json"], "losing": [losing_file(folder)]}
    sources["all"] = [path for paths in sources.values() for path in paths]
    made = {}
    for name, paths in sources.items():
        made[name] = folder / f"{name}.html"
        made[name].write_text(page([read_results(path) for path in paths]), encoding="utf-8")
    return made


NAMES = ("committed", "run", "losing", "all")


# --- what it says ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_every_figure_has_a_text_alternative_and_a_table(pages: dict[str, Path], name: str) -> None:
    text = pages[name].read_text(encoding="utf-8")
    outline = Outline(text)
    figures = re.findall(r"<figure>.*?</figure>", text, flags=re.DOTALL)
    assert figures
    ids = [attributes["id"] for _, attributes in outline.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    for figure in figures:
        inside = Outline(figure)
        (chart,) = [svg for svg in inside.named("svg") if svg.get("role") == "img"]
        assert set(str(chart["aria-labelledby"]).split()) <= set(ids)
        words = dict(inside.texts)
        assert len(words["title"]) > 3
        assert re.search(r"\d", words["desc"])
        assert inside.named("table")
        assert inside.named("figcaption")
    decorative = [svg for svg in outline.named("svg") if svg.get("role") != "img"]
    assert all(svg["aria-hidden"] == "true" for svg in decorative)


@pytest.mark.parametrize("name", NAMES)
def test_it_loads_nothing_and_runs_nothing(pages: dict[str, Path], name: str) -> None:
    outline = Outline(pages[name].read_text(encoding="utf-8"))
    assert not [tag for tag in ("script", "img", "iframe", "object") if outline.named(tag)]
    assert {attributes["href"] for attributes in outline.named("link")} == {"data:,"}
    assert all(str(attributes["href"]).startswith("#") for attributes in outline.named("a"))
    style = "".join(text for tag, text in outline.texts if tag == "style")
    assert "url(" not in style
    assert "@import" not in style
    (policy,) = [meta["content"] for meta in outline.named("meta") if meta.get("http-equiv")]
    assert str(policy).startswith("default-src 'none'")


def test_losing_cases_are_in_plain_sight(pages: dict[str, Path]) -> None:
    text = pages["losing"].read_text(encoding="utf-8")
    losses = text[text.index("Where it loses") : text.index("Time against batch")]
    assert "<details" not in losses
    assert "0.5×" in losses  # 100 us against 200
    assert "2.25" not in losses  # 900 against 400 is won
    assert "fast &lt;enough&gt;" in losses
    assert "1.5, target &gt;= 2" in losses
    assert "40 % of the copy bandwidth" in losses  # at its largest batch
    assert "no device" in losses
    assert "<b>1 of 2</b>" in text  # the summary counts it


def test_a_file_without_losses_says_so(tmp_path: Path) -> None:
    path = write(tmp_path / "a.json", entry(10.0, of_copy=0.9, model_bytes=1), entry(20.0, what="recurrence"))
    assert "No comparison is lost" in page([read_results(path)])


def test_the_committed_numbers_are_on_the_page(pages: dict[str, Path]) -> None:
    text = pages["committed"].read_text(encoding="utf-8")
    assert "NVIDIA H200" in text
    file = read_results(COMMITTED / "h200.json")
    best = max(result.of_copy or 0 for result in file.results)
    assert f"{100 * best:.0f} %" in text


def test_an_empty_file_makes_a_page(tmp_path: Path) -> None:
    Outline(page([read_results(write(tmp_path / "none.json"))]))


def points(chart: str, kind: str) -> list[tuple[float, float]]:
    found = re.search(rf'<polyline class="{kind} s0" points="([^"]*)"', chart)
    assert found
    return [(float(x), float(y)) for x, y in (pair.split(",") for pair in found[1].split())]


def test_lines_are_where_their_numbers_are() -> None:
    """On logarithmic scales equal ratios are equal distances, and a floor of half the time lies below by one such."""
    line = Series("a", ((1, 10), (4, 40), (16, 160)), 0)
    floor = Series("b", ((1, 5), (4, 20), (16, 80)), 0, dashed=True)
    chart = line_chart("t", "d", [line, floor], y_name="us", log_y=True)
    (x0, y0), (x1, y1), (x2, y2) = points(chart, "line")
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2)
    assert y0 - y1 == pytest.approx(y1 - y2, abs=0.2)
    below = [bottom[1] - top[1] for top, bottom in zip(points(chart, "line"), points(chart, "floor"), strict=True)]
    assert below == pytest.approx([(y0 - y1) / 2] * 3, abs=0.2)


def test_bars_that_lose_go_left_and_charts_share_a_scale() -> None:
    def widths(chart: str) -> list[tuple[str, float]]:
        return [(kind, float(width)) for kind, width in re.findall(r'<rect class="(\w+)".*?width="([\d.]+)"', chart)]

    (won, right), (lost, left) = widths(bar_chart("t", "d", [Bar("a", 4.0), Bar("b", 0.25)]))
    assert (won, lost) == ("gain", "loss")
    assert right == pytest.approx(left, abs=0.2)
    together = bar_chart("t", "d", [Bar("a", 2.0)], lowest=0.25, highest=4.0)
    assert widths(together) == [("gain", pytest.approx(right / 2, abs=0.2))]


# --- colours ---------------------------------------------------------------------------------------------------------


def luminance(color: str) -> float:
    channels = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_contrast(scheme: int) -> None:
    """WCAG 2.2 AA: 4.5 for text, 3 for lines and bars. Smallest seen: 5.4 for text, 4.6 for lines."""
    css = files("replaystate.bench").joinpath("page.css").read_text(encoding="utf-8")
    block = re.findall(r":root \{(.*?)\}", css, flags=re.DOTALL)[scheme]
    colors = dict(re.findall(r"--(\w+): (#[0-9a-f]{6});", block))
    for ground in ("page", "card"):
        assert all(contrast(colors[name], colors[ground]) >= 4.5 for name in ("text", "soft", "link", "loss"))
        assert all(
            contrast(color, colors[ground]) >= 3 for name, color in colors.items() if re.match(r"s\d|gain", name)
        )


# --- in a browser ----------------------------------------------------------------------------------------------------

CHROMIUMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")

INSPECT = """() => {
  const outside = [];
  for (const svg of document.querySelectorAll('svg[role=img]')) {
    const frame = svg.getBoundingClientRect();
    for (const text of svg.querySelectorAll('text')) {
      const box = text.getBoundingClientRect();
      if (box.left < frame.left - 1 || box.right > frame.right + 1 || box.top < frame.top - 1 ||
          box.bottom > frame.bottom + 1) outside.push(text.textContent);
    }
  }
  const sizes = [...document.querySelectorAll('svg[role=img] text')].map(
    text => text.getBoundingClientRect().height);
  return {
    scroll: document.documentElement.scrollWidth, window: innerWidth, outside, smallest: Math.min(...sizes),
    ground: getComputedStyle(document.body).backgroundColor, figures: document.querySelectorAll('figure').length,
  };
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install '.[browser]'")
    path = next((found for name in CHROMIUMS if (found := shutil.which(name))), None)
    if path is None:
        pytest.skip(f"no Chromium on this machine: none of {', '.join(CHROMIUMS)}")
    quiet = "--no-sandbox --disable-gpu --disable-background-networking --disable-component-update --no-first-run"
    with api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=path, args=quiet.split())
        yield opened
        opened.close()


@pytest.fixture
def opened(browser: Any) -> Iterator[Callable[..., Any]]:
    """Open a page; `problems` of it are what it logged and what it asked for besides itself."""
    contexts = []

    def open_page(path: Path, width: int, scheme: str) -> Any:
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        contexts.append(context)
        tab = context.new_page()
        tab.problems = []
        tab.on("console", lambda message: tab.problems.append(f"console: {message.text}"))
        tab.on("pageerror", lambda error: tab.problems.append(f"error: {error}"))
        tab.on("request", lambda request: request.url == path.as_uri() or tab.problems.append(request.url))
        tab.goto(path.as_uri())
        return tab

    yield open_page
    for context in contexts:
        context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1200])
@pytest.mark.parametrize("name", NAMES)
def test_in_a_browser(opened: Callable[..., Any], pages: dict[str, Path], name: str, width: int, scheme: str) -> None:
    tab = opened(pages[name], width, scheme)
    found = tab.evaluate(INSPECT)
    assert tab.problems == []
    assert found["scroll"] <= found["window"] == width
    assert found["outside"] == []
    assert found["smallest"] >= 13  # px of the box of a line of text, at letters of 12 px; 14 was seen
    assert found["figures"] > 0
    dark = found["ground"] == "rgb(20, 23, 26)"
    assert dark == (scheme == "dark")


def test_tables_open_without_a_wider_page(opened: Callable[..., Any], pages: dict[str, Path]) -> None:
    tab = opened(pages["all"], 400, "light")
    tab.evaluate("document.querySelectorAll('details').forEach(details => details.open = true)")
    found = tab.evaluate(INSPECT)
    assert found["scroll"] <= 400
    assert tab.problems == []


def test_figures_are_named_for_screen_readers(opened: Callable[..., Any], pages: dict[str, Path]) -> None:
    """As the browser computes names, not as the markup means them."""
    tab = opened(pages["all"], 1200, "light")
    images = tab.get_by_role("img").all()
    assert len(images) == tab.locator("figure").count()
    assert tab.get_by_role("img", name="µs, median").count() > 0
    for level, words in ((1, "replaystate benchmarks"), (3, "Where it loses")):
        assert tab.get_by_role("heading", level=level, name=words).count() > 0
