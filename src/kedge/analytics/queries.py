"""The queries: sums over the responses of a store, in one consistent read."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from kedge._internal.argument_types import checked
from kedge._internal.arguments import describe_value
from kedge.analytics.groups import (
    OWN_NUMBERS,
    DayRange,
    Model,
    ResponseGroup,
    SqlCondition,
    build_condition,
    build_time_condition,
    count_conversations,
    group_by,
    has_response_filter,
    iter_edges,
    measure_latencies,
    measure_model_latencies,
    select_groups,
    split_days,
)
from kedge.analytics.results import (
    Analytics,
    Branching,
    Bucket,
    CacheUse,
    Chains,
    ConversationStats,
    Cost,
    Count,
    Latency,
    ModelStats,
    Requests,
    Selection,
    Tokens,
)
from kedge.errors import InvalidSetting
from kedge.events import Usage
from kedge.store import Store
from kedge.store.database.transactions import Row, Tx, marks
from kedge.store.open import StoreAddress, use_store
from kedge.store.records import validate_page
from kedge.store.response_sums import SECONDS_PER_DAY, read_with_sums
from kedge.usage.prices import Prices, current_prices

ALL_RESPONSES = Selection()
ROUND_DIGITS = 9
"""Sums of dollars are rounded, so that the order in which a database adds does not matter."""
MAX_BUCKETS = 10_000
MAX_NAMED_ROWS = 500
"""How many conversations a query names; databases limit the number of its values."""
_SIZES = (
    "sent_blocks", "sent_bytes", "saved_blocks", "saved_bytes",
    "results_by_id", "results_by_fallback", "results_unmatched",
)  # fmt: skip


@checked
async def analyze(
    store: Store | StoreAddress,
    selection: Selection = ALL_RESPONSES,
    *,
    prices: Prices | None = None,
) -> Analytics:
    """Compute the statistics of the responses of a selection.

    Example:
        analytics = await analyze(store, Selection(since=yesterday, model="gpt-5.1"))

    Args:
        store: The store to read, or its address.
        selection: Which responses to include; all by default.
        prices: Prices for responses that were stored without a cost; the current ones by default.

    Returns:
        The statistics.
    """
    async with use_store(store) as opened:
        return await read_with_sums(
            opened.database, lambda tx: _collect_analytics(tx, selection, prices)
        )


@checked
async def analyze_over_time(
    store: Store | StoreAddress,
    selection: Selection = ALL_RESPONSES,
    *,
    buckets: int = 24,
    width: float | None = None,
    prices: Prices | None = None,
) -> tuple[Bucket, ...]:
    """Compute statistics for intervals of equal length.

    Args:
        store: The store to read, or its address.
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
        shown = describe_value(buckets)
        raise InvalidSetting(f"buckets must be from 1 to {MAX_BUCKETS}, not {shown}")
    async with use_store(store) as opened:
        return await opened.database.read(
            lambda tx: _collect_buckets(tx, selection, buckets, width, prices)
        )


def _collect_analytics(tx: Tx, selection: Selection, prices: Prices | None) -> Analytics:
    days = split_days(tx, selection)
    groups = select_groups(tx, selection, days)
    models: dict[Model, list[ResponseGroup]] = {}
    for group in groups:
        models.setdefault((group.provider, group.model), []).append(group)
    where = build_condition(tx, selection)
    costs = find_costs(tx, where, models, "r.provider, r.model", prices)
    latencies = measure_model_latencies(tx, selection, days)
    stats = [
        ModelStats(
            *model,
            **sum_outcomes(model_groups),
            latency=latencies.get(model, Latency()),
            cost=combine_costs(costs[model]),
        )
        for model, model_groups in models.items()
    ]
    return Analytics(
        selection=selection,
        requests=count_requests(tx, selection, groups, count_conversations(tx, selection, days)),
        chains=measure_chains(tx, selection, days),
        branching=measure_branching(tx, selection),
        tokens=sum_tokens(groups),
        cost=combine_costs(cost for model_costs in costs.values() for cost in model_costs),
        latency=latencies.get(("", ""), Latency()),
        models=tuple(
            sorted(stats, key=lambda model: (-model.requests, model.provider, model.model))
        ),
        cache=sum_cache_use(groups),
    )


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
    intervals = [Bucket(start + i * width, start + (i + 1) * width) for i in range(number)]
    column = _bucket_sql(tx, start, width, number - 1)
    grouped = group_by(tx, where, column)
    costs = find_costs(tx, where, grouped, column, prices)
    latencies = measure_latencies(tx, where, column)
    for position, groups in grouped.items():
        index = int(position)
        intervals[index] = replace(
            intervals[index],
            **sum_outcomes(groups),
            **sum_sends(groups),
            fallbacks=sum(group.responses for group in groups if group.is_fallback),
            healed=sum(group.responses for group in groups if group.healed),
            cache=sum_cache_use(groups),
            cost=combine_costs(costs[position]),
            latency=latencies.get(position, Latency()),
        )
    return tuple(intervals)


