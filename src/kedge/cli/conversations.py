"""``kedge conversations``: what is in the store, the newest first."""

from typing import TYPE_CHECKING, Any

import click

from kedge.cli.frame import command as kedge_command
from kedge.cli.output import dim, say, say_json, table
from kedge.cli.stored import store_option, with_store
from kedge.cli.words import ago, share, short_id
from kedge.config import store_file, store_url

if TYPE_CHECKING:
    from kedge.store import ConversationRow, Store


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
        rows = with_store(
            lambda opened: _rows(opened, tag, None if archived else False, limit), given=store
        )
    if as_json:
        say_json(rows)
    elif rows:
        _show(rows)
    else:
        say("There are no conversations yet. Start one: kedge chat --conversation NAME")


async def _rows(
    store: "Store", tag: str | None, archived: bool | None, limit: int
) -> list[dict[str, Any]]:
    found = await store.conversations(tag=tag, archived=archived, limit=limit)
    return [await _report(store, row) for row in found]


async def _report(store: "Store", row: "ConversationRow") -> dict[str, Any]:
    made = await store.responses(row)
    done = [each for each in made if each.status in ("completed", "lost")]
    return {
        "id": row.id,
        "title": row.title,
        "tags": list(row.tags),
        "archived": row.archived,
        "head": row.head,
        "mode": row.mode,
        "forked_from": row.forked_from or None,
        "answers": len(done),
        "failures": len(made) - len(done),
        "input_tokens": sum(each.input_tokens or 0 for each in done),
        "cached_tokens": sum(each.cached_tokens or 0 for each in done),
        "output_tokens": sum(each.output_tokens or 0 for each in done),
        "saved_bytes": sum(each.saved_bytes for each in done),
        "cost": sum(each.cost for each in done if each.cost) or None,
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
                f"{row['title']}{dim(_marks(row))}",
            )
            for row in rows
        ],
    )


def _marks(row: dict[str, Any]) -> str:
    marks = [f"#{tag}" for tag in row["tags"]]
    marks += ["(archived)"] if row["archived"] else []
    marks += [f"(fork of {short_id(row['forked_from'], 12)})"] if row["forked_from"] else []
    marks += [f"({row['failures']} failed)"] if row["failures"] else []
    return "".join(f" {mark}" for mark in marks)
