"""``kedge delete`` and ``kedge gc``: delete conversations permanently, and reclaim the space of deleted data."""

from typing import TYPE_CHECKING

import click

from kedge.cli.base import command as kedge_command
from kedge.cli.base import echo, echo_json
from kedge.cli.store_options import (
    DurationParam,
    complete_names,
    erase_practice_responses,
    find_conversation,
    run_with_store,
    store_option,
)
from kedge.config import store_file, store_url
from kedge.text_format import format_size, pluralize, sanitize_text

if TYPE_CHECKING:
    from kedge.store import ConversationRow, Store


@kedge_command("delete", short_help="Delete a conversation permanently.")
@click.argument("conversation", required=False, shell_complete=complete_names)
@click.option(
    "--older-than",
    type=DurationParam(),
    help="Delete all conversations that did not change for this long, such as 30d.",
)
@click.option("--tag", help="With --older-than: only conversations with this tag.")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@store_option
def command(
    conversation: str | None,
    older_than: float | None,
    tag: str | None,
    yes: bool,
    store: str,
    as_json: bool,
) -> None:
    """Delete a conversation: its rows, and the blocks that no other conversation uses.

    With --older-than, delete all that did not change for a time, archived ones included. The practice
    model's memory of them is erased, too. Responses stored by other providers remain there until they expire.
    """
    if (conversation is None) == (older_than is None):
        raise click.UsageError("give either a CONVERSATION or --older-than")
    if older_than is not None:
        _delete_older(older_than, tag, yes=yes, store=store, as_json=as_json)
        return
    if tag is not None:
        raise click.UsageError("--tag is used with --older-than")
    _delete_one(conversation or "", yes=yes, store=store, as_json=as_json)


def _delete_one(conversation: str, *, yes: bool, store: str, as_json: bool) -> None:
    async def find(opened: "Store") -> "ConversationRow":
        return await find_conversation(opened, conversation)

    row = run_with_store(find, address=store)
    name = sanitize_text(row.title or row.id)
    if not yes:
        click.confirm(f"Delete {name} permanently?", abort=True, err=True)

    async def work(opened: "Store") -> None:
        await opened.delete(row)
        await erase_practice_responses(opened, store)

    run_with_store(work, address=store)
    if as_json:
        echo_json({"id": row.id, "deleted": True})
    else:
        echo(f"{name} deleted; 'kedge gc' reclaims its space")


def _delete_older(age: float, tag: str | None, *, yes: bool, store: str, as_json: bool) -> None:
    async def count(opened: "Store") -> int:
        return len(await opened.list_older(age, tag=tag))

    if not yes:
        found = pluralize(run_with_store(count, address=store), "conversation")
        click.confirm(f"Delete {found} permanently?", abort=True, err=True)

    async def work(opened: "Store") -> list[str]:
        deleted = await opened.delete_older(age, tag=tag)
        await erase_practice_responses(opened, store)
        return deleted

    deleted = run_with_store(work, address=store)
    if as_json:
        echo_json({"deleted": deleted})
    else:
        echo(f"{pluralize(len(deleted), 'conversation')} deleted; 'kedge gc' reclaims the space")


@kedge_command("gc", short_help="Delete expired conversations and reclaim space.")
@store_option
def gc_command(store: str, as_json: bool) -> None:
    """Delete expired conversations permanently, and reclaim the space of deleted data.

    Conversations expire if they were created with a time to live (kedge chat --ttl). Branches that were
    undone or regenerated are history and remain.
    """

    async def work(opened: "Store") -> int:
        swept = await opened.gc()  # deletes expired conversations, too
        await erase_practice_responses(opened, store)
        return swept

    file = store_file(store_url(store, create=False))
    before = file.stat().st_size if file and file.exists() else 0
    swept = run_with_store(work, address=store)
    freed = max(before - file.stat().st_size, 0) if file else None
    if as_json:
        echo_json({"blocks": swept, "freed_bytes": freed})
    else:
        space = "" if freed is None else f", {format_size(freed)} reclaimed"
        echo(f"{pluralize(swept, 'block')} removed{space}")
