"""Test middleware, Chat, Conversation, edits and compaction on every engine."""

from pathlib import Path
from typing import Any

from engines.contract.checks import check_law
from kedge import Conversation, open_store
from kedge.compaction import ProviderCounter, TokenLimitCompactor
from kedge.conversation import Chat
from kedge.engines import Engine
from kedge.events.run import AnswerFinished, ToolFinished, ToolStarted
from kedge.middleware import (
    guard,
    log,
    redact,
    repair,
    retry,
    system_prompt,
    tools,
    with_middleware,
)
from kedge.planning import find_problems
from kedge.testing import TestServer
from kedge.turns import ToolResultBlock, Turn, assistant, tool_call, user


def add(a: float, b: float) -> float:
    """Add two numbers."""
    return a + b


def get_weather(city: str) -> str:
    """Tell the weather."""
    return f"sunny in {city}"


TWO_CALLS = "Call add with 2 and 3 and get_weather in Rome."


async def test_middleware_stack_runs_tools(engine: Engine, server: TestServer) -> None:
    """Instructions, repair, a guard, a log, retries and tools work together and report their events."""
    stack = with_middleware(
        engine,
        log(),
        system_prompt("Be kind."),
        repair(),
        guard(redact(r"secret-\d+")),
        retry(2),
        tools(add, get_weather),
    )
    turn = Turn([user("My password is secret-123."), tool_call("add", "{}", call_id="left_open")])
    events: list[Any] = []
    reached: list[Turn] = []
    async with stack.stream(turn.append(user(TWO_CALLS))) as stream:
        async for event in stream:
            events.append(event)
            reached += [stream.reached] if isinstance(event, AnswerFinished) else []
    assert len(reached[-1]) == len(stream.turn)
    assert [type(e) for e in events if isinstance(e, ToolStarted | ToolFinished)] == [
        ToolStarted,
        ToolStarted,
        ToolFinished,
        ToolFinished,
    ]
    assert find_problems(stream.turn) == ()
    results = [b.text for b in stream.turn if isinstance(b, ToolResultBlock)]
    assert results[-2:] == ["5", "sunny in Rome"] or results[-2:] == ["5.0", "sunny in Rome"]
    assert "sunny in Rome" in stream.text
    assert "secret-123" not in str([each.body for each in server.requests])
    assert len(stream.answers) == 2


async def test_conversations_are_compacted_by_the_tokens_that_the_provider_counts(
    engine: Engine,
) -> None:
    """After compaction, the remaining blocks are sent and answered."""
    chat = Chat(engine, compactor=TokenLimitCompactor(60, counter=ProviderCounter()))
    state: bytes | None = None
    for number in range(5):
        state = (await chat.chat_with_state(state, f"My number is {number}.")).state
    answer = await chat.chat_with_state(state, "What did I say last?")
    assert "My number is 4." in answer.text
    assert len(answer.turn) < 12


async def test_a_stored_conversation_continues_in_another_process(
    engine: Engine, name: str, server: TestServer, tmp_path: Path
) -> None:
    """Encrypted reasoning, calls and results survive being stored, and the law holds afterwards."""
    options: dict[str, Any] = {"reasoning": {"effort": "low"}}
    async with open_store(f"sqlite:///{tmp_path}/kedge.db") as store:
        conversation = await Conversation.create(engine, store=store, tools=[add])
        await conversation.send("Call add with 2 and 3", **options)
        id = conversation.row.id  # noqa: A001 - the word of the contract
    async with open_store(f"sqlite:///{tmp_path}/kedge.db") as store:
        reopened = await Conversation.open(engine, store=store, id=id, tools=[add])
        reply = await reopened.send("What did I say first?", **options)
        check_law(server, reopened.turn)
        rows = await reopened.responses()
    assert "Call add with 2 and 3" in reply.text
    assert [row.status for row in rows] == ["completed"] * 3
    if name == "anthropic":
        sent = str(server.requests[-1].body)
        assert sent.count("'signature'") == 2


async def test_edited_conversation_obeys_the_law(engine: Engine, server: TestServer) -> None:
    """After each edit, the server's context is exactly the path to the head."""
    async with open_store("sqlite://:memory:") as store:
        conversation = await Conversation.create(engine, store=store)
        await conversation.send("My ship is the Erebus.")
        await conversation.send("What is 2+3?")
        first, _, question, answer = conversation.turn.blocks
        await conversation.edit(first.id, "My ship is the Terror.")
        await conversation.insert(2, "My captain is Crozier.", assistant("Noted."))
        await conversation.remove(question.id, answer.id)
        reply = await conversation.send("What is my ship?")
        assert reply.text == "Your ship is the Terror."
        check_law(server, reply.turn)
        await conversation.truncate(4)
        reply = await conversation.send("What is my captain?")
        assert reply.text == "Your captain is Crozier."
        check_law(server, reply.turn)
        await conversation.undo()
        await conversation.undo()
        reply = await conversation.send("What did I say first?")
        assert "Terror" in reply.text
        check_law(server, reply.turn)


async def test_edited_chat_state_obeys_the_law(engine: Engine, server: TestServer) -> None:
    """A state edited with the methods of `Chat` is sent as the complete edited conversation."""
    chat = Chat(engine)
    state = (await chat.chat_with_state(None, "My ship is the Erebus.")).state
    answer = await chat.chat_with_state(state, "What is 2+3?")
    first, _, third, _ = answer.turn.blocks
    turn = answer.turn.edit(first.id, user("My ship is the Terror.")).truncate(third.id)
    turn = turn.remove(third.id).insert(0, user("My captain is Crozier."), assistant("Noted."))
    state = chat.write_state(answer.state, turn)
    answer = await chat.chat_with_state(state, "What is my ship?")
    assert answer.text == "Your ship is the Terror."
    check_law(server, answer.turn)
    assert answer.response_id == server.requests[-1].response_id != ""
