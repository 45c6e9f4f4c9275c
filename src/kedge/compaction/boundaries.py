"""Where a history may be cut: at user blocks before which every call has its result.

What is cut off is never half of a pair, and what stays never begins with an answer to a question that
is gone. A call that still waits for its result holds everything from itself on.
"""

from collections.abc import Awaitable, Callable, Sequence

from kedge.errors import InvalidSetting
from kedge.planning.tool_pairing import ToolPairing
from kedge.turns import Block, UserBlock

OVER_LIMIT_NOTE = "the newest exchange alone is over the limit; it is kept whole"


def check_positive_int(name: str, value: int, *, maximum: int | None = None) -> int:
    """Return a setting that must be a whole number of at least one (and at most ``most``)."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidSetting(f"{name} must be a whole number of at least 1, not {value!r}")
    if maximum is not None and value > maximum:
        raise InvalidSetting(
            f"{name} must not be above its maximum: {value} is more than {maximum}"
        )
    return value


def advance_to_first_user_message(blocks: Sequence[Block], start: int = 0) -> tuple[Block, ...]:
    """The blocks from the first user block at or after ``start`` on; none if there is none."""
    for index in range(start, len(blocks)):
        if isinstance(blocks[index], UserBlock):
            return tuple(blocks[index:])
    return ()


def cut_points(blocks: Sequence[Block]) -> list[int]:
    """Every place at which the history may begin, oldest first; the last begins the newest exchange."""
    pairing, points = ToolPairing(), list[int]()
    for index, block in enumerate(blocks):
        if isinstance(block, UserBlock) and not pairing.open:
            points.append(index)
        pairing.add(index, block)
    return points


async def find_first_fit(
    points: Sequence[int], fits: Callable[[int], Awaitable[bool]]
) -> tuple[int, bool]:
    """The earliest cut after which the rest fits, and whether there is one; else the last cut.

    A later cut leaves less, so the search halves the places each time.
    """
    low, high = 0, len(points)
    while low < high:
        middle = (low + high) // 2
        if await fits(points[middle]):
            high = middle
        else:
            low = middle + 1
    return (points[low], True) if low < len(points) else (points[-1] if points else 0, False)
