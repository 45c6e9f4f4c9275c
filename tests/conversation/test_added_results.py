"""Tool results that a caller passes with a wrong id are an error before anything is sent or stored."""

from typing import Any, NamedTuple

import pytest

from conversation.conftest import Connect
from kedge import Chat, Conversation, tool_result, user
from kedge.errors import UnmatchedResult
from kedge.middleware import find_open_calls
from kedge.store import Store
from kedge.testing import TestServer
from kedge.turns import ToolCallBlock, Turn

LOOK_UP: Any = {"type": "function", "name": "look_up", "parameters": {"type": "object"}}


@pytest.fixture
async def conversation(store: Store, connected: Connect) -> Conversation:
    """Return a conversation with an open call of the caller's tool."""
    opened = await Conversation.create(connected(), store=store, tools=[LOOK_UP])
    await opened.send("Call look_up")
    return opened


def find_call(turn: Turn) -> ToolCallBlock:
    """Return the open call of a Turn."""
    (call,) = find_open_calls(turn)
    return call


@pytest.mark.parametrize("kind", ["item_id", "id", "unknown"])
async def test_wrong_id_is_an_error_at_every_method(
    conversation: Conversation, kedge_server: TestServer, kind: str
) -> None:
    """Nothing is sent or stored, and the error names the ``call_id``; with it the call is answered."""
    call = find_call(conversation.turn)
    wrong = tool_result(getattr(call, kind, "call_unknown"), "a cat")
    sent = len(kedge_server.requests)
    tree = await conversation.tree()
    calls: list[Any] = [
        lambda: conversation.send(wrong),
        lambda: conversation.send(wrong, key="k1"),
        lambda: conversation.send(wrong, at=conversation.head),
        lambda: conversation.stream(wrong).finish(),
        lambda: conversation.append(wrong),
        lambda: conversation.insert(0, wrong),
        lambda: conversation.edit(conversation.turn[0], wrong),
        lambda: conversation.probe_and_plan(wrong),
    ]
    for act in calls:
        with pytest.raises(UnmatchedResult, match=call.call_id):
            await act()
    with pytest.raises(UnmatchedResult, match=call.call_id):
        conversation.plan(wrong)
    assert len(kedge_server.requests) == sent
    assert await conversation.tree() == tree
    assert find_call(conversation.turn) == call
    reply = await conversation.send(tool_result(call.call_id, "a cat"), key="k1")
    assert reply.text == "look_up says: a cat."


async def test_second_decision_is_an_error(
    store: Store, conversation: Conversation, kedge_server: TestServer, connected: Connect
) -> None:
    """A second result of a call is rejected, also by an object that was opened before the first one."""
    call = find_call(conversation.turn)
    other = await Conversation.open(connected(), store=store, id=conversation.id, tools=[LOOK_UP])
    result = tool_result(call.call_id, "a cat")
    first = await conversation.send(result, key="k1")
    sent = len(kedge_server.requests)
    with pytest.raises(UnmatchedResult, match="has a result already"):
        await conversation.send(tool_result(call.call_id, "a dog"))
    with pytest.raises(UnmatchedResult, match="has a result already"):
        await (await other.refresh()).append(tool_result(call.call_id, "a dog"))
    assert len(kedge_server.requests) == sent
    again = await other.send(tool_result(call.call_id, "a cat"), key="k1")
    assert (again.stored, again.node) == (True, first.node)


async def test_result_of_an_interrupted_call_is_an_error(conversation: Conversation) -> None:
    """A call that ``repair`` has completed, because the conversation went on, has its result."""
    call = find_call(conversation.turn)
    await conversation.send("Never mind. What is 2+3?")
    with pytest.raises(UnmatchedResult, match="has a result already"):
        await conversation.send(tool_result(call.call_id, "a cat"))


async def test_call_of_an_undone_branch_is_answered_there(conversation: Conversation) -> None:
    """After an undo, the result of the call is an error at the head, and accepted at its branch."""
    call, asked = find_call(conversation.turn), conversation.head
    result = tool_result(call.call_id, "a cat")
    await conversation.undo()
    for act in (conversation.send, conversation.append):
        with pytest.raises(UnmatchedResult, match="no call is open"):
            await act(result)
    assert (await conversation.send(result, at=asked)).text == "look_up says: a cat."


