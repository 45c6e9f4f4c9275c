"""``kedge fork``: create a conversation that continues from any position of another."""

from typing import TYPE_CHECKING

import click

from kedge.cli.base import command as kedge_command
from kedge.cli.base import echo, echo_json
from kedge.cli.store_options import (
    conversation_argument,
    find_conversation,
    find_node,
    run_with_store,
    store_option,
)
from kedge.text_format import sanitize_text

if TYPE_CHECKING:
    from kedge.store import ConversationRow, Store


@kedge_command("fork", short_help="Continue from any position as a new conversation.")
@conversation_argument
@click.option("--at", default="head", help="A node number or a response id.  [default: the head]")
@click.option("--title", default="", help="The title of the fork.  [default: the same title]")
@store_option
def command(conversation: str, at: str, title: str, store: str, as_json: bool) -> None:
    """Create a conversation that continues from any position of another; both share the history before it."""

    async def work(opened: "Store") -> "tuple[ConversationRow, ConversationRow, int]":
        row = await find_conversation(opened, conversation)
        node = await find_node(opened, row, at)
        forked = await opened.fork(row, node.id, title or row.title)
        if row.data:
            forked = await opened.update(forked.id, data=row.data)
        return row, forked, node.id

    row, forked, node = run_with_store(work, given=store)
    if as_json:
        facts = {"id": forked.id, "title": forked.title, "forked_from": row.id, "node": node}
        echo_json(facts)
    else:
        echo(f"{forked.id} continues from node {node} of {sanitize_text(row.title or row.id)}")
        echo(f"kedge chat --conversation {forked.id}")
