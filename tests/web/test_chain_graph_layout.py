"""The layout of a chain: every response has a place, and the drawing tells the truth."""

from hypothesis import given, settings
from hypothesis import strategies as st

from kedge.web.chain_graph import ChainNode, Layout, Mark, Totals, compute_layout
from kedge.web.chain_svg import draw_lanes


def make_chain(count: int, first: int = 0, parent: str = "") -> list[ChainNode]:
    """A chain without forks."""
    nodes: list[ChainNode] = []
    for number in range(first, first + count):
        nodes.append(
            ChainNode(f"r{number}", parent, f"question {number}", sums=Totals(1, 10, 1, 5))
        )
        parent = nodes[-1].id
    return nodes


@st.composite
def trees(draw: st.DrawFn) -> list[ChainNode]:
    """Any tree, with some marks."""
    size = draw(st.integers(0, 25))
    marks: list[Mark] = ["head", "compacted", "expired", "lost", "failed", "full"]
    nodes: list[ChainNode] = []
    for number in range(size):
        parent = draw(st.sampled_from(["", *(node.id for node in nodes)]))
        marked = draw(st.frozensets(st.sampled_from(marks), max_size=2))
        few = marked if draw(st.integers(0, 4)) == 0 else frozenset[Mark]()
        nodes.append(ChainNode(f"r{number}", parent, marks=few, sums=Totals(1, number, 1, 2)))
    return nodes


def node_ids(layout: Layout) -> list[str]:
    """The responses of all rows, from top to bottom."""
    return [node.id for row in layout.rows for node in row.nodes]


def test_a_long_run_is_folded_and_keeps_its_ends() -> None:
    """The first and the last response are shown, and what is between them is one row."""
    layout = compute_layout(make_chain(50), "r49")
    assert [len(row.nodes) for row in layout.rows] == [1, 48, 1]
    assert layout.rows[1].sums == Totals(48, 480, 48, 240)
    assert layout.lanes == 1


def test_a_run_is_shown_whole_when_asked() -> None:
    """Naming any response of a fold opens it."""
    assert len(compute_layout(make_chain(50), "r49", frozenset({"r20"})).rows) == 50


def test_marks_and_the_chosen_response_are_never_folded() -> None:
    """A fold hides nothing that has something to say."""
    nodes = make_chain(50)
    nodes[10] = ChainNode("r10", "r9", marks=frozenset({"compacted"}))
    alone = {row.node.id for row in compute_layout(nodes, "r30").rows if not row.is_fold}
    assert {"r10", "r30", "r0", "r49"} <= alone


def test_a_side_branch_takes_one_lane_and_gives_it_back() -> None:
    """Two forks, one after the other, need two lanes in all."""
    nodes = [*make_chain(9), ChainNode("a", "r2"), ChainNode("b", "r6")]
    layout = compute_layout(nodes, "r8")
    assert layout.lanes == 2
    lanes = {row.node.id: row.lane for row in layout.rows}
    assert (lanes["a"], lanes["b"], lanes["r8"]) == (1, 1, 0)


def test_the_main_line_is_the_way_to_the_chosen_response() -> None:
    """However short it is; its rows and edges are marked."""
    nodes = [*make_chain(9), ChainNode("a", "r2")]
    layout = compute_layout(nodes, "a")
    assert layout.path == ("r0", "r1", "r2", "a")
    lanes = {row.node.id: row.lane for row in layout.rows}
    assert lanes["a"] == 0
    assert lanes["r8"] == 1
    assert sum(edge.on_path for edge in layout.edges) == 3


def test_a_branch_ends_with_its_sums() -> None:
    """The main line counts from the root, a side branch from where it left."""
    nodes = [*make_chain(4), *make_chain(2, 10, "r1")]
    ends = {row.node.id: row.branch for row in compute_layout(nodes, "r3").rows if row.branch}
    assert ends == {"r3": Totals(4, 40, 4, 20), "r11": Totals(2, 20, 2, 10)}
    assert ends["r3"].saved == 16


@settings(max_examples=50)
@given(trees(), st.integers(0, 30))
def test_every_response_has_one_place_below_its_parent(nodes: list[ChainNode], chosen: int) -> None:
    """Nothing is left out or drawn twice, and lines only go down."""
    layout = compute_layout(nodes, f"r{chosen}")
    assert sorted(node_ids(layout)) == sorted(node.id for node in nodes)
    place = {node.id: row for row, each in enumerate(layout.rows) for node in each.nodes}
    assert all(place[node.parent] <= place[node.id] for node in nodes if node.parent)
    assert all(edge.start < edge.end for edge in layout.edges)
    assert len(layout.edges) == len(layout.rows) - sum(
        not row.nodes[0].parent for row in layout.rows
    )
    assert all(edge.to_lane - edge.lane in (0, 1) for edge in layout.edges)


@settings(max_examples=50)
@given(trees())
def test_two_lines_never_share_a_lane_at_one_height(nodes: list[ChainNode]) -> None:
    """A lane belongs to one line from its first row to its last."""
    layout = compute_layout(nodes)
    for edge in layout.edges:
        between = layout.rows[edge.start + 1 : edge.end]
        assert all(row.lane > edge.lane for row in between)


@settings(max_examples=50)
@given(trees())
def test_branches_add_up_to_the_whole(nodes: list[ChainNode]) -> None:
    """Each response is counted in exactly one branch."""
    ends = [row.branch for row in compute_layout(nodes).rows if row.branch]
    assert sum(ends, Totals()) == sum((node.sums for node in nodes), Totals())


def test_what_hangs_in_a_circle_or_on_nothing_does_no_harm() -> None:
    """A damaged chain is drawn as far as it can be reached."""
    nodes = [ChainNode("a", "a"), ChainNode("b", "gone"), ChainNode("c", "d"), ChainNode("d", "c")]
    assert sorted(node_ids(compute_layout(nodes, "c"))) == ["a", "b"]


def test_the_drawing_is_two_lines_and_a_shape_for_each_row() -> None:
    """Shapes differ by mark, not only colours."""
    nodes = make_chain(4)
    for place, mark in enumerate(("lost", "expired", "failed", "compacted")):
        marks: frozenset[Mark] = frozenset({mark})
        nodes[place] = ChainNode(nodes[place].id, nodes[place].parent, marks=marks)
    drawn = draw_lanes(compute_layout(nodes, "r3"))
    assert drawn.count('class="line') == 2
    shapes = {part.split('"')[0] for part in drawn.split(' d="')[3:]}
    assert len(shapes) == 4


def test_a_deep_chain_needs_no_deep_stack() -> None:
    """Ten thousand responses in one line, folded and unfolded."""
    assert len(compute_layout(make_chain(10_000), "r9999").rows) == 3
    assert len(compute_layout(make_chain(10_000), "r9999", frozenset({"r5"})).rows) == 10_000
