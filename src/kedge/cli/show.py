"""``kedge show``: print a conversation up to its head or any position in its tree."""

from typing import TYPE_CHECKING, Any

import click

from kedge.cli.base import command as kedge_command
from kedge.cli.base import dim, echo, echo_json
from kedge.cli.store_options import (
    conversation_argument,
    find_conversation,
    find_node,
    run_with_store,
    store_option,
)
from kedge.formatting import pluralize, sanitize_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kedge.store import ConversationRow, LoadedPath, Store
    from kedge.turns import Block

FOLD_WIDTH = 100
HEADINGS = {
    "user": ("You", "green"),
    "assistant": ("Model", "cyan"),
    "system": ("System", "magenta"),
}


@kedge_command("show", short_help="Print a conversation.")
@conversation_argument
@click.option("--at", default="head", help="A node number or a response id.  [default: the head]")
@click.option("--full", is_flag=True, help="Show reasoning, tool calls and their results in full.")
@store_option
def command(conversation: str, at: str, full: bool, store: str, as_json: bool) -> None:
    """Print a conversation; CONVERSATION is an id, its beginning, or a title."""

    async def work(opened: "Store") -> "tuple[ConversationRow, LoadedPath]":
        row = await find_conversation(opened, conversation)
        node = await find_node(opened, row, at)
        return row, await opened.load(row, node.id)

    row, loaded = run_with_store(work, given=store)
    if as_json:
        echo_json(_loaded_to_json(row, loaded))
        return
    echo(
        dim(
            f"{sanitize_text(row.title or row.id)}, node {loaded.node.id}, "
            f"{pluralize(len(loaded.blocks), 'block')}"
        )
    )
    print_blocks(loaded.blocks, full=full)


def _loaded_to_json(row: "ConversationRow", loaded: "LoadedPath") -> dict[str, Any]:
    from kedge.turns import dump_block

    blocks = [dump_block(block) for block in loaded.blocks]
    node = loaded.node
    return {"id": row.id, "title": row.title, "node": node.id, "kind": node.kind, "blocks": blocks}


def print_blocks(blocks: "Sequence[Block]", *, full: bool) -> None:
    """Print blocks as a chat; other blocks than messages are folded into a line."""
    from kedge.turns.formatting import describe

    for block in blocks:
        text = str(getattr(block, "text", "") or "")
        if block.kind in HEADINGS and text:
            heading, color = HEADINGS[block.kind]
            echo()
            echo(click.style(heading, fg=color, bold=True) + dim(_format_origin(block)))
            echo(sanitize_text(text))
        elif full:
            echo()
            echo(dim(f"{block.kind.replace('_', ' ')}{_format_origin(block)}"))
            echo(sanitize_text(_full_text(block)))
        else:
            echo(dim(f"[{block.kind.replace('_', ' ')}: {describe(block, FOLD_WIDTH)}]"))


def _format_origin(block: "Block") -> str:
    return "" if block.origin in ("user", "engine") else f" (by {block.origin})"


def _full_text(block: "Block") -> str:
    from kedge.turns import ReasoningBlock, ToolCallBlock, ToolResultBlock
    from kedge.turns.formatting import describe

    match block:
        case ToolCallBlock():
            return f"{block.name} {block.arguments}"
        case ToolResultBlock():
            return block.text
        case ReasoningBlock():
            return "\n\n".join((*block.summary, *block.texts)) or "(encrypted)"
        case _:
            return describe(block, 10_000)
