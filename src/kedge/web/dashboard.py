"""Build the dashboard: figures and charts, rendered for a request and again after every change."""

import asyncio
import json
import math
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

from kedge.analytics import (
    Analytics,
    Bucket,
    ConversationStats,
    Count,
    ModelStats,
    Selection,
    analyze,
    analyze_conversations,
    analyze_over_time,
)
from kedge.observe import snapshot
from kedge.planning import REASONS
from kedge.planning.explain import MODE_REASONS
from kedge.store.records import has_failed
from kedge.store.summaries import get_revision, list_summaries
from kedge.text.display import (
    NO_VALUE,
    format_cost,
    format_duration,
    format_number,
    format_percent,
    format_size,
    pluralize,
)
from kedge.web.page_templates import render
from kedge.web.service import ConversationService
from kedge.web.svg import Chart, RankedBar, Ranking

BUCKET_COUNT = 30
NOW_LABEL = "now"
RANGES: Mapping[str, tuple[str, float]] = {
    "15m": ("15 min", 900.0),
    "1h": ("1 h", 3600.0),
    "24h": ("24 h", 86_400.0),
    "7d": ("7 days", 7 * 86_400.0),
    "30d": ("30 days", 30 * 86_400.0),
}
"""The time ranges: title and seconds."""
DEFAULT_RANGE = "24h"
MAX_CONVERSATIONS = 10
"""The number of conversations in the breakdown; the others are one row."""

_REASON_TEXTS: Mapping[str, str] = {**REASONS, **MODE_REASONS}


@dataclass(frozen=True, slots=True)
class Tile:
    """One figure of the dashboard."""

    name: str
    value: str
    hint: str
    meaning: str


@dataclass(frozen=True, slots=True)
class BreakdownRow:
    """The figures of one model or conversation, or of all together."""

    name: str
    requests: int
    errors: int
    input_tokens: int
    output_tokens: int
    cost: str
    url: str = ""


@dataclass(frozen=True, slots=True)
class Breakdown:
    """A table of rows that add up to the last one."""

    title: str
    heading: str
    """The heading of the column of names."""
    rows: tuple[BreakdownRow, ...]


@dataclass(frozen=True, slots=True)
class ProcessCounts:
    """Counters of this process, which are not in the store."""

    plan_seconds: float | None = None
    """The mean time to plan a request."""
    call_ids: Mapping[str, int] | None = None
    """Tool calls by the source of their id."""


def build_tiles(stats: Analytics, counts: ProcessCounts) -> tuple[Tile, ...]:
    """Build the figures at the top."""
    sent, tokens = stats.requests, stats.tokens
    total = sent.total
    fallbacks = sum(each.count for each in sent.fallbacks)
    healed = sum(each.count for each in sent.healed)
    spent = f"{format_cost(stats.cost.dollars)} spent" if stats.cost.priced else "cost unknown"
    return (
        Tile(
            "Requests",
            format_number(total),  # its parts add up to it
            ", ".join(f"{each.count:,} {each.name}" for each in sent.sends),
            "Requests to models in this range, by how much of the conversation was sent",
        ),
        Tile(
            "Average delta",
            f"{sent.sent_blocks / total:.1f} blocks" if total else NO_VALUE,
            f"of {(sent.sent_blocks + sent.saved_blocks) / (total or 1):.1f} on average",
            "The mean number of blocks in a request; the server had the others",
        ),
        Tile(
            "Fallback rate",
            format_percent(fallbacks, total),
            f"{fallbacks:,} of {total:,} sent in full, although a response was stored",
            "How often a stored response existed but could not be continued",
        ),
        Tile(
            "Bytes saved",
            format_size(sent.saved_bytes),
            f"{format_percent(sent.saved_bytes, sent.sent_bytes + sent.saved_bytes)} of full requests",
            "Bytes that were not uploaded, because the server had stored them",
        ),
        Tile(
            "Cached tokens",
            format_percent(tokens.cached, tokens.input),
            f"of {format_number(tokens.input)} input, {_describe_cache(stats)}",
            "The share of the input tokens that the provider read from its prompt cache",
        ),
        Tile(
            "First token",
            format_duration(stats.latency.first_token_median),
            f"median; 95 % within {format_duration(stats.latency.first_token_p95)}",
            "The time from the request to the first token of the answer",
        ),
        Tile(
            "Planning time",
            format_duration(counts.plan_seconds),
            "mean, in this process",
            "The time to decide which blocks a request sends",
        ),
        Tile(
            "Errors",
            format_number(sent.failed),
            f"{healed} healed, {spent}",
            "Requests that failed; healed ones were sent again in full and answered",
        ),
    )


