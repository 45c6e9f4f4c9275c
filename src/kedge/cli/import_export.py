"""``kedge export`` and ``kedge import``: write conversations as JSON lines, and restore them."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from kedge.cli.base import command as kedge_command
from kedge.cli.base import echo, echo_json
from kedge.cli.store_options import (
    MAX_CONVERSATIONS,
    complete_names,
    find_conversation,
    run_with_store,
    store_option,
)
from kedge.text_format import pluralize, sanitize_text

if TYPE_CHECKING:
    from kedge.store import ConversationRow, Store


@kedge_command("export", short_help="Export conversations as JSON lines.")
@click.argument(
    "conversations", nargs=-1, metavar="[CONVERSATION]...", shell_complete=complete_names
)
@click.option("--out", type=click.Path(path_type=Path), help="A file.  [default: standard output]")
@store_option
def export_command(
    conversations: tuple[str, ...], out: Path | None, store: str, as_json: bool
) -> None:
    """Write conversations (default: all) as JSON lines, with trees, anchors and statistics.

    'kedge import' restores them. With --json and --out a summary is printed.
    """
    if as_json and out is None:
        raise click.UsageError(
            "the output is JSON already; --json prints a summary of a file, so it needs --out"
        )

    async def work(opened: "Store") -> list[str]:
        if conversations:
            rows = [await find_conversation(opened, name) for name in conversations]
        else:
            rows = await opened.conversations(archived=None, limit=MAX_CONVERSATIONS)
        return [await opened.export(row) for row in rows]

    written = run_with_store(work, address=store)
    if out is None:
        click.echo("".join(written).encode(), nl=False)  # UTF-8, so that it can be imported
        return
    out.write_text("".join(written), encoding="utf-8", newline="\n")
    lines = sum(text.count("\n") for text in written)
    if as_json:
        echo_json({"file": str(out), "conversations": len(written), "lines": lines})
    else:
        click.echo(
            f"{pluralize(len(written), 'conversation')}, {pluralize(lines, 'line')} in {out}",
            err=True,
        )


@kedge_command("import", short_help="Import exported conversations.")
@click.argument(
    "file", type=click.Path(exists=True, dir_okay=False, allow_dash=True, path_type=Path)
)
@store_option
def import_command(file: Path, store: str, as_json: bool) -> None:
    """Import the conversations of FILE ('-' for standard input), all or none."""
    with click.open_file(str(file), encoding="utf-8", errors="strict") as stream:
        # Not splitlines: it also splits at other characters, which JSON strings may contain.
        lines = [line for line in stream.read().removeprefix("\ufeff").split("\n") if line.strip()]

    async def work(opened: "Store") -> "list[ConversationRow]":
        return await opened.import_(lines)

    rows = run_with_store(work, address=store, make=True)
    if as_json:
        echo_json([{"id": row.id, "title": row.title} for row in rows])
        return
    for row in rows:
        echo(f"{row.id}  {sanitize_text(row.title)}".rstrip())
