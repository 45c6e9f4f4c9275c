"""Test conversation mode: a conversation object on the server holds the conversation."""

from typing import Any

import pytest
from msgspec import structs
from openai import OpenAI

from engines.conftest import open_engine
from engines.runs import last_context, last_text, request_bodies, send_lines
from kedge.events.run import Healed, ServerForgot
from kedge.planning import get_state, set_state
from kedge.testing import TestServer
from kedge.turns import Turn, user
from normalization import expected_context, normalize_items


def make_client(server: TestServer) -> OpenAI:
    """Create a plain client that acts as another user of the server."""
    return OpenAI(base_url=server.base_url, api_key="any")


async def test_one_object_holds_the_complete_conversation(server: TestServer) -> None:
    """The first request creates the object, and the next ones send only new blocks."""
    async with open_engine(server, mode="conversation") as engine:
        turn = await send_lines(engine, "One", "Two", "What did I say first?")
    conversation_ids = {body["conversation"] for body in request_bodies(server)}
    assert conversation_ids == {get_state(turn).conversation_id}
    assert [len(body["input"]) for body in request_bodies(server)] == [1, 1, 1]
    assert all("previous_response_id" not in body for body in request_bodies(server))
    assert normalize_items(last_context(server)) == expected_context(turn)
    assert "One" in last_text(turn)


async def test_an_edit_starts_a_new_object(server: TestServer) -> None:
    """An object cannot be edited, so an edited Turn is sent in full to a new one."""
    async with open_engine(server, mode="conversation") as engine:
        turn = await send_lines(engine, "One", "Two")
        before = get_state(turn).conversation_id
        edited = turn.edit(turn.blocks[0].id, user("Uno")).append(user("Three"))
        turn = await engine.run(edited)
    assert get_state(turn).conversation_id != before
    assert normalize_items(last_context(server)) == expected_context(turn)


async def test_a_message_of_another_client_starts_a_new_object(server: TestServer) -> None:
    """An object that another client has changed is not used any more."""
    async with open_engine(server, mode="conversation") as engine:
        turn = await send_lines(engine, "One")
        object_id = get_state(turn).conversation_id
        item: Any = {"type": "message", "role": "user", "content": "Intruder"}
        with make_client(server) as client:
            client.conversations.items.create(object_id, items=[item])
        turn = await engine.run(turn.append(user("Two")))
    assert get_state(turn).conversation_id != object_id
    assert "Intruder" not in str(last_context(server))
    assert normalize_items(last_context(server)) == expected_context(turn)


async def test_deleted_object_is_replaced(server: TestServer) -> None:
    """A deleted object is replaced by a new one with one full send."""
    async with open_engine(server, mode="conversation") as engine:
        turn = await send_lines(engine, "One")
        with make_client(server) as client:
            client.conversations.delete(get_state(turn).conversation_id)
        turn = await engine.run(turn.append(user("Two")))
    assert normalize_items(last_context(server)) == expected_context(turn)


async def test_responses_in_an_object_are_no_anchors(server: TestServer) -> None:
    """A response inside an object proves nothing for a chain, because the object may have changed."""
    async with open_engine(server, mode="conversation") as engine:
        turn = await send_lines(engine, "One")
        plan = engine.plan(turn.append(user("Two")), mode="chained")
    assert plan.anchor is None
    assert plan.fallback == "scope"


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("echo", ["no", "missing"])
async def test_an_answer_outside_the_object_is_healed(
    server: TestServer, echo: str, *, streaming: bool
) -> None:
    """A server that named the object before and now does not has not read it."""
    async with open_engine(server, mode="conversation") as engine:
        turn = await engine.run(Turn([user("One")]), streaming=streaming)
        object_id = get_state(turn).conversation_id
        server.faults.set(f"forget_silently,echo={echo}", times=1)
        next_turn = turn.append(user("What did I say first?"))
        async with engine.stream(next_turn, streaming=streaming) as stream:
            events = [event async for event in stream]
    assert [event.reason for event in events if isinstance(event, Healed)] == ["forgot"]
    assert normalize_items(last_context(server)) == expected_context(stream.turn)
    assert "One" in last_text(stream.turn)
    assert get_state(stream.turn).conversation_id != object_id


async def test_object_missing_at_the_end_is_reported(server: TestServer) -> None:
    """The answer was already shown when the object is found missing, so an event reports it."""
    async with open_engine(server, mode="conversation") as engine:
        turn = await engine.run(Turn([user("One")]), streaming=True)
        server.faults.set("forget_silently,echo=late", times=1)
        async with engine.stream(turn.append(user("Two")), streaming=True) as stream:
            events = [event async for event in stream]
    assert any(isinstance(event, ServerForgot) for event in events)


async def test_null_object_is_healed_at_once(server: TestServer) -> None:
    """Servers name the object at the start of an answer, so null means that it was not read."""
    server.faults.set("forget_silently,echo=no", times=2)
    async with open_engine(server, mode="conversation") as engine:
        turn = await engine.run(Turn([user("One")]), streaming=True)
        turn = await engine.run(turn.append(user("What did I say first?")), streaming=True)
    assert normalize_items(last_context(server)) == expected_context(turn)
    assert "One" in last_text(turn)


async def test_server_that_never_names_objects_is_not_healed(server: TestServer) -> None:
    """A server that never names the object is not healed; an answer outside of its object is no anchor."""
    server.faults.set("forget_silently,echo=missing", times=1)
    async with open_engine(server, mode="conversation") as engine:
        turn = await engine.run(Turn([user("One")]), streaming=False)
        server.faults.set("forget_silently,echo=missing", times=1)
        async with engine.stream(turn.append(user("Two")), streaming=False) as stream:
            events = [event async for event in stream]
    assert not any(isinstance(event, Healed | ServerForgot) for event in events)


@pytest.mark.parametrize("conversation_id", ["../admin", "..", "conv_1/../../admin?", "conv_1#"])
async def test_the_id_of_an_object_does_not_choose_another_address(
    conversation_id: str, server: TestServer
) -> None:
    """An id in an imported Turn is one segment of a URL; one that cannot be is no object."""
    async with open_engine(server, mode="conversation") as engine:
        turn = await send_lines(engine, "One")
        turn = set_state(turn, structs.replace(get_state(turn), conversation_id=conversation_id))
        server.requests.clear()
        turn = await engine.run(turn.append(user("Two")))
    own_items = f"/v1/conversations/{get_state(turn).conversation_id}/items"
    allowed = {"/v1/responses", "/v1/conversations", own_items}
    assert {each.path for each in server.requests} <= allowed
    assert not any(
        ".." in each.path.split("/") for each in server.requests if each.path not in allowed
    )
    assert normalize_items(last_context(server)) == expected_context(turn)
