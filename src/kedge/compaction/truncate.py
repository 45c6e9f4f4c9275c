"""Truncate texts so that their structure remains.

In JSON every member remains; long texts and lists are cut, more at each attempt until it fits. Of other text
the beginning and the end remain. Each cut is marked with its length.
"""

import json
from collections.abc import Iterable
from typing import Any, NoReturn, cast

from kedge.turns import FilePart, ImagePart, OpaquePart, Part
from kedge.turns.frozen_json import thaw

MIN_ATTACHMENT_CHARS = 3_000
"""The minimum size of an image or a file, in characters: about 750 tokens."""

# The maximum lengths of texts and lists inside JSON, from the first attempt to the last.
_TRUNCATION_LEVELS = ((200, 20), (80, 8), (40, 4), (20, 2))


def truncate_text(text: str, max_chars: int) -> str:
    """Return the text in about ``max_chars`` characters; JSON stays JSON if that is possible."""
    if len(text) <= max_chars:
        return text
    written = _shrink_json(text, max_chars)
    return _cut_middle(text, max_chars) if written is None else written


def truncate_json(text: str, max_chars: int) -> str:
    """Return the JSON text in about ``max_chars`` characters, always as JSON."""
    written = _shrink_json(text, max_chars)
    return _dump_json({"shortened": _cut_middle(text, max_chars)}) if written is None else written


def parts_to_text(parts: Iterable[Part]) -> str:
    """Return the parts as one text, with a placeholder for what is not text."""
    return "\n".join(map(_part_to_text, parts))


def part_length(part: Part) -> int:
    """Return the approximate size of a part in characters."""
    match part:
        case ImagePart():
            return max(MIN_ATTACHMENT_CHARS, len(part.url))
        case FilePart():
            return max(MIN_ATTACHMENT_CHARS, len(part.data))
        case _:
            return len(_part_to_text(part))


def _part_to_text(part: Part) -> str:
    match part:
        case ImagePart():
            return "[an image was left out]"
        case FilePart():
            return f"[a file was left out: {part.filename or part.file_id or 'without a name'}]"
        case OpaquePart():
            return _dump_json(thaw(part.content))
        case _:
            return part.text


def _shrink_json(text: str, max_chars: int) -> str | None:
    """Return the JSON text with its long members cut; None if it is not JSON or stays too long."""
    if text.lstrip()[:1] not in ("{", "["):
        return None
    try:
        value = json.loads(text, parse_constant=_reject_constant)
    except (ValueError, RecursionError):
        return None
    written = ""
    for length, members in _TRUNCATION_LEVELS:
        written = _dump_json(_shrink_value(value, length, members))
        if len(written) <= max_chars:
            return written
    return written if len(written) <= 2 * max_chars else None  # the structure is worth the excess


def _shrink_value(value: Any, max_length: int, max_items: int) -> Any:
    match value:
        case str():
            rest = len(value) - max_length
            return value if rest <= 0 else f"{value[:max_length]}… (+{rest} characters)"
        case list():
            listed = cast("list[Any]", value)
            shrunk = [_shrink_value(each, max_length, max_items) for each in listed[:max_items]]
            rest = len(listed) - max_items
            return shrunk if rest <= 0 else [*shrunk, f"… (+{rest} more)"]
        case dict():
            named = cast("dict[str, Any]", value)
            return {
                name: _shrink_value(member, max_length, max_items) for name, member in named.items()
            }
        case _:
            return value


def _cut_middle(text: str, max_chars: int) -> str:
    head, tail = max_chars * 2 // 3, max_chars // 3
    left_out = len(text) - head - tail
    return f"{text[:head]}\n[… {left_out} characters left out …]\n{text[len(text) - tail :]}"


def _dump_json(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    try:
        text.encode()
    except UnicodeEncodeError:  # half a character, which only an escape can carry
        return json.dumps(value, separators=(",", ":"))
    return text


def _reject_constant(name: str) -> NoReturn:
    raise ValueError(name)
