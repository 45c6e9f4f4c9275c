"""Streams of responses: the complete order of events, over a real socket."""

import json
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
from openai import OpenAI

from for_each import for_each
from kedge.server.models import OutputEvent, PracticeModel, Prompt
from kedge.testing import TestServer, serve
from server.conftest import CheckEvent, Scripted, open_client

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


@for_each(
    ("body", "end", "reason"),
    [({}, "completed", None), ({"max_output_tokens": 16}, "incomplete", "max_output_tokens")],
)
def test_message_events_have_the_documented_order(
    stream: Stream, body: dict[str, Any], end: str, reason: str | None
) -> None:
    """The events open and close the response, the item, its part and its text."""
    with serve() as server:
        events = stream(server, input="word " * 100, **body)
    assert event_types(events) == [*START_EVENTS, *TEXT_EVENTS, end]
    text = "".join(e["delta"] for e in events if e["type"] == "response.output_text.delta")
    response = events[-1]["response"]
    assert response["output"][0]["content"][0]["text"] == text
    assert response["output"][0]["status"] == end
    assert (response["incomplete_details"] or {}).get("reason") == reason
    assert (events[2]["item"]["content"], events[2]["item"]["status"]) == ([], "in_progress")
    assert (events[0]["response"]["output"], events[0]["response"]["status"]) == ([], "in_progress")


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


def test_reasoning_is_hidden_and_a_refusal_has_its_own_events(
    scripted: Scripted, stream: Stream
) -> None:
    """A finished reasoning item has encrypted content and no text; a refusal is sent as refusal deltas."""
    with serve(model=scripted({"think": "Secret.", "refuse": "I will not."})) as server:
        events = stream(server, input="x", include=["reasoning.encrypted_content"])
    names = [name.replace("output_text", "refusal") for name in TEXT_EVENTS]
    assert event_types(events) == [*START_EVENTS, *name_item_events(), *names, "completed"]
    assert "encrypted_content" not in events[2]["item"]
    assert events[3]["item"]["encrypted_content"]
    assert "Secret" not in json.dumps(events)
    refusal = {"type": "refusal", "refusal": "I will not."}
    assert events[-1]["response"]["output"][1]["content"] == [refusal]


def test_special_characters_are_unchanged(client: OpenAI) -> None:
    """Line breaks, separators and characters outside the basic plane arrive unchanged."""
    odd = "a\r\nb\u2028c\u0085d\n\ndata: e 🪢 \x7f"
    with client.responses.stream(model="m", input=f"say {odd}") as response_stream:
        final = response_stream.get_final_response()
    assert odd in final.output_text


@for_each("stored", [True, False])
def test_model_error_fails_the_stream(stored: bool, stream: Stream) -> None:
    """The stream ends with an error and the failed response, which cannot be continued; else it is a 500 error."""
    with serve(model=FailingModel()) as server, open_client(server) as http:
        events = stream(server, input="x", store=stored)
        assert event_types(events) == [*START_EVENTS, *TEXT_EVENTS[:3], "error", "failed"]
        error = events[-2]
        failed = events[-1]["response"]
        assert error.keys() == {"type", "code", "message", "param", "sequence_number"}
        assert (failed["status"], failed["error"]["code"]) == ("failed", "server_error")
        if stored:
            assert http.get(f"/v1/responses/{failed['id']}").json() == failed
            body = {"model": "m", "input": "x", "previous_response_id": failed["id"]}
            after = http.post("/v1/responses", json=body).json()
            assert after["error"]["code"] == "previous_response_not_completed"
        answer = http.post("/v1/responses", json={"model": "m", "input": "x", "store": stored})
        assert (answer.status_code, answer.json()["error"]["type"]) == (500, "server_error")


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
