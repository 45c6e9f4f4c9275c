"""Making texts short without losing what they are about.

JSON keeps its shape: every member stays, long texts and lists in it are cut, a little more at each try
until it fits. Other text keeps its beginning and its end. Whatever is cut says how much that was.
"""

import json
from collections.abc import Iterable
from typing import Any, NoReturn, cast

from kedge.turns import FilePart, ImagePart, OpaquePart, Part
from kedge.turns.frozen import thaw

IMAGE_WEIGHT = 3_000
"""An image or a file weighs at least as much as this many characters: about 750 tokens."""

# How long texts and lists inside JSON may be, from the first try to the last.
_TRIES = ((200, 20), (80, 8), (40, 4), (20, 2))


def short_text(text: str, most: int) -> str:
    """The text in about ``most`` characters; JSON stays JSON if that is possible."""
    if len(text) <= most:
        return text
    written = _short_value(text, most)
    return _cut(text, most) if written is None else written


def short_json(text: str, most: int) -> str:
    """The JSON text in about ``most`` characters, as JSON in any case."""
    written = _short_value(text, most)
    return _write({"shortened": _cut(text, most)}) if written is None else written


def told(parts: Iterable[Part]) -> str:
    """The parts as one text, in which something stands for what is no text."""
    return "\n".join(map(_told, parts))


def part_weight(part: Part) -> int:
    """About how many characters a part takes."""
    match part:
        case ImagePart():
            return max(IMAGE_WEIGHT, len(part.url))
        case FilePart():
            return max(IMAGE_WEIGHT, len(part.data))
        case _:
            return len(_told(part))


def _told(part: Part) -> str:
    match part:
        case ImagePart():
            return "[an image was left out]"
        case FilePart():
            return f"[a file was left out: {part.filename or part.file_id or 'without a name'}]"
        case OpaquePart():
            return _write(thaw(part.content))
        case _:
            return part.text


def _short_value(text: str, most: int) -> str | None:
    """The JSON text with its long members cut; nothing if it is no JSON or stays too long."""
    if text.lstrip()[:1] not in ("{", "["):
        return None
    try:
        value = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None
    written = ""
    for length, members in _TRIES:
        written = _write(_shrunk(value, length, members))
        if len(written) <= most:
            return written
    return written if len(written) <= 2 * most else None  # its shape is worth some more room


def _shrunk(value: Any, length: int, members: int) -> Any:
    match value:
        case str():
            rest = len(value) - length
            return value if rest <= 0 else f"{value[:length]}… (+{rest} characters)"
        case list():
            listed = cast("list[Any]", value)
            kept = [_shrunk(member, length, members) for member in listed[:members]]
            rest = len(listed) - members
            return kept if rest <= 0 else [*kept, f"… (+{rest} more)"]
        case dict():
            named = cast("dict[str, Any]", value)
            return {name: _shrunk(member, length, members) for name, member in named.items()}
        case _:
            return value


def _cut(text: str, most: int) -> str:
    head, tail = most * 2 // 3, most // 3
    left_out = len(text) - head - tail
    return f"{text[:head]}\n[… {left_out} characters left out …]\n{text[len(text) - tail :]}"


def _write(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    try:
        text.encode()
    except UnicodeEncodeError:  # half a character, which only an escape can carry
        return json.dumps(value, separators=(",", ":"))
    return text


def _refuse(name: str) -> NoReturn:
    raise ValueError(name)
