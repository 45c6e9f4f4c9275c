"""Streams of responses: the complete order of events, over a real socket."""

import json
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import httpx2
import pytest
from openai import OpenAI

from for_each import for_each
from kedge.server.models import OutputEvent, PracticeModel, Prompt
from kedge.testing import TestServer, serve
from server.conftest import CheckEvent, Scripted, ask, open_client

Stream = Callable[..., list[dict[str, Any]]]


def parse_frames(text: str) -> Iterator[tuple[str, str]]:
    for block in text.removesuffix("\n\n").split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.split("\n"))
        yield fields.get("event", ""), fields["data"]


@pytest.fixture
def stream(check_event: CheckEvent) -> Stream:
    """Return a function that streams a response and checks the properties of every stream."""

    def run(server: TestServer, **body: Any) -> list[dict[str, Any]]:
        request = {"model": "m", "stream": True, **body}
        with open_client(server) as http:
            answer = http.post("/v1/responses", json=request)
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        *frames, last = parse_frames(answer.text)
        assert last == ("", "[DONE]")
        events = [json.loads(data) for _, data in frames]
        assert [name for name, _ in frames] == [event["type"] for event in events]
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        for event in events:
            check_event(event)
        return events

    return run


def event_types(events: list[dict[str, Any]]) -> list[str]:
    """Return the types of events, with consecutive deltas merged."""
    types: list[str] = []
    for event in events:
        name = event["type"].removeprefix("response.")
        if not (name.endswith(".delta") and types[-1] == name):
            types.append(name)
    return types


START_EVENTS = ["created", "in_progress"]
TEXT_EVENTS = [
    "output_item.added", "content_part.added", "output_text.delta", "output_text.done",
    "content_part.done", "output_item.done",
]  # fmt: skip


def test_message_events_have_the_documented_order(server: TestServer, stream: Stream) -> None:
    """The events open and close the response, the item, its part and its text."""
    events = stream(server, input="hello there")
    assert event_types(events) == [*START_EVENTS, *TEXT_EVENTS, "completed"]
    text = "".join(e["delta"] for e in events if e["type"] == "response.output_text.delta")
    response = events[-1]["response"]
    assert response["output"][0]["content"][0]["text"] == text
    assert events[2]["item"]["content"] == []
    assert events[2]["item"]["status"] == "in_progress"
    assert events[0]["response"]["status"] == "in_progress"
    assert events[0]["response"]["output"] == []


def name_item_events(*names: str) -> list[str]:
    return ["output_item.added", *names, "output_item.done"]


def test_argument_deltas_have_only_the_item_id(scripted: Scripted, stream: Stream) -> None:
    """The call id and name are sent with the item, not with its deltas."""
    weather = {"name": "weather", "arguments": {"city": "Oslo", "unit": "C"}}
    note = {"name": "note", "input": "free text"}
    with serve(model=scripted({"think": "Two tools.", "call": [weather, note]})) as server:
        events = stream(server, input="x", reasoning={"summary": "auto"})
    summary = ("part.added", "text.delta", "text.done", "part.done")
    arguments = [f"function_call_arguments.{name}" for name in ("delta", "done")]
    assert event_types(events) == [
        *START_EVENTS,
        *name_item_events(*(f"reasoning_summary_{name}" for name in summary)),
        *name_item_events(*arguments),
        *name_item_events("custom_tool_call_input.delta", "custom_tool_call_input.done"),
        "completed",
    ]
    deltas = [e for e in events if e["type"] == "response.function_call_arguments.delta"]
    assert len(deltas) > 1
    for event in deltas:
        assert event.keys() == {"type", "item_id", "output_index", "delta", "sequence_number"}
    call = next(e["item"] for e in events if e.get("item", {}).get("type") == "function_call")
    assert call["arguments"] == ""
    assert call["call_id"].startswith("call_")
    assert {event["item_id"] for event in deltas} == {call["id"]}
    text = "".join(event["delta"] for event in deltas)
    assert json.loads(text) == weather["arguments"]
    assert events[-1]["response"]["output"][1]["arguments"] == text


