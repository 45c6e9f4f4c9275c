"""``kedge show``, ``diff`` and ``tree``: print a conversation, the difference of two positions, or its tree."""

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import click

from kedge import turns
from kedge._internal.display import (
    format_size,
    pluralize,
    sanitize_text,
    shorten_id,
)
from kedge.cli.base import Result, dim, echo, echo_json, is_json, kedge_command, wrap_text
from kedge.cli.store_options import (
    at_option,
    conversation_argument,
    find_conversation,
    find_node,
    lookup_conversation,
    run_with_store,
    store_option,
    with_conversation,
)
from kedge.errors import NotInStore
from kedge.presentation.layout import ALL_NODES, compute_layout
from kedge.presentation.response_tree import Mark, TreeNode, find_marks
from kedge.presentation.wording import HEALING_TEXTS, LOST_TEXTS
from kedge.store import ConversationRow, Node, Store
from kedge.store import tree as trees
from kedge.turns.frozen_json import EMPTY
from kedge.turns.text_format import describe, describe_attachment

FOLD_WIDTH = 100
HEADINGS = {
    "user": ("You", "green"),
    "assistant": ("Model", "cyan"),
    "system": ("System", "magenta"),
}


@kedge_command("show")
@conversation_argument
@at_option
@click.option("--last", type=click.IntRange(1), help="Only this number of blocks at the end.")
@click.option("--full", is_flag=True, help="Show reasoning, tool calls and their results in full.")
@click.option("--follow", is_flag=True, help="Print new blocks as they are stored, until Ctrl-C.")
@store_option
def command(
    conversation: str, at: str, last: int | None, full: bool, follow: bool
) -> Result | None:
    """Print a conversation; CONVERSATION is an id, its beginning, or a title."""
    if follow:
        if at != "head":
            raise click.UsageError("--follow shows the head; it cannot be used with --at")
        with suppress(KeyboardInterrupt):
            run_with_store(lambda opened: _follow(opened, conversation, last, full=full))
        return None

    async def work(opened: Store) -> tuple[ConversationRow, Node, ShownBlocks]:
        row = await find_conversation(opened, conversation)
        node = await find_node(opened, row, at)
        if last is None:
            blocks = (await opened.load(row, node.id)).blocks
        else:
            blocks = await opened.last_blocks(row, last, node.id)
        return row, node, await _name_models(opened, row, node, blocks)

    row, node, shown = run_with_store(work)
    value = {
        "id": row.id,
        "title": row.title,
        "node": node.id,
        "kind": node.kind,
        "blocks": _dump(shown.blocks),
        "models": shown.models,
    }
    return Result(value, lambda: _print_conversation(row, node, shown, full=full))


class ShownBlocks(NamedTuple):
    """Blocks with the names of the models that wrote them."""

    blocks: Sequence[turns.Block]
    models: Mapping[str, str]
    """The names of the models, by block id; empty unless several models answered."""


def _print_conversation(
    row: ConversationRow, node: Node, shown: ShownBlocks, *, full: bool
) -> None:
    count = pluralize(node.length, "block")
    if len(shown.blocks) < node.length:
        count += f", the last {len(shown.blocks)} of them"
    echo(dim(f"{sanitize_text(row.title or row.id)}, node {node.id}, {count}"))
    print_blocks(shown.blocks, full=full, models=shown.models)


async def _name_models(
    store: Store, row: ConversationRow, node: Node, blocks: Sequence[turns.Block]
) -> ShownBlocks:
    """Return the blocks, the last on the path to a node, with the names of their models."""
    tree = await trees.read_tree(store, row)
    path = trees.path_to(tree, node.id)
    offset = node.length - len(blocks)
    return ShownBlocks(blocks, trees.name_answer_models(tree, path, blocks, offset))


FOLLOW_SECONDS = 0.5
"""Seconds between reads of a followed conversation."""


