"""Creating responses, with the official client over a real socket."""

from typing import Any

import httpx2
import pytest
from openai import BadRequestError, NotFoundError, OpenAI

from kedge.server.models import PracticeModel
from kedge.testing import TestServer, serve
from server.conftest import (
    WEATHER,
    CheckResponse,
    Connect,
    Scripted,
    ask,
    list_texts,
    rejects,
    user_message,
)


def test_settings_are_echoed(client: OpenAI, checked: CheckResponse) -> None:
    """A response contains the settings of its request."""
    sent: dict[str, Any] = {
        "instructions": "Be kind.", "max_output_tokens": 100, "max_tool_calls": 3,
        "metadata": {"a": "b"}, "parallel_tool_calls": False, "prompt_cache_key": "key",
        "safety_identifier": "someone", "temperature": 0.5, "tool_choice": "none", "top_p": 0.25,
        "truncation": "auto", "model": "some-model",
    }  # fmt: skip
    form = {"type": "json_schema", "name": "x", "schema": {"type": "object"}}
    more = {"tools": [WEATHER], "reasoning": {"effort": "low"}, "text": {"format": form}}
    create: Any = client.responses.with_raw_response.create
    body = checked(create(input="hello", service_tier="fast", **more, **sent))
    assert {key: body[key] for key in sent} == sent
    assert body["tools"] == [{**WEATHER, "description": None, "strict": True}]
    assert body["reasoning"] == {"effort": "low", "summary": None}
    assert body["text"]["format"]["schema"] == {"type": "object"}
    assert body["service_tier"] == "priority"


def test_null_means_the_default(http: httpx2.Client) -> None:
    """A setting that is null has the same effect as one that is missing."""
    names = ("temperature", "top_p", "tools", "metadata", "store", "text", "truncation", "include")
    plain, nulls = (
        http.post("/v1/responses", json={"model": "m", "input": "x", **settings}).json()
        for settings in ({}, dict.fromkeys(names))
    )
    for member in ("id", "output", "created_at", "completed_at"):
        del plain[member], nulls[member]
    assert plain == nulls


def test_only_items_are_inherited(client: OpenAI, server: TestServer) -> None:
    """The context is that of the parent with its output; instructions, tools and settings apply to one request."""
    settings: Any = {"instructions": "Be kind.", "tools": [WEATHER]}
    first = ask(client, "one", metadata={"a": "b"}, **settings)
    more = ask(client, "two", first.id, **settings)
    second = ask(client, "two", first.id)
    assert more.usage.input_tokens > max(first.usage.total_tokens, second.usage.input_tokens + 10)
    assert (second.instructions, second.tools, second.metadata) == (None, [], {})
    assert (second.previous_response_id, second.conversation) == (first.id, None)
    assert list_texts(server) == ["one", first.output_text, "two"]
    assert "Be kind." not in str(server.requests[-1].context)


def test_cached_tokens(client: OpenAI) -> None:
    """From 1024 tokens on, the input of the previous response is a cached prefix, in steps of 128."""
    first = ask(client, "word " * 2000)
    second = ask(client, "two", first.id)
    assert first.usage.input_tokens_details.cached_tokens == 0
    assert first.usage.input_tokens_details.cache_write_tokens == first.usage.input_tokens
    details = second.usage.input_tokens_details
    assert details.cached_tokens == first.usage.input_tokens // 128 * 128
    assert details.cached_tokens + details.cache_write_tokens == second.usage.input_tokens


