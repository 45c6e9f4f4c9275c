"""The queries of the statistics, which return a value for a transaction and a selection.

PostgreSQL returns sums of integers as decimals, and both databases return NULL where there are no rows, so
every number is converted to `int` or `float` here.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kedge.analytics.groups import (
    OWN_NUMBERS,
    DayRange,
    ResponseGroup,
    SqlCondition,
    build_condition,
    build_time_condition,
    has_response_filter,
    iter_edges,
)
from kedge.analytics.results import (
    Branching,
    CacheUse,
    Chains,
    Cost,
    Count,
    Requests,
    Selection,
    Tokens,
)
from kedge.database.transactions import Row, Tx
from kedge.events import Usage
from kedge.prices import Prices, current_prices
from kedge.store.response_sums import SECONDS_PER_DAY

ROUND_DIGITS = 9
"""Sums of dollars are rounded, so that the order in which a database adds does not matter."""

_SIZES = (
    "sent_blocks", "sent_bytes", "saved_blocks", "saved_bytes",
    "results_by_id", "results_by_fallback", "results_unmatched",
)  # fmt: skip


def count_requests(
    tx: Tx, selection: Selection, groups: Sequence[ResponseGroup], conversations: int
) -> Requests:
    """Count requests by their outcome."""
    outcomes, chained = sum_outcomes(groups), sum_sends(groups)["chained"]
    answered = [each for each in groups if each.is_answered]
    healed = _count_by("healed", (each for each in groups if each.healed))
    fallbacks = (each for each in groups if each.is_fallback)
    return Requests(
        total=outcomes["requests"],
        conversations=conversations,
        succeeded=outcomes["succeeded"],
        failed=outcomes["failed"],
        chained=chained,
        full=outcomes["requests"] - chained,
        statuses=_count_by("status", groups),
        modes=_count_by("mode", groups),
        sends=_count_by("send_name", groups),
        fallbacks=_count_by("reason", fallbacks),
        healed=healed,
        rejections=sum(each.responses for each in groups if each.status == "refused"),
        forgotten=_count_forgotten(tx, build_condition(tx, selection)),
        without_id=sum(each.responses for each in answered if not each.has_id),
        **_sum_members(groups, *_SIZES),
    )


def sum_outcomes(groups: Sequence[ResponseGroup]) -> dict[str, Any]:
    """Return the members that the statistics of models, conversations and intervals have in common."""
    return {
        "requests": sum(each.responses for each in groups),
        "succeeded": sum(each.responses for each in groups if each.is_answered),
        "failed": sum(each.responses for each in groups if each.has_failed),
        "tokens": sum_tokens(groups),
    }


def sum_sends(groups: Sequence[ResponseGroup]) -> dict[str, Any]:
    """Return how many requests were chained, and the bytes that were sent and saved."""
    chained = sum(each.responses for each in groups if each.is_chained)
    return {"chained": chained, **_sum_members(groups, "sent_bytes", "saved_bytes")}


def _sum_members(groups: Iterable[ResponseGroup], *names: str) -> dict[str, Any]:
    """Return the sum of each of these members."""
    listed = list(groups)
    return {name: sum(getattr(each, name) for each in listed) for name in names}


def measure_chains(tx: Tx, selection: Selection, days: DayRange | None) -> Chains:
    """Measure the length of chains: the depth of each response that no other is chained on."""
    is_by_time = selection.until is None and not has_response_filter(selection)
    rows = _count_ends(tx, selection, days) if days and is_by_time else _find_ends(tx, selection)
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
    rows = tx.rows(
        f"SELECT depth, SUM(responses) FROM chain_links WHERE {where.sql} GROUP BY depth",  # noqa: S608
        where.values,
    )
    for edge in iter_edges(tx, selection, days):
        rows += tx.rows(
            "SELECT r.depth, COUNT(*) FROM responses r JOIN chain_links k ON k.namespace = ? "  # noqa: S608
            "AND k.scope = r.scope AND k.response_id = r.provider_response_id "
            f"WHERE {edge.sql} AND r.depth > 0 AND k.children = 0 GROUP BY r.depth",
            (tx.namespace, *edge.values),
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
    points, branches, widest = tx.rows(
        f"SELECT COUNT(*), SUM(width), MAX(width) FROM ({parted}) AS parted",  # noqa: S608
        (*times.values, *times.values),
    )[0]
    forks = tx.rows(
        f"SELECT COUNT(*) FROM conversations c WHERE {forked.sql}",  # noqa: S608
        forked.values,
    )[0][0]
    return Branching(int(points), int(branches or 0), int(widest or 0), int(forks))


def sum_tokens(groups: Iterable[ResponseGroup]) -> Tokens:
    """Sum the tokens that the servers reported."""
    names = ("input_tokens", "cached_tokens", "output_tokens", "reasoning_tokens")
    return Tokens(*_sum_members(groups, *names).values())


def sum_cache_use(groups: Sequence[ResponseGroup]) -> CacheUse:
    """Sum predicted and actual cached tokens, and the dollars that they saved."""
    names = ("predictions", "predicted_tokens", "predicted_cached_tokens", "cache_write_tokens")
    saved = round(sum(each.cache_savings for each in groups), ROUND_DIGITS)
    return CacheUse(*_sum_members(groups, *names).values(), saved=saved)


def _count_by(name: str, groups: Iterable[ResponseGroup]) -> tuple[Count, ...]:
    counts: Counter[str] = Counter()
    for each in groups:
        counts[getattr(each, name)] += each.responses
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return tuple(Count(value, count) for value, count in ordered)


def _count_forgotten(tx: Tx, where: SqlCondition) -> int:
    rows = tx.rows(
        "SELECT COUNT(*) FROM incidents i JOIN responses r ON r.node = i.node "  # noqa: S608
        f"WHERE i.kind = 'forgot' AND {where.sql}",
        where.values,
    )
    return int(rows[0][0])


@dataclass(frozen=True, slots=True)
class GroupCost:
    """The cost of one model's responses in one group."""

    provider: str
    model: str
    group: Any
    cost: Cost


