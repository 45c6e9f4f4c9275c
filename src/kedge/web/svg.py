"""Compute charts (bars and lines over time, ranked bars), and the lanes of a response tree with a shape for each mark.

A chart is scaled to the available width, except for strokes, and all text is HTML beside it, so it is readable on
a narrow screen. Every chart has a title and a text description, every bar has a title, and series differ in style
(solid, hollow, dashed) as well as in color. Of a response tree only the lanes are drawn; the text of the rows is
ordinary HTML beside them, so that it wraps and works with screen readers and the keyboard. Marks differ in shape as
well as in color, and colors are defined in the style sheet. All lines of a response tree are two paths for any size
of the tree.

No chart library is used, because the page must be readable without JavaScript.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import floor, log10
from typing import Literal

from markupsafe import Markup

from kedge.presentation.layout import Layout, LayoutEdge, LayoutRow
from kedge.presentation.response_tree import Mark, TreeNode

WIDTH = 600
HEIGHT = 140
SERIES_STYLES = ("solid", "hollow", "dashed")
"""The style classes of the first, second and third series."""
Series = dict[str, Sequence[float | None]]
"""The values of each series, ``None`` for no value."""
ValueFormatter = Callable[[float], str]
Bar = tuple[str, str, tuple[float, float, float, float]]
"""The style of a bar, what it shows, and its box."""


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart: title, labels of the axis, and series of one value per label, ``None`` for no value."""

    title: str
    meaning: str = ""
    format_value: ValueFormatter = "{:,.0f}".format
    kind: Literal["bars", "lines"] = "bars"
    labels: Sequence[str] = ()
    series: Mapping[str, Sequence[float | None]] = field(default_factory=Series)

    @property
    def maximum(self) -> float:
        """A round maximum of the axis; bars are stacked, lines are not. It is 0 without values."""
        columns = zip(*self.series.values(), strict=True)
        combine = sum if self.kind == "bars" else max
        heights = (combine(value or 0 for value in column) for column in columns)
        return _round_up(max(heights, default=0))

    @property
    def description(self) -> str:
        """The newest and the highest value of each series."""
        return " ".join(self._describe_series(name, values) for name, values in self.series.items())

    def _describe_series(self, name: str, values: Sequence[float | None]) -> str:
        measured = [value for value in values if value is not None]
        if not measured:
            return f"{name}: no values."
        newest = self.format_value(measured[-1])
        highest = self.format_value(max(measured))
        return f"{name}: {newest} at the end, {highest} at most."

    def iter_bars(self) -> Iterator[tuple[str, list[Bar]]]:
        """Yield the label and the bars of each position that has any, from the bottom to the top."""
        maximum = self.maximum
        step = WIDTH / len(self.labels)
        gap = min(step * 0.25, 4)
        for index, column in enumerate(zip(*self.series.values(), strict=True)):
            bottom = float(HEIGHT)
            bars: list[Bar] = []
            for style, name, value in zip(SERIES_STYLES, self.series, column, strict=False):
                if value:
                    height = HEIGHT * value / maximum
                    bottom -= height
                    box = (index * step + gap / 2, bottom, step - gap, height)
                    bars.append((style, f"{name} {self.format_value(value)}", box))
            if bars:
                yield self.labels[index], bars

    def iter_lines(self) -> Iterator[tuple[str, str, list[tuple[str, str]]]]:
        """Yield the style, the path and the points of each line; a missing value is a gap."""
        maximum = self.maximum
        step = WIDTH / max(len(self.labels) - 1, 1)
        for style, (name, values) in zip(SERIES_STYLES, self.series.items(), strict=False):
            path = ""
            points: list[tuple[str, str]] = []
            is_connected = False
            for index, value in enumerate(values):
                if value is None:
                    is_connected = False
                    continue
                position = f"{index * step:.1f} {HEIGHT - HEIGHT * value / maximum:.1f}"
                dot = f"M{position}h0.01"  # its ends are round
                path += f"L{position}" if is_connected else dot
                is_connected = True
                points.append((f"{self.labels[index]}: {name} {self.format_value(value)}", dot))
            yield style, path, points


def _round_up(value: float) -> float:
    if value <= 0:
        return 0
    unit = 10.0 ** floor(log10(value))
    return next(step * unit for step in (1, 1.5, 2, 3, 4, 5, 6, 8, 10) if step * unit >= value)


