"""What responses cost: what was written down with them, and today's prices where nothing was."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

from kedge.analytics.conditions import Condition
from kedge.analytics.values import Cost
from kedge.events import Usage
from kedge.prices import Prices, current_prices
from kedge.store.database import Tx

_COUNTED = "r.input_tokens IS NOT NULL"


@dataclass(slots=True)
class _Sum:
    dollars: list[float] = field(default_factory=list[float])
    priced: int = 0
    unpriced: int = 0

    @property
    def cost(self) -> Cost:
        # Added up in the order of size, so that every database gives the same last digit.
        return Cost(sum(sorted(self.dollars)), self.priced, self.unpriced)


def costs(
    tx: Tx,
    where: Condition,
    group: Callable[[str, str, float], Hashable],
    prices: Prices | None = None,
) -> dict[Any, Cost]:
    """The cost of each group of responses; ``group`` is given provider, model and time."""
    table = prices or current_prices()
    where = where.and_(f"({_COUNTED} OR r.cost IS NOT NULL)")
    rows = tx.rows(
        "SELECT r.provider, r.model, r.created_at, r.cost, r.input_tokens, r.cached_tokens, "  # noqa: S608
        f"r.output_tokens FROM responses r WHERE {where.sql}",
        where.values,
    )
    sums: dict[Hashable, _Sum] = {}
    for provider, model, created_at, written, *counts in rows:
        held = sums.setdefault(group(provider, model, created_at), _Sum())
        usage = Usage(*(int(each or 0) for each in counts))
        known = written is not None
        cost = written if known else table.cost(usage, provider, model, at=created_at)
        if cost is None:
            held.unpriced += 1
        else:
            held.dollars.append(float(cost))
            held.priced += 1
    return {key: held.cost for key, held in sums.items()}
