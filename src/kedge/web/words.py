"""Numbers and times as a person would say them."""

import time
from collections.abc import Callable
from datetime import UTC, datetime

_SIZES = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
_COUNTS = ((1e9, "B"), (1e6, "M"), (1e3, "k"))
_AGES = ((86_400.0, "d"), (3600.0, "h"), (60.0, "min"))
NO_VALUE = "\N{EN DASH}"


def format_size(count: float) -> str:
    """A number of bytes."""
    return _scale(count, _SIZES, " B", " ")


def format_number(value: float) -> str:
    """A count, shortened from ten thousand on."""
    return f"{value:,.0f}" if abs(value) < 10_000 else _scale(value, _COUNTS, "", "")


def _scale(value: float, units: tuple[tuple[float, str], ...], plain: str, space: str) -> str:
    for unit, name in units:
        if abs(value) >= unit:
            scaled = value / unit
            return (
                f"{scaled:.1f}".removesuffix(".0") + space + name
                if scaled < 100
                else (f"{scaled:.0f}{space}{name}")
            )
    return f"{value:.0f}{plain}"


def format_duration(seconds: float | None) -> str:
    """A stretch of time."""
    if seconds is None:
        return NO_VALUE
    if seconds < 0.001:
        return f"{seconds * 1e6:.0f} µs"
    if seconds < 1:
        return f"{seconds * 1e3:.0f} ms" if seconds >= 0.01 else f"{seconds * 1e3:.1f} ms"
    return f"{seconds:.1f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def format_percent(part: float, whole: float) -> str:
    """A part of a whole in per cent."""
    if not whole:
        return NO_VALUE
    value = 100 * part / whole
    return f"{value:.1f} %" if 0 < value < 10 or 99 < value < 100 else f"{value:.0f} %"


def format_cost(dollars: float | None) -> str:
    """A price in dollars."""
    if dollars is None:
        return NO_VALUE
    return f"${dollars:,.2f}" if dollars >= 1 or not dollars else f"${dollars:.4f}"


def format_age(when: float | None, now: Callable[[], float] = time.time) -> str:
    """How long ago something was, or how soon it will be."""
    if when is None:
        return NO_VALUE
    away = now() - when
    for unit, name in _AGES:
        if abs(away) >= unit:
            told = f"{abs(away) / unit:.0f} {name}"
            return f"{told} ago" if away > 0 else f"in {told}"
    return "just now" if away >= 0 else "in a moment"


def format_time(when: float | None) -> str:
    """A point in time, in full."""
    if when is None:
        return NO_VALUE
    return datetime.fromtimestamp(when, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def format_timestamp(when: float) -> str:
    """A point in time for machines."""
    return datetime.fromtimestamp(when, UTC).isoformat(timespec="seconds")


def shorten_id(name: str, length: int = 6) -> str:
    """The telling end of a long id."""
    head, mark, tail = name.partition("_")
    if not mark or len(tail) <= length + 2:
        return name if len(name) <= length + 10 else f"…{name[-length:]}"
    return f"{head}_…{tail[-length:]}"


def pluralize(count: int, one: str, many: str = "") -> str:
    """A count with its noun."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"