async def _follow(store: Store, name: str, last: int | None, *, full: bool) -> None:
    """Print the (last) blocks of a conversation, then new ones, until the process is interrupted."""
    from anyio import sleep

    row = await find_conversation(store, name)
    printed_head: int | None = None
    printed_ids: list[str] = []
    while True:
        if row.head != printed_head:
            node = await store.node(row, row.head)
            blocks = (await store.load(row, node.id)).blocks
            ids = [block.id for block in blocks]
            if printed_head is None and last is not None:
                printed_ids = ids[:-last]  # the blocks before the last ones are treated as printed

            # After an undo, an edit or a change of the branch, the head does not continue what was printed.
            common_length = _count_common(ids, printed_ids)
            if common_length < len(printed_ids) and not is_json():
                echo(dim(f"[now at node {node.id}, {pluralize(len(blocks), 'block')}]"))
            new_blocks = await _name_models(store, row, node, blocks[common_length:])
            _print_new_blocks(new_blocks, full=full)
            printed_head = row.head
            printed_ids = ids
        await sleep(FOLLOW_SECONDS)
        row = await store.conversation(row.id)


def _count_common(left: Sequence[str], right: Sequence[str]) -> int:
    """Return the number of items with which both lists begin."""
    length = 0
    for left_item, right_item in zip(left, right, strict=False):
        if left_item != right_item:
            break
        length += 1
    return length


def _print_new_blocks(shown: ShownBlocks, *, full: bool) -> None:
    """Print the new blocks of a followed conversation immediately, also into a pipe."""
    if is_json():
        for block in shown.blocks:
            echo_json(turns.dump_block(block))
    else:
        print_blocks(shown.blocks, full=full, models=shown.models)
    sys.stdout.flush()


def _dump(blocks: Sequence[turns.Block]) -> list[dict[str, Any]]:
    return [turns.dump_block(block) for block in blocks]


def print_blocks(
    blocks: Sequence[turns.Block], *, full: bool, models: Mapping[str, str] = EMPTY
) -> None:
    """Print blocks as a chat: messages in full, and any other block as one line.

    Args:
        blocks: The blocks.
        full: Whether to print other blocks in full, too.
        models: The names of models to print with the blocks that they wrote, by block id.
    """
    for block in blocks:
        attachments = _describe_attachments(block)
        if block.kind in HEADINGS and (block.text or attachments):
            heading, color = HEADINGS[block.kind]
            details = _format_origin(block)
            if block.id in models:
                details = f" {sanitize_text(models[block.id])}{details}"
            echo()
            echo(click.style(heading, fg=color, bold=True) + dim(details))
            if block.text:
                echo(wrap_text(sanitize_text(block.text)))
            for line in attachments:
                echo(dim(line))
        elif full:
            echo()
            echo(dim(f"{block.kind.replace('_', ' ')}{_format_origin(block)}"))
            echo(sanitize_text(_full_text(block)))
        else:
            echo(dim(f"[{block.kind.replace('_', ' ')}: {describe(block, FOLD_WIDTH)}]"))


def _format_origin(block: turns.Block) -> str:
    if block.origin in ("user", "engine"):
        return ""
    return f" (by {block.origin})"


def _describe_attachments(block: turns.Block) -> list[str]:
    """Return a line for each image, file and other part that is no text."""
    parts: Sequence[turns.Part] = getattr(block, "parts", ())
    return [
        f"[{describe_attachment(part)}]"
        for part in parts
        if not isinstance(part, turns.TextPart | turns.RefusalPart)
    ]


def _full_text(block: turns.Block) -> str:
    match block:
        case turns.ToolCallBlock():
            return f"{block.name} {block.arguments}"
        case turns.ToolResultBlock():
            return "\n".join(filter(None, (block.text, *_describe_attachments(block))))
        case turns.ReasoningBlock():
            return "\n\n".join((*block.summary, *block.texts)) or "(encrypted)"
        case _:
            return describe(block, 10_000)


@kedge_command("diff")
@with_conversation
@click.argument("left")
@click.argument("right", default="head")
async def diff_command(store: Store, row: ConversationRow, left: str, right: str) -> Result:
    """Compare two positions in a tree: two branches, or two positions on one branch.

    LEFT and RIGHT are node numbers, response ids, 'head' (the default of RIGHT), or other conversations of the same
    tree. Lines with - are only in LEFT, lines with + only in RIGHT.
    """
    left_node = await _resolve_node(store, row, left)
    right_node = await _resolve_node(store, row, right)
    difference = await store.differences(row, left_node.id, right_node.id)

    def show() -> None:
        shared = pluralize(difference.shared, "block")
        echo(dim(f"nodes {left_node.id} and {right_node.id} share {shared}"))
        _print_diff_lines("-", "red", difference.left)
        _print_diff_lines("+", "green", difference.right)

    value = {
        "left": {"node": left_node.id, "blocks": _dump(difference.left)},
        "right": {"node": right_node.id, "blocks": _dump(difference.right)},
        "shared": difference.shared,
    }
    return Result(value, show)


