"""Validators of plain values: strings, identifiers, numbers, booleans, enums, free-form JSON."""

import math
from dataclasses import dataclass, field
from re import Pattern
from re import compile as pattern
from typing import Any

from kedge.server import errors
from kedge.server.schema.base import (
    MAX_DEPTH,
    JsonPath,
    check_finite,
    check_storable,
    check_unicode,
    format_path,
    invalid_type_error,
    invalid_value_error,
    join_quoted,
    shorten_name,
)

MAX_INTEGER = 2**63 - 1
"""The largest integer that every database and client supports."""

ID_PATTERN = pattern("[A-Za-z0-9_-]*")


@dataclass(frozen=True, slots=True)
class String:
    """A string, optionally with bounds on its length and a pattern."""

    min_length: int = 0
    max_length: int | None = None
    pattern: Pattern[str] | None = None
    expected: str = "a string"

    def check(self, value: Any, path: JsonPath) -> None:
        """Check the type, the characters, the length, the pattern."""
        if type(value) is not str:
            raise invalid_type_error(self, value, path)
        check_unicode(value, path)
        if len(value) < self.min_length:
            template = errors.STRING_TOO_SHORT if value else errors.STRING_EMPTY
            raise template(path=format_path(path), least=self.min_length, length=len(value))
        if self.max_length is not None and len(value) > self.max_length:
            raise errors.STRING_TOO_LONG(
                path=format_path(path), most=self.max_length, length=len(value)
            )
        if self.pattern is not None and self.pattern.fullmatch(value) is None:
            raise errors.STRING_PATTERN_MISMATCH(
                path=format_path(path), pattern=self.pattern.pattern
            )


@dataclass(frozen=True, slots=True)
class Identifier:
    """An identifier of letters, digits, underscores and dashes, optionally with a prefix."""

    prefix: str = ""
    max_length: int = 64
    expected: str = "a string"

    def check(self, value: Any, path: JsonPath) -> None:
        """Check the type, the length, the characters, the prefix."""
        if type(value) is not str:
            raise invalid_type_error(self, value, path)
        if not value:
            raise errors.STRING_EMPTY(path=format_path(path), least=1)
        if len(value) > self.max_length:
            raise errors.STRING_TOO_LONG(
                path=format_path(path), most=self.max_length, length=len(value)
            )
        if ID_PATTERN.fullmatch(value) is None:
            raise errors.INVALID_ID_CHARACTERS(path=format_path(path), value=value)
        if not value.startswith(self.prefix):
            raise errors.INVALID_ID_PREFIX(path=format_path(path), value=value, prefix=self.prefix)


@dataclass(frozen=True, slots=True)
class Integer:
    """An integer within bounds; ``true`` and ``1.0`` are rejected."""

    minimum: int = -MAX_INTEGER
    maximum: int = MAX_INTEGER
    expected: str = "an integer"

    def check(self, value: Any, path: JsonPath) -> None:
        """Check the type and the bounds."""
        if type(value) is not int:
            raise invalid_type_error(self, value, path)
        if value < self.minimum:
            raise errors.INTEGER_TOO_SMALL(
                path=format_path(path), least=self.minimum, value=format_number(value)
            )
        if value > self.maximum:
            raise errors.INTEGER_TOO_LARGE(
                path=format_path(path), most=self.maximum, value=format_number(value)
            )


def format_number(value: float) -> str:
    """Format a number for an error; for a number of thousands of digits, only its size."""
    if type(value) is int and value.bit_length() > 4096:
        return "a number of more than a thousand digits"
    return str(value)


@dataclass(frozen=True, slots=True)
class Number:
    """A finite number within bounds."""

    minimum: float = -math.inf
    maximum: float = math.inf
    expected: str = "a decimal"

    def check(self, value: Any, path: JsonPath) -> None:
        """Check the type, that it is finite, and the bounds."""
        if type(value) is not float and type(value) is not int:
            raise invalid_type_error(self, value, path)
        check_finite(value, path)
        if value < self.minimum:
            raise errors.DECIMAL_TOO_SMALL(
                path=format_path(path), least=self.minimum, value=format_number(value)
            )
        if value > self.maximum:
            raise errors.DECIMAL_TOO_LARGE(
                path=format_path(path), most=self.maximum, value=format_number(value)
            )


@dataclass(frozen=True, slots=True)
class Boolean:
    """``true`` or ``false``."""

    expected: str = "a boolean"

    def check(self, value: Any, path: JsonPath) -> None:
        """Check the type."""
        if type(value) is not bool:
            raise invalid_type_error(self, value, path)


@dataclass(frozen=True, slots=True)
class StringEnum:
    """One of several strings; ``unlisted`` ones are accepted but not listed in errors."""

    values: tuple[str, ...]
    unlisted: tuple[str, ...] = ()
    accepted: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "accepted", frozenset(self.values + self.unlisted))

    @property
    def expected(self) -> str:
        """For example ``one of 'auto' or 'disabled'``."""
        return f"one of {join_quoted([shorten_name(value) for value in self.values], 'or')}"

    def check(self, value: Any, path: JsonPath) -> None:
        """Check the type, then that the value is one of them."""
        if type(value) is not str:
            raise invalid_type_error(self, value, path)
        if value not in self.accepted:
            raise invalid_value_error(value, self.values, path)


@dataclass(frozen=True, slots=True)
class AnyJson:
    """Any JSON value or object that can be stored: finite, valid Unicode, bounded nesting."""

    only_objects: bool = False
    expected: str = "an object"

    def check(self, value: Any, path: JsonPath) -> None:
        """Check that the value can be stored and sent again."""
        if self.only_objects and type(value) is not dict:
            raise invalid_type_error(self, value, path)
        check_storable(value, path, MAX_DEPTH)
