"""Split a JSON object and an array into the text of their members, so that some can be replaced.

A program's request is sent with the values that the program wrote: they are copied as text, and never decoded and
encoded again. `msgspec.Raw` finds where each value ends.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import TypeVar

import msgspec

from kedge.text.json_text import encode_escaped

T = TypeVar("T")
_decode_object = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_array = msgspec.json.Decoder(list[msgspec.Raw]).decode
_MEMBER_START = re.compile(rb'\s*[{,]\s*("(?:[^"\\]|\\.)*")\s*:\s*')
_ELEMENT_START = re.compile(rb"\s*[\[,]\s*")
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F][0-9a-fA-F]{2}")
_STRING_OR_SPACE = re.compile(r'"(?:[^"\\]|\\.)*"|[ \t\n\r]+')


def split_object(content: bytes) -> dict[str, bytes]:
    """Return the text of each member of a JSON object, as it is written.

    Raises:
        ValueError: The text is not one JSON object in UTF-8, or a member occurs twice.
        RecursionError: It is nested too deep.
    """
    content.decode()  # msgspec does not check the encoding of raw values
    found, masked = _decode(_decode_object, content)
    members: dict[str, bytes] = {}
    position = 0
    # Of members with the same name msgspec returns the last value, so that some text is left over here.
    for value in map(bytes, found.values()):
        start = _MEMBER_START.match(masked, position)
        if start is None or not masked.startswith(value, start.end()):
            raise ValueError("two members have the same name")
        position = start.end() + len(value)
        members[json.loads(content[start.start(1) : start.end(1)])] = content[
            start.end() : position
        ]
    if b"".join(masked[position:].split()) not in (b"}", b"{}"):
        raise ValueError("two members have the same name")
    return members


def split_array(content: bytes) -> tuple[bytes, ...]:
    """Return the text of each element of a JSON array, as it is written.

    Raises:
        ValueError: The text is not a JSON array.
    """
    found, masked = _decode(_decode_array, content)
    elements = tuple(map(bytes, found))
    if masked is content:
        return elements
    copied: list[bytes] = []
    position = 0
    for element in elements:
        start = _ELEMENT_START.match(masked, position)
        first = start.end() if start else position
        position = first + len(element)
        copied.append(content[first:position])
    return tuple(copied)


def _decode(decode: Callable[[bytes], T], content: bytes) -> tuple[T, bytes]:
    """Return the raw values in a text, and the text in which they were found.

    msgspec rejects a lone surrogate. Then this is a text of the same length with other escapes.
    """
    try:
        return decode(content), content
    except msgspec.DecodeError:
        masked = _SURROGATE.sub(rb"\\ue000", content)
        return decode(masked), masked


def join_object(members: Mapping[str, bytes]) -> bytes:
    """Return a JSON object with members of these texts."""
    return b"{%b}" % b",".join(
        encode_escaped(name) + b":" + value for name, value in members.items()
    )


def normalize_json(text: str) -> str:
    """Return JSON text in a compact form that retains the order of members and the spelling of numbers.

    Two texts that differ only in whitespace or in how characters are escaped become equal. Text that is
    not JSON is returned unchanged.
    """
    try:
        json.loads(text)
    except ValueError:
        return text
    return _STRING_OR_SPACE.sub(_normalize_token, text)


def _normalize_token(match: re.Match[str]) -> str:
    token = match[0]
    return json.dumps(json.loads(token)) if token.startswith('"') else ""
