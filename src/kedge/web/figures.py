"""The figures of the dashboard: from the responses of a range of time to tiles and charts. Pure."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from statistics import median, quantiles

from markupsafe import Markup

from kedge.planning import REASONS
from kedge.store import Incident, ResponseRow
from kedge.web.chains import is_fallback
from kedge.web.charts import Chart, Ranked, Series, draw, rank
from kedge.web.plans import HEALED
from kedge.web.views import Tile
from kedge.web.words import duration, money, number, share, size

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
_WELL = frozenset({"completed", "lost"})


@dataclass(frozen=True, slots=True)
class Counts:
    """What this process counted by itself, beside the store."""

    plan_seconds: float | None = None
    """How long finding an anchor took, on average."""
    call_ids: Mapping[str, int] | None = None
    """Tool calls by how their id was found."""


NO_COUNTS = Counts()


@dataclass(frozen=True, slots=True)
class Facts:
    """Everything that the dashboard is drawn from."""

    rows: Sequence[ResponseRow]
    since: float
    until: float
    incidents: Sequence[Incident] = ()
    counts: Counts = NO_COUNTS


def tiles(facts: Facts) -> tuple[Tile, ...]:
    """The figures at the top."""
    rows = facts.rows
    sent, saved = sum(r.sent_bytes for r in rows), sum(r.saved_bytes for r in rows)
    chained = sum(bool(row.anchor) for row in rows)
    fallbacks = sum(map(is_fallback, rows))
    fed, cached = _tokens(rows, "input_tokens"), _tokens(rows, "cached_tokens")
    firsts = [row.first_token_seconds for row in rows if row.first_token_seconds is not None]
    failed = sum(row.status not in _WELL for row in rows)
    costs = [row.cost for row in rows if row.cost is not None]
    blocks = sum(row.sent_blocks for row in rows)
    return (
        Tile("Requests", number(len(rows)), f"{share(chained, len(rows))} chained"),
        Tile("Average delta", _mean(blocks, len(rows), "blocks"), f"of {_full(rows)} on average"),
        Tile("Fallback rate", share(fallbacks, len(rows)), f"{fallbacks:,} of {len(rows):,}"),
        Tile("Not sent again", size(saved), f"{share(saved, sent + saved)} of full sends"),
        Tile("Cached tokens", share(cached, fed), f"of {number(fed)} input tokens"),
        Tile("First token", duration(median(firsts)) if firsts else "\N{EN DASH}", "median"),
        Tile("Finding the anchor", duration(facts.counts.plan_seconds), "on average, this process"),
        Tile(
            "Went wrong",
            number(failed),
            f"{sum(bool(row.healed) for row in rows)} healed, "
            f"{money(sum(costs)) if costs else 'no'} cost",
        ),
    )


def figures(facts: Facts) -> tuple[Markup, ...]:
    """The charts below."""
    rows = facts.rows
    places, columns = _buckets(rows, facts.since, facts.until)
    chained = [sum(bool(row.anchor) for row in column) for column in columns]
    full = [len(column) - some for column, some in zip(columns, chained, strict=True)]
    return (
        draw(
            Chart(
                "Requests",
                places,
                [Series("chained", chained), Series("in full", full)],
                end=NOW,
            )
        ),
        draw(
            Chart(
                "Bytes",
                places,
                [
                    Series("sent", [sum(r.sent_bytes for r in c) for c in columns]),
                    Series("not sent again", [sum(r.saved_bytes for r in c) for c in columns]),
                ],
                size,
                end=NOW,
            )
        ),
        draw(_latency(places, columns)),
        draw(
            Chart(
                "Input tokens",
                places,
                [
                    Series("cached", [_tokens(c, "cached_tokens") for c in columns]),
                    Series("not cached", [_uncached(c) for c in columns]),
                ],
                number,
                end=NOW,
            )
        ),
        rank("Fallbacks by reason", _fallbacks(rows), "Nothing had to be sent in full."),
        rank("Rejections and healings", _trouble(facts), "Nothing went wrong."),
        rank("Length of chains", _lengths(rows), "No chains yet."),
        rank("Tool calls by how their id was found", _calls(facts.counts), "No tool calls yet."),
    )


def _latency(places: Sequence[str], columns: Sequence[Sequence[ResponseRow]]) -> Chart:
    firsts = [
        [row.first_token_seconds for row in column if row.first_token_seconds is not None]
        for column in columns
    ]
    return Chart(
        "Time to the first token",
        places,
        [
            Series("median", [median(column) if column else None for column in firsts]),
            Series("95th percentile", [_high(column) for column in firsts]),
        ],
        duration,
        "lines",
        NOW,
    )


def _high(values: Sequence[float]) -> float | None:
    if len(values) < 2:
        return values[0] if values else None
    return quantiles(values, n=20, method="inclusive")[-1]


def _buckets(
    rows: Iterable[ResponseRow], since: float, until: float
) -> tuple[list[str], list[list[ResponseRow]]]:
    step = max(until - since, 1.0) / BUCKETS
    columns: list[list[ResponseRow]] = [[] for _ in range(BUCKETS)]
    for row in rows:
        place = int((row.created_at - since) / step)
        if 0 <= place <= BUCKETS:
            columns[min(place, BUCKETS - 1)].append(row)
    form = "%H:%M" if until - since <= 86_400 * 1.5 else "%d %b"
    starts = [datetime.fromtimestamp(since + step * n, UTC) for n in range(BUCKETS)]
    return [start.strftime(form) for start in starts], columns


def _tokens(rows: Iterable[ResponseRow], name: str) -> int:
    return sum(getattr(row, name) or 0 for row in rows)


def _uncached(rows: Sequence[ResponseRow]) -> int:
    return max(_tokens(rows, "input_tokens") - _tokens(rows, "cached_tokens"), 0)


def _full(rows: Sequence[ResponseRow]) -> str:
    whole = sum(row.sent_blocks + row.saved_blocks for row in rows)
    return f"{whole / len(rows):.1f}" if rows else "0"


def _mean(total: float, count: int, what: str) -> str:
    return f"{total / count:.1f} {what}" if count else "\N{EN DASH}"


def _fallbacks(rows: Iterable[ResponseRow]) -> list[Ranked]:
    reasons = Counter(row.reason for row in rows if is_fallback(row))
    words = {**REASONS, **HEALED}
    return [
        Ranked(reason, times, number(times), words.get(reason, ""))  # pyright: ignore[reportArgumentType, reportCallIssue]
        for reason, times in reasons.most_common()
    ]


def _trouble(facts: Facts) -> list[Ranked]:
    found = Counter(f"{each.kind}: {each.reason}" for each in facts.incidents)
    found.update(row.status for row in facts.rows if row.status not in _WELL)
    found.update({"lost": sum(row.status == "lost" for row in facts.rows)})
    return [Ranked(name, times, number(times)) for name, times in found.most_common(8) if times]


def _lengths(rows: Iterable[ResponseRow]) -> list[Ranked]:
    longest: dict[str, int] = {}
    for row in rows:
        longest[row.conversation] = max(longest.get(row.conversation, 0), row.depth)
    found = Counter(_length(depth) for depth in longest.values() if depth)
    names = [*(name for _, name in _LENGTHS), "32 and more"]
    return [Ranked(name, found[name], number(found[name])) for name in names if found[name]]


def _length(depth: int) -> str:
    return next((name for most, name in _LENGTHS if depth <= most), "32 and more")


def _calls(counts: Counts) -> list[Ranked]:
    found = counts.call_ids or {}
    return [Ranked(name, times, number(times)) for name, times in sorted(found.items()) if times]
