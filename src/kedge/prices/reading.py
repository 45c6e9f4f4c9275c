"""Reading a file of prices; a mistake is told with its place."""

import tomllib
from dataclasses import dataclass
from datetime import date, datetime
from pathlib import Path
from typing import Any, cast

from kedge.errors import InvalidSetting


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


def read_prices(text: str | None, place: str) -> PriceFile:
    """The prices in a text, or in the file at ``place``."""
    try:
        data = tomllib.loads(Path(place).read_text("utf-8") if text is None else text)
    except OSError as error:
        raise InvalidSetting(f"{place} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise InvalidSetting(f"{place} is no valid TOML: {error}") from error
    unknown = sorted(set(data) - {"as_of", "prices"})
    if unknown:
        raise InvalidSetting(f"{place}: there is no {unknown[0]!r}; it takes as_of and [[prices]]")
    entries = data.get("prices", [])
    if not isinstance(entries, list):
        raise InvalidSetting(f"{place}: prices must be a list of tables, written [[prices]]")
    listed = cast("list[object]", entries)
    return PriceFile(
        tuple(_price(entry, f"{place}: prices[{i}]") for i, entry in enumerate(listed)),
        _day(data["as_of"], f"{place}: as_of") if "as_of" in data else None,
    )


def _price(entry: object, place: str) -> Price:
    if not isinstance(entry, dict):
        raise InvalidSetting(f"{place} must be a table")
    table = cast("dict[str, Any]", entry)
    for key in table:
        if key not in _KEYS:
            raise InvalidSetting(f"{place} has no place for {key!r}; it takes {', '.join(_KEYS)}")
    for key in _REQUIRED:
        if key not in table:
            raise InvalidSetting(f"{place} lacks {key!r}")
    amounts = {key: _amount(table[key], f"{place}.{key}") for key in _AMOUNTS if key in table}
    since = _day(table["since"], f"{place}.since") if "since" in table else date.min
    return Price(
        providers=_providers(table["provider"], f"{place}.provider"),
        model=_text(table["model"], f"{place}.model"),
        above=int(_amount(table.get("above", 0), f"{place}.above")),
        since=since,
        **amounts,
    )


def _amount(value: object, place: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e9:
        raise InvalidSetting(f"{place} must be a number that is not negative")
    return float(value)


def _day(value: object, place: str) -> date:
    if isinstance(value, datetime) or not isinstance(value, date):
        raise InvalidSetting(f"{place} must be a day, like 2026-11-15")
    return value


def _text(value: object, place: str) -> str:
    if not isinstance(value, str) or not value:
        raise InvalidSetting(f"{place} must be a text")
    return value


def _providers(value: object, place: str) -> tuple[str, ...]:
    listed = cast("list[object]", value) if isinstance(value, list) else [value]
    return tuple(_text(each, place) for each in listed)
