"""``kedge search``: find text in all conversations."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from kedge.cli.base import command as kedge_command
from kedge.cli.base import echo, echo_json, print_table
from kedge.cli.store_options import run_with_store, store_option
from kedge.formatting import sanitize_text, shorten_id

if TYPE_CHECKING:
    from kedge.store import Hit, Store


@kedge_command("search", short_help="Search all conversations.")
@click.argument("words", nargs=-1, required=True)
@click.option(
    "--limit",
    type=click.IntRange(1),
    default=20,
    show_default=True,
    help="Maximum number of results.",
)
@store_option
def command(words: tuple[str, ...], limit: int, store: str, as_json: bool) -> None:
    """Find the blocks that contain all WORDS, newest first."""

    async def work(opened: "Store") -> "tuple[list[Hit], dict[str, str]]":
        hits = await opened.search(" ".join(words), limit=limit)
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