def test_modified_encrypted_reasoning_is_rejected(
    scripted: Scripted, checked: CheckResponse, connect: Connect
) -> None:
    """A client can send encrypted reasoning back unchanged, to a server with the same database."""
    thought = "word " * 50
    model = scripted({"think": thought, "say": "Done."})
    with serve(model=model) as server, serve(model=model) as other:
        client = connect(server)
        create: Any = client.responses.with_raw_response.create
        plain = checked(create(model="m", input="x"))
        hidden = {"id": plain["output"][0]["id"], "type": "reasoning", "summary": []}
        assert plain["output"][0] == hidden
        usage = plain["usage"]
        assert usage["output_tokens"] > usage["output_tokens_details"]["reasoning_tokens"] >= 50
        options = {"include": ["reasoning.encrypted_content"], "reasoning": {"summary": "auto"}}
        reasoning, message = checked(create(model="m", input="x", store=False, **options))["output"]
        assert reasoning["summary"] == [{"type": "summary_text", "text": thought}]
        encrypted = reasoning["encrypted_content"]

        def replay(content: str, receiver: OpenAI = client) -> Any:
            item = {**reasoning, "encrypted_content": content}
            return ask(receiver, [user_message("x"), item, message, user_message("y")])

        assert replay(encrypted).output_text == "Done."
        for changed in (encrypted[:-5] + "AAAA=", "gAAAAAnonsense", encrypted + "!"):
            with rejects("invalid_encrypted_content"):
                replay(changed)
        with rejects("invalid_encrypted_content"):
            replay(encrypted, connect(other))
        with pytest.raises(NotFoundError):
            replay("")


def test_the_answer_stops_at_max_output_tokens(client: OpenAI, checked: CheckResponse) -> None:
    """An answer that reaches the limit is incomplete with a reason, and it can be continued."""
    create: Any = client.responses.with_raw_response.create
    body = checked(create(model="practice", input="word " * 200, max_output_tokens=16))
    assert (body["status"], body["completed_at"]) == ("incomplete", None)
    assert body["incomplete_details"] == {"reason": "max_output_tokens"}
    assert body["output"][0]["status"] == "incomplete"
    assert 0 < body["usage"]["output_tokens"] <= 20
    assert ask(client, "go on", body["id"])


def test_incomplete_tool_call_blocks_the_chain(scripted: Scripted, connect: Connect) -> None:
    """An incomplete response with a tool call cannot be continued without the result."""
    long = {"text": "word " * 100}
    with serve(model=scripted({"call": {"name": "write", "arguments": long}})) as server:
        client = connect(server)
        incomplete = ask(client, "x", max_output_tokens=16)
        assert incomplete.status == "incomplete"
        with pytest.raises(BadRequestError, match="No tool output found for function call"):
            ask(client, "y", incomplete.id)


def test_context_above_the_window_is_rejected_or_truncated(connect: Connect) -> None:
    """A context above the window is an error; ``truncation: auto`` drops the oldest items instead."""
    with serve(model=PracticeModel(window=120)) as server:
        client = connect(server)
        previous: str | None = None
        for text in ("first word " * 10, "second word " * 10):
            response = ask(client, text, previous, truncation="auto")
            previous = response.id
        message = "Your input exceeds the context window of this model. Please adjust your input"
        with rejects("context_length_exceeded", message) as error:
            ask(client, "third", previous)
        assert (error.value.status_code, error.value.param) == (400, "input")
        ask(client, "third", previous, truncation="auto")
        texts = list_texts(server)
        assert texts[-1] == "third"
        assert not any(text.startswith("first") for text in texts)
        with rejects("context_length_exceeded"):
            ask(client, "far too long " * 90, truncation="auto")


def test_input_items_are_the_complete_context(client: OpenAI) -> None:
    """The input items are the parent's input and output, then the new input, in pages."""
    first = ask(client, "one")
    second = ask(client, [user_message("two"), user_message("three")], first.id)
    page: Any = client.responses.input_items.list(second.id, limit=1)
    assert page.data[0].content[0].text == "three"
    assert page.has_more
    items: Any = list(client.responses.input_items.list(second.id, order="asc", limit=3))
    texts = [item.content[0].text for item in items]
    assert texts == ["one", first.output_text, "two", "three"]
    assert not client.responses.input_items.list(second.id, limit=4).has_more
    assert len({item.id for item in items}) == 4
    with pytest.raises(NotFoundError):
        client.responses.input_items.list("resp_x")


