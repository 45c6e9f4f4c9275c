"""The tree of a conversation: its nodes, their marks, and its layout in lanes.

All views of a tree use this model: ``kedge tree`` prints it as text, the page draws it as SVG, the API returns it.

Rows of a layout are in the order of a walk that finishes every side branch before the main line continues, so
a side branch needs one lane more than its parent line, and lanes are reused. The main line is the one
that leads to the chosen node; elsewhere it is the longer one. No function is recursive, because a tree may be
deep.
"""

import sys
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from operator import add
from typing import Literal, TypeVar

import msgspec
from msgspec.structs import astuple, replace

from kedge._internal.display import capitalize
from kedge.events.request_record import RequestRecord
from kedge.planning.anchors import is_expired
from kedge.planning.plan import is_fallback_reason
from kedge.store import conversations
from kedge.store.database.transactions import Tx
from kedge.store.node_paths import describe_edits
from kedge.store.nodes import select_last_bodies, select_question_previews, select_tree
from kedge.store.records import ANSWERED_STATUSES, ConversationRow, Node, has_failed
from kedge.store.responses import select_responses
from kedge.store.store import read
from kedge.store.stored_blocks import decode_blocks, preview_body
from kedge.turns import AssistantBlock, Block, UserBlock

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
"""The marks of a graph of responses, each with its description for the legend."""

T = TypeVar("T", Node, "GraphNode")
ALL_NODES: Container[int] = range(sys.maxsize)
"""A container of all node ids."""
MIN_FOLD_LENGTH = 4
"""The minimum number of nodes in a run that is folded."""
SHOWN_KINDS = frozenset({"answered", "failed", "compacted", "edited", "merged", "added"})
"""The kinds of node that a graph of responses shows."""

_KIND_LABELS = {
    "compacted": "History was compacted",
    "edited": "History was edited",
    "merged": "A summary was merged in",
    "added": "Blocks were added",
}


class StoredTree(msgspec.Struct, frozen=True):
    """A tree: its nodes, its responses by node, the text of each question, and what each edit changed."""

    row: ConversationRow
    nodes: tuple[Node, ...]
    responses: Mapping[int, RequestRecord] = {}
    questions: Mapping[int, str] = {}
    edits: Mapping[int, str] = {}


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


class GraphNode(msgspec.Struct, frozen=True):
    """A node of a graph; a parent of 0 means none."""

    id: int
    parent: int = 0
    label: str = ""
    marks: frozenset[Mark] = frozenset()
    sums: Totals = Totals(responses=1)


class LayoutRow(msgspec.Struct, frozen=True):
    """One row of a layout: a node, or a folded run of nodes."""

    lane: int
    nodes: tuple[GraphNode, ...]
    on_path: bool = False
    branch: Totals | None = None
    """The totals of the branch, in the row of its last node."""

    @property
    def node(self) -> GraphNode:
        """The node of this row; the last one of a fold."""
        return self.nodes[-1]

    @property
    def is_fold(self) -> bool:
        """Whether several nodes are folded here."""
        return len(self.nodes) > 1

    @property
    def sums(self) -> Totals:
        """The totals of the nodes of this row."""
        return sum((node.sums for node in self.nodes), Totals())


class LayoutEdge(msgspec.Struct, frozen=True):
    """A line from one row to a later one; it bends just above the later one if the lanes differ."""

    start: int
    end: int
    lane: int
    to_lane: int
    on_path: bool = False


class Layout(msgspec.Struct, frozen=True):
    """The layout of a graph in lanes, from the root down."""

    rows: tuple[LayoutRow, ...] = ()
    edges: tuple[LayoutEdge, ...] = ()
    lanes: int = 0


class _Tree:
    """Children, subtree sizes and the main line of a tree."""

    def __init__(self, nodes: Iterable[GraphNode], chosen: int) -> None:
        self.nodes = {node.id: node for node in nodes}
        self.chosen = chosen
        self.on_path = {each.id for each in _walk_up(self.nodes, chosen)}
        self.shown: set[int] = set()
        """Nodes of runs that were checked and are not folded."""
        self.children: dict[int, list[int]] = {}
        for node in self.nodes.values():
            parent = node.parent if node.parent in self.nodes and node.parent != node.id else 0
            self.children.setdefault(parent, []).append(node.id)
        # Each node after its parent; nodes in a cycle are omitted.
        order = list(self.children.get(0, ()))
        for name in order:
            order += self.children.get(name, ())
        self.sizes: dict[int, int] = {}
        for name in reversed(order):
            self.sizes[name] = 1 + sum(self.sizes[each] for each in self.children.get(name, ()))

    def sorted_children(self, name: int) -> list[int]:
        """Return the children of a node, the one on the main line last."""
        found = self.children.get(name, [])
        return sorted(found, key=lambda each: (each in self.on_path, self.sizes[each]))

    def collect_run(self, name: int, unfolded: Container[int]) -> Sequence[int]:
        """Return the nodes of the row: this one alone, or a run long enough to fold."""
        if name in self.shown:
            return (name,)
        run: list[int] = []
        each = name
        while self._is_foldable(each):
            run.append(each)
            (each,) = self.children[each]
        if len(run) < MIN_FOLD_LENGTH or any(each in unfolded for each in run):
            self.shown.update(run)
            return (name,)
        return run

    def _is_foldable(self, name: int) -> bool:
        """Return whether a node can be folded: inside a line and without marks."""
        node = self.nodes[name]
        inside = node.parent in self.nodes and len(self.children.get(node.parent, ())) == 1
        is_line = inside and len(self.children.get(name, ())) == 1
        return is_line and not node.marks and name != self.chosen


