"""``kedge tree``: print the tree of a conversation as a graph, with forks, heads and marks."""

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import click

from kedge.cli.base import command as kedge_command
from kedge.cli.base import dim, echo, echo_json
from kedge.cli.store_options import (
    conversation_argument,
    find_conversation,
    run_with_store,
    store_option,
)
from kedge.formatting import HEALING_TEXTS, LOST_TEXTS, format_size, sanitize_text, shorten_id
from kedge.planning.anchors import is_expired
from kedge.store import ConversationRow, Node, ResponseRow, Store
from kedge.store.listing import list_tree_conversations, load_last_blocks, read_tree
from kedge.turns import Block
from kedge.turns.formatting import describe

EXCERPT_LENGTH = 60


@dataclass(slots=True)
class AnnotatedTree:
    """A tree: its nodes, its conversations, and the responses of its nodes."""

    row: ConversationRow
    nodes: dict[int, Node]
    conversations: list[ConversationRow]
    responses: Mapping[int, ResponseRow]
    blocks: Mapping[int, Block] = field(default_factory=dict[int, Block])
    """The last block that each node added."""

    def heads(self, number: int) -> list[str]:
        """Return labels of the conversations with their head here; ``head`` for the selected one."""
        names = [
            "head" if row.id == self.row.id else f"head of {sanitize_text(row.title or row.id)}"
            for row in self.conversations
            if row.head == number
        ]
        return sorted(names)

    def marks(self, number: int, now: float) -> list[str]:
        """Return the marks of a node: the state of its response, and changes of history.

        A reason follows a colon; `describe_mark` returns the same in words.
        """
        node, response = self.nodes[number], self.responses.get(number)
        marks: list[str] = []
        if node.kind == "compacted":
            marks.append("compacted")
        if node.kind in ("edited", "merged"):
            marks.append(node.kind)
        if response is None:
            return marks
        if response.status == "lost":
            marks.append(f"lost: {response.lost_reason}" if response.lost_reason else "lost")
        elif response.status != "completed":
            marks.append(f"failed: {response.status}")
        elif not response.stored:
            marks.append("unstored")
        elif is_expired(response, now):
            marks.append("expired")
        if response.healed:
            marks.append(f"healed: {response.healed}")
        elif response.reason not in ("", "new", "stateless", "conversation"):
            marks.append(f"sent in full: {response.reason}")
        return marks

    def excerpt(self, number: int) -> str:
        """Return the beginning of the last block that this node added."""
        last = self.blocks.get(number)
        return describe(last, EXCERPT_LENGTH) if last else ""

    def to_json(self, now: float) -> dict[str, Any]:
        """Return the tree as JSON values, the oldest node first."""
        return {
            "conversation": self.row.id,
            "head": self.row.head,
            "conversations": {row.id: row.head for row in self.conversations},
            "nodes": [self._node_to_json(number, now) for number in sorted(self.nodes)],
        }

    def _node_to_json(self, number: int, now: float) -> dict[str, Any]:
        node, response = self.nodes[number], self.responses.get(number)
        return {
            "id": number,
            "parent": node.parent or None,
            "kind": node.kind,
            "kept": node.kept,
            "length": node.length,
            "created_at": node.created_at,
            "response": response.provider_response_id if response else None,
            "status": response.status if response else None,
            "anchor": (response.anchor or None) if response else None,
            "request_bytes": response.request_bytes if response else None,
            "marks": self.marks(number, now),
            "heads": [row.id for row in self.conversations if row.head == number],
            "excerpt": self.excerpt(number),
        }


async def load_tree(store: Store, row: ConversationRow) -> AnnotatedTree:
    """Read a tree in three queries, however large it is."""
    tree = await read_tree(store, row)
    nodes = {node.id: node for node in tree.nodes}
    blocks = await load_last_blocks(store, row)
    return AnnotatedTree(
        row, nodes, await list_tree_conversations(store, row), tree.responses, blocks
    )


@dataclass(frozen=True, slots=True)
class GraphRow:
    """One row: what to draw, and its node, if it has one."""

    lanes: str
    node: int | None = None


def draw_graph(
    nodes: Iterable[tuple[int, int]], marks: dict[int, str] | None = None
) -> Iterator[GraphRow]:
    """Yield the rows for nodes and their parents, newest first; ``marks`` are symbols by node."""
    lanes: list[int | None] = []
    for node, parent in nodes:
        waiting = [column for column, wanted in enumerate(lanes) if wanted == node]
        if len(waiting) > 1:
            yield GraphRow(_format_join(lanes, waiting))
            for column in waiting[1:]:
                lanes[column] = None
        column = waiting[0] if waiting else _free_lane(lanes)
        lanes[column] = node
        _trim_lanes(lanes)
        sign = (marks or {}).get(node, "●")
        yield GraphRow(_format_lanes(lanes, column, sign), node)
        lanes[column] = parent or None
        _trim_lanes(lanes)