async def _resolve_node(store: Store, row: ConversationRow, at: str) -> Node:
    """Return a node of this tree; the name of a conversation means its head."""
    try:
        return await find_node(store, row, at)
    except NotInStore:
        other = await lookup_conversation(store, at)
        if other is None or other.tree != row.tree:
            raise
        return await store.node(row, other.head)


def _print_diff_lines(sign: str, color: str, blocks: tuple[turns.Block, ...]) -> None:
    for block in blocks:
        line = f"{sign} {block.kind:<11} {describe(block, FOLD_WIDTH)}"
        echo(click.style(line, fg=color))


EXCERPT_LENGTH = 60
MAX_LANE_WIDTH = 15
"""The maximum number of characters of lanes beside which the texts of nodes are aligned."""
RESENT_SIGN = "↻"
NODE_SIGNS = {"root": "◇", "failed": "✗", "compacted": "◆", "edited": "◆", "merged": "◆"}
MARK_COLORS: Mapping[Mark, str] = {
    "expired": "yellow",
    "lost": "yellow",
    "failed": "red",
    "unstored": "yellow",
}


@dataclass(frozen=True, slots=True)
class AnnotatedTree:
    """A tree with the conversations on it and the last block that each node added."""

    tree: trees.StoredTree
    conversations: Sequence[ConversationRow]
    blocks: Mapping[int, turns.Block]
    models: Mapping[int, str]
    """The model of each response by node, if several models answered."""

    def heads(self, node_id: int) -> list[str]:
        """Return labels of the conversations with their head at a node; ``head`` for the selected one."""
        labels: list[str] = []
        for row in self.conversations:
            if row.head != node_id:
                continue
            if row.id == self.tree.row.id:
                labels.append("head")
            else:
                labels.append(f"head of {sanitize_text(row.title or row.id)}")
        return sorted(labels)

    def marks(self, node: Node, now: float) -> dict[Mark, str]:
        """Return the marks of a node, each as a text with its reason."""
        marks = find_marks(node, self.tree.responses.get(node.id), now)
        if "healed" in marks:
            marks.pop("full", None)  # healing sends the request in full
        return {mark: describe_mark(mark, reason) for mark, reason in marks.items()}

    def excerpt(self, node_id: int) -> str:
        """Return what an edit changed, or the beginning of the last block that a node added."""
        edit = self.tree.edits.get(node_id)
        if edit:
            return edit
        if node_id not in self.blocks:
            return ""
        return describe(self.blocks[node_id], EXCERPT_LENGTH)

    def to_json(self, now: float, limit: int = 0) -> dict[str, Any]:
        """Return the tree as JSON values, the oldest node first; with a limit the newest nodes only."""
        nodes = sorted(self.tree.nodes, key=lambda node: node.id)
        if limit:
            nodes = nodes[-limit:]
        return {
            "conversation": self.tree.row.id,
            "head": self.tree.row.head,
            "conversations": {row.id: row.head for row in self.conversations},
            "nodes": [self._node_to_json(node, now) for node in nodes],
        }

    def _node_to_json(self, node: Node, now: float) -> dict[str, Any]:
        from kedge.web.shapes import shape_node

        response = self.tree.responses.get(node.id)
        marks = find_marks(node, response, now)
        shape = shape_node(node, response, marks, label=self.excerpt(node.id))
        return {
            **shape.model_dump(mode="json"),
            "kept": node.kept,
            "length": node.length,
            "heads": [row.id for row in self.conversations if row.head == node.id],
        }


async def load_tree(store: Store, row: ConversationRow) -> AnnotatedTree:
    """Read a tree in three reads, whose number of queries does not depend on its size."""
    tree = await trees.read_tree(store, row)
    return AnnotatedTree(
        tree,
        await trees.list_tree_conversations(store, row),
        await trees.load_last_blocks(store, row),
        trees.name_models(tree.responses),
    )


