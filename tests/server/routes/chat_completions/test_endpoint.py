"""``POST /v1/chat/completions`` with the official client, over a real socket."""

import json
from typing import Any

import openai
import pytest
from openai import OpenAI
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from for_each import for_each
from kedge.server.models import PracticeModel
from kedge.server.practice_model import Script
from kedge.testing import TestServer, serve
from server.conftest import WEATHER as RESPONSES_WEATHER

PARAMETERS = RESPONSES_WEATHER["parameters"]
WEATHER: Any = {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}
PICTURE = "data:image/png;base64,iVBORw0KGgo="


def make_message(text: Any, role: str = "user") -> Any:
    return {"role": role, "content": text}


def complete(client: OpenAI, *messages: Any, **options: Any) -> Any:
    """Create a completion; a text is a message of the user."""
    chat = [make_message(each) if isinstance(each, str) else each for each in messages]
    create: Any = client.chat.completions.create
    return create(model="practice", messages=chat, **options)


def check_completion(raw: Any) -> dict[str, Any]:
    """Validate a raw response strictly with the client's own types and return its body."""
    body = raw.http_response.json()
    ChatCompletion.model_validate(body, strict=True)
    return body


def stream_chunks(client: OpenAI, **params: Any) -> list[dict[str, Any]]:
    """Stream a completion and validate each chunk with the client's own types."""
    chunks = []
    with client.chat.completions.with_streaming_response.create(
        model="practice", stream=True, **params
    ) as raw:
        lines = [line for line in raw.iter_lines() if line]
    assert lines.pop() == "data: [DONE]"
    for line in lines:
        chunk = json.loads(line.removeprefix("data: "))
        ChatCompletionChunk.model_validate(chunk, strict=True)
        chunks.append(chunk)
    return chunks


def test_model_sees_the_complete_chat(server: TestServer, client: OpenAI) -> None:
    """The model sees every message, and images and files as parts of the Responses API."""
    pdf = {"filename": "a.pdf", "file_data": "data:application/pdf;base64,"}
    parts: Any = [
        {"type": "text", "text": "Two"},
        {"type": "image_url", "image_url": {"url": PICTURE, "detail": "low"}},
        {"type": "file", "file": pdf},
    ]
    texts = {"Be kind.": "system", "One": "user", "Yes": "assistant"}
    messages = [make_message(text, role) for text, role in texts.items()]
    messages += [make_message(parts), make_message("What did I say first?")]
    create = client.chat.completions.with_raw_response.create
    body = check_completion(create(model="practice", messages=messages))
    assert body["choices"][0]["message"]["content"] == 'You said first: "One"'
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["id"].startswith("chatcmpl-")
    context = list(server.requests[-1].context or ())
    assert [item["role"] for item in context] == [*texts.values(), "user", "user"]
    assert context[3]["content"] == [
        {"type": "input_text", "text": "Two"},
        {"type": "input_image", "image_url": PICTURE, "detail": "low"},
        {"type": "input_file", **pdf},
    ]


def test_streamed_completion_equals_unstreamed_completion(client: OpenAI) -> None:
    """A stream sends the role, the text, the finish reason and then, if requested, the usage."""
    messages = [make_message("Hello there")]
    chunks = stream_chunks(client, messages=messages, stream_options={"include_usage": True})
    response = complete(client, *messages)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks[:-1]]
    assert deltas[0]["role"] == "assistant"
    text = "".join(delta.get("content") or "" for delta in deltas)
    assert text == response.choices[0].message.content
    assert chunks[-2]["choices"][0]["finish_reason"] == "stop"
    assert chunks[-1]["choices"] == []
    assert response.usage is not None
    assert chunks[-1]["usage"]["total_tokens"] == response.usage.total_tokens
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert len({chunk["id"] for chunk in chunks}) == 1


