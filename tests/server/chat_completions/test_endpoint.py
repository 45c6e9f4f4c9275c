"""``POST /v1/chat/completions`` with the official client, over a real socket."""

import json
from typing import Any

import openai
import pytest
from openai import OpenAI
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from kedge.practice import Script
from kedge.server.models import PracticeModel
from kedge.testing import TestServer, serve

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
PICTURE = "data:image/png;base64,iVBORw0KGgo="


def make_message(text: str, role: str = "user") -> Any:
    return {"role": role, "content": text}


def check_completion(raw: Any) -> dict[str, Any]:
    """Check a raw answer with the client's own types, strictly; give its body."""
    body = raw.http_response.json()
    ChatCompletion.model_validate(body, strict=True)
    return body


def stream_chunks(client: OpenAI, **asked: Any) -> list[dict[str, Any]]:
    """Stream an answer, checking each chunk with the client's own types."""
    found = []
    with client.chat.completions.with_streaming_response.create(
        model="practice", stream=True, **asked
    ) as raw:
        lines = [line for line in raw.iter_lines() if line]
    assert lines.pop() == "data: [DONE]"
    for line in lines:
        chunk = json.loads(line.removeprefix("data: "))
        ChatCompletionChunk.model_validate(chunk, strict=True)
        found.append(chunk)
    return found


def test_a_chat_is_answered_with_everything_that_it_holds(
    server: TestServer, client: OpenAI
) -> None:
    """The model sees every message, and the record of the request shows what it saw."""
    messages = [
        make_message("Be kind.", "system"),
        make_message("One"),
        make_message("Yes", "assistant"),
        make_message("Two"),
    ]
    body = check_completion(
        client.chat.completions.with_raw_response.create(
            model="practice", messages=[*messages, make_message("What did I say first?")]
        )
    )
    assert body["choices"][0]["message"]["content"] == 'You said first: "One"'
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["id"].startswith("chatcmpl-")
    context = server.requests[-1].context
    assert context is not None
    assert [item["role"] for item in context] == ["system", "user", "assistant", "user", "user"]


def test_usage_counts_what_went_in_and_came_out(client: OpenAI) -> None:
    """Thoughts are a part of what came out."""
    made = client.chat.completions.create(
        model="practice", messages=[make_message("Hello")], reasoning_effort="high"
    )
    assert made.usage is not None
    assert made.usage.total_tokens == made.usage.prompt_tokens + made.usage.completion_tokens
    details = made.usage.completion_tokens_details
    assert details is not None
    assert details.reasoning_tokens
    assert details.reasoning_tokens < made.usage.completion_tokens


@pytest.mark.parametrize("streamed", [False, True])
def test_tools_are_called_in_parallel_and_their_results_told(
    client: OpenAI, streamed: bool
) -> None:
    """The round of tools that every agent makes, whole and as the client's own stream helper."""
    messages = [make_message("call get_weather in Paris and get_weather in Rome")]
    asked: Any = {"model": "practice", "messages": messages, "tools": [WEATHER]}
    if streamed:
        with client.chat.completions.stream(**asked) as stream:
            choice = stream.get_final_completion().choices[0]
    else:
        choice = client.chat.completions.create(**asked).choices[0]
    assert choice.finish_reason == "tool_calls"
    calls: Any = choice.message.tool_calls
    assert [json.loads(call.function.arguments) for call in calls] == [
        {"city": "Paris"},
        {"city": "Rome"},
    ]
    results: list[Any] = [
        {"role": "tool", "tool_call_id": call.id, "content": "sunny"} for call in calls
    ]
    answered: list[Any] = [
        *messages,
        choice.message.model_dump(exclude_none=True, exclude={"parsed"}),
    ]
    for call in answered[-1]["tool_calls"]:
        call["function"].pop("parsed_arguments", None)
        call.pop("index", None)  # the client's helper leaves it there
    last = client.chat.completions.create(
        model="practice", messages=[*answered, *results], tools=[WEATHER]
    )
    assert last.choices[0].message.content == "get_weather says: sunny. get_weather says: sunny."


