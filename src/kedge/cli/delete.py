"""``kedge delete``: delete a conversation permanently."""

from typing import TYPE_CHECKING

import click

from kedge.cli.base import command as kedge_command
from kedge.cli.base import echo, echo_json
from kedge.cli.store_options import (
    conversation_argument,
    erase_practice_responses,
    find_conversation,
    run_with_store,
    store_option,
)
from kedge.formatting import sanitize_text

if TYPE_CHECKING:
    from kedge.store import ConversationRow, Store


@kedge_command("delete", short_help="Delete a conversation permanently.")
@conversation_argument
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@store_option
def command(conversation: str, yes: bool, store: str, as_json: bool) -> None:
    """Delete a conversation: its rows, and the blocks that no other conversation uses.

    The practice model's memory of it is erased, too. Responses stored by other providers remain there
    until they expire.
    """

    async def find(opened: "Store") -> "ConversationRow":
        return await find_conversation(opened, conversation)

    row = run_with_store(find, given=store)
    name = sanitize_text(row.title or row.id)
    if not yes:
        click.confirm(f"Delete {name} permanently?", abort=True, err=True)

    async def work(opened: "Store") -> None:
        await opened.delete(row.id)
        await erase_practice_responses(opened, store)

    run_with_store(work, given=store)
    if as_json:
        echo_json({"id": row.id, "deleted": True})
    else:
        echo(f"{name} deleted; 'kedge gc' reclaims its space")