async def test_new_conversation_is_not_created_by_a_wrong_result(
    store: Store, connected: Connect
) -> None:
    """The first message of a conversation is checked before the conversation is stored."""
    engine = connected()
    wrong = tool_result("call_1", "5")
    new: list[Any] = [Conversation(engine, store=store, id=f"new {number}") for number in range(3)]
    for act in (new[0].send(wrong), new[1].send(wrong, key="k"), new[2].append(wrong)):
        with pytest.raises(UnmatchedResult):
            await act
    assert await store.conversations() == []


async def test_stored_history_is_repaired_as_before(store: Store, connected: Connect) -> None:
    """A history that already has a result without a call is sent without it, and can be continued."""
    history = [user("Hello"), tool_result("call_0", "5"), user("Call look_up")]
    conversation = await Conversation.create(
        connected(), store=store, blocks=history, tools=[LOOK_UP]
    )
    call = find_call((await conversation.send()).turn)
    reply = await conversation.send(tool_result(call.call_id, "a cat"))
    assert reply.text == "look_up says: a cat."


class OpenCall(NamedTuple):
    """A chat, its state with a call that has no result yet, and that call."""

    chat: Chat
    state: bytes
    call: ToolCallBlock

    def add_result(self, call_id: str) -> bytes:
        """Write a result into the state."""
        turn = self.chat.read_state(self.state)
        return self.chat.write_state(self.state, turn.append(tool_result(call_id, "a cat")))


@pytest.fixture
async def open_call(connected: Connect) -> OpenCall:
    """Return a chat with an open call."""
    chat = Chat(connected(), tools=[LOOK_UP])
    asked = await chat.chat_with_state(None, "Call look_up")
    return OpenCall(chat, asked.state, find_call(asked.turn))


async def test_wrong_id_is_an_error_of_a_chat(
    open_call: OpenCall, kedge_server: TestServer
) -> None:
    """A chat rejects a wrong result with the right id, when it is sent, planned or written; nothing is sent."""
    chat, state, call = open_call
    sent = len(kedge_server.requests)
    for wrong in (call.item_id, call.id, "call_9"):
        result = tool_result(wrong, "a cat")
        with pytest.raises(UnmatchedResult, match=call.call_id):
            await chat.chat_with_state(state, result)
        with pytest.raises(UnmatchedResult, match=call.call_id):
            chat.stream_with_state(state, result)
        with pytest.raises(UnmatchedResult, match=call.call_id):
            chat.plan(state, result)
        with pytest.raises(UnmatchedResult, match=call.call_id):
            open_call.add_result(wrong)
    assert len(kedge_server.requests) == sent


async def test_result_without_an_open_call_is_an_error_of_a_chat(open_call: OpenCall) -> None:
    """A result of a new conversation belongs to no call."""
    with pytest.raises(UnmatchedResult, match="no call is open"):
        await open_call.chat.chat_with_state(None, tool_result(open_call.call.call_id, "a cat"))


async def test_result_is_written_into_a_state(open_call: OpenCall) -> None:
    """The next call sends the result."""
    state = open_call.add_result(open_call.call.call_id)
    reply = await open_call.chat.chat_with_state(state)
    assert reply.text == "look_up says: a cat."


async def test_second_result_is_an_error_of_a_chat(open_call: OpenCall) -> None:
    """A call has one result."""
    result = tool_result(open_call.call.call_id, "a cat")
    answered = await open_call.chat.chat_with_state(open_call.state, result)
    with pytest.raises(UnmatchedResult, match="has a result already"):
        await open_call.chat.chat_with_state(answered.state, result)


async def test_imported_history_of_a_chat_is_repaired(connected: Connect) -> None:
    """A history that is written into an empty state may have a result without a call."""
    chat = Chat(connected())
    turn = Turn([user("Hello"), tool_result("call_0", "5")])
    reply = await chat.chat_with_state(chat.write_state(None, turn), "What is 2+3?")
    assert reply.text == "2+3 = 5."