ROW_HEIGHT = 36
"""The height of a row; equal to ``--row`` of the style sheet."""
LANE_WIDTH = 16
MARGIN = 14

_SHAPES: dict[Mark, str] = {
    "lost": "m-4.5-4.5l9 9m0-9l-9 9",
    "cancelled": "m-4.5-4.5v9m9-9v9",
    "failed": "m-4.5-4.5h9v9h-9z",
    "resent": "m4.5 0a4.5 4.5 0 1 1-4.5-4.5m-1.5-2l2 2l-2 2",
    "expired": "m-4.5 0a4.5 4.5 0 1 1 9 0a4.5 4.5 0 1 1-9 0m4.5-2.25v2.25h2.25",
    "pending": "m-4.5 0a4.5 4.5 0 0 1 4.5-4.5m4.5 4.5a4.5 4.5 0 0 1-4.5 4.5",
    "edited": "m-4.5-4.5h9l-4.5 9z",
    "compacted": "m0-4.5l4.5 4.5l-4.5 4.5l-4.5-4.5z",
    "full": "m0-4.5l4.5 9h-9z",
}
"""The shape of each mark around the point of its node, the most important mark first."""
_CIRCLE = "m-4.5 0a4.5 4.5 0 1 1 9 0a4.5 4.5 0 1 1-9 0z"
_RING = "m-8 0a8 8 0 1 1 16 0a8 8 0 1 1-16 0z"
_GAP = "m-9 0a9 9 0 1 1 18 0a9 9 0 1 1-18 0z"
_FOLD = "m0-5v.1m0 4.9v.1m0 4.9v.1"


def draw_lanes(layout: Layout) -> Markup:
    """Draw the lanes of a layout as an SVG element."""
    lines = "".join(_edge_path(edge) for edge in layout.edges if not edge.on_path)
    path = "".join(_edge_path(edge) for edge in layout.edges if edge.on_path)
    shapes = "".join(_draw_row(index, row) for index, row in enumerate(layout.rows))
    edges = f'<path class="line" d="{lines}"/><path class="line here" d="{path}"/>'
    return _draw_svg(layout.lanes, len(layout.rows), edges + shapes)


def draw_mark(mark: Mark) -> Markup:
    """Draw one mark for the legend."""
    row = LayoutRow(0, (TreeNode(0, marks=frozenset({mark})),))
    return _draw_svg(1, 1, _draw_row(0, row))


def _draw_svg(lanes: int, rows: int, shapes: str) -> Markup:
    width = 2 * MARGIN + LANE_WIDTH * max(lanes - 1, 0)
    height = ROW_HEIGHT * rows
    return Markup(  # noqa: S704 - it contains only numbers and constants
        f'<svg class="lanes" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'aria-hidden="true" focusable="false">{shapes}</svg>'
    )


def _x(lane: int) -> int:
    return MARGIN + LANE_WIDTH * lane


def _y(index: int) -> int:
    return ROW_HEIGHT * index + ROW_HEIGHT // 2


def _edge_path(edge: LayoutEdge) -> str:
    x = _x(edge.lane)
    y = _y(edge.start)
    to_x = _x(edge.to_lane)
    to_y = _y(edge.end)
    if x == to_x:
        return f"M{x} {y}V{to_y}"
    bend = to_y - ROW_HEIGHT
    middle = to_y - ROW_HEIGHT // 2
    return f"M{x} {y}V{bend}C{x} {middle} {to_x} {middle} {to_x} {to_y}"


def _draw_row(index: int, row: LayoutRow) -> str:
    point = f"M{_x(row.lane)} {_y(index)}"
    if row.is_fold:
        return f'<path class="gap" d="{point}{_GAP}"/><path class="fold" d="{point}{_FOLD}"/>'
    marks = row.node.marks
    ring = f'<path class="ring" d="{point}{_RING}"/>' if "head" in marks else ""
    here = " here" if row.on_path else ""
    kind, shape = _choose_shape(marks)
    return f'{ring}<path class="{kind}{here}" d="{point}{shape}"/>'


def _choose_shape(marks: frozenset[Mark]) -> tuple[str, str]:
    """Return the class and the shape of the most important mark."""
    for mark, shape in _SHAPES.items():
        if mark in marks:
            return mark, shape
    return "plain", _CIRCLE
