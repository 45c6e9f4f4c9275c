"""Middleware that changes a Turn before it is planned: ``system_prompt`` and ``repair``.

``system_prompt`` sets the instructions of every Turn. Leading system text is not part of any digest, so it may change
with every request without losing anchors.

``repair`` makes a Turn sendable. Servers reject a conversation in which a call has no result or a result has no call.
Rendering does not repair that; this middleware changes the Turn itself, so that the change is visible.
"""

from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Literal

from kedge.engines.base import Engine, Middleware, iter_stack
from kedge.errors import InvalidSetting
from kedge.middleware.base import BaseMiddleware
from kedge.observe import get_logger
from kedge.planning import Problem, find_problems
from kedge.turns import Block, ToolCallBlock, Turn, system, tool_result

log = get_logger(__name__)

PROMPT_NAME = "system_prompt"
LEVEL_KEY = "kedge.prompt_level"
"""Metadata key of a prompt with others inside of it: their number. It distinguishes the prompts of a stack."""


def system_prompt(text: str | Callable[[Turn], str]) -> Middleware:
    """Put instructions at the start of every Turn.

    Several prompts in one stack follow each other, the outermost first.

    Args:
        text: The instructions, or a function that returns them for a Turn.

    Returns:
        A middleware for ``with_middleware``.

    Raises:
        InvalidSetting: ``text`` is neither a text nor a function.
    """
    if not isinstance(text, str) and not callable(text):
        kind = type(text).__name__
        raise InvalidSetting(
            f"a system prompt must be a text, or a function that returns it for a Turn, not {kind}"
        )

    return lambda engine: _SystemPromptMiddleware(engine, text)


class _SystemPromptMiddleware(BaseMiddleware):
    name = PROMPT_NAME

    def __init__(self, inner: Engine, text: str | Callable[[Turn], str]) -> None:
        super().__init__(inner)
        self.text = text
        self.level = _count_prompts(inner)

    def enter(self, turn: Turn) -> Turn:
        """Return the Turn with the text at its start, replacing that of an earlier request."""
        text = self.text if isinstance(self.text, str) else _call_function(self.text, turn)
        metadata = {LEVEL_KEY: self.level} if self.level else {}
        outer = 0
        for index, block in enumerate(turn.leading):
            if block.origin != PROMPT_NAME:
                continue
            level = block.metadata.get(LEVEL_KEY, 0)
            if level == self.level:
                fresh = system(text, origin=PROMPT_NAME, id=block.id, metadata=metadata)
                return turn if fresh == block else turn.edit(block.id, fresh)
            if level > self.level:
                outer = index + 1
        return turn.insert(outer, system(text, origin=PROMPT_NAME, metadata=metadata))


def _call_function(function: Callable[[Turn], str], turn: Turn) -> str:
    text = function(turn)
    if not isinstance(text, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        kind = type(text).__name__
        raise InvalidSetting(f"the function of a system prompt must return a text, not {kind}")
    return text


def _count_prompts(engine: Engine) -> int:
    """Return the number of prompts in a stack."""
    return sum(isinstance(each, _SystemPromptMiddleware) for each in iter_stack(engine))


REPAIR_NAME = "repair"
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
    name = REPAIR_NAME

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
                tool_result(
                    block.call_id, INTERRUPTED_TEXT, custom=block.custom, origin=REPAIR_NAME
                )
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
