"""The queries of the statistics: each takes a transaction and a selection, and returns a value.

PostgreSQL returns sums of integers as decimals, and both databases return NULL where there are no rows, so
every number is converted to `int` or `float` here.
"""

from typing import Any

from kedge.analytics.filters import (
    ANSWERED,
    FALLBACK,
    OWN_NUMBERS,
    SqlCondition,
    build_condition,
    build_time_condition,
    has_response_filter,
)
from kedge.analytics.results import (
    Branching,
    CacheUse,
    Chains,
    Count,
    Latency,
    Requests,
    Selection,
    Tokens,
)
from kedge.store.database import Row, Tx

ROUND_DIGITS = 9
"""Sums of dollars are rounded, so that the order in which a database adds does not matter."""
HEALED_WITHOUT_REJECTION = ("forgot", "unproven", "audit")
"""Reasons for healing without a rejected request."""

NO_ID = f"{ANSWERED} AND r.provider_response_id IS NULL"
REJECTED = "r.status = 'refused'"
REQUEST_BYTES = "SUM(COALESCE(r.request_bytes, r.sent_bytes))"
"""The bytes of complete requests; of their messages alone in rows of older versions."""
TOKEN_COLUMNS = (
    "SUM(r.input_tokens), SUM(r.cached_tokens), SUM(r.output_tokens), SUM(r.reasoning_tokens)"
)


_PREDICTED = "r.predicted_cached_tokens IS NOT NULL AND r.cached_tokens IS NOT NULL"
CACHE_COLUMNS = (
    f"SUM(CASE WHEN {_PREDICTED} THEN 1 ELSE 0 END), "
    f"SUM(CASE WHEN {_PREDICTED} THEN r.predicted_cached_tokens ELSE 0 END), "
    f"SUM(CASE WHEN {_PREDICTED} THEN r.cached_tokens ELSE 0 END), "
    "SUM(r.cache_write_tokens), SUM(r.cache_savings)"
)


def count_requests(tx: Tx, selection: Selection) -> Requests:
    """Count requests by their outcome."""
    where = build_condition(tx, selection)
    totals = _select_one(
        tx,
        "COUNT(*), COUNT(DISTINCT r.conversation), "
        f"{count_where(ANSWERED)}, COUNT(r.anchor), {count_where(NO_ID)}, {count_where(REJECTED)}, "
        f"SUM(r.sent_blocks), {REQUEST_BYTES}, SUM(r.saved_blocks), SUM(r.saved_bytes)",
        where,
    )
    total, conversations, succeeded, chained, no_id, rejected, *sums = (
        int(each or 0) for each in totals
    )
    healed = _count_by(tx, "r.healed", where.and_("r.healed IS NOT NULL"))
    healed_count = sum(each.count for each in healed if each.name not in HEALED_WITHOUT_REJECTION)
    return Requests(
        total=total,
        conversations=conversations,
        succeeded=succeeded,
        chained=chained,
        full=total - chained,
        statuses=_count_by(tx, "r.status", where),
        modes=_count_by(tx, "r.mode", where),
        fallbacks=_count_by(tx, "r.reason", where.and_(FALLBACK)),
        healed=healed,
        rejections=rejected + healed_count,
        forgotten=_count_forgotten(tx, where),
        without_id=no_id,
        sent_blocks=sums[0],
        sent_bytes=sums[1],
        saved_blocks=sums[2],
        saved_bytes=sums[3],
    )


def measure_chains(tx: Tx, selection: Selection) -> Chains:
    """Measure the length of chains: the depth of each response that nothing was chained on."""
    where = build_condition(tx, selection).and_(
        "r.depth > 0 AND r.provider_response_id IS NOT NULL"
    )
    later = build_time_condition(Selection(until=selection.until), "created_at").and_(
        f"anchor IS NOT NULL AND conversation IN {OWN_NUMBERS}", tx.namespace
    )
    # An anti-join, which both databases run in one pass; they might repeat a subquery.
    rows = tx.rows(
        "SELECT r.depth, COUNT(*) FROM responses r LEFT JOIN (SELECT DISTINCT scope, anchor "  # noqa: S608
        f"FROM responses WHERE {later.sql}) AS later "
        "ON later.anchor = r.provider_response_id AND later.scope = r.scope "
        f"WHERE later.anchor IS NULL AND {where.sql} GROUP BY r.depth ORDER BY r.depth",
        (*later.values, *where.values),
    )
    lengths = tuple((int(depth), int(count)) for depth, count in rows)
    count = sum(number for _, number in lengths)
    if not count:
        return Chains()
    mean = sum(length * number for length, number in lengths) / count
    return Chains(count, mean, lengths[-1][0], lengths)


