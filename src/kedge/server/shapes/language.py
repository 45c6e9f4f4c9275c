"""A small schema language: what a JSON value may be, as data, and one sentence per violation.

A shape checks a value that stands at a place and raises the ``ApiError`` of the first violation.
``leaves`` are the shapes of plain values, ``branches`` those that hold others; the tables of this
package are built from these and from little else. This module is what they have in common: how a
place is spelt, how a value is called in English, and what no value may hold anywhere.

Places are linked pairs, turned into text only when something is wrong: a valid body pays for a
tuple per member and for nothing else.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, cast

from kedge.server import errors

At = tuple[Any, str | int] | None
"""Where a value stands: the place of its parent and its own name or index; None is the body."""

MAX_DEPTH = 100
"""How deep JSON may nest where anything is allowed, such as in a tool's parameters."""


class Shape(Protocol):
    """What a value may be."""

    def check(self, value: Any, at: At) -> None:
        """Raise the ApiError of the first violation."""

    @property
    def expected(self) -> str:
        """Say in English what the value should have been: ``a string``, ``an object``."""
        ...


def spell(at: At) -> str:
    """Write a place as the API does: ``input[0].content[1].text``."""
    steps: list[str] = []
    while at is not None:
        at, key = at
        steps.append(f"[{key}]" if isinstance(key, int) else f".{key}")
    return "".join(reversed(steps)).removeprefix(".")


KINDS: Mapping[type, str] = {
    str: "a string",
    bool: "a boolean",
    int: "an integer",
    float: "a decimal number",
    list: "an array",
    dict: "an object",
    type(None): "null",
}
"""What the API calls the JSON value that it got."""


def kind_of(value: object) -> str:
    """Say in English what JSON value this is."""
    return KINDS.get(type(value), f"a {type(value).__name__}")


def quoted(values: Sequence[str], conjunction: str) -> str:
    """List values as the API does: ``'a'``, ``'a' and 'b'``, ``'a', 'b', and 'c'``."""
    names = [f"'{value}'" for value in values]
    if len(names) < 3:
        return f" {conjunction} ".join(names)
    return f"{', '.join(names[:-1])}, {conjunction} {names[-1]}"


def shortened(name: str) -> str:
    """Shorten a long name as the API does where it lists many: ``fil...lts``."""
    return name if len(name) <= 16 else f"{name[:3]}...{name[-3:]}"


def wrong_type(shape: Shape, value: object, at: At) -> errors.ApiError:
    """Make the error of a value whose JSON type is none that the shape takes."""
    return errors.WRONG_TYPE(path=spell(at), expected=shape.expected, got=kind_of(value))


def wrong_value(value: object, values: Sequence[str], at: At) -> errors.ApiError:
    """Make the error of a string that is none of the supported values."""
    text = value if isinstance(value, str) else ""
    return errors.WRONG_VALUE(path=spell(at), value=text, supported=quoted(values, "and"))


def check_unicode(value: str, at: At) -> None:
    """Refuse a lone surrogate: JSON can escape one, but UTF-8 and the store cannot hold it."""
    if value.isascii():
        return
    try:
        value.encode()
    except UnicodeEncodeError:
        raise errors.NOT_UNICODE(path=spell(at)) from None


def check_finite(value: float, at: At) -> None:
    """Refuse NaN and the infinities, which JSON does not have but Python's reader lets in."""
    if type(value) is float and not math.isfinite(value):
        raise errors.NOT_A_NUMBER(path=spell(at), value=value)


def check_storable(value: Any, at: At, depth: int) -> None:
    """Refuse what no store or client could hold, however deep inside the value."""
    if depth == 0:
        raise errors.TOO_DEEP(path=spell(at), most=MAX_DEPTH)
    match value:
        case str():
            check_unicode(value, at)
        case float():
            check_finite(value, at)
        case dict():
            for key, one in cast("dict[str, Any]", value).items():
                check_unicode(key, at)
                check_storable(one, at, depth - 1)
        case list():
            for one in cast("list[Any]", value):
                check_storable(one, at, depth - 1)
        case _:
            pass
