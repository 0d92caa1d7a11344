"""`replaystate bench report`: files of results as one HTML page that needs nothing else, in light and in dark."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files

from .results import CONTROLS, MEASURED_FLOORS, Folding, Result, ResultFile, SpeedUp, foldings, speed_ups
from .svg import Bar, Series, bar_chart, legend, line_chart, number

FAR_FROM_FLOOR = 0.5
"""Share of the copy bandwidth below which a large batch is listed among the weak cases."""

NOTE = (
    " <em>recurrence</em> is plain torch without replay, op by op: its bars show what plain torch costs. What replay "
    "itself saves is the distance of the two floors above."
)
"""What a reader must know about bars of the recurrence."""

BARS = 14
"""Bars of one figure."""


def page(results: Sequence[ResultFile]) -> str:
    """The page.

    Args:
        results: the files, in the order in which they appear.

    Returns:
        HTML with styles and figures inside. It loads nothing, and its policy lets it load nothing.
    """
    style = files(__package__).joinpath("page.css").read_text(encoding="utf-8")
    sections = "".join(_section(file, number_ + 1) for number_, file in enumerate(results))
    contents = ""
    if len(results) > 1:
        links = "".join(f'<li><a href="#file-{i + 1}">{escape(f.device)}</a></li>' for i, f in enumerate(results))
        contents = f"<nav aria-label='Files'><ul>{links}</ul></nav>"
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; "
        'img-src data:">\n<link rel="icon" href="data:,">\n'
        f"<title>replaystate benchmarks: {escape(', '.join(f.device for f in results))}</title>\n"
        f"<style>{style}</style>\n</head>\n<body>\n<header><h1>replaystate benchmarks</h1>"
        "<p>Medians of measured times. The dashed floor is the time that a plain copy needs for the bytes that the "
        "operation cannot avoid to move, at the copy bandwidth measured in the same run. Times count one Gated "
        "DeltaNet layer unless a title says otherwise.</p>"
        f"{contents}</header>\n<main>{sections}</main>\n</body>\n</html>\n"
    )


def _section(file: ResultFile, index: int) -> str:
    ratios, folds = speed_ups(file), foldings(file)
    parts = [
        f'<section id="file-{index}"><h2>{escape(file.device)}</h2>',
        _facts(file),
        _summary(file, ratios),
        "<h3>Where it loses</h3>",
        _losses(file, ratios),
        "<h3>Time against batch</h3>",
        _grid(_time_figures(file)) or "<p>No case was timed at two sizes of the batch.</p>",
        _rest(file),
    ]
    if ratios:
        note = NOTE if any(ratio.group.endswith("against recurrence") for ratio in ratios) else ""
        parts += [f"<h3>Speed-ups</h3><p>Their time over ours.{note}</p>", _grid(_speed_up_figures(ratios))]
    if folds:
        parts += [
            "<h3>What folding costs</h3><p>A step in which every row folds its window into the checkpoint, and the "
            "steady mixture of steps, over a step in which none folds. Dashed: the same ratio of the bytes.</p>",
            _grid(_fold_figures(folds)),
        ]
    return "".join([*parts, _everything(file), "</section>\n"])


def _facts(file: ResultFile) -> str:
    pairs = {"file": file.source, **file.facts}
    if file.copy_gb_per_s is not None:
        pairs["copy bandwidth"] = f"{number(file.copy_gb_per_s)} GB/s"
    items = "".join(f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in pairs.items())
    return f'<dl class="facts">{items}</dl><p>Made by <code>{escape(file.command)}</code></p>'


def _summary(file: ResultFile, ratios: Sequence[SpeedUp]) -> str:
    cards = [(str(len(file.results)), "times measured")]
    shares = [result for result in file.results if result.of_copy and result.variant not in CONTROLS]
    if shares:
        best = max(shares, key=lambda result: result.of_copy or 0)
        cards.append((f"{100 * (best.of_copy or 0):.0f} %", f"of the copy bandwidth at best: {best.title}"))
    if ratios:
        losing = sum(ratio.times < 1 for ratio in ratios)
        cards.append((f"{losing} of {len(ratios)}", "comparisons that we lose"))
    if file.checks:
        missed = sum(not check["met"] for check in file.checks)
        cards.append((f"{missed} of {len(file.checks)}", "targets and gates missed"))
    return f'<ul class="cards">{"".join(f"<li><b>{escape(a)}</b> {escape(b)}</li>" for a, b in cards)}</ul>'


def _losses(file: ResultFile, ratios: Sequence[SpeedUp]) -> str:
    rows: list[Sequence[str]] = []
    for ratio in sorted((r for r in ratios if r.times < 1), key=lambda r: r.times):
        rows.append(("slower", f"{ratio.label} ({ratio.group})", f"{number(ratio.times)}×"))
    for check in file.checks:
        if not check["met"]:
            rows.append(("target missed", str(check["name"]), f"{number(check['value'])}, target {check['target']}"))
    largest: dict[tuple[str, str], Result] = {}
    for result in file.results:
        if result.of_copy and result.variant not in CONTROLS:
            place = result.case, result.variant
            if place not in largest or (result.rows or 0) > (largest[place].rows or 0):
                largest[place] = result
    weak = sorted((r for r in largest.values() if (r.of_copy or 1) < FAR_FROM_FLOOR), key=lambda r: r.of_copy or 0)
    for result in weak:
        rows.append(("far from the floor", result.title, f"{100 * (result.of_copy or 0):.2g} % of the copy bandwidth"))
    for skip in file.skipped:
        what = ", ".join(str(skip[key]) for key in ("name", "model", "rows", "what") if key in skip)
        rows.append(("not timed", what, str(skip.get("reason", ""))))
    if not rows:
        return "<p>No comparison is lost, no target missed, nothing far from the floor at its largest batch.</p>"
    return _table(("kind", "case", "found"), rows, "losses")


def _curves(file: ResultFile) -> dict[str, dict[str, list[Result]]]:
    """Results by case and variant, ordered by rows, of those cases that were timed at two sizes or more."""
    cases: dict[str, dict[str, list[Result]]] = {}
    for result in file.results:
        if result.rows:
            cases.setdefault(result.case, {}).setdefault(result.variant, []).append(result)
    curves: dict[str, dict[str, list[Result]]] = {}
    for case, variants in cases.items():
        lines = {name: sorted(line, key=lambda r: r.rows or 0) for name, line in variants.items()}
        lines = {name: line for name, line in lines.items() if len({result.rows for result in line}) > 1}
        if lines:
            curves[case] = lines
    return curves


def _time_figures(file: ResultFile) -> Iterable[str]:
    for case, variants in _curves(file).items():
        lines: list[Series] = []
        floors: list[Series] = []
        sentences = []
        for color, (name, results) in enumerate(variants.items()):
            points = tuple((float(r.rows or 1), r.us) for r in results)
            lines.append(Series(name, points, color, dashed=name in MEASURED_FLOORS))
            first, last = results[0], results[-1]
            sentence = f"{name}: {number(first.us)} at {first.rows} to {number(last.us)} at {last.rows} rows"
            floor = tuple((float(r.rows or 1), r.floor_us) for r in results if r.floor_us)
            if len(floor) > 1:
                floors.append(Series(f"floor of {name}", floor, color, dashed=True))
                sentence += f", {100 * (last.of_copy or 0):.0f} % of the copy bandwidth there"
            sentences.append(sentence)
        series = [*lines, *floors]
        text = f"Median microseconds against rows in the batch, both scales logarithmic. {'. '.join(sentences)}."
        chart = line_chart(case, text, series, y_name="µs, median", log_y=True)
        ordered = [result for results in variants.values() for result in results]
        name, _, sizes = case.partition(", ")
        caption = f"{sizes}; µs against rows" if sizes else "µs against rows"
        yield _figure(name, caption, legend(series) + chart, _result_table(ordered))


def _rest(file: ResultFile) -> str:
    """Cases without a curve."""
    drawn = {(case, name) for case, variants in _curves(file).items() for name in variants}
    rest = [result for result in file.results if (result.case, result.variant) not in drawn]
    if not rest:
        return ""
    return f"<h4>Cases at one size of the batch</h4>{_result_table(rest, with_case=True)}"


def _speed_up_figures(ratios: Sequence[SpeedUp]) -> Iterable[str]:
    groups: dict[str, list[SpeedUp]] = {}
    for ratio in ratios:
        groups.setdefault(ratio.group, []).append(ratio)
    for group, members in groups.items():
        labels, common = _strip_common([ratio.label for ratio in members])
        named = list(zip(labels, members, strict=True))
        for begin in range(0, len(named), BARS):
            part = named[begin : begin + BARS]
            bars = [Bar(label, ratio.times) for label, ratio in part]
            ends = [ratio.times for ratio in members]
            losing = [label for label, ratio in part if ratio.times < 1]
            text = "Their time over ours, logarithmic: right of 1 ours is faster, left of it slower. "
            text += f"Slower: {'; '.join(losing)}. " if losing else "None is slower. "
            text += "; ".join(f"{label}: {number(ratio.times)}" for label, ratio in part)
            table = _table(
                ("case", "ours µs", "theirs µs", "times"),
                [(label, number(r.ours_us), number(r.theirs_us), f"{number(r.times)}×") for label, r in part],
            )
            title = group + (f" ({begin // BARS + 1})" if len(named) > BARS else "")
            chart = bar_chart(title, text, bars, lowest=min(ends), highest=max(ends))
            yield _figure(title, common, chart, table)


def _strip_common(labels: Sequence[str]) -> tuple[list[str], str]:
    """The words between commas that all labels share, apart from the labels."""
    split = [label.split(", ") for label in labels]
    common = [word for word in split[0] if len(split) > 1 and all(word in words for words in split)]
    rest = [", ".join(word for word in words if word not in common) for words in split]
    if any(not label for label in rest):
        return list(labels), ""
    return rest, ", ".join(common)


def _fold_figures(folds: Sequence[Folding]) -> Iterable[str]:
    cases: dict[str, list[Folding]] = {}
    for fold in folds:
        cases.setdefault(fold.case, []).append(fold)
    for case, members in cases.items():
        members.sort(key=lambda fold: fold.rows)
        values = {
            "every row folds": [(fold.rows, fold.full_us and fold.full_us / fold.half_us) for fold in members],
            "steady": [(fold.rows, fold.steady_us and fold.steady_us / fold.half_us) for fold in members],
        }
        bytes_ = {
            "every row folds": [(fold.rows, fold.full_bytes) for fold in members],
            "steady": [(fold.rows, fold.steady_bytes) for fold in members],
        }
        series, sentences = [], []
        for color, name in enumerate(values):
            points = tuple((float(x), y) for x, y in values[name] if y)
            if points:
                series.append(Series(name, points, color))
                sentences.append(f"{name}: " + ", ".join(f"{number(y)} at {x:g} rows" for x, y in points))
            floor = tuple((float(x), y) for x, y in bytes_[name] if y)
            if points and len(floor) > 1:
                series.append(Series(f"bytes, {name}", floor, color, dashed=True))
        text = f"Time over that of a step in which no row folds. {'. '.join(sentences)}."
        chart = line_chart(case, text, series, y_name="times a step without folds", log_y=False, height=190)
        table = _table(
            ("rows", "no fold µs", "every row µs", "steady µs", "every row", "steady"),
            [
                (
                    str(fold.rows), number(fold.half_us), _maybe(fold.full_us), _maybe(fold.steady_us),
                    _maybe(fold.full_us and fold.full_us / fold.half_us, "×"),
                    _maybe(fold.steady_us and fold.steady_us / fold.half_us, "×"),
                )
                for fold in members
            ],
        )  # fmt: skip
        name, _, sizes = case.rpartition("; ")
        yield _figure(
            sizes, f"{name.removeprefix('step; ')}; times a step without folds", legend(series) + chart, table
        )


def _maybe(x: float | None, unit: str = "") -> str:
    return "–" if x is None else number(x) + unit


def _everything(file: ResultFile) -> str:
    table = _result_table(file.results, with_case=True)
    return f"<details><summary>Everything that was measured ({len(file.results)})</summary>{table}</details>"


def _result_table(results: Sequence[Result], with_case: bool = False) -> str:
    head = [*(["case"] if with_case else []), "variant", "rows", "µs", "IQR µs", "floor µs", "of copy"]
    rows = [
        [
            *([result.case] if with_case else []), result.variant, str(result.rows or "–"), number(result.us),
            _maybe(result.iqr_us), _maybe(result.floor_us),
            "–" if result.of_copy is None else f"{100 * result.of_copy:.0f} %",
        ]
        for result in results
    ]  # fmt: skip
    empty = [i for i in range(len(head)) if all(row[i] == "–" for row in rows)]
    return _table(
        [name for i, name in enumerate(head) if i not in empty],
        [[cell for i, cell in enumerate(row) if i not in empty] for row in rows],
    )


def _figure(title: str, caption: str, body: str, table: str) -> str:
    note = f" <small>{escape(caption)}</small>" if caption else ""
    return (
        f"<figure><figcaption>{escape(title)}{note}</figcaption>{body}"
        f"<details><summary>Table</summary>{table}</details></figure>"
    )


def _grid(figures: Iterable[str]) -> str:
    inside = "".join(figures)
    return f'<div class="grid">{inside}</div>' if inside else ""


NUMERIC = set("0123456789–")


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], kind: str = "") -> str:
    def cell(text: str, name: str) -> str:
        numeric = name not in ("case", "kind", "found", "variant") and text[:1] in NUMERIC
        return f"<td{' class=n' if numeric else ''}>{escape(text)}</td>"

    top = "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    body = "".join(
        f"<tr>{''.join(cell(text, name) for text, name in zip(row, head, strict=True))}</tr>" for row in rows
    )
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="Table"><table class="{kind}"><thead><tr>{top}</tr>'
        f"</thead><tbody>{body}</tbody></table></div>"
    )
