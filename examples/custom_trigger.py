"""A custom trigger and strategy: compact when the subject changes.

A trigger is a class with one method, and so is a strategy. Here everything before the newest "New subject"
message is removed.
"""

import os

from kedge import Chat, run_sync
from kedge.compaction import CompactionRequest, SplitCompactor, cut_points
from kedge.turns import Block, UserBlock

MARK = "New subject"


def newest_subject(blocks: tuple[Block, ...]) -> int:
    """Return the index of the newest subject's first block."""
    starts = [
        index
        for index in cut_points(blocks)
        if isinstance(block := blocks[index], UserBlock) and block.text.startswith(MARK)
    ]
    return starts[-1] if starts else 0


class SubjectChanged:
    """The trigger: there are blocks before the newest subject."""

    def should_compact(self, request: CompactionRequest) -> bool:
        """Whether there is an earlier subject."""
        return newest_subject(request.blocks) > 0


class NewestSubject:
    """The strategy: only the newest subject remains."""

    def compact_blocks(self, request: CompactionRequest) -> tuple[Block, ...]:
        """Return the blocks from its first block on."""
        return request.blocks[newest_subject(request.blocks) :]


async def main() -> None:
    """Chat about two subjects."""
    compactor = SplitCompactor(SubjectChanged(), NewestSubject())
    state: bytes | None = None
    async with Chat(os.environ.get("KEDGE_MODEL", "practice"), compactor=compactor) as chat:
        for text in (
            "My ship is the Erebus.",
            "It lies in the harbour.",
            f"{MARK}: my dog is called Rex.",
            "What have I said so far?",
        ):
            answer = await chat.chat_with_state(state, text)
            state = answer.state
            print(f"> {text}\n{answer.text}")
            for compaction in answer.compactions:
                print(f"({compaction})")


if __name__ == "__main__":
    run_sync(main())
