"""JSON values that cannot change: how metadata, data and provider items are kept.

A block is shared by many Turns, digests and threads, so nothing inside it may move. ``freeze`` copies
a JSON value into ``FrozenMap`` and tuples all the way down; ``thaw`` gives plain dicts and lists back.
What JSON cannot say exactly (NaN, lone surrogates, objects) is refused here, with its path, so that
it never travels further.
"""

import json
import math
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, NoReturn

from kedge.errors import InvalidJSON

MAX_DEPTH = 100
"""How deep a JSON value may nest."""


class FrozenMap(Mapping[str, Any]):
    """An immutable mapping with string keys, compared and hashed by value."""

    __slots__ = ("_members",)
    _members: Mapping[str, Any]

    def __init__(self, members: Mapping[str, Any] | None = None, /, **more: Any) -> None:
        frozen = {key: freeze(value, key) for key, value in {**(members or {}), **more}.items()}
        for key in frozen:
            check_text(key, "a key")
        object.__setattr__(self, "_members", MappingProxyType(frozen))

    def __getitem__(self, key: str) -> Any:
        return self._members[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._members)

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, key: object) -> bool:
        return key in self._members

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError("a FrozenMap cannot change; make a new one")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError("a FrozenMap cannot change; make a new one")

    def __or__(self, other: Mapping[str, Any]) -> "FrozenMap":
        """The members of both; those of ``other`` win."""
        return FrozenMap({**self._members, **other})

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Mapping):
            return NotImplemented
        # JSON tells true from 1 and 1 from 1.0; Python's == does not, so the text has a say too.
        return dict(self._members) == dict(other) and _text(self) == _text(other)  # pyright: ignore[reportUnknownArgumentType]

    def __hash__(self) -> int:
        return hash(frozenset(self._members.items()))

    def __reduce__(self) -> tuple[type["FrozenMap"], tuple[dict[str, Any]]]:
        return FrozenMap, (dict(self._members),)

    def __repr__(self) -> str:
        return repr(thaw(self))


EMPTY = FrozenMap()


def freeze(value: Any, path: str = "$", depth: int = 0) -> Any:
    """Copy a JSON value into immutable form; refuse what JSON cannot say exactly.

    An object with a ``to_json`` method is a value of a higher layer; it vouches for its own
    immutability and is kept as it is.
    """
    if depth > MAX_DEPTH:
        raise InvalidJSON(path, f"nested more than {MAX_DEPTH} levels deep")
    match value:
        case None | bool() | int() | FrozenMap():
            return value
        case str():
            return check_text(value, path)
        case float():
            if not math.isfinite(value):
                raise InvalidJSON(path, f"{value} is not a JSON number")
            return value
        case Mapping():
            return _freeze_mapping(value, path, depth)  # pyright: ignore[reportUnknownArgumentType]
        case list() | tuple():
            return tuple(
                freeze(member, f"{path}[{index}]", depth + 1)
                for index, member in enumerate(value)  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
            )
        case _ if hasattr(value, "to_json"):
            return value
        case _:
            raise InvalidJSON(path, f"a {type(value).__name__} is not a JSON value")


def _freeze_mapping(value: Mapping[Any, Any], path: str, depth: int) -> FrozenMap:
    members: dict[str, Any] = {}
    for key, member in value.items():
        if not isinstance(key, str):
            raise InvalidJSON(path, f"the key {key!r} is not a string")
        members[key] = freeze(member, f"{path}.{key}", depth + 1)
    return FrozenMap(members)


def thaw(value: Any) -> Any:
    """Plain dicts and lists again, as ``json.dumps`` wants them."""
    match value:
        case FrozenMap():
            return {key: thaw(member) for key, member in value.items()}
        case tuple():
            return [thaw(member) for member in value]  # pyright: ignore[reportUnknownVariableType]
        case None | bool() | int() | float() | str():
            return value
        case _:
            return value.to_json()


def _text(value: Mapping[str, Any]) -> str:
    return json.dumps(thaw(freeze(value)), sort_keys=True)


def check_text(text: str, path: str) -> str:
    """Return ``text``; refuse lone surrogates, which no wire can carry."""
    if not isinstance(text, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidJSON(path, f"expected a string, got {type(text).__name__}")
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidJSON(path, f"lone surrogate at character {error.start}") from None
    return text
