"""Compute all statistics: for a selection, in intervals or by conversation, each in one consistent read."""

import math
from collections.abc import Sequence
from dataclasses import replace

from kedge.analytics import queries
from kedge.analytics.groups import (
    Model,
    ResponseGroup,
    SqlCondition,
    build_condition,
    count_conversations,
    group_by,
    measure_latencies,
    measure_model_latencies,
    select_groups,
    split_days,
)
from kedge.analytics.results import (
    Analytics,
    Bucket,
    ConversationStats,
    Cost,
    Latency,
    ModelStats,
    Selection,
)
from kedge.database.transactions import Tx
from kedge.errors import InvalidSetting
from kedge.prices import Prices
from kedge.store import Store
from kedge.store.records import validate_page
from kedge.store.response_sums import read_with_sums

ALL_RESPONSES = Selection()
MAX_BUCKETS = 10_000
MAX_NAMED_ROWS = 500
"""How many conversations a query names; databases limit the number of its values."""


async def analyze(
    store: Store, selection: Selection = ALL_RESPONSES, *, prices: Prices | None = None
) -> Analytics:
    """Compute the statistics of the responses of a selection.

    Example:
        found = await analyze(store, Selection(since=yesterday, model="gpt-5.1"))

    Args:
        store: The store to read.
        selection: Which responses to include; all by default.
        prices: Prices for responses that were stored without a cost; the current ones by default.

    Returns:
        The statistics.
    """
    return await read_with_sums(
        store.database, lambda tx: _collect_analytics(tx, selection, prices)
    )


async def analyze_over_time(
    store: Store,
    selection: Selection = ALL_RESPONSES,
    *,
    buckets: int = 24,
    width: float | None = None,
    prices: Prices | None = None,
) -> tuple[Bucket, ...]:
    """Compute statistics for intervals of equal length.

    Args:
        store: The store to read.
        selection: Which responses to include. Without times, the intervals span all responses.
        buckets: The number of intervals, if ``width`` is not given.
        width: The length of an interval, in seconds.
        prices: Prices for responses that were stored without a cost; the current ones by default.

    Returns:
        The intervals in order, empty ones included; nothing if there is no response.

    Raises:
        InvalidSetting: ``width`` is not above 0, or there would be too many intervals.
    """
    if width is not None and not 0 < width < math.inf:
        raise InvalidSetting("width must be a number of seconds above 0")
    if not 1 <= buckets <= MAX_BUCKETS:
        raise InvalidSetting(f"buckets must be from 1 to {MAX_BUCKETS}, not {buckets}")
    return await store.database.read(
        lambda tx: _collect_buckets(tx, selection, buckets, width, prices)
    )


def _collect_analytics(tx: Tx, selection: Selection, prices: Prices | None) -> Analytics:
    days = split_days(tx, selection)
    groups = select_groups(tx, selection, days)
    costs = queries.sum_group_costs(tx, selection, groups, prices)
    latencies = measure_model_latencies(tx, selection, days)
    return Analytics(
        selection=selection,
        requests=queries.count_requests(
            tx, selection, groups, count_conversations(tx, selection, days)
        ),
        chains=queries.measure_chains(tx, selection, days),
        branching=queries.measure_branching(tx, selection),
        tokens=queries.sum_tokens(groups),
        cost=queries.combine_costs(costs),
        latency=latencies.get(("", ""), Latency()),
        models=_collect_models(
            groups, queries.sum_by(costs, lambda each: (each.provider, each.model)), latencies
        ),
        cache=queries.sum_cache_use(groups),
    )


def _collect_models(
    groups: Sequence[ResponseGroup], costs: dict[Model, Cost], latencies: dict[Model, Latency]
) -> tuple[ModelStats, ...]:
    models: dict[Model, list[ResponseGroup]] = {}
    for each in groups:
        models.setdefault((each.provider, each.model), []).append(each)
    found = [
        ModelStats(
            *model,
            **queries.sum_outcomes(own),
            latency=latencies.get(model, Latency()),
            cost=costs.get(model, Cost()),
        )
        for model, own in models.items()
    ]
    return tuple(sorted(found, key=lambda each: (-each.requests, each.provider, each.model)))


