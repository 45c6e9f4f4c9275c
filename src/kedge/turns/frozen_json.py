"""Immutable JSON values, in which metadata, data and provider items are stored.

A block is shared by many Turns, digests and threads, so nothing inside it may change. ``freeze`` copies a JSON value
into nested ``FrozenMap`` and tuples; ``thaw`` returns plain dicts and lists. Values that JSON cannot represent
exactly (NaN, lone surrogates, objects, extremely large integers) are rejected here with their path. The path is
built only when an error is raised, so that valid values have no cost.

``wrap`` makes a map of an object that a decoder or a caller owns without checking it: few members of the objects of a
stream are ever read, so each level is made immutable when it is. Such a map is checked when it is frozen.
"""

# Only the functions of this module read the members of maps directly.
# ruff: noqa: SLF001
# pyright: reportPrivateUsage=false

import json
import math
from collections.abc import Callable, ItemsView, Iterator, KeysView, Mapping, ValuesView
from types import NoneType
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Self, TypeVar, cast

from msgspec.structs import force_setattr

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

    __slots__ = ("_content", "_depth", "_forms", "_source")
    _remedy = "a FrozenMap is immutable; use with_members to derive a new one"
    _content: dict[str, Any]
    _depth: int
    _forms: dict[Callable[..., Any], Any]
    """What ``compute_once`` has computed."""
    _source: dict[str, Any] | None
    """The object that ``wrap`` received; None if this map was checked."""

    # Members are set in __new__, because a second call of __init__ would change the map in place.
    def __new__(cls, members: Mapping[str, Any] | None = None, /, **more: Any) -> Self:
        """Freeze these members."""
        if more:
            members = {**(members or {}), **more}
        return cast("Self", freeze_map(members or {}, "$"))

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Compute what only some maps need."""
            if name == "_content":
                value = {name: _wrap(member) for name, member in self._source.items()}
            elif name == "_depth":
                value = 1 + max(map(_depth, self._content.values()), default=0)
            elif name == "_forms":
                value = {}
            else:
                raise AttributeError(name)
            _set_field(self, name, value)
            return value

    def with_members(self, changes: Mapping[str, Any]) -> "FrozenMap":
        """Return a map with members added.

        Args:
            changes: The members to add; None removes one.

        Returns:
            The new map.

        Raises:
            InvalidJSON: If a member is not a JSON value.
        """
        members = {**freeze_map(self, "$")._content, **freeze_map(changes, "$")._content}
        for name, value in changes.items():
            if value is None:
                del members[name]
        return unchecked_map(members)

    @property
    def depth(self) -> int:
        """The number of levels of maps and tuples in this value, including itself."""
        return self._depth

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
        """Return the members of both; the values of ``other`` take precedence."""
        return unchecked_map({**freeze_map(self, "$")._content, **freeze_map(other, "$")})

    def __eq__(self, other: object) -> bool:
        return json_equal(self, other) if isinstance(other, Mapping) else NotImplemented

    def __hash__(self) -> int:
        return hash(frozenset((name, _json_hash(value)) for name, value in self._content.items()))

    def __reduce__(self) -> tuple[Callable[[dict[str, Any]], "FrozenMap"], tuple[dict[str, Any]]]:
        if self._source is not None:
            return wrap, (self._source,)
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
    if type(value) is FrozenMap and value._source is None:
        return value
    if not isinstance(value, Mapping):
        raise InvalidJSON(path, f"expected a mapping, got {type(value).__name__}")
    return freeze(value, path)


_SCALARS = frozenset({NoneType, bool, str, int, float})


def thaw(value: Any) -> Any:
    """Return a value with plain dicts and lists, for ``json.dumps``.

    Args:
        value: A ``FrozenMap``, or any value with maps and tuples in it.

    Returns:
        A copy; values that are not JSON are the same.
    """
    kind = type(cast("object", value))
    if kind in _SCALARS:
        return value
    if kind is FrozenMap:
        value = value._source or value._content
    if isinstance(value, dict):
        return {name: thaw(member) for name, member in cast("dict[str, Any]", value).items()}
    if kind is list or isinstance(value, tuple | list):
        return [thaw(member) for member in cast("tuple[object, ...]", value)]
    if _has_json_form(value):
        return thaw(_to_json(value))
    return value


def json_equal(one: Any, other: Any) -> bool:
    """Return whether two values are the same JSON: true is not 1, 1 is not 1.0, lists equal tuples."""
    if one is other:
        return True
    if isinstance(one, bool | float) or isinstance(other, bool | float):
        return type(one) is type(other) and repr(one) == repr(other)
    if isinstance(one, str | int | NoneType):
        return bool(one == other)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        members = cast("Mapping[str, Any]", one)
        other_members = cast("Mapping[str, Any]", other)
        return members.keys() == other_members.keys() and all(
            json_equal(member, other_members[name]) for name, member in members.items()
        )
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        elements = cast("tuple[Any, ...]", one)
        other_elements = cast("tuple[Any, ...]", other)
        if len(elements) != len(other_elements):
            return False
        return all(map(json_equal, elements, other_elements))
    if _has_json_form(cast("object", one)):
        return json_equal(_to_json(one), other)
    return _has_json_form(other) and json_equal(one, _to_json(other))


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
    if kind is FrozenMap and value._source is not None:
        return _freeze_mapping(value._source, depth_left)
    if kind is FrozenMap:
        if value._depth > depth_left:
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
            raise InvalidJSON("", f"a value of type {type(value).__name__} is not JSON")


_set_content, _set_source = (vars(FrozenMap)[name].__set__ for name in ("_content", "_source"))


EMPTY = object.__new__(FrozenMap)
"""The only map without members, so that an identity check finds out whether a map is empty."""
_set_content(EMPTY, {})
_set_source(EMPTY, None)


def unchecked_map(members: dict[str, Any]) -> FrozenMap:
    """Return a map of members that the caller has frozen and checked, and must not change."""
    if not members:
        return EMPTY
    frozen = object.__new__(FrozenMap)
    _set_content(frozen, members)
    _set_source(frozen, None)
    return frozen


def add_frozen(known: FrozenMap, name: str, value: object) -> FrozenMap:
    """Return a map with one further member, whose value is immutable and has a JSON form."""
    return unchecked_map({**freeze_map(known, "$")._content, name: value})


def wrap(members: Mapping[str, Any]) -> FrozenMap:
    """Return a map of these members, which need not be JSON; the objects and arrays in them must not change."""
    if type(members) is FrozenMap:
        return members
    if not members:
        return EMPTY
    frozen = object.__new__(FrozenMap)
    _set_source(frozen, dict(members))
    return frozen


def wrap_field(name: str) -> Callable[[Any], None]:
    """Return the ``__post_init__`` of a frozen Struct with a map that is a field of this name."""

    def wrap_members(value: Any) -> None:
        force_setattr(value, name, wrap(getattr(value, name)))

    return wrap_members


def get_wrapped(members: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the object that ``wrap`` received, which must not be changed; of another map, its plain members."""
    if type(members) is not FrozenMap:
        return members
    if members._source is None:
        return thaw(members)
    return members._source


