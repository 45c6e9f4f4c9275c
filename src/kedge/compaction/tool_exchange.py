"""``ToolExchangeCompactor``: old tool calls and outputs become short, and stay what they are.

Outputs of tools are most of what an agent's history weighs, and the least of it is ever looked at again.
Shortening keeps the pair: the call has its name and its call_id, the output answers it. It keeps the
facts findable: of JSON every member stays, with its numbers and short texts, and only long texts and
lists are cut; of other text the beginning and the end stay. What was cut is said in place.
"""

from collections.abc import Sequence
from dataclasses import replace

from kedge.compaction.boundaries import cut_points
from kedge.compaction.limits import whole_number
from kedge.compaction.protocol import (
    CompactionRequest,
    CompactionResult,
    Replacement,
    compact_when,
)
from kedge.compaction.shortening import part_weight, short_json, short_text, told
from kedge.turns import Block, TextPart, ToolCallBlock, ToolResultBlock

SHORTENED = "shortened"
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
        self.max_characters = whole_number("max_characters", max_characters)
        self.keep_exchanges = whole_number("keep_exchanges", keep_exchanges)
        self.min_saving = whole_number("min_saving", min_saving)

    async def compact(self, request: CompactionRequest) -> CompactionResult:
        """Shorten what is old and long, if it is worth it."""
        return await compact_when(self, self, request, by=self.name)

    def should_compact(self, request: CompactionRequest) -> bool:
        """Whether shortening saves enough characters."""
        old = request.blocks[: self._start(request.blocks)]
        return sum(_weight(block) - _weight(self._short(block)) for block in old) >= self.min_saving

    def compact_blocks(self, request: CompactionRequest) -> Replacement:
        """All blocks, the old tool exchanges among them shortened."""
        start = self._start(request.blocks)
        old = tuple(map(self._short, request.blocks[:start]))
        return Replacement((*old, *request.blocks[start:]))

    def _start(self, blocks: Sequence[Block]) -> int:
        """Where the exchanges begin that stay as they are."""
        points = cut_points(blocks)
        return points[-self.keep_exchanges] if len(points) >= self.keep_exchanges else 0

    def _short(self, block: Block) -> Block:
        """The block made short; the very same block if it is short already."""
        most = self.max_characters
        if SHORTENED in block.metadata or _weight(block) <= most:
            return block
        match block:
            case ToolCallBlock():
                made: Block = replace(block, arguments=_arguments(block, most))
            case ToolResultBlock():
                made = replace(block, parts=(TextPart(short_text(told(block.parts), most)),))
            case _:
                return block
        if _weight(made) >= _weight(block):
            return block
        return made.with_metadata({SHORTENED: _weight(block)})


def _arguments(block: ToolCallBlock, most: int) -> str:
    """The arguments made short: still JSON, unless the tool takes free text."""
    if block.custom:
        return short_text(block.arguments, most)
    return short_json(block.arguments, most)


def _weight(block: Block) -> int:
    match block:
        case ToolCallBlock():
            return len(block.arguments)
        case ToolResultBlock():
            return sum(map(part_weight, block.parts))
        case _:
            return 0
