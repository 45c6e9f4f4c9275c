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

Mark = Literal["head", "pending", "failed", "lost", "expired", "full", "edited", "compacted"]
MARK_DESCRIPTIONS: dict[Mark, str] = {
    "head": "the conversation's current position; the next message continues from here",
    "pending": "a question without an answer: still running, or stopped",
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
    """What some responses add up to."""

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
        """The bytes that were not sent, because the server remembered them."""
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
    """One line of the drawing: a response, or a run of them folded together."""

    lane: int
    nodes: tuple[ChainNode, ...]
    on_path: bool = False
    branch: Totals | None = None
    """At the end of a branch: what the branch adds up to, from where it left its line."""

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
        """What the responses of this row add up to."""
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
    """A chain, ready to be drawn."""

    rows: tuple[LayoutRow, ...] = ()
    edges: tuple[LayoutEdge, ...] = ()
    lanes: int = 0
    path: tuple[str, ...] = ()
    """The responses from the root to the chosen one."""


@dataclass(slots=True)
class _Tree:
    """Who is whose child, how large each subtree is, and which way the main line goes."""

    nodes: dict[str, ChainNode]
    children: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    sizes: dict[str, int] = field(default_factory=dict[str, int])
    path: tuple[str, ...] = ()
    shown: set[str] = field(default_factory=set[str])
    """Responses of runs that were looked at and are not folded."""

    def sorted_children(self, name: str, on_path: frozenset[str]) -> list[str]:
        """The children of a node, the one on which the main line goes on at the end."""
        found = self.children.get(name, [])
        return sorted(found, key=lambda each: (each in on_path, self.sizes[each]))


def compute_layout(
    nodes: Iterable[ChainNode], chosen: str = "", unfolded: frozenset[str] = frozenset()
) -> Layout:
    """Find a place for every response. ``unfolded`` names responses whose run is shown whole."""
    tree = _build_tree(nodes, chosen)
    on_path = frozenset(tree.path)
    rows: list[LayoutRow] = []
    edges: list[LayoutEdge] = []
    # What is still to be placed: a response, its lane, the row it hangs on, and the branch so far.
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
    """Every node after its parent. What hangs on itself in a circle is reached from nowhere."""
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
    """The responses that share a row with this one: itself alone, or a run long enough to fold."""
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
    """Whether a response may vanish in a fold: in the middle of a line, with nothing to say."""
    node = tree.nodes[name]
    inside = node.parent in tree.nodes and len(tree.children.get(node.parent, ())) == 1
    return inside and len(tree.children.get(name, ())) == 1 and not node.marks and name != chosen


SHOWN_KINDS = frozenset(
    {"answered", "failed", "compacted", "edited", "merged", "added", "imported"}
)
"""The kinds of node that have a place of their own in the graph."""

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
    """The graph of a tree; nodes go by their numbers, as text."""

    nodes: tuple[ChainNode, ...]
    head: str
    shown_nodes: Mapping[int, int] = field(default_factory=dict[int, int])
    """Map each node of the tree to the shown node that represents it."""

    @property
    def sums(self) -> Totals:
        """What all responses add up to."""
        return sum((node.sums for node in self.nodes), Totals())


def build_chain_graph(tree: StoredTree, now: float) -> ChainGraph:
    """The graph of a tree as it is at this time."""
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
    """What there is to say about a node."""
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
    elif row.status == "lost":
        marks.add("lost")
    elif row.stored and is_expired(row, now):
        marks.add("expired")
    if is_fallback(row):
        marks.add("full")
    return marks


def is_fallback(row: ResponseRow) -> bool:
    """Whether everything was sent although there was something to build on."""
    return row.mode == "chained" and not row.anchor and row.reason not in ("", "new")


def response_totals(row: ResponseRow) -> Totals:
    """What one response took."""
    tokens = (row.input_tokens or 0) + (row.output_tokens or 0)
    return Totals(1, tokens, row.sent_bytes, row.sent_bytes + row.saved_bytes, row.cost or 0.0)
