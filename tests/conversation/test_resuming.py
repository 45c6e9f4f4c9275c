"""Questions without an answer: stored before they are sent, stopped, and resumed."""

from typing import Any, cast

import anyio
import anyio.lowlevel
import pytest

from conversation.conftest import BuildConversation, Connect, assert_sent, list_kinds
from kedge import Conversation, assistant, errors, user
from kedge.engines import Events, Request
from kedge.events import TextDelta
from kedge.events.run import TurnFinished
from kedge.middleware import BaseMiddleware
from kedge.store import Node, Store
from kedge.testing import TestServer
from kedge.turns import Turn


async def read_first_text(conversation: Conversation) -> str:
    """Stop a turn at its first text, and return that text."""
    async with conversation.stream("Count to 500") as stream:
        async for event in stream:
            if isinstance(event, TextDelta):
                return event.delta
    raise AssertionError("the stream ended without a text")


async def test_question_is_stored_before_it_is_sent(
    conversation: Conversation, kedge_server: TestServer, reopen: BuildConversation
) -> None:
    """After a failed request the question is stored beside the head, and its response has failed."""
    kedge_server.faults.set("status=500", times=1)
    with pytest.raises(errors.KedgeError):
        await conversation.send("What is 2+3?")
    reopened = await reopen(conversation)
    assert len(reopened.turn) == 0
    (question,) = await reopened.pending()
    stored = await reopened.store.load(reopened.row, question.id)
    assert stored.blocks == (user("What is 2+3?"),)
    (failed,) = await reopened.responses()
    assert failed.status == "failed"


async def test_unanswered_question_is_resumed_once(
    conversation: Conversation, kedge_server: TestServer
) -> None:
    """`resume` answers a question whose request failed; then there is nothing to resume."""
    kedge_server.faults.set("status=500", times=1)
    with pytest.raises(errors.KedgeError):
        await conversation.send("What is 2+3?")
    reply = await conversation.resume()
    assert (reply.text, len(conversation.turn)) == ("2+3 = 5.", 2)
    assert await conversation.pending() == []
    with pytest.raises(errors.NotInStore):
        await conversation.resume()


async def test_newest_of_several_unanswered_questions_is_resumed(
    conversation: Conversation, kedge_server: TestServer
) -> None:
    """Of several questions at the head without an answer, `resume` answers the last."""
    kedge_server.faults.set("status=500", times=2)
    for text in ("What is 1+1?", "What is 1+2?"):
        with pytest.raises(errors.KedgeError):
            await conversation.send(text)
    assert (await conversation.resume()).text == "1+2 = 3."


async def test_unanswered_question_is_resumed_by_its_node(conversation: Conversation) -> None:
    """`resume` accepts a node that `pending` returned."""
    async with conversation.stream("Count to 50") as stream:
        await anext(stream)
    (question,) = await conversation.pending()
    assert isinstance(question, Node)
    assert (await conversation.resume(question)).node > question.id


async def test_question_with_invalid_options_is_not_stored(conversation: Conversation) -> None:
    """A question whose request can never be encoded does not stay in the conversation as pending."""
    for options in ({"metadata": {"a": object()}}, {"extra_body": {"a": {1}}}):
        with pytest.raises(errors.InvalidSetting, match="cannot be sent as JSON"):
            await conversation.send("Hello", **cast("dict[str, Any]", options))
        assert await conversation.pending() == []
    assert (await conversation.send("Hello")).text.startswith("You said")


async def test_question_is_stored_without_events(store: Store, connected: Connect) -> None:
    """The question is stored before it is sent, even if a middleware drops events."""

    class Quiet(BaseMiddleware):
        name = "recall"

        async def events(self, turn: Turn, request: Request) -> Events:
            async for event in self.inner.events(turn, request):
                if isinstance(event, TurnFinished):
                    yield event

    conversation = await Conversation.create(connected(), store=store, middleware=[Quiet])
    await conversation.send("My name is Ada.")
    assert "asked" in list_kinds(await store.tree(conversation.row))


async def test_question_is_pending_until_its_tool_calls_are_answered(
    store: Store, connected: Connect, kedge_server: TestServer
) -> None:
    """A turn that is stopped while a tool runs, or fails after it, is resumed from its last step."""
    found: list[Node] = []

    async def work() -> str:
        """Fail, or look at the conversation as another process would after a crash."""
        found[:] = await (
            await Conversation.open(engine, store=store, id=conversation.id)
        ).pending()
        if scope:
            scope.cancel()
            await anyio.lowlevel.checkpoint()
        kedge_server.faults.set("status=400", times=1)
        return "done"

    engine = connected()
    conversation = await Conversation.create(engine, store=store, tools=[work])
    for scope, result in ((None, "done"), (anyio.CancelScope(), "This call was interrupted")):
        with scope or pytest.raises(errors.RequestRefused):
            await conversation.send("Please call work")
        (question,) = await conversation.pending()
        assert (question.kind, found) == ("asked", [question])
        assert (await conversation.resume()).text.startswith(f"work says: {result}")
        assert await conversation.pending() == []
    await conversation.undo()
    assert await conversation.pending() == []


async def test_stopped_stream_is_pending(store: Store, conversation: Conversation) -> None:
    """The head stays, and the question can be resumed."""
    await read_first_text(conversation)
    assert (await store.conversation(conversation.id)).head == conversation.head
    (question,) = await conversation.pending()
    assert question.kind == "asked"
    assert (await conversation.resume()).text.startswith("1 2 3")
    assert [record.status for record in await conversation.responses()] == [
        *("cancelled", "completed")
    ]


async def test_partial_answer_of_a_stopped_stream_is_stored(conversation: Conversation) -> None:
    """What was received is in a cancelled node, which is not an anchor."""
    received = await read_first_text(conversation)
    (stopped,) = await conversation.responses()
    assert (stopped.status, stopped.anchor_record, stopped.error) == ("cancelled", None, "")
    stored = await conversation.store.load(conversation.row, stopped.node)
    assert stored.blocks == (user("Count to 500"), assistant(received))
    assert stored.state.anchors == ()


async def test_partial_answer_is_continued_by_a_message_at_its_node(
    conversation: Conversation, kedge_server: TestServer
) -> None:
    """A message that continues from a stopped answer sends it, because the server does not have it."""
    await read_first_text(conversation)
    (stopped,) = await conversation.responses()
    reply = await conversation.send("How many messages?", at=stopped.node)
    assert [block.kind for block in reply.turn.blocks] == ["user", "assistant"] * 2
    assert_sent(kedge_server, blocks=3)


async def test_stored_question_can_be_streamed_again(conversation: Conversation) -> None:
    """`stream_resume` returns the stored answer, or a new one with ``restart``, as `stream_regenerate` does."""
    first = await conversation.send("What is 2+3?")
    (question,) = [
        node.id for node in await conversation.store.tree(conversation.row) if node.kind == "asked"
    ]
    async with conversation.stream_resume(question) as stream:
        assert [type(event) async for event in stream] == [TurnFinished]
    assert (stream.reply.node, stream.reply.stored) == (first.node, True)
    async with conversation.stream_resume(question, restart=True) as stream:
        await stream.finish()
    assert stream.reply.text == first.text
    assert stream.reply.node != first.node
    async with conversation.stream_regenerate() as stream:
        text = "".join([delta async for delta in stream.text_deltas()])
    assert text == stream.reply.text == "2+3 = 5."
    assert first.node != stream.reply.node == conversation.head
