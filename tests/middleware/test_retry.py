"""Tests of ``retry``, which repeats temporary failures until the first output is shown."""

from collections.abc import Sequence
from typing import Any

import pytest
from msgspec import structs

from kedge.engines import Events, Request
from kedge.errors import EngineError, RateLimited, ServerFailed, StreamCut
from kedge.events import AttemptFailed, TextDelta, Usage
from kedge.middleware import retry, tools, two_phase, with_middleware
from kedge.planning import get_state, set_state
from kedge.turns import Turn, UserBlock, assistant, tool_call, user
from middleware.scripted_engine import ScriptedEngine


async def test_transient_errors_are_retried() -> None:
    """A cut stream is retried after a backoff, and a rate limit after the pause it names, up to a limit."""
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    limited = [RateLimited("slow down", retryable=True, retry_after=each) for each in (7, 90)]
    engine = ScriptedEngine(StreamCut("cut", retryable=True), *limited, [assistant("ok")])
    turn = await with_middleware(engine, retry(4, sleep=sleep)).run(Turn([user("hi")]))
    assert len(turn) == 2
    assert 0 < pauses[0] <= 0.5
    assert pauses[1:] == [7, 30]
    engine = ScriptedEngine(*[StreamCut("cut", retryable=True)] * 2, [assistant("ok")])
    await with_middleware(engine, retry(first=60, longest=2, sleep=sleep)).run(Turn([user("hi")]))
    assert all(1 <= each <= 2 for each in pauses[3:])


async def test_tokens_of_failed_attempts_are_counted() -> None:
    """The usage of a run includes that of the attempts that were repeated, and each is an event."""
    first, last = (ServerFailed("down", retryable=True) for _ in range(2))
    first.usage, first.response_id = Usage(5, 0, 2, 0, 7), "resp_1"
    last.usage = Usage(6, total_tokens=6)
    engine = ScriptedEngine(first, StreamCut("cut", retryable=True), [assistant("ok")])
    stack = with_middleware(engine, retry(first=0, sleep=_no_sleep))
    async with stack.stream(Turn([user("hi")])) as stream:
        failed = [event async for event in stream if isinstance(event, AttemptFailed)]
    assert [(each.error, each.usage) for each in failed] == [
        (ServerFailed, first.usage),
        (StreamCut, None),
    ]
    assert (failed[0].wait, failed[0].response_id) == (0, "resp_1")
    assert stream.usage == first.usage
    both = with_middleware(ScriptedEngine(first, last), retry(2, sleep=_no_sleep))
    stream = both.stream(Turn([user("hi")]))
    with pytest.raises(ServerFailed):
        await stream.finish()
    assert stream.usage == Usage(11, 0, 2, 0, 13)


@pytest.mark.parametrize(
    ("answers", "attempts"),
    [
        ((EngineError("no"),), 1),
        ((StreamCut("cut", retryable=True), StreamCut("cut", retryable=True)), 2),
    ],
)
async def test_permanent_failures_are_reported(answers: Sequence[Any], attempts: int) -> None:
    """A permanent error is raised at once, a temporary one after the last attempt."""
    engine = ScriptedEngine(*answers)
    with pytest.raises(EngineError):
        await with_middleware(engine, retry(2, sleep=_no_sleep)).run(Turn([user("hi")]))
    assert len(engine.turns) == attempts


async def test_a_stream_is_not_retried_after_its_first_text() -> None:
    """A second answer could contradict text that was already shown."""

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


async def test_inner_middleware_gets_the_original_turn_again() -> None:
    """Blocks added by inner middleware in the first attempt are not duplicated in the second."""

    def noted(turn: Turn) -> Turn:
        return turn.append(user("a note"))

    def fails(turn: Turn) -> Sequence[Any]:
        error = StreamCut("cut", retryable=True)
        error.turn = turn
        raise error

    engine = ScriptedEngine(fails, [assistant("ok")])
    stack = with_middleware(engine, retry(sleep=_no_sleep), two_phase(noted))
    turn = await stack.run(Turn([user("hi")]))
    assert [block.text for block in turn.blocks if isinstance(block, UserBlock)] == ["hi", "a note"]


async def test_a_tool_that_ran_is_not_repeated() -> None:
    """Outside the tools, a failure after a tool was started is final: a retry would run the tool again."""
    ran: list[int] = []

    def charge(amount: int) -> str:
        """Charge a card."""
        ran.append(amount)
        return "charged"

    engine = ScriptedEngine(
        [tool_call("charge", {"amount": 5})], StreamCut("cut", retryable=True), [assistant("ok")]
    )
    stack = with_middleware(engine, retry(3, sleep=_no_sleep), tools(charge))
    with pytest.raises(StreamCut):
        await stack.run(Turn([user("Charge 5")]))
    assert ran == [5]
    assert len(engine.turns) == 2


async def test_the_state_of_a_failed_turn_is_retained() -> None:
    """What a failed attempt recorded about the server's memory is part of the next attempt."""
    asked = Turn([user("hi")])
    failure = StreamCut("cut", retryable=True)
    failure.turn = set_state(asked, structs.replace(get_state(asked), conversation_id="conv_1"))
    engine = ScriptedEngine(failure, [assistant("ok")])
    await with_middleware(engine, retry(sleep=_no_sleep)).run(asked)
    assert [get_state(turn).conversation_id for turn in engine.turns] == ["", "conv_1"]
