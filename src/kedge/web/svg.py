"""Draw SVG: charts (bars and lines over time, ranked bars), and the lanes of a chain with a shape for each mark.

A chart is scaled to the available width, except for strokes, and all text is HTML beside it, so it is readable on
a narrow screen. Every chart has a title and a text description, every bar has a title, and series differ in style
(solid, hollow, dashed) as well as in color. Of a chain only the lanes are drawn; the text of the rows is ordinary
HTML beside them, so that it wraps and works with screen readers and the keyboard. Marks differ in shape as well as
in color, and colors are defined in the style sheet. All lines of a chain are two paths for any size of the tree.

No chart library is used, because the page must be readable without JavaScript.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from math import floor, log10
from typing import Literal

from markupsafe import Markup

from kedge.store.tree import GraphNode, Layout, LayoutEdge, LayoutRow, Mark

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
    meaning: str = ""


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
        return draw_ranking(chart.title, (), meaning=chart.meaning)
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
    frame = Markup('<div class="frame">') + top + svg + Markup("</div>")
    return _wrap_figure(chart.title, chart.meaning, _draw_legend(chart) + frame + axis)


def draw_ranking(
    title: str,
    rows: Sequence[RankedBar],
    empty_text: str = "Nothing in this range yet.",
    meaning: str = "",
) -> Markup:
    """Draw named bars with their values, the largest first."""
    if not rows:
        return _wrap_figure(title, meaning, Markup("<p class='nothing'>{}</p>").format(empty_text))
    maximum = max(row.value for row in rows) or 1
    lines = Markup("").join(_draw_ranked_bar(row, maximum) for row in rows)
    return _wrap_figure(title, meaning, Markup('<dl class="ranking">{}</dl>').format(lines))


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
    path, points = "", Markup("")
    pen = "M"
    for index, value in enumerate(series.values):
        if value is None:
            pen = "M"
            continue
        at = f"{index * step:.1f} {HEIGHT - HEIGHT * value / max_value:.1f}"
        path += f"{pen}{at}h0.01" if pen == "M" else f"{pen}{at}"
        pen = "L"
        title = f"{chart.labels[index]}: {series.name} {chart.format_value(value)}"
        # A line without length and with round ends is a dot.
        points += Markup('<path class="point {}" d="M{}h0.01"><title>{}</title></path>').format(
            form, at, title
        )
    return Markup('<path class="stroke {}" d="{}"/>{}').format(form, path, points)


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
    return Markup('<dt title="{}">{}</dt><dd>{}<span>{}</span></dd>').format(
        row.hint or f"{row.name}: {row.shown}", row.name, bar, row.shown
    )


def _wrap_figure(title: str, meaning: str, body: Markup) -> Markup:
    return Markup('<figure class="chart"><figcaption title="{}">{}</figcaption>{}</figure>').format(
        meaning, title, body
    )


ROW_HEIGHT = 36
"""The height of a row; equal to ``--row`` of the style sheet."""
LANE_WIDTH = 16
MARGIN = 14
RADIUS = 4.5

_SHAPES: dict[Mark, str] = {
    "lost": "M{x0} {y0}L{x1} {y1}M{x0} {y1}L{x1} {y0}",
    "cancelled": "M{x0} {y0}V{y1}M{x1} {y0}V{y1}",
    "failed": "M{x0} {y0}H{x1}V{y1}H{x0}Z",
    "expired": "M{x0} {y}A{r} {r} 0 1 1 {x1} {y}A{r} {r} 0 1 1 {x0} {y}M{x} {ym}V{y}H{xm}",
    "pending": "M{x0} {y}A{r} {r} 0 0 1 {x} {y0}M{x1} {y}A{r} {r} 0 0 1 {x} {y1}",
    "edited": "M{x0} {y0}H{x1}L{x} {y1}Z",
    "compacted": "M{x} {y0}L{x1} {y}L{x} {y1}L{x0} {y}Z",
    "full": "M{x} {y0}L{x1} {y1}H{x0}Z",
}
_CIRCLE = "M{x0} {y}A{r} {r} 0 1 1 {x1} {y}A{r} {r} 0 1 1 {x0} {y}Z"
_FOLD = "M{x} {y0}v.1M{x} {y}v.1M{x} {y1}v.1"


def draw_lanes(layout: Layout) -> Markup:
    """Draw the lanes of a layout as an SVG element."""
    width = 2 * MARGIN + LANE_WIDTH * max(layout.lanes - 1, 0)
    height = ROW_HEIGHT * len(layout.rows)
    lines = _edge_paths(edge for edge in layout.edges if not edge.on_path)
    path = _edge_paths(edge for edge in layout.edges if edge.on_path)
    shapes = "".join(_draw_row(index, row) for index, row in enumerate(layout.rows))
    return Markup(  # noqa: S704 - it contains only numbers and constants
        f'<svg class="lanes" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'aria-hidden="true" focusable="false">'
        f'<path class="line" d="{lines}"/><path class="line here" d="{path}"/>{shapes}</svg>'
    )


def draw_mark(mark: Mark) -> Markup:
    """Draw one mark for the legend."""
    shape = _draw_row(0, LayoutRow(0, (GraphNode(0, marks=frozenset({mark})),)))
    return Markup(  # noqa: S704 - the same
        f'<svg class="lanes" width="{2 * MARGIN}" height="{ROW_HEIGHT}" viewBox="0 0 {2 * MARGIN} {ROW_HEIGHT}" '
        f'aria-hidden="true" focusable="false">{shape}</svg>'
    )


def _x(lane: int) -> int:
    return MARGIN + LANE_WIDTH * lane


def _y(index: int) -> int:
    return ROW_HEIGHT * index + ROW_HEIGHT // 2


def _edge_paths(edges: Iterable[LayoutEdge]) -> str:
    return "".join(_edge_path(edge) for edge in edges)


def _edge_path(edge: LayoutEdge) -> str:
    x, y, to_x, to_y = _x(edge.lane), _y(edge.start), _x(edge.to_lane), _y(edge.end)
    if x == to_x:
        return f"M{x} {y}V{to_y}"
    bend, middle = to_y - ROW_HEIGHT, to_y - ROW_HEIGHT // 2
    return f"M{x} {y}V{bend}C{x} {middle} {to_x} {middle} {to_x} {to_y}"


def _draw_row(index: int, row: LayoutRow) -> str:
    if row.is_fold:
        gap = f'<path class="gap" d="{_format_path(_CIRCLE, index, row, 9)}"/>'
        return f'{gap}<path class="fold" d="{_format_path(_FOLD, index, row, 5)}"/>'
    ring = ""
    if "head" in row.node.marks:
        ring = f'<path class="ring" d="{_format_path(_CIRCLE, index, row, RADIUS + 3.5)}"/>'
    return ring + _draw_outline(_top_mark(row.node.marks), index, row)


def _top_mark(marks: frozenset[Mark]) -> Mark | None:
    return next((mark for mark in _SHAPES if mark in marks), None)


def _draw_outline(mark: Mark | None, index: int, row: LayoutRow) -> str:
    shape = _SHAPES.get(mark, _CIRCLE) if mark else _CIRCLE
    kind = mark if mark in _SHAPES else "plain"
    here = " here" if row.on_path else ""
    return f'<path class="{kind}{here}" d="{_format_path(shape, index, row, RADIUS)}"/>'


def _format_path(shape: str, index: int, row: LayoutRow, r: float) -> str:
    x, y = _x(row.lane), _y(index)
    return shape.format(
        x=x,
        y=y,
        r=r,
        x0=x - r,
        x1=x + r,
        y0=y - r,
        y1=y + r,
        xm=x + r / 2,
        ym=y - r / 2,
    )
