"""JSON text, encoded and decoded by msgspec: the encoding that defines digests, stored rows and chat states.

Encoding is compact and deterministic, with the shortest text of a float that is read back unchanged. It refuses what
JSON cannot express: NaN and infinite numbers (which msgspec writes as ``null``), lone surrogates, keys that are
no text. Decoding accepts what ``json.loads`` accepts. Where msgspec differs (subclasses of strings and integers in
values to encode; lone surrogates, NaN, ``1e400`` and byte order marks in text to decode; all errors) the standard
library does the work.

Integers of any size, the order of keys, repeated keys (the last one is used) and escapes are the same in both. A
set is encoded as an array instead of rejected, so values from users of the library must be checked before.
"""

import json
from collections.abc import Callable
from functools import cache
from sys import float_info
from typing import Annotated, Any, cast

import msgspec

Buffer = bytes | bytearray | memoryview

_encode = msgspec.json.Encoder().encode
_encode_sorted = msgspec.json.Encoder(order="sorted").encode
_decode = msgspec.json.Decoder().decode
_standard_encode = json.JSONEncoder(
    ensure_ascii=False, allow_nan=False, separators=(",", ":")
).encode

_CHECKED_LEVELS = 7
"""The levels of nested arrays and objects that are checked fast; the size of the type doubles with each."""


@cache
def _build_finite_type() -> Any:
    """Return the type of JSON values of limited depth with finite numbers only; this takes long, so it is cached."""
    finite = Annotated[float, msgspec.Meta(ge=-float_info.max, le=float_info.max)]
    checked: Any = str | int | bool | None | finite
    for _ in range(_CHECKED_LEVELS):
        checked = str | int | bool | None | finite | dict[str, checked] | list[checked]
    # A Struct, because msgspec analyzes the type of a Struct once and any other type in every call.
    finite_type = msgspec.defstruct("_Finite", [("value", checked)])
    # Now, because msgspec crashes if two threads analyze a type at the same time.
    msgspec.convert({"value": 0.1}, finite_type)
    return finite_type


def encode(value: object) -> bytes:
    """Return a JSON value as compact UTF-8.

    Raises:
        ValueError: If it has NaN or an infinite number, or a string has a lone surrogate.
        TypeError: If it is not a JSON value.
    """
    try:
        msgspec.convert({"value": value}, _build_finite_type())  # which rejects other types, too
        return _encode(value)
    except Exception:  # noqa: BLE001 - the standard library decides whether it is an error
        return _standard_encode(value).encode()


def encode_text(value: object) -> str:
    """Return a JSON value as compact text, in which a lone surrogate is not an error."""
    try:
        return encode(value).decode()
    except UnicodeEncodeError:
        return _standard_encode(value)


encode_string: Callable[[str], bytes] = _encode
"""Return a plain string as JSON; raise ``UnicodeEncodeError`` if it has a lone surrogate."""


def escape_surrogates(text: str) -> str:
    """Return a text with lone surrogates, which UTF-8 cannot encode, as the escapes of JSON."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def encode_escaped(value: object) -> bytes:
    """Return a JSON value as compact UTF-8, with lone surrogates escaped."""
    try:
        return encode(value)
    except UnicodeEncodeError:
        return escape_surrogates(_standard_encode(value)).encode()


def encode_indented(value: object) -> str:
    """Return a JSON value as indented text for readers, with lone surrogates escaped."""
    return escape_surrogates(json.dumps(value, indent=2, ensure_ascii=False))


def encode_sorted(value: object) -> bytes:
    """Return a JSON value of plain types as compact UTF-8 with the keys of objects sorted: the input of digests.

    Raises:
        ValueError: If it has NaN or an infinite number, or a string has a lone surrogate.
    """
    data = _encode_sorted(value)
    if b"null" in data:  # which msgspec writes for numbers that are not finite
        _standard_encode(value)
    return data


def decode(data: str | Buffer, *, parse_constant: Callable[[str], Any] | None = None) -> Any:
    """Return the value of JSON text.

    Args:
        data: The text, or its bytes.
        parse_constant: Called with ``NaN``, ``Infinity`` or ``-Infinity``; by default these are floats.

    Raises:
        ValueError: If it is not JSON.
        RecursionError: If it is nested too deep.
    """
    try:
        return _decode(data)
    except Exception:  # noqa: BLE001 - as above
        if isinstance(data, memoryview):
            data = bytes(data)
        return json.loads(data, parse_constant=parse_constant)


def decode_object(data: str | Buffer) -> dict[str, Any]:
    """Return the JSON object in a text, or an empty one for anything else."""
    try:
        value = decode(data)
    except (ValueError, RecursionError):
        return {}
    if not isinstance(value, dict):
        return {}
    return cast("dict[str, Any]", value)


def copy_value(value: Any) -> Any:
    """Return a copy of a JSON value, with copies of the dicts and lists in it.

    Raises:
        RecursionError: If it is nested too deep.
    """
    return msgspec.to_builtins(value)


def reject_constant(name: str) -> Any:
    """Raise ``ValueError`` for a number that is not JSON; the ``parse_constant`` of strict readers."""
    raise ValueError(f"{name} is not JSON")
