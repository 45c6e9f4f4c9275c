"""Test every backend with the official clients over real sockets, in front of a second Kedge server."""

import json
import socket
import threading
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI
from openai.types.responses import (
    ResponseCompletedEvent,
    ResponseOutputTextAnnotationAddedEvent,
)
from starlette.requests import Request
from starlette.responses import Response

from anthropic_sdk import make_anthropic
from backends.conftest import connect_backend, serve_backend
from engines.fake_server import json_response, serve_handler
from kedge.backends import EngineModel
from kedge.middleware import guard, redact, with_middleware
from kedge.providers import connect
from kedge.testing import TestServer, serve
from normalization import normalize_items
from server.conftest import ask, rejects
from server.waiting import TIMEOUT, wait_until

WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
}
TWO_CALLS = "call get_weather in Paris and get_weather in Rome"
IMAGE_URL = "data:image/png;base64,iVBORw0KGgo="


def last_context(upstream: TestServer) -> Any:
    """Return the context of the newest request to the upstream model."""
    return upstream.requests[-1].context


@pytest.mark.parametrize("streamed", [False, True])
def test_stateless_backend_is_chained(client: OpenAI, upstream: TestServer, streamed: bool) -> None:
    """Responses are chained by ``previous_response_id`` with every kind of backend."""
    first = ask(client, "My name is Ada.")
    more: Any = {"model": "any", "previous_response_id": first.id}
    if streamed:
        with client.responses.stream(input="What did I say first?", **more) as stream:
            second: Any = stream.get_final_response()
    else:
        second = client.responses.create(input="What did I say first?", **more)
    assert second.output_text == 'You said first: "My name is Ada."'
    assert second.usage.input_tokens > first.usage.input_tokens
    assert [item["role"] for item in last_context(upstream)] == ["user", "assistant", "user"]


@pytest.mark.parametrize("kind", ["chat", "responses"])
def test_guarded_answers_are_streamed_once(upstream: TestServer, kind: str) -> None:
    """A guarded engine streams the items that it returns without streaming, redacted."""
    engine = connect(f"{kind}:{upstream.base_url}#practice", timeout=300)
    model = EngineModel("any", with_middleware(engine, guard(redact("Oslo"))))
    more: Any = {"model": "any", "tools": [WEATHER], "reasoning": {"effort": "low"}}
    with (
        serve(model=model) as server,
        OpenAI(base_url=server.base_url, api_key="any") as client,
    ):
        for text in ("Say: to Oslo", "call get_weather in Rome", "Refuse to dance."):
            with client.responses.stream(input=text, **more) as stream:
                streamed = stream.get_final_response()
            complete = client.responses.create(input=text, **more)
            assert [_summarize(item) for item in streamed.output] == [
                _summarize(item) for item in complete.output
            ]
            assert len(streamed.output) == 2
            assert "Oslo" not in streamed.output_text


def _summarize(item: Any) -> tuple[Any, ...]:
    parts: list[Any] = getattr(item, "content", None) or []
    texts = [getattr(part, "refusal", "") or part.text for part in parts]
    return item.type, getattr(item, "arguments", ""), texts


def test_repeated_call_is_forwarded_once(client: OpenAI, upstream: TestServer) -> None:
    """Open WebUI chains on the response of a call and repeats the call; APIs reject two equal calls."""
    more: Any = {"model": "any", "tools": [WEATHER]}
    first = client.responses.create(input="call get_weather in Paris", **more)
    (call,) = [item for item in first.output if item.type == "function_call"]
    repeated: Any = {
        "type": "function_call",
        "call_id": call.call_id,
        "name": call.name,
        "arguments": call.arguments,
    }
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    second = client.responses.create(
        input=[repeated, result], previous_response_id=first.id, **more
    )
    assert "sunny" in second.output_text
    kinds = [item.get("type") for item in last_context(upstream)]
    assert kinds.count("function_call") == 1


def test_conversation_objects_are_supported(client: OpenAI) -> None:
    """This server stores the conversation object itself, with every kind of backend."""
    conversation = client.conversations.create()
    ask(client, "One", conversation=conversation.id)
    last = ask(
        client, "What did I say first?", conversation=conversation.id, instructions="Be kind."
    )
    assert last.output_text == 'You said first: "One"'


