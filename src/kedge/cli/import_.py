"""``kedge import``: import conversations that ``kedge export`` wrote."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from kedge.cli.base import command as kedge_command
from kedge.cli.base import echo, echo_json
from kedge.cli.store_options import run_with_store, store_option
from kedge.text_format import sanitize_text

if TYPE_CHECKING:
    from kedge.store import ConversationRow, Store


@kedge_command("import", short_help="Import exported conversations.")
@click.argument(
    "file", type=click.Path(exists=True, dir_okay=False, allow_dash=True, path_type=Path)
)
@store_option
def command(file: Path, store: str, as_json: bool) -> None:
    """Import the conversations of FILE ('-' for standard input), all or none."""
    with click.open_file(str(file), encoding="utf-8", errors="strict") as stream:
        # Not splitlines: it also splits at other characters, which JSON strings may contain.
        lines = [line for line in stream.read().split("\n") if line.strip()]

    async def work(opened: "Store") -> "list[ConversationRow]":
        return await opened.import_(lines)

    rows = run_with_store(work, given=store, make=True)
    if as_json:
        echo_json([{"id": row.id, "title": row.title} for row in rows])
        return
    for row in rows:
        echo(f"{row.id}  {sanitize_text(row.title)}".rstrip())
