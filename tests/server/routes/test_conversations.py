"""Conversation objects and their items, with the official client."""

from typing import Any

import httpx2
import pytest
from openai import BadRequestError, NotFoundError, OpenAI

from for_each import for_each
from kedge.testing import TestServer, serve
from server.conftest import Connect, ask, rejects, user_message
from server.gated_model import GatedModel


def item_texts(client: OpenAI, conversation: str, **query: Any) -> list[str]:
    items: Any = client.conversations.items.list(conversation, **query)
    return [item.content[0].text for item in items]


def test_a_conversation_is_created_read_updated_and_deleted(client: OpenAI) -> None:
    """A conversation object can be created, read, updated and deleted; afterwards it is not found."""
    conversation = client.conversations.create(metadata={"a": "b"}, items=[user_message("hello")])
    assert conversation.object == "conversation"
    assert client.conversations.retrieve(conversation.id).metadata == {"a": "b"}
    assert client.conversations.update(conversation.id, metadata={"c": "d"}).metadata == {"c": "d"}
    assert client.conversations.retrieve(conversation.id).metadata == {"c": "d"}
    assert client.conversations.delete(conversation.id).deleted
    with pytest.raises(NotFoundError, match=f"Conversation with id '{conversation.id}' not found."):
        client.conversations.retrieve(conversation.id)


def test_a_stored_response_adds_its_items(client: OpenAI, server: TestServer) -> None:
    """The next response sees them, an unstored one adds nothing, and a chained one is outside the conversation."""
    conversation = client.conversations.create(items=[user_message("zero")])
    first = ask(client, "one", conversation=conversation.id)
    assert first.conversation.id == conversation.id
    ask(client, "unstored", conversation=conversation.id, store=False)
    chained = ask(client, "two", first.id)
    assert chained.conversation is None
    second = ask(client, "two", conversation={"id": conversation.id})
    texts = ["zero", "one", first.output_text, "two", second.output_text]
    assert item_texts(client, conversation.id, order="asc") == texts
    assert [len(each.context or ()) for each in server.requests[-4:-1]] == [4, 4, 4]


def test_items_are_added_read_and_deleted(client: OpenAI, server: TestServer) -> None:
    """A deleted item is not found and is not part of the next context."""
    id_ = client.conversations.create(items=[user_message("zero")]).id
    items: Any = client.conversations.items
    added = items.create(id_, items=[user_message("one"), user_message("two")])
    assert [item.type for item in added.data] == ["message", "message"]
    assert added.first_id == added.data[0].id
    one = added.data[0].id
    assert items.retrieve(one, conversation_id=id_).content[0].text == "one"
    assert items.delete(one, conversation_id=id_).id == id_
    for call in (items.retrieve, items.delete):
        with pytest.raises(NotFoundError, match="not found in conversation"):
            call(one, conversation_id=id_)
    assert item_texts(client, id_, order="asc") == ["zero", "two"]
    ask(client, "three", conversation=id_)
    assert "one" not in str(server.requests[-1].context)


@pytest.mark.parametrize("deletes_all", [False, True])
def test_deleted_item_cannot_be_referenced(client: OpenAI, deletes_all: bool) -> None:
    """It is retained for a response in the conversation, and for nothing else."""
    conversation = client.conversations.create(items=[user_message("secret")])
    (item,) = client.conversations.items.list(conversation.id).data
    assert item.id
    answered = ask(client, "one", conversation=conversation.id)
    reference: Any = [{"type": "item_reference", "id": item.id}, user_message("two")]
    assert ask(client, reference, store=False)
    if deletes_all:
        client.conversations.delete(conversation.id)
    else:
        client.conversations.items.delete(item.id, conversation_id=conversation.id)
    with pytest.raises(NotFoundError, match="not found"):
        ask(client, reference)
    assert len(list(client.responses.input_items.list(answered.id))) == 2
    ask(client, "three", answered.id)
    output: Any = [{"type": "item_reference", "id": answered.output[0].id}, user_message("four")]
    assert ask(client, output)


def test_items_are_paginated(client: OpenAI) -> None:
    """Items are listed newest first by default, and ``after`` continues after an item."""
    conversation = client.conversations.create()
    for start in (0, 20):
        items = [user_message(str(number)) for number in range(start, start + 20)]
        client.conversations.items.create(conversation.id, items=items)
    page: Any = client.conversations.items.list(conversation.id, limit=3)
    assert [item.content[0].text for item in page.data] == ["39", "38", "37"]
    assert page.has_more
    after: Any = client.conversations.items.list(conversation.id, limit=3, after=page.last_id)
    assert after.data[0].content[0].text == "36"
    assert item_texts(client, conversation.id, limit=7, order="asc") == [str(n) for n in range(40)]
    last: Any = client.conversations.items.list(conversation.id, limit=100)
    assert not last.has_more


