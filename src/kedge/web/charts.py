"""Draw charts as SVG: bars over time, lines over time, and ranked bars.

The drawing is scaled to the available width, except for strokes, and all text is HTML beside it, so a
chart is readable on a narrow screen. Every chart has a title and a text description, every bar has a
title, and series differ in style (solid, hollow, dashed) as well as in color.

No chart library is used, because the page must be readable without JavaScript.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from math import floor, log10
from typing import Literal

from markupsafe import Markup, escape

WIDTH, HEIGHT = 600, 140
SERIES_STYLES = ("solid", "hollow", "dashed")
"""The style classes of the first, second and third series."""

_ids = count(1)
ValueFormatter = Callable[[float], str]


@dataclass(frozen=True, slots=True)
class Series:
    """Named values, one per position on the axis; ``None`` for no value."""

    name: str
    values: Sequence[float | None]


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart: title, labels of the axis, and series."""

    title: str
    labels: Sequence[str]
    series: Sequence[Series]
    format_value: ValueFormatter = "{:,.0f}".format
    kind: Literal["bars", "lines"] = "bars"
    end_label: str = ""
    """The label at the end of the axis, if not the last one."""


@dataclass(frozen=True, slots=True)
class RankedBar:
    """One bar of a ranking."""

    name: str
    value: float
    shown: str
    hint: str = ""