def _free_lane(lanes: list[int | None]) -> int:
    """Return a free column."""
    if None not in lanes:
        lanes.append(None)
    return lanes.index(None)


def _trim_lanes(lanes: list[int | None]) -> None:
    while lanes and lanes[-1] is None:
        lanes.pop()


def _format_lanes(lanes: list[int | None], column: int, sign: str) -> str:
    cells = [sign if i == column else " " if lane is None else "│" for i, lane in enumerate(lanes)]
    return " ".join(cells)


def _format_join(lanes: list[int | None], waiting: list[int]) -> str:
    """Draw lanes that join the first of them; other lanes cross."""
    first, last = waiting[0], waiting[-1]
    text = ""
    for column, lane in enumerate(lanes):
        inside = first < column < last
        if column == first:
            cell = "├"
        elif column in waiting:
            cell = "┴" if column < last else "┘"
        elif lane is None:
            cell = "─" if inside else " "
        else:
            cell = "┼" if inside else "│"
        text += cell + ("─" if first <= column < last else " ")
    return text.rstrip()


MAX_LANE_WIDTH = 15
"""Number of aligned columns of lanes; wider rows are not aligned."""
NODE_SIGNS = {"root": "◇", "failed": "✗", "compacted": "◆", "edited": "◆", "merged": "◆"}
MARK_COLORS = {"expired": "yellow", "lost": "yellow", "failed": "red", "unstored": "yellow"}


@kedge_command("tree", short_help="Print the tree of a conversation as a graph.")
@conversation_argument
@click.option(
    "--limit",
    type=click.IntRange(0),
    default=0,
    help="Maximum number of nodes, newest first.  [default: all]",
)
@store_option
def command(conversation: str, limit: int, store: str, as_json: bool) -> None:
    """Show the tree of a conversation, the newest node first.

    Forks of it are lanes of the same tree. Marks show which responses expired, were lost or failed, and
    where history was compacted or edited.
    """

    async def work(opened: Any) -> "AnnotatedTree":
        return await load_tree(opened, await find_conversation(opened, conversation))

    tree = run_with_store(work, given=store)
    if as_json:
        echo_json(tree.to_json(time.time()))
        return
    for line in render_tree(tree, time.time(), limit):
        echo(line)


def render_tree(tree: "AnnotatedTree", now: float, limit: int = 0) -> list[str]:
    """Return the graph as lines."""
    shown = sorted(tree.nodes.values(), key=lambda node: -node.id)
    if limit:
        shown = shown[:limit]
    signs = {node.id: NODE_SIGNS[node.kind] for node in shown if node.kind in NODE_SIGNS}
    rows = list(draw_graph(((node.id, node.parent) for node in shown), signs))
    width = max((len(row.lanes) for row in rows if len(row.lanes) <= MAX_LANE_WIDTH), default=0)
    return [
        row.lanes
        if row.node is None
        else f"{row.lanes:<{width}}  {_format_node(tree, row.node, now)}"
        for row in rows
    ]


def describe_mark(mark: str) -> str:
    """Return a mark with its reason as a sentence, if there is one for it."""
    name, _, reason = mark.partition(": ")
    if name == "healed":
        return HEALING_TEXTS.get(reason, mark)
    return f"lost: {LOST_TEXTS.get(reason, reason)}" if name == "lost" and reason else mark


def _format_node(tree: "AnnotatedTree", number: int, now: float) -> str:
    node, response = tree.nodes[number], tree.responses.get(number)
    parts = [dim(str(number)), node.kind]
    if response and response.provider_response_id:
        parts.append(dim(shorten_id(response.provider_response_id)))
    if response and response.request_bytes is not None:
        parts.append(dim(f"{format_size(response.request_bytes)} sent"))
    for mark in tree.marks(number, now):
        color = MARK_COLORS.get(mark.partition(":")[0], "cyan")
        parts.append(click.style(f"[{describe_mark(mark)}]", fg=color))
    parts += [click.style(f"({name})", fg="green", bold=True) for name in tree.heads(number)]
    if excerpt := tree.excerpt(number):
        parts.append(excerpt)
    return " ".join(parts)
