"""Test common uses on every engine: functions as tools, edits of a history, and sync streams."""

from engines.contract.checks import check_law
from kedge.chat import Chat
from kedge.conversation import Conversation
from kedge.engines import Engine
from kedge.store import open_store
from kedge.testing import TestServer
from kedge.turns import assistant, user


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
