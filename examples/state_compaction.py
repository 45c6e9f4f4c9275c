"""State compaction: a conversation of 200 turns whose state never grows beyond a bound.

Two limits work one after the other, and both leave room, so that compaction does not happen at every
turn. After each cut the short history is sent once, and requests chain again from there.
"""

import os
import sys

from kedge import Chat, run_sync
from kedge.compaction import CompositeCompactor, MessageLimitCompactor, TokenLimitCompactor

COMPACTOR = CompositeCompactor(
    TokenLimitCompactor(1_200, 600),
    MessageLimitCompactor(60, 30),
)


async def talk(turns: int) -> tuple[list[int], int, int]:
    """Talk for so many turns: the sizes of the state, the cuts, and the full sends."""
    sizes: list[int] = []
    cuts = full = 0
    state: bytes | None = None
    async with Chat(os.environ.get("KEDGE_MODEL", "practice"), compactor=COMPACTOR) as chat:
        for number in range(turns):
            answer = await chat.chat_with_state(state, f"Note number {number}: all is well.")
            state = answer.state
            sizes.append(len(state))
            full += answer.plan is None or answer.plan.is_full
            if answer.compaction and answer.compaction.changed:
                cuts += 1
                print(f"turn {number}: {answer.compaction}")
    return sizes, cuts, full


def main(turns: int) -> None:
    """Talk, and say how large the state became."""
    sizes, cuts, full = run_sync(talk(turns))
    print(f"{turns} turns, {cuts} cuts, {full} full sends, state of at most {max(sizes)} bytes")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 200)
