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


def test_question_is_label_of_its_answer() -> None:
    """Questions and tool results have no node of their own in the graph."""
    graph = make_graph(
        make_node(1, 0, "root"), make_node(2, 1, "asked"), make_node(3, 2, "answered"), make_node(4, 3, "asked"),
        make_node(5, 4, "answered"), make_node(6, 5, "results"), make_node(7, 6, "answered"),
        head=7, responses=(make_response(3), make_response(5), make_response(7)), n2="First", n4="Second",
    )  # fmt: skip
    found = [(each.id, each.parent, each.label) for each in graph.nodes]
    assert found == [(3, 0, "First"), (5, 3, "Second"), (7, 5, "After the tools answered")]
    assert graph.head == 7
    assert graph.sums.responses == 3


def test_question_without_answer_is_pending() -> None:
    """An unanswered question has its own node with the mark `pending`."""
    graph = make_graph(
        make_node(1, 0, "root"), make_node(2, 1, "asked"), make_node(3, 2, "answered"), make_node(4, 3, "asked"),
        head=3, responses=(make_response(3),), n2="First", n4="Second",
    )  # fmt: skip
    found = [(each.id, each.label, each.marks) for each in graph.nodes]
    assert found == [(3, "First", {"head"}), (4, "Second", {"pending"})]


@for_each(
    ("members", "marks"),
    [
        ({}, set[str]()),
        ({"status": "lost"}, {"lost"}),
        ({"status": "refused"}, {"failed"}),
        ({"status": "cut"}, {"failed"}),
        ({"status": "incomplete"}, {"failed"}),
        ({"status": "cancelled"}, {"cancelled"}),
        ({"expires_at": NOW - 1}, {"expired"}),
        ({"expires_at": NOW + 10}, {"expired"}),
        ({"expires_at": NOW + 86_400}, set[str]()),
        ({"expires_at": NOW - 1, "stored": False}, set[str]()),
        ({"anchor": "", "reason": "new"}, set[str]()),
        ({"anchor": "", "reason": "changed"}, {"full"}),
        ({"anchor": "", "reason": "changed", "mode": "conversation"}, {"full"}),
        ({"anchor": "", "reason": "conversation", "mode": "conversation"}, set[str]()),
        ({"anchor": "", "reason": "stateless", "mode": "stateless"}, set[str]()),
        ({"anchor": "", "reason": "never_stores", "mode": "stateless"}, {"full"}),
        ({"anchor": "", "reason": "lost", "status": "lost"}, {"full", "lost"}),
    ],
)
def test_marks_of_graph_follow_response(members: dict[str, Any], marks: set[str]) -> None:
    """Each mark of a node is derived from the row of its response."""
    row = make_response(3, **members)
    nodes = make_node(1, 0, "root"), make_node(3, 1, "answered")
    assert make_graph(*nodes, head=1, responses=(row,)).nodes[0].marks == marks


def test_marks_have_reasons() -> None:
    """`find_marks` also returns marks that are not shown in the graph, with their reasons."""
    merged = find_marks(make_node(3, 1, "merged"), make_response(3, stored=False), NOW)
    assert merged == {"merged": "", "unstored": ""}
    healed = make_response(3, status="lost", lost_reason="gone", healed="gone", anchor="")
    marks = find_marks(make_node(3, 1, "answered"), healed, NOW)
    assert marks == {"lost": "gone", "healed": "gone"}
    failed = make_response(3, status="refused", anchor="", reason="changed")
    marks = find_marks(make_node(3, 1, "failed"), failed, NOW)
    assert marks == {"failed": "refused", "full": "changed"}


def test_edits_and_compactions_are_shown_without_totals() -> None:
    """Edits, compactions and merges have labels but no totals; an empty conversation has no nodes."""
    graph = make_graph(
        make_node(1, 0, "root"), make_node(2, 1, "edited"), make_node(3, 2, "compacted"), make_node(4, 3, "merged"),
        head=4,
    )  # fmt: skip
    labels = [each.label for each in graph.nodes]
    assert labels == ["History was edited", "History was compacted", "A summary was merged in"]
    assert [each.marks for each in graph.nodes] == [{"edited"}, {"compacted"}, {"head"}]
    assert graph.sums == Totals()
    empty = make_graph(make_node(1, 0, "root"), head=1)
    assert (empty.nodes, empty.head) == ((), 0)


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


def test_lanes_and_totals_of_branches() -> None:
    """Two forks share a lane, the path to the chosen node is the first one, and a branch has totals from its fork."""
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
    nodes = [*make_chain(4), *make_chain(2, 11, 2)]
    ends = {row.node.id: row.branch for row in compute_layout(nodes, 4).rows if row.branch}
    assert ends == {4: Totals(4, 40, 4, 20), 12: Totals(2, 20, 2, 10)}
    assert ends[4].saved == 16


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
