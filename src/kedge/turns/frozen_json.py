"""Immutable JSON values, in which metadata, data and provider items are stored.

A block is shared by many Turns, digests and threads, so nothing inside it may change. ``freeze`` copies a JSON value
into nested ``FrozenMap`` and tuples; ``thaw`` returns plain dicts and lists. Values that JSON cannot represent
exactly (NaN, lone surrogates, objects, extremely large integers) are rejected here with their path. The path is
built only when an error is raised, so that valid values have no cost.
"""

import json
import math
from collections.abc import ItemsView, Iterator, KeysView, Mapping, ValuesView
from types import NoneType
from typing import Any, ClassVar, NoReturn, Self, cast

from kedge.errors import InvalidJSON

MAX_DEPTH = 100
"""The maximum nesting of a JSON value."""
MAX_INTEGER_BITS = 2048
"""The maximum size of an integer: Python parses this many digits with any configuration."""

_set_field = object.__setattr__


class Immutable:
    """A value that cannot be changed by assignments, and copies of which are the value itself."""

    __slots__ = ()
    _remedy: ClassVar = "this value is immutable"

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(self._remedy)

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(self._remedy)

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:
        return self


class FrozenMap(Immutable, Mapping[str, Any]):
    """An immutable mapping with string keys, compared and hashed as JSON: true is not 1.

    Args:
        members: The members, which are copied and frozen.
        **more: Further members.

    Raises:
        InvalidJSON: If a member is not a JSON value.
    """

    __slots__ = ("_content", "_depth")
    _remedy = "a FrozenMap is immutable; use with_members to derive a new one"
    _content: dict[str, Any]
    _depth: int | None

    # Members are set in __new__, because a second call of __init__ would change the map in place.
    def __new__(cls, members: Mapping[str, Any] | None = None, /, **more: Any) -> Self:
        """Freeze these members."""
        if more:
            members = {**(members or {}), **more}
        return cast("Self", freeze_map(members or {}, "$"))

    def with_members(self, changes: Mapping[str, Any]) -> "FrozenMap":
        """Return a map with members added.

        Args:
            changes: The members to add; None removes one.

        Returns:
            The new map.

        Raises:
            InvalidJSON: If a member is not a JSON value.
        """
        merged = {**self._content, **freeze_map(changes, "$")}
        removed = [name for name, value in changes.items() if value is None]
        for name in removed:
            del merged[name]
        return unchecked_map(merged)

    @property
    def depth(self) -> int:
        """The number of levels of maps and tuples in this value, including itself."""
        if self._depth is None:
            _set_field(self, "_depth", 1 + max(map(_depth, self._content.values()), default=0))
        return cast("int", self._depth)

    def __getitem__(self, key: str) -> Any:
        return self._content[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._content)

    def __len__(self) -> int:
        return len(self._content)

    def __contains__(self, key: object) -> bool:
        return key in self._content

    # Mapping has these four methods too, but they are several times slower.
    def get(self, key: str, default: Any = None) -> Any:
        """Return a member, or the default."""
        return self._content.get(key, default)

    def keys(self) -> KeysView[str]:
        """Return the names of the members."""
        return self._content.keys()

    def values(self) -> ValuesView[Any]:
        """Return the values of the members."""
        return self._content.values()

    def items(self) -> ItemsView[str, Any]:
        """Return the members as pairs."""
        return self._content.items()

    def __init_subclass__(cls) -> NoReturn:
        raise TypeError("FrozenMap cannot have subclasses, which could be mutable")

    def __or__(self, other: Mapping[str, Any]) -> "FrozenMap":
        """Return the members of both; those of ``other`` take precedence."""
        return unchecked_map({**self._content, **freeze_map(other, "$")})

    def __eq__(self, other: object) -> bool:
        return json_equal(self, other) if isinstance(other, Mapping) else NotImplemented

    def __hash__(self) -> int:
        return hash(frozenset((name, _json_hash(value)) for name, value in self._content.items()))

    def __reduce__(self) -> tuple[type["FrozenMap"], tuple[dict[str, Any]]]:
        return FrozenMap, (dict(self._content),)

    def __repr__(self) -> str:
        return repr(thaw(self))


def freeze(value: Any, path: str = "$") -> Any:
    """Copy a JSON value into immutable form, or raise ``InvalidJSON``.

    A frozen Struct with a ``to_json`` method is a value of a higher layer; it is immutable and is stored
    unchanged.
    """
    try:
        return _freeze(value, MAX_DEPTH)
    except InvalidJSON as error:
        raise error.prefix_path(path) from None


def freeze_map(value: object, path: str) -> FrozenMap:
    """Freeze a mapping."""
    if type(value) is FrozenMap:
        return value
    if not isinstance(value, Mapping):
        raise InvalidJSON(path, f"expected a mapping, got {type(value).__name__}")
    return freeze(value, path)


