"""``MessageLimitCompactor``: keeps the newest messages."""

from kedge.compaction.boundaries import cut_points, first_fitting
from kedge.compaction.limits import TOO_LONG, whole_number
from kedge.compaction.protocol import (
    CompactionRequest,
    CompactionResult,
    Replacement,
    compact_when,
)


class MessageLimitCompactor:
    """Above ``max_messages`` blocks, keeps at most ``target_messages`` of them (default: as many).

    With a target below the maximum, compaction does not happen at every turn. Serves as trigger and
    as strategy too.
    """

    name = "MessageLimitCompactor"

    def __init__(self, max_messages: int, target_messages: int | None = None) -> None:
        self.max_messages = whole_number("max_messages", max_messages)
        target = max_messages if target_messages is None else target_messages
        self.target_messages = whole_number("target_messages", target, most=max_messages)

    async def compact(self, request: CompactionRequest) -> CompactionResult:
        """Cut off the oldest messages, if there are too many."""
        return await compact_when(self, self, request, by=self.name)

    def should_compact(self, request: CompactionRequest) -> bool:
        """Whether there are more than ``max_messages`` blocks."""
        return len(request.blocks) > self.max_messages

    async def compact_blocks(self, request: CompactionRequest) -> Replacement:
        """The newest blocks, from a user block on: ``target_messages`` at most."""
        blocks = request.blocks
        if len(blocks) <= self.target_messages:
            return Replacement(blocks)

        async def fits(start: int) -> bool:
            return len(blocks) - start <= self.target_messages

        start, met = await first_fitting(cut_points(blocks), fits)
        return Replacement(blocks[start:], () if met else (TOO_LONG,))
