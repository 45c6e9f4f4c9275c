"""Tests of the graph of ``kedge tree`` as text."""

from hypothesis import given
from hypothesis import strategies as st

from kedge.cli.show import draw_graph
from kedge.store import ConversationRow, Node
from kedge.store.tree import StoredTree


def make_stored(*parents: int, head: int = 0) -> StoredTree:
    """Return a tree whose nodes 1, 2, … have these parents."""
    nodes = (
        Node(number, 1, 1, parent, 1, "answered", 0, 0, 0)
        for number, parent in enumerate(parents, 1)
    )
    return StoredTree(ConversationRow("c", head=head), tuple(nodes))


def draw_text(*parents: int, head: int = 0, limit: int = 0) -> str:
    """Return the graph of a tree as one string."""
    return "\n".join(lanes for lanes, _ in draw_graph(make_stored(*parents, head=head), limit))


def test_branches_are_lanes() -> None:
    """The head is in the first lane, a fork joins above its parent, and a limit leaves out the oldest nodes."""
    assert draw_text(0, 1, 2, 2, 3, head=5) == "●\n●\n│ ●\n├─┘\n●\n●"
    lines = list(draw_graph(make_stored(0, 1, 2, 2, 3, head=4)))
    assert [node.id for _, node in lines if node] == [4, 5, 3, 2, 1]
    nested = ["●", "│ ●", "│ │ ●", "│ ├─┘", "│ ●", "├─┘", "●"]
    assert draw_text(0, 1, 2, 2, 1, head=5).split("\n") == nested
    assert draw_text(0, 1, 1, 1, head=4).split("\n") == ["●", "│ ●", "├─┘", "│ ●", "├─┘", "●"]
    assert draw_text(0, 1, 2, 2, head=4, limit=2) == "●\n│ ●"
    assert draw_text(0, 1, 2, 2, head=4, limit=3) == "●\n│ ●\n├─┘\n●"


@given(st.lists(st.integers(0, 100), min_size=1, max_size=40))
def test_every_node_is_drawn_once_under_its_children(choices: list[int]) -> None:
    """In any tree, each node has one line, below the lines of its children."""
    parents = [0 if i == 0 else 1 + choice % i for i, choice in enumerate(choices)]
    lines = list(draw_graph(make_stored(*parents, head=len(parents))))
    node_ids = [node.id for _, node in lines if node]
    assert sorted(node_ids) == list(range(1, len(parents) + 1))
    position = {number: index for index, number in enumerate(node_ids)}
    assert all(position[parent] > position[n] for n, parent in enumerate(parents, 1) if parent)
    for lanes, node in lines:
        assert lanes == lanes.rstrip()
        assert ("●" in lanes) is (node is not None)
    assert lines[-1][0] == "●"
