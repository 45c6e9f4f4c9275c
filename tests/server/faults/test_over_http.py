"""Every fault, as a client sees it over a real socket."""

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import openai
import pytest
from openai import OpenAI

from kedge.server.faults import KINDS
from kedge.server.settings import Limits
from kedge.testing import TestServer, serve
from server.routes.test_responses_stream import FailingModel
from server.waiting import TIMEOUT

WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
}
PROMPT = "Please call weather."


@pytest.fixture(scope="module")
def running() -> Iterator[TestServer]:
    with serve() as server:
        yield server


@pytest.fixture
def server(running: TestServer) -> Iterator[TestServer]:
    yield running
    running.faults.clear()


@pytest.fixture
def client(server: TestServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=server.base_url, api_key="any", max_retries=0) as client:
        yield client


HTTP = httpx.Client(timeout=TIMEOUT)


@pytest.fixture(scope="module", autouse=True)
def closed() -> Iterator[None]:
    yield
    HTTP.close()


def raw_post(server: TestServer, body: dict[str, Any]) -> bytes:
    """Send a request over a plain socket and read until the server closes the connection."""
    data = json.dumps(body).encode()
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=TIMEOUT) as connection:
        connection.sendall(
            b"POST /v1/responses HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            b"connection: close\r\ncontent-length: %d\r\n\r\n%b" % (len(data), data)
        )
        received = b""
        while chunk := connection.recv(65536):
            received += chunk
    return received


def decode_chunked(received: bytes) -> tuple[bytes, bool]:
    """Return the body of a chunked response, and whether it has its final chunk."""
    rest = received.partition(b"\r\n\r\n")[2]
    body = b""
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        length = int(size, 16)
        if length == 0:
            return body, True
        body += rest[:length]
        rest = rest[length + 2 :]
    return body, False


def event_names(body: bytes) -> list[str]:
    lines = [line for line in body.decode().splitlines() if line.startswith("event: ")]
    return [line.removeprefix("event: ") for line in lines]


STREAM_REQUEST = {"model": "practice", "input": "Hello", "stream": True}
USUAL_EVENTS = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
]


def test_stream_without_a_fault_is_complete(server: TestServer) -> None:
    """Without a fault, a stream has all events, the terminator and the final chunk."""
    body, ended = decode_chunked(raw_post(server, STREAM_REQUEST))
    assert ended
    assert body.endswith(b"data: [DONE]\n\n")
    assert event_names(body)[:4] == USUAL_EVENTS
    assert event_names(body)[-1] == "response.completed"


@pytest.mark.parametrize("number", [0, 1, 3])
def test_stream_is_cut_after_events(server: TestServer, number: int) -> None:
    """Exactly N complete events arrive before the connection closes without the final chunk."""
    server.faults.set(f"cut_after_events={number}", times=1)
    body, ended = decode_chunked(raw_post(server, STREAM_REQUEST))
    assert (event_names(body), ended) == (USUAL_EVENTS[:number], False)
    assert body == b"" or body.endswith(b"\n\n")
    assert not server.faults.armed


@pytest.mark.parametrize("number", [0, 2])
def test_stream_is_cut_inside_an_event(server: TestServer, number: int) -> None:
    """After N complete events, only a part of the next one arrives."""
    server.faults.set(f"cut_in_event={number}", times=1)
    body, ended = decode_chunked(raw_post(server, STREAM_REQUEST))
    assert not ended
    *complete, partial = body.split(b"\n\n")
    assert len(complete) == number
    assert partial.startswith(b"event: response.")
    assert not partial.endswith(b"}")


def test_official_client_raises_for_a_cut_stream(server: TestServer, client: OpenAI) -> None:
    """The openai package raises a connection error for a cut stream."""
    server.faults.set("cut_after_events=3")
    with pytest.raises(openai.APIConnectionError):
        list(client.responses.create(model="practice", input="Hello", stream=True))


