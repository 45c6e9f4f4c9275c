"""A custom trigger: compact when the subject changes.

A trigger is one method, and a strategy of one's own is one more. Here everything before the newest
"New subject" message is dropped, as soon as there is something to drop.
"""

import os

from kedge import Chat, run_sync
from kedge.compaction import CompactionRequest, SplitCompactor, cut_points
from kedge.turns import Block, UserBlock

MARK = "New subject"


def newest_subject(blocks: tuple[Block, ...]) -> int:
    """Where the newest subject begins."""
    starts = [
        place
        for place in cut_points(blocks)
        if isinstance(block := blocks[place], UserBlock) and block.text.startswith(MARK)
    ]
    return starts[-1] if starts else 0


class SubjectChanged:
    """Says when: as soon as something is older than the newest subject."""

    def should_compact(self, request: CompactionRequest) -> bool:
        """Whether there is an old subject."""
        return newest_subject(request.blocks) > 0


class NewestSubject:
    """Says what stays: the newest subject."""

    def compact_blocks(self, request: CompactionRequest) -> tuple[Block, ...]:
        """The blocks from its beginning on."""
        return request.blocks[newest_subject(request.blocks) :]


async def main() -> None:
    """Talk about two things."""
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
            if answer.compaction:
                print(f"({answer.compaction})")


if __name__ == "__main__":
    run_sync(main())