def query_costs(
    tx: Tx, where: SqlCondition, prices: Prices | None = None, group: str = "1"
) -> list[GroupCost]:
    """Return the cost of each model in each group of responses."""
    with_cost = where.and_("r.cost IS NOT NULL")
    rows = tx.rows(
        f"SELECT r.provider, r.model, {group}, SUM(r.cost), COUNT(*) FROM responses r "  # noqa: S608
        f"WHERE {with_cost.sql} GROUP BY r.provider, r.model, {group}",
        with_cost.values,
    )
    parts = [GroupCost(name, model, key, Cost(float(s), int(n))) for name, model, key, s, n in rows]
    return parts + _estimate_costs(tx, where, prices or current_prices(), group)


def _estimate_costs(tx: Tx, where: SqlCondition, prices: Prices, group: str) -> list[GroupCost]:
    """Estimate the cost of responses without one, one by one: price tiers depend on the request."""
    without_cost = where.and_("r.cost IS NULL AND r.input_tokens IS NOT NULL")
    rows = tx.rows(
        f"SELECT r.provider, r.model, {group}, r.created_at, r.input_tokens, r.cached_tokens, "  # noqa: S608
        f"r.output_tokens FROM responses r WHERE {without_cost.sql}",
        without_cost.values,
    )
    parts: list[GroupCost] = []
    for provider, model, key, created_at, *counts in rows:
        usage = Usage(*(int(each or 0) for each in counts))
        dollars = prices.cost(usage, provider, model, at=created_at)
        parts.append(GroupCost(provider, model, key, _to_cost(dollars, 1)))
    return parts


def _to_cost(dollars: float | None, count: int) -> Cost:
    """Return the cost of so many responses, whose price may be unknown."""
    return Cost(unpriced=count) if dollars is None else Cost(dollars, count)


def sum_group_costs(
    tx: Tx, selection: Selection, groups: Iterable[ResponseGroup], prices: Prices | None
) -> list[GroupCost]:
    """Return the cost of each group of responses.

    Responses that were stored without a cost are priced together where the price does not depend on the size
    of a request, and else one by one.
    """
    prices = prices or current_prices()
    parts: list[GroupCost] = []
    tiered: set[tuple[str, str]] = set()
    for group in groups:
        if group.pricing == "stored":
            cost = Cost(group.cost, group.responses)
        elif group.pricing == "none":
            continue
        elif prices.has_tiers(group.provider, group.model):
            tiered.add((group.provider, group.model))
            continue
        else:
            usage = Usage(
                group.uncached_tokens + group.cached_tokens,
                group.cached_tokens,
                group.output_tokens,
            )
            at = group.day * SECONDS_PER_DAY
            dollars = prices.cost(usage, group.provider, group.model, at=at)
            cost = _to_cost(dollars, group.responses)
        parts.append(GroupCost(group.provider, group.model, 1, cost))
    for provider, model in sorted(tiered):
        condition = build_condition(tx, replace(selection, provider=provider, model=model))
        parts += _estimate_costs(tx, condition, prices, "1")
    return parts


def combine_costs(parts: Iterable[GroupCost]) -> Cost:
    """Return the total cost."""
    costs = [part.cost for part in parts]
    return Cost(
        round(sum(each.dollars for each in costs), ROUND_DIGITS),
        sum(each.priced for each in costs),
        sum(each.unpriced for each in costs),
    )


def sum_by(parts: Iterable[GroupCost], key: Callable[[GroupCost], Any]) -> dict[Any, Cost]:
    """Return the cost of the parts with each key."""
    grouped: dict[Any, list[GroupCost]] = {}
    for part in parts:
        grouped.setdefault(key(part), []).append(part)
    return {name: combine_costs(each) for name, each in grouped.items()}
