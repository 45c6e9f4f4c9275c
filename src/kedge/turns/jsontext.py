"""Strict JSON text: what Python's parser would alter or make up is refused instead.

The parser itself does not know where in the document it is. So where no value can be (NaN, a number
out of range, a member given twice) it leaves a ``Flaw``, and whoever reads the values says its path.
"""

import json
from typing import Any

from kedge.errors import InvalidJSON
from kedge.turns.frozen import MAX_INTEGER_BITS, Flaw

MAX_DIGITS = len(str(1 << MAX_INTEGER_BITS))


def parse(text: str | bytes) -> object:
    """Parse JSON text; the value may hold a ``Flaw``, which is refused as soon as it is read."""
    if not isinstance(text, str | bytes):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidJSON("$", f"expected JSON text, got {type(text).__name__}")
    try:
        return _decode(text if isinstance(text, str) else text.decode())
    except RecursionError:
        raise InvalidJSON("$", "nested too deeply") from None
    except UnicodeDecodeError as error:
        raise InvalidJSON("$", f"not UTF-8 at byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise InvalidJSON("$", f"not JSON: {error.msg} at character {error.pos}") from None


def _constant(name: str) -> Flaw:
    return Flaw(f"{name} is not a JSON number")


def _integer(digits: str) -> int | Flaw:
    if len(digits) > MAX_DIGITS + 1:  # and a sign
        return Flaw(f"an integer of more than {MAX_INTEGER_BITS} bits")
    return int(digits)


def _number(written: str) -> float | Flaw:
    """Read a fraction as the nearest double, as everyone does; zero and infinity are not near."""
    value = float(written)
    if value in (float("inf"), float("-inf")):
        return Flaw("a number too large to hold")
    if value == 0 and written.lower().partition("e")[0].strip("-0."):
        return Flaw("a number too small to hold")
    return value


def _members(pairs: list[tuple[str, Any]]) -> dict[str, Any] | Flaw:
    members = dict(pairs)
    if len(members) == len(pairs):
        return members
    seen: set[str] = set()
    twice = next(name for name, _ in pairs if name in seen or seen.add(name))
    return Flaw("given twice", twice)


_decode = json.JSONDecoder(
    object_pairs_hook=_members,
    parse_float=_number,
    parse_int=_integer,
    parse_constant=_constant,
).decode
