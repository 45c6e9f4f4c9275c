"""Checks of settings and arguments, which raise ``InvalidSetting``, and the values of environment variables."""

import os
import sys
from collections.abc import Collection, Iterable, Mapping
from inspect import iscoroutinefunction
from typing import Any, TypeVar, cast

from kedge.errors import InvalidSetting, InvalidType, describe_type

T = TypeVar("T")
MAX_VALUE_CHARS = 200
MAX_TIME = 1e18
"""The latest time in seconds: its day is an integer that every database can store."""


_ON_WORDS = frozenset({"1", "true", "yes", "on", "y", "t", "enabled"})
_OFF_WORDS = frozenset({"0", "false", "no", "off", "n", "f", "disabled"})


def parse_switch(text: str) -> bool | None:
    """Return whether a word means on or off, in any case; None if it means neither."""
    word = text.strip().lower()
    if word in _ON_WORDS:
        return True
    if word in _OFF_WORDS:
        return False
    return None


def read_variable(name: str, environ: Mapping[str, str] = os.environ) -> str:
    """Return an environment variable without surrounding whitespace; empty if it is unset or blank."""
    return environ.get(name, "").strip()


def describe_value(value: object) -> str:
    """Return a value for the error about it, as Python code of limited length."""
    try:
        text = repr(value)
    except ValueError:  # Python writes no integers of more than 4,300 digits
        return "an integer of thousands of digits"
    if len(text) > MAX_VALUE_CHARS:
        return f"{text[:MAX_VALUE_CHARS]}…"
    return text


def validate_seconds(seconds: object, field: str) -> float | None:
    """Return a duration that is a finite number of seconds above 0, or None; else raise InvalidSetting."""
    if seconds is None:
        return None
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        raise InvalidSetting(f"{field} must be a number of seconds, not {describe_value(seconds)}")
    if not 0 < seconds <= sys.float_info.max:
        shown = describe_value(seconds)
        raise InvalidSetting(f"{field} must be a finite number of seconds above 0, not {shown}")
    return float(seconds)


def check_times(**times: float | None) -> None:
    """Raise ``InvalidSetting`` unless each time that is given is a finite number of seconds since 1970."""
    for name, time in times.items():
        if time is not None and not (isinstance(time, int | float) and abs(time) <= MAX_TIME):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidSetting(f"{name} must be a finite time in seconds since 1970")


def check_count(name: str, value: int, minimum: int = 0) -> int:
    """Return a setting, or raise ``InvalidSetting`` if it is not an integer of at least a minimum."""
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidSetting(
            f"{name} must be an integer of at least {minimum}, not {describe_value(value)}"
        )
    return value


def check_positive_int(name: str, value: int, *, maximum: int | None = None) -> int:
    """Return a setting, or raise ``InvalidSetting`` if it is not an integer between 1 and a maximum."""
    check_count(name, value, 1)
    if maximum is not None and value > maximum:
        raise InvalidSetting(
            f"{name} must not be above its maximum: {describe_value(value)} is more than {maximum}"
        )
    return value


def check_choice(name: str, value: object, choices: Collection[str]) -> None:
    """Raise ``InvalidSetting`` if a setting has none of these values."""
    if not isinstance(value, str) or value not in choices:
        listed = ", ".join(choices)
        raise InvalidSetting(f"{name} must be one of {listed}, not {describe_value(value)}")


def check_number(name: str, value: object) -> None:
    """Raise ``InvalidSetting`` unless a value is a finite number that a float can represent."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    is_finite = is_number and abs(cast("float", value)) <= sys.float_info.max
    if not is_finite:
        raise InvalidSetting(f"{name} must be a finite number, not {describe_value(value)}")


def list_arguments(name: str, kind: type[T], values: Iterable[T]) -> list[T]:
    """Return the elements of an argument that is a list, or raise ``InvalidType`` unless all have a type."""
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidType(
            f"{name} must be a list of {kind.__name__}, not {describe_type(cast('object', values))}"
        )
    listed = list(values)
    check_type(f"each of {name}", kind, *listed)
    return listed


def check_type(name: str, kind: type, *values: object) -> None:
    """Raise ``InvalidType`` unless each of these values has a type."""
    if wrong := [each for each in values if not isinstance(each, kind)]:
        raise InvalidType(f"{name} must be {kind.__name__}, not {describe_type(wrong[0])}")


def check_callback(name: str, function: Any) -> Any:
    """Return a function that is called and never awaited, or raise ``InvalidSetting`` if it is async or no function."""
    if not callable(function) or iscoroutinefunction(function):
        raise InvalidSetting(
            f"{name} must be a function that is not async, not {describe_value(function)}"
        )
    return function