def test_reasoning_content_is_sent_and_accepted(server: TestServer, client: OpenAI) -> None:
    """Reasoning is sent as ``reasoning_content``, as open model servers do, and accepted in a request."""
    params: Any = {"messages": [make_message("Think about 6 * 7")], "reasoning_effort": "low"}
    create = client.chat.completions.with_raw_response.create
    body = check_completion(create(model="practice", **params))
    message = body["choices"][0]["message"]
    usage = body["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    details = usage["completion_tokens_details"]
    assert 0 < details["reasoning_tokens"] < usage["completion_tokens"]
    chunks = stream_chunks(client, **params)
    assert not any("usage" in chunk for chunk in chunks)  # only on request
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    reasoning_text = "".join(delta.get("reasoning_content", "") for delta in deltas)
    assert reasoning_text == message["reasoning_content"]
    complete(client, *params["messages"], message, "Thanks")
    context = server.requests[-1].context or ()
    assert [item["type"] for item in context] == ["message", "reasoning", "message", "message"]


@for_each(
    ("params", "reason", "text"),
    [
        ({"max_completion_tokens": 3}, "length", "You said:"),
        ({"max_tokens": 3}, "length", "You said:"),
        ({"stop": "one"}, "stop", 'You said: "'),
        ({"stop": ["two", "said"]}, "stop", "You "),
    ],
)
def test_token_limit_and_stop_sequences_end_the_answer(
    client: OpenAI, params: dict[str, Any], reason: str, text: str
) -> None:
    """An answer ends at its token limit, or before a stop sequence."""
    choice = complete(client, "one two three", **params).choices[0]
    assert choice.finish_reason == reason
    assert choice.message.content.startswith(text)
    assert len(choice.message.content) < 20


def test_a_refusal_has_its_own_member_and_a_long_chat_is_rejected() -> None:
    """``content`` of a refusal is null; a chat above the context window is an error with a code."""
    script = Script.from_data({"answers": [{"refuse": "No."}]})
    with (
        serve(model=PracticeModel(script, window=50)) as server,
        OpenAI(base_url=server.base_url, api_key="any", max_retries=0) as client,
    ):
        message = complete(client, "Sing").choices[0].message
        assert (message.refusal, message.content) == ("No.", None)
        with pytest.raises(openai.BadRequestError, match="50 tokens") as exc_info:
            complete(client, "many words " * 100)
    assert exc_info.value.code == "context_length_exceeded"


def test_custom_tools_are_called_with_text(client: OpenAI) -> None:
    """A custom tool is called with text, and its result is accepted like any other."""
    tool: Any = {"type": "custom", "custom": {"name": "run_code", "description": "Runs code"}}
    question = 'call run_code with "print(1)"'
    message = complete(client, question, tools=[tool]).choices[0].message
    (call,) = message.tool_calls
    assert call.custom.input == "print(1)"
    result = {"role": "tool", "tool_call_id": call.id, "content": "1"}
    replayed = message.model_dump(exclude_none=True)
    last = complete(client, question, replayed, result, tools=[tool])
    assert last.choices[0].message.content == "run_code says: 1."


FAULTS: list[tuple[str, type[Exception]]] = [
    ("cut_after_events=2", openai.APIConnectionError),
    ("cut_in_event=2", openai.APIConnectionError),
    ("fail_after_events=2", openai.APIError),
    ("status=429,retry_after=1", openai.RateLimitError),
    ("status=503", openai.InternalServerError),
]


@for_each(("fault", "kind"), FAULTS)
def test_faults_apply_to_chats(
    server: TestServer, client: OpenAI, fault: str, kind: type[Exception]
) -> None:
    """A fault raises the client's matching error, and the next request succeeds."""
    server.faults.set(fault, times=1)
    with pytest.raises(kind) as exc_info:
        list(complete(client, "Hello there", stream=True))
    if isinstance(exc_info.value, openai.RateLimitError):
        assert exc_info.value.response.headers["retry-after"] == "1"
    assert complete(client, "Hello").choices


@for_each(
    ("fault", "expected"),
    [("omit_call_id", None), ("empty_call_id", ""), ("omit_response_id", None)],
)
def test_fault_omits_ids(server: TestServer, client: OpenAI, fault: str, expected: object) -> None:
    """A fault omits or empties the ids of tool calls, or of the completion, with and without streaming."""
    server.faults.clear()
    server.faults.set(fault)
    params: Any = {"messages": [make_message("call get_weather in Rome")], "tools": [WEATHER]}
    raw = client.chat.completions.with_raw_response.create(model="practice", **params)
    body = raw.http_response.json()
    if fault == "omit_response_id":
        assert "id" not in body
        return
    deltas = [chunk["choices"][0]["delta"] for chunk in stream_chunks(client, **params)]
    first = next(delta["tool_calls"][0] for delta in deltas if delta.get("tool_calls"))
    (choice,) = body["choices"]
    assert choice["finish_reason"] == "tool_calls"
    call = choice["message"]["tool_calls"][0]
    assert call.get("id") == first.get("id") == expected
    assert first["function"]["name"] == "get_weather"


def test_faults_reorder_chunks_or_do_not_apply(server: TestServer, client: OpenAI) -> None:
    """No reordered chunk is lost, and a fault that does not apply to chats is not consumed."""
    expected = stream_chunks(client, messages=[make_message("a b c")])
    server.faults.set("reorder_events", times=1)
    for fault in ("forget_all", "refuse_empty_input", "refuse_previous_response_id=zdr"):
        server.faults.set(fault, times=1)
    mixed = stream_chunks(client, messages=[make_message("a b c")])
    assert [chunk["choices"][0]["delta"].get("role") for chunk in mixed[:2]] == [None, "assistant"]
    assert len(mixed) == len(expected)
    assert len(server.faults.armed) == 3
