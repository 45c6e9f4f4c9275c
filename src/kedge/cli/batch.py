"""``kedge batch``: run prompts from a file, with progress; run it again to resume."""

import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import anyio
import click

from kedge._internal.display import pluralize, sanitize_text
from kedge.batch import AsyncioRunner, Progress, Runner, Summary, run_batch
from kedge.batch.run import ProgressCallback
from kedge.cli.base import (
    Result,
    default_option,
    dim,
    echo,
    kedge_command,
    setting_option,
    wrap_text,
)
from kedge.cli.chat_tools import mcp_option, open_mcp_servers
from kedge.cli.store_options import find_store_url, store_option, store_practice_responses


@kedge_command("batch")
@click.argument("prompts", type=click.Path())
@click.option(
    "--out", required=True, type=click.Path(), help="The file to which results are appended."
)
@setting_option("model", help="The model of lines that name none: a model string.")
@store_option
@click.option("--name", default="", help="A name for the batch.  [default: derived from --out]")
@default_option("--concurrency", 8, click.IntRange(1), "Maximum number of parallel conversations.")
@click.option(
    "--requests-per-minute", default=0, type=click.IntRange(0), help="Rate limit.  [default: none]"
)
@click.option(
    "--tokens-per-minute", default=0, type=click.IntRange(0), help="Rate limit.  [default: none]"
)
@default_option("--attempts", 4, click.IntRange(1), "Attempts per request.")
@default_option(
    "--runner",
    "asyncio",
    click.Choice(["asyncio", "dbos"]),
    "Where lines run: in this process, or in workers (extra dbos).",
)
@default_option("--workers", 2, click.IntRange(1), "Worker processes (dbos).")
@mcp_option
def command(
    *,
    prompts: str,
    out: str,
    runner: str,
    workers: int,
    mcp_servers: tuple[str, ...],
    **options: Any,
) -> Result:
    """Run the prompts of a JSONL file and append a result for each line to --out.

    Run the same command again to resume: finished lines are skipped, and stored answers are not
    requested again. The exit code is 1 if a line failed.
    """
    if mcp_servers and runner != "asyncio":
        raise click.UsageError("--mcp is for --runner asyncio: workers do not start MCP servers")

    async def work(on_progress: ProgressCallback) -> Summary:
        async with open_mcp_servers(mcp_servers) as boxes:
            lines: Runner = AsyncioRunner(tools=boxes)
            if runner == "dbos":
                from kedge.batch.dbos_runner import DbosRunner

                lines = DbosRunner(workers)
            return await run_batch(
                prompts, out, store_url=url, runner=lines, on_progress=on_progress, **options
            )

    url = find_store_url(create=True)
    messages: dict[str, str] = {}
    with store_practice_responses(url), _show_progress() as show:

        def on_progress(progress: Progress) -> None:
            if progress.last and progress.last.error_class:
                messages.setdefault(progress.last.error_class, progress.last.error)
            show(progress)

        summary = anyio.run(work, on_progress)
    return Result(
        asdict(summary),
        lambda: _print_summary(summary, messages),
        exit_code=int(summary.failed > 0),
    )


@contextmanager
def _show_progress() -> Generator[ProgressCallback]:
    """Draw a progress bar on standard error if that is a terminal."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    with Bar(
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.description}"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    ) as bar:
        task = bar.add_task("", total=None)

        def on_progress(progress: Progress) -> None:
            description = ""
            if progress.failed:
                description = f"{progress.failed} failed"
            bar.update(task, total=progress.total, completed=progress.done, description=description)

        yield on_progress


def _print_summary(summary: Summary, messages: Mapping[str, str]) -> None:
    """Print the totals, and the first message of each kind of error."""
    counts = f"{summary.completed} of {summary.total} completed, {summary.failed} failed"
    if summary.skipped:
        counts += f", {summary.skipped} finished before"
    echo(counts)
    for kind, count in sorted(summary.errors.items()):
        echo(wrap_text(f"  {count} {kind}: {sanitize_text(messages[kind])}", indent="    "))
    tokens = f"{pluralize(summary.input_tokens, 'token')} in, {summary.output_tokens:,} out"
    cost = f"${summary.cost:.4f}"
    if summary.unpriced:
        cost += f" ({summary.unpriced} without a price)"
    echo(dim(f"[{tokens}, {cost}, {summary.seconds:.1f} s]"))
