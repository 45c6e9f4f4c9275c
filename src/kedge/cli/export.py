"""``kedge export``: write conversations as JSON lines."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from kedge.cli.base import command as kedge_command
from kedge.cli.base import echo_json
from kedge.cli.store_options import (
    MAX_CONVERSATIONS,
    complete_names,
    find_conversation,
    run_with_store,
    store_option,
)
from kedge.text_format import pluralize

if TYPE_CHECKING:
    from kedge.store import Store


@kedge_command("export", short_help="Export conversations as JSON lines.")
@click.argument(
    "conversations", nargs=-1, metavar="[CONVERSATION]...", shell_complete=complete_names
)
@click.option("--out", type=click.Path(path_type=Path), help="A file.  [default: standard output]")
@store_option
def command(conversations: tuple[str, ...], out: Path | None, store: str, as_json: bool) -> None:
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

    written = run_with_store(work, given=store)
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
