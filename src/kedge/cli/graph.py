"""A tree drawn in lanes, the newest first, as ``git log --graph`` draws commits.

Every node has one parent, so lanes only ever join on the way down: a row of ``├─┘`` before the parent. A
lane that ends leaves its column to the next one that needs it. Pure: ids in, rows out.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GraphRow:
    """One row: what to draw, and the node that stands in it, if one does."""

    lanes: str
    node: int | None = None


def draw(
    nodes: Iterable[tuple[int, int]], marks: dict[int, str] | None = None
) -> Iterator[GraphRow]:
    """The rows for nodes and their parents, given the newest first; ``marks`` are signs of their own."""
    lanes: list[int | None] = []
    for node, parent in nodes:
        waiting = [column for column, wanted in enumerate(lanes) if wanted == node]
        if len(waiting) > 1:
            yield GraphRow(_join(lanes, waiting))
            for column in waiting[1:]:
                lanes[column] = None
        column = waiting[0] if waiting else _free(lanes)
        lanes[column] = node
        _trim(lanes)
        sign = (marks or {}).get(node, "●")
        yield GraphRow(_row(lanes, column, sign), node)
        lanes[column] = parent or None
        _trim(lanes)


def _free(lanes: list[int | None]) -> int:
    """A column that nobody uses."""
    if None not in lanes:
        lanes.append(None)
    return lanes.index(None)


def _trim(lanes: list[int | None]) -> None:
    while lanes and lanes[-1] is None:
        lanes.pop()


def _row(lanes: list[int | None], column: int, sign: str) -> str:
    cells = [sign if i == column else " " if lane is None else "│" for i, lane in enumerate(lanes)]
    return " ".join(cells)


def _join(lanes: list[int | None], waiting: list[int]) -> str:
    """Lanes on their way into the first of them; others pass behind."""
    first, last = waiting[0], waiting[-1]
    text = ""
    for column, lane in enumerate(lanes):
        inside = first < column < last
        if column == first:
            cell = "├"
        elif column in waiting:
            cell = "┴" if column < last else "┘"
        elif lane is None:
            cell = "─" if inside else " "
        else:
            cell = "┼" if inside else "│"
        text += cell + ("─" if first <= column < last else " ")
    return text.rstrip()
