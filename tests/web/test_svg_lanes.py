"""Tests of the SVG drawing of a tree."""

from kedge.store.tree import GraphNode, Mark, compute_layout
from kedge.web.svg import draw_lanes


def test_lanes_have_two_paths_and_a_shape_per_row() -> None:
    """Marks differ by shape, not only by color."""
    marks: tuple[Mark, ...] = ("lost", "expired", "failed", "compacted")
    nodes = [
        GraphNode(number, number - 1, marks=frozenset({mark}))
        for number, mark in enumerate(marks, 1)
    ]
    svg = draw_lanes(compute_layout(nodes, 4))
    assert svg.count('class="line') == 2
    shapes = {part.split('"')[0] for part in svg.split(' d="')[3:]}
    assert len(shapes) == 4
