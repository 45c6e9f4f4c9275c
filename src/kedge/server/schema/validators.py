"""Validators of JSON values, each of which checks a value at a path and raises the ``ApiError`` of the first violation.

Paths are linked pairs that are formatted only for an error: a valid body costs one tuple per member. An object
is checked in the order observed at the live API: missing members, then unknown ones, then each member in the
order of its table.
"""

import math
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from re import Pattern
from re import compile as pattern
from typing import Any, Literal, Protocol, TypeAlias, cast

from msgspec import Struct

from kedge._internal.large_json import MAX_ITEMS
from kedge.server import errors

JsonPath = tuple[Any, str | int] | None
"""The path of a value: the path of its parent, and its name or index; None is the body."""

MAX_DEPTH = 100
"""The maximum nesting of free-form JSON, such as a tool's parameters."""


class Validator(Protocol):
    """Protocol of validators, each of which checks one kind of value."""

    def check(self, value: Any, path: JsonPath) -> None:
        """Raise the ApiError of the first violation."""

    @property
    def expected(self) -> str:
        """The expected value for an error message: ``a string``, ``an object``."""
        ...


def format_path(path: JsonPath) -> str:
    """Format a path as the API does: ``input[0].content[1].text``."""
    steps: list[str] = []
    while path is not None:
        path, key = path
        steps.append(f"[{key}]" if isinstance(key, int) else f".{key}")
    return "".join(reversed(steps)).removeprefix(".")


MAX_IGNORED_PATHS = 32
"""The maximum number of ignored members of one request that are listed."""
MAX_IGNORED_PATH_CHARS = 100
INDEX_PATTERN = pattern(r"\[\d+\]")

_ignored_paths: ContextVar[dict[str, None] | None] = ContextVar("kedge_ignored_paths", default=None)


@contextmanager
def ignore_unknown() -> Generator[Mapping[str, None]]:
    """Accept unknown members inside the block: remove them from the value instead of raising.

    Whether to ignore them is a setting of the server, not of a schema, and the tables of schemas are shared
    by all servers of a process. A context variable passes the setting to the one check that needs it, so
    that a valid body has no additional cost.

    Yields:
        The paths of the removed members, with ``[]`` for every index: ``tools[].search_content_types``.
    """
    paths: dict[str, None] = {}
    token = _ignored_paths.set(paths)
    try:
        yield paths
    finally:
        _ignored_paths.reset(token)


def is_ignoring_unknown() -> bool:
    """Return whether unknown members are ignored here."""
    return _ignored_paths.get() is not None


