"""Test that conversation objects are relied on by the same evidence as stored responses."""

from typing import Any

import pytest
from openai import OpenAI

from engines.conftest import open_engine
from engines.runs import last_context, last_text, send_lines
from kedge.events.run import Healed, ModeChanged, ServerForgot
from kedge.planning import get_state
from kedge.testing import TestServer
from kedge.turns import Turn, user
from normalization import expected_context, normalize_items

LONG = "Remember these words: " + "river mountain valley " * 200


def delete_item(server: TestServer, turn: Turn, index: int) -> None:
    """Delete an item of the conversation object of a Turn, counted from the oldest one."""
    object_id = get_state(turn).conversation_id
    with OpenAI(base_url=server.base_url, api_key="any") as client:
        listed: Any = list(client.conversations.items.list(object_id, order="asc"))
        client.conversations.items.delete(listed[index].id, conversation_id=object_id)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("fault", ["forget_silently", "forget_silently,echo=missing"])
async def test_a_server_that_names_the_object_and_forgets_gives_no_wrong_answer(
    server: TestServer, fault: str, *, streaming: bool
) -> None:
    """An unknown server that never reads the object is sent everything, or its answer is discarded."""
    server.faults.set("anonymous")
    server.faults.set(fault)
    turn = Turn()
    async with open_engine(server, mode="conversation") as engine:
        for number in range(6):
            question = turn.append(
                user(f"Please tell me about the rivers of the north, part {number}.")
            )
            turn = await engine.run(question, streaming=streaming)
            assert normalize_items(last_context(server)) == expected_context(turn)


@pytest.mark.parametrize("streaming", [False, True])
async def test_an_honest_unknown_server_is_continued(
    server: TestServer, *, streaming: bool
) -> None:
    """Once its token counts prove that it reads the object, only new blocks are sent."""
    server.faults.set("anonymous")
    async with open_engine(server, mode="conversation") as engine:
        turn = await send_lines(engine, LONG, "Two", streaming=streaming)
        server.requests.clear()
        turn = await send_lines(engine, "What did I say last?", turn=turn, streaming=streaming)
    sent = [each.body for each in server.requests if each.path == "/v1/responses"]
    assert [len(body["input"]) for body in sent] == [1]
    assert "Two" in last_text(turn)


@pytest.mark.parametrize("streaming", [False, True])
async def test_a_deleted_item_is_found_by_the_token_count(
    server: TestServer, *, streaming: bool
) -> None:
    """The end of the object is as expected, but the server counts fewer tokens than the object had."""
    async with open_engine(server, mode="conversation") as engine:
        turn = await send_lines(engine, LONG, "Two")
        delete_item(server, turn, 0)
        async with engine.stream(turn.append(user("Three")), streaming=streaming) as stream:
            events = [event async for event in stream]
    expected = ServerForgot if streaming else Healed
    assert any(isinstance(event, expected) for event in events)
    assert streaming or normalize_items(last_context(server)) == expected_context(stream.turn)


async def test_an_audit_finds_a_deleted_item(server: TestServer) -> None:
    """With ``verify_every`` all items of the object are compared before the request."""
    async with open_engine(server, mode="conversation", verify_every=1) as engine:
        turn = await send_lines(engine, "One", "Two", "Three")
        assert (await engine.verify(turn.append(user("Four")))).agrees is True
        delete_item(server, turn, 2)
        assert (await engine.verify(turn.append(user("Four")))).agrees is False
        async with engine.stream(turn.append(user("Four"))) as stream:
            events = [event async for event in stream]
    assert [event.reason for event in events if isinstance(event, Healed)] == ["audit"]
    assert normalize_items(last_context(server)) == expected_context(stream.turn)


async def test_an_object_is_not_used_without_trust(server: TestServer) -> None:
    """With ``trust="never"`` everything is sent, and nothing is stored."""
    async with (
        open_engine(server, mode="conversation", trust="never") as engine,
        engine.stream(Turn([user("One")])) as stream,
    ):
        events = [event async for event in stream]
    changes = [event for event in events if isinstance(event, ModeChanged)]
    assert [(event.mode, event.reason) for event in changes] == [("stateless", "never")]
    assert get_state(stream.turn).conversation_id == ""