def compute_layout(
    nodes: Iterable[GraphNode], chosen: int = 0, unfolded: Container[int] = ()
) -> Layout:
    """Lay out all nodes; long runs without a branch or a mark are folded into one row.

    Args:
        nodes: The nodes.
        chosen: The node that the main line leads to.
        unfolded: Nodes whose run is not folded; `ALL_NODES` folds none.
    """
    tree = _Tree(nodes, chosen)
    rows: list[LayoutRow] = []
    edges: list[LayoutEdge] = []
    # Nodes that have no row yet, each with its lane, the row of its parent, and the totals of its branch.
    waiting = [(name, 0, -1, Totals()) for name in reversed(tree.sorted_children(0))]
    while waiting:
        name, lane, above, sums = waiting.pop()
        run = tree.collect_run(name, unfolded)
        on_main_line = tree.on_path.issuperset((name, run[-1]))
        sums += sum((tree.nodes[each].sums for each in run), Totals())
        below = tree.sorted_children(run[-1])
        placed = tuple(tree.nodes[each] for each in run)
        rows.append(LayoutRow(lane, placed, on_main_line, None if below else sums))
        index = len(rows) - 1
        if above >= 0:
            edges.append(LayoutEdge(above, index, rows[above].lane, lane, on_main_line))
        if below:
            waiting.append((below[-1], lane, index, sums))
            waiting += [(side, lane + 1, index, Totals()) for side in reversed(below[:-1])]
    lanes = max((row.lane for row in rows), default=-1) + 1
    return Layout(tuple(rows), tuple(edges), lanes)


def _walk_up(nodes: Mapping[int, T], node: int) -> list[T]:
    """Return the nodes from the root to this one; a cycle ends the path."""
    path: dict[int, T] = {}
    while node in nodes and node not in path:
        path[node] = nodes[node]
        node = nodes[node].parent
    return [*path.values()][::-1]


class ResponseGraph(msgspec.Struct, frozen=True):
    """The responses and history changes of a tree, without its questions and tool results."""

    nodes: tuple[GraphNode, ...]
    head: int
    shown_nodes: Mapping[int, int] = {}
    """Map each node of the tree to the shown node that represents it."""

    @property
    def sums(self) -> Totals:
        """The totals of all responses."""
        return sum((node.sums for node in self.nodes), Totals())


def build_response_graph(tree: StoredTree, now: float) -> ResponseGraph:
    """Build the graph of the responses of a tree at this time."""
    parents = {node.parent for node in tree.nodes}
    questions: dict[int, str] = {}
    shown_nodes: dict[int, int] = {}
    nodes: list[GraphNode] = []
    for node in tree.nodes:
        above = shown_nodes.get(node.parent, 0)
        question = tree.questions.get(node.id) or questions.get(node.parent, "")
        is_pending = node.kind == "asked" and node.id not in parents
        is_shown = node.kind in SHOWN_KINDS or is_pending or node.id in tree.responses
        shown_nodes[node.id] = node.id if is_shown else above
        questions[node.id] = "" if node.kind in SHOWN_KINDS else question
        if is_shown:
            nodes.append(_build_graph_node(node, above, tree, question, now))
    head = shown_nodes.get(tree.row.head, 0)
    mark: frozenset[Mark] = frozenset({"head"})
    marked = [replace(each, marks=each.marks | mark) if each.id == head else each for each in nodes]
    return ResponseGraph(tuple(marked), head, shown_nodes)


def _build_graph_node(
    node: Node, parent: int, tree: StoredTree, question: str, now: float
) -> GraphNode:
    row = tree.responses.get(node.id)
    label = question or _KIND_LABELS.get(node.kind) or "After the tools answered"
    if edit := tree.edits.get(node.id):
        label = capitalize(edit)
    marks: set[Mark] = {"pending"} if node.kind == "asked" else set()
    marks.update(find_marks(node, row, now))
    return GraphNode(
        node.id,
        parent,
        label,
        frozenset(marks & MARK_DESCRIPTIONS.keys()),
        Totals() if row is None else response_totals(row),
    )


