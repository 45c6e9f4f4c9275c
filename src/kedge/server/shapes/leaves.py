"""Shapes of plain values: strings, identifiers, numbers, flags, choices, free-form JSON."""

import math
from dataclasses import dataclass, field
from re import Pattern
from re import compile as pattern
from typing import Any

from kedge.server import errors
from kedge.server.shapes.language import (
    MAX_DEPTH,
    At,
    check_finite,
    check_storable,
    check_unicode,
    quoted,
    shortened,
    spell,
    wrong_type,
    wrong_value,
)

MAX_INTEGER = 2**63 - 1
"""The largest integer that every store and every client can hold."""

ID_CHARACTERS = pattern("[A-Za-z0-9_-]*")


@dataclass(frozen=True, slots=True)
class Text:
    """A string, perhaps with bounds on its length or with a pattern to match."""

    least: int = 0
    most: int | None = None
    matching: Pattern[str] | None = None
    expected: str = "a string"

    def check(self, value: Any, at: At) -> None:
        """Check the type, the characters, the length, the pattern."""
        if type(value) is not str:
            raise wrong_type(self, value, at)
        check_unicode(value, at)
        if len(value) < self.least:
            situation = errors.STRING_TOO_SHORT if value else errors.STRING_EMPTY
            raise situation(path=spell(at), least=self.least, length=len(value))
        if self.most is not None and len(value) > self.most:
            raise errors.STRING_TOO_LONG(path=spell(at), most=self.most, length=len(value))
        if self.matching is not None and self.matching.fullmatch(value) is None:
            raise errors.STRING_OFF_PATTERN(path=spell(at), pattern=self.matching.pattern)


@dataclass(frozen=True, slots=True)
class Id:
    """An identifier: letters, digits, underscores and dashes, perhaps with a known beginning."""

    prefix: str = ""
    most: int = 64
    expected: str = "a string"

    def check(self, value: Any, at: At) -> None:
        """Check the type, the length, the characters, the beginning."""
        if type(value) is not str:
            raise wrong_type(self, value, at)
        if not value:
            raise errors.STRING_EMPTY(path=spell(at), least=1)
        if len(value) > self.most:
            raise errors.STRING_TOO_LONG(path=spell(at), most=self.most, length=len(value))
        if ID_CHARACTERS.fullmatch(value) is None:
            raise errors.WRONG_CHARACTERS(path=spell(at), value=value)
        if not value.startswith(self.prefix):
            raise errors.WRONG_PREFIX(path=spell(at), value=value, prefix=self.prefix)


@dataclass(frozen=True, slots=True)
class Integer:
    """A whole number within bounds; ``true`` is not one, and neither is ``1.0``."""

    least: int = -MAX_INTEGER
    most: int = MAX_INTEGER
    expected: str = "an integer"

    def check(self, value: Any, at: At) -> None:
        """Check the type and the bounds."""
        if type(value) is not int:
            raise wrong_type(self, value, at)
        if value < self.least:
            raise errors.INTEGER_TOO_SMALL(path=spell(at), least=self.least, value=shown(value))
        if value > self.most:
            raise errors.INTEGER_TOO_LARGE(path=spell(at), most=self.most, value=shown(value))


def shown(value: float) -> str:
    """Write a number for an error; one of thousands of digits only by its size."""
    if type(value) is int and value.bit_length() > 4096:
        return "a number of more than a thousand digits"
    return str(value)


@dataclass(frozen=True, slots=True)
class Decimal:
    """A number within bounds: finite, whole or not."""

    least: float = -math.inf
    most: float = math.inf
    expected: str = "a decimal"

    def check(self, value: Any, at: At) -> None:
        """Check the type, that it is finite, and the bounds."""
        if type(value) is not float and type(value) is not int:
            raise wrong_type(self, value, at)
        check_finite(value, at)
        if value < self.least:
            raise errors.DECIMAL_TOO_SMALL(path=spell(at), least=self.least, value=shown(value))
        if value > self.most:
            raise errors.DECIMAL_TOO_LARGE(path=spell(at), most=self.most, value=shown(value))


@dataclass(frozen=True, slots=True)
class Flag:
    """``true`` or ``false``."""

    expected: str = "a boolean"

    def check(self, value: Any, at: At) -> None:
        """Check the type."""
        if type(value) is not bool:
            raise wrong_type(self, value, at)


@dataclass(frozen=True, slots=True)
class Choice:
    """One of several strings. ``also`` holds values that are taken but not advertised."""

    values: tuple[str, ...]
    also: tuple[str, ...] = ()
    taken: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "taken", frozenset(self.values + self.also))

    @property
    def expected(self) -> str:
        """List the values: ``one of 'auto' or 'disabled'``."""
        return f"one of {quoted([shortened(value) for value in self.values], 'or')}"

    def check(self, value: Any, at: At) -> None:
        """Check the type, then that the value is one of them."""
        if type(value) is not str:
            raise wrong_type(self, value, at)
        if value not in self.taken:
            raise wrong_value(value, self.values, at)


@dataclass(frozen=True, slots=True)
class Anything:
    """Any JSON value, or any JSON object: finite, in Unicode, and not nested without end."""

    only_objects: bool = False
    expected: str = "an object"

    def check(self, value: Any, at: At) -> None:
        """Check that the value can be stored and sent again."""
        if self.only_objects and type(value) is not dict:
            raise wrong_type(self, value, at)
        check_storable(value, at, MAX_DEPTH)
