"""``repair``: makes a Turn sendable, visibly, before it is planned.

Servers refuse a conversation in which a call has no result or a result has no call. Rendering never
hides that; this middleware changes the Turn itself, and whoever looks at the Turn sees how.
"""

from typing import Literal

from kedge.engines.protocol import Engine, Middleware
from kedge.middleware.wrapping import Wrapped
from kedge.observe import get_logger
from kedge.planning import Problem, find_problems
from kedge.turns import Block, ToolCallBlock, Turn, tool_result

log = get_logger(__name__)

NAME = "repair"
WORDS = "This call was interrupted: the tool was not run, or its result was lost."

How = Literal["complete", "remove"]


def repair(unanswered: How = "complete") -> Middleware:
    """Complete (or remove) calls without a result; remove results without a call."""

    def wrap(engine: Engine) -> Engine:
        return _Repair(engine, unanswered)

    return wrap


class _Repair(Wrapped):
    name = NAME

    def __init__(self, inner: Engine, unanswered: How) -> None:
        super().__init__(inner)
        self.unanswered: How = unanswered

    def enter(self, turn: Turn) -> Turn:
        """Mend what stands in the way of sending."""
        return repaired(turn, self.unanswered)


def repaired(turn: Turn, unanswered: How = "complete") -> Turn:
    """The Turn with every call answered once and every result called for."""
    # Mending one fault can bring another to light (removing a call leaves its result an orphan), and
    # every round leaves fewer calls and results that do not add up, so this ends.
    while problems := find_problems(turn):
        problem = problems[0]
        log.warning("repaired: %s", problem.kind, call_id=problem.call_id, turn_id=turn.id)
        turn = _mended(turn, problem, unanswered)
    return turn


def _mended(turn: Turn, problem: Problem, unanswered: How) -> Turn:
    index = turn.index(problem.block_id)
    block = turn.blocks[index]
    completes = problem.kind == "unanswered" and unanswered == "complete"
    if completes and isinstance(block, ToolCallBlock):
        result = tool_result(block.call_id, WORDS, custom=block.custom, origin=NAME)
        return turn.insert(_after_calls(turn, index), result)
    return turn.remove(block.id)


def _after_calls(turn: Turn, index: int) -> int:
    """Behind the whole answer that made the call: in between would tear it apart."""
    made = turn.blocks[index]
    for place in range(index + 1, len(turn.blocks)):
        if not _belongs(turn.blocks[place], made):
            return place
    return len(turn.blocks)


def _belongs(block: Block, made: Block) -> bool:
    if made.response_id:
        return block.response_id == made.response_id
    return isinstance(block, ToolCallBlock) and not block.response_id
