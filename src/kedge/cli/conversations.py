"""``kedge conversations`` and ``search``, and the commands that change a conversation without a model.

These are ``kedge rename``, ``tag``, ``archive``, ``settings``, ``fork``, ``undo`` and ``redo``.
"""

import time
from typing import Any, get_args

import click
from msgspec import structs

from kedge._internal.display import format_age, format_percent, pluralize, sanitize_text, shorten_id
from kedge.cli.base import Result, default_option, dim, kedge_command, print_table
from kedge.cli.store_options import (
    DEFAULT,
    at_option,
    find_node,
    format_stored_duration,
    optional_duration_option,
    page_options,
    time_options,
    with_conversation,
    with_store,
)
from kedge.conversation.lookup import find_redo_target, find_undo_target
from kedge.planning.anchors import MODES
from kedge.store import ConversationRow, Hit, Node, Store
from kedge.store.search import SearchRole
from kedge.store.summaries import LIST_FILTERS, LIST_ORDERS, list_summaries
from kedge.web.shapes import ConversationShape, overview_status, shape_overview

NO_MATCHES = "No conversations match; --show all lists all."
NO_CONVERSATIONS = "There are no conversations yet. Start one: kedge chat --conversation NAME"


@kedge_command("conversations")
@click.option("--tag", help="Only conversations with this tag.")
@click.option("--model", help="Only conversations in which this model answered.")
@default_option("--show", "active", click.Choice(LIST_FILTERS), "Which conversations to list.")
@click.option("--archived", is_flag=True, help="Include archived conversations.")
@time_options
@default_option(
    "--order",
    "newest",
    click.Choice(LIST_ORDERS),
    "Newest or oldest change, most responses, tokens or cost first, or by title.",
)
@page_options(50)
@with_store(may_miss=True)
async def command(store: Store, archived: bool, **filters: Any) -> Result:
    """List the conversations in the store; by default the most recently changed first."""
    # Active conversations are those that are not archived, so with archived ones these are all.
    if archived and filters["show"] == "active":
        filters["show"] = "all"
    summaries, _ = await list_summaries(store, **filters)
    if summaries:
        now = time.time()
        shapes = [shape_overview(summary, overview_status(summary, now)) for summary in summaries]
        overviews = [shape.model_dump(mode="json") for shape in shapes]
        return Result(overviews, lambda: _print_overviews(overviews))
    if await store.conversations(archived=None, limit=1):
        return Result([], NO_MATCHES)
    return Result([], NO_CONVERSATIONS)


def _print_overviews(overviews: list[dict[str, Any]]) -> None:
    print_table(
        ("id", "responses", "tokens", "cached", "changed", "title"),
        [
            (
                shorten_id(overview["id"]),
                overview["responses"],
                f"{overview['input_tokens'] + overview['output_tokens']:,}",
                format_percent(overview["cached_tokens"], overview["input_tokens"]),
                format_age(overview["updated_at"]),
                sanitize_text(overview["title"] or overview["first_words"])
                + dim(_format_marks(overview)),
            )
            for overview in overviews
        ],
    )


def _format_marks(overview: dict[str, Any]) -> str:
    marks = [f"#{sanitize_text(tag)}" for tag in overview["tags"]]
    if overview["archived"]:
        marks.append("(archived)")
    if overview["forked_from"]:
        marks.append(f"(fork of {shorten_id(overview['forked_from'])})")
    if overview["failed"]:
        marks.append(f"({overview['failed']} failed)")
    return "".join(f" {mark}" for mark in marks)


@kedge_command("search")
@click.argument("words", nargs=-1, required=True)
@click.option("--role", type=click.Choice(get_args(SearchRole)), help="Only blocks of this role.")
@click.option("--tag", help="Only conversations with this tag.")
@time_options
@default_option(
    "--order",
    "newest",
    click.Choice(("newest", "rank")),
    "Newest first, or the best matches first.",
)
@page_options(20)
@with_store(may_miss=True)
async def search_command(store: Store, words: tuple[str, ...], **filters: Any) -> Result:
    """Find the blocks that contain all WORDS.

    "a phrase" matches adjacent words, begin* words with this beginning, OR separates alternatives, and NOT
    excludes the next word. Quote operators and phrases for the shell: kedge search 'ship* OR "old harbor"'.
    """
    if not "".join(words).strip():
        raise click.UsageError("give at least one word")
    hits = await store.search(" ".join(words), **filters)
    if not hits:
        return Result([], "No matches.")
    ids = {hit.conversation for hit in hits}
    titles = {row_id: (await store.conversation(row_id)).title for row_id in ids}
    values = [{**structs.asdict(hit), "title": titles[hit.conversation]} for hit in hits]
    return Result(values, lambda: _print_hits(hits, titles))


