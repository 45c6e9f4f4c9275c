"""``kedge conversations``: what is in the store, the newest first."""

from typing import TYPE_CHECKING, Any

import click

from kedge.cli.frame import command as kedge_command
from kedge.cli.output import dim, say, say_json, table
from kedge.cli.stored import store_option, with_store
from kedge.cli.words import ago, printable, share, short_id
from kedge.config import store_file, store_url

if TYPE_CHECKING:
    from kedge.store import Store
    from kedge.store.overview import Overview


@kedge_command("conversations", short_help="List the conversations in the store.")
@store_option
@click.option("--tag", help="Only those with this tag.")
@click.option("--archived", is_flag=True, help="Also those that were put away.")
@click.option(
    "--limit", type=click.IntRange(1), default=50, show_default=True, help="How many at most."
)
def command(store: str, tag: str | None, archived: bool, limit: int, as_json: bool) -> None:
    """List the conversations in the store, the one that changed last first."""
    file = store_file(store_url(store, make=False))
    if file and not file.exists():
        rows: list[dict[str, Any]] = []
    else:
        rows = with_store(lambda opened: _rows(opened, tag, archived, limit), given=store)
    if as_json:
        say_json(rows)
    elif rows:
        _show(rows)
    else:
        say("There are no conversations yet. Start one: kedge chat --conversation NAME")


async def _rows(
    store: "Store", tag: str | None, archived: bool, limit: int
) -> list[dict[str, Any]]:
    from kedge.store.overview import overview

    shown = "all" if archived else "active"
    found, _ = await overview(store, shown=shown, tag=tag, limit=limit)
    return [_report(each) for each in found]


def _report(found: "Overview") -> dict[str, Any]:
    row = found.row
    return {
        "id": row.id,
        "title": row.title,
        "tags": list(row.tags),
        "archived": row.archived,
        "head": row.head,
        "mode": row.mode,
        "model": found.model or None,
        "forked_from": row.forked_from or None,
        "forks": found.forks,
        "first_words": found.first_words,
        "last_answer": found.last_answer,
        "answers": found.responses - found.failed,
        "failures": found.failed,
        "lost": found.lost,
        "input_tokens": found.input_tokens,
        "cached_tokens": found.cached_tokens,
        "output_tokens": found.output_tokens,
        "cost": found.cost,
        "seconds": found.seconds,
        "expires_at": found.expires_at,
        "created_at": row.created_at,
        "updated_at": row.updated_at,
    }


def _show(rows: list[dict[str, Any]]) -> None:
    table(
        ("id", "answers", "tokens", "cached", "changed", "title"),
        [
            (
                short_id(row["id"], 20),
                row["answers"],
                f"{row['input_tokens'] + row['output_tokens']:,}",
                share(row["cached_tokens"], row["input_tokens"]),
                ago(row["updated_at"]),
                f"{printable(row['title'] or row['first_words'])}{dim(_marks(row))}",
            )
            for row in rows
        ],
    )


def _marks(row: dict[str, Any]) -> str:
    marks = [f"#{printable(tag)}" for tag in row["tags"]]
    marks += ["(archived)"] if row["archived"] else []
    marks += [f"(fork of {short_id(row['forked_from'], 12)})"] if row["forked_from"] else []
    marks += [f"({row['failures']} failed)"] if row["failures"] else []
    return "".join(f" {mark}" for mark in marks)
