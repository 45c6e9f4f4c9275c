"""``POST /v1/messages`` with the official client, over a real socket."""

import json
from functools import cache
from typing import TYPE_CHECKING, Any

import httpx2
import pytest
from pydantic import TypeAdapter

from anthropic_sdk import make_anthropic
from for_each import for_each
from kedge.server.models import PracticeModel
from kedge.server.practice_model import Script
from kedge.testing import TestServer, serve
from server.conftest import WEATHER as RESPONSES_WEATHER
from server.conftest import open_client

if TYPE_CHECKING:
    from anthropic import Anthropic

PARAMETERS = RESPONSES_WEATHER["parameters"]
WEATHER: Any = {"name": "get_weather", "input_schema": PARAMETERS}
THINKING: Any = {"type": "enabled", "budget_tokens": 1024}
REQUEST: Any = {"model": "practice", "max_tokens": 4000}


@cache
def load_event_type() -> TypeAdapter[Any]:
    """Return the client's own type of events."""
    from anthropic.types import RawMessageStreamEvent

    return TypeAdapter(RawMessageStreamEvent)


def make_message(content: Any, role: str = "user") -> Any:
    return {"role": role, "content": content}


def make_history(*contents: Any) -> list[Any]:
    """Return messages of the user and the assistant by turns."""
    roles = ("user", "assistant")
    return [make_message(each, roles[at % 2]) for at, each in enumerate(contents)]


def make_result(call_id: str) -> Any:
    return {"type": "tool_result", "tool_use_id": call_id, "content": "sunny"}


def create_message(client: "Anthropic", **params: Any) -> dict[str, Any]:
    """Create a message without streaming and validate it strictly with the client's own types."""
    from anthropic.types import Message

    raw = client.messages.with_raw_response.create(**REQUEST | params)
    body = raw.http_response.json()
    Message.model_validate_json(raw.http_response.content, strict=True)
    return body


