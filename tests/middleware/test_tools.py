"""Tests of the tool loop: calls are run, results are sent, and no call remains open."""

from typing import Any

import anyio
import pytest

from for_each import for_each
from kedge.compaction import MessageLimitCompactor, TurnCompacted
from kedge.engines import ResendLimit
from kedge.errors import EngineError, ResendTooLong
from kedge.events.run import ToolFinished, ToolStarted
from kedge.middleware import compact, find_open_calls, guard, redact, tools, with_middleware
from kedge.middleware.compose import with_default_middleware
from kedge.observe import snapshot
from kedge.planning import find_problems
from kedge.tools import Deny, Toolbox, ToolSource, tool
from kedge.turns import (
    Block,
    Part,
    TextPart,
    ToolResultBlock,
    Turn,
    assistant,
    file,
    image,
    tool_call,
    user,
)
from middleware.scripted_engine import ScriptedEngine, add, run_stack

PNG = b"\x89PNG\r\n\x1a\n0000"


def make_call(number: int, name: str = "add", arguments: str = '{"a": 1, "b": 2}') -> Block:
    """Return a tool call."""
    return tool_call(name, arguments, call_id=f"call_{number}")


def result_texts(turn: Turn) -> list[str]:
    """Return the texts of the tool results, in order."""
    return [block.text for block in turn.blocks if isinstance(block, ToolResultBlock)]


def double(a: int) -> int:
    """Double a number."""
    return 2 * a


GO = Turn([user("go")])
DOUBLE = make_call(2, "double", '{"a": 4}')
MINE: dict[str, Any] = {"type": "function", "name": "mine", "parameters": {}}


def offered(engine: ScriptedEngine) -> list[list[str]]:
    """Return the names of the tools of each request."""
    return [[each["name"] for each in request.tools] for request in engine.requests]


def open_calls(turn: Turn) -> list[str]:
    """Return the names of the tools whose calls have no result."""
    return [each.name for each in find_open_calls(turn)]


async def test_calls_are_run_until_the_model_answers() -> None:
    """The results of each round are sent, and the loop ends with an answer without calls."""
    second = make_call(2, arguments='{"a": 3, "b": 4}')
    engine = ScriptedEngine([make_call(1)], [second], [assistant("done")])
    stream, events = await run_stack(engine, tools(add), turn=GO)
    assert result_texts(stream.turn) == ["3", "7"]
    assert offered(engine) == [["add"]] * 3
    assert sum(isinstance(event, ToolStarted) for event in events) == 2
    assert [e.outcome for e in events if isinstance(e, ToolFinished)] == ["ok", "ok"]
    assert all(b.origin == "tools" for b in stream.turn.blocks if isinstance(b, ToolResultBlock))


async def test_the_limit_of_rounds_ends_in_an_answer_without_tools() -> None:
    """Open calls are answered with a note about the limit, and the model is asked for an answer."""
    engine = ScriptedEngine([make_call(1)], [make_call(2)], [assistant("done")])
    turn = await with_middleware(engine, tools(add, max_rounds=1)).run(GO)
    assert result_texts(turn)[0] == "3"
    assert "limit of 1 rounds" in result_texts(turn)[1]
    assert engine.requests[-1].params["tool_choice"] == "none"
    assert find_problems(turn) == ()


async def test_calls_after_the_limit_are_answered(caplog: pytest.LogCaptureFixture) -> None:
    """Calls in the answer after the limit are answered as well, the run ends, and one warning is logged."""
    engine = ScriptedEngine([make_call(1)], [make_call(2)])
    turn = await with_middleware(engine, tools(add, max_rounds=0)).run(GO)
    assert find_problems(turn) == ()
    assert len(engine.turns) == 2
    assert caplog.text.count("the limit of 0 rounds") == 1


async def test_a_forced_tool_choice_applies_once() -> None:
    """A required tool choice becomes ``auto`` after the first round."""
    engine = ScriptedEngine([make_call(1)], [assistant("done")])
    await with_middleware(engine, tools(add)).run(GO, tool_choice="required")
    choices = [request.params.get("tool_choice") for request in engine.requests]
    assert choices == ["required", "auto"]


async def test_an_error_in_a_later_round_has_the_results_so_far() -> None:
    """The Turn of the error contains all earlier answers and results."""

    def fail(turn: Turn) -> list[Block]:
        error = EngineError("gone")
        error.turn = turn
        raise error

    engine = ScriptedEngine([make_call(1)], fail)
    with pytest.raises(EngineError) as exc_info:
        await with_middleware(engine, tools(add)).run(GO)
    assert exc_info.value.turn is not None
    assert result_texts(exc_info.value.turn) == ["3"]


async def test_nothing_is_compacted_between_rounds() -> None:
    """If the server loses the context after a call, the complete Turn is sent again, whatever its size."""
    engine = ScriptedEngine([make_call(1)], ResendTooLong("too long"), [assistant("done")])
    stack = compact(MessageLimitCompactor(1), resend_limit=10**9), tools(add)
    stream, events = await run_stack(engine, *stack, turn=GO)
    assert [e.occasion for e in events if isinstance(e, TurnCompacted)] == ["answered"]
    assert stream.turn.blocks[-1] == assistant("done")
    limits = [ResendLimit(10**9), ResendLimit(10**9), None]
    assert [request.resend_limit for request in engine.requests] == limits


