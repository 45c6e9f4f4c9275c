"""The validator interface, and functions that all validators share.

A validator checks a value at a path and raises the ``ApiError`` of the first violation. ``scalars`` has
the validators of plain values, ``containers`` those with nested values. This module formats paths and
type names for errors, handles unknown members, and rejects values that cannot be stored.

Paths are linked pairs that are formatted only for an error: a valid body costs one tuple per member.
"""

import math
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol, cast

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


def reject_or_remove_unknown(
    value: dict[str, Any], known: Mapping[str, Any], path: JsonPath
) -> None:
    """Raise the error of the first unknown member, or remove all of them where they are ignored."""
    unknown = [name for name in value if name not in known]
    paths = _ignored_paths.get()
    if paths is None:
        raise errors.UNKNOWN_PARAMETER(path=format_path((path, unknown[0])))
    for name in unknown:
        del value[name]
        if len(paths) < MAX_IGNORED_PATHS:
            paths[_generalize_path((path, name))] = None


def _generalize_path(path: JsonPath) -> str:
    """Format a path without indexes and without characters that no HTTP header may contain."""
    steps: list[str] = []
    while path is not None:
        path, key = path
        steps.append("[]" if isinstance(key, int) else f".{key[:MAX_IGNORED_PATH_CHARS]}")
    text = "".join(reversed(steps)).removeprefix(".")
    safe = (char if "!" <= char <= "~" and char != "," else "?" for char in text)
    return "".join(safe)[:MAX_IGNORED_PATH_CHARS]


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
    return name if len(name) <= 16 else f"{name[:3]}...{name[-3:]}"


def invalid_type_error(validator: Validator, value: object, path: JsonPath) -> errors.ApiError:
    """Build the error of a value of the wrong JSON type."""
    return errors.INVALID_TYPE(
        path=format_path(path), expected=validator.expected, got=describe_json_type(value)
    )


def invalid_value_error(value: object, supported: Sequence[str], path: JsonPath) -> errors.ApiError:
    """Build the error of a string that is not one of the supported values."""
    text = value if isinstance(value, str) else ""
    return errors.INVALID_VALUE(
        path=format_path(path), value=text, supported=join_quoted(supported, "and")
    )


def check_unicode(value: str, path: JsonPath) -> None:
    """Reject a lone surrogate: JSON can escape one, but UTF-8 cannot encode it."""
    if value.isascii():
        return
    try:
        value.encode()
    except UnicodeEncodeError:
        raise errors.LONE_SURROGATE(path=format_path(path)) from None


def check_finite(value: float, path: JsonPath) -> None:
    """Reject NaN and the infinities, which JSON does not have but Python's parser accepts."""
    if type(value) is float and not math.isfinite(value):
        raise errors.INVALID_NUMBER(path=format_path(path), value=value)


def check_storable(value: Any, path: JsonPath, depth: int) -> None:
    """Reject a value that cannot be stored or sent again, at any depth."""
    if depth == 0:
        raise errors.NESTING_TOO_DEEP(path=format_path(path), most=MAX_DEPTH)
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
