"""The response tree of a conversation: its responses and history changes, each with a label, marks and totals.

The page draws this tree, the API returns it, and `kedge tree` shows the same marks.
"""

from collections.abc import Mapping
from operator import add
from typing import Literal

import msgspec
from msgspec.structs import astuple, replace

from kedge._internal.display import capitalize
from kedge.events.request_record import RequestRecord
from kedge.planning.anchors import WAITING_STATUSES, is_expired
from kedge.planning.plan import is_fallback_reason
from kedge.store.records import Node, has_failed
from kedge.store.tree import StoredTree

Mark = Literal[
    "head",
    "pending",
    "cancelled",
    "failed",
    "resent",
    "lost",
    "expired",
    "full",
    "edited",
    "compacted",
    "merged",
    "unstored",
    "healed",
]
"""A mark of a node."""
MARK_DESCRIPTIONS: dict[Mark, str] = {
    "head": "the conversation's current position; the next message continues from here",
    "pending": "a question without an answer: still running, or stopped",
    "cancelled": "the answer was stopped; its beginning is stored",
    "failed": "the request was refused, failed or was cut off",
    "resent": "the request was refused, failed or lost its context, and was sent again",
    "lost": "the server reported that it no longer has this response",
    "expired": "the server no longer stores this response, or soon will not",
    "full": "the full conversation was sent, although a stored response existed",
    "edited": "history was changed here",
    "compacted": "older blocks were replaced by a shorter form",
}
"""The marks of a response tree, each with its description for the legend."""
SHOWN_KINDS = frozenset({"answered", "failed", "compacted", "edited", "merged", "added"})
"""The kinds of node that a response tree shows."""

_KIND_LABELS = {
    "compacted": "History was compacted",
    "edited": "History was edited",
    "merged": "A summary was merged in",
    "added": "Blocks were added",
}


class Totals(msgspec.Struct, frozen=True):
    """Totals of some responses."""

    responses: int = 0
    tokens: int = 0
    sent: int = 0
    full: int = 0
    cost: float = 0.0

    def __add__(self, other: "Totals") -> "Totals":
        return Totals(*map(add, astuple(self), astuple(other)))

    @property
    def saved(self) -> int:
        """The number of bytes that were not sent, because the server had stored them."""
        return max(self.full - self.sent, 0)


class TreeNode(msgspec.Struct, frozen=True):
    """A node of a response tree; a parent of 0 means none."""

    id: int
    parent: int = 0
    label: str = ""
    marks: frozenset[Mark] = frozenset()
    sums: Totals = Totals(responses=1)


class ResponseTree(msgspec.Struct, frozen=True):
    """The responses and history changes of a tree, without its questions and tool results."""

    nodes: tuple[TreeNode, ...]
    head: int
    shown_nodes: Mapping[int, int] = {}
    """Map each node of the tree to the shown node that represents it."""

    @property
    def sums(self) -> Totals:
        """The totals of all responses."""
        return sum((node.sums for node in self.nodes), Totals())


def build_response_tree(tree: StoredTree, now: float) -> ResponseTree:
    """Build the response tree of a conversation at this time."""
    parents = {node.parent for node in tree.nodes}
    questions: dict[int, str] = {}
    shown_nodes: dict[int, int] = {}
    tree_nodes: list[TreeNode] = []
    for node in tree.nodes:
        shown_parent = shown_nodes.get(node.parent, 0)
        question = tree.questions.get(node.id) or questions.get(node.parent, "")
        is_pending = node.kind == "asked" and node.id not in parents
        if node.kind in SHOWN_KINDS or is_pending or node.id in tree.responses:
            shown_nodes[node.id] = node.id
            tree_nodes.append(_build_tree_node(node, shown_parent, tree, question, now))
        else:
            shown_nodes[node.id] = shown_parent
        if (
            node.kind not in SHOWN_KINDS
        ):  # a question is the label of the first of these nodes after it
            questions[node.id] = question

    head = shown_nodes.get(tree.row.head, 0)
    return ResponseTree(_mark_head(tree_nodes, head), head, shown_nodes)


def _mark_head(nodes: list[TreeNode], head: int) -> tuple[TreeNode, ...]:
    marked: list[TreeNode] = []
    for node in nodes:
        if node.id == head:
            marked.append(replace(node, marks=node.marks | {"head"}))
        else:
            marked.append(node)
    return tuple(marked)


def _build_tree_node(
    node: Node, parent: int, tree: StoredTree, question: str, now: float
) -> TreeNode:
    response = tree.responses.get(node.id)
    marks: set[Mark] = set(find_marks(node, response, now))
    if node.kind == "asked":
        marks.add("pending")
    return TreeNode(
        node.id,
        parent,
        _choose_label(node, tree, question),
        frozenset(marks & MARK_DESCRIPTIONS.keys()),
        Totals() if response is None else response_totals(response),
    )


def _choose_label(node: Node, tree: StoredTree, question: str) -> str:
    """Return what an edit changed, or the question that a node answers, or what the node is."""
    edit = tree.edits.get(node.id)
    if edit:
        return capitalize(edit)
    return question or _KIND_LABELS.get(node.kind) or "After the tools answered"


def find_marks(node: Node, response: RequestRecord | None, now: float) -> dict[Mark, str]:
    """Return the marks of a node, each with its reason if there is one.

    Marks are history changes, the state of the response, and how the request was sent.
    """
    marks: dict[Mark, str] = {}
    if node.kind in ("compacted", "edited", "merged"):
        marks[node.kind] = ""
    if response is None:
        if node.kind == "failed":
            marks["cancelled"] = ""
        return marks
    marks |= _find_state(response, now)
    if response.healed:
        marks["healed"] = response.healed
    if is_fallback_reason(response.reason):
        marks["full"] = response.reason
    return marks


def _find_state(response: RequestRecord, now: float) -> dict[Mark, str]:
    """Return the mark of a response that is not complete or cannot be continued, with its reason; else nothing."""
    if response.status == "lost":
        return {"lost": response.lost_reason}
    if response.status in WAITING_STATUSES:
        return {"pending": ""}
    if response.status == "cancelled":
        return {"cancelled": ""}
    if response.is_resent:
        return {"resent": response.status}
    if has_failed(response.status, is_resent=False):
        return {"failed": response.status}
    if not response.stored:
        return {"unstored": ""}
    if is_expired(response, now):
        return {"expired": ""}
    return {}


def response_totals(response: RequestRecord) -> Totals:
    """Return the totals of one response."""
    return Totals(
        responses=1,
        tokens=(response.input_tokens or 0) + (response.output_tokens or 0),
        sent=response.sent_bytes,
        full=response.full_bytes,
        cost=response.cost or 0.0,
    )
