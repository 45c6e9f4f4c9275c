"""Prices: compute the cost of a response from a dated table, which users can extend.

    cost(usage, "openai", "gpt-5.1")  # dollars, or None if the price is unknown

A model without a price has no cost: nothing is guessed. The table is a file of the package; the file
named by ``KEDGE_PRICES`` takes precedence.
"""

import os
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any, cast

from msgspec import structs

from kedge._internal.argument_types import check_fields, checked
from kedge._internal.files import MAX_SETTINGS_BYTES, read_regular_file
from kedge.errors import InvalidSetting
from kedge.events import Usage

__all__ = ["Price", "Prices", "cache_savings", "cost", "current_prices", "load_prices", "sum_costs"]


@dataclass(frozen=True, slots=True)
class Price:
    """A price in dollars per million tokens.

    Without ``cached`` or ``cache_write`` those tokens cost as much as input.
    """

    providers: tuple[str, ...]
    model: str
    input: float
    output: float
    cached: float | None = None
    cache_write: float | None = None
    above: int = 0
    since: date = date.min

    def __post_init__(self) -> None:
        check_fields(self)

    def cost(self, usage: Usage) -> float:
        """Return dollars; cached and cache-written tokens are part of the input, with their own prices."""
        uncached = max(usage.input_tokens - usage.cached_tokens - usage.cache_write_tokens, 0)
        cached = self.input if self.cached is None else self.cached
        written = self.input if self.cache_write is None else self.cache_write
        dollars = uncached * self.input + usage.cached_tokens * cached
        dollars += usage.cache_write_tokens * written
        dollars += usage.output_tokens * self.output
        return dollars / MILLION

    def cache_savings(self, usage: Usage) -> float:
        """Return the dollars that the provider's prompt cache saved, less what writing to it cost."""
        if not usage.cached_tokens and not usage.cache_write_tokens:
            return 0.0
        uncached = structs.replace(usage, cached_tokens=0, cache_write_tokens=0)
        return self.cost(uncached) - self.cost(usage)


_AMOUNTS = ("input", "output", "cached", "cache_write")
_REQUIRED = ("provider", "model", "input", "output")
_KEYS = ("provider", "model", *_AMOUNTS, "above", "since")


