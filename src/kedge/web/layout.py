"""The chain as a graph: where each response stands, which runs are folded, what each branch adds up to.

A pure function from nodes to rows and edges. Rows go down in the order of a walk that finishes every side
branch before the main line goes on, so a side branch needs one lane more than the line it leaves, and
lanes are used again. The main line is the one that leads to the chosen response; elsewhere it is the
longer one. Long runs without a fork or a mark become one row. Nothing recurses: a chain may be long.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

Mark = Literal["head", "pending", "failed", "lost", "expired", "full", "edited", "compacted"]
MARKS: dict[Mark, str] = {
    "head": "where the conversation stands: the next message goes on from here",
    "pending": "a question without an answer: on its way, or stopped",
    "failed": "the request was refused, failed or was cut off",
    "lost": "the server said that this response is gone",
    "expired": "the server no longer keeps this response, or soon will not",
    "full": "everything was sent, although there was something to build on",
    "edited": "history was changed here",
    "compacted": "older blocks were replaced by fewer",
}
"""Every mark, in plain words."""

SHORTEST_FOLD = 4
"""A run of fewer responses than this is shown one by one."""


@dataclass(frozen=True, slots=True)
class Sums:
    """What some responses add up to."""

    responses: int = 0
    tokens: int = 0
    sent: int = 0
    full: int = 0
    cost: float = 0.0

    def __add__(self, other: "Sums") -> "Sums":
        return Sums(
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
class Node:
    """One response of a chain."""

    id: str
    parent: str = ""
    label: str = ""
    marks: frozenset[Mark] = frozenset()
    sums: Sums = Sums(responses=1)


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the drawing: a response, or a run of them folded together."""

    lane: int
    nodes: tuple[Node, ...]
    on_path: bool = False
    branch: Sums | None = None
    """At the end of a branch: what the branch adds up to, from where it left its line."""

    @property
    def node(self) -> Node:
        """The response of this row; of a fold the last one."""
        return self.nodes[-1]

    @property
    def is_fold(self) -> bool:
        """Whether several responses are folded here."""
        return len(self.nodes) > 1

    @property
    def sums(self) -> Sums:
        """What the responses of this row add up to."""
        return sum((node.sums for node in self.nodes), Sums())


@dataclass(frozen=True, slots=True)
class Edge:
    """A line from one row to a later one; it bends just above the later one if the lanes differ."""

    start: int
    end: int
    lane: int
    to_lane: int
    on_path: bool = False


@dataclass(frozen=True, slots=True)
class Layout:
    """A chain, ready to be drawn."""

    rows: tuple[Row, ...] = ()
    edges: tuple[Edge, ...] = ()
    lanes: int = 0
    path: tuple[str, ...] = ()
    """The responses from the root to the chosen one."""


@dataclass(slots=True)
class _Tree:
    """Who is whose child, how large each subtree is, and which way the main line goes."""

    nodes: dict[str, Node]
    children: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    sizes: dict[str, int] = field(default_factory=dict[str, int])
    path: tuple[str, ...] = ()
    shown: set[str] = field(default_factory=set[str])
    """Responses of runs that were looked at and are not folded."""

    def main_last(self, name: str, on_path: frozenset[str]) -> list[str]:
        """The children of a node, the one on which the main line goes on at the end."""
        found = self.children.get(name, [])
        return sorted(found, key=lambda each: (each in on_path, self.sizes[each]))


def lay_out(
    nodes: Iterable[Node], chosen: str = "", unfolded: frozenset[str] = frozenset()
) -> Layout:
    """Find a place for every response. ``unfolded`` names responses whose run is shown whole."""
    tree = _tree(nodes, chosen)
    on_path = frozenset(tree.path)
    rows: list[Row] = []
    edges: list[Edge] = []
    # What is still to be placed: a response, its lane, the row it hangs on, and the branch so far.
    roots = tree.main_last("", on_path)
    waiting = [(name, 0, -1, Sums()) for name in reversed(roots)]
    while waiting:
        name, lane, above, sums = waiting.pop()
        run = _run(tree, name, chosen, unfolded)
        last = run[-1]
        here = on_path.issuperset((name, last))
        sums += sum((tree.nodes[each].sums for each in run), Sums())
        below = tree.main_last(last, on_path)
        placed = tuple(tree.nodes[each] for each in run)
        rows.append(Row(lane, placed, here, None if below else sums))
        place = len(rows) - 1
        if above >= 0:
            edges.append(Edge(above, place, rows[above].lane, lane, here))
        if below:
            waiting.append((below[-1], lane, place, sums))
            waiting += [(side, lane + 1, place, Sums()) for side in reversed(below[:-1])]
    lanes = max((row.lane for row in rows), default=-1) + 1
    return Layout(tuple(rows), tuple(edges), lanes, tree.path)


def _tree(nodes: Iterable[Node], chosen: str) -> _Tree:
    tree = _Tree({node.id: node for node in nodes})
    for node in tree.nodes.values():
        parent = node.parent if node.parent in tree.nodes and node.parent != node.id else ""
        tree.children.setdefault(parent, []).append(node.id)
    order = _downward(tree)
    for name in reversed(order):
        tree.sizes[name] = 1 + sum(tree.sizes[each] for each in tree.children.get(name, ()))
    tree.path = _path(tree, chosen)
    return tree


def _downward(tree: _Tree) -> list[str]:
    """Every node after its parent. What hangs on itself in a circle is reached from nowhere."""
    order = list(tree.children.get("", ()))
    for name in order:
        order += tree.children.get(name, ())
    return order


def _path(tree: _Tree, chosen: str) -> tuple[str, ...]:
    path: list[str] = []
    seen: set[str] = set()
    while chosen in tree.nodes and chosen not in seen:
        path.append(chosen)
        seen.add(chosen)
        chosen = tree.nodes[chosen].parent
    return tuple(reversed(path))


def _run(tree: _Tree, name: str, chosen: str, unfolded: frozenset[str]) -> Sequence[str]:
    """The responses that share a row with this one: itself alone, or a run long enough to fold."""
    if name in tree.shown:
        return (name,)
    run: list[str] = []
    each = name
    while _is_plain(tree, each, chosen):
        run.append(each)
        (each,) = tree.children[each]
    if len(run) < SHORTEST_FOLD or not unfolded.isdisjoint(run):
        tree.shown.update(run)
        return (name,)
    return run


def _is_plain(tree: _Tree, name: str, chosen: str) -> bool:
    """Whether a response may vanish in a fold: in the middle of a line, with nothing to say."""
    node = tree.nodes[name]
    inside = node.parent in tree.nodes and len(tree.children.get(node.parent, ())) == 1
    return inside and len(tree.children.get(name, ())) == 1 and not node.marks and name != chosen
