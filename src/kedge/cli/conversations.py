"""``kedge conversations`` and ``kedge search``: list conversations, and find text in them."""

import time
from typing import TYPE_CHECKING, Any

import click
from msgspec import structs

from kedge.cli.base import command as kedge_command
from kedge.cli.base import dim, echo, echo_json, print_table
from kedge.cli.store_options import page_options, run_with_store, store_option, time_options
from kedge.text.display import format_age, format_percent, sanitize_text, shorten_id

if TYPE_CHECKING:
    from kedge.store import Hit, Store


STATUSES = ("active", "forked", "failed", "archived", "all")
ORDERS = ("newest", "oldest", "turns", "tokens", "cost", "title")
"""The filters and orders of `kedge.store.summaries`, which is imported when the command runs."""


NO_CONVERSATIONS = "There are no conversations yet. Start one: kedge chat --conversation NAME"


@kedge_command("conversations")
@store_option
@click.option("--tag", help="Only conversations with this tag.")
@click.option("--model", help="Only conversations in which this model answered.")
@click.option(
    "--status",
    "show",
    type=click.Choice(STATUSES),
    default="active",
    show_default=True,
    help="Only conversations with this status.",
)
@click.option("--archived", is_flag=True, help="Include archived conversations.")
@time_options
@click.option(
    "--order",
    type=click.Choice(ORDERS),
    default="newest",
    show_default=True,
    help="Newest or oldest change, most turns, tokens or cost first, or by title.",
)
@page_options(50)
def command(store: str, archived: bool, as_json: bool, **filters: Any) -> None:
    """List the conversations in the store, the most recently changed first."""
    if archived and filters["show"] == "active":
        filters["show"] = "all"

    async def work(opened: "Store") -> tuple[list[dict[str, Any]], bool]:
        from kedge.store.summaries import list_summaries
        from kedge.web.shapes import overview_status, shape_overview

        found, _ = await list_summaries(opened, **filters)
        has_any = bool(found or await opened.conversations(archived=None, limit=1))
        now = time.time()
        shapes = [shape_overview(each, overview_status(each, now)) for each in found]
        return [each.model_dump(mode="json") for each in shapes], has_any

    rows, has_any = run_with_store(work, address=store, may_miss=True)
    if as_json:
        echo_json(rows)
    elif rows:
        _print_rows(rows)
    else:
        echo("No conversations match; --status all lists all." if has_any else NO_CONVERSATIONS)


def _print_rows(rows: list[dict[str, Any]]) -> None:
    print_table(
        ("id", "responses", "tokens", "cached", "changed", "title"),
        [
            (
                shorten_id(row["id"]),
                row["responses"],
                f"{row['input_tokens'] + row['output_tokens']:,}",
                format_percent(row["cached_tokens"], row["input_tokens"]),
                format_age(row["updated_at"]),
                f"{sanitize_text(row['title'] or row['first_words'])}{dim(_format_marks(row))}",
            )
            for row in rows
        ],
    )


def _format_marks(row: dict[str, Any]) -> str:
    marks = [f"#{sanitize_text(tag)}" for tag in row["tags"]]
    marks += ["(archived)"] if row["archived"] else []
    marks += [f"(fork of {shorten_id(row['forked_from'])})"] if row["forked_from"] else []
    marks += [f"({row['failed']} failed)"] if row["failed"] else []
    return "".join(f" {mark}" for mark in marks)


ROLES = ("user", "assistant", "system", "reasoning", "tool_call", "tool_result")


@kedge_command("search")
@click.argument("words", nargs=-1, required=True)
@click.option("--role", type=click.Choice(ROLES), help="Only blocks of this kind.")
@click.option("--tag", help="Only conversations with this tag.")
@time_options
@click.option(
    "--order",
    type=click.Choice(("newest", "rank")),
    default="newest",
    show_default=True,
    help="Newest first, or the best matches first.",
)
@page_options(20)
@store_option
def search_command(words: tuple[str, ...], store: str, as_json: bool, **filters: Any) -> None:
    """Find the blocks that contain all WORDS.

    "a phrase" matches adjacent words, begin* words with this beginning, OR separates alternatives, and NOT
    excludes the next word. Quote operators and phrases for the shell: kedge search 'ship* OR "old harbor"'.
    """

    async def work(opened: "Store") -> "tuple[list[Hit], dict[str, str]]":
        hits = await opened.search(" ".join(words), **filters)
        names = {hit.conversation for hit in hits}
        return hits, {name: (await opened.conversation(name)).title for name in names}

    hits, titles = run_with_store(work, address=store, may_miss=True)
    if as_json:
        echo_json([{**structs.asdict(hit), "title": titles[hit.conversation]} for hit in hits])
    elif hits:
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
    else:
        echo("No matches.")
