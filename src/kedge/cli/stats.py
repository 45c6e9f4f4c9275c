"""``kedge stats``: show requests, tokens, cost and latency of a store, with small charts."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

import click

from kedge import analytics
from kedge._internal.display import (
    NO_VALUE,
    format_cost,
    format_duration,
    format_percent,
    format_size,
    pluralize,
    sanitize_text,
)
from kedge.cli.base import Result, default_option, dim, echo, kedge_command, print_table
from kedge.cli.store_options import find_conversation, time_options, with_store
from kedge.store import Store

SPARK_BLOCKS = " ▁▂▃▄▅▆▇█"
BAR_WIDTH = 24
MODEL_HEADERS = ("provider", "model", "requests", "answered", "median", "95 %", "tokens", "cost")


def print_stats(stats: analytics.Analytics, buckets: Sequence[analytics.Bucket]) -> None:
    """Print all statistics and charts."""
    if not stats.requests.total:
        echo("No requests in this range.")
        return
    _print_rows(_list_figures(stats))
    if len(buckets) > 1:
        echo()
        _print_rows(_list_timelines(buckets))
    for title, counts in (
        ("Fallbacks by reason", stats.requests.fallbacks),
        ("Healed by reason", stats.requests.healed),
        ("Chains by length", stats.chains.bins),
    ):
        if counts:
            _print_bars(title, counts)
    print_table(MODEL_HEADERS, map(_list_cells, stats.models), right=MODEL_HEADERS[2:])


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


def _print_rows(rows: Sequence[tuple[str, str]]) -> None:
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        echo(f"{dim(name.ljust(width))}  {value}")


def _list_figures(stats: analytics.Analytics) -> list[tuple[str, str]]:
    requests, chains, branching = stats.requests, stats.chains, stats.branching
    statuses = ", ".join(f"{each.count} {sanitize_text(each.name)}" for each in requests.statuses)
    conversations = pluralize(requests.conversations, "conversation")
    sent = f"{format_size(requests.sent_bytes)}; {format_size(requests.saved_bytes)} saved"
    cached = f"{stats.tokens.input} in ({_format_share(stats.tokens.cached_share)} cached)"
    cache, latency = stats.cache, stats.latency
    saved = f"{format_cost(cache.saved)} saved"
    points, forks = pluralize(branching.points, "point"), pluralize(branching.forks, "fork")
    chained = f"{requests.chained} ({_format_share(requests.chained_share)})"
    times = f"median {format_duration(latency.median)}, 95 % {format_duration(latency.p95)}"
    return [
        ("requests", f"{requests.total} in {conversations} ({statuses})"),
        ("answered", _format_share(requests.success_rate)),
        ("chained", f"{chained}, {requests.full} in full"),
        ("failed", f"{requests.failed}; {requests.resent} sent again"),
        ("refused", f"{requests.refused}; {requests.forgotten} answered without context"),
        ("without id", str(requests.without_id)),
        ("tool results", ", ".join(f"{each.count} {each.name}" for each in requests.results)),
        ("chains", f"{chains.count}, mean {chains.mean or 0:.1f}, longest {chains.longest}"),
        ("branches", f"{branching.branches} at {points}, {forks}"),
        ("sent", f"{sent} ({_format_share(requests.saved_share)})"),
        ("tokens", f"{cached}, {stats.tokens.output} out"),
        ("cache", f"{cache.cached} cached of {cache.predicted} predicted, {saved}"),
        ("cost", _format_cost(stats.cost)),
        ("latency", "no answers" if latency.median is None else times),
    ]


def _list_timelines(buckets: Sequence[analytics.Bucket]) -> list[tuple[str, str]]:
    values = {
        "requests": [each.requests for each in buckets],
        "chained": [each.chained for each in buckets],
        "tokens": [each.tokens.input + each.tokens.output for each in buckets],
        "latency": [each.latency.median or 0.0 for each in buckets],
    }
    return [
        (name, click.style(render_sparkline(each), fg="cyan").rstrip())
        for name, each in values.items()
    ]


def _print_bars(title: str, counts: Sequence[analytics.Count]) -> None:
    maximum = max(each.count for each in counts)
    bars = ["█" * max(round(each.count / maximum * BAR_WIDTH), 1) for each in counts]
    echo()
    echo(click.style(title, bold=True))
    width = max(len(title), *(len(each.name) for each in counts))
    digits = len(str(maximum))
    for each, bar in zip(counts, bars, strict=True):
        label = dim(sanitize_text(each.name).ljust(width))
        echo(f"{label}  {each.count:<{digits}}  {click.style(bar, fg='cyan')}")


def _list_cells(model: analytics.ModelStats) -> tuple[object, ...]:
    return (
        sanitize_text(model.provider),
        sanitize_text(model.model) or "?",
        model.requests,
        _format_share(model.success_rate),
        format_duration(model.latency.median),
        format_duration(model.latency.p95),
        model.tokens.input + model.tokens.output,
        _format_cost(model.cost),
    )


def _format_share(share: float | None) -> str:
    return NO_VALUE if share is None else format_percent(share, 1)


def _format_cost(cost: analytics.Cost) -> str:
    known = format_cost(cost.dollars)
    return f"{known} + {cost.unpriced} unpriced" if cost.unpriced else known


@kedge_command("stats")
@time_options
@click.option("--model", default="", help="Only this model.")
@click.option("--provider", default="", help="Only this provider.")
@click.option("--conversation", help="Only this conversation.")
@default_option("--buckets", 24, click.IntRange(1, 1000), "Intervals of the charts.")
@with_store(may_miss=True)
async def command(store: Store, conversation: str | None, buckets: int, **members: Any) -> Result:
    """Show chains, fallbacks, tokens, cost and latency over a time range."""
    if conversation is not None:  # an empty name, such as of an unset variable, is not all of them
        members["conversation"] = (await find_conversation(store, conversation)).id
    selection = analytics.Selection(**members)
    found = await analytics.analyze(store, selection)
    pieces = await analytics.analyze_over_time(store, selection, buckets=buckets)
    values = {**asdict(found), "over_time": [asdict(each) for each in pieces]}
    return Result(values, lambda: print_stats(found, pieces))