def _print_hits(hits: list[Hit], titles: dict[str, str]) -> None:
    rows = [
        (
            sanitize_text(titles[hit.conversation]) or shorten_id(hit.conversation),
            hit.node,
            hit.kind,
            sanitize_text(hit.excerpt),
        )
        for hit in hits
    ]
    print_table(("conversation", "node", "kind", "text"), rows)


def _to_result(row: ConversationRow, text: str, **further: Any) -> Result:
    """Return a conversation in the shape of the JSON API, with further members, and the text to print."""
    shape = ConversationShape.model_validate(row).model_dump(mode="json")
    return Result({**shape, **further}, text)


def _report_change(row: ConversationRow, text: str) -> Result:
    return _to_result(row, f"{sanitize_text(row.title or row.id)}: {text}")


@kedge_command("rename")
@with_conversation
@click.argument("title")
async def rename_command(store: Store, row: ConversationRow, title: str) -> Result:
    """Change the title of CONVERSATION to TITLE."""
    text = f"renamed, was {sanitize_text(row.title or row.id)}"
    return _report_change(await store.update(row, title=title), text)


@kedge_command("tag")
@with_conversation
@click.argument("tags", nargs=-1, required=True)
@click.option("--remove", is_flag=True, help="Remove the tags instead.")
async def tag_command(
    store: Store, row: ConversationRow, tags: tuple[str, ...], remove: bool
) -> Result:
    """Add TAGS to CONVERSATION, or remove them; 'kedge conversations --tag' lists by tag."""

    # Another process may change the tags meanwhile, so the change is applied to the stored row.
    def change(stored: ConversationRow) -> dict[str, Any]:
        new_tags = [tag for tag in stored.tags if tag not in tags]
        if not remove:
            new_tags += tags
        return {"tags": new_tags}

    row = await store.update_with(row, change)
    return _report_change(row, ", ".join(f"#{sanitize_text(tag)}" for tag in row.tags) or "no tags")


@kedge_command("archive")
@with_conversation
@click.option("--restore", is_flag=True, help="Restore it from the archive.")
async def archive_command(store: Store, row: ConversationRow, restore: bool) -> Result:
    """Hide CONVERSATION from lists; 'kedge conversations --archived' shows it, --restore restores it."""
    row = await store.update(row, archived=not restore)
    return _report_change(row, "restored" if restore else "archived")


@kedge_command("settings")
@with_conversation
@click.option(
    "--mode",
    type=click.Choice((*MODES, DEFAULT)),
    help="The mode of its requests, or the default of its engine.",
)
@optional_duration_option(
    "--retention", "How long its provider is assumed to store a response, such as 7d."
)
@optional_duration_option(
    "--ttl", "How long after its last change it expires, such as 30d; by default never."
)
async def settings_command(store: Store, row: ConversationRow, **options: Any) -> Result:
    """Show the settings that are stored with CONVERSATION, after changing those that are given."""
    changes: dict[str, Any] = {}
    for name, value in options.items():
        if value == DEFAULT:
            changes[name] = None  # as which a store keeps a default
        elif value is not None:
            changes[name] = value
    if changes:
        row = await store.update_with(row, lambda _: changes)
    settings = {
        "mode": row.mode or DEFAULT,
        "retention": format_stored_duration(row.retention),
        "ttl": format_stored_duration(row.ttl),
    }
    return _report_change(row, ", ".join(f"{name} {value}" for name, value in settings.items()))


async def _move_head(store: Store, row: ConversationRow, node: Node, first_word: str) -> Result:
    await store.move_head(row, node, head=row.head)  # which fails if the head has moved meanwhile
    moved = await store.conversation(row.id)
    blocks = pluralize(node.length, "block")
    return _report_change(moved, f"{first_word} at node {node.id}, {blocks}")


@kedge_command("undo")
@with_conversation
async def undo_command(store: Store, row: ConversationRow) -> Result:
    """Go back to before the last message or edit of CONVERSATION; it remains in the tree."""
    node = await find_undo_target(store, row, row.head)
    return await _move_head(store, row, node, "back")


@kedge_command("redo")
@with_conversation
async def redo_command(store: Store, row: ConversationRow) -> Result:
    """Go forward one step in CONVERSATION: to the newest message with its answer, or change, after its head."""
    node = await find_redo_target(store, row, row.head)
    return await _move_head(store, row, node, "forward")


@kedge_command("fork")
@with_conversation
@at_option
@click.option("--title", default="", help="The title of the fork.  [default: the same title]")
async def fork_command(store: Store, row: ConversationRow, at: str, title: str) -> Result:
    """Create a conversation that continues from any position of another; both share the history before it."""
    node = await find_node(store, row, at)
    forked = await store.fork(row, node.id, title or row.title)
    text = f"{forked.id} continues from node {node.id} of {sanitize_text(row.title or row.id)}"
    return _to_result(forked, f"{text}\nkedge chat --conversation {forked.id}", node=node.id)
