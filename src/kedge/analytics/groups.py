"""Select responses, and groups of them: from the maintained sums of complete days, else from single responses.

A selection consists of complete days, whose sums the store maintains, and of parts of at most two days. Only the
responses of those parts are read. For one conversation, and for a read-only store with responses that are not in
the sums, all responses of the selection are read.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from msgspec import Struct

from kedge.analytics.results import Latency, Selection
from kedge.planning.plan import is_fallback_reason, send_label
from kedge.store import response_sums
from kedge.store.database.transactions import Row, Tx, join_filters
from kedge.store.records import ANSWERED_STATUSES, has_failed
from kedge.store.response_sums import (
    ALL_DAYS,
    KEYS,
    SECONDS_PER_DAY,
    SUMS,
    ResponseSums,
    round_seconds,
)

OWN_NUMBERS = "(SELECT number FROM conversations WHERE namespace = ?)"
"""The numbers of the conversations of a namespace."""
# The values are names in this package, so they need no quoting.
ANSWERED = f"r.status IN ({', '.join(map(repr, ANSWERED_STATUSES))})"
# Prices depend on the day, so responses whose cost was not stored are grouped by day, too.
_PRICED_DAY = "CASE WHEN pricing = 'unknown' THEN day ELSE 0 END"
_SUM_COLUMNS = ", ".join(f"SUM({name})" for name in SUMS)


class SqlCondition(Struct, frozen=True):
    """A condition of a query, such as on responses ``r``, and the values of its placeholders."""

    sql: str
    values: tuple[Any, ...] = ()

    def and_(self, sql: str, *values: Any) -> "SqlCondition":
        """Return this condition and another one."""
        return SqlCondition(f"{self.sql} AND {sql}", (*self.values, *values))

    def add_filters(self, filters: Mapping[str, object]) -> "SqlCondition":
        """Return this condition and the filters, values by their SQL; filters whose value is None are left out."""
        sql, values = join_filters(self.sql, filters)
        return SqlCondition(sql, (*self.values, *values))

    def select(self, tx: Tx, query: str, *values: Any) -> list[Row]:
        """Return the rows of a query in which ``{}`` is this condition, followed by other values."""
        return tx.rows(query.format(self.sql), (*self.values, *values))


def build_condition(tx: Tx, selection: Selection) -> SqlCondition:
    """Return the condition for the responses of a selection, in the namespace of a transaction."""
    filters = {
        "r.created_at >= ?": selection.since,
        "r.created_at < ?": selection.until,
        "r.model = ?": selection.model or None,
        "r.provider = ?": selection.provider or None,
    }
    in_namespace = SqlCondition(f"r.conversation IN {OWN_NUMBERS}", (tx.namespace,))
    condition = in_namespace.add_filters(filters)
    if not selection.conversation:
        return condition

    # Responses have no index of conversations, so they are found by the nodes of the tree, which have one.
    source = "FROM conversations c WHERE c.id = ? AND c.namespace = ?"
    source_values = (selection.conversation, tx.namespace)
    return condition.and_(
        f"r.conversation = (SELECT c.number {source}) AND r.node IN "  # noqa: S608
        f"(SELECT n.id FROM nodes n WHERE n.tree = (SELECT c.tree {source}))",
        *source_values,
        *source_values,
    )


def build_time_condition(selection: Selection, column: str) -> SqlCondition:
    """Return the condition that a time is in the range of a selection."""
    filters = {f"{column} >= ?": selection.since, f"{column} < ?": selection.until}
    return SqlCondition("1 = 1").add_filters(filters)


def has_response_filter(selection: Selection) -> bool:
    """Return whether a selection restricts more than the time."""
    return bool(selection.model or selection.provider or selection.conversation)


Model = tuple[str, str]
"""A provider and a model."""
DurationCounts = defaultdict[tuple[tuple[Any, ...], int], Counter[float]]
"""How often each duration occurred, by the values of columns, and by 1 for durations to the first token, else 0."""


class ResponseGroup(ResponseSums, frozen=True):
    """The sums of responses with equal keys, and what the keys mean."""

    @property
    def is_answered(self) -> bool:
        """Whether the responses were answered, which includes those that the provider lost later."""
        return self.status in ANSWERED_STATUSES

    @property
    def is_fallback(self) -> bool:
        """Whether the requests were sent in full although there was an anchor."""
        return is_fallback_reason(self.reason)

    @property
    def send_label(self) -> str:
        """How the requests were sent, or that they were refused."""
        return send_label(self.reason, is_refused=self.is_refused)

    @property
    def is_refused(self) -> bool:
        """Whether the server refused the requests, so that they continued nothing."""
        return self.status == "refused"

    @property
    def has_failed(self) -> bool:
        """Whether the requests failed for good: they were not sent again."""
        return has_failed(self.status, is_resent=bool(self.is_resent))


class DayRange(Struct, frozen=True):
    """The complete days of a selection, and the parts of days around them."""

    first: int | None
    """The first complete day; None if the selection has no beginning."""
    stop: int | None
    """The day after the last complete one; None if the selection has no end."""
    edges: tuple[tuple[float, float], ...]
    """The times of the parts of days before and after the complete ones."""

    def condition(self, tx: Tx, selection: Selection, *, has_totals: bool = False) -> SqlCondition:
        """Return the condition for the sums of the complete days, or of all days where a table has them."""
        filters: dict[str, object] = {"day >= ?": self.first, "day < ?": self.stop}
        if has_totals and self.first is None and self.stop is None:
            filters = {"day = ?": ALL_DAYS}
        elif has_totals:  # the sums of all days have a day below 0
            filters["day >= ?"] = max(self.first or 0, 0)
        filters["model = ?"] = selection.model or None
        filters["provider = ?"] = selection.provider or None
        return SqlCondition("namespace = ?", (tx.namespace,)).add_filters(filters)


def split_days(tx: Tx, selection: Selection) -> DayRange | None:
    """Return the complete days of a selection; None if there are none, or their sums cannot be used."""
    if selection.conversation or response_sums.has_pending(tx):
        return None
    since = selection.since
    until = selection.until
    first: int | None = None
    stop: int | None = None
    edges: list[tuple[float, float]] = []
    if since is not None:
        first = math.ceil(since / SECONDS_PER_DAY)
        if since < first * SECONDS_PER_DAY:
            edges.append((since, first * SECONDS_PER_DAY))
    if until is not None:
        stop = math.floor(until / SECONDS_PER_DAY)
        if stop * SECONDS_PER_DAY < until:
            edges.append((stop * SECONDS_PER_DAY, until))
    if first is not None and stop is not None and stop <= first:
        return None
    return DayRange(first, stop, tuple(edges))


def iter_edges(tx: Tx, selection: Selection, days: DayRange | None) -> Iterator[SqlCondition]:
    """Yield the conditions for the responses that are not in the sums of the complete days."""
    if days is None:
        yield build_condition(tx, selection)
        return
    for since, until in days.edges:
        yield build_condition(tx, replace(selection, since=since, until=until))


def select_groups(tx: Tx, selection: Selection, days: DayRange | None) -> list[ResponseGroup]:
    """Return the groups of the responses of a selection."""
    parts = [group_by(tx, where, "provider") for where in iter_edges(tx, selection, days)]
    if days:
        parts.append(group_by(tx, days.condition(tx, selection), "provider", "response_sums"))
    return [group for by_provider in parts for groups in by_provider.values() for group in groups]


def group_by(
    tx: Tx, where: SqlCondition, column: str, table: str = "response_sums_parts"
) -> dict[Any, list[ResponseGroup]]:
    """Return the groups of the responses with each value of a column, from a table of sums or the view of its parts."""
    columns = ", ".join((column, *KEYS, _PRICED_DAY))
    groups: dict[Any, list[ResponseGroup]] = {}
    query = f"SELECT {columns}, {_SUM_COLUMNS} FROM {table} r WHERE {{}} GROUP BY {columns}"  # noqa: S608
    for value, *row in where.select(tx, query):
        start = len(KEYS) + 1
        sums = response_sums.to_numbers(SUMS, tuple(row[start:]))
        groups.setdefault(value, []).append(ResponseGroup(*row[:start], *sums))
    return groups


def count_conversations(tx: Tx, selection: Selection, days: DayRange | None) -> int:
    """Return how many conversations the responses of a selection belong to."""
    edges = iter_edges(tx, selection, days)
    parts = [("SELECT r.conversation FROM responses r WHERE {}", where) for where in edges]
    if days:
        where = days.condition(tx, selection, has_totals=True)
        parts.append(("SELECT conversation FROM conversation_sums WHERE {}", where))
    union = " UNION ALL ".join(query.format(where.sql) for query, where in parts)
    values = [value for _, where in parts for value in where.values]
    query = f"SELECT COUNT(DISTINCT conversation) FROM ({union}) AS found"  # noqa: S608
    ((count,),) = tx.rows(query, values)
    return int(count)


def _count_durations(
    tx: Tx, conditions: Iterable[SqlCondition], columns: str, *, is_rounded: bool = False
) -> DurationCounts:
    """Count the durations of the answered responses with each value of some columns."""
    counts: DurationCounts = defaultdict(Counter)
    query = f"SELECT {columns}, r.seconds, r.first_token_seconds FROM responses r WHERE {{}} AND {ANSWERED}"  # noqa: S608
    convert = round_seconds if is_rounded else float
    for where in conditions:
        for *key, seconds, first_token_seconds in where.select(tx, query):
            for is_first_token, duration in enumerate((seconds, first_token_seconds)):
                if duration is not None:
                    counts[tuple(key), is_first_token][convert(duration)] += 1
    return counts


def measure_latencies(tx: Tx, where: SqlCondition, column: str) -> dict[Any, Latency]:
    """Return the latency of the responses with each value of a column."""
    latencies = _build_latencies(_count_durations(tx, [where], column))
    return {value: latency for (value,), latency in latencies.items()}


def measure_model_latencies(
    tx: Tx, selection: Selection, days: DayRange | None
) -> dict[Model, Latency]:
    """Return the latency of each model, and of all under two empty names; with ``days`` from rounded durations."""
    edges = iter_edges(tx, selection, days)
    counts = _count_durations(tx, edges, "r.provider, r.model", is_rounded=days is not None)
    if days:
        where = days.condition(tx, selection, has_totals=True)
        for provider, model, is_first_token, seconds, count in where.select(
            tx,
            "SELECT provider, model, is_first_token, seconds, SUM(responses) FROM latency_counts "
            "WHERE {} GROUP BY provider, model, is_first_token, seconds",
        ):
            counts[(provider, model), is_first_token][float(seconds)] += int(count)
    for (_, is_first_token), durations in list(counts.items()):
        counts[("", ""), is_first_token].update(durations)
    return _build_latencies(counts)


def _build_latencies(counts: DurationCounts) -> dict[Any, Latency]:
    latencies: dict[Any, Latency] = {}
    for key in {key for key, is_first_token in counts if not is_first_token}:
        median, p95 = _find_percentiles(counts[key, 0])
        first_token_median, first_token_p95 = _find_percentiles(counts[key, 1])
        latencies[key] = Latency(median, p95, first_token_median, first_token_p95)
    return latencies


def _find_percentiles(counts: Counter[float]) -> tuple[float | None, float | None]:
    """Return the median, and p95 by nearest rank."""
    size = counts.total()
    if not size:
        return None, None
    # Ranks begin at 1. The median of an even number of durations lies between the two in the middle.
    lower_rank = (size + 1) // 2
    upper_rank = size // 2 + 1
    p95_rank = (size * 95 + 99) // 100
    durations: dict[int, float] = {}
    passed = 0
    for seconds, count in sorted(counts.items()):
        for rank in (lower_rank, upper_rank, p95_rank):
            if passed < rank <= passed + count:
                durations[rank] = seconds
        passed += count
    median = (durations[lower_rank] + durations[upper_rank]) / 2
    return median, durations[p95_rank]
