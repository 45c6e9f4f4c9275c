"""The figures of the dashboard: from what a store tells of a range of time to tiles and charts. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from markupsafe import Markup

from kedge.analytics import Analytics, Bucket, Count
from kedge.planning import REASONS
from kedge.web.charts import Chart, Ranked, Series, Show, draw, rank
from kedge.web.plans import HEALED
from kedge.web.views import Tile
from kedge.web.words import NOTHING, duration, money, number, share, size

BUCKETS = 30
NOW = "now"
RANGES: Mapping[str, tuple[str, float]] = {
    "15m": ("15 min", 900.0),
    "1h": ("1 h", 3600.0),
    "24h": ("24 h", 86_400.0),
    "7d": ("7 days", 7 * 86_400.0),
    "30d": ("30 days", 30 * 86_400.0),
}
"""The ranges that can be chosen: their name, and how many seconds they are."""
DEFAULT_RANGE = "24h"

_LENGTHS = ((1, "1"), (3, "2 to 3"), (7, "4 to 7"), (15, "8 to 15"), (31, "16 to 31"))
_LONGEST = "32 and more"
_WELL = frozenset({"completed"})
_WORDS: Mapping[str, str] = {**REASONS, **HEALED}


@dataclass(frozen=True, slots=True)
class Counts:
    """What this process counted by itself, beside the store."""

    plan_seconds: float | None = None
    """How long finding an anchor took, on average."""
    call_ids: Mapping[str, int] | None = None
    """Tool calls by how their id was found."""


def tiles(found: Analytics, counts: Counts) -> tuple[Tile, ...]:
    """The figures at the top."""
    sent, tokens = found.requests, found.tokens
    total = sent.total
    fallbacks = sum(each.count for each in sent.fallbacks)
    healed = sum(each.count for each in sent.healed)
    return (
        Tile("Requests", number(total), f"{share(sent.chained, total)} chained"),
        Tile(
            "Average delta",
            f"{sent.sent_blocks / total:.1f} blocks" if total else NOTHING,
            f"of {(sent.sent_blocks + sent.saved_blocks) / (total or 1):.1f} on average",
        ),
        Tile("Fallback rate", share(fallbacks, total), f"{fallbacks:,} of {total:,} sent in full"),
        Tile(
            "Not sent again",
            size(sent.saved_bytes),
            f"{share(sent.saved_bytes, sent.sent_bytes + sent.saved_bytes)} of full sends",
        ),
        Tile(
            "Cached tokens",
            share(tokens.cached, tokens.input),
            f"of {number(tokens.input)} input, {number(tokens.output)} output",
        ),
        Tile("First token", duration(found.latency.first_token_median), _slowest(found)),
        Tile("Finding the anchor", duration(counts.plan_seconds), "on average, in this process"),
        Tile("Went wrong", number(total - sent.succeeded), f"{healed} healed, {_cost(found)}"),
    )


def _slowest(found: Analytics) -> str:
    return f"median; 95 % within {duration(found.latency.first_token_p95)}"


def _cost(found: Analytics) -> str:
    return f"{money(found.cost.dollars)} spent" if found.cost.priced else "no cost known"


def figures(found: Analytics, buckets: Sequence[Bucket], counts: Counts) -> tuple[Markup, ...]:
    """The charts below."""
    return (
        _stacked(
            buckets,
            "Requests",
            {
                "chained": [each.chained for each in buckets],
                "in full": [each.requests - each.chained for each in buckets],
            },
            number,
        ),
        _stacked(
            buckets,
            "Bytes",
            {
                "sent": [each.sent_bytes for each in buckets],
                "not sent again": [each.saved_bytes for each in buckets],
            },
            size,
        ),
        _latency(buckets),
        _stacked(
            buckets,
            "Input tokens",
            {
                "cached": [each.tokens.cached for each in buckets],
                "not cached": [each.tokens.input - each.tokens.cached for each in buckets],
            },
            number,
        ),
        rank(
            "Fallbacks by reason",
            _ranked(found.requests.fallbacks),
            "Nothing had to be sent in full.",
        ),
        rank("Rejections and healings", _trouble(found), "Nothing went wrong."),
        rank("Length of chains", _lengths(found), "No chains yet."),
        rank("Tool calls by how their id was found", _calls(counts), "No tool calls yet."),
    )


def _stacked(
    buckets: Sequence[Bucket], title: str, series: Mapping[str, Sequence[float]], show: Show
) -> Markup:
    named = [Series(name, values) for name, values in series.items()]
    return draw(Chart(title, places(buckets), named, show, end=NOW))


def _latency(buckets: Sequence[Bucket]) -> Markup:
    return draw(
        Chart(
            "Time to the first token",
            places(buckets),
            [
                Series("median", [each.latency.first_token_median for each in buckets]),
                Series("95th percentile", [each.latency.first_token_p95 for each in buckets]),
            ],
            duration,
            "lines",
            NOW,
        )
    )


def places(buckets: Sequence[Bucket]) -> list[str]:
    """The names of the pieces of time."""
    whole = buckets[-1].end - buckets[0].start if buckets else 0
    form = "%H:%M" if whole <= 86_400 * 1.5 else "%d %b"
    return [datetime.fromtimestamp(each.start, UTC).strftime(form) for each in buckets]


def _ranked(counts: Sequence[Count]) -> list[Ranked]:
    ordered = sorted(counts, key=lambda each: -each.count)
    return [
        Ranked(each.name, each.count, number(each.count), _WORDS.get(each.name, ""))
        for each in ordered
    ]


def _trouble(found: Analytics) -> list[Ranked]:
    sent = found.requests
    counts = [each for each in sent.statuses if each.name not in _WELL]
    counts += [Count(f"healed: {each.name}", each.count) for each in sent.healed]
    counts += [
        Count("forgotten by the server", sent.forgotten),
        Count("without an id", sent.without_id),
    ]
    return _ranked([each for each in counts if each.count])


def _lengths(found: Analytics) -> list[Ranked]:
    sums = dict.fromkeys([*(name for _, name in _LENGTHS), _LONGEST], 0)
    for length, times in found.chains.lengths:
        sums[next((name for most, name in _LENGTHS if length <= most), _LONGEST)] += times
    return [Ranked(name, times, number(times)) for name, times in sums.items() if times]


def _calls(counts: Counts) -> list[Ranked]:
    found = counts.call_ids or {}
    return [Ranked(name, times, number(times)) for name, times in sorted(found.items()) if times]
