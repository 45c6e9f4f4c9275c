"""Draw the lanes of a chain as SVG: lines, bends, and one shape for each mark.

Only the lanes are drawn; the text of the rows is ordinary HTML beside them, so that it wraps and works
with screen readers and the keyboard. Marks differ in shape as well as in color, and colors are defined in
the style sheet. All lines are two paths for any size of the tree.
"""

from collections.abc import Iterable

from markupsafe import Markup

from kedge.store.tree import GraphNode, Layout, LayoutEdge, LayoutRow, Mark

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