def test_reasoning_text_is_hidden_by_default(scripted: Scripted, stream: Stream) -> None:
    """A reasoning item has encrypted content when it is done, but no text."""
    with serve(model=scripted({"think": "Secret.", "say": "Hi."})) as server:
        events = stream(server, input="x", include=["reasoning.encrypted_content"])
    assert event_types(events) == [*START_EVENTS, *name_item_events(), *TEXT_EVENTS, "completed"]
    assert "encrypted_content" not in events[2]["item"]
    assert events[3]["item"]["encrypted_content"]
    assert "Secret" not in json.dumps(events)


def test_a_refusal_has_events_of_its_own(scripted: Scripted, stream: Stream) -> None:
    """A refusal of the model is sent as refusal deltas, not as text deltas."""
    with serve(model=scripted({"refuse": "I will not."})) as server:
        events = stream(server, input="x")
    names = [name.replace("output_text", "refusal") for name in TEXT_EVENTS]
    assert event_types(events) == [*START_EVENTS, *names, "completed"]
    assert events[-1]["response"]["output"][0]["content"] == [
        {"type": "refusal", "refusal": "I will not."}
    ]


def test_stream_at_the_token_limit_ends_incomplete(server: TestServer, stream: Stream) -> None:
    """The last event of a stream that reaches the token limit contains the reason and the output."""
    events = stream(server, input="word " * 100, max_output_tokens=16)
    assert event_types(events) == [*START_EVENTS, *TEXT_EVENTS, "incomplete"]
    response = events[-1]["response"]
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["output"][0]["status"] == "incomplete"


def test_errors_before_the_stream_are_plain_json(http: httpx2.Client) -> None:
    """A rejected request gets a JSON error instead of a stream."""
    body = {"model": "m", "stream": True, "input": "x", "previous_response_id": "resp_x"}
    answer = http.post("/v1/responses", json=body)
    assert answer.status_code == 400
    assert answer.headers["content-type"] == "application/json"
    assert answer.json()["error"]["code"] == "previous_response_not_found"


def test_official_client_reads_a_stream(client: OpenAI, server: TestServer) -> None:
    """The client's accumulated response equals the stored one and can be continued."""
    with client.responses.stream(model="m", input="one") as response_stream:
        final = response_stream.get_final_response()
    assert client.responses.retrieve(final.id).output_text == final.output_text
    ask(client, "two", final.id)
    assert len(server.requests[-1].context or ()) == 3


def test_special_characters_are_unchanged(client: OpenAI) -> None:
    """Line breaks, separators and characters outside the basic plane arrive unchanged."""
    odd = "a\r\nb\u2028c\u0085d\n\ndata: e 🪢 \x7f"
    with client.responses.stream(model="m", input=f"say {odd}") as response_stream:
        final = response_stream.get_final_response()
    assert odd in final.output_text


@for_each("stored", [True, False])
def test_model_error_fails_the_stream(stored: bool, stream: Stream) -> None:
    """The stream ends with an error event and the failed response, which cannot be continued."""
    with serve(model=FailingModel()) as server, open_client(server) as http:
        events = stream(server, input="x", store=stored)
        assert event_types(events) == [*START_EVENTS, *TEXT_EVENTS[:3], "error", "failed"]
        error, failed = events[-2], events[-1]["response"]
        assert error.keys() == {"type", "code", "message", "param", "sequence_number"}
        assert (failed["status"], failed["error"]["code"]) == ("failed", "server_error")
        if stored:
            assert http.get(f"/v1/responses/{failed['id']}").json() == failed
            body = {"model": "m", "input": "x", "previous_response_id": failed["id"]}
            after = http.post("/v1/responses", json=body).json()
            assert after["error"]["code"] == "previous_response_not_completed"


def test_model_error_without_a_stream_is_a_server_error() -> None:
    """Without a stream, the client gets a 500 error in the format of the API."""
    with serve(model=FailingModel()) as server, open_client(server) as http:
        answer = http.post("/v1/responses", json={"model": "m", "input": "x"})
    assert answer.status_code == 500
    assert answer.json()["error"]["type"] == "server_error"


class FailingModel(PracticeModel):
    """A model that raises an error after three events."""

    async def answer(self, prompt: Prompt) -> AsyncIterator[OutputEvent]:
        """Yield three events and raise an error."""
        count = 0
        async for event in super().answer(prompt):
            yield event
            count += 1
            if count == 3:
                raise RuntimeError("out of order")