def _describe_cache(stats: Analytics) -> str:
    cache = stats.cache
    predicted = (
        f"{format_number(cache.predicted)} predicted" if cache.predictions else "no prediction"
    )
    return f"{predicted}, {format_cost(cache.saved)} saved" if cache.saved else predicted


CHARTS: tuple[tuple[Chart, Mapping[str, Callable[[Bucket], float | None]]], ...] = (
    (
        Chart(
            "Requests",
            "Requests in each interval; chained ones continued a stored response",
            format_number,
        ),
        {
            "chained": lambda each: each.chained,
            "not chained": lambda each: each.requests - each.chained,
        },
    ),
    (
        Chart(
            "Bytes",
            "Bytes of the requests in each interval, and bytes that chaining saved",
            format_size,
        ),
        {"sent": lambda each: each.sent_bytes, "saved": lambda each: each.saved_bytes},
    ),
    (
        Chart(
            "Time to first token",
            "The time from a request to the first token of its answer",
            format_duration,
            "lines",
        ),
        {
            "median": lambda each: each.latency.first_token_median,
            "95th percentile": lambda each: each.latency.first_token_p95,
        },
    ),
    (
        Chart(
            "Input tokens",
            "Input tokens that the provider counted, by whether its prompt cache had them",
            format_number,
        ),
        {
            "cached": lambda each: each.tokens.cached,
            "not cached": lambda each: each.tokens.input - each.tokens.cached,
        },
    ),
    (
        Chart("Cost", "The cost of the requests whose model has a known price", format_cost),
        {"dollars": lambda each: each.cost.dollars},
    ),
)
"""The charts of the intervals, and how the series of each are read."""


def build_charts(
    stats: Analytics, buckets: Sequence[Bucket], counts: ProcessCounts
) -> tuple[Chart | Ranking, ...]:
    """Build the charts."""
    labels = bucket_labels(buckets)
    calls = [Count(*each) for each in (counts.call_ids or {}).items()]
    return (
        *(
            replace(
                chart,
                labels=labels,
                series={name: [read(each) for each in buckets] for name, read in series.items()},
                end_label=NOW_LABEL,
            )
            for chart, series in CHARTS
        ),
        Ranking(
            "Fallbacks by reason",
            "Why requests were sent in full, although a response was stored",
            _rank_counts(stats.requests.fallbacks),
            "No fallbacks.",
        ),
        Ranking(
            "Errors and recoveries",
            "Requests that failed, and requests that were sent again",
            _rank_failures(stats),
            "No errors.",
        ),
        Ranking(
            "Chain length",
            "How many requests continued each other without a full one between them",
            [_to_bar(each) for each in stats.chains.bins],
            "No chains yet.",
        ),
        Ranking(
            "Tool calls by source of their id",
            "Who made the id by which a tool call and its result belong together",
            _rank_counts(calls),
            "No tool calls in this process.",
        ),
        Ranking(
            "Tool results by how they match their calls",
            "Whether each result of a tool was sent with the id of its call",
            _rank_counts(stats.requests.results),
            "No tool results.",
        ),
    )


def bucket_labels(buckets: Sequence[Bucket]) -> list[str]:
    """Return the labels of the time axis."""
    span = buckets[-1].end - buckets[0].start if buckets else 0
    form = "%H:%M" if span <= 86_400 * 1.5 else "%d %b"
    return [datetime.fromtimestamp(each.start, UTC).strftime(form) for each in buckets]


def _to_bar(each: Count) -> RankedBar:
    shown = format_number(each.count)
    return RankedBar(each.name, each.count, shown, _REASON_TEXTS.get(each.name, ""))


def _rank_counts(counts: Sequence[Count]) -> list[RankedBar]:
    ordered = sorted(counts, key=lambda each: -each.count)
    return [_to_bar(each) for each in ordered if each.count]


def _rank_failures(stats: Analytics) -> list[RankedBar]:
    sent = stats.requests
    counts = [each for each in sent.statuses if has_failed(each.name)]
    counts += [Count(f"healed: {each.name}", each.count) for each in sent.healed]
    counts += [
        Count("answered without context", sent.forgotten),
        Count("without id", sent.without_id),
    ]
    return _rank_counts(counts)


POLL_INTERVAL = 0.25
"""Seconds between two checks for changes and for the shutdown of the server."""
HEARTBEAT_TICKS = 60
"""After this number of checks without changes a comment is sent, to detect closed connections."""


