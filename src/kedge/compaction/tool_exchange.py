"""``ToolExchangeCompactor``: old tool calls and outputs become short, and stay what they are.

Outputs of tools are most of what an agent's history weighs, and the least of it is ever looked at again.
Shortening keeps the pair: the call has its name and its call_id, the output answers it. It keeps the
facts findable: of JSON every member stays, with its numbers and short texts, and only long texts and
lists are cut; of other text the beginning and the end stay. What was cut is said in place.
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
"""Metadata key of a shortened block: how many characters it had."""


class ToolExchangeCompactor:
    """Shortens the arguments and outputs of tools to about ``max_characters`` each.

    The newest ``keep_exchanges`` exchanges stay as they are. It waits until there are
    ``min_saving`` characters to save, so that the conversation does not change at every turn. Serves as
    trigger and as strategy too.
    """

    name = "ToolExchangeCompactor"

    def __init__(
        self, max_characters: int = 400, *, keep_exchanges: int = 2, min_saving: int = 4_000
    ) -> None:
        self.max_characters = check_positive_int("max_characters", max_characters)
        self.keep_exchanges = check_positive_int("keep_exchanges", keep_exchanges)
        self.min_saving = check_positive_int("min_saving", min_saving)

    async def compact(self, request: CompactionRequest) -> CompactionResult:
        """Shorten what is old and long, if it is worth it."""
        return await compact_if_triggered(self, self, request, by=self.name)

    def should_compact(self, request: CompactionRequest) -> bool:
        """Whether shortening saves enough characters."""
        old = request.blocks[: self._find_start(request.blocks)]
        return (
            sum(_content_length(block) - _content_length(self._shorten(block)) for block in old)
            >= self.min_saving
        )

    def compact_blocks(self, request: CompactionRequest) -> Replacement:
        """All blocks, the old tool exchanges among them shortened."""
        start = self._find_start(request.blocks)
        old = tuple(map(self._shorten, request.blocks[:start]))
        return Replacement((*old, *request.blocks[start:]))

    def _find_start(self, blocks: Sequence[Block]) -> int:
        """Where the exchanges begin that stay as they are."""
        points = cut_points(blocks)
        return points[-self.keep_exchanges] if len(points) >= self.keep_exchanges else 0

    def _shorten(self, block: Block) -> Block:
        """The block made short; the very same block if it is short already."""
        most = self.max_characters
        if SHORTENED_KEY in block.metadata or _content_length(block) <= most:
            return block
        match block:
            case ToolCallBlock():
                made: Block = replace(block, arguments=_shorten_arguments(block, most))
            case ToolResultBlock():
                made = replace(
                    block, parts=(TextPart(truncate_text(parts_to_text(block.parts), most)),)
                )
            case _:
                return block
        if _content_length(made) >= _content_length(block):
            return block
        return made.with_metadata({SHORTENED_KEY: _content_length(block)})


def _shorten_arguments(block: ToolCallBlock, max_chars: int) -> str:
    """The arguments made short: still JSON, unless the tool takes free text."""
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
