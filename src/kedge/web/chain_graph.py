"""The chain as a graph: the position of each response, folded runs, and totals of each branch.

A pure function from nodes to rows and edges. Rows go down in the order of a walk that finishes every side
branch before the main line goes on, so a side branch needs one lane more than the line it leaves, and
lanes are used again. The main line is the one that leads to the chosen response; elsewhere it is the
longer one. Long runs without a fork or a mark become one row. Nothing recurses: a chain may be long.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from kedge.planning.anchors import is_expired
from kedge.store import Node as StoredNode
from kedge.store import ResponseRow
from kedge.store.listing import StoredTree

Mark = Literal[
    "head", "pending", "cancelled", "failed", "lost", "expired", "full", "edited", "compacted"
]
MARK_DESCRIPTIONS: dict[Mark, str] = {
    "head": "the conversation's current position; the next message continues from here",
    "pending": "a question without an answer: still running, or stopped",
    "cancelled": "the answer was stopped; its beginning is stored",
    "failed": "the request was rejected, failed or was cut off",
    "lost": "the server reported that it no longer has this response",
    "expired": "the server no longer stores this response, or soon will not",
    "full": "the full conversation was sent, although a stored response existed",
    "edited": "history was changed here",
    "compacted": "older blocks were replaced by a shorter form",
}
"""The description of every mark, for the legend."""

MIN_FOLD_LENGTH = 4
"""A run of fewer responses than this is shown one by one."""


@dataclass(frozen=True, slots=True)
class Totals:
    """Totals of some responses."""

    responses: int = 0
    tokens: int = 0
    sent: int = 0
    full: int = 0
    cost: float = 0.0

    def __add__(self, other: "Totals") -> "Totals":
        return Totals(
            self.responses + other.responses,
            self.tokens + other.tokens,
            self.sent + other.sent,
            self.full + other.full,
            self.cost + other.cost,
        )

    @property
    def saved(self) -> int:
        """The bytes that were not sent, because the server had them."""
        return max(self.full - self.sent, 0)


@dataclass(frozen=True, slots=True)
class ChainNode:
    """One response of a chain."""

    id: str
    parent: str = ""
    label: str = ""
    marks: frozenset[Mark] = frozenset()
    sums: Totals = Totals(responses=1)


@dataclass(frozen=True, slots=True)
class LayoutRow:
    """One row of the graph: a response, or a folded run of them."""

    lane: int
    nodes: tuple[ChainNode, ...]
    on_path: bool = False
    branch: Totals | None = None
    """At the end of a branch: the totals of the branch."""

    @property
    def node(self) -> ChainNode:
        """The response of this row; of a fold the last one."""
        return self.nodes[-1]

    @property
    def is_fold(self) -> bool:
        """Whether several responses are folded here."""
        return len(self.nodes) > 1

    @property
    def sums(self) -> Totals:
        """The totals of the responses of this row."""
        return sum((node.sums for node in self.nodes), Totals())


@dataclass(frozen=True, slots=True)
class LayoutEdge:
    """A line from one row to a later one; it bends just above the later one if the lanes differ."""

    start: int
    end: int
    lane: int
    to_lane: int
    on_path: bool = False


@dataclass(frozen=True, slots=True)
class Layout:
    """The layout of a chain."""

    rows: tuple[LayoutRow, ...] = ()
    edges: tuple[LayoutEdge, ...] = ()
    lanes: int = 0
    path: tuple[str, ...] = ()
    """The responses from the root to the chosen one."""


@dataclass(slots=True)
class _Tree:
    """Children, subtree sizes and the main line of a tree."""

    nodes: dict[str, ChainNode]
    children: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    sizes: dict[str, int] = field(default_factory=dict[str, int])
    path: tuple[str, ...] = ()
    shown: set[str] = field(default_factory=set[str])
    """Responses of runs that were looked at and are not folded."""

    def sorted_children(self, name: str, on_path: frozenset[str]) -> list[str]:
        """Return the children of a node, the one on the main line last."""
        found = self.children.get(name, [])
        return sorted(found, key=lambda each: (each in on_path, self.sizes[each]))


def compute_layout(
    nodes: Iterable[ChainNode], chosen: str = "", unfolded: frozenset[str] = frozenset()
) -> Layout:
    """Lay out all responses; ``unfolded`` names responses whose run is not folded."""
    tree = _build_tree(nodes, chosen)
    on_path = frozenset(tree.path)
    rows: list[LayoutRow] = []
    edges: list[LayoutEdge] = []
    # Still to be placed: a response, its lane, the row of its parent, and the totals of its branch.
    roots = tree.sorted_children("", on_path)
    waiting = [(name, 0, -1, Totals()) for name in reversed(roots)]
    while waiting:
        name, lane, above, sums = waiting.pop()
        run = _collect_run(tree, name, chosen, unfolded)
        last = run[-1]
        here = on_path.issuperset((name, last))
        sums += sum((tree.nodes[each].sums for each in run), Totals())
        below = tree.sorted_children(last, on_path)
        placed = tuple(tree.nodes[each] for each in run)
        rows.append(LayoutRow(lane, placed, here, None if below else sums))
        place = len(rows) - 1
        if above >= 0:
            edges.append(LayoutEdge(above, place, rows[above].lane, lane, here))
        if below:
            waiting.append((below[-1], lane, place, sums))
            waiting += [(side, lane + 1, place, Totals()) for side in reversed(below[:-1])]
    lanes = max((row.lane for row in rows), default=-1) + 1
    return Layout(tuple(rows), tuple(edges), lanes, tree.path)


def _build_tree(nodes: Iterable[ChainNode], chosen: str) -> _Tree:
    tree = _Tree({node.id: node for node in nodes})
    for node in tree.nodes.values():
        parent = node.parent if node.parent in tree.nodes and node.parent != node.id else ""
        tree.children.setdefault(parent, []).append(node.id)
    order = _parents_first(tree)
    for name in reversed(order):
        tree.sizes[name] = 1 + sum(tree.sizes[each] for each in tree.children.get(name, ()))
    tree.path = _find_path(tree, chosen)
    return tree


def _parents_first(tree: _Tree) -> list[str]:
    """Return the nodes, each after its parent; nodes in a cycle are left out."""
    order = list(tree.children.get("", ()))
    for name in order:
        order += tree.children.get(name, ())
    return order


def _find_path(tree: _Tree, chosen: str) -> tuple[str, ...]:
    path: list[str] = []
    seen: set[str] = set()
    while chosen in tree.nodes and chosen not in seen:
        path.append(chosen)
        seen.add(chosen)
        chosen = tree.nodes[chosen].parent
    return tuple(reversed(path))


def _collect_run(tree: _Tree, name: str, chosen: str, unfolded: frozenset[str]) -> Sequence[str]:
    """Return the responses of the row: this one alone, or a run long enough to fold."""
    if name in tree.shown:
        return (name,)
    run: list[str] = []
    each = name
    while _is_foldable(tree, each, chosen):
        run.append(each)
        (each,) = tree.children[each]
    if len(run) < MIN_FOLD_LENGTH or not unfolded.isdisjoint(run):
        tree.shown.update(run)
        return (name,)
    return run


def _is_foldable(tree: _Tree, name: str, chosen: str) -> bool:
    """Return whether a response can be folded: inside a line and without marks."""
    node = tree.nodes[name]
    inside = node.parent in tree.nodes and len(tree.children.get(node.parent, ())) == 1
    return inside and len(tree.children.get(name, ())) == 1 and not node.marks and name != chosen


SHOWN_KINDS = frozenset(
    {"answered", "failed", "compacted", "edited", "merged", "added", "imported"}
)
"""The kinds of node that are drawn."""

_KIND_LABELS = {
    "compacted": "History was compacted",
    "edited": "History was edited",
    "merged": "A summary was merged in",
    "added": "Blocks were added",
    "imported": "Imported",
}
_KIND_MARKS: dict[str, Mark] = {"compacted": "compacted", "edited": "edited"}
_FAILED_STATUSES = frozenset({"incomplete", "failed", "refused", "cut"})


@dataclass(frozen=True, slots=True)
class ChainGraph:
    """The graph of a tree; node ids are numbers as text."""

    nodes: tuple[ChainNode, ...]
    head: str
    shown_nodes: Mapping[int, int] = field(default_factory=dict[int, int])
    """Map each node of the tree to the shown node that represents it."""

    @property
    def sums(self) -> Totals:
        """The totals of all responses."""
        return sum((node.sums for node in self.nodes), Totals())


def build_chain_graph(tree: StoredTree, now: float) -> ChainGraph:
    """Build the graph of a tree at this time."""
    parents = {node.parent for node in tree.nodes}
    asked: dict[int, str] = {}
    standing: dict[int, int] = {}
    nodes: list[ChainNode] = []
    for node in tree.nodes:
        above = standing.get(node.parent, 0)
        words = tree.questions.get(node.id) or asked.get(node.parent, "")
        waiting = node.kind == "asked" and node.id not in parents
        shown = node.kind in SHOWN_KINDS or waiting
        standing[node.id] = node.id if shown else above
        asked[node.id] = "" if node.kind in SHOWN_KINDS else words
        if shown:
            nodes.append(_build_node(node, above, tree, words, now))
    head = standing.get(tree.row.head, 0)
    return ChainGraph(tuple(_mark_head(nodes, str(head))), str(head or ""), standing)


def _build_node(
    node: StoredNode, parent: int, tree: StoredTree, question: str, now: float
) -> ChainNode:
    row = tree.responses.get(node.id)
    label = question or _KIND_LABELS.get(node.kind) or "After the tools answered"
    return ChainNode(
        str(node.id),
        str(parent or ""),
        label,
        collect_marks(node, row, now),
        Totals() if row is None else response_totals(row),
    )


def _mark_head(nodes: list[ChainNode], head: str) -> list[ChainNode]:
    mark: frozenset[Mark] = frozenset({"head"})
    return [replace(each, marks=each.marks | mark) if each.id == head else each for each in nodes]


def collect_marks(node: StoredNode, row: ResponseRow | None, now: float) -> frozenset[Mark]:
    """Return the marks of a node."""
    marks: set[Mark] = set()
    if node.kind == "asked":
        marks.add("pending")
    if node.kind in _KIND_MARKS:
        marks.add(_KIND_MARKS[node.kind])
    if row is not None:
        marks |= _response_marks(row, now)
    return frozenset(marks)


def _response_marks(row: ResponseRow, now: float) -> set[Mark]:
    marks: set[Mark] = set()
    if row.status in _FAILED_STATUSES:
        marks.add("failed")
    elif row.status == "cancelled":
        marks.add("cancelled")
    elif row.status == "lost":
        marks.add("lost")
    elif row.stored and is_expired(row, now):
        marks.add("expired")
    if is_fallback(row):
        marks.add("full")
    return marks


def is_fallback(row: ResponseRow) -> bool:
    """Return whether a request was sent in full although there were stored responses."""
    return row.mode == "chained" and not row.anchor and row.reason not in ("", "new")


def response_totals(row: ResponseRow) -> Totals:
    """Return the totals of one response."""
    tokens = (row.input_tokens or 0) + (row.output_tokens or 0)
    return Totals(1, tokens, row.request_size, row.full_size, row.cost or 0.0)
