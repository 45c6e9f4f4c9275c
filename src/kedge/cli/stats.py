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
    _print_bars("Fallbacks by reason", stats.requests.fallbacks)
    _print_bars("Healed by reason", stats.requests.healed)
    _print_bars("Chains by length", stats.chains.bins)
    print_table(MODEL_HEADERS, map(_list_cells, stats.models), right=MODEL_HEADERS[2:])


def render_sparkline(values: Iterable[float]) -> str:
    """Draw values as a line of blocks; zero is blank, any other value is visible."""
    heights = list(values)
    maximum = max(heights, default=0)
    top = len(SPARK_BLOCKS) - 1
    line = ""
    for height in heights:
        level = 0
        if height:
            level = max(round(height / maximum * top), 1)
        line += SPARK_BLOCKS[level]
    return line


def _print_rows(rows: Sequence[tuple[str, str]]) -> None:
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        echo(f"{dim(name.ljust(width))}  {value}")


def _list_figures(stats: analytics.Analytics) -> list[tuple[str, str]]:
    requests = stats.requests
    chains = stats.chains
    branching = stats.branching
    cache = stats.cache
    statuses = ", ".join(f"{part.count} {sanitize_text(part.name)}" for part in requests.statuses)
    results = ", ".join(f"{part.count} {part.name}" for part in requests.results)
    conversations = pluralize(requests.conversations, "conversation")
    sent = f"{format_size(requests.sent_bytes)}; {format_size(requests.saved_bytes)} saved"
    cached = f"{stats.tokens.input} in ({_format_share(stats.tokens.cached_share)} cached)"
    saved = f"{format_cost(cache.saved)} saved"
    points = pluralize(branching.points, "point")
    forks = pluralize(branching.forks, "fork")
    chained = f"{requests.chained} ({_format_share(requests.chained_share)})"
    return [
        ("requests", f"{requests.total} in {conversations} ({statuses})"),
        ("answered", _format_share(requests.success_rate)),
        ("chained", f"{chained}, {requests.full} in full"),
        ("failed", f"{requests.failed}; {requests.resent} sent again"),
        ("refused", f"{requests.refused}; {requests.forgotten} answered without context"),
        ("without id", str(requests.without_id)),
        ("tool results", results),
        ("chains", f"{chains.count}, mean {chains.mean or 0:.1f}, longest {chains.longest}"),
        ("branches", f"{branching.branches} at {points}, {forks}"),
        ("sent", f"{sent} ({_format_share(requests.saved_share)})"),
        ("tokens", f"{cached}, {stats.tokens.output} out"),
        ("cache", f"{cache.cached} cached of {cache.predicted} predicted, {saved}"),
        ("cost", _format_cost(stats.cost)),
        ("latency", _format_latency(stats.latency)),
    ]


def _format_latency(latency: analytics.Latency) -> str:
    if latency.median is None:
        return "no answers"
    return f"median {format_duration(latency.median)}, 95 % {format_duration(latency.p95)}"


def _list_timelines(buckets: Sequence[analytics.Bucket]) -> list[tuple[str, str]]:
    timelines: dict[str, list[float]] = {
        "requests": [bucket.requests for bucket in buckets],
        "chained": [bucket.chained for bucket in buckets],
        "tokens": [bucket.tokens.input + bucket.tokens.output for bucket in buckets],
        "latency": [bucket.latency.median or 0.0 for bucket in buckets],
    }
    return [
        (name, click.style(render_sparkline(values), fg="cyan").rstrip())
        for name, values in timelines.items()
    ]


def _print_bars(title: str, counts: Sequence[analytics.Count]) -> None:
    if not counts:
        return
    maximum = max(part.count for part in counts)
    digits = len(str(maximum))
    width = max(len(title), *(len(part.name) for part in counts))
    echo()
    echo(click.style(title, bold=True))
    for part in counts:
        label = dim(sanitize_text(part.name).ljust(width))
        bar = "█" * max(round(part.count / maximum * BAR_WIDTH), 1)
        echo(f"{label}  {part.count:<{digits}}  {click.style(bar, fg='cyan')}")


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
    if share is None:
        return NO_VALUE
    return format_percent(share, 1)


def _format_cost(cost: analytics.Cost) -> str:
    text = format_cost(cost.dollars)
    if cost.unpriced:
        text += f" + {cost.unpriced} unpriced"
    return text


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
    stats = await analytics.analyze(store, selection)
    timeline = await analytics.analyze_over_time(store, selection, buckets=buckets)
    value = {**asdict(stats), "over_time": [asdict(bucket) for bucket in timeline]}
    return Result(value, lambda: print_stats(stats, timeline))