def find_marks(node: Node, response: RequestRecord | None, now: float) -> dict[Mark, str]:
    """Return the marks of a node, each with its reason if there is one.

    Marks are history changes, the state of the response, and how the request was sent.
    """
    marks: dict[Mark, str] = {}
    if node.kind in ("compacted", "edited", "merged"):
        marks[node.kind] = ""
    if response is None:
        return {"cancelled": ""} if node.kind == "failed" else marks
    if response.status == "lost":
        marks["lost"] = response.lost_reason
    elif response.status == "running":
        marks["pending"] = ""
    elif response.status == "cancelled":
        marks["cancelled"] = ""
    elif response.is_resent:
        marks["resent"] = response.status
    elif has_failed(response.status, is_resent=False):
        marks["failed"] = response.status
    elif not response.stored:
        marks["unstored"] = ""
    elif is_expired(response, now):
        marks["expired"] = ""
    if response.healed:
        marks["healed"] = response.healed
    if is_fallback_reason(response.reason):
        marks["full"] = response.reason
    return marks


def response_totals(row: RequestRecord) -> Totals:
    """Return the totals of one response."""
    tokens = (row.input_tokens or 0) + (row.output_tokens or 0)
    return Totals(1, tokens, row.sent_bytes, row.full_bytes, row.cost or 0.0)


@read
def read_tree(tx: Tx, conversation: ConversationRow) -> StoredTree:
    """Return the complete tree of a conversation, including forks."""
    responses = select_responses(tx, "WHERE n.tree = ?", (conversation.tree,))
    bodies = select_question_previews(tx, conversation.tree)
    nodes = select_tree(tx, conversation.tree)
    return StoredTree(
        conversation,
        tuple(nodes),
        {row.node: row for row in responses},
        {
            node: preview_body(body, UserBlock, AssistantBlock) or ""
            for node, body in bodies.items()
        },
        describe_edits(tx, conversation.tree, {node.id: node for node in nodes}),
    )


def path_to(tree: StoredTree, node: int) -> list[Node]:
    """Return the nodes from the root to this one."""
    return _walk_up({each.id: each for each in tree.nodes}, node)


BlockRange = tuple[Node, int, int]
"""The blocks that a node added: node, start index, end index."""


def iter_block_ranges(path: Sequence[Node]) -> Iterator[BlockRange]:
    """Yield the block range that each node of a path added."""
    limits: list[int] = []
    limit = path[-1].length if path else 0
    for node in reversed(path):
        limits.append(min(node.length, limit))
        limit = min(limit, node.kept)
    for node, stop in zip(path, reversed(limits), strict=True):
        yield node, min(node.kept, stop), stop


def name_models(responses: Mapping[int, RequestRecord]) -> dict[int, str]:
    """Return the name of the model of each response, by node, if several models answered; else an empty dict.

    The name has the provider in front where several providers have a model of this name.
    """
    answered = {
        (row.provider, row.model)
        for row in responses.values()
        if row.model and row.status in ANSWERED_STATUSES
    }
    if len(answered) < 2:
        return {}
    providers = Counter(model for _, model in answered)
    return {
        node: f"{row.provider}:{row.model}" if providers[row.model] > 1 else row.model
        for node, row in responses.items()
        if row.model
    }


def name_answer_models(
    tree: StoredTree, path: Sequence[Node], blocks: Sequence[Block], offset: int = 0
) -> dict[str, str]:
    """Return the name of the model that wrote each answer of a path, by block id; see `name_models`.

    Args:
        tree: The tree.
        path: The nodes from the root.
        blocks: The last blocks of the path.
        offset: The number of blocks before these.
    """
    models = name_models(tree.responses)
    if not models:
        return {}
    nodes = {
        row.provider_response_id: node
        for node, row in tree.responses.items()
        if row.provider_response_id
    }
    names: dict[str, str] = {}
    for node, start, stop in iter_block_ranges(path):
        for block in blocks[max(start - offset, 0) : max(stop - offset, 0)]:
            # Where history was rewritten, a node has the blocks of earlier responses.
            answered_at = node.id if node.id in tree.responses else nodes.get(block.response_id, 0)
            if isinstance(block, AssistantBlock) and answered_at in models:
                names[block.id] = models[answered_at]
    return names


@read
def load_last_blocks(tx: Tx, conversation: ConversationRow) -> Mapping[int, Block]:
    """Return the last block that each node of a tree added; nodes that added none are omitted."""
    bodies = select_last_bodies(tx, conversation.tree)
    return dict(zip(bodies, decode_blocks(list(bodies.values())), strict=True))


list_tree_conversations = read(conversations.list_tree_conversations)
