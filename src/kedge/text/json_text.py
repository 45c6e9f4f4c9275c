"""JSON text, encoded and decoded by msgspec with exactly the results of the standard library.

Digests, databases and chat states contain the text that ``json.dumps`` writes with ``ensure_ascii=False``,
``allow_nan=False`` and compact separators, so every function here returns that text, and decoding accepts what
``json.loads`` accepts. msgspec differs in a few cases, and there the standard library does the work:

- Floats: msgspec writes ``1e16`` for ``1e+16``, ``0.00001`` for ``1e-05`` and ``null`` for NaN. It has no hook for
  floats, so a value is first matched against types that only have floats that both write equally. This costs
  twice as much as encoding, and both together a third of the standard library.
- Keys that are not strings, subclasses of strings and integers, nesting beyond the levels of these types.
- Lone surrogates, NaN, Infinity, ``1e400`` and byte order marks in decoded text, and all errors.

Integers of any size, the order of keys, repeated keys (the last one is used) and escapes are the same in both. A
set is encoded as an array instead of rejected, so values from users of the library must be checked before.
"""

import json
from collections.abc import Callable
from json.encoder import encode_basestring
from typing import Annotated, Any

import msgspec

Buffer = bytes | bytearray | memoryview

_CHECKED_LEVELS = 7
"""The levels of nested arrays and objects that are encoded fast; the size of the type doubles with each."""

_encode = msgspec.json.Encoder().encode
_encode_sorted = msgspec.json.Encoder(order="sorted").encode
_decode = msgspec.json.Decoder().decode
_decode_raw = msgspec.json.Decoder(list[msgspec.Raw]).decode
_standard_encode = json.JSONEncoder(
    ensure_ascii=False, allow_nan=False, separators=(",", ":")
).encode
_standard_encode_sorted = json.JSONEncoder(
    ensure_ascii=False, allow_nan=False, separators=(",", ":"), sort_keys=True
).encode


def _build_checked_type(number: Any) -> Any:
    """Return the type of JSON values of limited depth with floats of this type only."""
    checked: Any = str | int | bool | None | number
    for _ in range(_CHECKED_LEVELS):
        checked = str | int | bool | None | number | dict[str, checked] | list[checked]
    return msgspec.defstruct("_Checked", [("value", checked)])


# Structures, because msgspec analyzes the type of a structure once and any other type in every call.
_RoundFloats = _build_checked_type(
    Annotated[float, msgspec.Meta(gt=-1e16, lt=1e16, multiple_of=2**-13)]
)
"""Values with floats that are zero or a multiple of a power of two, such as 0.0, 1.0 and -0.5."""
_UsualFloats = _build_checked_type(Annotated[float, msgspec.Meta(ge=1e-4, lt=1e16)])
"""Values with floats that need no exponent, such as 0.7."""


def _check(value: object) -> None:
    """Raise ``ValidationError`` if msgspec might not write a value as the standard library does."""
    try:
        msgspec.convert({"value": value}, _RoundFloats)
    except msgspec.ValidationError:
        msgspec.convert({"value": value}, _UsualFloats)


# msgspec analyzes both types when they are first used, and crashes if two threads do that at the same time.
_check(0.1)


def encode(value: object) -> bytes:
    """Return a JSON value as compact UTF-8.

    Raises:
        ValueError: If it has NaN or an infinite number, or a string has a lone surrogate.
        TypeError: If it is not a JSON value.
    """
    try:
        _check(value)
        return _encode(value)
    except Exception:  # noqa: BLE001 - the standard library decides whether it is an error
        return _standard_encode(value).encode()


def encode_text(value: object) -> str:
    """Return a JSON value as compact text, in which a lone surrogate is not an error."""
    try:
        _check(value)
        return _encode(value).decode()
    except Exception:  # noqa: BLE001 - as above
        return _standard_encode(value)


def escape_surrogates(text: str) -> str:
    """Return a text with lone surrogates, which UTF-8 cannot encode, as the escapes of JSON."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def encode_escaped(value: object) -> bytes:
    """Return a JSON value as compact UTF-8, with lone surrogates escaped."""
    return escape_surrogates(encode_text(value)).encode()


def encode_indented(value: object) -> str:
    """Return a JSON value as indented text for readers, with lone surrogates escaped."""
    return escape_surrogates(json.dumps(value, indent=2, ensure_ascii=False))


def encode_sorted(value: object) -> bytes:
    """Return a JSON value as compact UTF-8 with the keys of objects sorted."""
    try:
        _check(value)
        return _encode_sorted(value)
    except Exception:  # noqa: BLE001 - as above
        return _standard_encode_sorted(value).encode()


def encode_plain(value: object) -> bytes:
    """Encode a value that has no floats and only strings as keys, without checking this."""
    try:
        return _encode(value)
    except Exception:  # noqa: BLE001 - as above
        return _standard_encode(value).encode()


def quote(text: str) -> str:
    """Return a string as JSON text."""
    try:
        return _encode(text).decode()
    except (UnicodeEncodeError, TypeError):  # a lone surrogate, or a subclass
        return encode_basestring(text)


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
        text = bytes(data) if isinstance(data, memoryview) else data
        return json.loads(text, parse_constant=parse_constant)


def copy_value(value: Any) -> Any:
    """Return a copy of a JSON value, with copies of the dicts and lists in it.

    Raises:
        RecursionError: If it is nested too deep.
    """
    return msgspec.to_builtins(value)


def split_array(text: str) -> list[str]:
    """Return the text of each element of a JSON array, as it is written.

    Raises:
        ValueError: If it is not an array, or has a lone surrogate.
    """
    return [bytes(element).decode() for element in _decode_raw(text)]


def reject_constant(name: str) -> Any:
    """Raise ``ValueError`` for a number that is not JSON; the ``parse_constant`` of strict readers."""
    raise ValueError(f"{name} is not JSON")