class ReadOnlyList(list[Any]):
    """A list that cannot be changed; see ``ReadOnlyObject``."""

    __slots__ = ()

    def _reject_change(self: Any, *_: Any, **__: Any) -> NoReturn:
        raise TypeError("this list is read-only; list(…) makes a copy that can be changed")

    __setitem__ = __delitem__ = __iadd__ = __imul__ = _reject_change
    append = clear = extend = insert = pop = remove = reverse = sort = _reject_change

    def __reduce__(self) -> tuple[type[Self], tuple[list[Any]]]:
        return type(self), (list(self),)


class ReadOnlyObject(dict[str, Any]):
    """A dict that cannot be changed, nor can the dicts and lists in it; other values need not be JSON.

    They are replaced by read-only ones when they are read, because few members of the objects of a stream ever are.
    Unlike a ``MappingProxyType`` it is accepted by ``json``, ``pickle``, ``copy`` and ``dataclasses.asdict``.
    """

    __slots__ = ()

    def _reject_change(self: Any, *_: Any, **__: Any) -> NoReturn:
        raise TypeError("this mapping is read-only; dict(…) makes a copy that can be changed")

    __setitem__ = __delitem__ = __ior__ = _reject_change
    clear = pop = popitem = setdefault = update = _reject_change

    def __reduce__(self) -> tuple[type[Self], tuple[dict[str, Any]]]:
        return type(self), (dict(self),)

    def __getitem__(self, name: str) -> Any:
        value = super().__getitem__(name)
        if type(value) in _MUTABLE_TYPES:
            value = _to_read_only(value)
            _set_member(self, name, value)
        return value

    def get(self, name: str, default: Any = None) -> Any:
        """Return a member, or the default."""
        try:
            return self[name]
        except KeyError:
            return default

    def __iter__(self) -> Iterator[str]:
        # With this method, ``dict(…)`` and ``{**…}`` read each member instead of copying the original ones.
        return super().__iter__()

    def items(self) -> Any:
        """Return the members as pairs."""
        return {name: self[name] for name in self}.items()

    def values(self) -> Any:
        """Return the values of the members."""
        return {name: self[name] for name in self}.values()

    def copy(self) -> dict[str, Any]:
        """Return a dict with the same members."""
        return dict(self)

    def __or__(self, other: Any) -> Any:
        return dict(self) | other

    def __ror__(self, other: Any) -> Any:
        return other | dict(self)


_MUTABLE_TYPES = frozenset({dict, list})
_set_member = dict[str, Any].__setitem__


def _to_read_only(value: Any) -> Any:
    if type(value) is dict:
        return ReadOnlyObject(cast("dict[str, Any]", value))
    if type(value) is not list:
        return value
    try:
        return ReadOnlyList(map(_to_read_only, cast("list[Any]", value)))
    except RecursionError:  # no value of a server makes an event fail
        return cast("list[Any]", value)


