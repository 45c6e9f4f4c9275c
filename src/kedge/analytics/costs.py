"""Compute costs: the stored cost of a response, or an estimate where none was stored."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from kedge.analytics.groups import ResponseGroup, SqlCondition, build_condition
from kedge.analytics.queries import ROUND_DIGITS
from kedge.analytics.results import Cost, Selection
from kedge.events import Usage
from kedge.prices import Prices, current_prices
from kedge.store.database import Tx
from kedge.store.response_sums import SECONDS_PER_DAY


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
        cost = Cost(unpriced=1) if dollars is None else Cost(dollars, 1)
        parts.append(GroupCost(provider, model, key, cost))
    return parts


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
            count = group.responses
            cost = Cost(unpriced=count) if dollars is None else Cost(dollars, count)
        parts.append(GroupCost(group.provider, group.model, 1, cost))
    for provider, model in sorted(tiered):
        condition = build_condition(tx, replace(selection, provider=provider, model=model))
        parts += _estimate_costs(tx, condition, prices, "1")
    return parts


def sum_costs(parts: Iterable[GroupCost]) -> Cost:
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
    return {name: sum_costs(each) for name, each in grouped.items()}
