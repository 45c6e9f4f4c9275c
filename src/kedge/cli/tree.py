"""``kedge tree``: print the tree of a conversation as a graph, with forks, heads and marks."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import click

from kedge.cli.base import Result, dim, kedge_command
from kedge.cli.store_options import (
    conversation_argument,
    find_conversation,
    run_with_store,
    store_option,
)
from kedge.store import ConversationRow, Node, Store
from kedge.store.tree import (
    ALL_NODES,
    GraphNode,
    StoredTree,
    compute_layout,
    find_marks,
    list_tree_conversations,
    load_last_blocks,
    read_tree,
)
from kedge.text.display import HEALING_TEXTS, LOST_TEXTS, format_size, sanitize_text, shorten_id
from kedge.turns import Block
from kedge.turns.text_format import describe

EXCERPT_LENGTH = 60
MAX_LANE_WIDTH = 15
"""The number of aligned columns of lanes; wider rows are not aligned."""
NODE_SIGNS = {"root": "◇", "failed": "✗", "compacted": "◆", "edited": "◆", "merged": "◆"}
MARK_COLORS = {"expired": "yellow", "lost": "yellow", "failed": "red", "unstored": "yellow"}
_MARK_NAMES = {"full": "sent in full"}
"""The names of marks that differ from those in the store."""


@dataclass(frozen=True, slots=True)
class AnnotatedTree:
    """A tree with the conversations on it and the last block that each node added."""

    tree: StoredTree
    conversations: Sequence[ConversationRow]
    blocks: Mapping[int, Block]

    def heads(self, number: int) -> list[str]:
        """Return labels of the conversations with their head here; ``head`` for the selected one."""
        selected = self.tree.row.id
        names = [
            "head" if row.id == selected else f"head of {sanitize_text(row.title or row.id)}"
            for row in self.conversations
            if row.head == number
        ]
        return sorted(names)

    def marks(self, node: Node, now: float) -> list[str]:
        """Return the marks of a node; a reason follows a colon, see `describe_mark`."""
        marks = find_marks(node, self.tree.responses.get(node.id), now)
        if "healed" in marks:
            marks.pop("full", None)  # healing sends the request in full
        names = [(_MARK_NAMES.get(mark, mark), reason) for mark, reason in marks.items()]
        return [f"{name}: {reason}" if reason else name for name, reason in names]

    def excerpt(self, number: int) -> str:
        """Return the beginning of the last block that this node added."""
        last = self.blocks.get(number)
        return describe(last, EXCERPT_LENGTH) if last else ""

    def to_json(self, now: float, limit: int = 0) -> dict[str, Any]:
        """Return the tree as JSON values, the oldest node first; with a limit the newest nodes only."""
        nodes = sorted(self.tree.nodes, key=lambda each: each.id)
        return {
            "conversation": self.tree.row.id,
            "head": self.tree.row.head,
            "conversations": {row.id: row.head for row in self.conversations},
            "nodes": [self._node_to_json(node, now) for node in nodes[-limit:]],
        }

    def _node_to_json(self, node: Node, now: float) -> dict[str, Any]:
        response = self.tree.responses.get(node.id)
        from kedge.web.shapes import shape_node

        marks = find_marks(node, response, now)
        shape = shape_node(
            node, response, parent=node.parent, label=self.excerpt(node.id), marks=list(marks)
        )
        return {
            **shape.model_dump(mode="json"),
            "kept": node.kept,
            "length": node.length,
            "heads": [row.id for row in self.conversations if row.head == node.id],
        }


async def load_tree(store: Store, row: ConversationRow) -> AnnotatedTree:
    """Read a tree of any size in three queries."""
    return AnnotatedTree(
        await read_tree(store, row),
        await list_tree_conversations(store, row),
        await load_last_blocks(store, row),
    )


@dataclass(frozen=True, slots=True)
class GraphLine:
    """One line of the graph: its lanes, and its node, if it has one."""

    lanes: str
    node: Node | None = None


def draw_graph(tree: StoredTree, limit: int = 0) -> Iterator[GraphLine]:
    """Yield the lines of a graph, beginning with the newest node on the line to the head.

    In a layout a side branch is complete before its parent line continues. Read from its end, only the
    lanes left of a node are in use, and a side branch joins its line below its first node.

    Args:
        tree: The tree.
        limit: The maximum number of nodes, of which the newest are drawn; 0 for all.
    """
    nodes = {node.id: node for node in tree.nodes}
    layout = compute_layout(
        (GraphNode(node.id, node.parent) for node in tree.nodes), tree.row.head, ALL_NODES
    )
    joins = {edge.end for edge in layout.edges if edge.lane != edge.to_lane}
    newest = set(sorted(nodes, reverse=True)[: limit or None])
    for index, row in reversed(tuple(enumerate(layout.rows))):
        node = nodes[row.node.id]
        if node.id not in newest:
            continue
        yield GraphLine("│ " * row.lane + NODE_SIGNS.get(node.kind, "●"), node)
        if index in joins and node.parent in newest:
            yield GraphLine("│ " * (row.lane - 1) + "├─┘")


@kedge_command("tree")
@conversation_argument
@click.option(
    "--limit",
    type=click.IntRange(0),
    default=0,
    help="Maximum number of nodes, of which the newest are shown.  [default: all]",
)
@store_option
def command(conversation: str, limit: int) -> Result:
    """Show the tree of a conversation: the line to its head, the newest node first.

    Other branches and forks are lanes beside it, drawn where they leave it. Marks show which responses
    expired, were lost or failed, and where history was compacted or edited.
    """

    async def work(opened: Any) -> AnnotatedTree:
        return await load_tree(opened, await find_conversation(opened, conversation))

    tree, now = run_with_store(work), time.time()
    return Result(tree.to_json(now, limit), "\n".join(render_tree(tree, now, limit)))


def render_tree(tree: AnnotatedTree, now: float, limit: int = 0) -> list[str]:
    """Return the graph as lines."""
    lines = list(draw_graph(tree.tree, limit))
    width = max((len(line.lanes) for line in lines if len(line.lanes) <= MAX_LANE_WIDTH), default=0)
    return [
        line.lanes
        if line.node is None
        else f"{line.lanes:<{width}}  {_format_node(tree, line.node, now)}"
        for line in lines
    ]


def describe_mark(mark: str) -> str:
    """Return a mark with its reason as a sentence, if there is one for it."""
    name, _, reason = mark.partition(": ")
    if name == "healed":
        return HEALING_TEXTS.get(reason, mark)
    return f"lost: {LOST_TEXTS.get(reason, reason)}" if name == "lost" and reason else mark


def _format_node(tree: AnnotatedTree, node: Node, now: float) -> str:
    response = tree.tree.responses.get(node.id)
    parts = [dim(str(node.id)), node.kind]
    if response and response.provider_response_id:
        parts.append(dim(sanitize_text(shorten_id(response.provider_response_id))))
    if response and response.sent_bytes:
        parts.append(dim(f"{format_size(response.sent_bytes)} sent"))
    for mark in tree.marks(node, now):
        color = MARK_COLORS.get(mark.partition(":")[0], "cyan")
        parts.append(click.style(f"[{sanitize_text(describe_mark(mark))}]", fg=color))
    parts += [click.style(f"({name})", fg="green", bold=True) for name in tree.heads(node.id)]
    if excerpt := tree.excerpt(node.id):
        parts.append(excerpt)
    return " ".join(parts)