def _bucket_sql(tx: Tx, start: float, width: float, last: int) -> str:
    """Return the SQL for a response's interval."""
    position = f"(r.created_at - {start!r}) / {width!r}"
    return (
        f"CASE WHEN {position} >= {last} THEN {last} ELSE {tx.dialect.floor.format(position)} END"
    )


def _resolve_span(tx: Tx, selection: Selection) -> tuple[float, float] | None:
    """Return the start and end of a selection, or of all responses where it has none."""
    query = "SELECT MIN(r.created_at), MAX(r.created_at) FROM responses r WHERE {}"
    ((first, last),) = build_condition(tx, selection).select(tx, query)
    start = first if selection.since is None else selection.since
    if start is None:
        return None
    end = selection.until
    if end is None:
        newest = start if last is None else max(last, start)
        end = math.nextafter(newest, math.inf)
    if end <= start:
        return None
    return float(start), float(end)


@checked
async def analyze_conversations(
    store: Store | StoreAddress,
    selection: Selection = ALL_RESPONSES,
    *,
    limit: int = 20,
    prices: Prices | None = None,
) -> tuple[ConversationStats, ...]:
    """Compute statistics of the conversations with the most requests.

    Args:
        store: The store to read, or its address.
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
    async with use_store(store) as opened:
        return await opened.database.read(
            lambda tx: _collect_conversations(tx, selection, limit, prices)
        )


def _collect_conversations(
    tx: Tx, selection: Selection, limit: int, prices: Prices | None
) -> tuple[ConversationStats, ...]:
    where = build_condition(tx, selection)
    rows = where.select(
        tx,
        "SELECT r.conversation, c.id, c.title FROM responses r "
        "JOIN conversations c ON c.number = r.conversation WHERE {} "
        "GROUP BY r.conversation, c.id, c.title "
        "ORDER BY COUNT(*) DESC, r.conversation DESC LIMIT ?",
        limit,
    )
    numbers = [row[0] for row in rows]
    if 0 < len(rows) <= MAX_NAMED_ROWS:
        where = where.and_(f"r.conversation IN ({marks(numbers)})", *numbers)
    if not rows:
        return ()
    groups = group_by(tx, where, "r.conversation")
    costs = find_costs(tx, where, groups, "r.conversation", prices)
    return tuple(
        ConversationStats(
            name,
            title,
            **sum_outcomes(groups[number]),
            **sum_sends(groups[number]),
            cost=combine_costs(costs[number]),
        )
        for number, name, title in rows
    )


def count_requests(
    tx: Tx, selection: Selection, groups: Sequence[ResponseGroup], conversations: int
) -> Requests:
    """Count requests by their outcome."""
    outcomes = sum_outcomes(groups)
    sends = sum_sends(groups)
    accepted = outcomes["requests"] - sends["refused"]
    ((forgotten,),) = build_condition(tx, selection).select(
        tx,
        "SELECT COUNT(*) FROM incidents i JOIN responses r ON r.node = i.node "
        "WHERE i.kind = 'forgot' AND {}",
    )
    return Requests(
        total=outcomes["requests"],
        conversations=conversations,
        succeeded=outcomes["succeeded"],
        failed=outcomes["failed"],
        resent=outcomes["resent"],
        refused=sends["refused"],
        chained=sends["chained"],
        full=accepted - sends["chained"],
        statuses=_count_by("status", groups),
        modes=_count_by("mode", groups),
        failures=_count_by("status", [group for group in groups if group.has_failed]),
        sends=_count_by("send_label", groups),
        fallbacks=_count_by("reason", [group for group in groups if group.is_fallback]),
        healed=_count_by("healed", [group for group in groups if group.healed]),
        forgotten=int(forgotten),
        without_id=sum(
            group.responses for group in groups if group.is_answered and not group.has_id
        ),
        **_sum_members(groups, *_SIZES),
    )


def sum_outcomes(groups: Sequence[ResponseGroup]) -> dict[str, Any]:
    """Return the members that the statistics of models, conversations and intervals have in common."""
    return {
        "requests": sum(group.responses for group in groups),
        "succeeded": sum(group.responses for group in groups if group.is_answered),
        "failed": sum(group.responses for group in groups if group.has_failed),
        "resent": sum(group.responses for group in groups if group.is_resent),
        "tokens": sum_tokens(groups),
    }


def sum_sends(groups: Sequence[ResponseGroup]) -> dict[str, Any]:
    """Return how many requests were chained or refused, and the bytes that were sent and saved."""
    chained = sum(group.responses for group in groups if group.is_chained)
    refused = sum(group.responses for group in groups if group.is_refused)
    return {
        "chained": chained,
        "refused": refused,
        **_sum_members(groups, "sent_bytes", "saved_bytes"),
    }


def _sum_members(groups: Iterable[ResponseGroup], *names: str) -> dict[str, Any]:
    """Return the sum of each of these members."""
    listed = list(groups)
    return {name: sum(getattr(group, name) for group in listed) for name in names}


def measure_chains(tx: Tx, selection: Selection, days: DayRange | None) -> Chains:
    """Measure the length of chains: the depth of each response that no other is chained on."""
    if days and selection.until is None and not has_response_filter(selection):
        rows = _count_ends(tx, selection, days)
    else:
        rows = _find_ends(tx, selection)
    counts: Counter[int] = Counter()
    for depth, number in rows:
        counts[int(depth)] += int(number)
    lengths = tuple(sorted(counts.items()))
    count = counts.total()
    if not count:
        return Chains()
    mean = sum(length * number for length, number in lengths) / count
    return Chains(count, mean, lengths[-1][0], lengths)


def _count_ends(tx: Tx, selection: Selection, days: DayRange) -> list[Row]:
    """Return how many chains end at each depth, from the maintained ends of chains."""
    where = days.condition(tx, selection).and_("children = 0 AND depth > 0")
    query = "SELECT depth, SUM(responses) FROM chain_links WHERE {} GROUP BY depth"
    rows = where.select(tx, query)
    for edge in iter_edges(tx, selection, days):
        rows += edge.select(
            tx,
            "SELECT r.depth, COUNT(*) FROM responses r JOIN chain_links k ON k.scope = r.scope "
            "AND k.response_id = r.provider_response_id "
            "WHERE {} AND k.namespace = ? AND r.depth > 0 AND k.children = 0 GROUP BY r.depth",
            tx.namespace,
        )
    return rows


def _find_ends(tx: Tx, selection: Selection) -> list[Row]:
    """Return how many chains end at each depth, from all responses."""
    where = build_condition(tx, selection).and_(
        "r.depth > 0 AND r.provider_response_id IS NOT NULL"
    )
    later = build_time_condition(Selection(until=selection.until), "created_at").and_(
        f"anchor IS NOT NULL AND depth > 0 AND conversation IN {OWN_NUMBERS}", tx.namespace
    )
    # An anti-join, which both databases run in one pass; they might repeat a subquery.
    return tx.rows(
        "SELECT r.depth, COUNT(*) FROM responses r LEFT JOIN (SELECT DISTINCT scope, anchor "  # noqa: S608
        f"FROM responses WHERE {later.sql}) AS later "
        "ON later.anchor = r.provider_response_id AND later.scope = r.scope "
        f"WHERE later.anchor IS NULL AND {where.sql} GROUP BY r.depth",
        (*later.values, *where.values),
    )


def measure_branching(tx: Tx, selection: Selection) -> Branching:
    """Count the points where conversations branched. Failed attempts are not branches."""
    own = f"n.parent > 0 AND n.kind <> 'failed' AND n.conversation IN {OWN_NUMBERS}"
    times = build_time_condition(selection, "n.created_at").and_(own, tx.namespace)
    own = "c.forked_from IS NOT NULL AND c.namespace = ?"
    forked = build_time_condition(selection, "c.created_at").and_(own, tx.namespace)
    if has_response_filter(selection):
        inner = build_condition(tx, selection)
        among = f"IN (SELECT r.conversation FROM responses r WHERE {inner.sql})"  # noqa: S608
        times = times.and_(f"n.conversation {among}", *inner.values)
        forked = forked.and_(f"c.number {among}", *inner.values)
    # A second continuation starts a new branch, so only parents of such nodes can have several children: the nodes
    # that start a branch, and the one node with blocks that continues the branch of their parent.
    starts = "parent > 0 AND (branch = id OR kept = length)"
    children = (
        f"SELECT n.parent FROM nodes n WHERE n.{starts.replace('(', '(n.').replace('OR ', 'OR n.')} "  # noqa: S608
        f"AND {times.sql} UNION ALL SELECT n.parent "
        f"FROM (SELECT DISTINCT parent FROM nodes WHERE {starts}) AS starts "
        "JOIN nodes p ON p.id = starts.parent JOIN nodes n ON n.tree = p.tree "
        "AND n.branch = p.branch AND n.kept = p.length AND n.parent = p.id AND n.length > n.kept "
        f"WHERE {times.sql}"
    )
    parted = f"SELECT COUNT(*) AS width FROM ({children}) AS c GROUP BY parent HAVING COUNT(*) > 1"  # noqa: S608
    ((points, branches, widest),) = tx.rows(
        f"SELECT COUNT(*), SUM(width), MAX(width) FROM ({parted}) AS parted",  # noqa: S608
        (*times.values, *times.values),
    )
    ((forks,),) = forked.select(tx, "SELECT COUNT(*) FROM conversations c WHERE {}")
    return Branching(int(points), int(branches or 0), int(widest or 0), int(forks))


def sum_tokens(groups: Iterable[ResponseGroup]) -> Tokens:
    """Sum the tokens that the servers reported."""
    listed = list(groups)
    return Tokens(
        input=sum(group.input_tokens for group in listed),
        cached=sum(group.cached_tokens for group in listed),
        output=sum(group.output_tokens for group in listed),
        reasoning=sum(group.reasoning_tokens for group in listed),
    )


def sum_cache_use(groups: Sequence[ResponseGroup]) -> CacheUse:
    """Sum predicted and actual cached tokens, and the dollars that they saved."""
    return CacheUse(
        predictions=sum(group.predictions for group in groups),
        predicted=sum(group.predicted_tokens for group in groups),
        cached=sum(group.predicted_cached_tokens for group in groups),
        written=sum(group.cache_write_tokens for group in groups),
        saved=round(sum(group.cache_savings for group in groups), ROUND_DIGITS),
    )


def _count_by(name: str, groups: Iterable[ResponseGroup]) -> tuple[Count, ...]:
    counts: Counter[str] = Counter()
    for group in groups:
        counts[getattr(group, name)] += group.responses
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return tuple(Count(value, count) for value, count in ordered)


def find_costs(
    tx: Tx,
    where: SqlCondition,
    groups: Mapping[Any, Sequence[ResponseGroup]],
    columns: str,
    prices: Prices | None,
) -> dict[Any, list[Cost]]:
    """Return the costs of the groups of responses with each key.

    Responses that were stored without a cost are priced together where the price does not depend on the size
    of a request, and else one by one.

    Args:
        tx: The transaction.
        where: The condition for the responses.
        groups: Their groups by the value of a column, or by the values of several.
        columns: The SQL of the keys.
        prices: The prices; the current ones by default.
    """
    prices = prices or current_prices()
    costs: dict[Any, list[Cost]] = {key: [] for key in groups}
    tiered: set[Model] = set()
    for key, members in groups.items():
        for group in members:
            if group.pricing == "stored":
                costs[key].append(Cost(group.cost, group.responses))
            elif group.pricing == "unknown" and prices.has_tiers(group.provider, group.model):
                tiered.add((group.provider, group.model))
            elif group.pricing == "unknown":
                costs[key].append(_price_group(group, prices))
    for model in sorted(tiered):
        unpriced = where.and_("r.cost IS NULL AND r.provider = ? AND r.model = ?", *model)
        for *values, created_at, input_tokens, cached, output_tokens in unpriced.select(
            tx,
            f"SELECT {columns}, r.created_at, r.input_tokens, r.cached_tokens, r.output_tokens "  # noqa: S608
            "FROM responses r WHERE {} AND r.input_tokens IS NOT NULL",
        ):
            usage = Usage(int(input_tokens), int(cached or 0), int(output_tokens or 0))
            dollars = prices.cost(usage, *model, at=created_at)
            key = tuple(values) if len(values) > 1 else values[0]
            costs[key].append(_to_cost(dollars, 1))
    return costs


def _price_group(group: ResponseGroup, prices: Prices) -> Cost:
    """Return the cost of responses whose price does not depend on the size of a request."""
    cached = group.cached_tokens
    usage = Usage(group.uncached_tokens + cached, cached, group.output_tokens)
    at = group.day * SECONDS_PER_DAY
    return _to_cost(prices.cost(usage, group.provider, group.model, at=at), group.responses)


def _to_cost(dollars: float | None, count: int) -> Cost:
    """Return the cost of so many responses, whose price may be unknown."""
    if dollars is None:
        return Cost(unpriced=count)
    return Cost(dollars, count)


def combine_costs(costs: Iterable[Cost]) -> Cost:
    """Return the total cost."""
    listed = list(costs)
    return Cost(
        round(sum(cost.dollars for cost in listed), ROUND_DIGITS),
        sum(cost.priced for cost in listed),
        sum(cost.unpriced for cost in listed),
    )
