"""Making texts short without losing what they are about.

JSON keeps its shape: every member stays, long texts and lists in it are cut, a little more at each try
until it fits. Other text keeps its beginning and its end. Whatever is cut says how much that was.
"""

import json
from collections.abc import Iterable
from typing import Any, NoReturn, cast

from kedge.turns import FilePart, ImagePart, OpaquePart, Part
from kedge.turns.frozen_json import thaw

MIN_ATTACHMENT_CHARS = 3_000
"""An image or a file weighs at least as much as this many characters: about 750 tokens."""

# How long texts and lists inside JSON may be, from the first try to the last.
_TRUNCATION_LEVELS = ((200, 20), (80, 8), (40, 4), (20, 2))


def truncate_text(text: str, max_chars: int) -> str:
    """The text in about ``most`` characters; JSON stays JSON if that is possible."""
    if len(text) <= max_chars:
        return text
    written = _shrink_json(text, max_chars)
    return _cut_middle(text, max_chars) if written is None else written


def truncate_json(text: str, max_chars: int) -> str:
    """The JSON text in about ``most`` characters, as JSON in any case."""
    written = _shrink_json(text, max_chars)
    return _dump_json({"shortened": _cut_middle(text, max_chars)}) if written is None else written


def parts_to_text(parts: Iterable[Part]) -> str:
    """The parts as one text, in which something stands for what is no text."""
    return "\n".join(map(_part_to_text, parts))


def part_length(part: Part) -> int:
    """About how many characters a part takes."""
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
    """The JSON text with its long members cut; nothing if it is no JSON or stays too long."""
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
    return written if len(written) <= 2 * max_chars else None  # its shape is worth some more room


def _shrink_value(value: Any, max_length: int, max_items: int) -> Any:
    match value:
        case str():
            rest = len(value) - max_length
            return value if rest <= 0 else f"{value[:max_length]}… (+{rest} characters)"
        case list():
            listed = cast("list[Any]", value)
            kept = [_shrink_value(member, max_length, max_items) for member in listed[:max_items]]
            rest = len(listed) - max_items
            return kept if rest <= 0 else [*kept, f"… (+{rest} more)"]
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