def _collect_buckets(
    tx: Tx, selection: Selection, buckets: int, width: float | None, prices: Prices | None
) -> tuple[Bucket, ...]:
    span = _resolve_span(tx, selection)
    if span is None:
        return ()
    start, end = span
    width = width or max((end - start) / buckets, 1e-3)
    number = math.ceil((end - start) / width - 1e-9) or 1
    if number > MAX_BUCKETS:
        raise InvalidSetting(
            f"{number} buckets of {width:g} seconds are too many; use a larger width, for at most "
            f"{MAX_BUCKETS}"
        )
    where = build_condition(tx, replace(selection, since=start, until=end))
    empty = [Bucket(start + i * width, start + (i + 1) * width) for i in range(number)]
    filled = dict(enumerate(empty))
    column = _bucket_sql(tx, start, width, number - 1)
    costs = queries.sum_by(queries.query_costs(tx, where, prices, column), lambda each: each.group)
    latencies = measure_latencies(tx, where, column)
    for position, groups in group_by(tx, where, column).items():
        filled[position] = replace(
            filled[position],
            **queries.sum_outcomes(groups),
            **queries.sum_sends(groups),
            fallbacks=sum(each.responses for each in groups if each.is_fallback),
            healed=sum(each.responses for each in groups if each.healed),
            cache=queries.sum_cache_use(groups),
            cost=costs.get(position, Cost()),
            latency=latencies.get(position, Latency()),
        )
    return tuple(filled[i] for i in range(number))


def _bucket_sql(tx: Tx, start: float, width: float, last: int) -> str:
    """Return the SQL for a response's interval; a cast truncates in SQLite and rounds in PostgreSQL."""
    position = f"(r.created_at - {start!r}) / {width!r}"
    number = f"FLOOR({position})" if tx.dialect.name == "postgresql" else position
    return f"CASE WHEN {position} >= {last} THEN {last} ELSE CAST({number} AS INTEGER) END"


def _resolve_span(tx: Tx, selection: Selection) -> tuple[float, float] | None:
    """Return the start and end of a selection, or of all responses where it has none."""
    where = build_condition(tx, selection)
    first, last = tx.rows(
        f"SELECT MIN(r.created_at), MAX(r.created_at) FROM responses r WHERE {where.sql}",  # noqa: S608
        where.values,
    )[0]
    if selection.since is None and first is None:
        return None
    start = first if selection.since is None else selection.since
    if selection.until is not None:
        end = selection.until
    else:
        end = math.nextafter(max(last if last is not None else start, start), math.inf)
    return (float(start), float(end)) if end > start else None


async def analyze_conversations(
    store: Store,
    selection: Selection = ALL_RESPONSES,
    *,
    limit: int = 20,
    prices: Prices | None = None,
) -> tuple[ConversationStats, ...]:
    """Compute statistics of the conversations with the most requests.

    Args:
        store: The store to read.
        selection: Which responses to include; all by default.
        limit: The maximum number of conversations.
        prices: Prices for responses that were stored without a cost; the current ones by default.

    Returns:
        The conversations, most requests first. They add up to what `analyze` returns, unless there are
        more than the limit.

    Raises:
        InvalidSetting: The limit is negative.
    """
    validate_page(limit)
    return await store.database.read(
        lambda tx: _collect_conversations(tx, selection, limit, prices)
    )


def _collect_conversations(
    tx: Tx, selection: Selection, limit: int, prices: Prices | None
) -> tuple[ConversationStats, ...]:
    where = build_condition(tx, selection)
    rows = tx.rows(
        f"SELECT r.conversation FROM responses r WHERE {where.sql} "  # noqa: S608
        "GROUP BY r.conversation ORDER BY COUNT(*) DESC, r.conversation DESC LIMIT ?",
        (*where.values, limit),
    )
    if not rows:
        return ()
    numbers = [number for (number,) in rows]
    listed, selected = SqlCondition("namespace = ?", (tx.namespace,)), where
    if len(rows) <= MAX_NAMED_ROWS:
        marks = ", ".join("?" * len(rows))
        listed = listed.and_(f"number IN ({marks})", *numbers)
        selected = where.and_(f"r.conversation IN ({marks})", *numbers)
    names = {
        number: (name, title)
        for number, name, title in tx.rows(
            f"SELECT number, id, title FROM conversations WHERE {listed.sql}",  # noqa: S608
            listed.values,
        )
    }
    costs = queries.sum_by(
        queries.query_costs(tx, selected, prices, "r.conversation"), lambda each: each.group
    )
    groups = group_by(tx, selected, "r.conversation")
    return tuple(
        ConversationStats(
            *names[number],
            **queries.sum_outcomes(groups[number]),
            **queries.sum_sends(groups[number]),
            cost=costs.get(number, Cost()),
        )
        for number in numbers
    )
