"""``kedge show`` and ``kedge diff``: print a conversation up to any position, or compare two positions."""

import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import click

from kedge.cli.base import Result, dim, echo, echo_json, is_json, kedge_command, wrap_text
from kedge.cli.store_options import (
    at_option,
    conversation_argument,
    find_conversation,
    find_node,
    lookup_conversation,
    run_with_store,
    store_option,
)
from kedge.errors import NotInStore
from kedge.text.display import pluralize, sanitize_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kedge.store import ConversationRow, Differences, Node, Store
    from kedge.turns import Block, Part


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

    async def work(opened: "Store") -> "tuple[ConversationRow, Node, Sequence[Block]]":
        row = await find_conversation(opened, conversation)
        node = await find_node(opened, row, at)
        if last is None:
            return row, node, (await opened.load(row, node.id)).blocks
        return row, node, await opened.last_blocks(row, last, node.id)

    row, node, blocks = run_with_store(work)

    def show() -> None:
        count = pluralize(node.length, "block")
        shown = f"{count}, the last {len(blocks)} of them" if len(blocks) < node.length else count
        echo(dim(f"{sanitize_text(row.title or row.id)}, node {node.id}, {shown}"))
        print_blocks(blocks, full=full)

    facts = {"id": row.id, "title": row.title, "node": node.id, "kind": node.kind}
    return Result({**facts, "blocks": _dump_blocks(blocks)}, show)


FOLLOW_SECONDS = 0.5
"""Seconds between reads of a followed conversation."""


async def _follow(store: "Store", name: str, last: int | None, *, full: bool) -> None:
    """Print the (last) blocks of a conversation, then new ones, until the process is interrupted."""
    from anyio import sleep

    as_json = is_json()
    row, head, shown = await find_conversation(store, name), -1, list[str]()
    while True:
        if row.head != head:
            blocks = (await store.load(row)).blocks
            ids = [block.id for block in blocks]
            if head < 0 and last is not None:
                shown = ids[:-last]
            head = row.head
            pairs = enumerate(zip(ids, shown, strict=False))
            common = next((i for i, (new, old) in pairs if new != old), min(len(ids), len(shown)))
            if common < len(shown) and not as_json:
                echo(dim(f"[now at node {head}, {pluralize(len(blocks), 'block')}]"))
            for block in _dump_blocks(blocks[common:]) if as_json else ():
                echo_json(block)
            if not as_json:
                print_blocks(blocks[common:], full=full)
            sys.stdout.flush()
            shown = ids
        await sleep(FOLLOW_SECONDS)
        row = await store.conversation(row.id)


def _dump_blocks(blocks: "Sequence[Block]") -> list[dict[str, Any]]:
    from kedge.turns import dump_block

    return [dump_block(block) for block in blocks]


def print_blocks(blocks: "Sequence[Block]", *, full: bool) -> None:
    """Print blocks as a chat; blocks that are not messages are folded into one line."""
    from kedge.turns.text_format import describe

    for block in blocks:
        text, attachments = block.text, _describe_attachments(block)
        if block.kind in HEADINGS and (text or attachments):
            heading, color = HEADINGS[block.kind]
            echo()
            echo(click.style(heading, fg=color, bold=True) + dim(_format_origin(block)))
            if text:
                echo(wrap_text(sanitize_text(text)))
            for line in attachments:
                echo(dim(line))
        elif full:
            echo()
            echo(dim(f"{block.kind.replace('_', ' ')}{_format_origin(block)}"))
            echo(sanitize_text(_full_text(block)))
        else:
            echo(dim(f"[{block.kind.replace('_', ' ')}: {describe(block, FOLD_WIDTH)}]"))


def _format_origin(block: "Block") -> str:
    return "" if block.origin in ("user", "engine") else f" (by {block.origin})"


def _describe_attachments(block: "Block") -> list[str]:
    """Return a line for each image, file and other part that is no text."""
    from kedge.turns import RefusalPart, TextPart
    from kedge.turns.text_format import describe_attachment

    parts: Sequence[Part] = getattr(block, "parts", ())
    return [
        f"[{describe_attachment(part)}]"
        for part in parts
        if not isinstance(part, TextPart | RefusalPart)
    ]


def _full_text(block: "Block") -> str:
    from kedge.turns import ReasoningBlock, ToolCallBlock, ToolResultBlock
    from kedge.turns.text_format import describe

    match block:
        case ToolCallBlock():
            return f"{block.name} {block.arguments}"
        case ToolResultBlock():
            return "\n".join(filter(None, (block.text, *_describe_attachments(block))))
        case ReasoningBlock():
            return "\n\n".join((*block.summary, *block.texts)) or "(encrypted)"
        case _:
            return describe(block, 10_000)


LINE_WIDTH = 100


@kedge_command("diff")
@conversation_argument
@click.argument("left")
@click.argument("right", default="head")
@store_option
def diff_command(conversation: str, left: str, right: str) -> Result:
    """Compare two positions in a tree: two branches, or two positions on one branch.

    LEFT and RIGHT are node numbers, response ids, 'head' (the default of RIGHT), or other conversations of the same
    tree. Lines with - are only in LEFT, lines with + only in RIGHT.
    """

    async def work(opened: "Store") -> "tuple[Node, Node, Differences]":
        row = await find_conversation(opened, conversation)
        both = [await _resolve_node(opened, row, left), await _resolve_node(opened, row, right)]
        return both[0], both[1], await opened.differences(row, both[0].id, both[1].id)

    one, other, found = run_with_store(work)

    def show() -> None:
        echo(dim(f"nodes {one.id} and {other.id} share {pluralize(found.shared, 'block')}"))
        _print_blocks("-", "red", found.left)
        _print_blocks("+", "green", found.right)

    value = {
        "left": {"node": one.id, "blocks": _dump_blocks(found.left)},
        "right": {"node": other.id, "blocks": _dump_blocks(found.right)},
        "shared": found.shared,
    }
    return Result(value, show)


async def _resolve_node(store: "Store", row: "ConversationRow", at: str) -> "Node":
    """Return a node of this tree; the name of a conversation means its head."""
    try:
        return await find_node(store, row, at)
    except NotInStore:
        other = await lookup_conversation(store, at)
        if other is None or other.tree != row.tree:
            raise
        return await store.node(row, other.head)


def _print_blocks(sign: str, color: str, blocks: "tuple[Block, ...]") -> None:
    from kedge.turns.text_format import describe

    for block in blocks:
        line = f"{sign} {block.kind:<11} {describe(block, LINE_WIDTH)}"
        echo(click.style(line, fg=color))
