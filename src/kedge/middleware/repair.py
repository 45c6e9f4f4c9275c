"""``repair``: make a Turn sendable before it is planned.

Servers reject a conversation in which a call has no result or a result has no call. Rendering does not repair
that; this middleware changes the Turn itself, so that the change is visible.
"""

from collections.abc import Sequence
from itertools import zip_longest
from typing import Literal

from kedge.engines.base import Engine, Middleware
from kedge.errors import InvalidSetting
from kedge.middleware.base import BaseMiddleware
from kedge.observe import get_logger
from kedge.planning import Problem, find_problems
from kedge.turns import Block, ToolCallBlock, Turn, tool_result

log = get_logger(__name__)

NAME = "repair"
INTERRUPTED_TEXT = "This call was interrupted: the tool was not run, or its result was lost."

UnansweredPolicy = Literal["complete", "remove"]


def repair(unanswered: UnansweredPolicy = "complete") -> Middleware:
    """Complete or remove calls without a result, and remove results without a call.

    Args:
        unanswered: ``"complete"`` adds a result which states that the call was interrupted, ``"remove"`` removes
            the call.

    Returns:
        A middleware for ``with_middleware``.

    Raises:
        InvalidSetting: ``unanswered`` has another value.
    """
    if unanswered not in ("complete", "remove"):
        raise InvalidSetting(f"unanswered must be complete or remove, not {unanswered!r}")

    return lambda engine: _RepairMiddleware(engine, unanswered)


class _RepairMiddleware(BaseMiddleware):
    name = NAME

    def __init__(self, inner: Engine, unanswered: UnansweredPolicy) -> None:
        super().__init__(inner)
        self.unanswered: UnansweredPolicy = unanswered

    def enter(self, turn: Turn) -> Turn:
        """Return the repaired Turn."""
        return repair_turn(turn, self.unanswered)


def repair_turn(turn: Turn, unanswered: UnansweredPolicy = "complete") -> Turn:
    """Return the Turn with exactly one result for every call and no other results.

    Args:
        turn: The Turn to repair.
        unanswered: As for ``repair``.
    """
    # Surplus calls and results are removed first: a repeated call may then have its result. Every round
    # leaves fewer problems, so the loop ends.
    while problems := find_problems(turn):
        surplus = [problem for problem in problems if problem.kind != "unanswered"]
        turn = _fix_problems(turn, surplus or problems, unanswered)
    return turn


def _fix_problems(turn: Turn, problems: Sequence[Problem], unanswered: UnansweredPolicy) -> Turn:
    for problem in problems:
        log.warning("repaired: %s", problem.kind, call_id=problem.call_id, turn_id=turn.id)
    wrong = {problem.block_id: problem.kind for problem in problems}
    completes = unanswered == "complete"
    blocks: list[Block] = []
    results: list[Block] = []
    for block, following in zip_longest(turn.blocks, turn.blocks[1:]):
        kind = wrong.get(block.id)
        if kind is None:
            blocks.append(block)
        elif kind == "unanswered" and completes and isinstance(block, ToolCallBlock):
            blocks.append(block)
            results.append(
                tool_result(block.call_id, INTERRUPTED_TEXT, custom=block.custom, origin=NAME)
            )
        # Inserted after the complete answer with the calls, which must not be split.
        if results and not (following and _is_same_response(following, block)):
            blocks += results
            results = []
    return turn.with_blocks(blocks)


def _is_same_response(block: Block, previous: Block) -> bool:
    if previous.response_id:
        return block.response_id == previous.response_id
    return isinstance(block, ToolCallBlock) and not block.response_id