def test_a_stream_tells_the_same_as_the_whole(client: OpenAI) -> None:
    """Role first, then text, then the reason, then usage, where that was asked for."""
    asked: Any = {
        "messages": [make_message("Hello there")],
        "stream_options": {"include_usage": True},
    }
    told = stream_chunks(client, **asked)
    made = client.chat.completions.create(model="practice", messages=asked["messages"])
    deltas = [chunk["choices"][0]["delta"] for chunk in told[:-1]]
    assert deltas[0]["role"] == "assistant"
    text = "".join(delta.get("content") or "" for delta in deltas)
    assert text == made.choices[0].message.content
    assert told[-2]["choices"][0]["finish_reason"] == "stop"
    assert told[-1]["choices"] == []
    assert made.usage is not None
    assert told[-1]["usage"]["total_tokens"] == made.usage.total_tokens
    assert all(chunk["usage"] is None for chunk in told[:-1])
    assert len({chunk["id"] for chunk in told}) == 1


def test_a_stream_without_usage_never_mentions_it(client: OpenAI) -> None:
    """Usage comes only where it was asked for."""
    assert not any(
        "usage" in chunk for chunk in stream_chunks(client, messages=[make_message("Hello")])
    )


def test_thoughts_are_told_as_reasoning_content_and_taken_back(
    server: TestServer, client: OpenAI
) -> None:
    """As the open servers do that think aloud."""
    asked: Any = {"messages": [make_message("Think about 6 * 7")], "reasoning_effort": "low"}
    body = check_completion(
        client.chat.completions.with_raw_response.create(model="practice", **asked)
    )
    message = body["choices"][0]["message"]
    told = stream_chunks(client, **asked)
    thought = "".join(chunk["choices"][0]["delta"].get("reasoning_content", "") for chunk in told)
    assert thought == message["reasoning_content"]
    client.chat.completions.create(
        model="practice", messages=[*asked["messages"], message, make_message("Thanks")]
    )
    context = server.requests[-1].context or ()
    assert [item["type"] for item in context] == ["message", "reasoning", "message", "message"]


def test_an_answer_fits_its_schema(client: OpenAI) -> None:
    """The format of a chat is that of the Responses API under another name."""
    schema = {
        "type": "object",
        "properties": {"answer": {"type": "integer"}},
        "required": ["answer"],
        "additionalProperties": False,
    }
    made = client.chat.completions.create(
        model="practice",
        messages=[make_message("What is 6 * 7?")],
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "sum", "schema": schema, "strict": True},
        },
    )
    assert json.loads(made.choices[0].message.content or "") == {"answer": 42}


def test_pictures_and_files_reach_the_model(server: TestServer, client: OpenAI) -> None:
    """In the form in which the Responses API has them."""
    parts: Any = [
        {"type": "text", "text": "What is this?"},
        {"type": "image_url", "image_url": {"url": PICTURE, "detail": "low"}},
        {
            "type": "file",
            "file": {"filename": "a.pdf", "file_data": "data:application/pdf;base64,"},
        },
    ]
    client.chat.completions.create(model="practice", messages=[{"role": "user", "content": parts}])
    assert next(iter(server.requests[-1].context or ()))["content"] == [
        {"type": "input_text", "text": "What is this?"},
        {"type": "input_image", "image_url": PICTURE, "detail": "low"},
        {"type": "input_file", "filename": "a.pdf", "file_data": "data:application/pdf;base64,"},
    ]


@pytest.mark.parametrize(
    ("asked", "reason", "text"),
    [
        ({"max_completion_tokens": 3}, "length", "You said:"),
        ({"max_tokens": 3}, "length", "You said:"),
        ({"stop": "one"}, "stop", 'You said: "'),
        ({"stop": ["two", "said"]}, "stop", "You "),
    ],
)
def test_an_answer_ends_early_where_it_is_told_to(
    client: OpenAI, asked: dict[str, Any], reason: str, text: str
) -> None:
    """At its limit of tokens, or before a stop sequence."""
    made = client.chat.completions.create(
        model="practice", messages=[make_message("one two three")], **asked
    )
    assert made.choices[0].finish_reason == reason
    assert (made.choices[0].message.content or "").startswith(text)
    assert len(made.choices[0].message.content or "") < 20


def test_a_refusal_is_told_as_one() -> None:
    """In its own member, not as text."""
    script = Script.from_data({"answers": [{"refuse": "No."}]})
    with (
        serve(model=PracticeModel(script)) as server,
        OpenAI(base_url=server.base_url, api_key="any") as client,
    ):
        made = client.chat.completions.create(model="practice", messages=[make_message("Sing")])
    assert made.choices[0].message.refusal == "No."
    assert made.choices[0].message.content is None


