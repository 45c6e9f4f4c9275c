"""``ToolExchangeCompactor``: shorten old tool calls and outputs.

Outputs of tools are most of an agent's history, and little of them is needed again. The pair remains: the call
has its name and its call_id, the output answers it. In JSON every member remains, with its numbers and short
texts, and only long texts and lists are cut; of other text the beginning and the end remain. The length of what
was cut is written in its position.
"""

from collections.abc import Sequence
from dataclasses import replace

from kedge.compaction.base import (
    CompactionRequest,
    CompactionResult,
    Replacement,
    compact_if_triggered,
)
from kedge.compaction.boundaries import check_positive_int, cut_points
from kedge.compaction.truncate import part_length, parts_to_text, truncate_json, truncate_text
from kedge.turns import Block, TextPart, ToolCallBlock, ToolResultBlock

SHORTENED_KEY = "shortened"
"""Metadata key of a shortened block: its original number of characters."""


class ToolExchangeCompactor:
    """Shortens old arguments and outputs of tools. Also a trigger and a strategy.

    Args:
        max_characters: About how many characters of each remain.
        keep_exchanges: How many of the newest exchanges are not shortened.
        min_saving: The minimum number of characters to save, so that the conversation does not change at
            every turn.

    Raises:
        InvalidSetting: A number is below 1.
    """

    name = "ToolExchangeCompactor"

    def __init__(
        self, max_characters: int = 400, *, keep_exchanges: int = 2, min_saving: int = 4_000
    ) -> None:
        self.max_characters = check_positive_int("max_characters", max_characters)
        self.keep_exchanges = check_positive_int("keep_exchanges", keep_exchanges)
        self.min_saving = check_positive_int("min_saving", min_saving)

    async def compact(self, request: CompactionRequest) -> CompactionResult:
        """Shorten old exchanges if that saves enough."""
        return await compact_if_triggered(self, self, request, by=self.name)

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
        return points[-self.keep_exchanges] if len(points) >= self.keep_exchanges else 0

    def _shorten(self, block: Block) -> Block:
        """Return the shortened block; the identical block if it is short already."""
        limit = self.max_characters
        if SHORTENED_KEY in block.metadata or _content_length(block) <= limit:
            return block
        match block:
            case ToolCallBlock():
                shortened: Block = replace(block, arguments=_shorten_arguments(block, limit))
            case ToolResultBlock():
                shortened = replace(
                    block, parts=(TextPart(truncate_text(parts_to_text(block.parts), limit)),)
                )
            case _:
                return block
        if _content_length(shortened) >= _content_length(block):
            return block
        return shortened.with_metadata({SHORTENED_KEY: _content_length(block)})


def _shorten_arguments(block: ToolCallBlock, max_chars: int) -> str:
    """Return the shortened arguments: still JSON, unless the tool takes free text."""
    if block.custom:
        return truncate_text(block.arguments, max_chars)
    return truncate_json(block.arguments, max_chars)


def _content_length(block: Block) -> int:
    match block:
        case ToolCallBlock():
            return len(block.arguments)
        case ToolResultBlock():
            return sum(map(part_length, block.parts))
        case _:
            return 0