def draw_chart(chart: Chart) -> Markup:
    """Draw a chart over time, or a note if there is no data."""
    maximum = _axis_max(chart)
    if maximum <= 0 or not chart.labels:
        return _wrap_figure(
            chart.title, Markup("<p class='nothing'>Nothing in this range yet.</p>")
        )
    shapes = _draw_bars(chart, maximum) if chart.kind == "bars" else _draw_lines(chart, maximum)
    number = next(_ids)
    svg = Markup(
        '<svg class="plot" viewBox="0 0 {w} {h}" preserveAspectRatio="none" role="img" '
        'aria-labelledby="chart-{n}-title chart-{n}-desc"><title id="chart-{n}-title">{title}</title>'
        '<desc id="chart-{n}-desc">{desc}</desc>{grid}{shapes}</svg>'
    ).format(
        w=WIDTH,
        h=HEIGHT,
        n=number,
        title=chart.title,
        desc=describe_chart(chart),
        grid=_draw_grid(),
        shapes=shapes,
    )
    axis = Markup('<div class="axis"><span>{}</span><span>{}</span><span>{}</span></div>').format(
        chart.labels[0], chart.labels[len(chart.labels) // 2], chart.end_label or chart.labels[-1]
    )
    top = Markup('<span class="most">{}</span>').format(chart.format_value(maximum))
    return _wrap_figure(
        chart.title,
        _draw_legend(chart) + Markup('<div class="frame">') + top + svg + Markup("</div>") + axis,
    )


def draw_ranking(
    title: str, rows: Sequence[RankedBar], empty_text: str = "Nothing in this range yet."
) -> Markup:
    """Draw named bars with their values, the largest first."""
    if not rows:
        return _wrap_figure(title, Markup("<p class='nothing'>{}</p>").format(empty_text))
    maximum = max(row.value for row in rows) or 1
    lines = Markup("").join(_draw_ranked_bar(row, maximum) for row in rows)
    return _wrap_figure(title, Markup('<dl class="ranking">{}</dl>').format(lines))


def draw_share_bar(part: float, total: float, label: str) -> Markup:
    """Draw a share as one bar, with a text for screen readers."""
    width = 100 * min(max(part / total, 0), 1) if total else 0
    visible_width = max(width, 0.6) if part else 0
    return Markup(
        '<svg class="share" viewBox="0 0 100 6" preserveAspectRatio="none" role="img">'
        "<title>{}</title>"
        '<rect class="whole" width="100" height="6"/>'
        '<rect class="part" width="{}" height="6"/></svg>'
    ).format(label, f"{visible_width:.2f}")


def describe_chart(chart: Chart) -> str:
    """Describe a chart: the newest and the highest value of each series."""
    return " ".join(_describe_series(series, chart) for series in chart.series)


def _describe_series(series: Series, chart: Chart) -> str:
    values = [value for value in series.values if value is not None]
    if not values:
        return f"{series.name}: no values."
    newest, highest = chart.format_value(values[-1]), chart.format_value(max(values))
    return f"{series.name}: {newest} at the end, {highest} at most."


def _axis_max(chart: Chart) -> float:
    """Return a round maximum of the axis; bars are stacked, lines are not."""
    if chart.kind == "bars":
        tops = [sum(value or 0 for value in column) for column in _columns(chart)]
    else:
        tops = [value or 0 for series in chart.series for value in series.values]
    return _round_up(max(tops, default=0))


def _round_up(value: float) -> float:
    if value <= 0:
        return 0
    unit = 10.0 ** floor(log10(value))
    return next(step * unit for step in (1, 1.5, 2, 3, 4, 5, 6, 8, 10) if step * unit >= value)


def _columns(chart: Chart) -> Iterable[tuple[float | None, ...]]:
    return zip(*(series.values for series in chart.series), strict=True)


def _draw_grid() -> Markup:
    lines = "".join(f"M0 {HEIGHT * part / 4:g}H{WIDTH}" for part in range(4))
    return Markup('<path class="grid" d="{}"/>').format(lines + f"M0 {HEIGHT}H{WIDTH}")


def _draw_bars(chart: Chart, max_value: float) -> Markup:
    step = WIDTH / len(chart.labels)
    gap = min(step * 0.25, 4)
    groups = [
        _draw_stack(chart, index, column, max_value, (index * step + gap / 2, step - gap))
        for index, column in enumerate(_columns(chart))
    ]
    return Markup("").join(groups)


def _draw_stack(
    chart: Chart,
    index: int,
    column: Sequence[float | None],
    max_value: float,
    where: tuple[float, float],
) -> Markup:
    x, width = where
    bottom = float(HEIGHT)
    pieces: list[Markup] = []
    parts: list[str] = []
    for form, series, value in zip(SERIES_STYLES, chart.series, column, strict=False):
        if not value:
            continue
        height = HEIGHT * value / max_value
        bottom -= height
        parts.append(f"{series.name} {chart.format_value(value)}")
        pieces.append(
            Markup('<rect class="{}" x="{}" y="{}" width="{}" height="{}"/>').format(
                form, f"{x:.2f}", f"{bottom:.2f}", f"{width:.2f}", f"{height:.2f}"
            )
        )
    if not pieces:
        return Markup("")
    title = f"{chart.labels[index]}: {', '.join(parts)}"
    return Markup("<g><title>{}</title>{}</g>").format(title, Markup("").join(pieces))


def _draw_lines(chart: Chart, max_value: float) -> Markup:
    return Markup("").join(
        _draw_line(form, series, chart, max_value)
        for form, series in zip(SERIES_STYLES, chart.series, strict=False)
    )


def _draw_line(form: str, series: Series, chart: Chart, max_value: float) -> Markup:
    step = WIDTH / max(len(chart.labels) - 1, 1)
    points: list[str] = []
    pen = "M"
    for index, value in enumerate(series.values):
        if value is None:
            pen = "M"
            continue
        points.append(f"{pen}{index * step:.1f} {HEIGHT - HEIGHT * value / max_value:.1f}")
        # A single value is drawn as a dot: a line without length and with round ends.
        if pen == "M":
            points.append("h0.01")
        pen = "L"
    return Markup('<path class="stroke {}" d="{}"><title>{}</title></path>').format(
        form, "".join(points), _describe_series(series, chart)
    )


def _draw_legend(chart: Chart) -> Markup:
    if len(chart.series) < 2:
        return Markup("")
    keys = [
        Markup('<li><span class="key {}{}" aria-hidden="true"></span>{}</li>').format(
            "line " if chart.kind == "lines" else "", form, series.name
        )
        for form, series in zip(SERIES_STYLES, chart.series, strict=False)
    ]
    return Markup('<ul class="legend">{}</ul>').format(Markup("").join(keys))


def _draw_ranked_bar(row: RankedBar, max_value: float) -> Markup:
    bar = draw_share_bar(row.value, max_value, f"{row.name}: {row.shown}")
    hint = Markup(' title="{}"').format(row.hint) if row.hint else Markup("")
    return Markup("<dt{}>{}</dt><dd>{}<span>{}</span></dd>").format(
        hint, escape(row.name), bar, row.shown
    )


def _wrap_figure(title: str, body: Markup) -> Markup:
    return Markup('<figure class="chart"><figcaption>{}</figcaption>{}</figure>').format(
        title, body
    )
