"""Edit members of a JSON object in place, without rewriting the rest of its text.

A program's request is sent with the bytes that the program wrote; only the members that change are
replaced. The scanner records the start and end of each member and of each element of one array; the
values are parsed by the standard library.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from json.decoder import JSONDecoder
from types import MappingProxyType
from typing import Any, NamedTuple, cast

from kedge.text.json_text import reject_constant, split_array

_WHITESPACE = re.compile(r"[ \t\n\r]*")


_decode_value = JSONDecoder(parse_constant=reject_constant).raw_decode


class Span(NamedTuple):
    """The position of a value in a text."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Member:
    """A member of an object: its value, and the positions of its key and its value."""

    value: Any
    key: Span
    span: Span


@dataclass(frozen=True, slots=True)
class ScannedObject:
    """A JSON object with the position of each member."""

    text: str
    members: Mapping[str, Member]

    def get(self, name: str) -> Any:
        """Return the value of a member, or None if it is absent."""
        member = self.members.get(name)
        return None if member is None else member.value


def scan_object(content: bytes) -> ScannedObject:
    """Parse a JSON object and record the positions of its members.

    Args:
        content: The complete text of one JSON object.

    Returns:
        The members by name, with their positions in the decoded text.

    Raises:
        ValueError: The text is not one JSON object, or a member occurs twice.
    """
    return scan_text(content.decode())


def scan_text(text: str, known: Span | None = None) -> ScannedObject:
    """Parse the text of a JSON object; see `scan_object`.

    Args:
        text: The complete text of one JSON object.
        known: A part of an array member that was parsed before, from its bracket to the end of an element.
            The value of this member contains only the elements after it.
    """
    position = _skip(text, 0)
    if text[position : position + 1] != "{":
        raise ValueError("not a JSON object")
    members: dict[str, Member] = {}
    position = _skip(text, position + 1)
    while text[position : position + 1] != "}":
        if members:
            position = _expect(text, position, ",")
        name, end = _decode_value(text, position)
        if not isinstance(name, str) or name in members:
            raise ValueError("a member without a name, or with the name of another one")
        start = _expect(text, _skip(text, end), ":")
        if known is not None and known.start == start:
            value, stop = _decode_rest(text, known.end)
        else:
            value, stop = _decode_value(text, start)
        members[name] = Member(value, Span(position, end), Span(start, stop))
        position = _skip(text, stop)
    if _skip(text, position + 1) != len(text):
        raise ValueError("text after the JSON object")
    return ScannedObject(text, MappingProxyType(members))


def _decode_rest(text: str, after: int) -> tuple[list[Any], int]:
    """Return the elements of an array after one that ends at a position, and the end of the array."""
    position = _skip(text, after)
    if text[position : position + 1] == "]":
        return [], position + 1
    first = _expect(text, position, ",")
    elements, end = _decode_value(f"[{text[first:]}")
    if not elements:
        raise ValueError("a comma without an element after it")
    return elements, first - 1 + end


def scan_elements(text: str, array: Span, after: int = 0) -> list[Span]:
    """Return the position of each element of the array at this position.

    Args:
        text: The text that contains the array.
        array: The position of the array, brackets included.
        after: The end of an element; only elements after it are returned. By default all are.

    Returns:
        One span per element, in order.

    Raises:
        ValueError: There is no array at this position.
    """
    position = _skip(text, after) if after else _expect(text, array.start, "[")
    if after and text[position] != "]":
        position = _expect(text, position, ",")
    spans: list[Span] = []
    try:
        elements = split_array(f"[{text[position : array.end]}")
    except ValueError:
        return _scan_elements_slowly(text, position)
    for element in elements:
        # Only whitespace and a comma are between two elements, and no element begins with these.
        start = text.index(element, position)
        position = start + len(element)
        spans.append(Span(start, position))
    return spans


def _scan_elements_slowly(text: str, position: int) -> list[Span]:
    """Scan an array that msgspec rejects, because it has lone surrogates."""
    spans: list[Span] = []
    while text[position] != "]":
        if spans:
            position = _expect(text, position, ",")
        _, end = _decode_value(text, position)
        spans.append(Span(position, end))
        position = _skip(text, end)
    return spans


def ends_element(text: str, position: int) -> bool:
    """Return whether the element of an array that begins before this position can end here."""
    position = _skip(text, position)
    return text[position : position + 1] in (",", "]")


def replace_array(
    scanned: ScannedObject, name: str, elements: list[Span], values: dict[str, Any]
) -> bytes:
    """Replace an array member by some of its elements, and set other members.

    Args:
        scanned: The object.
        name: The array member.
        elements: The positions of the elements to retain; their text is unchanged.
        values: Other members by name. The values of existing ones are replaced; others are added before the
            array.

    Returns:
        The text of the edited object.
    """
    text, array = scanned.text, scanned.members[name]
    edits = {array.span: f"[{','.join(text[span.start : span.end] for span in elements)}]"}
    front = ""
    for key, value in values.items():
        member = scanned.members.get(key)
        if member is None:
            front += f"{json.dumps(key)}:{json.dumps(value)},"
        else:
            edits[member.span] = json.dumps(value)
    edits[Span(array.key.start, array.key.start)] = front
    parts: list[str] = []
    position = 0
    for span, replacement in sorted(edits.items()):
        parts += text[position : span.start], replacement
        position = span.end
    return "".join([*parts, text[position:]]).encode()


def normalize_json(text: str) -> str:
    """Return JSON text in a compact form that retains the order of members and the spelling of numbers.

    Two texts that differ only in whitespace or in how characters are escaped become equal. Text that is
    not JSON is returned unchanged.
    """
    try:
        value = json.loads(text, parse_int=_Number, parse_float=_Number, object_pairs_hook=_Pairs)
    except ValueError:
        return text
    return "".join(_write(value))


class _Number(str):
    """A number as it was written."""

    __slots__ = ()


class _Pairs(list[tuple[str, Any]]):
    """The members of an object, in their order."""

    __slots__ = ()


def _write(value: Any) -> list[str]:
    match value:
        case _Number():
            return [str(value)]
        case _Pairs():
            members = [f"{json.dumps(key)}:{''.join(_write(each))}" for key, each in value]
            return ["{", ",".join(members), "}"]
        case list():
            elements = cast("list[Any]", value)
            return ["[", ",".join("".join(_write(each)) for each in elements), "]"]
        case _:
            return [json.dumps(value)]


def _skip(text: str, position: int) -> int:
    match = _WHITESPACE.match(text, position)
    return match.end() if match else position


def _expect(text: str, position: int, mark: str) -> int:
    if text[position : position + 1] != mark:
        raise ValueError(f"expected {mark!r}")
    return _skip(text, position + 1)
