"""``kedge diff``: compare two branches or two positions of a conversation."""

from typing import TYPE_CHECKING, Any

import click

from kedge.cli.base import command as kedge_command
from kedge.cli.base import dim, echo, echo_json
from kedge.cli.store_options import (
    conversation_argument,
    find_conversation,
    find_node,
    lookup_conversation,
    run_with_store,
    store_option,
)
from kedge.errors import NotInStore
from kedge.text_format import pluralize

if TYPE_CHECKING:
    from kedge.store import ConversationRow, Differences, Node, Store
    from kedge.turns import Block

LINE_WIDTH = 100


@kedge_command("diff", short_help="Compare two branches or two positions.")
@conversation_argument
@click.argument("left")
@click.argument("right", default="head")
@store_option
def command(conversation: str, left: str, right: str, store: str, as_json: bool) -> None:
    """Compare two positions in a tree: two branches, or two positions on one branch.

    LEFT and RIGHT are node numbers, response ids, 'head', or other conversations of the same tree.
    Lines with - are only in LEFT, lines with + only in RIGHT.
    """

    async def work(opened: "Store") -> "tuple[Node, Node, Differences]":
        row = await find_conversation(opened, conversation)
        both = [await _resolve_node(opened, row, left), await _resolve_node(opened, row, right)]
        return both[0], both[1], await opened.differences(row, both[0].id, both[1].id)

    one, other, found = run_with_store(work, given=store)
    if as_json:
        echo_json(_differences_to_json(one, other, found))
        return
    echo(dim(f"nodes {one.id} and {other.id} share {pluralize(found.shared, 'block')}"))
    _print_blocks("-", "red", found.left)
    _print_blocks("+", "green", found.right)


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


def _differences_to_json(left: "Node", right: "Node", found: "Differences") -> dict[str, Any]:
    from kedge.turns import dump_block

    return {
        "left": {"node": left.id, "blocks": [dump_block(block) for block in found.left]},
        "right": {"node": right.id, "blocks": [dump_block(block) for block in found.right]},
        "shared": found.shared,
    }