@for_each(
    ("query", "param", "code"),
    [
        ("limit=0", "limit", "integer_below_min_value"),
        ("limit=-1", "limit", "integer_below_min_value"),
        ("limit=101", "limit", "integer_above_max_value"),
        (f"limit={'9' * 5000}", "limit", "integer_above_max_value"),
        ("limit=x", "limit", "invalid_type"),
        ("limit=", "limit", "invalid_type"),
        ("limit=²", "limit", "invalid_type"),
        ("order=up", "order", "invalid_value"),
        ("after=msg_x", "after", "invalid_value"),
    ],
)
def test_invalid_page_parameters_are_rejected(
    http: httpx2.Client, query: str, param: str, code: str
) -> None:
    """The error for an invalid page contains the parameter and a code; a conversation needs no body."""
    conversation = http.post("/v1/conversations").json()
    assert conversation["metadata"] == {}
    answer = http.get(f"/v1/conversations/{conversation['id']}/items?{query}")
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, param, code)


def test_an_item_cannot_be_added_twice(client: OpenAI) -> None:
    """An item id that the conversation or the request already contains is rejected."""
    item: Any = {"type": "message", "role": "user", "content": "x", "id": "msg_mine"}
    conversation = client.conversations.create(items=[item])
    with pytest.raises(BadRequestError, match="Duplicate item found with id msg_mine"):
        client.conversations.items.create(conversation.id, items=[item])
    with pytest.raises(BadRequestError, match="Duplicate"):
        client.conversations.create(items=[item, item])


def test_an_output_may_have_the_id_of_its_call(http: httpx2.Client) -> None:
    """The output of a local shell call, which has the id of its call, is not a duplicate of it."""
    action = {"type": "exec", "command": ["ls"], "env": {}}
    call = {"type": "local_shell_call", "id": "lsh_1", "call_id": "call_1", "action": action}
    output = {"type": "local_shell_call_output", "id": "lsh_1", "output": "{}"}
    items = [{**call, "status": "completed"}, output]
    created = http.post("/v1/conversations", json={"items": items})
    assert created.status_code == 200, created.text
    listed = http.get(f"/v1/conversations/{created.json()['id']}/items").json()
    assert [item["type"] for item in listed["data"]] == [output["type"], call["type"]]


def test_tool_call_without_result_blocks_a_conversation(client: OpenAI) -> None:
    """A tool call without a result may be added, but a response requires the result."""
    call: Any = {"type": "function_call", "call_id": "call_1", "name": "f", "arguments": "{}"}
    conversation = client.conversations.create(items=[user_message("x"), call])
    with pytest.raises(BadRequestError, match="No tool output found for function call call_1"):
        ask(client, "y", conversation=conversation.id)
    output: Any = {"type": "function_call_output", "call_id": "call_1", "output": "1"}
    client.conversations.items.create(conversation.id, items=[output])
    assert ask(client, "y", conversation=conversation.id)


def test_conversation_is_locked_during_a_response(connect: Connect) -> None:
    """While a response is running, other responses and changes are rejected; reads are not."""
    with serve(model=GatedModel()) as server:
        client = connect(server)
        id_ = client.conversations.create(items=[user_message("zero")]).id
        items: Any = client.conversations.items
        with ask(client, "wait", conversation=id_, stream=True) as stream:
            next(iter(stream))
            (item,) = items.list(id_).data
            for change in (
                lambda: ask(client, "x", conversation=id_),
                lambda: items.create(id_, items=[user_message("x")]),
                lambda: items.delete(item.id, conversation_id=id_),
                lambda: client.conversations.delete(id_),
            ):
                with rejects("conversation_locked", "Another process is currently") as error:
                    change()
                assert error.value.param == "conversation"
            other = client.conversations.create()
            assert ask(client, "x", conversation=other.id)


def test_an_unknown_conversation_is_not_found(client: OpenAI) -> None:
    """Every endpoint returns 404 for an unknown conversation."""
    items = client.conversations.items
    for call in (
        lambda: ask(client, "x", conversation="conv_x"),
        lambda: client.conversations.update("conv_x", metadata={}),
        lambda: client.conversations.delete("conv_x"),
        lambda: items.list("conv_x"),
        lambda: items.create("conv_x", items=[user_message("x")]),
        lambda: items.retrieve("msg_x", conversation_id="conv_x"),
        lambda: items.delete("msg_x", conversation_id="conv_x"),
    ):
        with pytest.raises(NotFoundError, match="Conversation with id 'conv_x' not found"):
            call()
