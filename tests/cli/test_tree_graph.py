"""Trees in lanes: every node once, under its children, its lane unbroken."""

from hypothesis import given
from hypothesis import strategies as st

from kedge.cli.tree import draw_graph


def draw_text(*nodes: tuple[int, int]) -> str:
    """The rows as one text."""
    return "\n".join(row.lanes for row in draw_graph(nodes))


def test_a_line_is_one_lane() -> None:
    """Nothing but nodes."""
    assert draw_text((3, 2), (2, 1), (1, 0)) == "●\n●\n●"


def test_a_fork_joins_above_its_parent() -> None:
    """The newer branch keeps the first lane."""
    assert draw_text((4, 2), (3, 2), (2, 1), (1, 0)) == "●\n│ ●\n├─┘\n●\n●"


def test_lanes_pass_behind_those_that_join() -> None:
    """And three may join at once."""
    rows = draw_text((9, 8), (8, 3), (7, 6), (6, 2), (5, 2), (4, 3), (3, 2), (2, 1)).split("\n")
    assert rows[6] == "├─┼─┼─┘"
    assert rows[8] == "├─┴─┘"


def test_a_free_lane_is_used_again() -> None:
    """So that a long tree stays narrow."""
    nodes = [(7, 5), (6, 5), (5, 3), (4, 3), (3, 1), (2, 1), (1, 0)]
    assert max(len(row.lanes) for row in draw_graph(nodes)) == 3


def test_a_cut_tree_is_drawn_as_far_as_it_goes() -> None:
    """With only the newest nodes the lanes run out at the bottom."""
    assert draw_text((4, 2), (3, 2)) == "●\n│ ●"


@given(st.lists(st.integers(0, 100), min_size=1, max_size=40))
def test_every_node_stands_once_under_its_children(choices: list[int]) -> None:
    """Whatever the tree: each node has one row, and the lane below a node leads to its parent."""
    nodes = [(i + 1, 0 if i == 0 else 1 + choice % i) for i, choice in enumerate(choices)]
    rows = list(draw_graph(reversed(nodes)))
    assert [row.node for row in rows if row.node] == [node for node, _ in reversed(nodes)]
    for row in rows:
        assert row.lanes == row.lanes.rstrip()
        assert ("●" in row.lanes) is (row.node is not None)
    assert rows[-1].lanes == "●"