async def test_an_open_call_of_the_caller_at_the_limit_ends_the_run() -> None:
    """The toolbox's calls are answered with the limit, and the model waits for the caller's result."""
    engine = ScriptedEngine([make_call(1), make_call(2, "mine")])
    turn = await with_middleware(engine, tools(add, max_rounds=0)).run(GO, tools=(MINE,))
    assert len(engine.turns) == 1
    assert "limit of 0 rounds" in result_texts(turn)[0]
    assert open_calls(turn) == ["mine"]


async def test_a_definition_of_a_tool_in_the_toolbox_does_not_replace_it() -> None:
    """A call is left to the caller only if the toolbox has no tool of that name."""
    engine = ScriptedEngine([make_call(1)], [assistant("done")])
    turn = await with_middleware(engine, tools(add)).run(GO, tools=({**MINE, "name": "add"},))
    assert result_texts(turn) == ["3"]


async def test_tools_of_a_source_are_offered_as_of_each_round() -> None:
    """A source may change between rounds; a guard's rules apply to its descriptions."""
    source = ToolSource()

    def grow() -> str:
        source.tools = (tool(add, description="adds for sk-123"),)
        return "grown"

    source.tools = (tool(grow),)
    engine = ScriptedEngine([make_call(1, "grow", "{}")], [make_call(2)], [assistant("done")])
    stack = with_middleware(
        engine, guard(redact("sk-[0-9]+", direction="in")), tools(toolbox=Toolbox(source))
    )
    turn = await stack.run(GO)
    assert result_texts(turn) == ["grown", "3"]
    assert offered(engine) == [["grow"], ["add"], ["add"]]
    assert engine.requests[1].tools[0]["description"] == "adds for [redacted]"


@for_each(
    ("own", "of_run"), [((add,), ()), ((), [add]), ((tool(lambda: "", name="other"),), [add])]
)
async def test_the_approver_of_a_stack_decides_about_all_tools(own: Any, of_run: Any) -> None:
    """Its own tools, and those that are passed with a message, do not run without its approval."""
    engine = ScriptedEngine([make_call(1)], [assistant("done")])
    stack = with_default_middleware(engine, tools=own, approve=lambda _: Deny("not now"))
    turn = await stack.run(GO, tools=of_run)
    assert result_texts(turn) == ["The call was denied and did not run: not now"]


def test_a_tool_that_exits_does_not_end_the_event_loop() -> None:
    """SystemExit of one of several calls reaches the caller, and later sync calls still run."""

    def leave() -> None:
        raise SystemExit(2)

    engine = ScriptedEngine([make_call(1, "leave", "{}"), make_call(2)], [assistant("done")])
    with pytest.raises(SystemExit):
        engine.sync.run(GO, tools=[leave, add])
    assert engine.sync.run(Turn([user("again")])).blocks[-1] == assistant("done")


async def test_images_are_described_for_text_only_apis() -> None:
    """Images and files in a result are replaced by text for an API that rejects them."""

    def draw() -> list[Part]:
        return [TextPart("here:"), image(PNG), image("https://example.com/a.png"), file(b"x")]

    engine = ScriptedEngine([make_call(1, "draw", "{}")], [assistant("done")])
    engine.text_only_results = True
    turn = await with_middleware(engine, tools(draw)).run(GO)
    [result] = [block for block in turn.blocks if isinstance(block, ToolResultBlock)]
    assert all(isinstance(part, TextPart) for part in result.parts)
    assert "[omitted: an image of type image/png, 12 bytes; this model's API takes" in result.text
    assert "[omitted: an image; this" in result.text
    assert "a file of type " in result.text


async def test_a_toolbox_may_be_a_function_of_the_turn() -> None:
    """It is called before each request, and calls run with the toolbox or functions that it returned."""

    def stop(reason: str) -> str:
        return f"stopped: {reason}"

    def select(turn: Turn) -> Any:
        return Toolbox(stop) if len(turn) > 1 else [add]

    stopping = make_call(2, "stop", '{"reason": "x"}')
    engine = ScriptedEngine([make_call(1)], [stopping], [assistant("done")])
    turn = await with_middleware(engine, tools(toolbox=select)).run(GO)
    assert result_texts(turn) == ["3", "stopped: x"]
    assert offered(engine) == [["add"], ["stop"], ["stop"]]


async def test_run_accepts_functions_toolboxes_and_definitions() -> None:
    """Functions and toolboxes are run; calls of definitions are left to the caller."""
    engine = ScriptedEngine([make_call(1), DOUBLE], [make_call(3, "mine", "{}")])
    turn = await engine.run(GO, tools=[add, Toolbox(tool(double)), MINE])
    assert result_texts(turn) == ["3", "8"]
    assert open_calls(turn) == ["mine"]
    assert offered(engine)[0] == ["mine", "add", "double"]


@pytest.mark.parametrize("number", [1, 2])
async def test_cancelled_calls_are_counted(number: int) -> None:
    """A run that is cancelled while tools run counts each of their calls."""

    async def wait() -> None:
        scope.cancel()
        await anyio.sleep_forever()

    def count_cancelled() -> int:
        return snapshot().get("tool_runs_total", {}).get((("outcome", "cancelled"),), (0, 0.0))[0]

    before = count_cancelled()
    calls = [make_call(index, "wait", "{}") for index in range(number)]
    with anyio.CancelScope() as scope:
        await with_middleware(ScriptedEngine(calls), tools(wait)).run(Turn([user("hi")]))
    assert count_cancelled() - before == number
