"""Tests of ``kedge tree``: marks with their reasons, heads, and the graph as text."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from for_each import for_each
from kedge.cli.show import AnnotatedTree, describe_mark, draw_graph, render_tree
from kedge.store import ConversationRow, Node, RequestRecord
from kedge.store.tree import StoredTree
from kedge.turns import assistant

NOW = 1_000.0
RESENT = "the server no longer had the earlier response; the full conversation was resent"
RECORD = {"provider": "p", "scope": "s", "provider_response_id": "resp_1", "expires_at": 2_000.0}


def make_tree(kind: Any = "answered", **changes: Any) -> AnnotatedTree:
    """Return a tree with a root and one node, created by a response with these members."""
    row = ConversationRow("conv_1", "harbour", head=2, tree=1)
    nodes = (Node(1, 1, 1, 0, 1, "root", 0, 0, 0), Node(2, 1, 1, 1, 1, kind, 0, 1, 1))
    other = replace(row, id="conv_2", title="quay")
    tree = StoredTree(row, nodes, {2: RequestRecord(**{**RECORD, **changes})})
    return AnnotatedTree(tree, [row, other], {2: assistant("Hello there")})


@for_each(
    ("kind", "changes", "marks"),
    [
        ("answered", {}, []),
        ("answered", {"expires_at": 999.0}, ["expired"]),
        ("answered", {"expires_at": 1_020.0, "created_at": 0.5}, ["expired"]),  # within the margin
        ("answered", {"expires_at": None}, []),
        (
            "answered",
            {"status": "lost", "lost_reason": "gone"},
            ["lost: the server no longer has this response"],
        ),
        ("answered", {"status": "lost"}, ["lost"]),
        ("answered", {"stored": False}, ["unstored"]),
        ("answered", {"healed": "gone", "reason": "gone"}, [RESENT]),
        ("answered", {"reason": "changed"}, ["sent in full: changed"]),
        ("answered", {"reason": "new"}, []),
        ("failed", {"status": "refused"}, ["failed: refused"]),
        ("failed", {"status": "cancelled"}, ["cancelled"]),
        ("compacted", {}, ["compacted"]),
        ("edited", {}, ["edited"]),
        ("merged", {}, ["merged"]),
    ],
)
def test_marks_of_node_are_printed(kind: str, changes: dict[str, Any], marks: list[str]) -> None:
    """The marks of a node are printed; a usable response has none."""
    tree = make_tree(kind, **changes)
    assert list(tree.marks(tree.tree.nodes[1], NOW).values()) == marks
    first, last = render_tree(tree, NOW)
    assert all(f"[{mark}]" in first for mark in marks)
    assert "(head)" in first
    assert "(head of quay)" in first
    assert "Hello there" in first
    assert last.endswith("root")


def test_mark_is_described_as_text() -> None:
    """Known codes are described as text, others are printed unchanged; the JSON has all nodes, oldest first."""
    assert describe_mark("lost", "gone") == "lost: the server no longer has this response"
    assert describe_mark("healed", "gone") == RESENT
    assert describe_mark("healed", "new reason") == "healed: new reason"
    assert describe_mark("lost", "") == "lost"
    assert "818 B sent" in render_tree(make_tree(sent_bytes=818), NOW)[0]
    report = make_tree(status="lost").to_json(NOW)
    root, node = report["nodes"]
    assert make_tree(status="lost").to_json(NOW, limit=1)["nodes"] == [node]
    assert root["response"] is None
    assert node["heads"] == ["conv_1", "conv_2"]
    assert node["response"]["status"] == "lost"
    assert report["conversations"] == {"conv_1": 2, "conv_2": 2}


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
    assert draw_text(0, 1, 2) == "●\n●\n●"
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
