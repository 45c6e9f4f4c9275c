"""Typed answers of a conversation: stored corrections, idempotency keys and continuation after failures."""

from typing import Annotated, Any, assert_type

import pytest
from pydantic import AfterValidator

from conversation.conftest import assert_sent
from kedge import Conversation
from kedge.conversation import Reply
from kedge.errors import KeyReused, OutputInvalid, OutputRefused
from kedge.store import Store
from kedge.testing import TestServer


async def test_typed_reply_is_stored_with_its_correction(
    conversation: Conversation, store: Store, kedge_server: TestServer
) -> None:
    """The correction chains on the invalid answer, and both are nodes of the tree."""
    reply = await conversation.send("First invalid: What is 2 + 3?", output=int)
    assert_type(reply, Reply[int])
    assert reply.output == 5
    first, second = kedge_server.requests
    assert second.body["previous_response_id"] == first.response_id
    path = await store.path(conversation.row, conversation.head)
    assert [node.kind for node in path] == ["root", "asked", "answered", "results", "answered"]
    assert (await conversation.send("How many messages can you see?")).output is None


async def test_typed_reply_of_a_key_is_loaded_with_its_value(
    conversation: Conversation, kedge_server: TestServer
) -> None:
    """A repeated key returns the stored value, and another output type is a different request."""
    for stored in (False, True):
        reply = await conversation.send("What is 2 + 3?", key="k", output=int)
        assert (reply.output, reply.stored) == (5, stored)
    assert len(kedge_server.requests) == 1
    with pytest.raises(KeyReused):
        await conversation.send("What is 2 + 3?", key="k", output=str)


QUESTION = "First invalid: What is 2 + 3?"


async def test_invalid_answer_does_not_move_the_head(conversation: Conversation) -> None:
    """After the last attempt the error has the text of the answer, and the head is where it was."""
    head = conversation.head
    with pytest.raises(OutputInvalid) as exc_info:
        await conversation.send(QUESTION, output=int, output_retries=0)
    assert exc_info.value.text == "Not JSON: 2 + 3 = 5."
    assert conversation.head == head


async def test_key_continues_after_invalid_answers(
    conversation: Conversation, kedge_server: TestServer
) -> None:
    """A repeated key continues from the last stored answer, and the head moves with a valid one."""
    with pytest.raises(OutputInvalid):
        await conversation.send(QUESTION, key="k", output=int, output_retries=0)
    reply = await conversation.send(QUESTION, key="k", output=int)
    assert reply.output == 5
    assert conversation.head == reply.node
    assert len(reply.turn) == 4
    assert_sent(kedge_server, blocks=1, anchor=kedge_server.requests[0].response_id)


async def test_refusal_does_not_move_the_head(conversation: Conversation) -> None:
    """A refusal in place of a value is an error, and the head is where it was."""
    head = conversation.head
    with pytest.raises(OutputRefused):
        await conversation.send("Refuse to sing.", output=int)
    assert conversation.head == head


async def test_resume_corrects_an_invalid_answer(conversation: Conversation) -> None:
    """`resume` requests a correction of an invalid answer, and returns a valid stored one."""
    with pytest.raises(OutputInvalid):
        await conversation.send("First invalid: What is 2 + 3?", output=int, output_retries=0)
    question = next(node.id for node in await conversation.tree() if node.kind == "asked")
    assert (await conversation.resume(question, output=int)).output == 5
    assert (await conversation.resume(question, output=int)).stored


async def test_stored_reply_of_another_type_is_rejected(conversation: Conversation) -> None:
    """A stored reply that a validator of its type no longer accepts is rejected; keys do not cover validators."""
    limits = [10, 4]

    def check_limit(value: int) -> int:
        if value > limits[0]:
            raise ValueError("the value is too large")
        return value

    limited = Annotated[int, AfterValidator(check_limit)]
    assert (await conversation.send("What is 2 + 3?", key="k", output=limited)).output == 5
    del limits[0]
    with pytest.raises(OutputInvalid, match="0 attempt"):
        await conversation.send("What is 2 + 3?", key="k", output=limited)


async def test_functions_may_be_used_with_a_key(
    conversation: Conversation, kedge_server: TestServer
) -> None:
    """A key covers functions by their definitions, which are equal in every process."""

    def make() -> Any:
        def add(a: int, b: int) -> int:
            return a + b

        return add

    for _ in range(2):
        reply = await conversation.send("Call add with a=2 and b=3.", key="k", tools=[make()])
        assert "add says: 5" in reply.text
    assert len(kedge_server.requests) == 2
