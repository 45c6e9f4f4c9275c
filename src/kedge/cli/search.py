"""``kedge search``: the blocks of all conversations that hold some words."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from kedge.cli.frame import command as kedge_command
from kedge.cli.output import say, say_json, table
from kedge.cli.stored import store_option, with_store
from kedge.cli.words import printable, short_id

if TYPE_CHECKING:
    from kedge.store import Hit, Store


@kedge_command("search", short_help="Find words in all conversations.")
@click.argument("words", nargs=-1, required=True)
@click.option(
    "--limit", type=click.IntRange(1), default=20, show_default=True, help="How many at most."
)
@store_option
def command(words: tuple[str, ...], limit: int, store: str, as_json: bool) -> None:
    """Find the blocks that hold all of the WORDS, the newest first."""

    async def work(opened: "Store") -> "tuple[list[Hit], dict[str, str]]":
        hits = await opened.search(" ".join(words), limit=limit)
        names = {hit.conversation for hit in hits}
        return hits, {name: (await opened.conversation(name)).title for name in names}

    hits, titles = with_store(work, given=store)
    if as_json:
        say_json([_report(hit, titles) for hit in hits])
    elif hits:
        rows = [
            (
                printable(titles[hit.conversation]) or short_id(hit.conversation),
                hit.node,
                hit.kind,
                hit.excerpt,
            )
            for hit in hits
        ]
        table(("conversation", "node", "kind", "words"), rows)
    else:
        say("Nothing was found.")


def _report(hit: "Hit", titles: dict[str, str]) -> dict[str, Any]:
    return {**asdict(hit), "title": titles[hit.conversation]}
