"""Build the dashboard: figures and charts, rendered for a request and again after every change."""

import asyncio
import math
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, NamedTuple
from urllib.parse import quote

from kedge import analytics
from kedge._internal.display import pluralize
from kedge.observe import snapshot
from kedge.server.sse import encode_data
from kedge.store.summaries import get_revision, list_summaries
from kedge.web.page_templates import render
from kedge.web.service import ConversationService

BUCKET_COUNT = 30
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


class Figures(NamedTuple):
    """The figures of one model or conversation, or of all together."""

    requests: float
    errors: float
    input_tokens: float
    output_tokens: float
    dollars: float
    priced: float
    unpriced: float


def build_series(buckets: Sequence[analytics.Bucket]) -> dict[str, dict[str, list[float | None]]]:
    """Return the series of each chart: one value per interval."""
    return {
        "requests": {
            "chained": [bucket.chained for bucket in buckets],
            "not chained": [
                bucket.requests - bucket.chained - bucket.refused for bucket in buckets
            ],
            "refused": [bucket.refused for bucket in buckets],
        },
        "bytes": {
            "sent": [bucket.sent_bytes for bucket in buckets],
            "saved": [bucket.saved_bytes for bucket in buckets],
        },
        "first_token": {
            "median": [bucket.latency.first_token_median for bucket in buckets],
            "95th percentile": [bucket.latency.first_token_p95 for bucket in buckets],
        },
        "tokens": {
            "cached": [bucket.tokens.cached for bucket in buckets],
            "not cached": [bucket.tokens.input - bucket.tokens.cached for bucket in buckets],
        },
        "cost": {"dollars": [bucket.cost.dollars for bucket in buckets]},
    }


def bucket_labels(buckets: Sequence[analytics.Bucket]) -> list[str]:
    """Return the labels of the time axis."""
    if not buckets:
        return []
    span = buckets[-1].end - buckets[0].start
    time_format = "%H:%M" if span <= 86_400 * 1.5 else "%d %b"
    return [datetime.fromtimestamp(bucket.start, UTC).strftime(time_format) for bucket in buckets]


def count_failures(stats: analytics.Analytics) -> list[analytics.Count]:
    """Return how often requests failed for good, were healed, or were answered without context or id."""
    sent = stats.requests
    return [
        *sent.failures,
        *(analytics.Count(f"healed: {healed.name}", healed.count) for healed in sent.healed),
        analytics.Count("answered without context", sent.forgotten),
        analytics.Count("without id", sent.without_id),
    ]


POLL_INTERVAL = 0.25
"""Seconds between two checks for changes and for the shutdown of the server."""
HEARTBEAT_TICKS = 60
"""After this number of checks without changes a comment is sent, to detect closed connections."""


async def build_dashboard(service: ConversationService, range_name: str) -> dict[str, Any]:
    """Return the values of the dashboard's template for a range that ends now."""
    view: dict[str, Any] = {"range": range_name, "seen": await read_change_token(service)}
    until = service.clock()
    selection = analytics.Selection(until - RANGES[range_name][1], math.nextafter(until, math.inf))
    stats = await analytics.analyze(service.store, selection)
    if not stats.requests.total:
        return {**view, "stats": None}
    buckets = await analytics.analyze_over_time(service.store, selection, buckets=BUCKET_COUNT)
    conversations = await analytics.analyze_conversations(
        service.store, selection, limit=MAX_CONVERSATIONS
    )
    named = await _name_conversations(service, conversations)
    planning_seconds: float | None = None
    call_ids: list[analytics.Count] = []
    if not service.store.namespace:  # the counters of the process include all users
        planning_seconds, call_ids = read_process_counts()
    return {
        **view,
        "stats": stats,
        "failures": count_failures(stats),
        "labels": bucket_labels(buckets),
        "series": build_series(buckets),
        "planning_seconds": planning_seconds,
        "call_ids": call_ids,
        "breakdowns": build_breakdowns(stats, named),
    }


async def _name_conversations(
    service: ConversationService, conversations: Sequence[analytics.ConversationStats]
) -> list[analytics.ConversationStats]:
    """Return conversations whose title, if they have none, is the beginning of their first message."""
    ids = [conversation.id for conversation in conversations]
    summaries, _ = await list_summaries(service.store, ids=ids, show="all")
    words = {summary.row.id: summary.first_words for summary in summaries}
    return [
        replace(conversation, title=conversation.title or words.get(conversation.id, ""))
        for conversation in conversations
    ]


BreakdownRow = tuple[str, Figures, str]
"""A row: its name, its figures and its link."""


def build_breakdowns(
    stats: analytics.Analytics, conversations: Sequence[analytics.ConversationStats]
) -> dict[str, list[BreakdownRow]]:
    """Build the tables of models and conversations; the rows of each add up to its last row."""
    sums = _read_figures(stats, stats.requests.total, stats.requests.failed)
    model_rows: list[BreakdownRow] = []
    for model in stats.models:
        name = f"{model.provider}:{model.model or 'unknown'}"
        model_rows.append((name, _read_figures(model, model.requests, model.failed), ""))

    rows: list[BreakdownRow] = []
    for conversation in conversations:
        url = f"/conversations/{quote(conversation.id, safe='')}"
        figures = _read_figures(conversation, conversation.requests, conversation.failed)
        rows.append((conversation.title or conversation.id, figures, url))
    others = stats.requests.conversations - len(rows)
    if others > 0:
        columns = zip(sums, *(figures for _, figures, _ in rows), strict=True)
        rest = Figures(*(max(whole - sum(parts), 0) for whole, *parts in columns))
        rows.append((pluralize(others, "other"), rest, ""))

    total = ("Total", sums, "")
    return {"Model": [*model_rows, total], "Conversation": [*rows, total]}


def _read_figures(
    stats: analytics.Analytics | analytics.ModelStats | analytics.ConversationStats,
    requests: int,
    failed: int,
) -> Figures:
    return Figures(
        requests=requests,
        errors=failed,
        input_tokens=stats.tokens.input,
        output_tokens=stats.tokens.output,
        dollars=stats.cost.dollars,
        priced=stats.cost.priced,
        unpriced=stats.cost.unpriced,
    )


def read_process_counts() -> tuple[float | None, list[analytics.Count]]:
    """Read the counters of this process: the mean time of planning, and tool calls by the source of their id."""
    metrics = snapshot()
    calls = metrics.get("tool_call_ids_total", {}).items()
    counts = [analytics.Count(labels[0][1], int(value)) for labels, (_, value) in calls]
    durations = metrics.get("responses_anchor_detection_duration_seconds", {}).values()
    count = sum(count for count, _ in durations)
    if not count:
        return None, counts
    return sum(seconds for _, seconds in durations) / count, counts


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
        if change_token != seen:
            seen = change_token
            idle_ticks = 0
            html = render("figures.html", view=await build_dashboard(service, range_name))
            yield b"event: figures\n" + encode_data(html)
        else:
            idle_ticks += 1
            if idle_ticks % HEARTBEAT_TICKS == 0:
                yield b": still here\n\n"
        await asyncio.sleep(POLL_INTERVAL)