def wrap_copy(members: Mapping[str, Any]) -> FrozenMap:
    """Return a map of a copy of these members, which need not be JSON."""
    if type(members) is FrozenMap:
        return members
    return wrap(thaw(dict(members)))


def _wrap(value: Any) -> Any:
    if type(value) is dict:
        return wrap(cast("dict[str, Any]", value))
    if type(value) is not list and type(value) is not tuple:
        return value
    try:
        return tuple(map(_wrap, cast("list[Any]", value)))
    except RecursionError:  # no value of a server makes an event fail
        return cast("list[Any]", value)


Form = TypeVar("Form")


def compute_once(function: Callable[[FrozenMap], Form], value: FrozenMap) -> Form:
    """Return the result of a function of a map, which is called only once for each map."""
    forms = value._forms
    form = forms.get(function)
    if form is None:
        form = forms[function] = function(value)
    return form


def to_encodable(value: object) -> object:
    """Return a map as a dict, and any other object as text: the ``default`` of encoders for comparisons and sizes."""
    if type(value) is FrozenMap:
        return compute_once(thaw, value)
    return str(value)


def _depth(value: Any) -> int:
    if type(value) is tuple:
        return 1 + max(map(_depth, cast("tuple[Any, ...]", value)), default=0)
    if type(value) is FrozenMap:
        return value.depth
    return 0


def _has_json_form(value: object) -> bool:
    """Return whether a value is a frozen Struct with a JSON form."""
    settings = getattr(type(value), "__struct_config__", None)
    return getattr(settings, "frozen", False) and callable(getattr(value, "to_json", None))


def _to_json(value: Any) -> Any:
    return freeze(value.to_json())


def _json_hash(value: Any) -> int:
    if type(value) is tuple:
        return hash(tuple(map(_json_hash, cast("tuple[Any, ...]", value))))
    if _has_json_form(value):
        value = _to_json(value)
    return hash(value)
