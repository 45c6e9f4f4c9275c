"""Retry: what may succeed later is tried again, as long as nothing was shown."""

from collections.abc import Sequence
from typing import Any

import pytest

from kedge.engines import Events, Request
from kedge.errors import EngineError, InvalidSetting, RateLimited, StreamCut
from kedge.events import TextDelta
from kedge.middleware import retry, two_phase, with_middleware
from kedge.turns import Turn, UserBlock, assistant, user
from middleware.scripted_engine import ScriptedEngine


async def test_what_may_succeed_later_is_tried_again() -> None:
    """A cut stream before the first word is retried after a pause, a limit after its own."""
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    limited = RateLimited("slow down", retryable=True, retry_after=7)
    engine = ScriptedEngine(StreamCut("cut", retryable=True), limited, [assistant("ok")])
    turn = await with_middleware(engine, retry(3, sleep=sleep)).run(Turn([user("hi")]))
    assert len(turn) == 2
    assert 0 < pauses[0] <= 0.5
    assert pauses[1] == 7


@pytest.mark.parametrize(
    ("answers", "tries"),
    [
        ((EngineError("no"),), 1),
        ((StreamCut("cut", retryable=True), StreamCut("cut", retryable=True)), 2),
    ],
)
async def test_permanent_failures_are_reported(answers: Sequence[Any], tries: int) -> None:
    """A refusal is told at once; attempts are counted."""
    engine = ScriptedEngine(*answers)
    with pytest.raises(EngineError):
        await with_middleware(engine, retry(2, sleep=_no_sleep)).run(Turn([user("hi")]))
    assert len(engine.turns) == tries


@pytest.mark.parametrize("attempts", [0, -1])
def test_there_is_at_least_one_attempt(attempts: int) -> None:
    """Without an attempt there would be no answer and no error."""
    with pytest.raises(InvalidSetting, match="attempts must be an integer of at least 1"):
        retry(attempts)


async def test_what_was_shown_is_never_retried() -> None:
    """Once a word was shown, a second answer would contradict it."""

    class Half(ScriptedEngine):
        async def events(self, turn: Turn, request: Request) -> Events:
            self.turns.append(turn)
            yield TextDelta("half")
            raise StreamCut("cut", retryable=True)

    engine = Half()
    with pytest.raises(StreamCut):
        async with with_middleware(engine, retry(3, sleep=_no_sleep)).stream(Turn()) as stream:
            await stream.finish()
    assert len(engine.turns) == 1


async def _no_sleep(_: float) -> None:
    pass


async def test_middlewares_inside_see_the_same_turn_again() -> None:
    """What they added to the first attempt is not there twice in the second."""

    async def sleep(_: float) -> None:
        pass

    def noted(turn: Turn) -> Turn:
        return turn.append(user("a note"))

    def fails(turn: Turn) -> Sequence[Any]:
        error = StreamCut("cut", retryable=True)
        error.turn = turn
        raise error

    engine = ScriptedEngine(fails, [assistant("ok")])
    stack = with_middleware(engine, retry(sleep=sleep), two_phase(noted))
    turn = await stack.run(Turn([user("hi")]))
    assert [block.text for block in turn.blocks if isinstance(block, UserBlock)] == ["hi", "a note"]