async def build_dashboard(service: ConversationService, range_name: str) -> dict[str, Any]:
    """Return the values of the dashboard's template for a range that ends now."""
    view: dict[str, Any] = {"range": range_name, "seen": await read_change_token(service)}
    until = service.clock()
    selection = Selection(until - RANGES[range_name][1], math.nextafter(until, math.inf))
    stats = await analyze(service.store, selection)
    if not stats.requests.total:
        return {**view, "tiles": ()}
    buckets = await analyze_over_time(service.store, selection, buckets=BUCKET_COUNT)
    # The counters of the process include all users.
    counts = ProcessCounts() if service.store.namespace else read_process_counts()
    conversations = await analyze_conversations(service.store, selection, limit=MAX_CONVERSATIONS)
    return {
        **view,
        "tiles": build_tiles(stats, counts),
        "charts": build_charts(stats, buckets, counts),
        "breakdowns": build_breakdowns(stats, await _name_conversations(service, conversations)),
    }


async def _name_conversations(
    service: ConversationService, conversations: Sequence[ConversationStats]
) -> list[ConversationStats]:
    """Return conversations whose title, if they have none, is the beginning of their first message."""
    ids = [each.id for each in conversations]
    rows, _ = await list_summaries(service.store, ids=ids, show="all")
    words = {each.row.id: each.first_words for each in rows}
    return [replace(each, title=each.title or words.get(each.id, "")) for each in conversations]


def build_breakdowns(
    stats: Analytics, conversations: Sequence[ConversationStats]
) -> tuple[Breakdown, ...]:
    """Build the tables of models and conversations; the rows of each add up to its last row."""
    sums = _list_figures(stats.requests.total, stats.requests.failed, stats)
    total = _build_row("Total", sums)
    models = [
        _build_row(
            f"{each.provider}:{each.model or 'unknown'}",
            _list_figures(each.requests, each.failed, each),
        )
        for each in stats.models
    ]
    figures = [_list_figures(each.requests, each.failed, each) for each in conversations]
    listed = [
        _build_row(each.title or each.id, own, f"/conversations/{quote(each.id, safe='')}")
        for each, own in zip(conversations, figures, strict=True)
    ]
    others = stats.requests.conversations - len(listed)
    if others > 0:
        rest = [whole - sum(parts) for whole, *parts in zip(sums, *figures, strict=True)]
        listed.append(_build_row(pluralize(others, "other"), rest))
    return (
        Breakdown("By model", "Model", (*models, total)),
        Breakdown("By conversation", "Conversation", (*listed, total)),
    )


def _list_figures(
    requests: int, failed: int, stats: Analytics | ModelStats | ConversationStats
) -> list[float]:
    tokens, cost = stats.tokens, stats.cost
    costs = (cost.dollars, cost.priced, cost.unpriced)
    return [requests, failed, tokens.input, tokens.output, *costs]


def _build_row(name: str, figures: Sequence[float], url: str = "") -> BreakdownRow:
    requests, errors, inputs, outputs, priced, unpriced = map(int, (*figures[:4], *figures[5:]))
    cost = _format_known_cost(max(figures[4], 0.0), priced, unpriced)
    return BreakdownRow(name, requests, errors, inputs, outputs, cost, url)


def _format_known_cost(dollars: float, priced: int, unpriced: int) -> str:
    if not priced:
        return NO_VALUE
    rest = f" + {unpriced:,} without a price" if unpriced else ""
    return f"{format_cost(dollars)}{rest}"


def read_process_counts() -> ProcessCounts:
    """Read the counters of this process."""
    metrics = snapshot()
    plans = metrics.get("responses_anchor_detection_duration_seconds", {}).values()
    times, total = sum(each[0] for each in plans), sum(each[1] for each in plans)
    calls = metrics.get("tool_call_ids_total", {})
    return ProcessCounts(
        total / times if times else None,
        {labels[0][1]: int(value) for labels, (_, value) in calls.items()},
    )


async def read_change_token(service: ConversationService) -> str:
    """Return a token that changes with every response or incident."""
    return "-".join(map(str, await get_revision(service.store)))


async def iter_figures(
    service: ConversationService, range_name: str, seen: str, is_stopping: Callable[[], bool]
) -> AsyncGenerator[bytes]:
    """Yield the rendered figures as server-sent events; ``seen`` is the page's last change token."""
    yield b"retry: 1000\n\n"
    idle_ticks = 0
    while not is_stopping():
        change_token = await read_change_token(service)
        idle_ticks = 0 if change_token != seen else idle_ticks + 1
        if change_token != seen:
            seen = change_token
            html = render("figures.html", view=await build_dashboard(service, range_name))
            yield b"event: figures\ndata: " + json.dumps(html).encode() + b"\n\n"
        elif idle_ticks % HEARTBEAT_TICKS == 0:
            yield b": still here\n\n"
        await asyncio.sleep(POLL_INTERVAL)