def test_custom_tools_are_called_with_text(client: OpenAI) -> None:
    """And answered like any other call."""
    tool: Any = {"type": "custom", "custom": {"name": "run_code", "description": "Runs code"}}
    messages: list[Any] = [make_message('call run_code with "print(1)"')]
    made = client.chat.completions.create(model="practice", messages=messages, tools=[tool])
    call: Any = made.choices[0].message.tool_calls
    assert call[0].custom.input == "print(1)"
    messages += [
        made.choices[0].message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call[0].id, "content": "1"},
    ]
    last = client.chat.completions.create(model="practice", messages=messages, tools=[tool])
    assert last.choices[0].message.content == "run_code says: 1."


def test_a_chat_that_is_too_long_is_refused() -> None:
    """With the code that every client knows."""
    with (
        serve(model=PracticeModel(window=50)) as server,
        OpenAI(base_url=server.base_url, api_key="any", max_retries=0) as client,
        pytest.raises(openai.BadRequestError) as caught,
    ):
        client.chat.completions.create(
            model="practice", messages=[make_message("many words " * 100)]
        )
    assert caught.value.code == "context_length_exceeded"
    assert "50 tokens" in caught.value.message


FAULTS: dict[str, type[Exception]] = {
    "cut_after_events=2": openai.APIConnectionError,
    "cut_in_event=2": openai.APIConnectionError,
    "fail_after_events=2": openai.APIError,
    "status=429,retry_after=1": openai.RateLimitError,
    "status=503": openai.InternalServerError,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_strike_a_chat_too(server: TestServer, client: OpenAI, fault: str) -> None:
    """The client meets what it would meet in the wild, and the next request is answered."""
    server.faults.set(fault, times=1)
    with pytest.raises(FAULTS[fault]) as caught:
        list(
            client.chat.completions.create(
                model="practice", messages=[make_message("Hello there")], stream=True
            )
        )
    if isinstance(caught.value, openai.RateLimitError):
        assert caught.value.response.headers["retry-after"] == "1"
    assert client.chat.completions.create(
        model="practice", messages=[make_message("Hello")]
    ).choices


@pytest.mark.parametrize(("fault", "expected"), [("omit_call_id", None), ("empty_call_id", "")])
def test_calls_can_come_without_their_ids(
    server: TestServer, client: OpenAI, fault: str, expected: object
) -> None:
    """Streamed and whole."""
    server.faults.set(fault)
    asked: Any = {"messages": [make_message("call get_weather in Rome")], "tools": [WEATHER]}
    made = client.chat.completions.with_raw_response.create(model="practice", **asked)
    call = made.http_response.json()["choices"][0]["message"]["tool_calls"][0]
    assert call.get("id") == expected
    opening = next(
        call
        for chunk in stream_chunks(client, **asked)
        for call in chunk["choices"][0]["delta"].get("tool_calls", ())
    )
    assert opening.get("id") == expected
    assert opening["function"]["name"] == "get_weather"


def test_events_come_twice_or_out_of_order(server: TestServer, client: OpenAI) -> None:
    """Nothing is lost, not even the last one."""
    usual = stream_chunks(client, messages=[make_message("a b c")])
    server.faults.set("duplicate_events")
    assert len(stream_chunks(client, messages=[make_message("a b c")])) == 2 * len(usual)
    server.faults.clear()
    server.faults.set("reorder_events")
    mixed = stream_chunks(client, messages=[make_message("a b c")])
    assert [chunk["choices"][0]["delta"].get("role") for chunk in mixed[:2]] == [None, "assistant"]
    assert len(mixed) == len(usual)


def test_an_answer_may_come_without_its_id(server: TestServer, client: OpenAI) -> None:
    """As from servers that forget to name their answers."""
    server.faults.set("omit_response_id")
    raw = client.chat.completions.with_raw_response.create(
        model="practice", messages=[make_message("Hello")]
    )
    assert "id" not in raw.http_response.json()


def test_what_has_to_do_with_memory_does_not_strike_a_chat(
    server: TestServer, client: OpenAI
) -> None:
    """A fault that finds nothing to do is not spent."""
    for fault in ("forget_all", "refuse_empty_input", "refuse_previous_response_id=zdr"):
        server.faults.set(fault, times=1)
    made = client.chat.completions.create(model="practice", messages=[make_message("Hello")])
    assert made.choices[0].message.content
    assert len(server.faults.armed) == 3
