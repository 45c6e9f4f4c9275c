"""Finding the price of a model, and what a response costs by it."""

import os
import re
import tomllib
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any, cast

from kedge.errors import InvalidSetting
from kedge.events import Usage


@dataclass(frozen=True, slots=True)
class Price:
    """Dollars per million tokens. Without ``cached`` or ``cache_write`` those tokens cost as input."""

    providers: tuple[str, ...]
    model: str
    input: float
    output: float
    cached: float | None = None
    cache_write: float | None = None
    above: int = 0
    since: date = date.min


@dataclass(frozen=True, slots=True)
class PriceFile:
    """What a file says."""

    entries: tuple[Price, ...]
    as_of: date | None


_AMOUNTS = ("input", "output", "cached", "cache_write")
_REQUIRED = ("provider", "model", "input", "output")
_KEYS = ("provider", "model", *_AMOUNTS, "above", "since")


def parse_prices(text: str | None, source: str) -> PriceFile:
    """The prices in a text, or in the file at ``place``."""
    try:
        data = tomllib.loads(Path(source).read_text("utf-8") if text is None else text)
    except OSError as error:
        raise InvalidSetting(f"{source} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise InvalidSetting(f"{source} is no valid TOML: {error}") from error
    unknown = sorted(set(data) - {"as_of", "prices"})
    if unknown:
        raise InvalidSetting(f"{source}: there is no {unknown[0]!r}; it takes as_of and [[prices]]")
    entries = data.get("prices", [])
    if not isinstance(entries, list):
        raise InvalidSetting(f"{source}: prices must be a list of tables, written [[prices]]")
    listed = cast("list[object]", entries)
    return PriceFile(
        tuple(_parse_price(entry, f"{source}: prices[{i}]") for i, entry in enumerate(listed)),
        _parse_date(data["as_of"], f"{source}: as_of") if "as_of" in data else None,
    )


def _parse_price(entry: object, location: str) -> Price:
    if not isinstance(entry, dict):
        raise InvalidSetting(f"{location} must be a table")
    table = cast("dict[str, Any]", entry)
    for key in table:
        if key not in _KEYS:
            raise InvalidSetting(
                f"{location} has no place for {key!r}; it takes {', '.join(_KEYS)}"
            )
    for key in _REQUIRED:
        if key not in table:
            raise InvalidSetting(f"{location} lacks {key!r}")
    amounts = {
        key: _parse_amount(table[key], f"{location}.{key}") for key in _AMOUNTS if key in table
    }
    since = _parse_date(table["since"], f"{location}.since") if "since" in table else date.min
    return Price(
        providers=_parse_providers(table["provider"], f"{location}.provider"),
        model=_parse_text(table["model"], f"{location}.model"),
        above=int(_parse_amount(table.get("above", 0), f"{location}.above")),
        since=since,
        **amounts,
    )


def _parse_amount(value: object, location: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e9:
        raise InvalidSetting(f"{location} must be a number that is not negative")
    return float(value)


def _parse_date(value: object, location: str) -> date:
    if isinstance(value, datetime) or not isinstance(value, date):
        raise InvalidSetting(f"{location} must be a day, like 2026-11-15")
    return value


def _parse_text(value: object, location: str) -> str:
    if not isinstance(value, str) or not value:
        raise InvalidSetting(f"{location} must be a text")
    return value


def _parse_providers(value: object, location: str) -> tuple[str, ...]:
    listed = cast("list[object]", value) if isinstance(value, list) else [value]
    return tuple(_parse_text(each, location) for each in listed)


PRICES_ENV = "KEDGE_PRICES"
MILLION = 1_000_000
MAX_CACHED_MODELS = 1_000

# What may follow the name of a model and still be that model: a date or a snapshot's number, or "latest".
_SNAPSHOT_SUFFIX = re.compile(r"[-@](?:\d{4}-\d{2}-\d{2}|\d{8}|\d{4}|latest)")


@dataclass(frozen=True, slots=True)
class Prices:
    """Tables of prices: the first that names a model counts, and in it the most exact entry."""

    tables: tuple[tuple[Price, ...], ...]
    as_of: date | None = field(default=None, compare=False)
    """When the table of the package was written down."""
    _cache: dict[tuple[str, str], tuple[tuple[Price, ...], ...]] = field(
        default_factory=dict[tuple[str, str], tuple[tuple[Price, ...], ...]],
        compare=False,
        repr=False,
    )

    def find(
        self, provider: str, model: str, *, input_tokens: int = 0, on: date | None = None
    ) -> Price | None:
        """The price of a model on a day (today if none is named), for a request of this size."""
        day = on or datetime.now(UTC).date()
        found = (
            _select_price(table, input_tokens, day) for table in self._find_entries(provider, model)
        )
        return next((price for price in found if price), None)

    def _find_entries(self, provider: str, model: str) -> tuple[tuple[Price, ...], ...]:
        """The entries that name a model; few models are used, and they are used often."""
        known = self._cache.get((provider, model))
        if known is None:
            known = tuple(
                tuple(
                    p for p in table if provider in p.providers and _matches_model(p.model, model)
                )
                for table in self.tables
            )
            if len(self._cache) < MAX_CACHED_MODELS:
                self._cache[provider, model] = known
        return known

    def cost(
        self, usage: Usage, provider: str, model: str, *, at: float | None = None
    ) -> float | None:
        """What a response cost in dollars; ``None`` if its model has no price here.

        ``at`` is its time, for a model whose price has changed.
        """
        day = None if at is None else datetime.fromtimestamp(at, UTC).date()
        price = self.find(provider, model, input_tokens=usage.input_tokens, on=day)
        return None if price is None else _compute_cost(usage, price)


def load_prices(path: str | Path | None = None) -> Prices:
    """The prices of the package, with those of a file before them."""
    shipped = parse_prices(
        (files("kedge.prices") / "prices.toml").read_text("utf-8"), "prices.toml"
    )
    mine = () if path is None else (parse_prices(None, str(path)).entries,)
    return Prices((*mine, shipped.entries), shipped.as_of)


def current_prices() -> Prices:
    """The prices that hold in this process: those of the package, and of ``KEDGE_PRICES``."""
    return _load_cached(os.environ.get(PRICES_ENV) or None)


_load_cached = lru_cache(maxsize=4)(load_prices)


def cost(usage: Usage, provider: str, model: str, *, at: float | None = None) -> float | None:
    """What a response cost in dollars, by the current prices; ``None`` if nobody knows."""
    return current_prices().cost(usage, provider, model, at=at)


def _select_price(table: tuple[Price, ...], input_tokens: int, day: date) -> Price | None:
    fitting = [
        price
        for price in table
        if price.since <= day and (not price.above or input_tokens > price.above)
    ]
    return max(fitting, key=_specificity, default=None)


def _matches_model(pattern: str, model: str) -> bool:
    if pattern.endswith("*"):
        return model.startswith(pattern[:-1])
    rest = model.removeprefix(pattern)
    if rest == model and pattern:
        return False
    return not rest or _SNAPSHOT_SUFFIX.fullmatch(rest) is not None


def _specificity(price: Price) -> tuple[bool, int, int, date]:
    return not price.model.endswith("*"), len(price.model), price.above, price.since


def _compute_cost(usage: Usage, price: Price) -> float:
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