def measure_branching(tx: Tx, selection: Selection) -> Branching:
    """Count the points where conversations branched. Failed attempts are not branches."""
    times = build_time_condition(selection, "n.created_at").and_(
        "n.parent > 0 AND n.kind <> 'failed'"
    )
    forked = build_time_condition(selection, "c.created_at").and_("c.forked_from IS NOT NULL")
    times = times.and_(f"n.conversation IN {OWN_NUMBERS}", tx.namespace)
    forked = forked.and_("c.namespace = ?", tx.namespace)
    if has_response_filter(selection):
        inner = build_condition(tx, selection)
        among = f"IN (SELECT r.conversation FROM responses r WHERE {inner.sql})"  # noqa: S608
        times = times.and_(f"n.conversation {among}", *inner.values)
        forked = forked.and_(f"c.number {among}", *inner.values)
    parted = (
        f"SELECT COUNT(*) AS width FROM nodes n WHERE {times.sql} "  # noqa: S608
        "GROUP BY n.parent HAVING COUNT(*) > 1"
    )
    points, branches, widest = tx.rows(
        f"SELECT COUNT(*), SUM(width), MAX(width) FROM ({parted}) AS parted",  # noqa: S608
        times.values,
    )[0]
    forks = tx.rows(
        f"SELECT COUNT(*) FROM conversations c WHERE {forked.sql}",  # noqa: S608
        forked.values,
    )[0][0]
    return Branching(int(points), int(branches or 0), int(widest or 0), int(forks))


def sum_tokens(tx: Tx, selection: Selection) -> Tokens:
    """Sum the tokens that the servers counted."""
    return tokens_from_row(_select_one(tx, TOKEN_COLUMNS, build_condition(tx, selection)))


def tokens_from_row(row: Row) -> Tokens:
    """Return the tokens in a row of `TOKEN_COLUMNS`."""
    return Tokens(*(int(each or 0) for each in row))


def sum_cache_use(tx: Tx, selection: Selection) -> CacheUse:
    """Sum predicted and actual cached tokens, and what they saved."""
    return cache_use_from_row(_select_one(tx, CACHE_COLUMNS, build_condition(tx, selection)))


def cache_use_from_row(row: Row) -> CacheUse:
    """Return the use of prompt caches in a row of `CACHE_COLUMNS`."""
    predictions, predicted, cached, written = (int(each or 0) for each in row[:4])
    saved = round(float(row[4] or 0), ROUND_DIGITS)
    return CacheUse(predictions, predicted, cached, written, saved)


def list_models(tx: Tx, selection: Selection) -> list[tuple[str, str, int, int, Tokens]]:
    """Return each model with its requests, answered requests and tokens, most requests first."""
    where = build_condition(tx, selection)
    rows = tx.rows(
        f"SELECT r.provider, r.model, COUNT(*), {count_where(ANSWERED)}, {TOKEN_COLUMNS} "  # noqa: S608
        f"FROM responses r WHERE {where.sql} GROUP BY r.provider, r.model "
        "ORDER BY COUNT(*) DESC, r.provider, r.model",
        where.values,
    )
    return [
        (row[0], row[1], int(row[2]), int(row[3] or 0), tokens_from_row(row[4:])) for row in rows
    ]


def measure_latencies(tx: Tx, where: SqlCondition, group: str = "1") -> dict[Any, Latency]:
    """Return the latency of each group of responses: the median, and p95 by nearest rank."""
    total = _query_percentiles(tx, where, group, "r.seconds")
    first = _query_percentiles(tx, where, group, "r.first_token_seconds")
    return {key: Latency(*total[key], *first.get(key, (None, None))) for key in total}


def _query_percentiles(
    tx: Tx, where: SqlCondition, group: str, column: str
) -> dict[Any, tuple[float, float]]:
    where = where.and_(f"{ANSWERED} AND {column} IS NOT NULL")
    ranked = (
        f"SELECT {group} AS grouped, {column} AS measured, "  # noqa: S608 - built from constants
        f"ROW_NUMBER() OVER (PARTITION BY {group} ORDER BY {column}) AS place, "
        f"COUNT(*) OVER (PARTITION BY {group}) AS size FROM responses r WHERE {where.sql}"
    )
    rows = tx.rows(
        f"SELECT grouped, place, size, measured FROM ({ranked}) AS ranked "  # noqa: S608
        "WHERE place IN ((size + 1) / 2, size / 2 + 1, (size * 95 + 99) / 100)",
        where.values,
    )
    sizes = {key: size for key, _, size, _ in rows}
    ranked_values = {(key, place): float(measured) for key, place, _, measured in rows}
    return {
        key: (
            (ranked_values[key, (size + 1) // 2] + ranked_values[key, size // 2 + 1]) / 2,
            ranked_values[key, (size * 95 + 99) // 100],
        )
        for key, size in sizes.items()
    }


def count_where(condition: str) -> str:
    """Return the SQL for the number of rows that meet a condition."""
    return f"SUM(CASE WHEN {condition} THEN 1 ELSE 0 END)"


def _select_one(tx: Tx, columns: str, where: SqlCondition) -> Row:
    return tx.rows(f"SELECT {columns} FROM responses r WHERE {where.sql}", where.values)[0]  # noqa: S608


def _count_by(tx: Tx, column: str, where: SqlCondition) -> tuple[Count, ...]:
    rows = tx.rows(
        f"SELECT {column}, COUNT(*) FROM responses r WHERE {where.sql} "  # noqa: S608
        f"GROUP BY {column} ORDER BY COUNT(*) DESC, {column}",
        where.values,
    )
    return tuple(Count(name, int(count)) for name, count in rows)


def _count_forgotten(tx: Tx, where: SqlCondition) -> int:
    rows = tx.rows(
        "SELECT COUNT(*) FROM incidents i JOIN responses r ON r.node = i.node "  # noqa: S608
        f"WHERE i.kind = 'forgot' AND {where.sql}",
        where.values,
    )
    return int(rows[0][0])