def get_object(members: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a member that is an object, or an empty object for any other value."""
    value = members.get(name)
    if not isinstance(value, dict):
        return {}
    return cast("Mapping[str, Any]", value)


def _generalize_path(path: JsonPath) -> str:
    """Format a path without indexes and without characters that no HTTP header may contain."""
    text = INDEX_PATTERN.sub("[]", format_path(path))[:MAX_IGNORED_PATH_CHARS]
    safe = (char if "!" <= char <= "~" and char != "," else "?" for char in text)
    return "".join(safe)


JSON_TYPE_NAMES: Mapping[type, str] = {
    str: "a string",
    bool: "a boolean",
    int: "an integer",
    float: "a decimal number",
    list: "an array",
    dict: "an object",
    type(None): "null",
}
"""The API's name of each JSON type in error messages."""


def describe_json_type(value: object) -> str:
    """Return the API's name of the value's JSON type."""
    return JSON_TYPE_NAMES.get(type(value), f"a {type(value).__name__}")


def join_quoted(values: Sequence[str], conjunction: str) -> str:
    """List values as the API does: ``'a'``, ``'a' and 'b'``, ``'a', 'b', and 'c'``."""
    names = [f"'{value}'" for value in values]
    if len(names) < 3:
        return f" {conjunction} ".join(names)
    return f"{', '.join(names[:-1])}, {conjunction} {names[-1]}"


def shorten_name(name: str) -> str:
    """Shorten a long name as the API does where it lists many: ``fil...lts``."""
    if len(name) <= 16:
        return name
    return f"{name[:3]}...{name[-3:]}"


def path_error(template: errors.ErrorTemplate, path: JsonPath, **values: object) -> errors.ApiError:
    """Build the error of the value at a path."""
    return template(path=format_path(path), **values)


def invalid_type_error(validator: Validator, value: object, path: JsonPath) -> errors.ApiError:
    """Build the error of a value of the wrong JSON type."""
    return path_error(
        errors.INVALID_TYPE, path, expected=validator.expected, got=describe_json_type(value)
    )


def invalid_value_error(value: object, supported: Sequence[str], path: JsonPath) -> errors.ApiError:
    """Build the error of a string that is not one of the supported values."""
    text = value if isinstance(value, str) else ""
    return path_error(
        errors.INVALID_VALUE, path, value=text, supported=join_quoted(supported, "and")
    )


def check_unicode(value: str, path: JsonPath) -> None:
    """Reject a lone surrogate: JSON can escape one, but UTF-8 cannot encode it."""
    if value.isascii():
        return
    try:
        value.encode()
    except UnicodeEncodeError:
        raise path_error(errors.LONE_SURROGATE, path) from None


def check_finite(value: float, path: JsonPath) -> None:
    """Reject NaN and the infinities, which JSON does not have but Python's parser accepts."""
    if type(value) is float and not math.isfinite(value):
        raise path_error(errors.INVALID_NUMBER, path, value=value)


def check_storable(value: Any, path: JsonPath, depth: int) -> None:
    """Reject a value that cannot be stored or sent again, at any depth."""
    if depth == 0:
        raise path_error(errors.NESTING_TOO_DEEP, path, most=MAX_DEPTH)
    match value:
        case str():
            check_unicode(value, path)
        case float():
            check_finite(value, path)
        case dict():
            for key, member in cast("dict[str, Any]", value).items():
                check_unicode(key, path)
                check_storable(member, path, depth - 1)
        case list():
            for item in cast("list[Any]", value):
                check_storable(item, path, depth - 1)
        case _:
            pass


MAX_INTEGER = 2**63 - 1
"""The largest integer that every database and client supports."""

ID_PATTERN = pattern("[A-Za-z0-9_-]*")


class String(Struct, frozen=True):
    """A string, optionally with bounds on its length, of which the least is 1, and a pattern."""

    min_length: Literal[0, 1] = 0
    max_length: int | None = None
    pattern: Pattern[str] | None = None
    expected: str = "a string"

    def check(self, value: Any, path: JsonPath) -> None:
        """Check the type, the characters, the length, the pattern."""
        if type(value) is not str:
            raise invalid_type_error(self, value, path)
        check_unicode(value, path)
        if len(value) < self.min_length:
            raise path_error(errors.STRING_EMPTY, path, least=self.min_length)
        if self.max_length is not None and len(value) > self.max_length:
            raise path_error(errors.STRING_TOO_LONG, path, most=self.max_length, length=len(value))
        if self.pattern is not None and self.pattern.fullmatch(value) is None:
            raise path_error(errors.STRING_PATTERN_MISMATCH, path, pattern=self.pattern.pattern)


class Identifier(String, frozen=True):
    """An identifier of letters, digits, underscores and dashes, optionally with a prefix."""

    min_length: Literal[0, 1] = 1
    max_length: int | None = 64
    prefix: str = ""

    def check(self, value: Any, path: JsonPath) -> None:
        """Check the type, the length, the characters, the prefix."""
        String.check(self, value, path)
        if ID_PATTERN.fullmatch(value) is None:
            raise path_error(errors.INVALID_ID_CHARACTERS, path, value=value)
        # The servers of other providers have other ids, also such that begin in the same way.
        prefix = self.prefix
        if prefix and is_ignoring_unknown():
            prefix = f"{prefix}_"
        if not value.startswith(prefix):
            raise path_error(errors.INVALID_ID_PREFIX, path, value=value, prefix=self.prefix)


def format_rejected_number(value: float) -> str:
    """Format a number for an error; for a number of thousands of digits, only its size."""
    if type(value) is int and value.bit_length() > 4096:
        return "a number of more than a thousand digits"
    return str(value)


class Number(Struct, frozen=True):
    """A finite number within bounds."""

    minimum: float = -math.inf
    maximum: float = math.inf
    expected: str = "a decimal"
    types: tuple[type, ...] = (float, int)
    too_small: errors.ErrorTemplate = errors.DECIMAL_TOO_SMALL
    too_large: errors.ErrorTemplate = errors.DECIMAL_TOO_LARGE

    def check(self, value: Any, path: JsonPath) -> None:
        """Check the type, that it is finite, and the bounds."""
        if type(value) not in self.types:
            raise invalid_type_error(self, value, path)
        check_finite(value, path)
        if value < self.minimum:
            number = format_rejected_number(value)
            raise path_error(self.too_small, path, value=number, least=self.minimum)
        if value > self.maximum:
            number = format_rejected_number(value)
            raise path_error(self.too_large, path, value=number, most=self.maximum)


class Integer(Number, frozen=True):
    """An integer within bounds; ``true`` and ``1.0`` are rejected."""

    minimum: float = -MAX_INTEGER
    maximum: float = MAX_INTEGER
    expected: str = "an integer"
    types: tuple[type, ...] = (int,)
    too_small: errors.ErrorTemplate = errors.INTEGER_TOO_SMALL
    too_large: errors.ErrorTemplate = errors.INTEGER_TOO_LARGE


class Boolean(Struct, frozen=True):
    """``true`` or ``false``."""

    expected: str = "a boolean"

    def check(self, value: Any, path: JsonPath) -> None:
        """Check the type."""
        if type(value) is not bool:
            raise invalid_type_error(self, value, path)


class StringEnum:
    """One of several strings; ``unlisted`` ones are accepted but not listed in errors.

    Where unknown parameters are ignored, ``foreign`` strings of other servers are accepted as well.
    """

    def __init__(
        self, *values: str, unlisted: Sequence[str] = (), foreign: Sequence[str] = ()
    ) -> None:
        self.values = values
        self.accepted = frozenset((*values, *unlisted))
        self.foreign = frozenset(foreign)

    @property
    def expected(self) -> str:
        """For example ``one of 'auto' or 'disabled'``."""
        return f"one of {join_quoted([shorten_name(value) for value in self.values], 'or')}"

    def check(self, value: Any, path: JsonPath) -> None:
        """Check the type, then that the value is one of them."""
        if type(value) is not str:
            raise invalid_type_error(self, value, path)
        is_foreign = value in self.foreign and is_ignoring_unknown()
        if value not in self.accepted and not is_foreign:
            raise invalid_value_error(value, self.values, path)


class Rejected(Struct, frozen=True):
    """No value, with the error of every value; ``Object`` accepts null as a nullable member."""

    error: errors.ErrorTemplate = errors.UNKNOWN_PARAMETER
    values: Mapping[str, str] = {}
    expected: str = "null"

    def check(self, value: Any, path: JsonPath) -> None:
        """Reject every value."""
        raise path_error(self.error, path, **self.values)


class AnyJson(Struct, frozen=True):
    """Any JSON value or object that can be stored: finite, valid Unicode, bounded nesting."""

    only_objects: bool = False
    expected: str = "an object"

    def check(self, value: Any, path: JsonPath) -> None:
        """Check that the value can be stored and sent again."""
        if self.only_objects and type(value) is not dict:
            raise invalid_type_error(self, value, path)
        check_storable(value, path, MAX_DEPTH)


def check_length(items: Sequence[Any], path: JsonPath, most: int = MAX_ITEMS) -> None:
    """Reject a list with too many elements."""
    if len(items) > most:
        raise path_error(errors.ARRAY_TOO_LONG, path, most=most, length=len(items))


class Array(Struct, frozen=True):
    """A list of values of one kind; ``of`` names them in the plural.

    With ``skips_unknown``, objects of unknown types are removed where unknown parameters are ignored.
    """

    item: Validator
    of: str = "objects"
    min_length: int = 0
    max_length: int = MAX_ITEMS
    skips_unknown: bool = False

    @property
    def expected(self) -> str:
        """For example ``an array of objects``."""
        return f"an array of {self.of}"

    def check(self, value: Any, path: JsonPath) -> None:
        """Check the type, the length, each item."""
        if type(value) is not list:
            raise invalid_type_error(self, value, path)
        items = cast("list[Any]", value)
        check_length(items, path, self.max_length)  # before any pass over them
        if self.skips_unknown and is_ignoring_unknown() and isinstance(self.item, TaggedUnion):
            self._remove_unknown(items, self.item, path)
        if len(items) < self.min_length:
            raise path_error(errors.ARRAY_EMPTY, path, least=self.min_length)
        check = self.item.check
        for index, item in enumerate(items):
            check(item, (path, index))

    def _remove_unknown(self, items: list[Any], union: "TaggedUnion", path: JsonPath) -> None:
        for index in reversed(range(len(items))):
            tag = union.find_unknown_tag(items[index])
            if tag is not None:
                del items[index]
                _list_ignored(((path, index), tag))


Members: TypeAlias = dict[str, "Validator | Members"]
"""The members of an object by name; a table among them is an ``Object`` with its members."""


class Object:
    """An object with known members: in the table a ``!`` follows the name of a required one, a ``?`` of a nullable one.

    A ``~`` follows the name of a member that objects of the official SDKs have and requests have not. It is removed,
    so that a program can send back what a helper of the SDK returned.
    """

    expected = "an object"

    def __init__(self, table: "Mapping[str, Validator | Members]") -> None:
        self.members = {name.rstrip("!?~"): as_validator(member) for name, member in table.items()}
        self.required = tuple(name.rstrip("!?") for name in table if "!" in name)
        self.nullable = frozenset(name.rstrip("!?~") for name in table if name[-1] in "?~")
        self.removed = frozenset(name[:-1] for name in table if name[-1] == "~")
        self.order = {name: index for index, name in enumerate(self.members)}

    def check(self, value: Any, path: JsonPath) -> None:
        """Check the type, then missing members, unknown members, each member."""
        if type(value) is not dict:
            raise invalid_type_error(self, value, path)
        members = cast("dict[str, Any]", value)
        for name in self.required:
            if name not in members:
                raise self.missing_error(name, members, path)
        validators = self.members
        if not members.keys() <= validators.keys():
            self.check_unknown(members, path)
        for name in sorted(members, key=self.order.__getitem__):
            member = members[name]
            if member is not None or name not in self.nullable:
                try:
                    validators[name].check(member, (path, name))
                except errors.ApiError:
                    if not self._is_ignorable(name, member):
                        raise
                    _remove_ignored(members, name, path)
            if name in self.removed:
                del members[name]

    def _is_ignorable(self, name: str, value: object) -> bool:
        """Return whether an invalid member can be ignored: it is optional, and other servers accept the value.

        These are null, an empty array, and names of their own for choices and ids.
        """
        if name in self.required or not is_ignoring_unknown():
            return False
        validator = self.members[name]
        is_item_id = isinstance(validator, Identifier) and bool(validator.prefix)
        has_own_names = isinstance(validator, StringEnum) or is_item_id
        return value is None or value == [] or (has_own_names and isinstance(value, str))

    def missing_error(
        self, name: str, members: Mapping[str, Any], path: JsonPath
    ) -> errors.ApiError:
        """Build the error of a missing member."""
        return path_error(errors.MISSING_PARAMETER, (path, name))

    def check_unknown(self, members: dict[str, Any], path: JsonPath) -> None:
        """Reject unknown members, or remove them where they are ignored."""
        unknown = [name for name in members if name not in self.members]
        if not is_ignoring_unknown():
            raise path_error(errors.UNKNOWN_PARAMETER, (path, unknown[0]))
        for name in unknown:
            _remove_ignored(members, name, path)


def _remove_ignored(members: dict[str, Any], name: str, path: JsonPath) -> None:
    """Remove a member that is ignored, and list its path."""
    del members[name]
    _list_ignored((path, name))


def _list_ignored(path: JsonPath) -> None:
    paths = _ignored_paths.get()
    if paths is not None and len(paths) < MAX_IGNORED_PATHS:
        paths[_generalize_path(path)] = None


def as_validator(value: Validator | Members) -> Validator:
    """Return a validator, or the validator of the object with these members."""
    if isinstance(value, dict):
        return Object(value)
    return value


class Map(Struct, frozen=True):
    """An object with keys chosen by the client and values of one kind."""

    value: Validator
    max_properties: int | None = None
    max_key_length: int | None = None
    expected: str = "an object"

    def check(self, value: Any, path: JsonPath) -> None:
        """Check the type, the number of properties, each key and value."""
        if type(value) is not dict:
            raise invalid_type_error(self, value, path)
        members = cast("dict[str, Any]", value)
        if self.max_properties is not None and len(members) > self.max_properties:
            raise path_error(
                errors.OBJECT_TOO_LARGE, path, most=self.max_properties, length=len(members)
            )
        for key, member in members.items():
            check_unicode(key, path)
            if self.max_key_length is not None and len(key) > self.max_key_length:
                raise path_error(
                    errors.STRING_TOO_LONG, (path, key), most=self.max_key_length, length=len(key)
                )
            self.value.check(member, (path, key))


@dataclass(frozen=True, slots=True)
class TaggedUnion:
    """One of several objects, distinguished by the string in one of their members.

    A variant is a validator or a table of its members other than the tag. The error of an unknown tag
    names the tag (``tools[0].type``, as almost everywhere) or, with ``error_on_object``, the object itself
    (``input[0]``). If the same tags are used in several unions, ``all_tags`` lists them: the error of a tag
    that is valid elsewhere names the object. ``unlisted`` tags are accepted but not listed in errors. An
    object without a tag is of the ``default`` variant, if there is one. Where unknown parameters are ignored,
    the variants of other servers (``foreign``) are accepted as well, and an object without a tag is of the
    variant ``foreign_default``.
    """

    variants: Mapping[str, Validator | Members]
    tag: str = "type"
    error_on_object: bool = False
    all_tags: tuple[str, ...] = ()
    unlisted: tuple[str, ...] = ()
    expected: str = "an object"
    default: str | None = None
    foreign: Mapping[str, Validator | Members] = field(default_factory=dict[str, Any])
    foreign_default: str | None = None
    by_tag: Mapping[str, Validator] = field(init=False)

    def __post_init__(self) -> None:
        tag: Members = {self.tag: String()}
        by_tag: dict[str, Validator] = {}
        for name, variant in (*self.variants.items(), *self.foreign.items()):
            if isinstance(variant, dict):
                by_tag[name] = Object(tag | variant)
            else:
                by_tag[name] = variant
        object.__setattr__(self, "by_tag", by_tag)

    def find_unknown_tag(self, value: object) -> str | None:
        """Return the tag of an object that is of no known variant, or None."""
        if not isinstance(value, dict):
            return None
        tag = cast("dict[str, Any]", value).get(self.tag)
        if not isinstance(tag, str) or tag in self.by_tag:
            return None
        return tag

    def check(self, value: Any, path: JsonPath) -> None:
        """Check the type, find the tag, check the object that it selects."""
        if type(value) is not dict:
            raise invalid_type_error(self, value, path)
        members = cast("dict[str, Any]", value)
        tag = members.get(self.tag)
        if tag is None:
            tag = self.default
        if tag is None and self.foreign_default is not None and is_ignoring_unknown():
            tag = self.foreign_default
            members[self.tag] = tag
        if type(tag) is not str or not self._is_accepted(tag):
            raise self._tag_error(members, path)
        self.by_tag[tag].check(members, path)

    def _is_accepted(self, tag: str) -> bool:
        """Return whether there is a variant of this tag, here or, if unknown parameters are ignored, elsewhere."""
        if tag not in self.by_tag:
            return False
        return tag not in self.foreign or is_ignoring_unknown()

    def _tag_error(self, value: Mapping[str, Any], path: JsonPath) -> errors.ApiError:
        tag = value.get(self.tag)
        belonging = tuple(name for name in self.variants if name not in self.unlisted)
        if self.error_on_object or tag in self.all_tags:
            return invalid_value_error(tag, belonging, path)
        if self.tag not in value:
            return path_error(errors.MISSING_PARAMETER, (path, self.tag))
        return invalid_value_error(tag, self.all_tags or belonging, (path, self.tag))


class TypeUnion(Struct, frozen=True):
    """A value of one of several JSON types, each with its own validator."""

    expected: str
    by_type: Mapping[type, Validator]

    def check(self, value: object, path: JsonPath) -> None:
        """Check the value with the validator of its JSON type."""
        validator = self.by_type.get(type(value))
        if validator is None:
            raise invalid_type_error(self, value, path)
        validator.check(value, path)