def test_include_of_a_query_is_checked(client: OpenAI, http: httpx2.Client) -> None:
    """An unknown value is rejected wherever the API has ``include``; known ones are accepted."""
    conversation = client.conversations.create(items=[{"role": "user", "content": "one"}])
    made = ask(client, "two", conversation=conversation.id)
    listed: Any = client.conversations.items.list(conversation.id)
    assert client.responses.retrieve(made.id, include=["reasoning.encrypted_content"]).id == made.id
    items = f"/v1/conversations/{conversation.id}/items"
    paths = (f"/v1/responses/{made.id}", f"/v1/responses/{made.id}/input_items", items)
    for path in (*paths, f"{items}/{listed.data[0].id}"):
        assert http.get(f"{path}?include[]=message.output_text.logprobs").status_code == 200
        for name, index in (("include", 0), ("include[]=file_search_call.results&include[]", 1)):
            error = http.get(f"{path}?{name}=thoughts").json()["error"]
            assert (error["param"], error["code"]) == (f"include[{index}]", "invalid_value")
    body = {"items": [{"role": "user", "content": "three"}]}
    assert http.post(f"{items}?include=thoughts", json=body).status_code == 400
    assert len(list(client.conversations.items.list(conversation.id))) == 3


def test_an_empty_idempotency_key_is_none(http: httpx2.Client) -> None:
    """Requests with an empty header are independent, as without the header."""
    ids: set[str] = set()
    for text in ("one", "one", "two"):
        body = {"model": "practice", "input": text}
        answer = http.post("/v1/responses", json=body, headers={"Idempotency-Key": ""})
        assert answer.status_code == 200
        ids.add(answer.json()["id"])
    assert len(ids) == 3


def test_input_tokens_are_counted(client: OpenAI, server: TestServer) -> None:
    """The count equals the input tokens of a response to the same request."""
    first = ask(client, "one")
    body: Any = {"model": "practice", "input": "two", "previous_response_id": first.id}
    body |= {"instructions": "Be kind.", "tools": [WEATHER]}
    counted = client.responses.input_tokens.count(**body)
    assert counted.object == "response.input_tokens"
    response = client.responses.create(**body)
    assert counted.input_tokens == response.usage.input_tokens
    assert client.responses.input_tokens.count().input_tokens == 0
    with rejects("previous_response_not_found"):
        client.responses.input_tokens.count(previous_response_id="resp_x")


@pytest.mark.parametrize("by", ["previous_response_id", "conversation", "items"])
def test_error_of_a_wrong_call_id_names_the_right_one(client: OpenAI, by: str) -> None:
    """An output with the id of the item of its call, or with any other, is told the ``call_id`` of the open call."""
    tools: Any = [WEATHER]
    sent: dict[str, Any] = {}
    if by == "conversation":
        sent["conversation"] = client.conversations.create().id
    first = ask(client, f"Please call {WEATHER['name']}.", tools=tools, **sent)
    (call,) = [item for item in first.output if item.type == "function_call"]
    before: list[Any] = []
    if by == "previous_response_id":
        sent["previous_response_id"] = first.id
    elif by == "items":
        before = [user_message("Weather?"), call.to_dict()]
    for wrong, problem in (
        (
            call.id,
            f"{call.id} is the id of the item of this call; use its call_id, {call.call_id}.",
        ),
        ("call_9", f"Calls without an output: {call.call_id}."),
    ):
        output: Any = {"type": "function_call_output", "call_id": wrong, "output": "Sunny."}
        with pytest.raises(BadRequestError) as raised:
            client.responses.create(model="m", input=[*before, output], tools=tools, **sent)
        message = raised.value.body["message"]  # pyright: ignore[reportIndexIssue, reportOptionalSubscript]
        start = f"No tool call found for function call output with call_id {wrong}."
        assert message == f"{start} {problem}"
