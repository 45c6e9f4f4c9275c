"""``resend_limit`` limits every full send of a conversation that could have been continued, through every door."""

from typing import Any

import pytest

from for_each import for_each
from kedge import Chat, Conversation, Turn, connect, user
from kedge.engines import Engine
from kedge.errors import InvalidSetting, ResendTooLong, UnsupportedParameter
from kedge.store import Store
from kedge.testing import TestServer, serve

CAUSES = ("edit", "expiry", "loss", "doubt", "never_stores")


def open_engine(server: TestServer, **settings: Any) -> Engine:
    return connect(f"responses:{server.base_url}#practice", max_retries=0, **settings)


@for_each("streaming", [False, True])
@for_each("cause", CAUSES)
async def test_an_engine_raises_before_a_long_full_send(cause: str, streaming: bool) -> None:
    """Whatever the cause, the limit of a call is an error with the Turn, and nothing is sent in full."""
    with serve() as server:
        settings: dict[str, Any] = {}
        if cause == "expiry":
            settings = {"retention": 60, "clock": server.clock}
        if cause == "never_stores":
            server.faults.set("report_unstored")
        async with open_engine(server, **settings) as engine:
            turn = await engine.run(Turn([user("My name is Ada.")]), streaming=streaming)
            match cause:
                case "edit":
                    turn = turn.edit(turn[0].id, user("My name is Eve."))
                case "expiry":
                    server.clock.advance(seconds=120)
                case "loss":
                    server.forget()
                case "doubt":
                    server.faults.set("forget_silently")
                    turn = await engine.run(turn.append(user("One")), streaming=streaming)
                    turn = await engine.run(turn.append(user("Two")), streaming=streaming)
                case _:
                    pass
            asked = turn.append(user("What is my name?"))
            before = len(server.requests)
            with pytest.raises(ResendTooLong) as exc_info:
                await engine.run(asked, streaming=streaming, resend_limit=1)
            assert exc_info.value.turn is not None
            assert exc_info.value.turn.blocks == asked.blocks
            sent = [request.body for request in server.requests[before:]]
            assert all(body.get("previous_response_id") for body in sent)
            answered = await engine.run(asked, streaming=streaming, resend_limit=100_000)
            assert answered[-1].text.startswith("Your name is")


async def test_a_new_conversation_and_a_chained_request_are_not_limited() -> None:
    """The first request sends everything, because there is nothing to continue."""
    with serve() as server:
        async with open_engine(server) as engine:
            turn = await engine.run(Turn([user("My name is Ada.")]), resend_limit=1)
            turn = await engine.run(turn.append(user("What is my name?")), resend_limit=1)
    assert turn[-1].text == "Your name is Ada."


@for_each("model", ["responses", "chat", "anthropic"])
async def test_a_limit_is_an_error_where_nothing_is_continued(model: str) -> None:
    """In stateless mode, and with an API without stored responses, every request is a full send."""
    with serve() as server:
        engine = open_engine(server, mode="stateless")
        if model == "chat":
            engine = connect(f"chat:{server.base_url}#practice")
        if model == "anthropic":
            engine = connect("anthropic:practice", base_url=server.url, api_key="any")
        async with engine:
            with pytest.raises(UnsupportedParameter, match="every request is a full send"):
                await engine.run(Turn([user("Hi")]), resend_limit=1)
        assert not server.requests


async def test_a_chat_without_a_compactor_is_limited() -> None:
    """Its setting is the limit of each call, which may set another one."""
    with serve() as server:
        engine = open_engine(server)
        chat = Chat(engine, resend_limit=1)
        first = await chat.chat_with_state(None, "My name is Ada.")
        second = await chat.chat_with_state(first.state, "What is my name?")
        assert second.text == "Your name is Ada."
        server.forget()
        with pytest.raises(ResendTooLong):
            await chat.chat_with_state(second.state, "What is my name?")
        async with chat.stream_with_state(second.state, "What is my name?") as stream:
            with pytest.raises(ResendTooLong):
                _ = [event async for event in stream]
        third = await chat.chat_with_state(second.state, "What is my name?", resend_limit=100_000)
        assert third.text == "Your name is Ada."
        await engine.aclose()


async def test_a_wrong_limit_of_a_chat_is_an_error_at_once() -> None:
    """It is checked without a compactor, too."""
    limit: Any = "9"
    with pytest.raises(InvalidSetting, match="resend_limit must"):
        Chat("practice", resend_limit=limit)


async def test_a_reopened_conversation_is_limited(store: Store) -> None:
    """A question that would be sent with a long history fails; with a higher limit it is answered."""
    with serve() as server:
        engine = open_engine(server)
        opened = await Conversation.create(engine, store=store, resend_limit=1)
        await opened.send("My name is Ada.")
        conversation = await Conversation.open(engine, store=store, id=opened.id, resend_limit=1)
        await conversation.send("What is my name?")
        server.forget()
        with pytest.raises(ResendTooLong):
            await conversation.send("What is my name?")
        reply = await conversation.send("What is my name?", resend_limit=100_000)
        assert reply.text == "Your name is Ada."
        await engine.aclose()
