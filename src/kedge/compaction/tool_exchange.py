"""``ToolExchangeCompactor``: shorten old tool calls and outputs.

Outputs of tools are the largest part of an agent's history, and little of them is needed again. The pair remains:
the call has its name and its call_id, the output answers it. In JSON the members of objects remain, with their
numbers and short texts; long texts and lists are cut, more at each of four attempts. Of other text the beginning and
the end remain. A note with the length of the removed text replaces it.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

from msgspec.structs import replace

from kedge._internal.arguments import check_positive_int
from kedge._internal.json_text import decode, encode_escaped, reject_constant
from kedge.compaction.base import CompactionRequest, Replacement, SelfTriggeredCompactor, cut_points
from kedge.turns import Block, FilePart, ImagePart, OpaquePart, Part, TextPart
from kedge.turns.frozen_json import thaw

COUNTED_ATTACHMENT_CHARACTERS = 3_000
"""The number of characters that an image or a file counts at least, about 750 tokens."""
SHORTENED_KEY = "kedge.shortened"
"""Metadata key of a shortened block: its original number of characters."""


class _MemberLimits(NamedTuple):
    """How much remains of each text and list inside JSON."""

    max_characters: int
    max_items: int


_ATTEMPTS = (
    _MemberLimits(200, 20),
    _MemberLimits(80, 8),
    _MemberLimits(40, 4),
    _MemberLimits(20, 2),
)


def truncate_text(text: str, max_characters: int) -> str:
    """Return the text in about ``max_characters`` characters; JSON stays JSON if that is possible."""
    if len(text) <= max_characters:
        return text
    shortened = _shorten_json(text, max_characters)
    if shortened is not None:
        return shortened
    return _cut_middle(text, max_characters)


def truncate_json(text: str, max_characters: int) -> str:
    """Return the text as JSON in about ``max_characters`` characters.

    Texts and lists inside it are cut, also if the whole is short enough already. Other text becomes the
    member ``shortened`` of an object.
    """
    shortened = _shorten_json(text, max_characters)
    if shortened is not None:
        return shortened
    return encode_escaped({"shortened": _cut_middle(text, max_characters)}).decode()


def part_length(part: Part) -> int:
    """Return the approximate size of a part in characters."""
    match part:
        case ImagePart():
            return max(COUNTED_ATTACHMENT_CHARACTERS, len(part.url))
        case FilePart():
            return max(COUNTED_ATTACHMENT_CHARACTERS, len(part.data))
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


def _shorten_json(text: str, max_characters: int) -> str | None:
    """Return the JSON text with its long members cut.

    Returns:
        The result of the first attempt that fits, else of the last one; None if the text is not JSON or is
        more than twice as long even then.
    """
    if text.lstrip()[:1] not in ("{", "["):
        return None
    shortened = ""
    try:
        value = decode(text, parse_constant=reject_constant)
        for limits in _ATTEMPTS:
            shortened = encode_escaped(_cut_members(value, limits)).decode()
            if len(shortened) <= max_characters:
                return shortened
    except (ValueError, RecursionError):
        return None
    if len(shortened) > 2 * max_characters:
        return None
    return shortened  # the structure is worth the excess


def _cut_members(value: Any, limits: _MemberLimits) -> Any:
    match value:
        case str():
            return _cut_end(value, limits.max_characters)
        case list():
            return _cut_list(cast("list[Any]", value), limits)
        case dict():
            members = cast("dict[str, Any]", value)
            return {name: _cut_members(member, limits) for name, member in members.items()}
        case _:
            return value


def _cut_end(text: str, max_characters: int) -> str:
    removed = len(text) - max_characters
    if removed <= 0:
        return text
    return f"{text[:max_characters]}… (+{removed} characters)"


def _cut_list(items: list[Any], limits: _MemberLimits) -> list[Any]:
    remaining = [_cut_members(item, limits) for item in items[: limits.max_items]]
    removed = len(items) - limits.max_items
    if removed > 0:
        remaining.append(f"… (+{removed} more)")
    return remaining


def _cut_middle(text: str, max_characters: int) -> str:
    head = max_characters * 2 // 3
    tail = max_characters // 3
    left_out = len(text) - head - tail
    return f"{text[:head]}\n[… {left_out} characters left out …]\n{text[len(text) - tail :]}"


class ToolExchangeCompactor(SelfTriggeredCompactor):
    """Shortens old arguments and outputs of tools. Also a trigger and a strategy.

    Args:
        max_characters: The approximate number of characters that remain of each call's arguments and of each output.
        keep_exchanges: The number of the newest exchanges that are not shortened. An exchange is a message with
            all blocks until its answer.
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
        saved = sum(_content_length(block) - _content_length(self._shorten(block)) for block in old)
        return saved >= self.min_saving

    def compact_blocks(self, request: CompactionRequest) -> Replacement:
        """Return all blocks, with old tool calls and results shortened."""
        start = self._find_start(request.blocks)
        old = tuple(map(self._shorten, request.blocks[:start]))
        return Replacement((*old, *request.blocks[start:]))

    def _find_start(self, blocks: Sequence[Block]) -> int:
        """Return the index of the first block that is not shortened, at which the oldest kept exchange begins."""
        points = cut_points(blocks)
        if len(points) < self.keep_exchanges:
            return 0
        return points[-self.keep_exchanges]

    def _shorten(self, block: Block) -> Block:
        """Return the shortened block.

        Returns:
            The identical block if it is short enough, was shortened before, is neither a tool call nor a result,
            or would not get shorter.
        """
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