@pytest.mark.parametrize("streamed", [False, True])
def test_parallel_tool_calls(client: OpenAI, upstream: TestServer, streamed: bool) -> None:
    """Calls have the ids of the upstream model, and their results are matched to them."""
    more: Any = {"model": "any", "tools": [WEATHER], "reasoning": {"effort": "low"}}

    def ask(**members: Any) -> Any:
        if not streamed:
            return client.responses.create(**more, **members)
        with client.responses.stream(**more, **members) as stream:
            return stream.get_final_response()

    first = ask(input=TWO_CALLS)
    calls = [item for item in first.output if item.type == "function_call"]
    assert [json.loads(call.arguments) for call in calls] == [{"city": "Paris"}, {"city": "Rome"}]
    results = [
        {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
        for call in calls
    ]
    last = ask(input=results, previous_response_id=first.id)
    assert last.output_text == "get_weather says: sunny. get_weather says: sunny."
    kinds = [item["type"] for item in last_context(upstream) if item["type"] != "reasoning"]
    assert kinds == ["message", *["function_call"] * 2, *["function_call_output"] * 2]


def test_streamed_items_equal_stored_items(client: OpenAI) -> None:
    """The deltas of an item add up to its text, and the complete response can be retrieved."""
    texts: dict[str, str] = {}
    final: Any = None
    for event in ask(client, "Say these words back", stream=True):
        if event.type == "response.output_text.delta":
            texts[event.item_id] = texts.get(event.item_id, "") + event.delta
        if event.type == "response.completed":
            final = event.response
    assert list(texts.values()) == [final.output_text]
    assert len(texts) == 1
    assert client.responses.retrieve(final.id).output_text == final.output_text


def test_answer_matches_its_schema(client: OpenAI) -> None:
    """The output format is sent upstream in the form of the upstream API."""
    schema: Any = {
        "type": "object",
        "properties": {"answer": {"type": "integer"}},
        "required": ["answer"],
        "additionalProperties": False,
    }
    form: Any = {"type": "json_schema", "name": "sum", "schema": schema, "strict": True}
    response = ask(client, "What is 6 * 7?", text={"format": form})
    assert json.loads(response.output_text) == {"answer": 42}


def test_developer_message_with_several_parts(client: OpenAI, upstream: TestServer) -> None:
    """Codex sends its rules as a developer message, which not every API supports."""
    first, second = ({"type": "input_text", "text": text} for text in ("Be brief.", "Be kind."))
    rules: Any = {"type": "message", "role": "developer", "content": [first, second]}
    response = ask(client, [rules, {"role": "user", "content": "Hi"}])
    assert response.output_text.startswith('You said: "Hi"')
    request_text = json.dumps(upstream.requests[-1].body)
    assert request_text.index("Be brief.") < request_text.index("Be kind.")


def test_images_reach_the_model(client: OpenAI, upstream: TestServer) -> None:
    """An image in a user message passes through both servers unchanged."""
    parts: Any = [
        {"type": "input_text", "text": "What is this?"},
        {"type": "input_image", "image_url": IMAGE_URL, "detail": "low"},
    ]
    ask(client, [{"role": "user", "content": parts}])
    text, picture = last_context(upstream)[0]["content"]
    assert text == parts[0]
    assert picture["image_url"] == IMAGE_URL


@pytest.mark.parametrize("texts", [[], ["A picture:"]])
def test_images_in_results_of_parallel_tools(
    client: OpenAI, upstream: TestServer, texts: list[str]
) -> None:
    """Agents read files this way; results of Chat Completions are text, so a message follows."""
    more: Any = {"model": "any", "tools": [WEATHER]}
    first = client.responses.create(input=TWO_CALLS, **more)
    picture = {"type": "input_image", "image_url": IMAGE_URL}
    output = [*({"type": "input_text", "text": text} for text in texts), picture]
    results: Any = [
        {"type": "function_call_output", "call_id": item.call_id, "output": output}
        for item in first.output
        if item.type == "function_call"
    ]
    client.responses.create(input=results, previous_response_id=first.id, **more)
    context_text = json.dumps([*last_context(upstream)])
    assert context_text.count(IMAGE_URL) == len(results)
    assert all(context_text.count(text) == len(results) for text in texts)


@pytest.mark.parametrize("streamed", [False, True])
def test_truncated_answer_is_incomplete(client: OpenAI, streamed: bool) -> None:
    """An answer cut off by its token limit is incomplete and contains the text up to the limit."""
    more: Any = {"model": "any", "input": "Write 100 words", "max_output_tokens": 16}
    if streamed:
        response: Any = list(client.responses.create(**more, stream=True))[-1]
        assert response.type == "response.incomplete"
        response = response.response
    else:
        response = client.responses.create(**more)
    assert response.status == "incomplete"
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.output[0].status == "incomplete"
    assert len(response.output[0].content[0].text.split()) >= 5


def test_settings_are_sent_upstream(client: OpenAI, upstream: TestServer) -> None:
    """Sampling and tool settings, which change the answer, are sent upstream."""
    ask(
        client,
        "Hello",
        temperature=0.5,
        top_p=0.25,
        tools=[WEATHER],
        tool_choice={"type": "function", "name": "get_weather"},
        parallel_tool_calls=False,
    )
    sent = upstream.requests[-1].body
    assert (sent["temperature"], sent["top_p"]) == (0.5, 0.25)
    assert "get_weather" in str(sent["tool_choice"])
    one = sent.get("parallel_tool_calls") is False
    assert one or sent["tool_choice"]["disable_parallel_tool_use"]


ACCOUNT_PARAMS = {
    "safety_identifier": "user-1",
    "prompt_cache_key": "key-1",
    "prompt_cache_retention": "24h",
    "service_tier": "default",
}
ANTHROPIC_PARAMS = {"metadata": {"user_id": "user-1"}, "service_tier": "standard_only"}


def test_account_parameters_are_sent_upstream(
    kind: str, client: OpenAI, upstream: TestServer
) -> None:
    """Every account parameter that the upstream API accepts is sent upstream."""
    expected: dict[str, Any] = ANTHROPIC_PARAMS if kind == "anthropic" else ACCOUNT_PARAMS
    more: Any = ACCOUNT_PARAMS
    ask(client, "Hello", **more)
    sent = upstream.requests[-1].body
    assert {name: sent.get(name) for name in expected} == expected
    client.chat.completions.create(
        model="any", messages=[{"role": "user", "content": "Hello"}], **more
    )
    sent = upstream.requests[-1].body
    assert {name: sent.get(name) for name in expected} == expected
    assert kind != "anthropic" or "prompt_cache_key" not in sent


def test_message_parameters_are_sent_upstream(
    kind: str, server: TestServer, upstream: TestServer
) -> None:
    """The user and the service tier of a message are sent under the upstream API's names."""
    anthropic_kind = kind == "anthropic"
    expected: Any = ANTHROPIC_PARAMS if anthropic_kind else {"user": "u", "service_tier": "default"}
    with make_anthropic(server.url) as other:
        other.messages.create(
            model="any",
            max_tokens=50,
            messages=[{"role": "user", "content": "Hello"}],
            metadata={"user_id": "user-1" if anthropic_kind else "u"},
            service_tier="standard_only",
        )
    sent = upstream.requests[-1].body
    assert {name: sent.get(name) for name in expected} == expected


def test_an_unknown_service_tier_of_anthropic_is_rejected(upstream: TestServer) -> None:
    """A service tier that Anthropic does not have raises an error instead of being dropped."""
    with (
        connect_backend("anthropic", upstream.base_url) as client,
        pytest.raises(openai.BadRequestError) as exc_info,
    ):
        ask(client, "Hello", service_tier="flex")
    assert exc_info.value.param == "service_tier"


def test_hosted_tools_are_sent_to_responses_apis_only(
    kind: str, client: OpenAI, upstream: TestServer
) -> None:
    """Agents offer web search to every model; a chat server would reject the request."""
    response = ask(client, "call get_weather in Rome", tools=[{"type": "web_search"}, WEATHER])
    assert [item.type for item in response.output] == ["function_call"]
    kinds = [tool.get("type", "function") for tool in upstream.requests[-1].body["tools"]]
    assert kinds == (["web_search", "function"] if kind.startswith("responses") else ["function"])
    ask(client, "Hello", tools=[{"type": "web_search"}])
    assert kind.startswith("responses") or not upstream.requests[-1].body.get("tools")


@pytest.mark.parametrize("kind", ["chat", "anthropic"])
def test_required_hosted_tool_is_rejected(client: OpenAI) -> None:
    """A hosted tool that must be called is not dropped, because that would change the answer."""
    with pytest.raises(openai.BadRequestError) as exc_info:
        ask(
            client,
            "Hello",
            tools=[{"type": "web_search"}],
            tool_choice={"type": "web_search_preview"},
        )
    assert "tool_choice" in exc_info.value.message


def test_a_long_context_is_compacted(client: OpenAI, upstream: TestServer) -> None:
    """The model summarizes the removed items, and the next response continues from the summary."""
    text = "The river runs from the mountains to the sea. " * 150
    first = ask(client, f"Remember this: {text}")
    second = ask(
        client,
        "Line 2",
        first.id,
        context_management=[{"type": "compaction", "compact_threshold": 1000}],
    )
    assert [item.type for item in second.output] == ["compaction", "message"]
    assert "In summary:" in json.dumps(upstream.requests[-1].body)
    third = ask(client, "How many messages are there?", second.id)
    assert "In summary:" in json.dumps(upstream.requests[-1].body)
    assert "mountains" not in json.dumps(last_context(upstream)[1:])
    assert third.usage.input_tokens < first.usage.input_tokens


STATUSES = {
    "status=429,retry_after=7": (429, "rate_limit_exceeded"),
    "status=401": (502, "upstream_not_authorized"),
    "status=403": (502, "upstream_not_authorized"),
    "status=404": (502, "upstream_not_found"),
    "status=400": (400, "upstream_refused"),
    "status=500": (502, "upstream_failed"),
    "status=503": (503, "upstream_overloaded"),
}


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("fault", STATUSES)
def test_upstream_error_is_mapped(
    client: OpenAI, upstream: TestServer, fault: str, streamed: bool
) -> None:
    """An upstream error has a matching status and code, also for a streaming request."""
    upstream.faults.set(fault, times=1)
    status, code = STATUSES[fault]
    with pytest.raises(openai.APIStatusError) as exc_info:
        ask(client, "Hello", stream=streamed)
    assert (exc_info.value.status_code, exc_info.value.code) == (status, code)
    if status == 429:
        assert exc_info.value.response.headers["retry-after"] == "7"
    assert ask(client, "Hello").output_text


CUT_FAULTS = ("cut_after_events=7", "cut_in_event=7", "fail_after_events=7")


@pytest.mark.parametrize("fault", CUT_FAULTS)
def test_broken_upstream_stream_fails_the_response(
    client: OpenAI, upstream: TestServer, fault: str
) -> None:
    """A response whose upstream stream breaks ends as failed and is stored as failed."""
    upstream.faults.set(fault, times=1)
    events: list[Any] = list(ask(client, "Write 40 words", stream=True))
    assert [event.type for event in events[-2:]] == ["error", "response.failed"]
    failed = events[-1].response
    assert failed.error.code == "server_error"
    assert "behind this server" in failed.error.message
    retained = client.responses.retrieve(failed.id)
    assert (retained.status, retained.error) == ("failed", failed.error)
    assert ask(client, "Hello").output_text


HARMLESS_FAULTS = ("slow_first_byte=0.05", "omit_call_id", "empty_call_id")


@pytest.mark.parametrize("fault", HARMLESS_FAULTS)
def test_upstream_quirks_are_tolerated(client: OpenAI, upstream: TestServer, fault: str) -> None:
    """With a slow server or missing call ids, the answer is correct and calls can be answered."""
    upstream.faults.set(fault)
    events: list[Any] = list(ask(client, TWO_CALLS, tools=[WEATHER], stream=True))
    response = events[-1].response
    calls = [item for item in response.output if item.type == "function_call"]
    assert [json.loads(call.arguments)["city"] for call in calls] == ["Paris", "Rome"]
    results: Any = [
        {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
        for call in calls
    ]
    last = ask(client, results, response.id, tools=[WEATHER])
    assert last.output_text.count("sunny") == 2


def test_duplicate_numbered_events_are_ignored(upstream: TestServer) -> None:
    """Repeated events of the Responses API are detected by their sequence numbers; chat chunks have none."""
    upstream.faults.set("duplicate_events")
    with (
        connect_backend("responses", upstream.base_url) as client,
        client.responses.stream(model="any", input="What is 6 * 7?") as stream,
    ):
        assert stream.get_final_response().output_text == "6 * 7 = 42."


LLAMA_CPP = Path(__file__).parents[1] / "events" / "transcripts" / "llama_cpp.sse"


@pytest.mark.parametrize("streamed", [False, True])
def test_stream_without_output_indexes_is_emitted_once(streamed: bool) -> None:
    """llama.cpp sends no `output_index`; each item is emitted and stored once, and calls can be answered."""
    stream = Response(LLAMA_CPP.read_bytes(), media_type="text/event-stream")
    answer = json_response(CITY_ANSWER)
    replies = [stream, answer]

    async def reply(request: Request) -> Response:
        body = await request.json()
        bodies.append(body)
        return replies[len(bodies) - 1]

    bodies: list[Any] = []
    with (
        serve_handler(reply) as upstream,
        connect_backend("responses, stateless", upstream) as client,
    ):
        events: list[Any] = list(
            ask(client, "Weather?", tools=[WEATHER], stream=True, timeout=TIMEOUT)
        )
        response = events[-1].response
        added = [e.item.type for e in events if e.type == "response.output_item.added"]
        stored = client.responses.retrieve(response.id)
        kinds = ["reasoning", "message", "function_call", "function_call"]
        assert [item.type for item in stored.output] == added == kinds
        assert stored.output_text == "Let me look."
        calls = [item for item in response.output if item.type == "function_call"]
        assert [json.loads(call.arguments)["city"] for call in calls] == ["Bern", "Basel"]
        results: Any = [
            {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
            for call in calls
        ]
        last: Any = ask(client, results, response.id, tools=[WEATHER], stream=streamed)
        text = list(last)[-1].response.output_text if streamed else last.output_text
    assert text == "Sunny."
    sent = [item["type"] for item in bodies[1]["input"] if item["type"] != "reasoning"]
    assert sent == ["message"] * 2 + ["function_call"] * 2 + ["function_call_output"] * 2


CITY_ANSWER: dict[str, Any] = {
    "id": "resp_2",
    "object": "response",
    "status": "completed",
    "output": [
        {
            "type": "message",
            "id": "msg_2",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Sunny.", "annotations": []}],
        }
    ],
}


def test_a_chat_and_a_message_reach_the_same_model(
    server: TestServer, client: OpenAI, upstream: TestServer
) -> None:
    """The stateless endpoints work with every kind of backend, including reasoning."""
    from anthropic import APIStatusError

    chat = client.chat.completions.create(
        model="any",
        messages=[{"role": "user", "content": "Think about 6 * 7"}],
        reasoning_effort="low",
    )
    assert chat.choices[0].message.content == "6 * 7 = 42."
    with make_anthropic(server.url) as other:
        stream = other.messages.stream(
            model="any",
            max_tokens=3000,
            messages=[{"role": "user", "content": "What is 6 * 7?"}],
            thinking={"type": "adaptive"},
        )
        with stream as events:
            message: Any = events.get_final_message()
        upstream.faults.set("status=529", times=1)
        with pytest.raises(APIStatusError) as exc_info:
            other.messages.create(
                model="any", max_tokens=50, messages=[{"role": "user", "content": "Hello"}]
            )
    assert [block.type for block in message.content] == ["thinking", "text"]
    assert exc_info.value.status_code == 503
    assert message.content[1].text == "6 * 7 = 42."


def test_reasoning_can_be_requested_after_turns_without_it(upstream: TestServer) -> None:
    """A tool result can be sent with thinking enabled although the call came without reasoning."""
    tool: Any = {"name": "get_weather", "input_schema": WEATHER["parameters"]}
    messages: list[Any] = [{"role": "user", "content": "call get_weather in Rome"}]
    body: Any = {"model": "any", "max_tokens": 3000, "messages": messages, "tools": [tool]}
    with (
        serve_backend(upstream, "chat") as server,
        make_anthropic(server.url) as client,
    ):
        call: Any = client.messages.create(**body).content[0]
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
        messages += [
            {"role": "assistant", "content": [call.model_dump(exclude_none=True)]},
            {"role": "user", "content": [result]},
        ]
        last: Any = client.messages.create(
            **body, thinking={"type": "enabled", "budget_tokens": 1024}
        )
    assert last.content[-1].text == "get_weather says: sunny."


def test_a_stop_sequence_ends_the_answer(client: OpenAI) -> None:
    """A stop sequence works whether the upstream API supports stop sequences or not."""
    response = client.chat.completions.create(
        model="any", messages=[{"role": "user", "content": "one two three"}], stop="two"
    )
    assert response.choices[0].message.content == 'You said: "one '


def test_client_disconnect_cancels_upstream_request(
    client: OpenAI, server: TestServer, upstream: TestServer
) -> None:
    """When the client disconnects, the upstream connection is closed and the upstream model stops."""
    stream = ask(client, "Count to 5000, very slowly", stream=True, timeout=TIMEOUT)
    for event in stream:
        if event.type == "response.output_text.delta":
            break
    assert upstream.running == 1
    stream.close()
    wait_until(lambda: upstream.running == 0)
    wait_until(lambda: server.running == 0)


def test_disconnect_from_stateless_endpoints_cancels_upstream_request(
    client: OpenAI, server: TestServer, upstream: TestServer
) -> None:
    """Closing the stream of a chat completion or a message cancels the upstream request."""
    slow: Any = [{"role": "user", "content": "Count to 5000, very slowly"}]
    chat = client.chat.completions.create(model="any", messages=slow, stream=True)
    next(chunk for chunk in chat if chunk.choices[0].delta.content)
    assert upstream.running == 1
    chat.close()
    wait_until(lambda: upstream.running == 0)
    with make_anthropic(server.url) as other:
        events = other.messages.create(model="any", max_tokens=5000, messages=slow, stream=True)
        next(event for event in events if event.type == "content_block_delta")
        assert upstream.running == 1
        events.close()
        wait_until(lambda: upstream.running == 0)


def test_background_response_completes_fails_or_is_cancelled(
    client: OpenAI, upstream: TestServer
) -> None:
    """A background response completes, fails with the upstream error, or is cancelled on request."""
    more: Any = {"model": "any", "background": True}

    def status(name: str) -> str | None:
        return client.responses.retrieve(name).status

    response = client.responses.create(input="Hello", **more)
    wait_until(lambda: status(response.id) == "completed")
    upstream.faults.set("status=429,retry_after=3", times=1)
    failing = client.responses.create(input="Hello", **more)
    wait_until(lambda: status(failing.id) == "failed")
    error = client.responses.retrieve(failing.id).error
    assert error is not None
    assert error.code == "rate_limit_exceeded"
    events = client.responses.create(input="Count to 5000, very slowly", stream=True, **more)
    first_event: Any = next(iter(events))
    wait_until(lambda: upstream.running == 1)
    assert client.responses.cancel(first_event.response.id).status == "cancelled"
    wait_until(lambda: upstream.running == 0)
    events.close()


def test_websocket_chains_unstored_responses(client: OpenAI, upstream: TestServer) -> None:
    """Responses that are not stored are chained within a connection, and errors are passed on."""
    more: Any = {"model": "any", "store": False}
    with client.responses.connect() as socket:

        def last() -> Any:
            return next(event for event in socket if event.type in ("response.completed", "error"))

        socket.response.create(input="My name is Ada.", **more)
        first = last().response.id
        socket.response.create(input="What did I say first?", previous_response_id=first, **more)
        assert last().response.output_text == 'You said first: "My name is Ada."'
        upstream.faults.set("status=429,retry_after=3", times=1)
        socket.response.create(input="Hello", **more)
        rejected = last()
    assert (rejected.status, rejected.error.code) == (429, "rate_limit_exceeded")


def test_disconnect_before_the_answer_cancels_it(
    client: OpenAI, server: TestServer, upstream: TestServer
) -> None:
    """A disconnect cancels the upstream request also when the response is not streamed."""
    upstream.faults.set("slow_first_byte=600", times=1)
    body = json.dumps({"model": "any", "input": "Hello"}).encode()
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=TIMEOUT) as connection:
        connection.sendall(
            b"POST /v1/responses HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n%b" % (len(body), body)
        )
        wait_until(lambda: upstream.requests)
        assert server.running == 1
    wait_until(lambda: server.running == 0)
    upstream.faults.clear()
    assert ask(client, "Hello").output_text


def test_unreachable_upstream_is_reported(kind: str) -> None:
    """An unreachable upstream server is reported with status 503 and what to check."""
    with (
        connect_backend(kind, "http://127.0.0.1:9/v1") as client,
        pytest.raises(openai.InternalServerError) as exc_info,
    ):
        ask(client, "Hello", stream=True)
    assert exc_info.value.status_code == 503
    assert "cannot be reached" in exc_info.value.message


@pytest.mark.parametrize("kind", ["chat"])
def test_fifty_streams_do_not_wait_for_a_slow_reader(server: TestServer, client: OpenAI) -> None:
    """One client that does not read its stream does not block fifty others."""
    slow = ask(client, "Write 20000 words", stream=True)
    next(iter(slow))
    answers: list[str] = []

    def read(number: int) -> None:
        events = ask(client, f"Say line {number}", stream=True, timeout=TIMEOUT)
        answers.extend(
            event.response.output_text for event in events if event.type == "response.completed"
        )

    threads = [threading.Thread(target=read, args=(number,)) for number in range(50)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT)
    assert len(answers) == 50
    assert {answer for answer in answers if "line 7" in answer.lower()}
    slow.close()
    wait_until(lambda: server.running == 0)


def test_a_stateful_server_is_chained_by_content(upstream: TestServer) -> None:
    """Only new items are sent upstream, although the client does not know the upstream response ids."""
    with (
        connect_backend("responses", upstream.base_url) as client,
    ):
        first = ask(client, "One")
        for _ in range(2):  # a fork: both continue from the same response
            ask(client, "Two", first.id)
            sent = upstream.requests[-1].body
            assert len(sent["input"]) == 1
            assert sent["previous_response_id"] == upstream.requests[0].response_id
        replayed: Any = [
            {"role": "user", "content": "One"},
            {"role": "assistant", "content": first.output_text},
            {"role": "user", "content": "Three"},
        ]
        ask(client, replayed)
        assert upstream.requests[-1].body["previous_response_id"]
        upstream.forget()
        healed = ask(client, "What did I say first?", first.id)
        assert healed.output_text == 'You said first: "One"'
        assert normalize_items(upstream.requests[-1].context)


@pytest.mark.parametrize("kind", ["anthropic", "responses, stateless"])
def test_reasoning_is_returned_to_its_model(
    upstream: TestServer, server: TestServer, client: OpenAI
) -> None:
    """Reasoning, encrypted by this server, is sent back upstream only if its context is unchanged."""
    more: Any = {"model": "any", "reasoning": {"effort": "low"}, "tools": [WEATHER]}

    def kinds() -> list[str]:
        return [item["type"] for item in last_context(upstream)]

    first = client.responses.create(input="call get_weather in Rome", **more)
    reasoning_item, call = first.output
    assert reasoning_item.type == "reasoning"
    assert (
        reasoning_item.encrypted_content
    )  # sent back to the model later, so it is always included
    assert call.type == "function_call"
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    last = client.responses.create(input=[result], previous_response_id=first.id, **more)
    assert last.output_text == "get_weather says: sunny."
    assert kinds() == ["message", "reasoning", "function_call", "function_call_output"]
    text: list[Any] = [item.model_dump(exclude_none=True) for item in first.output]
    question: Any = {"role": "user", "content": "call get_weather in Rome"}
    client.responses.create(input=[question, *text, result], store=False, **more)
    assert "reasoning" in kinds()
    question["content"] = "call get_weather in Oslo"
    client.responses.create(input=[question, *text, result], store=False, **more)
    assert "reasoning" not in kinds()


def test_unsupported_parameter_is_rejected(upstream: TestServer) -> None:
    """A parameter that the backend cannot send is a client error that names the parameter."""
    with (
        connect_backend("chat", upstream.base_url) as client,
        pytest.raises(openai.BadRequestError) as exc_info,
    ):
        ask(client, "Hello", max_tool_calls=3)
    assert exc_info.value.param == "max_tool_calls"
    assert exc_info.value.code == "unsupported_parameter"


def test_context_beyond_the_window_is_rejected(upstream: TestServer) -> None:
    """The context is limited by the window set for this model, counted in its own tokens."""
    with (
        connect_backend("chat", upstream.base_url, window=600, tokens=2.0) as client,
    ):
        text = "many words here " * 120
        with rejects("context_length_exceeded"):
            ask(client, text)
        assert ask(client, "many words here " * 50).output_text


def test_tools_in_the_input_are_sent_to_responses_apis_only(client: OpenAI, kind: str) -> None:
    """Codex sends tools as input items for known model names; other APIs reject them with advice."""
    item: Any = {"type": "additional_tools", "role": "developer", "tools": [WEATHER]}
    body: Any = {"model": "any", "input": [item, {"role": "user", "content": "Hi"}]}
    if kind.startswith("responses"):
        assert client.responses.create(**body).output_text.startswith('You said: "Hi"')
        return
    with pytest.raises(openai.BadRequestError, match="send the tools as 'tools'") as exc_info:
        client.responses.create(**body)
    assert exc_info.value.param == "input"


SEARCH = {
    "type": "web_search_call",
    "id": "ws_1",
    "status": "completed",
    "action": {"type": "search", "query": "weather", "sources": [{"type": "url", "url": "x"}]},
}
CITATION = {
    "type": "url_citation",
    "url": "https://weather.example",
    "title": "Weather",
    "start_index": 12,
    "end_index": 15,
}
TEXT = {"type": "output_text", "text": "It is sunny [1].", "annotations": [CITATION]}
MESSAGE = {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed"}


async def answer_with_search(request: Request) -> Response:
    """Answer with a hosted search and a text that cites a page, streamed or not."""
    message = {**MESSAGE, "content": [TEXT]}
    finished = {"id": "resp_1", "status": "completed", "output": [SEARCH, message]}
    if not (await request.json())["stream"]:
        return json_response(finished)
    place = {"item_id": "msg_1", "output_index": 1, "content_index": 0}
    delta = {**place, "type": "response.output_text.delta", "delta": TEXT["text"]}
    events: list[dict[str, Any]] = [
        {"type": "response.created", "response": {"id": "resp_1", "output": []}},
        {"type": "response.output_item.added", "output_index": 0, "item": SEARCH},
        {"type": "response.output_item.done", "output_index": 0, "item": SEARCH},
        {"type": "response.output_item.added", "output_index": 1, "item": MESSAGE},
        delta,
        {"type": "response.output_item.done", "output_index": 1, "item": message},
        {"type": "response.completed", "response": finished},
    ]
    frames = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
    return Response(frames, media_type="text/event-stream")


@pytest.mark.parametrize("stream", [False, True])
def test_hosted_search_and_citations_are_passed_on(stream: bool) -> None:
    """Items of hosted tools keep their members and their place, and texts their citations."""
    with (
        serve_handler(answer_with_search) as url,
        connect_backend("responses", url) as client,
    ):
        if stream:
            events = list(ask(client, "Is it sunny?", stream=True))
            added = [
                each for each in events if isinstance(each, ResponseOutputTextAnnotationAddedEvent)
            ]
            assert [each.output_index for each in added] == [1]
            assert added[0].to_dict()["annotation"] == CITATION
            completed = events[-1]
            assert isinstance(completed, ResponseCompletedEvent)
            response = completed.response
        else:
            response = ask(client, "Is it sunny?")
        search, message = (item.model_dump(exclude_unset=True) for item in response.output)
        assert search == SEARCH
        assert message["content"][0]["annotations"] == [CITATION]
        stored = client.responses.retrieve(response.id).output
        assert [item.type for item in stored] == ["web_search_call", "message"]


@pytest.mark.parametrize("stream", [False, True])
def test_citations_of_web_pages_are_in_chat_completions(stream: bool) -> None:
    """The Chat Completions API has citations of web pages in another form."""
    expected = {name: value for name, value in CITATION.items() if name != "type"}
    with (
        serve_handler(answer_with_search) as url,
        connect_backend("responses", url) as client,
    ):
        messages: Any = [{"role": "user", "content": "Is it sunny?"}]
        if stream:
            chunks = client.chat.completions.create(model="m", messages=messages, stream=True)
            deltas = [chunk.choices[0].delta.model_dump() for chunk in chunks]
            found = [each for delta in deltas for each in delta.get("annotations") or ()]
        else:
            completion = client.chat.completions.create(model="m", messages=messages)
            found = [each.model_dump() for each in completion.choices[0].message.annotations or ()]
    assert found == [{"type": "url_citation", "url_citation": expected}]
