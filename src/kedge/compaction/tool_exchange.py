"""``ToolExchangeCompactor``: shorten old tool calls and outputs.

Outputs of tools are the largest part of an agent's history, and little of them is needed again. The pair remains:
the call has its name and its call_id, the output answers it. In JSON every member remains, with its numbers and
short texts, and only long texts and lists are cut, more at each attempt until it fits; of other text the beginning
and the end remain. A note with the length of the removed text replaces it.
"""

from collections.abc import Sequence
from typing import Any, cast

from msgspec.structs import replace

from kedge._internal.arguments import check_positive_int
from kedge._internal.json_text import decode, encode_escaped, reject_constant
from kedge.compaction.base import CompactionRequest, LimitCompactor, Replacement, cut_points
from kedge.turns import Block, FilePart, ImagePart, OpaquePart, Part, TextPart
from kedge.turns.frozen_json import thaw

MIN_ATTACHMENT_CHARS = 3_000
"""The minimum size of an image or a file, in characters: about 750 tokens."""

# The maximum lengths of texts and lists inside JSON, from the first attempt to the last.
_TRUNCATION_LEVELS = ((200, 20), (80, 8), (40, 4), (20, 2))


def truncate_text(text: str, max_chars: int) -> str:
    """Return the text in about ``max_chars`` characters; JSON stays JSON if that is possible."""
    if len(text) <= max_chars:
        return text
    shrunk = _shrink_json(text, max_chars)
    if shrunk is not None:
        return shrunk
    return _cut_middle(text, max_chars)


def truncate_json(text: str, max_chars: int) -> str:
    """Return the JSON text in about ``max_chars`` characters, always as JSON."""
    shrunk = _shrink_json(text, max_chars)
    if shrunk is not None:
        return shrunk
    return encode_escaped({"shortened": _cut_middle(text, max_chars)}).decode()


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
            return encode_escaped(thaw(part.content)).decode()
        case _:
            return part.text


def _shrink_json(text: str, max_chars: int) -> str | None:
    """Return the JSON text with its long members cut; None if it is not JSON or is still too long."""
    if text.lstrip()[:1] not in ("{", "["):
        return None
    shrunk = ""
    try:
        value = decode(text, parse_constant=reject_constant)
        for max_length, max_items in _TRUNCATION_LEVELS:
            shrunk = encode_escaped(_shrink_value(value, max_length, max_items)).decode()
            if len(shrunk) <= max_chars:
                return shrunk
    except (ValueError, RecursionError):
        return None
    if len(shrunk) > 2 * max_chars:
        return None
    return shrunk  # the structure is worth the excess


def _shrink_value(value: Any, max_length: int, max_items: int) -> Any:
    match value:
        case str():
            rest = len(value) - max_length
            if rest <= 0:
                return value
            return f"{value[:max_length]}… (+{rest} characters)"
        case list():
            items = cast("list[Any]", value)
            shrunk = [_shrink_value(item, max_length, max_items) for item in items[:max_items]]
            rest = len(items) - max_items
            if rest > 0:
                shrunk.append(f"… (+{rest} more)")
            return shrunk
        case dict():
            table = cast("dict[str, Any]", value)
            return {
                name: _shrink_value(member, max_length, max_items) for name, member in table.items()
            }
        case _:
            return value


def _cut_middle(text: str, max_chars: int) -> str:
    head = max_chars * 2 // 3
    tail = max_chars // 3
    left_out = len(text) - head - tail
    return f"{text[:head]}\n[… {left_out} characters left out …]\n{text[len(text) - tail :]}"


SHORTENED_KEY = "kedge.shortened"
"""Metadata key of a shortened block: its original number of characters."""


class ToolExchangeCompactor(LimitCompactor):
    """Shortens old arguments and outputs of tools. Also a trigger and a strategy.

    Args:
        max_characters: The approximate number of characters of each that remain.
        keep_exchanges: The number of the newest exchanges that are not shortened.
        min_saving: The minimum number of characters to save, so that the conversation does not change at
            every turn.

    Raises:
        InvalidSetting: A number is below 1.
    """

    def __init__(
        self, max_characters: int = 400, *, keep_exchanges: int = 2, min_saving: int = 4_000
    ) -> None:
        self.max_characters = check_positive_int("max_characters", max_characters)
        self.keep_exchanges = check_positive_int("keep_exchanges", keep_exchanges)
        self.min_saving = check_positive_int("min_saving", min_saving)

    def should_compact(self, request: CompactionRequest) -> bool:
        """Return whether shortening saves at least ``min_saving`` characters."""
        old = request.blocks[: self._find_start(request.blocks)]
        return (
            sum(_content_length(block) - _content_length(self._shorten(block)) for block in old)
            >= self.min_saving
        )

    def compact_blocks(self, request: CompactionRequest) -> Replacement:
        """Return all blocks, with the old tool exchanges shortened."""
        start = self._find_start(request.blocks)
        old = tuple(map(self._shorten, request.blocks[:start]))
        return Replacement((*old, *request.blocks[start:]))

    def _find_start(self, blocks: Sequence[Block]) -> int:
        """Return the index of the first exchange that is not shortened."""
        points = cut_points(blocks)
        if len(points) < self.keep_exchanges:
            return 0
        return points[-self.keep_exchanges]

    def _shorten(self, block: Block) -> Block:
        """Return the shortened block; the identical block if it is short already."""
        limit = self.max_characters
        if SHORTENED_KEY in block.metadata or _content_length(block) <= limit:
            return block
        match block.kind:
            case "tool_call":
                shorten = truncate_text if block.custom else truncate_json
                shortened: Block = replace(block, arguments=shorten(block.arguments, limit))
            case "tool_result":
                text = "\n".join(map(_part_to_text, block.parts))
                shortened = replace(block, parts=(TextPart(truncate_text(text, limit)),))
            case _:
                return block
        if _content_length(shortened) >= _content_length(block):
            return block
        return shortened.with_metadata({SHORTENED_KEY: _content_length(block)})


def _content_length(block: Block) -> int:
    match block.kind:
        case "tool_call":
            return len(block.arguments)
        case "tool_result":
            return sum(map(part_length, block.parts))
        case _:
            return 0
