"""Test that one line of history continues a conversation object, however many continue its Turn."""

from typing import Any

import anyio
import pytest
from openai import AsyncOpenAI

from engines.conftest import open_engine
from engines.runs import last_text, send_lines
from kedge.engines import stored_items
from kedge.errors import RequestRefused
from kedge.events import TextDelta
from kedge.memory.object_claims import ObjectClaims
from kedge.planning import get_state
from kedge.testing import TestServer
from kedge.turns import Turn, user
from normalization import expected_context, normalize_items

LONG_ANSWER = "Count to 1000, very slowly."


def check_contexts(server: TestServer, *turns: Turn) -> None:
    """Check that each Turn was answered from its own messages, and that no two share an object."""
    contexts = [normalize_items(each.context) for each in server.requests if each.context]
    for turn in turns:
        assert expected_context(turn) in contexts
    objects = [get_state(turn).conversation_id for turn in turns]
    assert len(set(objects)) == len(objects)


def test_a_request_that_knows_no_response_does_not_own_a_claimed_object() -> None:
    """An object in use is taken for every other request, also for one that knows no response in it."""
    claims = ObjectClaims()
    assert claims.claim("here", "conv_1", "") == "unknown"
    assert claims.claim("here", "conv_1", "") == "taken"
    claims.release("here", "conv_1", "R1")
    assert [claims.find("here", "conv_1", last) for last in ("", "R0", "R1")] == [
        "taken",
        "taken",
        "owned",
    ]


async def test_a_fork_does_not_continue_the_object_of_a_running_answer(server: TestServer) -> None:
    """While one line of history is answered, another one of any engine sends everything to a new object."""
    async with (
        open_engine(server, mode="conversation") as engine,
        open_engine(server, mode="conversation") as other,
    ):
        turn = await send_lines(engine, "One")
        async with engine.stream(turn.append(user("My PIN is 1234"))) as stream:
            async for event in stream:
                if isinstance(event, TextDelta):
                    break
            fork = turn.append(user("What did I say last?"))
            assert other.plan(fork).fallback == "taken"
            fork = await other.run(fork)
            await stream.finish()
    check_contexts(server, stream.turn, fork)
    assert "1234" not in last_text(fork)


async def test_concurrent_forks_get_objects_of_their_own(server: TestServer) -> None:
    """Of several lines of history that are sent at once, one continues the object."""
    forks: list[Turn] = []

    async def send(turn: Turn, **options: Any) -> None:
        forks.append(await engine.run(turn, **options))

    async with open_engine(server, mode="conversation") as engine:
        turn = await send_lines(engine, "One")
        async with anyio.create_task_group() as group:
            for number in range(4):
                group.start_soon(send, turn.append(user(f"Fork {number}")))
    check_contexts(server, *forks)
    assert get_state(turn).conversation_id in {get_state(each).conversation_id for each in forks}


async def test_a_line_that_lost_its_object_continues_the_new_one(server: TestServer) -> None:
    """The new object of a fork is continued with deltas; so is the first one."""
    async with open_engine(server, mode="conversation") as engine:
        turn = await send_lines(engine, "One")
        first = await send_lines(engine, "Two", turn=turn)
        second = await send_lines(engine, "Three", "Four", turn=turn)
        first = await send_lines(engine, "Five", turn=first)
    assert [len(each.body["input"]) for each in server.requests if each.context] == [1, 1, 3, 1, 1]
    check_contexts(server, first, second)


async def test_a_stream_left_early_ends_the_object(server: TestServer) -> None:
    """The server may complete an answer that was left, so the object is not used any more."""
    async with open_engine(server, mode="conversation") as engine:
        turn = await send_lines(engine, "One")
        async with engine.stream(turn.append(user("Two"))) as stream:
            async for event in stream:
                if isinstance(event, TextDelta):
                    break
        again = await engine.run(turn.append(user("Three")))
    assert get_state(again).conversation_id != get_state(turn).conversation_id
    check_contexts(server, again)


async def test_a_rejected_request_does_not_end_the_object(server: TestServer) -> None:
    """A server that rejects a request adds nothing to the object, which is then continued."""
    async with open_engine(server, mode="conversation") as engine:
        turn = await send_lines(engine, "One")
        server.faults.set("status=400", times=1)
        with pytest.raises(RequestRefused):
            await engine.run(turn.append(user("Two")))
        again = await engine.run(turn.append(user("Two")))
    assert get_state(again).conversation_id == get_state(turn).conversation_id


async def test_a_locked_object_is_waited_for(
    server: TestServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An object that another client uses for a moment is continued once it is free and unchanged."""
    rejected = anyio.Event()

    async def wait(seconds: float) -> None:
        rejected.set()
        await anyio.sleep(seconds)

    monkeypatch.setattr(stored_items, "LOCK_SECONDS", 300.0)
    monkeypatch.setattr(stored_items, "sleep", wait)
    async with open_engine(server, mode="conversation") as engine:
        turn = await send_lines(engine, "One")
        object_id, answers = get_state(turn).conversation_id, list[Turn]()

        async def send() -> None:
            answers.append(await engine.run(turn.append(user("Two"))))

        async with (
            AsyncOpenAI(base_url=server.base_url, api_key="any") as client,
            anyio.create_task_group() as group,
        ):
            options: Any = {"conversation": object_id, "input": LONG_ANSWER, "stream": True}
            stream: Any = await client.responses.create(model="practice", **options)
            await anext(aiter(stream))
            group.start_soon(send)
            with anyio.fail_after(60):
                await rejected.wait()
            await stream.close()
    assert get_state(answers[0]).conversation_id == object_id
    check_contexts(server, *answers)


async def test_an_object_that_stays_locked_is_replaced(
    server: TestServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the time limit everything is sent to a new object."""
    monkeypatch.setattr(stored_items, "LOCK_SECONDS", 0.0)
    async with open_engine(server, mode="conversation") as engine:
        turn = await send_lines(engine, "One")
        object_id = get_state(turn).conversation_id
        async with AsyncOpenAI(base_url=server.base_url, api_key="any") as client:
            options: Any = {"conversation": object_id, "input": LONG_ANSWER, "stream": True}
            stream: Any = await client.responses.create(model="practice", **options)
            await anext(aiter(stream))
            answer = await engine.run(turn.append(user("Two")))
            await stream.close()
    assert get_state(answer).conversation_id != object_id
    check_contexts(server, answer)
