"""Token counts of items of the Responses API: exact for text, a fixed estimate for everything else.

The sum is additive: the count of two lists is the count of the joined list. So a server can store the
count of each response and add them up, and a client can count its delta alone.

| content | tokens |
|---|---|
| overhead of an item (start, role, end) | ``ITEM_OVERHEAD`` |
| text, arguments, outputs, names | as tiktoken counts them |
| an image | ``IMAGE_TOKENS``, or ``LOW_DETAIL_IMAGE_TOKENS`` with ``detail: "low"`` |
| a file, an audio clip | ``FILE_TOKENS``, ``AUDIO_TOKENS`` |
| encrypted content without readable text beside it | three sixteenths of its length |
| an item or part of an unknown type | its JSON, without ids and status |
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

CountText = Callable[[str], int]

ITEM_OVERHEAD = 4
IMAGE_TOKENS = 765  # a 1024 x 1024 picture at high detail
LOW_DETAIL_IMAGE_TOKENS = 85
FILE_TOKENS = 1_000
AUDIO_TOKENS = 1_000

# The fields of an item that a model reads. An item of another type is counted as JSON.
COUNTED_FIELDS: Mapping[str, tuple[str, ...]] = {
    "message": ("content",),
    "function_call": ("name", "arguments"),
    "function_call_output": ("output",),
    "custom_tool_call": ("name", "input"),
    "custom_tool_call_output": ("output",),
    "reasoning": ("summary", "content"),
    "compaction": (),
}
PART_ESTIMATES: Mapping[str, int] = {
    "input_image": IMAGE_TOKENS,
    "computer_screenshot": IMAGE_TOKENS,
    "input_file": FILE_TOKENS,
    "input_audio": AUDIO_TOKENS,
}
UNCOUNTED_FIELDS = ("id", "call_id", "status")


def count_item(item: Mapping[str, Any], count_text: CountText) -> int:
    """Return the number of tokens of one item; items of unknown shape are counted as JSON."""
    kind = item.get("type") or "message"
    members = COUNTED_FIELDS.get(kind) if isinstance(kind, str) else None
    if members is None:
        return ITEM_OVERHEAD + _count_unknown(item, count_text)
    tokens = 0
    for member in members:
        if (content := item.get(member)) is not None:
            tokens += _count_content(content, count_text)
    if not tokens and isinstance(encrypted := item.get("encrypted_content"), str):
        tokens = len(encrypted) * 3 // 16  # base64 of about four bytes per token
    return ITEM_OVERHEAD + tokens


def count_each(items: Iterable[Mapping[str, Any]], count_text: CountText) -> int:
    """Return the number of tokens of several items."""
    return sum([count_item(item, count_text) for item in items])


def to_compact_json(value: object) -> str:
    """Return a value as compact JSON, for counting; an empty text if it has no JSON form."""
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=str)
    except (TypeError, ValueError, RecursionError):
        return ""  # keys that are not strings, a circular reference, or excessive nesting


def _count_content(content: object, count_text: CountText) -> int:
    if isinstance(content, (list, tuple)):
        return sum([_count_piece(part, count_text) for part in cast("Sequence[object]", content)])
    return _count_piece(content, count_text)


def _count_piece(piece: object, count_text: CountText) -> int:
    if isinstance(piece, str):
        return count_text(piece)
    if isinstance(piece, (dict, Mapping)):  # dict first: the check for a Mapping is slow
        return _count_part(cast("Mapping[str, Any]", piece), count_text)
    return count_text(to_compact_json(piece))


def _count_part(part: Mapping[str, Any], count_text: CountText) -> int:
    for member in ("text", "refusal"):
        if isinstance(text := part.get(member), str):
            return count_text(text)
    kind = part.get("type")
    if kind == "input_image" and part.get("detail") == "low":
        return LOW_DETAIL_IMAGE_TOKENS
    if isinstance(kind, str) and kind in PART_ESTIMATES:
        return PART_ESTIMATES[kind]
    return _count_unknown(part, count_text)


def _count_unknown(value: Mapping[str, Any], count_text: CountText) -> int:
    return count_text(
        to_compact_json({key: value[key] for key in value if key not in UNCOUNTED_FIELDS})
    )
