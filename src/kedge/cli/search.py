"""``kedge search``: find text in all conversations."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from kedge.cli.base import command as kedge_command
from kedge.cli.base import echo, echo_json, print_table
from kedge.cli.store_options import page_options, run_with_store, store_option, time_options
from kedge.text_format import sanitize_text, shorten_id

if TYPE_CHECKING:
    from kedge.store import Hit, Store

ROLES = ("user", "assistant", "system", "reasoning", "tool_call", "tool_result")


@kedge_command("search", short_help="Search all conversations.")
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
def command(words: tuple[str, ...], store: str, as_json: bool, **filters: Any) -> None:
    """Find the blocks that contain all WORDS.

    "a phrase" matches adjacent words, begin* words with this beginning, OR separates alternatives, and NOT
    excludes the next word. Quote operators and phrases for the shell: kedge search 'ship* OR "old harbour"'.
    """

    async def work(opened: "Store") -> "tuple[list[Hit], dict[str, str]]":
        hits = await opened.search(" ".join(words), **filters)
        names = {hit.conversation for hit in hits}
        return hits, {name: (await opened.conversation(name)).title for name in names}

    hits, titles = run_with_store(work, given=store)
    if as_json:
        echo_json([_hit_to_json(hit, titles) for hit in hits])
    elif hits:
        rows = [
            (
                sanitize_text(titles[hit.conversation]) or shorten_id(hit.conversation),
                hit.node,
                hit.kind,
                hit.excerpt,
            )
            for hit in hits
        ]
        print_table(("conversation", "node", "kind", "text"), rows)
    else:
        echo("No matches.")


def _hit_to_json(hit: "Hit", titles: dict[str, str]) -> dict[str, Any]:
    return {**asdict(hit), "title": titles[hit.conversation]}
