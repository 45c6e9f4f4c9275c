"""State compaction: a conversation of 200 turns whose state has a bounded size.

Two limits are applied one after the other, each with a target well below it, so that compaction does not run
at every turn. After each cut the shortened history is sent once, and requests chain again from there.
"""

import os
import sys

from kedge import Chat, run_sync
from kedge.compaction import CompositeCompactor, MessageLimitCompactor, TokenLimitCompactor

COMPACTOR = CompositeCompactor(
    TokenLimitCompactor(1_200, 600),
    MessageLimitCompactor(60, 30),
)


async def run_chat(turns: int) -> tuple[list[int], int, int]:
    """Return the state sizes, the number of cuts and the number of full sends."""
    sizes: list[int] = []
    cuts = full = 0
    state: bytes | None = None
    async with Chat(os.environ.get("KEDGE_MODEL", "practice"), compactor=COMPACTOR) as chat:
        for number in range(turns):
            answer = await chat.chat_with_state(state, f"Note number {number}: all is well.")
            state = answer.state
            sizes.append(len(state))
            full += answer.plan is None or answer.plan.is_full
            for compaction in answer.compactions:
                cuts += compaction.changed
                print(f"turn {number}: {compaction}")
    return sizes, cuts, full


def main(turns: int) -> None:
    """Run the chat and print the maximum size of the state."""
    sizes, cuts, full = run_sync(run_chat(turns))
    print(f"{turns} turns, {cuts} cuts, {full} full sends, state of at most {max(sizes)} bytes")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 200)
