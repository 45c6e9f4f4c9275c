"""Middlewares that only change the Turn.

``two_phase`` makes a middleware of functions.

``system_prompt`` sets the instructions of every Turn. Leading system text is not part of any digest, so it may change
with every request without losing anchors.

``repair`` makes a Turn sendable. Servers reject a conversation in which a call has no result or a result has no call.
Rendering does not repair that; this middleware changes the Turn itself, so that the change is visible.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Literal

from kedge._internal.argument_types import checked
from kedge._internal.arguments import check_type
from kedge.engines.base import Middleware, list_stack
from kedge.engines.stack import BaseMiddleware, TurnTransform
from kedge.errors import InvalidSetting
from kedge.observe import get_logger
from kedge.planning import Problem, find_problems
from kedge.turns import Block, ToolCallBlock, Turn, system, tool_result

log = get_logger(__name__)


@checked
def two_phase(
    before: TurnTransform | None = None, after: TurnTransform | None = None, *, name: str = ""
) -> Middleware:
    """Create a middleware from functions that change the Turn.

    Args:
        before: A function that is called with the Turn before it is sent, and returns the Turn to send; may be async.
        after: A function that is called with the returned Turn, and returns the final one; may be async.
        name: The name in traces and block origins; by default the name of the function.

    Returns:
        A middleware for ``with_middleware``.
    """
    check_type("name", str, name)
    label = name or getattr(before or after, "__name__", "") or "two_phase"
    return lambda engine: _TwoPhase(engine, before, after, label)


@dataclass(eq=False, repr=False)
class _TwoPhase(BaseMiddleware):
    before: TurnTransform | None
    after: TurnTransform | None
    name: str

    @property
    def is_plain(self) -> bool:
        """Whether there is nothing to do after the response."""
        return self.after is None

    def enter(self, turn: Turn) -> Turn | Awaitable[Turn]:
        """Return the Turn that ``before`` returns."""
        if self.before is None:
            return turn
        return self.before(turn)

    def leave(self, turn: Turn) -> Turn | Awaitable[Turn]:
        """Return the Turn that ``after`` returns."""
        if self.after is None:
            return turn
        return self.after(turn)


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
        expected = "a text, or a function that returns it for a Turn"
        raise InvalidSetting(f"a system prompt must be {expected}, not {type(text).__name__}")

    return lambda engine: _SystemPromptMiddleware(engine, text)


@dataclass(eq=False, repr=False)
class _SystemPromptMiddleware(BaseMiddleware):
    name = PROMPT_NAME
    text: str | Callable[[Turn], str]

    def __post_init__(self) -> None:
        prompts = (isinstance(each, _SystemPromptMiddleware) for each in list_stack(self.inner))
        self.level = sum(prompts)

    def enter(self, turn: Turn) -> Turn:
        """Return the Turn with the text at its start, replacing that of an earlier request."""
        text: object = self.text
        if callable(self.text):
            text = self.text(turn)
        if not isinstance(text, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            kind = type(text).__name__
            raise InvalidSetting(f"the function of a system prompt must return a text, not {kind}")
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


REPAIR_NAME = "repair"
INTERRUPTED = "This call was interrupted: the tool was not run, or its result was lost."

UnansweredPolicy = Literal["complete", "remove"]


@checked
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

    return two_phase(partial(repair_turn, unanswered=unanswered), name=REPAIR_NAME)


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
                tool_result(block.call_id, INTERRUPTED, custom=block.custom, origin=REPAIR_NAME)
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
