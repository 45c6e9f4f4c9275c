"""From the tree of a store to the graph of a page: which nodes are shown, under which marks.

A tree has a node for every step: questions, answers, results of tools, edits. The graph shows responses,
and what changed history between them; questions and results are told by the responses they led to. A
question that led nowhere is shown as pending.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from kedge.store import Node as StoredNode
from kedge.store import ResponseRow
from kedge.store.overview import Tree, is_expiring
from kedge.web.layout import Mark, Node, Sums

SHOWN = frozenset({"answered", "failed", "compacted", "edited", "merged", "added", "imported"})
"""The kinds of node that have a place of their own in the graph."""

_LABELS = {
    "compacted": "History was compacted",
    "edited": "History was edited",
    "merged": "A summary was merged in",
    "added": "Blocks were added",
    "imported": "Imported",
}
_KIND_MARKS: dict[str, Mark] = {"compacted": "compacted", "edited": "edited"}
_FAILED = frozenset({"incomplete", "failed", "refused", "cut"})


@dataclass(frozen=True, slots=True)
class Chain:
    """The graph of a tree; nodes go by their numbers, as text."""

    nodes: tuple[Node, ...]
    head: str
    parents: Mapping[int, int] = field(default_factory=dict[int, int])
    """For each node of the tree the shown node that it stands for or hangs on."""

    @property
    def sums(self) -> Sums:
        """What all responses add up to."""
        return sum((node.sums for node in self.nodes), Sums())


def chain_of(tree: Tree, now: float) -> Chain:
    """The graph of a tree as it is at this time."""
    parents = {node.parent for node in tree.nodes}
    asked: dict[int, str] = {}
    standing: dict[int, int] = {}
    nodes: list[Node] = []
    for node in tree.nodes:
        above = standing.get(node.parent, 0)
        words = tree.asked.get(node.id) or asked.get(node.parent, "")
        waiting = node.kind == "asked" and node.id not in parents
        shown = node.kind in SHOWN or waiting
        standing[node.id] = node.id if shown else above
        asked[node.id] = "" if node.kind in SHOWN else words
        if shown:
            nodes.append(_node(node, above, tree, words, now))
    head = standing.get(tree.row.head, 0)
    return Chain(tuple(_with_head(nodes, str(head))), str(head or ""), standing)


def _node(node: StoredNode, above: int, tree: Tree, words: str, now: float) -> Node:
    row = tree.responses.get(node.id)
    label = words or _LABELS.get(node.kind) or "After the tools answered"
    return Node(
        str(node.id),
        str(above or ""),
        label,
        marks_of(node, row, now),
        Sums() if row is None else sums_of(row),
    )


def _with_head(nodes: list[Node], head: str) -> list[Node]:
    mark: frozenset[Mark] = frozenset({"head"})
    return [replace(each, marks=each.marks | mark) if each.id == head else each for each in nodes]


def marks_of(node: StoredNode, row: ResponseRow | None, now: float) -> frozenset[Mark]:
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
    if row.status in _FAILED:
        marks.add("failed")
    elif row.status == "lost":
        marks.add("lost")
    elif row.stored and is_expiring(row.expires_at, now):
        marks.add("expired")
    if is_fallback(row):
        marks.add("full")
    return marks


def is_fallback(row: ResponseRow) -> bool:
    """Whether everything was sent although there was something to build on."""
    return row.mode == "chained" and not row.anchor and row.reason not in ("", "new")


def sums_of(row: ResponseRow) -> Sums:
    """What one response took."""
    tokens = (row.input_tokens or 0) + (row.output_tokens or 0)
    return Sums(1, tokens, row.sent_bytes, row.sent_bytes + row.saved_bytes, row.cost or 0.0)
