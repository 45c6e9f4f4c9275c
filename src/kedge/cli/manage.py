"""``kedge rename``, ``tag``, ``archive``, ``fork``, ``undo`` and ``redo``: change a conversation without a model."""

from typing import TYPE_CHECKING, Any

import click

from kedge.cli.base import command as kedge_command
from kedge.cli.base import echo_result
from kedge.cli.store_options import (
    conversation_argument,
    find_conversation,
    find_node,
    run_with_store,
    store_option,
)
from kedge.text.display import pluralize, sanitize_text

if TYPE_CHECKING:
    from collections.abc import Callable

    from kedge.store import ConversationRow, Node, Store


def _update(
    name: str, store: str, change: "Callable[[ConversationRow], dict[str, Any]]"
) -> "ConversationRow":
    """Change the row of a conversation, and return the new row."""

    async def work(opened: "Store") -> "ConversationRow":
        row = await find_conversation(opened, name)
        return await opened.update_with(row, change)

    return run_with_store(work, address=store)


def _print_row(row: "ConversationRow", text: str, *, as_json: bool) -> None:
    facts = {"id": row.id, "title": row.title, "tags": list(row.tags)}
    facts |= {"archived": row.archived, "head": row.head}
    echo_result(facts, f"{sanitize_text(row.title or row.id)}: {text}", as_json=as_json)


@kedge_command("rename")
@conversation_argument
@click.argument("title")
@store_option
def rename_command(conversation: str, title: str, store: str, as_json: bool) -> None:
    """Change the title of CONVERSATION to TITLE."""
    row = _update(conversation, store, lambda _: {"title": title})
    _print_row(row, f"renamed, was {sanitize_text(conversation)}", as_json=as_json)


@kedge_command("tag")
@conversation_argument
@click.argument("tags", nargs=-1, required=True)
@click.option("--remove", is_flag=True, help="Remove the tags instead.")
@store_option
def tag_command(
    conversation: str, tags: tuple[str, ...], remove: bool, store: str, as_json: bool
) -> None:
    """Add TAGS to CONVERSATION, or remove them; 'kedge conversations --tag' lists by tag."""

    def change(row: "ConversationRow") -> dict[str, Any]:
        others = [tag for tag in row.tags if tag not in tags]
        return {"tags": others if remove else [*others, *tags]}

    row = _update(conversation, store, change)
    listed = ", ".join(f"#{sanitize_text(tag)}" for tag in row.tags)
    _print_row(row, listed or "no tags", as_json=as_json)


@kedge_command("archive")
@conversation_argument
@click.option("--restore", is_flag=True, help="Restore it from the archive.")
@store_option
def archive_command(conversation: str, restore: bool, store: str, as_json: bool) -> None:
    """Hide CONVERSATION from lists; 'kedge conversations --archived' shows it, --restore restores it."""
    row = _update(conversation, store, lambda _: {"archived": not restore})
    _print_row(row, "restored" if restore else "archived", as_json=as_json)


def _move_head(name: str, store: str, *, back: bool, as_json: bool) -> None:
    async def work(opened: "Store") -> "tuple[ConversationRow, Node]":
        from kedge.conversation.navigation import find_redo_target, find_undo_target

        row = await find_conversation(opened, name)
        find = find_undo_target if back else find_redo_target
        node = await find(opened, row, row.head)
        await opened.move_head(row, node, head=row.head)
        return await opened.conversation(row.id), node

    row, node = run_with_store(work, address=store)
    position = f"node {node.id}, {pluralize(node.length, 'block')}"
    _print_row(row, f"{'back' if back else 'forward'} at {position}", as_json=as_json)


@kedge_command("undo")
@conversation_argument
@store_option
def undo_command(conversation: str, store: str, as_json: bool) -> None:
    """Go back to before the last message or edit of CONVERSATION; it remains in the tree."""
    _move_head(conversation, store, back=True, as_json=as_json)


@kedge_command("redo")
@conversation_argument
@store_option
def redo_command(conversation: str, store: str, as_json: bool) -> None:
    """Go forward to the newest message below the head of CONVERSATION, with its answer."""
    _move_head(conversation, store, back=False, as_json=as_json)


@kedge_command("fork")
@conversation_argument
@click.option("--at", default="head", help="A node number or a response id.  [default: the head]")
@click.option("--title", default="", help="The title of the fork.  [default: the same title]")
@store_option
def fork_command(conversation: str, at: str, title: str, store: str, as_json: bool) -> None:
    """Create a conversation that continues from any position of another; both share the history before it."""

    async def work(opened: "Store") -> "tuple[ConversationRow, ConversationRow, int]":
        row = await find_conversation(opened, conversation)
        node = await find_node(opened, row, at)
        return row, await opened.fork(row, node.id, title or row.title), node.id

    row, forked, node = run_with_store(work, address=store)
    facts = {"id": forked.id, "title": forked.title, "forked_from": row.id, "node": node}
    text = f"{forked.id} continues from node {node} of {sanitize_text(row.title or row.id)}"
    echo_result(facts, f"{text}\nkedge chat --conversation {forked.id}", as_json=as_json)