def test_cut_after_the_end_is_not_consumed(server: TestServer) -> None:
    """A cut that is not reached, or a response without streaming, does not consume the fault."""
    server.faults.set("cut_after_events=500", times=1)
    assert decode_chunked(raw_post(server, STREAM_REQUEST))[1]
    server.faults.set("cut_after_events=1", times=1)
    assert json.loads(
        raw_post(server, STREAM_REQUEST | {"stream": False}).partition(b"\r\n\r\n")[2]
    )
    assert set(server.faults.armed) == {"cut_after_events"}


def test_response_of_a_cut_stream_is_stored(server: TestServer, client: OpenAI) -> None:
    """The response of a cut stream is stored with a final status."""
    server.faults.set("cut_after_events=1", times=1)
    body, _ = decode_chunked(raw_post(server, STREAM_REQUEST))
    created = json.loads(body.partition(b"data: ")[2])
    response = client.responses.retrieve(created["response"]["id"])
    assert response.status in {"completed", "cancelled"}


@pytest.mark.parametrize(
    ("spec", "status", "after", "code"),
    [
        ("status=429,retry_after=1", 429, "1", "rate_limit_exceeded"),
        ("status=429,retry_after=0.5", 429, "0.5", "rate_limit_exceeded"),
        ("status=500", 500, None, None),
        ("status=503,retry_after=2", 503, "2", None),
        ("status=418", 418, None, None),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_request_is_rejected_with_any_status(
    server: TestServer, spec: str, status: int, after: str | None, code: str | None, stream: bool
) -> None:
    """A status fault rejects a request in the API's error format, with ``retry-after`` if set."""
    server.faults.set(spec)
    answer = HTTP.post(f"{server.base_url}/responses", json=STREAM_REQUEST | {"stream": stream})
    assert answer.status_code == status
    assert answer.headers.get("retry-after") == after
    assert answer.json()["error"]["code"] == code
    assert answer.headers["content-type"] == "application/json"


def test_times_limit_lets_the_clients_retry_succeed(server: TestServer) -> None:
    """With ``times=2``, the openai package waits as requested and succeeds at the third attempt."""
    server.faults.set("status=429,retry_after=0.05", times=2)
    with OpenAI(base_url=server.base_url, api_key="any", max_retries=2) as client:
        assert client.responses.create(model="practice", input="Hi").status == "completed"
    assert not server.faults.armed


def test_slow_first_byte(server: TestServer) -> None:
    """A client with a shorter read timeout than the delay times out."""
    server.faults.set("slow_first_byte=30", times=1)
    impatient = httpx.Timeout(TIMEOUT, read=0.1)  # only once the request has been sent
    with pytest.raises(httpx.ReadTimeout):
        HTTP.post(f"{server.base_url}/responses", json=STREAM_REQUEST, timeout=impatient)


def test_forget_all(server: TestServer, client: OpenAI) -> None:
    """All stored responses are deleted, and continuing or fetching one is an error."""
    first = client.responses.create(model="practice", input="My name is Ada")
    server.faults.set("forget_all", times=1)
    with pytest.raises(openai.BadRequestError) as exc_info:
        client.responses.create(model="practice", input="?", previous_response_id=first.id)
    assert exc_info.value.code == "previous_response_not_found"
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("echo", ["yes", "no"])
def test_forget_silently(server: TestServer, client: OpenAI, echo: str, stream: bool) -> None:
    """A silently lost context shows only in the context, the usage and optionally the echoed id."""
    first = client.responses.create(model="practice", input="My name is Ada. " * 20)
    server.faults.set(f"forget_silently,echo={echo}", times=1)
    answer = HTTP.post(
        f"{server.base_url}/responses",
        json=STREAM_REQUEST | {"stream": stream, "previous_response_id": first.id},
    )
    if stream:
        events = [
            json.loads(block.partition("data: ")[2]) for block in answer.text.split("\n\n")[:-2]
        ]
        responses = [event["response"] for event in events if "response" in event]
    else:
        responses = [answer.json()]
    expected = first.id if echo == "yes" else None
    assert {response["previous_response_id"] for response in responses} == {expected}
    assert responses[-1]["usage"]["input_tokens"] < 30
    context = server.requests[-1].context
    assert context is not None
    assert len(context) == 1
    assert not server.faults.armed
    second = client.responses.create(model="practice", input="?", previous_response_id=first.id)
    assert second.usage is not None
    assert second.usage.input_tokens > 60


def test_forget_silently_accepts_results_of_lost_calls(server: TestServer, client: OpenAI) -> None:
    """A tool result whose call was silently lost is accepted."""
    response = client.responses.create(model="practice", input=PROMPT, tools=[WEATHER])
    call = response.output[0]
    assert call.type == "function_call"
    server.faults.set("forget_silently")
    answer = client.responses.create(
        model="practice",
        input=[{"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}],
        previous_response_id=response.id,
    )
    assert answer.status == "completed"


@pytest.mark.parametrize("number", [0, 1, 2, 9])
def test_remember_only_the_last_ancestors(server: TestServer, client: OpenAI, number: int) -> None:
    """Older turns are missing from the model's context, and the response does not show it."""
    previous = None
    for turn in range(3):
        previous = client.responses.create(
            model="practice", input=f"This is turn {turn}", previous_response_id=previous
        ).id
    server.faults.set(f"remember={number}")
    answer = client.responses.create(
        model="practice", input="And now?", previous_response_id=previous
    )
    assert answer.previous_response_id == previous
    context = server.requests[-1].context
    assert context is not None
    assert len(context) == 2 * min(number, 3) + 1


def stream_events(server: TestServer, **more: Any) -> list[dict[str, Any]]:
    answer = HTTP.post(f"{server.base_url}/responses", json=STREAM_REQUEST | more)
    assert answer.text.endswith("data: [DONE]\n\n")
    return [json.loads(block.partition("data: ")[2]) for block in answer.text.split("\n\n")[:-2]]


def sequence_numbers(events: list[dict[str, Any]]) -> list[int]:
    return [event["sequence_number"] for event in events]


def test_duplicate_events(server: TestServer) -> None:
    """All events, or those of one type, are sent twice."""
    expected = stream_events(server)
    server.faults.set("duplicate_events")
    assert sequence_numbers(stream_events(server)) == [
        n for n in sequence_numbers(expected) for _ in range(2)
    ]
    server.faults.set("duplicate_events,only=response.output_item.added")
    kinds = [event["type"] for event in stream_events(server)]
    assert kinds.count("response.output_item.added") == 2
    assert len(kinds) == len(expected) + 1


def test_reorder_events(server: TestServer) -> None:
    """Adjacent events are swapped, or events of one type are sent after the next event."""
    server.faults.set("reorder_events")
    assert sequence_numbers(stream_events(server))[:4] == [1, 0, 3, 2]
    server.faults.set("reorder_events,only=response.output_item.added")
    events = stream_events(server, input=PROMPT, tools=[WEATHER])
    kinds = [event["type"] for event in events]
    assert (
        kinds.index("response.output_item.added")
        == kinds.index("response.function_call_arguments.delta") + 1
    )
    assert sorted(sequence_numbers(events)) == list(range(len(events)))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("fault", "call_id"), [("omit_call_id", None), ("empty_call_id", "")])
def test_missing_or_empty_call_id(
    server: TestServer, client: OpenAI, fault: str, call_id: str | None, stream: bool
) -> None:
    """The call id is missing or empty in every event, and a result may use the item's id instead."""
    server.faults.set(fault, times=1)
    if stream:
        events = stream_events(server, input=PROMPT, tools=[WEATHER])
        response = events[-1]["response"]
        calls = [event["item"] for event in events if "item" in event] + response["output"]
    else:
        response = HTTP.post(
            f"{server.base_url}/responses",
            json={"model": "practice", "input": PROMPT, "tools": [WEATHER]},
        ).json()
        calls = response["output"]
    assert calls
    assert {call.get("call_id") for call in calls} == {call_id}
    item = {"type": "function_call_output", "call_id": calls[0]["id"], "output": "sunny"}
    answer = HTTP.post(
        f"{server.base_url}/responses",
        json={"model": "practice", "input": [item], "previous_response_id": response["id"]},
    )
    assert answer.status_code == 200, answer.text
    assert server.requests[-1].body["input"] == [item]
    replay = [
        {"role": "user", "content": PROMPT},
        {k: v for k, v in calls[0].items() if k != "status"} | {"call_id": calls[0]["id"]},
        item,
    ]
    answer = HTTP.post(f"{server.base_url}/responses", json={"model": "practice", "input": replay})
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("stream", [False, True])
def test_missing_response_id(server: TestServer, stream: bool) -> None:
    """The response id is missing from the body and from every event."""
    server.faults.set("omit_response_id", times=1)
    if stream:
        responses = [e["response"] for e in stream_events(server) if "response" in e]
        assert len(responses) == 3
    else:
        responses = [
            HTTP.post(
                f"{server.base_url}/responses", json={"model": "practice", "input": "Hello"}
            ).json()
        ]
    assert all("id" not in response for response in responses)
    assert not server.faults.armed


def test_encrypted_reasoning_can_be_rejected(server: TestServer, client: OpenAI) -> None:
    """A fault rejects any encrypted reasoning; a request without reasoning succeeds."""
    server.faults.set("refuse_encrypted_reasoning", times=1)
    assert client.responses.create(model="practice", input="Hi").status == "completed"
    reasoning: Any = {
        "type": "reasoning",
        "id": "rs_1",
        "summary": [],
        "encrypted_content": "gAAAAAB",
    }
    message: Any = {"role": "assistant", "content": "Hello"}
    with pytest.raises(openai.BadRequestError) as exc_info:
        client.responses.create(model="practice", input=[reasoning, message])
    assert exc_info.value.code == "invalid_encrypted_content"
    assert not server.faults.armed


@pytest.mark.parametrize(
    ("server_name", "body"),
    [
        (
            "llama.cpp",
            {
                "code": 400,
                "message": "llama.cpp does not support 'previous_response_id'.",
                "type": "invalid_request_error",
            },
        ),
        (
            "zdr",
            {
                "code": "unsupported_parameter",
                "message": "Previous response cannot be used for this organization due to Zero "
                "Data Retention.",
                "param": "previous_response_id",
                "type": "invalid_request_error",
            },
        ),
    ],
)
def test_chaining_can_be_rejected(
    server: TestServer, client: OpenAI, server_name: str, body: dict[str, Any]
) -> None:
    """Any previous id is rejected with the error of a server that does not support chaining."""
    first = client.responses.create(model="practice", input="Hi")
    server.faults.set(f"refuse_previous_response_id={server_name}")
    answer = HTTP.post(
        f"{server.base_url}/responses",
        json={"model": "practice", "input": "?", "previous_response_id": first.id},
    )
    assert (answer.status_code, answer.json()) == (400, {"error": body})
    assert client.responses.create(model="practice", input="Hi").status == "completed"


def test_empty_input_can_be_rejected(server: TestServer, client: OpenAI) -> None:
    """A fault rejects empty input, even with a previous response that makes it valid otherwise."""
    first = client.responses.create(model="practice", input="Hi")
    client.responses.create(model="practice", input=[], previous_response_id=first.id)
    server.faults.set("refuse_empty_input")
    with pytest.raises(openai.BadRequestError) as exc_info:
        client.responses.create(model="practice", input=[], previous_response_id=first.id)
    assert exc_info.value.code == "missing_required_parameter"


def test_structured_output_can_be_rejected(server: TestServer, client: OpenAI) -> None:
    """A fault rejects a JSON schema; other formats and requests without a format succeed."""
    server.faults.set("refuse_output_format")
    schema = {"type": "object", "properties": {}, "additionalProperties": False}
    with pytest.raises(openai.BadRequestError) as exc_info:
        client.responses.create(
            model="practice",
            input="Hi",
            text={"format": {"type": "json_schema", "name": "any", "schema": schema}},
        )
    assert exc_info.value.param == "text.format"
    text: Any = {"format": {"type": "text"}}
    assert client.responses.create(model="practice", input="Hi", text=text).output_text


def test_missing_call_name(server: TestServer) -> None:
    """The name of a tool call is missing from every event and from the response."""
    server.faults.set("omit_call_name")
    events = stream_events(server, input=PROMPT, tools=[WEATHER])
    calls = [event["item"] for event in events if "item" in event]
    assert [call.get("name") for call in calls + events[-1]["response"]["output"]] == [None] * 3


def error_body(message: str, param: str | None, code: str | int | None) -> dict[str, Any]:
    return {
        "error": {
            "message": message,
            "type": "invalid_request_error",
            "param": param,
            "code": code,
        }
    }


@pytest.mark.parametrize(
    ("name", "status", "body"),
    [
        (
            "openai",
            400,
            error_body(
                "Previous response with id 'resp_x' not found.",
                "previous_response_id",
                "previous_response_not_found",
            ),
        ),
        ("vllm", 404, error_body("Response with id 'resp_x' not found.", "response_id", 404)),
        ("ogx", 404, {"detail": "Response 'resp_x' not found."}),
        (
            "smg",
            400,
            error_body(
                "Previous response with id 'resp_x' not found.",
                None,
                "previous_response_not_found",
            ),
        ),
        (
            "xai",
            404,
            {
                "code": "not-found",
                "error": "Previous response cannot be used for this organization due to Zero Data "
                "Retention.",
            },
        ),
        (
            "code",
            400,
            error_body("We have no recollection of that.", None, "previous_response_not_found"),
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_not_found_errors_of_other_servers(
    server: TestServer, name: str, status: int, body: dict[str, Any], stream: bool
) -> None:
    """The error has the message, format and status of the given server."""
    server.faults.set(f"not_found={name}", times=1)
    assert stream_events(server)
    answer = HTTP.post(
        f"{server.base_url}/responses",
        json=STREAM_REQUEST | {"stream": stream, "previous_response_id": "resp_x"},
    )
    assert (answer.status_code, answer.json()) == (status, body)
    assert not server.faults.armed


def test_faults_apply_only_to_creating_responses(server: TestServer, client: OpenAI) -> None:
    """Every other endpoint works normally while a fault is armed."""
    first = client.responses.create(model="practice", input="Hi")
    server.faults.set("status=500")
    assert client.responses.retrieve(first.id).id == first.id
    assert client.models.list().data
    assert client.conversations.create().id


def test_several_faults_apply_at_once(server: TestServer) -> None:
    """Faults of content, order and connection apply to one response together."""
    server.faults.set("omit_response_id")
    server.faults.set("duplicate_events")
    server.faults.set("cut_after_events=2")
    body, ended = decode_chunked(raw_post(server, STREAM_REQUEST))
    assert (event_names(body), ended) == (["response.created"] * 2, False)
    assert b'"resp_' not in body


def test_a_failing_stream_without_a_response_id() -> None:
    """The error event has a message that is a text, and no id."""
    with serve(model=FailingModel()) as server:
        server.faults.set("omit_response_id")
        events = stream_events(server)
    assert [event["type"] for event in events][-2:] == ["error", "response.failed"]
    assert "id" not in events[-1]["response"]


def test_invalid_json_is_reported_despite_a_fault(server: TestServer) -> None:
    """A malformed body is still rejected as such while a fault is armed."""
    server.faults.set("omit_call_id")
    answer = HTTP.post(
        f"{server.base_url}/responses",
        content=b"{",
        headers={"content-type": "application/json"},
    )
    assert answer.status_code == 400
    assert "could not parse the JSON body" in answer.json()["error"]["message"]


def test_a_stream_ends_with_an_error_event(server: TestServer, client: OpenAI) -> None:
    """A stream that fails sends an error event and ends with the final chunk."""
    server.faults.set("fail_after_events=3", times=1)
    body, ended = decode_chunked(raw_post(server, STREAM_REQUEST))
    assert ended
    assert event_names(body) == [*USUAL_EVENTS[:3], "error"]
    server.faults.set("fail_after_events=3", times=1)
    last = list(client.responses.create(model="practice", input="Hello", stream=True))[-1]
    assert last.type == "error"
    assert last.code == "server_is_overloaded"
    assert client.responses.create(model="practice", input="Hello").status == "completed"


def test_a_server_can_be_anonymous(server: TestServer, client: OpenAI) -> None:
    """A fault removes the header that identifies the server."""
    create = client.responses.with_raw_response.create
    assert create(model="practice", input="Hi").headers["kedge-server"] == "kedge"
    server.faults.set("anonymous")
    assert "kedge-server" not in create(model="practice", input="Hi").headers


@pytest.mark.parametrize("echo", ["late", "missing"])
def test_echoed_id_can_be_late_or_missing(server: TestServer, client: OpenAI, echo: str) -> None:
    """The echoed previous id is correct and then null, or missing from all events."""
    first = client.responses.create(model="practice", input="Hi")
    server.faults.set(f"forget_silently,echo={echo}")
    with client.responses.create(
        model="practice", input="?", previous_response_id=first.id, stream=True
    ) as stream:
        events: list[Any] = list(stream)
    facts = [event.response.to_dict() for event in events if hasattr(event, "response")]
    assert (facts[0].get("previous_response_id") == first.id) is (echo == "late")
    assert ("previous_response_id" in facts[-1]) is (echo == "late")
    assert not facts[-1].get("previous_response_id")


@pytest.mark.parametrize("usage", ["none", "constant", "new", "uncached"])
def test_usage_can_be_misreported(server: TestServer, client: OpenAI, usage: str) -> None:
    """The model sees the complete context, but the reported usage is wrong or missing."""
    first = client.responses.create(model="practice", input="My name is Ada. " * 400)
    server.faults.set(f"report_usage={usage}")
    ask: Any = [{"type": "message", "role": "user", "content": "What is my name?"}]
    second = client.responses.create(model="practice", input=ask, previous_response_id=first.id)
    assert "Ada" in second.output_text
    assert (second.usage is None) is (usage == "none")
    if second.usage is not None:
        assert second.usage.input_tokens < 1_000


def test_a_response_can_be_reported_as_unstored(server: TestServer, client: OpenAI) -> None:
    """A fault reports ``store`` as false for every request."""
    server.faults.set("report_unstored")
    assert client.responses.create(model="practice", input="Hi").to_dict()["store"] is False


def test_response_id_can_be_reused(server: TestServer, client: OpenAI) -> None:
    """A reused id continues the newest response that has it."""
    server.faults.set("reuse_response_id")
    first = client.responses.create(model="practice", input="My name is Ada.")
    second = client.responses.create(model="practice", input="My name is Bob.")
    assert first.id == second.id
    ask: Any = [{"type": "message", "role": "user", "content": "What is my name?"}]
    continued = client.responses.create(model="practice", input=ask, previous_response_id=first.id)
    assert "Bob" in continued.output_text


def test_usage_can_exclude_whitespace(server: TestServer, client: OpenAI) -> None:
    """With ``report_usage=trimmed``, a message of spaces counts almost no tokens."""
    ask: Any = [{"type": "message", "role": "user", "content": " " * 4_500}]
    expected = client.responses.create(model="practice", input=ask).usage
    server.faults.set("report_usage=trimmed")
    trimmed = client.responses.create(model="practice", input=ask).usage
    assert expected is not None
    assert trimmed is not None
    assert trimmed.input_tokens < 20 < expected.input_tokens


def test_stored_responses_can_be_hidden(server: TestServer, client: OpenAI) -> None:
    """Hidden responses cannot be fetched, but they can be continued."""
    first = client.responses.create(model="practice", input="My name is Ada.")
    server.faults.set("hide_stored", times=2)
    with pytest.raises(openai.NotFoundError, match=f"Response with id '{first.id}' not found"):
        client.responses.retrieve(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.input_items.list(first.id)
    assert client.responses.retrieve(first.id).id == first.id
    second = client.responses.create(
        model="practice", input="What is my name?", previous_response_id=first.id
    )
    assert "Ada" in second.output_text


def streamed_and_listed(server: TestServer, prompt: str) -> tuple[list[Any], list[Any]]:
    """Return the output items of the stream's events and those of its last event."""
    events = stream_events(server, input=prompt, tools=[WEATHER])
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    return done, events[-1]["response"]["output"]


@pytest.mark.parametrize(
    ("fault", "prompt"), [("text", "Hello"), ("arguments", PROMPT), ("missing", "Hello")]
)
def test_the_completed_event_can_differ(server: TestServer, fault: str, prompt: str) -> None:
    """The completed event differs in text, arguments or items; a response without streaming does not."""
    server.faults.set(f"change_completed={fault}")
    streamed, listed = streamed_and_listed(server, prompt)
    assert streamed != listed
    assert len(streamed) - len(listed) == (fault == "missing")
    other = "Hello" if fault == "arguments" else PROMPT
    if fault != "missing":  # there is nothing to change
        assert len({json.dumps(items) for items in streamed_and_listed(server, other)}) == 1
    answer = HTTP.post(f"{server.base_url}/responses", json=STREAM_REQUEST | {"stream": False})
    assert "changed" not in answer.text
    assert len(answer.json()["output"]) == 1


def test_missing_output_index(server: TestServer) -> None:
    """A fault removes the output index from every event."""
    assert any("output_index" in event for event in stream_events(server))
    server.faults.set("omit_output_index")
    assert not any("output_index" in event for event in stream_events(server))


@pytest.mark.parametrize(("value", "expected"), [("none", None), ("plain", "text/plain")])
def test_wrong_stream_content_type(server: TestServer, value: str, expected: str | None) -> None:
    """A fault changes or removes the content type of a stream, but not that of a JSON response."""
    server.faults.set(f"stream_content_type={value}")
    url = f"{server.base_url}/responses"
    assert HTTP.post(url, json=STREAM_REQUEST).headers.get("content-type") == expected
    answer = HTTP.post(url, json=STREAM_REQUEST | {"stream": False})
    assert answer.headers["content-type"] == "application/json"


def test_deltas_repeated_after_the_finish_reason(server: TestServer, client: OpenAI) -> None:
    """Deltas are sent again after the finish reason, so a client that appends them has the answer twice."""

    def read() -> str:
        messages: Any = [{"role": "user", "content": "Hello"}]
        stream = client.chat.completions.create(model="practice", messages=messages, stream=True)
        return "".join(each.choices[0].delta.content or "" for each in stream if each.choices)

    expected = read()
    server.faults.set("repeat_after_finish")
    assert read() == expected * 2


@pytest.mark.parametrize("stream", [True, False])
def test_lone_surrogate(server: TestServer, stream: bool) -> None:
    """The deltas and the complete text have a lone surrogate; arguments of tool calls do not."""
    server.faults.set("lone_surrogate")
    request = STREAM_REQUEST | {"stream": stream, "tools": [WEATHER]}
    url = f"{server.base_url}/responses"
    assert "\\ud83d" in HTTP.post(url, json=request | {"input": "Say: Done. Really!"}).text
    assert "\\ud83d" not in HTTP.post(url, json=request | {"input": PROMPT}).text


def test_every_fault_is_tested() -> None:
    """The name of every fault occurs in this file."""
    text = Path(__file__).read_text()
    assert [name for name in KINDS if f'"{name}' not in text] == []


def test_the_size_of_a_body_is_limited_while_a_fault_is_active() -> None:
    """A body without an end is rejected as soon as it is too large."""
    head = (
        b"POST /v1/responses HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n"
    )
    with serve(limits=Limits(body_bytes=1_000)) as server:
        server.faults.set("not_found=vllm")
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=TIMEOUT) as connection:
            connection.sendall(head + b"800\r\n" + b" " * 2_048 + b"\r\n")
            assert b" 413 " in connection.recv(1_000).splitlines()[0]
