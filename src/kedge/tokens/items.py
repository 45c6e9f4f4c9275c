"""Counting wire items: their texts exactly, what is no text by a fixed estimate.

The sum is additive: the count of two lists is the count of one joined list. So a server can keep
the count of each stored response and add, and a client can tell its delta from the whole.

| what | tokens |
|---|---|
| the frame of an item (start, role, end) | ``PER_ITEM`` |
| text, arguments, outputs, names | as tiktoken counts them |
| an image | ``IMAGE``, or ``SMALL_IMAGE`` with ``detail: "low"`` |
| a file, a sound | ``FILE``, ``SOUND`` |
| encrypted content without readable text beside it | three sixteenths of its length |
| an item or part of an unknown type | its JSON, without ids and status |
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

CountText = Callable[[str], int]

PER_ITEM = 4
IMAGE = 765  # a 1024 x 1024 picture at high detail
SMALL_IMAGE = 85
FILE = 1_000
SOUND = 1_000

# The members of an item that a model reads. An item of another type is counted as JSON.
READ: Mapping[str, tuple[str, ...]] = {
    "message": ("content",),
    "function_call": ("name", "arguments"),
    "function_call_output": ("output",),
    "custom_tool_call": ("name", "input"),
    "custom_tool_call_output": ("output",),
    "reasoning": ("summary", "content"),
    "compaction": (),
}
ESTIMATES: Mapping[str, int] = {
    "input_image": IMAGE,
    "computer_screenshot": IMAGE,
    "input_file": FILE,
    "input_audio": SOUND,
}
SILENT = ("id", "call_id", "status")


def count_item(item: Mapping[str, Any], count_text: CountText) -> int:
    """Count one wire item; any item, however odd, has a count."""
    kind = item.get("type") or "message"
    members = READ.get(kind) if isinstance(kind, str) else None
    if members is None:
        return PER_ITEM + _unknown(item, count_text)
    tokens = 0
    for member in members:
        if (content := item.get(member)) is not None:
            tokens += _content(content, count_text)
    if not tokens and isinstance(sealed := item.get("encrypted_content"), str):
        tokens = len(sealed) * 3 // 16  # base64 of about four bytes a token
    return PER_ITEM + tokens


def count_all(items: Iterable[Mapping[str, Any]], count_text: CountText) -> int:
    """Count wire items, one by one."""
    return sum([count_item(item, count_text) for item in items])


def as_json(value: object) -> str:
    """Write any value as compact JSON, for counting only."""
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=str)
    except (TypeError, ValueError, RecursionError):
        return ""  # keys that are no text, a circle, a well without a bottom: nothing to read


def _content(content: object, count_text: CountText) -> int:
    if isinstance(content, list | tuple):
        return sum([_piece(part, count_text) for part in cast("Sequence[object]", content)])
    return _piece(content, count_text)


def _piece(piece: object, count_text: CountText) -> int:
    if isinstance(piece, str):
        return count_text(piece)
    if isinstance(piece, dict | Mapping):  # dict first: the check for a Mapping is slow
        return _part(cast("Mapping[str, Any]", piece), count_text)
    return count_text(as_json(piece))


def _part(part: Mapping[str, Any], count_text: CountText) -> int:
    for member in ("text", "refusal"):
        if isinstance(text := part.get(member), str):
            return count_text(text)
    kind = part.get("type")
    if kind == "input_image" and part.get("detail") == "low":
        return SMALL_IMAGE
    if isinstance(kind, str) and kind in ESTIMATES:
        return ESTIMATES[kind]
    return _unknown(part, count_text)


def _unknown(value: Mapping[str, Any], count_text: CountText) -> int:
    return count_text(as_json({key: value[key] for key in value if key not in SILENT}))
