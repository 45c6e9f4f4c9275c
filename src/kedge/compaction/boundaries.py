"""Positions at which a history may be cut: user blocks before which every call has its result.

So a pair of call and result is never separated, and the rest never begins with the answer to a
question that was removed. A call without a result and all blocks after it are retained.
"""

from collections.abc import Awaitable, Callable, Sequence

from kedge.planning.tool_calls import ToolPairing
from kedge.turns import Block, UserBlock

OVER_LIMIT_NOTE = "the newest exchange alone exceeds the limit; it remains complete"


def advance_to_first_user_message(blocks: Sequence[Block], start: int = 0) -> tuple[Block, ...]:
    """Return the blocks from the first user block at or after an index on.

    Args:
        blocks: The blocks.
        start: The index to start from.

    Returns:
        The blocks from there; empty if there is no user block.
    """
    for index in range(start, len(blocks)):
        if isinstance(blocks[index], UserBlock):
            return tuple(blocks[index:])
    return ()


def cut_points(blocks: Sequence[Block]) -> list[int]:
    """Return every index at which the history may begin, in order; the last is the newest exchange."""
    pairing, points = ToolPairing(), list[int]()
    for index, block in enumerate(blocks):
        if isinstance(block, UserBlock) and not pairing.open:
            points.append(index)
        pairing.add(index, block)
    return points


async def find_first_fit(
    points: Sequence[int], fits: Callable[[int], Awaitable[bool]]
) -> tuple[int, bool]:
    """Return the earliest cut after which the rest fits, and True; else the last cut, and False.

    A later cut leaves fewer blocks, so this is a binary search.
    """
    low, high = 0, len(points)
    while low < high:
        middle = (low + high) // 2
        if await fits(points[middle]):
            high = middle
        else:
            low = middle + 1
    return (points[low], True) if low < len(points) else (points[-1] if points else 0, False)
