"""The layout of a tree in lanes."""

from hypothesis import given
from hypothesis import strategies as st

from kedge.presentation.layout import ALL_NODES, Layout, compute_layout
from kedge.presentation.response_tree import Mark, Totals, TreeNode


def make_chain(count: int, first: int = 1, parent: int = 0) -> list[TreeNode]:
    """Return a chain of nodes without forks."""
    nodes: list[TreeNode] = []
    for number in range(first, first + count):
        nodes.append(TreeNode(number, parent, f"question {number}", sums=Totals(1, 10, 1, 5)))
        parent = nodes[-1].id
    return nodes


@st.composite
def trees(draw: st.DrawFn) -> list[TreeNode]:
    """Generate a tree with a few marks."""
    size = draw(st.integers(0, 25))
    marks: list[Mark] = ["head", "compacted", "expired", "lost", "failed", "full"]
    nodes: list[TreeNode] = []
    for number in range(size):
        parent = draw(st.sampled_from([0, *(node.id for node in nodes)]))
        marked = draw(st.frozensets(st.sampled_from(marks), max_size=2))
        few = marked if draw(st.integers(0, 4)) == 0 else frozenset[Mark]()
        nodes.append(TreeNode(number + 1, parent, marks=few, sums=Totals(1, number, 1, 2)))
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
    nodes[10] = TreeNode(11, 10, marks=frozenset({"compacted"}))
    alone = {row.node.id for row in compute_layout(nodes, 31).rows if not row.is_fold}
    assert {11, 31, 1, 50} <= alone
    assert len(compute_layout(make_chain(10_000), 10000).rows) == 3
    for unfolded in (frozenset({6}), ALL_NODES):  # one node of a run unfolds it
        assert len(compute_layout(make_chain(10_000), 10000, unfolded).rows) == 10_000


def test_lanes_of_branches() -> None:
    """Two forks share a lane, and the path to the chosen node is the first one."""
    nodes = [*make_chain(9), TreeNode(20, 3), TreeNode(21, 7)]
    layout = compute_layout(nodes, 9)
    assert layout.lanes == 2
    lanes = {row.node.id: row.lane for row in layout.rows}
    assert (lanes[20], lanes[21], lanes[9]) == (1, 1, 0)
    nodes = [*make_chain(9), TreeNode(20, 3)]
    layout = compute_layout(nodes, 20)
    assert {row.node.id for row in layout.rows if row.on_path} == {1, 2, 3, 20}
    lanes = {row.node.id: row.lane for row in layout.rows}
    assert lanes[20] == 0
    assert lanes[9] == 1
    assert sum(edge.on_path for edge in layout.edges) == 3


@given(trees(), st.integers(0, 30))
def test_layout_of_any_tree(nodes: list[TreeNode], chosen: int) -> None:
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
    nodes = [TreeNode(1, 1), TreeNode(2, 9), TreeNode(3, 4), TreeNode(4, 3)]
    assert sorted(node_ids(compute_layout(nodes, 3))) == [1, 2]
