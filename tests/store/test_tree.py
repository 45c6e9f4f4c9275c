"""The graph of a tree's responses, their marks, and the layout in lanes."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from for_each import for_each
from kedge.store import ConversationRow, Node, RequestRecord
from kedge.store.tree import (
    ALL_NODES,
    GraphNode,
    Layout,
    Mark,
    ResponseGraph,
    StoredTree,
    Totals,
    build_response_graph,
    compute_layout,
    find_marks,
)

NOW = 1_000_000.0


def make_node(number: int, parent: int, kind: str, **more: Any) -> Node:
    """Return a node of the tree."""
    members: dict[str, Any] = {"kept": 0, "length": 0, "depth": number, **more}
    return Node(number, 1, 1, parent, 1, kind, **members)  # pyright: ignore[reportArgumentType]


def make_response(number: int, **members: Any) -> RequestRecord:
    """Return the response of a node."""
    fields = {"provider": "p", "scope": "s", "mode": "chained", "anchor": "resp_0", **members}
    return RequestRecord(node=number, **fields)


def make_graph(
    *nodes: Node, head: int, responses: tuple[RequestRecord, ...] = (), **questions: str
) -> ResponseGraph:
    """Return the graph of a tree; ``n2`` is the text of the question at node 2."""
    texts = {int(name[1:]): text for name, text in questions.items()}
    row = ConversationRow("c", head=head)
    tree = StoredTree(row, nodes, {each.node: each for each in responses}, texts)
    return build_response_graph(tree, NOW)


def test_question_without_answer_is_pending() -> None:
    """A question has a node of its own, with the mark `pending`, only until it is answered."""
    kinds = ["root", "asked", "answered", "results", "answered", "edited", "asked"]
    graph = make_graph(
        *(make_node(number, number - 1, kind) for number, kind in enumerate(kinds, 1)),
        head=5, responses=(make_response(3), make_response(5)), n2="First", n7="Second",
    )  # fmt: skip
    found = [(each.id, each.parent, each.marks) for each in graph.nodes]
    assert found == [(3, 0, set()), (5, 3, {"head"}), (6, 5, {"edited"}), (7, 6, {"pending"})]
    assert [graph.nodes[0].label, graph.nodes[3].label] == ["First", "Second"]
    assert graph.sums.responses == 2


@for_each(
    ("kind", "members", "marks"),
    [
        ("answered", {}, {}),
        ("answered", {"status": "lost", "lost_reason": "gone", "healed": "lost"}, {"lost": "gone", "healed": "lost"}),
        ("answered", {"anchor": "", "reason": "lost", "status": "lost"}, {"full": "lost", "lost": ""}),
        ("failed", {"status": "refused", "anchor": "", "reason": "changed"}, {"failed": "refused", "full": "changed"}),
        ("answered", {"status": "cut"}, {"failed": "cut"}),
        ("answered", {"status": "incomplete"}, {"failed": "incomplete"}),
        ("answered", {"status": "cancelled"}, {"cancelled": ""}),
        ("answered", {"expires_at": NOW - 1}, {"expired": ""}),
        ("answered", {"expires_at": NOW + 10}, {"expired": ""}),
        ("answered", {"expires_at": NOW + 86_400}, {}),
        ("merged", {"expires_at": NOW - 1, "stored": False}, {"merged": "", "unstored": ""}),
        ("answered", {"anchor": "", "reason": "new"}, {}),
        ("answered", {"anchor": "", "reason": "changed", "mode": "conversation"}, {"full": "changed"}),
        ("answered", {"anchor": "", "reason": "conversation", "mode": "conversation"}, {}),
        ("answered", {"anchor": "", "reason": "stateless", "mode": "stateless"}, {}),
        ("answered", {"anchor": "", "reason": "never_stores", "mode": "stateless"}, {"full": "never_stores"}),
    ],
)  # fmt: skip
def test_marks_follow_the_response(
    kind: str, members: dict[str, Any], marks: dict[str, str]
) -> None:
    """Each mark of a node is derived from the row of its response, with its reason; the graph shows some of them."""
    row, node = make_response(3, **members), make_node(3, 1, kind)
    assert find_marks(node, row, NOW) == marks
    graph = make_graph(make_node(1, 0, "root"), node, head=1, responses=(row,))
    assert graph.nodes[0].marks == marks.keys() - {"healed", "merged", "unstored"}


def make_chain(count: int, first: int = 1, parent: int = 0) -> list[GraphNode]:
    """Return a chain of nodes without forks."""
    nodes: list[GraphNode] = []
    for number in range(first, first + count):
        nodes.append(GraphNode(number, parent, f"question {number}", sums=Totals(1, 10, 1, 5)))
        parent = nodes[-1].id
    return nodes


@st.composite
def trees(draw: st.DrawFn) -> list[GraphNode]:
    """Generate a tree with a few marks."""
    size = draw(st.integers(0, 25))
    marks: list[Mark] = ["head", "compacted", "expired", "lost", "failed", "full"]
    nodes: list[GraphNode] = []
    for number in range(size):
        parent = draw(st.sampled_from([0, *(node.id for node in nodes)]))
        marked = draw(st.frozensets(st.sampled_from(marks), max_size=2))
        few = marked if draw(st.integers(0, 4)) == 0 else frozenset[Mark]()
        nodes.append(GraphNode(number + 1, parent, marks=few, sums=Totals(1, number, 1, 2)))
    return nodes


def node_ids(layout: Layout) -> list[int]:
    """Return the nodes of all rows from top to bottom."""
    return [node.id for row in layout.rows for node in row.nodes]


def test_long_run_is_folded_without_its_ends() -> None:
    """The responses between the first, the last, marked and chosen ones share a row, without recursion."""
    layout = compute_layout(make_chain(50), 50)
    assert [len(row.nodes) for row in layout.rows] == [1, 48, 1]
    assert layout.rows[1].sums == Totals(48, 480, 48, 240)
    assert layout.lanes == 1
    nodes = make_chain(50)
    nodes[10] = GraphNode(11, 10, marks=frozenset({"compacted"}))
    alone = {row.node.id for row in compute_layout(nodes, 31).rows if not row.is_fold}
    assert {11, 31, 1, 50} <= alone
    assert len(compute_layout(make_chain(10_000), 10000).rows) == 3
    for unfolded in (frozenset({6}), ALL_NODES):  # one node of a run unfolds it
        assert len(compute_layout(make_chain(10_000), 10000, unfolded).rows) == 10_000


def test_lanes_of_branches() -> None:
    """Two forks share a lane, and the path to the chosen node is the first one."""
    nodes = [*make_chain(9), GraphNode(20, 3), GraphNode(21, 7)]
    layout = compute_layout(nodes, 9)
    assert layout.lanes == 2
    lanes = {row.node.id: row.lane for row in layout.rows}
    assert (lanes[20], lanes[21], lanes[9]) == (1, 1, 0)
    nodes = [*make_chain(9), GraphNode(20, 3)]
    layout = compute_layout(nodes, 20)
    assert {row.node.id for row in layout.rows if row.on_path} == {1, 2, 3, 20}
    lanes = {row.node.id: row.lane for row in layout.rows}
    assert lanes[20] == 0
    assert lanes[9] == 1
    assert sum(edge.on_path for edge in layout.edges) == 3


@given(trees(), st.integers(0, 30))
def test_layout_of_any_tree(nodes: list[GraphNode], chosen: int) -> None:
    """Each node is in one row, at or below its parent, each lane belongs to one line, and totals add up."""
    layout = compute_layout(nodes, chosen)
    assert sorted(node_ids(layout)) == sorted(node.id for node in nodes)
    row_of = {node.id: row for row, each in enumerate(layout.rows) for node in each.nodes}
    assert all(row_of[node.parent] <= row_of[node.id] for node in nodes if node.parent)
    assert all(edge.start < edge.end for edge in layout.edges)
    assert len(layout.edges) == len(layout.rows) - sum(
        not row.nodes[0].parent for row in layout.rows
    )
    assert all(edge.to_lane - edge.lane in (0, 1) for edge in layout.edges)
    layout = compute_layout(nodes, chosen)
    for edge in layout.edges:
        between = layout.rows[edge.start + 1 : edge.end]
        assert all(row.lane > edge.lane for row in between)
    ends = [row.branch for row in compute_layout(nodes, chosen).rows if row.branch]
    assert sum(ends, Totals()) == sum((node.sums for node in nodes), Totals())


def test_nodes_in_a_cycle_are_left_out() -> None:
    """Only nodes reachable from a root are drawn for a damaged tree."""
    nodes = [GraphNode(1, 1), GraphNode(2, 9), GraphNode(3, 4), GraphNode(4, 3)]
    assert sorted(node_ids(compute_layout(nodes, 3))) == [1, 2]