def copy_read_only_object(members: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a JSON object with the same members, nothing in which can be changed."""
    return members if type(members) in _READ_ONLY_OBJECTS else ReadOnlyObject(members)


def copy_containers(value: Any) -> Any:
    """Return a value in which all dicts, lists and tuples are copied; other values need not be JSON."""
    if isinstance(value, dict):
        members = cast("dict[str, Any]", value).items()
        return {name: copy_containers(member) for name, member in members}
    if isinstance(value, list):
        return [copy_containers(member) for member in cast("list[Any]", value)]
    if isinstance(value, tuple):
        return tuple(map(copy_containers, cast("tuple[Any, ...]", value)))
    return value


# Checking types is several times faster than isinstance, which asks the abstract base class of FrozenMap.
_READ_ONLY_OBJECTS = frozenset({FrozenMap, ReadOnlyObject})


_SCALARS = frozenset({NoneType, bool, str, int, float})


def thaw(value: Any) -> Any:
    """Return plain dicts and lists, for ``json.dumps``."""
    kind = type(cast("object", value))
    if kind in _SCALARS:
        return value
    if kind is FrozenMap:
        return {name: thaw(member) for name, member in cast("FrozenMap", value).items()}
    if kind is tuple:
        return [thaw(member) for member in cast("tuple[object, ...]", value)]
    return thaw(_to_json(value))


def json_equal(one: Any, other: Any) -> bool:
    """Return whether two values are the same JSON: true is not 1, 1 is not 1.0, lists equal tuples."""
    if one is other:
        return True
    if isinstance(one, bool | float) or isinstance(other, bool | float):
        return type(one) is type(other) and repr(one) == repr(other)
    if isinstance(one, str | int | NoneType):
        return bool(one == other)
    if isinstance(one, Mapping):
        return _mappings_equal(cast("Mapping[str, Any]", one), other)
    if isinstance(one, list | tuple):
        return _sequences_equal(cast("tuple[Any, ...]", one), other)
    return _has_json_form(one) and json_equal(_to_json(one), other)


def check_text(text: object, path: str) -> str:
    """Return the text as a plain string; reject lone surrogates, which UTF-8 cannot encode."""
    if type(text) is not str:
        if not isinstance(text, str):
            raise InvalidJSON(path, f"expected a string, got {type(text).__name__}")
        text = str.__str__(text)  # a subclass may be mutable
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidJSON(path, f"lone surrogate at character {error.start}") from None
    return text


def path_step(key: str) -> str:
    """Return the step from an object to its member, as part of a path."""
    return f".{key}" if key.isidentifier() else f"[{json.dumps(key)}]"


def _freeze(value: Any, depth_left: int) -> Any:
    kind = type(cast("object", value))
    if kind is str:
        return value if value.isascii() else check_text(value, "")
    if value is None or kind is bool:
        return value
    if kind is FrozenMap:
        if value.depth > depth_left:
            raise InvalidJSON("", f"nested more than {MAX_DEPTH} levels deep")
        return value
    if kind is dict:
        return _freeze_mapping(value, depth_left)
    if kind is list or kind is tuple:
        return _freeze_sequence(value, depth_left)
    return _freeze_other(value, depth_left)


def _freeze_mapping(value: Mapping[Any, Any], depth_left: int) -> FrozenMap:
    if not depth_left:
        raise InvalidJSON("", f"nested more than {MAX_DEPTH} levels deep")
    members: dict[str, Any] = {}
    for key, member in value.items():
        if not isinstance(key, str):
            raise InvalidJSON("", f"the key {key!r} is not a string")
        if type(member) is str and member.isascii() and type(key) is str and key.isascii():
            members[key] = member  # most members are plain text
            continue
        try:
            members[check_text(key, "")] = _freeze(member, depth_left - 1)
        except InvalidJSON as error:
            raise error.prefix_path(path_step(key)) from None
    return unchecked_map(members)


def _freeze_sequence(value: list[Any] | tuple[Any, ...], depth_left: int) -> tuple[Any, ...]:
    if not depth_left:
        raise InvalidJSON("", f"nested more than {MAX_DEPTH} levels deep")
    members: list[Any] = []
    for index, member in enumerate(value):
        try:
            members.append(_freeze(member, depth_left - 1))
        except InvalidJSON as error:
            raise error.prefix_path(f"[{index}]") from None
    return tuple(members)


def _freeze_other(value: Any, depth_left: int) -> Any:
    """Freeze a value of another type; an instance of a subclass becomes one of its JSON type."""
    match value:
        case str():
            return check_text(value, "")
        case int():
            if value.bit_length() > MAX_INTEGER_BITS:
                raise InvalidJSON("", f"an integer of more than {MAX_INTEGER_BITS} bits")
            return int.__int__(value)
        case float():
            if not math.isfinite(value):
                raise InvalidJSON("", f"{value} is not a JSON number")
            return float.__float__(value)
        case Mapping():
            return _freeze_mapping(cast("Mapping[Any, Any]", value), depth_left)
        case list() | tuple():
            return _freeze_sequence(cast("list[Any]", value), depth_left)
        case _ if _has_json_form(value):
            return value
        case _:
            raise InvalidJSON("", f"a {type(value).__name__} is not a JSON value")


_set_content, _set_depth = (vars(FrozenMap)[name].__set__ for name in ("_content", "_depth"))


def _build_map(members: dict[str, Any]) -> FrozenMap:
    frozen = object.__new__(FrozenMap)
    _set_content(frozen, members)
    _set_depth(frozen, None)
    return frozen


EMPTY = _build_map({})
"""The only map without members, so that an identity check finds out whether a map is empty."""


def unchecked_map(members: dict[str, Any]) -> FrozenMap:
    """Return a map of members that the caller has frozen and checked, and must not change."""
    return _build_map(members) if members else EMPTY


def _depth(value: Any) -> int:
    if type(value) is tuple:
        return 1 + max(map(_depth, cast("tuple[Any, ...]", value)), default=0)
    return value.depth if type(value) is FrozenMap else 0


def _has_json_form(value: object) -> bool:
    """Return whether a value is a frozen Struct with a JSON form."""
    settings = getattr(type(value), "__struct_config__", None)
    return getattr(settings, "frozen", False) and callable(getattr(value, "to_json", None))


def _to_json(value: Any) -> Any:
    return freeze(value.to_json())


def _mappings_equal(one: Mapping[str, Any], other: Any) -> bool:
    other = _to_json(other) if _has_json_form(other) else other
    if not isinstance(other, Mapping):
        return False
    members = cast("Mapping[str, Any]", other)
    return len(one) == len(members) and all(
        name in members and json_equal(member, members[name]) for name, member in one.items()
    )


def _sequences_equal(one: list[Any] | tuple[Any, ...], other: Any) -> bool:
    if not isinstance(other, list | tuple):
        return False
    elements = cast("tuple[Any, ...]", other)
    return len(one) == len(elements) and all(map(json_equal, one, elements))


def _json_hash(value: Any) -> int:
    if type(value) is tuple:
        return hash(tuple(map(_json_hash, cast("tuple[Any, ...]", value))))
    return hash(_to_json(value)) if _has_json_form(value) else hash(value)
