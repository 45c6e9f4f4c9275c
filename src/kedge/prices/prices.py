"""Finding the price of a model, and what a response costs by it."""

import os
import re
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from functools import lru_cache
from importlib.resources import files
from pathlib import Path

from kedge.events import Usage
from kedge.prices.reading import Price, read_prices

ENV = "KEDGE_PRICES"
MILLION = 1_000_000
MOST_REMEMBERED = 1_000

# What may follow the name of a model and still be that model: a date or a snapshot's number, or "latest".
_SNAPSHOT = re.compile(r"[-@](?:\d{4}-\d{2}-\d{2}|\d{8}|\d{4}|latest)")


@dataclass(frozen=True, slots=True)
class Prices:
    """Tables of prices: the first that names a model counts, and in it the most exact entry."""

    tables: tuple[tuple[Price, ...], ...]
    as_of: date | None = field(default=None, compare=False)
    """When the table of the package was written down."""
    _named: dict[tuple[str, str], tuple[tuple[Price, ...], ...]] = field(
        default_factory=dict[tuple[str, str], tuple[tuple[Price, ...], ...]],
        compare=False,
        repr=False,
    )

    def find(
        self, provider: str, model: str, *, input_tokens: int = 0, on: date | None = None
    ) -> Price | None:
        """The price of a model on a day (today if none is named), for a request of this size."""
        day = on or datetime.now(UTC).date()
        found = (_best(table, input_tokens, day) for table in self._naming(provider, model))
        return next((price for price in found if price), None)

    def _naming(self, provider: str, model: str) -> tuple[tuple[Price, ...], ...]:
        """The entries that name a model; few models are used, and they are used often."""
        known = self._named.get((provider, model))
        if known is None:
            known = tuple(
                tuple(p for p in table if provider in p.providers and _names(p.model, model))
                for table in self.tables
            )
            if len(self._named) < MOST_REMEMBERED:
                self._named[provider, model] = known
        return known

    def cost(
        self, usage: Usage, provider: str, model: str, *, at: float | None = None
    ) -> float | None:
        """What a response cost in dollars; ``None`` if its model has no price here.

        ``at`` is its time, for a model whose price has changed.
        """
        day = None if at is None else datetime.fromtimestamp(at, UTC).date()
        price = self.find(provider, model, input_tokens=usage.input_tokens, on=day)
        return None if price is None else _cost(usage, price)


def load_prices(path: str | Path | None = None) -> Prices:
    """The prices of the package, with those of a file before them."""
    shipped = read_prices((files("kedge.prices") / "prices.toml").read_text("utf-8"), "prices.toml")
    mine = () if path is None else (read_prices(None, str(path)).entries,)
    return Prices((*mine, shipped.entries), shipped.as_of)


def current_prices() -> Prices:
    """The prices that hold in this process: those of the package, and of ``KEDGE_PRICES``."""
    return _cached(os.environ.get(ENV) or None)


_cached = lru_cache(maxsize=4)(load_prices)


def cost(usage: Usage, provider: str, model: str, *, at: float | None = None) -> float | None:
    """What a response cost in dollars, by the current prices; ``None`` if nobody knows."""
    return current_prices().cost(usage, provider, model, at=at)


def _best(table: tuple[Price, ...], input_tokens: int, day: date) -> Price | None:
    fitting = [
        price
        for price in table
        if price.since <= day and (not price.above or input_tokens > price.above)
    ]
    return max(fitting, key=_exactness, default=None)


def _names(pattern: str, model: str) -> bool:
    if pattern.endswith("*"):
        return model.startswith(pattern[:-1])
    rest = model.removeprefix(pattern)
    if rest == model and pattern:
        return False
    return not rest or _SNAPSHOT.fullmatch(rest) is not None


def _exactness(price: Price) -> tuple[bool, int, int, date]:
    return not price.model.endswith("*"), len(price.model), price.above, price.since


def _cost(usage: Usage, price: Price) -> float:
    """Cached and written tokens are part of the input, and have prices of their own."""
    plain = max(usage.input_tokens - usage.cached_tokens - usage.cache_write_tokens, 0)
    dollars = (
        plain * price.input
        + usage.cached_tokens * (price.input if price.cached is None else price.cached)
        + usage.cache_write_tokens
        * (price.input if price.cache_write is None else price.cache_write)
        + usage.output_tokens * price.output
    )
    return dollars / MILLION
