"""Decode large JSON in a thread, so that other threads run meanwhile.

The decoder does not let other threads run before it has returned, which takes 0.4 seconds for 30 MB of small objects,
and several seconds if the garbage collector runs in between. So the number of values is limited, they are counted
before any is created, and the members and elements of large objects and arrays are decoded one after the other.
"""

from typing import Any

import msgspec

from kedge._internal.json_text import decode, reject_constant

LARGE_BYTES = 1_000_000
"""The size above which JSON that others have sent is decoded in a thread."""
MAX_ITEMS = 20_000
"""The maximum number of items of a request, and of the elements of any other list that is checked one by one."""
MAX_VALUES = 1_000_000
"""The maximum number of values in large JSON."""
PIECE_BYTES = 64 * 1024
"""The size up to which a value is decoded at once."""
MAX_SPLIT_LEVELS = 4
"""The levels of large objects and arrays that are decoded in pieces: each level is scanned once more."""

_split_object = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_split_array = msgspec.json.Decoder(list[msgspec.Raw]).decode


class TooManyValues(Exception):
    """JSON has more than ``MAX_VALUES`` values."""


def decode_strict(data: bytes) -> Any:
    """Return the value of JSON of any size; ``NaN`` and infinite numbers are rejected.

    Raises:
        ValueError: If it is not JSON, or a key of a large object has half a character.
        RecursionError: If it is nested too deep.
        TooManyValues: If it is large and has too many values.
    """
    if len(data) <= LARGE_BYTES:
        return decode(data.decode(), parse_constant=reject_constant)
    if count_values(data) > MAX_VALUES:
        raise TooManyValues
    return _decode_in_pieces(data.strip(b" \t\r\n"), MAX_SPLIT_LEVELS)


def _decode_in_pieces(data: bytes | msgspec.Raw, levels: int) -> Any:
    text = memoryview(data)
    first = bytes(text[:1])
    is_split = levels > 0 and len(text) > PIECE_BYTES
    if is_split and first == b"{":
        members = _split_object(data)
        return {name: _decode_in_pieces(value, levels - 1) for name, value in members.items()}
    if is_split and first == b"[":
        return [_decode_in_pieces(element, levels - 1) for element in _split_array(data)]
    return decode(bytes(text).decode(), parse_constant=reject_constant)


def count_values(data: bytes) -> int:
    """Count the values of JSON, or of any text as far as it resembles JSON, up to a few more than the maximum.

    Each comma and each opening bracket that is not part of a string is followed by a value or, in an empty array or
    object, by none.
    """
    values = 1
    is_in_string = False
    start = 0
    while start < len(data) and values <= MAX_VALUES:
        piece = data[start : start + PIECE_BYTES]
        backslashes = len(piece) - len(piece.rstrip(b"\\"))
        if (
            backslashes % 2 and len(piece) > 1
        ):  # the next piece starts with the one that escapes its first character
            piece = piece[:-1]
        start += len(piece)
        unescaped = piece.replace(rb"\\", b"").replace(rb"\"", b"")
        parts = unescaped.split(b'"')  # outside and inside of strings in turn
        outside = b"".join(parts[is_in_string::2])
        is_in_string ^= len(parts) % 2 == 0
        values += outside.count(b",") + outside.count(b"[") + outside.count(b"{")
    return values