def draw_graph(tree: trees.StoredTree, limit: int = 0) -> Iterator[tuple[str, Node | None]]:
    """Yield each line of a graph: the drawing of its lanes, and its node, or None if branches join there.

    The newest node on the line to the head is the first. A layout is ordered from the root: a side
    branch is complete before its parent line continues. It is therefore read from its end: only the lanes left of
    a node are in use there, and a side branch joins its parent line below its first node.

    Args:
        tree: The tree.
        limit: The maximum number of nodes, of which the newest are drawn; 0 for all.
    """
    nodes = {node.id: node for node in tree.nodes}
    layout = compute_layout(
        (TreeNode(node.id, node.parent) for node in tree.nodes),
        tree.row.head,
        unfolded=ALL_NODES,
    )
    branch_starts = {edge.end for edge in layout.edges if edge.lane != edge.to_lane}
    drawn_ids = set(nodes)
    if limit:
        drawn_ids = set(sorted(nodes)[-limit:])

    for index, layout_row in reversed(tuple(enumerate(layout.rows))):
        node = nodes[layout_row.node.id]
        if node.id not in drawn_ids:
            continue
        sign = NODE_SIGNS.get(node.kind, "●")
        if _is_resent(tree, node):
            sign = RESENT_SIGN
        yield "│ " * layout_row.lane + sign, node
        if index in branch_starts and node.parent in drawn_ids:
            yield "│ " * (layout_row.lane - 1) + "├─┘", None


def _is_resent(tree: trees.StoredTree, node: Node) -> bool:
    """Return whether a node's request failed and was sent again, as another node."""
    response = tree.responses.get(node.id)
    return response is not None and response.is_resent


LIMIT_HELP = "Maximum number of nodes, of which the newest are shown.  [default: all]"


@kedge_command("tree")
@with_conversation
@click.option("--limit", type=click.IntRange(0), default=0, help=LIMIT_HELP)
async def tree_command(store: Store, row: ConversationRow, limit: int) -> Result:
    """Show the tree of a conversation: the line to its head, the newest node first.

    Other branches and forks are lanes beside it, drawn where they leave it. Marks show which responses
    expired, were lost or failed, and where history was compacted or edited.
    """
    tree = await load_tree(store, row)
    now = time.time()
    return Result(tree.to_json(now, limit), "\n".join(render_tree(tree, now, limit)))


def render_tree(tree: AnnotatedTree, now: float, limit: int = 0) -> list[str]:
    """Return the graph as lines."""
    lines = list(draw_graph(tree.tree, limit))
    widths = [len(lanes) for lanes, _ in lines]
    width = max((width for width in widths if width <= MAX_LANE_WIDTH), default=0)
    graph: list[str] = []
    for lanes, node in lines:
        if node is None:
            graph.append(lanes)
        else:
            graph.append(f"{lanes:<{width}}  {_format_node(tree, node, now)}")
    return graph


def describe_mark(mark: Mark, reason: str) -> str:
    """Return a mark with its reason, which is a sentence if there is one for it."""
    if mark == "healed":
        return HEALING_TEXTS.get(reason, f"healed: {reason}")
    name = "sent in full" if mark == "full" else mark
    if not reason:
        return name
    if mark == "lost":
        reason = LOST_TEXTS.get(reason, reason)
    return f"{name}: {reason}"


def _format_node(tree: AnnotatedTree, node: Node, now: float) -> str:
    response = tree.tree.responses.get(node.id)
    kind = "resent" if _is_resent(tree.tree, node) else node.kind
    parts = [dim(str(node.id)), kind]
    if response and response.provider_response_id:
        parts.append(dim(sanitize_text(shorten_id(response.provider_response_id))))
    if node.id in tree.models:
        parts.append(dim(sanitize_text(tree.models[node.id])))
    if response and response.sent_bytes:
        parts.append(dim(f"{format_size(response.sent_bytes)} sent"))
    for mark, text in tree.marks(node, now).items():
        color = MARK_COLORS.get(mark, "cyan")
        parts.append(click.style(f"[{sanitize_text(text)}]", fg=color))
    parts += [click.style(f"({name})", fg="green", bold=True) for name in tree.heads(node.id)]
    excerpt = tree.excerpt(node.id)
    if excerpt:
        parts.append(excerpt)
    return " ".join(parts)
