"""Tests that objects of the official SDKs, sent back as input in each of their forms, are accepted."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from openai import OpenAI, pydantic_function_tool
from pydantic import BaseModel

from anthropic_sdk import make_anthropic
from for_each import for_each
from kedge.testing import TestServer

QUESTION = "Call Lookup with city=Paris and Lookup with city=Rome"


class Lookup(BaseModel):
    """Arguments of a tool."""

    city: str


class Answer(BaseModel):
    """A typed answer."""

    text: str


FORMS: dict[str, Callable[[Any], Any]] = {
    "object": lambda model: model,
    "dict": lambda model: model.to_dict(),
    "dict with unset members": lambda model: model.to_dict(exclude_unset=False),
    "dump": lambda model: model.model_dump(),
    "dump without null": lambda model: model.model_dump(exclude_none=True),
    "dump of JSON": lambda model: model.model_dump(mode="json", exclude_unset=True),
}
"""How programs turn an object of the SDK into input."""


def complete_chats(client: OpenAI, **options: Any) -> Iterator[Any]:
    """Yield the message of each helper for chat completions."""
    yield client.chat.completions.create(model="practice", **options).choices[0].message
    yield client.chat.completions.parse(model="practice", **options).choices[0].message
    with client.chat.completions.stream(model="practice", **options) as stream:
        yield stream.get_final_completion().choices[0].message


def create_responses(client: OpenAI, **options: Any) -> Iterator[Any]:
    """Yield the response of each helper for responses."""
    yield client.responses.create(model="practice", **options)
    yield client.responses.parse(model="practice", **options)
    with client.responses.stream(model="practice", **options) as stream:
        yield stream.get_final_response()


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # of the SDK's own type
@for_each("convert", FORMS.values())
def test_messages_are_accepted(client: OpenAI, convert: Callable[[Any], Any]) -> None:
    """A message of each chat helper, also with a parsed answer, is accepted as a message of the history."""
    question: Any = {"role": "user", "content": "Hello"}
    typed = client.chat.completions.parse(
        model="practice", messages=[question], response_format=Answer
    )
    assert typed.choices[0].message.parsed is not None
    for message in (*complete_chats(client, messages=[question]), typed.choices[0].message):
        history = [question, convert(message), question]
        client.chat.completions.create(model="practice", messages=history)


@for_each("convert", FORMS.values())
def test_tool_calls_are_accepted(client: OpenAI, convert: Callable[[Any], Any]) -> None:
    """A message with calls of each chat helper, with indexes and parsed arguments, is accepted."""
    question: Any = {"role": "user", "content": QUESTION}
    tools: Any = [pydantic_function_tool(Lookup)]
    for message in complete_chats(client, messages=[question], tools=tools):
        results = [
            {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
            for call in message.tool_calls
        ]
        assert len(results) == 2
        history = [question, convert(message), *results]
        reply = client.chat.completions.create(model="practice", messages=history, tools=tools)
        assert "sunny" in (reply.choices[0].message.content or "")


def test_deltas_are_accepted(client: OpenAI) -> None:
    """A call assembled from the deltas of a stream, each with its index, is accepted."""
    question: Any = {"role": "user", "content": "Call Lookup with city=Paris"}
    tools: Any = [pydantic_function_tool(Lookup)]
    stream = client.chat.completions.create(
        model="practice", messages=[question], tools=tools, stream=True
    )
    calls = [call for each in stream for call in each.choices[0].delta.tool_calls or ()]
    call = calls[0].model_dump()
    call["function"]["arguments"] = "".join(
        each.function.arguments or "" for each in calls if each.function
    )
    message: Any = {"role": "assistant", "content": None, "tool_calls": [call]}
    result: Any = {"role": "tool", "tool_call_id": call["id"], "content": "sunny"}
    client.chat.completions.create(
        model="practice", messages=[question, message, result], tools=tools
    )


@for_each("convert", FORMS.values())
def test_output_items_are_accepted(client: OpenAI, convert: Callable[[Any], Any]) -> None:
    """The output of each helper for responses, also with a parsed answer, is accepted as input."""
    typed = client.responses.parse(model="practice", input="Hello", text_format=Answer)
    assert typed.output_parsed is not None
    for response in (*create_responses(client, input="Think about 6 * 7"), typed):
        items = [convert(item) for item in response.output]
        client.responses.create(model="practice", input=[*items, {"role": "user", "content": "x"}])


@for_each("convert", FORMS.values())
def test_function_calls_are_accepted(client: OpenAI, convert: Callable[[Any], Any]) -> None:
    """Function calls of each helper, with their parsed arguments, are accepted as input."""
    tool: Any = {
        "type": "function",
        "name": "Lookup",
        "strict": True,
        "parameters": Lookup.model_json_schema() | {"additionalProperties": False},
    }
    for response in create_responses(client, input=QUESTION, tools=[tool]):
        calls = [item for item in response.output if item.type == "function_call"]
        results = [
            {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
            for call in calls
        ]
        assert len(results) == 2
        history: Any = [{"role": "user", "content": QUESTION}, *map(convert, calls), *results]
        reply = client.responses.create(model="practice", input=history, tools=[tool])
        assert "sunny" in reply.output_text


@for_each("convert", FORMS.values())
def test_conversation_items_are_accepted(client: OpenAI, convert: Callable[[Any], Any]) -> None:
    """The items of a conversation, also the message of a user with a file, are accepted in another one."""
    conversation = client.conversations.create()
    file: Any = {
        "type": "input_file",
        "filename": "a.txt",
        "file_data": "data:text/plain;base64,YQ==",
    }
    client.responses.create(
        model="practice",
        input=[{"role": "user", "content": [file]}],
        conversation=conversation.id,
    )
    items = [convert(item) for item in client.conversations.items.list(conversation.id)]
    copied = client.conversations.create(items=items)
    assert [convert(item) for item in client.conversations.items.list(copied.id)] != []


@for_each("convert", FORMS.values())
def test_anthropic_blocks_are_accepted(server: TestServer, convert: Callable[[Any], Any]) -> None:
    """The blocks of each helper of the anthropic package are accepted as content of the history."""
    question: Any = {"role": "user", "content": "Think: call Lookup with city=Paris"}
    tool: Any = {"name": "Lookup", "input_schema": Lookup.model_json_schema()}
    options: Any = {"model": "practice", "max_tokens": 5_000, "tools": [tool]}
    hello: Any = {"role": "user", "content": "Hello"}

    def to_message(reply: Any) -> Any:
        return {"role": "assistant", "content": [convert(block) for block in reply.content]}

    with make_anthropic(server.url) as client:
        replies: list[Any] = [client.messages.create(messages=[question], **options)]
        with client.messages.stream(messages=[question], **options) as stream:
            replies.append(stream.get_final_message())
        for reply in replies:
            call_id = reply.content[-1].id
            result = {"type": "tool_result", "tool_use_id": call_id, "content": "sunny"}
            answer: Any = {"role": "user", "content": [result]}
            history = [question, to_message(reply), answer]
            last = client.messages.create(messages=history, **options)
            typed = client.messages.parse(
                messages=[*history, to_message(last), hello], output_format=Answer, **options
            )
            assert typed.parsed_output is not None
            client.messages.create(messages=[hello, to_message(typed), hello], **options)
