"""Tests of the tool loop over HTTP: approvals, custom tools, images, duplicate ids and cancellation."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from engines.fake_server import RecordingServer, connect_to, message_item, script
from engines.runs import check_law
from kedge.engines import Engine, ResponsesEngine
from kedge.events.run import ToolFinished
from kedge.middleware import repair, tools, with_middleware
from kedge.planning import find_problems, get_state
from kedge.testing import TestServer
from kedge.tools import tool
from kedge.turns import ToolResultBlock, Turn, user
from middleware.scripted_engine import add

FINAL_OUTPUT = [message_item("done")]


def make_call_items(*calls: tuple[str, str, str]) -> list[dict[str, Any]]:
    """Return an answer with the tool calls (call id, tool, arguments)."""
    names = ("call_id", "name", "arguments")
    return [
        {"type": "function_call", "id": f"fc{number}", **dict(zip(names, call, strict=True))}
        for number, call in enumerate(calls)
    ]


TWO_CALLS = make_call_items(("c1", "slow", "{}"), ("c2", "quick", "{}"))


async def quick() -> str:
    """Answer at once."""
    return "quick"


@asynccontextmanager
async def serve_script(
    *outputs: list[dict[str, Any]],
) -> AsyncIterator[tuple[RecordingServer, Engine]]:
    """Yield a server with these answers, and an engine for it."""
    server = script(*outputs)
    with anyio.fail_after(300):
        async with connect_to(server.handle) as engine:
            yield server, engine


def tool_results(turn: Turn) -> list[ToolResultBlock]:
    """Return the tool results, in order."""
    return [block for block in turn.blocks if isinstance(block, ToolResultBlock)]


async def test_a_custom_tool_takes_free_text(engine: ResponsesEngine, server: TestServer) -> None:
    """A custom tool call and its output are sent as items of their own types."""

    @tool(custom=True)
    def shout(text: str) -> str:
        """Say it louder."""
        return text.upper()

    turn = await with_middleware(engine, tools(shout)).run(
        Turn([user("Please call shout with hello")])
    )
    assert tool_results(turn)[0].text == "HELLO"
    check_law(server, turn)
    second = await engine.run(turn.append(user("Go on")), mode="stateless")
    types = [item["type"] for item in server.requests[-1].body["input"]]  # type: ignore[index]
    assert types[1:3] == ["custom_tool_call", "custom_tool_call_output"]
    check_law(server, second)


async def test_two_calls_with_one_id_are_distinguished() -> None:
    """Each call gets its own result, and the next request is not chained to the ambiguous response."""
    twice = make_call_items(("c1", "add", '{"a": 1, "b": 1}'), ("c1", "add", '{"a": 2, "b": 1}'))
    async with serve_script(twice, FINAL_OUTPUT) as (server, engine):
        turn = await with_middleware(engine, tools(add)).run(Turn([user("go")]))
    results = tool_results(turn)
    assert [result.text for result in results] == ["2", "3"]
    assert len({result.call_id for result in results}) == 2
    assert find_problems(turn) == ()
    second = server.bodies[1]
    assert "previous_response_id" not in second
    calls, answers = (
        [item["call_id"] for item in second["input"] if item["type"] == kind]
        for kind in ("function_call", "function_call_output")
    )
    assert calls == answers == [result.call_id for result in results]
    assert get_state(turn).previous_response_id == "resp_2"


async def test_a_cancelled_run_preserves_finished_results() -> None:
    """The Turn reached has the result of the finished tool, and the next run completes the other call."""
    started, received = anyio.Event(), anyio.Event()

    async def slow() -> str:
        """Never answer."""
        started.set()
        await anyio.sleep_forever()
        return ""

    async def watch() -> None:
        async with stream:
            async for event in stream:
                if isinstance(event, ToolFinished):
                    received.set()

    async with serve_script(TWO_CALLS, FINAL_OUTPUT, FINAL_OUTPUT) as (server, engine):
        stack = with_middleware(engine, repair(), tools(slow, quick))
        stream = stack.stream(Turn([user("go")]))
        task = asyncio.create_task(watch())
        await received.wait()
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert [result.text for result in tool_results(stream.reached)] == ["quick"]
        turn = await stack.run(stream.reached.append(user("go on")))
    outputs = [i for i in server.bodies[1]["input"] if i["type"] == "function_call_output"]
    assert sorted(item["call_id"] for item in outputs) == ["c1", "c2"]
    assert find_problems(turn) == ()


async def test_results_are_reported_as_they_arrive() -> None:
    """A faster tool is reported before a slower one, and the results are in the order of the calls."""
    received = anyio.Event()
    finished: list[str] = []

    async def slow() -> str:
        """Wait until the other one was told."""
        await received.wait()
        return "slow"

    async with serve_script(TWO_CALLS, FINAL_OUTPUT) as (_, engine):
        stream = with_middleware(engine, tools(slow, quick)).stream(Turn([user("go")]))
        async for event in stream:
            if isinstance(event, ToolFinished):
                finished.append(event.result.text)
                received.set()
    assert finished == ["quick", "slow"]
    assert [result.text for result in tool_results(stream.turn)] == ["slow", "quick"]
    assert stream.reached is stream.turn