def parse_prices(text: str | None, source: str) -> "Prices":
    """Parse prices from a text, or from the file ``source`` if there is no text."""
    try:
        if text is None:
            text = read_regular_file(source, MAX_SETTINGS_BYTES).decode("utf-8")
        data = tomllib.loads(text)
    except OSError as error:
        raise InvalidSetting(f"{source} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise InvalidSetting(f"{source} is not valid TOML: {error}") from error
    for key in sorted(set(data) - {"as_of", "prices"}):
        raise InvalidSetting(f"{source}: unknown key {key!r}; allowed are as_of and [[prices]]")
    entries = data.get("prices", [])
    if not isinstance(entries, list):
        raise InvalidSetting(f"{source}: prices must be a list of tables, written [[prices]]")
    listed = cast("list[object]", entries)
    prices = tuple(_parse_price(entry, f"{source}: prices[{i}]") for i, entry in enumerate(listed))
    if "as_of" not in data:
        return Prices((prices,))
    return Prices((prices,), _parse_date(data["as_of"], f"{source}: as_of"))


def _parse_price(entry: object, location: str) -> Price:
    if not isinstance(entry, dict):
        raise InvalidSetting(f"{location} must be a table")
    table = cast("dict[str, Any]", entry)
    for key in table:
        if key not in _KEYS:
            raise InvalidSetting(f"{location}: unknown key {key!r}; allowed are {', '.join(_KEYS)}")
    for key in _REQUIRED:
        if key not in table:
            raise InvalidSetting(f"{location}: {key!r} is missing")
    amounts = {
        key: _parse_amount(table[key], f"{location}.{key}") for key in _AMOUNTS if key in table
    }
    return Price(
        providers=_parse_providers(table["provider"], f"{location}.provider"),
        model=_parse_text(table["model"], f"{location}.model"),
        above=int(_parse_amount(table.get("above", 0), f"{location}.above")),
        since=_parse_date(table.get("since", date.min), f"{location}.since"),
        **amounts,
    )


def _parse_amount(value: object, location: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e9:
        raise InvalidSetting(f"{location} must be a number of at least 0")
    return float(value)


def _parse_date(value: object, location: str) -> date:
    if isinstance(value, datetime) or not isinstance(value, date):
        raise InvalidSetting(f"{location} must be a date like 2026-11-15")
    return value


def _parse_text(value: object, location: str) -> str:
    if not isinstance(value, str) or not value:
        raise InvalidSetting(f"{location} must be a text")
    return value


def _parse_providers(value: object, location: str) -> tuple[str, ...]:
    if not isinstance(value, list):
        return (_parse_text(value, location),)
    return tuple(_parse_text(name, location) for name in cast("list[object]", value))


PRICES_ENV = "KEDGE_PRICES"
MILLION = 1_000_000
MAX_CACHED_MODELS = 1_000

# Suffixes of a model name that denote a snapshot of the same model: a date, a number or "latest".
_SNAPSHOT_SUFFIX = re.compile(r"[-@](?:\d{4}-\d{2}-\d{2}|\d{8}|\d{4}|latest)")


@dataclass(frozen=True, slots=True, eq=False)  # hashing all tables would take longer than a search
class Prices:
    """Tables of prices: the first that has a model is used, and in it the most specific entry."""

    tables: tuple[tuple[Price, ...], ...]
    as_of: date | None = None
    """The date of the table in the package."""

    def find(
        self, provider: str, model: str, *, input_tokens: int = 0, on: date | None = None
    ) -> Price | None:
        """Return the price of a model.

        Args:
            provider: The name of the provider.
            model: The name of the model, with or without the date of a snapshot.
            input_tokens: The size of the request, for prices with tiers.
            on: The day; today by default.

        Returns:
            The price, or None if it is unknown.
        """
        day = on or datetime.now(UTC).date()
        for price in self._find_entries(provider, model):
            if price.since <= day and (not price.above or input_tokens > price.above):
                return price
        return None

    def has_tiers(self, provider: str, model: str) -> bool:
        """Return whether the price of a model depends on the size of a request."""
        return any(price.above for price in self._find_entries(provider, model))

    @lru_cache(MAX_CACHED_MODELS)  # noqa: B019 - a process has few tables
    def _find_entries(self, provider: str, model: str) -> tuple[Price, ...]:
        """Return the entries for a model in the order of the tables, the most specific entry of each table first."""
        entries: list[Price] = []
        for table in self.tables:
            matching = [
                price
                for price in table
                if provider in price.providers and _matches_model(price.model, model)
            ]
            entries += sorted(matching, key=_specificity, reverse=True)
        return tuple(entries)

    def cost(
        self, usage: Usage, provider: str, model: str, *, at: float | None = None
    ) -> float | None:
        """Return the cost of a response.

        Args:
            usage: Its tokens.
            provider: The name of the provider.
            model: The name of the model.
            at: The time of the response, for a model whose price has changed; now by default.

        Returns:
            Dollars, or None if the price is unknown.
        """
        price = self.find_at(usage, provider, model, at)
        if price is None:
            return None
        return price.cost(usage)

    def find_at(self, usage: Usage, provider: str, model: str, at: float | None) -> Price | None:
        """Return the price of a response at a time; now by default."""
        time = datetime.now(UTC) if at is None else datetime.fromtimestamp(at, UTC)
        return self.find(provider, model, input_tokens=usage.input_tokens, on=time.date())


def sum_costs(costs: Sequence[float | None]) -> float | None:
    """Return the sum of costs in dollars; None if there are none, or if one is not known.

    Args:
        costs: The cost of each response.

    Returns:
        The sum, or None: without the cost of a response it would be too low.
    """
    known = [cost for cost in costs if cost is not None]
    if not known or len(known) < len(costs):
        return None
    return sum(known)


@checked
def load_prices(path: str | Path | None = None) -> Prices:
    """Load the prices of the package, and the prices of a file, which take precedence.

    Args:
        path: The file; by default there is none.

    Raises:
        InvalidSetting: The file cannot be read, or is not valid.
    """
    built_in = parse_prices(
        (files("kedge.usage") / "prices.toml").read_text("utf-8"), "prices.toml"
    )
    if path is None:
        return built_in
    custom = parse_prices(None, str(path))
    return Prices((*custom.tables, *built_in.tables), built_in.as_of)


def current_prices() -> Prices:
    """Return the prices of this process: of the package and of ``KEDGE_PRICES``."""
    return _load_cached(os.environ.get(PRICES_ENV, "").strip() or None)


_load_cached = lru_cache(maxsize=4)(load_prices)


def cost(usage: Usage, provider: str, model: str, *, at: float | None = None) -> float | None:
    """Return the cost of a response by the current prices; see `Prices.cost`."""
    return current_prices().cost(usage, provider, model, at=at)


def cache_savings(
    usage: Usage, provider: str, model: str, *, at: float | None = None
) -> float | None:
    """Return how much the provider's prompt cache saved by the current prices, less what writing to it cost.

    Args:
        usage: The tokens of a response.
        provider: The name of the provider.
        model: The name of the model.
        at: The time of the response; now by default.

    Returns:
        Dollars, which are negative if writing cost more; None if the price is unknown.
    """
    price = current_prices().find_at(usage, provider, model, at)
    if price is None:
        return None
    return price.cache_savings(usage)


def _matches_model(pattern: str, model: str) -> bool:
    if pattern.endswith("*"):
        return model.startswith(pattern[:-1])
    rest = model.removeprefix(pattern)
    if rest == model and pattern:
        return False
    return not rest or _SNAPSHOT_SUFFIX.fullmatch(rest) is not None


def _specificity(price: Price) -> tuple[bool, int, int, date]:
    return not price.model.endswith("*"), len(price.model), price.above, price.since