def stream_events(client: "Anthropic", **params: Any) -> list[dict[str, Any]]:
    """Stream a message and validate each event with the client's own types."""
    with client.messages.with_streaming_response.create(stream=True, **REQUEST | params) as raw:
        text = "\n".join(raw.iter_lines())
    events: list[dict[str, Any]] = []
    for block in text.strip().split("\n\n"):
        name, _, data = block.partition("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        if event["type"] not in ("ping", "error"):
            load_event_type().validate_json(json.dumps(event), strict=True)
        events.append(event)
    return events


def test_model_sees_the_complete_conversation(server: TestServer, client: "Anthropic") -> None:
    """The model sees every message, and images and documents as parts of the Responses API."""
    picture = {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}
    document = {"type": "url", "url": "https://example.com/a.pdf"}
    parts: Any = [
        {"type": "image", "source": picture},
        {"type": "document", "source": document, "title": "a.pdf"},
        {"type": "text", "text": "Two"},
    ]
    messages = [*make_history("One", "Yes", parts), make_message("What did I say first?")]
    counted = client.messages.count_tokens(model="practice", messages=messages)
    body = create_message(client, messages=messages)
    assert counted.input_tokens == body["usage"]["input_tokens"]
    assert body["content"] == [{"type": "text", "text": 'You said first: "One"'}]
    assert (body["stop_reason"], body["stop_sequence"]) == ("end_turn", None)
    context = list(server.requests[-1].context or ())
    assert [item["role"] for item in context] == ["user", "assistant", "user"]
    assert context[-1]["content"] == [
        {"type": "input_image", "image_url": "data:image/png;base64,iVBORw0KGgo="},
        {"type": "input_file", "file_url": "https://example.com/a.pdf", "filename": "a.pdf"},
        {"type": "input_text", "text": "Two"},
        {"type": "input_text", "text": "What did I say first?"},
    ]


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("thinking", [{"type": "disabled"}, THINKING])
def test_parallel_tool_calls_and_results(
    server: TestServer, client: "Anthropic", streamed: bool, thinking: Any
) -> None:
    """The model calls two tools in parallel and uses their results, with its reasoning resent unchanged."""
    messages = [make_message("call get_weather in Paris and get_weather in Rome")]
    params: Any = {**REQUEST, "messages": messages, "tools": [WEATHER], "thinking": thinking}
    if streamed:
        with client.messages.stream(**params) as stream:
            response: Any = stream.get_final_message()
    else:
        response = client.messages.create(**params)
    assert response.stop_reason == "tool_use"
    calls = [block for block in response.content if block.type == "tool_use"]
    assert [call.input for call in calls] == [{"city": "Paris"}, {"city": "Rome"}]
    assert all(call.id.startswith("toolu_") for call in calls)
    results = [make_result(call.id) for call in calls]
    replayed = [block.model_dump(exclude_none=True) for block in response.content]
    messages += [make_message(replayed, "assistant"), make_message(results)]
    last: Any = client.messages.create(**params)
    assert last.content[-1].text == "get_weather says: sunny. get_weather says: sunny."
    kinds = [item["type"] for item in server.requests[-1].context or ()]
    assert kinds.count("reasoning") == (thinking is THINKING)


def test_streamed_message_equals_unstreamed_message(client: "Anthropic") -> None:
    """The streamed blocks, stop reason and usage equal those of the message without streaming."""
    params: Any = {"messages": [make_message("Hello there")], "thinking": THINKING}
    events = stream_events(client, **params)
    body = create_message(client, **params)
    kinds = [event["type"] for event in events]
    assert kinds[:3] == ["message_start", "ping", "content_block_start"]
    assert kinds[-2:] == ["message_delta", "message_stop"]
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    for member, block in (("thinking", 0), ("text", 1)):
        text = "".join(delta.get(member, "") for delta in deltas)
        assert text == body["content"][block][member]
    assert sum(delta["type"] == "signature_delta" for delta in deltas) == 1
    assert events[-2]["delta"]["stop_reason"] == "end_turn"
    assert events[-2]["usage"] == body["usage"]


def test_thinking_is_sent_as_requested(client: "Anthropic") -> None:
    """Without ``thinking`` it is not sent, and with ``display`` omitted it has only a signature."""
    messages = make_history("Think about 6 * 7")
    assert [block["type"] for block in create_message(client, messages=messages)["content"]] == [
        "text"
    ]
    events = stream_events(client, messages=messages)
    opened = [event["content_block"]["type"] for event in events if "content_block" in event]
    assert opened == ["text"]
    thinking: Any = {"type": "adaptive", "display": "omitted"}
    content = create_message(client, messages=messages, thinking=thinking)["content"]
    assert content[0]["thinking"] == ""
    replayed = make_history("Think about 6 * 7", content, "Bye")
    assert create_message(client, messages=replayed, thinking=thinking)["stop_reason"] == "end_turn"


def test_thinking_must_be_sent_back_unchanged(server: TestServer, client: "Anthropic") -> None:
    """Modified thinking is rejected, and calls without theirs; a fault rejects it, as another account would."""
    import anthropic

    question = "call get_weather in Rome"
    params: Any = {**REQUEST, "tools": [WEATHER], "thinking": THINKING}
    content = create_message(client, messages=make_history(question), **params)["content"]
    thinking, call = content

    def resend(*blocks: Any, **more: Any) -> Any:
        messages = make_history(question, list(blocks), [make_result(call["id"])])
        return client.messages.create(**{**params, **more, "messages": messages})

    invalid = r"messages\.1\.content\.0: Invalid `signature` in `thinking` block"
    for damage in ({"thinking": "I never thought that."}, {"signature": "AAAA"}, {"thinking": ""}):
        with pytest.raises(anthropic.BadRequestError, match=invalid):
            resend(thinking | damage, call)
    with pytest.raises(anthropic.BadRequestError, match="Expected `thinking`"):
        resend(call)
    assert resend(call, thinking={"type": "disabled"}).stop_reason == "end_turn"
    assert resend(thinking, call).stop_reason == "end_turn"
    server.faults.set("refuse_encrypted_reasoning")
    with pytest.raises(anthropic.BadRequestError, match=invalid):
        resend(thinking, call)


@for_each(
    ("params", "reason", "sequence"),
    [
        ({"max_tokens": 3}, "max_tokens", None),
        ({"stop_sequences": ["two", "one"]}, "stop_sequence", "one"),
        ({"tools": [WEATHER], "tool_choice": {"type": "any"}}, "tool_use", None),
        (
            {"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "get_weather"}},
            "tool_use",
            None,
        ),
        ({"tools": [WEATHER], "tool_choice": {"type": "none"}}, "end_turn", None),
    ],
)
def test_stop_reason(
    client: "Anthropic", params: dict[str, Any], reason: str, sequence: str | None
) -> None:
    """The stop reason is correct with and without streaming."""
    messages = make_history("one two three")
    body = create_message(client, messages=messages, **params)
    delta = stream_events(client, messages=messages, **params)[-2]["delta"]
    for ending in (body, delta):
        assert (ending["stop_reason"], ending["stop_sequence"]) == (reason, sequence)


def test_refusal_has_its_own_stop_reason() -> None:
    """A refusal of the model is sent as text with the stop reason ``refusal``."""
    script = Script.from_data({"answers": [{"refuse": "No."}]})
    with (
        serve(model=PracticeModel(script)) as server,
        make_anthropic(server.url) as client,
    ):
        response: Any = client.messages.create(**REQUEST, messages=make_history("Sing"))
    assert (response.content[0].text, response.stop_reason) == ("No.", "refusal")


def test_models_are_listed_in_anthropic_format(server: TestServer, client: "Anthropic") -> None:
    """A request with the header ``anthropic-version`` gets the models in Anthropic's format."""
    import anthropic

    assert [model.id for model in client.models.list()] == ["practice"]
    assert client.models.retrieve("practice").max_input_tokens == 400_000
    with open_client(server, **{"anthropic-version": "2023-06-01"}) as http:
        raw = http.get("/v1/models")
    anthropic.types.ModelInfo.model_validate_json(json.dumps(raw.json()["data"][0]), strict=True)
    with pytest.raises(anthropic.NotFoundError, match="model: other"):
        client.models.retrieve("other")


FAULTS = [
    ("cut_after_events=3", "RemoteProtocolError", "incomplete"),
    ("cut_in_event=3", "RemoteProtocolError", "incomplete"),
    ("fail_after_events=3", "APIStatusError", "overloaded_error"),
    ("status=429,retry_after=1", "RateLimitError", "rate_limit_error"),
    ("status=529", "OverloadedError", "overloaded_error"),
    ("status=500", "InternalServerError", "api_error"),
]


@for_each(("fault", "kind", "message"), FAULTS)
def test_faults_apply_to_messages(
    server: TestServer, client: "Anthropic", fault: str, kind: str, message: str
) -> None:
    """A fault raises the client's matching error, and the next request succeeds."""
    import anthropic

    server.faults.set(fault, times=1)
    expected = (anthropic.APIStatusError, httpx2.RemoteProtocolError)
    with pytest.raises(expected, match=message) as exc_info:
        list(client.messages.create(**REQUEST, messages=make_history("Hello"), stream=True))
    assert type(exc_info.value).__name__ == kind
    assert create_message(client, messages=make_history("Hello"))["content"]


@pytest.mark.parametrize("fault", ["omit_call_id", "empty_call_id", "omit_response_id"])
def test_fault_omits_ids(server: TestServer, client: "Anthropic", fault: str) -> None:
    """A fault omits or empties ids with and without streaming."""
    server.faults.set(fault)
    params: Any = {"messages": [make_message("call get_weather in Rome")], "tools": [WEATHER]}
    raw = client.messages.with_raw_response.create(**REQUEST, **params)
    body = raw.http_response.json()
    assert not (body if fault == "omit_response_id" else body["content"][0]).get("id")
    with client.messages.with_streaming_response.create(**REQUEST, **params, stream=True) as stream:
        lines = [line[6:] for line in stream.iter_lines() if line.startswith("data: ")]
    events = [json.loads(line) for line in lines]
    opened = next(event["content_block"] for event in events if "content_block" in event)
    assert not (events[0]["message"] if fault == "omit_response_id" else opened).get("id")
