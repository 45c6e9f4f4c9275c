"""``kedge stats``: show requests, tokens, cost and latency of a store, with small charts."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kedge.analytics import (
    Analytics,
    Bucket,
    ModelStats,
    Selection,
    analyze,
    analyze_over_time,
)
from kedge.cli.base import Result, kedge_command
from kedge.cli.store_options import (
    find_conversation,
    run_with_store,
    store_option,
    time_options,
)
from kedge.store import Store
from kedge.text.display import (
    NO_VALUE,
    format_cost,
    format_duration,
    format_percent,
    format_size,
    pluralize,
    sanitize_text,
)

SPARK_BLOCKS = " ▁▂▃▄▅▆▇█"
BAR_WIDTH = 24
TABLE_WIDTH = 10_000
"""The maximum width of a table: names of models are not truncated, a terminal wraps long lines."""


def print_stats(stats: Analytics, buckets: Sequence[Bucket]) -> None:
    """Print all statistics and charts."""
    console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True, width=TABLE_WIDTH)
    if not stats.requests.total:
        console.print("No requests in this range.")
        return
    console.print(_build_overview(stats))
    if len(buckets) > 1:
        console.print(_build_timeline(buckets))
    for title, counts in (
        ("Fallbacks by reason", stats.requests.fallbacks),
        ("Healed by reason", stats.requests.healed),
    ):
        if counts:
            console.print(_build_bars(title, [(each.name, each.count) for each in counts]))
    lengths = _bin_lengths(stats.chains.lengths)
    if lengths:
        console.print(_build_bars("Chains by length", lengths))
    console.print(_build_models(stats.models))


def render_sparkline(values: Iterable[float]) -> str:
    """Draw values as a line of blocks; zero is blank, any other value is visible."""
    listed = list(values)
    maximum = max(listed, default=0)
    if not maximum:
        return " " * len(listed)
    top = len(SPARK_BLOCKS) - 1
    return "".join(
        SPARK_BLOCKS[max(round(each / maximum * top), 1 if each else 0)] for each in listed
    )


def _build_overview(stats: Analytics) -> Table:
    table = Table.grid(padding=(0, 2))
    requests, chains, branching = stats.requests, stats.chains, stats.branching
    statuses = ", ".join(f"{each.count} {sanitize_text(each.name)}" for each in requests.statuses)
    sent = f"{format_size(requests.sent_bytes)}; {format_size(requests.saved_bytes)} saved"
    cached = f"{stats.tokens.input} in ({_format_share(stats.tokens.cached_share)} cached)"
    cache, saved = stats.cache, format_cost(stats.cache.saved)
    points, forks = pluralize(branching.points, "point"), pluralize(branching.forks, "fork")
    chained = f"{requests.chained} ({_format_share(requests.chained_share)})"
    rows = (
        (
            "requests",
            f"{requests.total} in {pluralize(requests.conversations, 'conversation')} ({statuses})",
        ),
        ("answered", _format_share(requests.success_rate)),
        ("chained", f"{chained}, {requests.full} in full"),
        ("rejected", f"{requests.rejections}; {requests.forgotten} answered without context"),
        ("without id", str(requests.without_id)),
        ("tool results", ", ".join(f"{each.count} {each.name}" for each in requests.results)),
        ("chains", f"{chains.count}, mean {chains.mean or 0:.1f}, longest {chains.longest}"),
        ("branches", f"{branching.branches} at {points}, {forks}"),
        ("sent", f"{sent} ({_format_share(requests.saved_share)})"),
        ("tokens", f"{cached}, {stats.tokens.output} out"),
        ("cache", f"{cache.cached} cached of {cache.predicted} predicted, {saved} saved"),
        ("cost", _format_cost(stats.cost.dollars, stats.cost.unpriced)),
        (
            "latency",
            f"median {format_duration(stats.latency.median)}, 95 % {format_duration(stats.latency.p95)}",
        ),
    )
    for name, value in rows:
        table.add_row(Text(name, style="dim"), value)
    return table


def _build_timeline(buckets: Sequence[Bucket]) -> Table:
    table = Table.grid(padding=(0, 2))
    rows = (
        ("requests", [float(each.requests) for each in buckets]),
        ("chained", [float(each.chained) for each in buckets]),
        ("tokens", [float(each.tokens.input + each.tokens.output) for each in buckets]),
        ("latency", [each.latency.median or 0.0 for each in buckets]),
    )
    table.add_row("")
    for name, values in rows:
        table.add_row(Text(name, style="dim"), Text(render_sparkline(values), style="cyan"))
    return table


def _build_bars(title: str, counts: Sequence[tuple[str, int]]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_row("")
    table.add_row(Text(title, style="bold"))
    maximum = max((count for _, count in counts), default=1)
    for name, count in counts:
        bar = "█" * max(round(count / maximum * BAR_WIDTH), 1)
        label = Text(sanitize_text(name), style="dim")
        table.add_row(label, str(count), Text(bar, style="cyan"))
    return table


def _build_models(models: Sequence[ModelStats]) -> Table:
    table = Table(box=None, padding=(0, 1), header_style="dim")
    for name in ("provider", "model", "requests", "answered", "median", "95 %", "tokens", "cost"):
        justify = "left" if name in ("provider", "model") else "right"
        table.add_column(name, justify=justify)
    for each in models:
        table.add_row(
            sanitize_text(each.provider),
            sanitize_text(each.model) or "?",
            str(each.requests),
            _format_share(each.success_rate),
            format_duration(each.latency.median),
            format_duration(each.latency.p95),
            str(each.tokens.input + each.tokens.output),
            _format_cost(each.cost.dollars, each.cost.unpriced),
        )
    return table


def _bin_lengths(lengths: Sequence[tuple[int, int]]) -> list[tuple[str, int]]:
    """Group lengths into bins of doubling width: 1, 2, 3-4, 5-8 and so on."""
    bins: dict[int, int] = {}
    for length, count in lengths:
        power = (length - 1).bit_length()
        bins[power] = bins.get(power, 0) + count
    shown: list[tuple[str, int]] = []
    for power, count in sorted(bins.items()):
        low, high = (2 ** (power - 1) + 1 if power else 1), 2**power
        shown.append((str(high) if low == high else f"{low}-{high}", count))
    return shown


def _format_share(share: float | None) -> str:
    return NO_VALUE if share is None else format_percent(share, 1)


def _format_cost(dollars: float, unpriced: int) -> str:
    known = format_cost(dollars)
    return f"{known} + {unpriced} unpriced" if unpriced else known


@kedge_command("stats")
@time_options
@click.option("--model", default="", help="Only this model.")
@click.option("--provider", default="", help="Only this provider.")
@click.option("--conversation", help="Only this conversation.")
@click.option(
    "--buckets",
    default=24,
    show_default=True,
    type=click.IntRange(1, 1000),
    help="Intervals of the charts.",
)
@store_option
def command(
    *,
    since: float | None,
    until: float | None,
    model: str,
    provider: str,
    conversation: str | None,
    buckets: int,
) -> Result:
    """Show chains, fallbacks, tokens, cost and latency over a time range."""

    async def work(opened: Store) -> tuple[Analytics, tuple[Bucket, ...]]:
        chosen = ""
        if (
            conversation is not None
        ):  # an empty name, such as of an unset variable, is not all of them
            chosen = (await find_conversation(opened, conversation)).id
        selection = Selection(since, until, model, provider, chosen)
        found = await analyze(opened, selection)
        return found, await analyze_over_time(opened, selection, buckets=buckets)

    found, pieces = run_with_store(work, may_miss=True)
    values = {**asdict(found), "over_time": [asdict(each) for each in pieces]}
    return Result(values, lambda: print_stats(found, pieces))
