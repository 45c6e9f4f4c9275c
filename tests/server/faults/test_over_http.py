"""Every fault, as a client sees it over a real socket."""

import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2 as httpx
import openai
import pytest
from openai import OpenAI

from for_each import for_each
from kedge.server.app import create_app
from kedge.server.faults import KINDS, Faults
from kedge.server.settings import Limits, Settings
from kedge.testing import TestServer, serve
from server.conftest import WEATHER, Connect, ask, rejects, user_message
from server.routes.test_responses_stream import FailingModel
from server.waiting import TIMEOUT, wait_until

PROMPT = "Please call weather."


@pytest.fixture(scope="module")
def running() -> Iterator[TestServer]:
    with serve() as server:
        yield server
    HTTP.close()


STREAM_REQUEST = {"model": "practice", "input": "Hello", "stream": True}
JSON_TYPE = {"content-type": "application/json"}
HTTP = httpx.Client(timeout=TIMEOUT)


def post(server: TestServer, **body: Any) -> httpx.Response:
    """Request a response, as a stream unless the body says otherwise."""
    return HTTP.post(f"{server.base_url}/responses", json=STREAM_REQUEST | body)


def make_result(call_id: str) -> dict[str, str]:
    return {"type": "function_call_output", "call_id": call_id, "output": "sunny"}


@contextmanager
def raw_post(server: TestServer, **body: Any) -> Iterator[socket.socket]:
    """Send a request over a plain socket, and yield the socket."""
    data = json.dumps(STREAM_REQUEST | body).encode()
    with socket.create_connection(server.address, timeout=TIMEOUT) as connection:
        connection.sendall(
            b"POST /v1/responses HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            b"connection: close\r\ncontent-length: %d\r\n\r\n%b" % (len(data), data)
        )
        yield connection


def raw_read(server: TestServer, **body: Any) -> bytes:
    """Send a request over a plain socket and read until the server closes the connection."""
    with raw_post(server, **body) as connection:
        return b"".join(iter(lambda: connection.recv(65536), b""))


@pytest.fixture
def server(running: TestServer) -> Iterator[TestServer]:
    yield running
    running.faults.clear()


@pytest.fixture
def client(server: TestServer, connect: Connect) -> OpenAI:
    return connect(server)


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


USUAL_EVENTS = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
]


@for_each("number", [0, 1, 3])
def test_stream_is_cut_after_events(server: TestServer, number: int) -> None:
    """N complete events arrive without a final chunk, once."""
    server.faults.set(f"cut_after_events={number}", times=1)
    body, ended = decode_chunked(raw_read(server))
    assert (ended, event_names(body)) == (False, USUAL_EVENTS[:number])
    assert body == b"" or body.endswith(b"\n\n")
    assert not server.faults.armed


def test_the_response_of_a_cut_stream_is_stored(server: TestServer, client: OpenAI) -> None:
    """A client that has received its id can retrieve it."""
    server.faults.set("cut_after_events=1", times=1)
    body, _ = decode_chunked(raw_read(server))
    created = json.loads(body.partition(b"data: ")[2].partition(b"\n")[0])
    response = client.responses.retrieve(created["response"]["id"])
    assert response.status in {"completed", "cancelled"}


def test_a_cut_after_the_end_of_a_stream_is_not_consumed(server: TestServer) -> None:
    """The fault remains active until a stream is long enough."""
    server.faults.set("cut_after_events=500", times=1)
    body, ended = decode_chunked(raw_read(server))
    names = event_names(body)
    assert (ended, names[:4], names[-1]) == (True, USUAL_EVENTS, "response.completed")
    assert body.endswith(b"data: [DONE]\n\n")
    assert server.faults.armed


def test_a_response_that_is_not_streamed_is_not_cut(server: TestServer) -> None:
    """It has no events."""
    server.faults.set("cut_after_events=0", times=1)
    assert json.loads(raw_read(server, stream=False).partition(b"\r\n\r\n")[2])
    assert server.faults.armed


@for_each("number", [0, 2])
def test_stream_is_cut_inside_an_event(server: TestServer, number: int) -> None:
    """After N complete events, only a part of the next one arrives."""
    server.faults.set(f"cut_in_event={number}", times=1)
    body, ended = decode_chunked(raw_read(server))
    assert not ended
    *complete, partial = body.split(b"\n\n")
    assert len(complete) == number
    assert partial.startswith(b"event: response.")
    assert not partial.endswith(b"}")


@for_each("stream", [False, True])
@for_each(
    ("spec", "status", "after", "code"),
    [
        ("status=429,retry_after=0.5", 429, "0.5", "rate_limit_exceeded"),
        ("status=500", 500, None, None),
        ("status=503,retry_after=2", 503, "2", None),
    ],
)
def test_request_is_rejected_with_any_status(
    server: TestServer, spec: str, status: int, after: str | None, code: str | None, stream: bool
) -> None:
    """A status fault rejects a request in the API's error format, with ``retry-after`` if set."""
    server.faults.set(spec)
    answer = post(server, stream=stream)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert server.requests[-1].body == {**STREAM_REQUEST, "stream": stream}
    assert answer.headers.get("retry-after") == after
    assert answer.headers["content-type"] == "application/json"
    assert HTTP.get(f"{server.base_url}/models").status_code == 200  # no other endpoint has faults


async def test_faults_apply_on_loopback_only() -> None:
    """A server that other machines reach by another address has no faults there."""
    transport = httpx.ASGITransport(
        create_app(Settings(faults=Faults(["status=418"]), any_host=True))
    )
    for host, status in (("127.0.0.1", 418), ("192.0.2.1", 200)):
        async with httpx.AsyncClient(transport=transport, base_url=f"http://{host}") as client:
            answer = await client.post("/v1/responses", json={**STREAM_REQUEST, "stream": False})
        assert answer.status_code == status


def test_times_limit_lets_the_clients_retry_succeed(server: TestServer) -> None:
    """With ``times=2``, the openai package waits as requested, and succeeds after a delay at the third attempt."""
    server.faults.set("status=429,retry_after=0.05", times=2)
    server.faults.set("slow_first_byte=0.05", times=1)
    with OpenAI(base_url=server.base_url, api_key="any", max_retries=2) as client:
        assert ask(client, "Hi").status == "completed"
    assert not server.faults.armed


def test_a_delayed_request_ends_with_its_client_and_with_the_server(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is not handled any more: a client that waits gets an error of the API, and the log has no error."""
    limits = Limits(shutdown_seconds=0)
    with serve(limits=limits) as server, ThreadPoolExecutor(1) as pool:
        server.faults.set("slow_first_byte=3000")
        with raw_post(server):
            wait_until(lambda: server.running)
        wait_until(lambda: not server.running)
        waiting = pool.submit(post, server, stream=False)
        wait_until(lambda: server.running)
        server.stop()
        assert waiting.result().status_code == 500
        assert waiting.result().json()["error"]["type"] == "server_error"
    assert not [each for each in caplog.records if each.levelname == "ERROR"]


@for_each(
    ("echo", "shown"),
    [
        ("yes", ["first", "first"]),
        ("no", [None, None]),
        ("late", ["first", None]),
        ("missing", ["-", "-"]),
    ],
)
def test_forget_silently(
    server: TestServer, client: OpenAI, echo: str, shown: list[str | None]
) -> None:
    """A silently lost context shows only in the context, the usage and optionally the echoed id."""
    first = ask(client, "My name is Ada. " * 20)
    for stream in (True, False):
        server.faults.set(f"forget_silently,echo={echo}", times=1)
        responses = read_responses(server, stream=stream, previous_response_id=first.id)
        echoed = [each.get("previous_response_id", "-") for each in responses]
        ends = ["first" if each == first.id else each for each in (echoed[0], echoed[-1])]
        assert ends == (shown if stream else shown[-1:] * 2)
        assert responses[-1]["usage"]["input_tokens"] < 30
        assert len(server.requests[-1].context or ()) == 1
        assert not server.faults.armed
    assert ask(client, "?", first.id).usage.input_tokens > 60


@for_each("number", [0, 1, 2, 9])
def test_remember_only_the_last_ancestors(server: TestServer, client: OpenAI, number: int) -> None:
    """Older turns are missing from the model's context, and the response does not show it."""
    previous = None
    for turn in range(3):
        previous = ask(client, f"This is turn {turn}", previous).id
    server.faults.set(f"remember={number}")
    assert ask(client, "And now?", previous).previous_response_id == previous
    assert len(server.requests[-1].context or ()) == 2 * min(number, 3) + 1


def test_a_forgotten_response_is_an_error_unless_silently(
    server: TestServer, client: OpenAI
) -> None:
    """A result whose call was silently lost is accepted; responses that are deleted are not found."""
    response = ask(client, PROMPT, tools=[WEATHER])
    server.faults.set("forget_silently", times=1)
    result = make_result(response.output[0].call_id)
    assert ask(client, [result], response.id).status == "completed"
    server.faults.set("forget_all", times=1)
    with rejects("previous_response_not_found"):
        ask(client, [result], response.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)


def stream_events(server: TestServer, **more: Any) -> list[dict[str, Any]]:
    answer = post(server, **more)
    assert answer.text.endswith("data: [DONE]\n\n")
    return [json.loads(block.partition("data: ")[2]) for block in answer.text.split("\n\n")[:-2]]


def read_responses(server: TestServer, *, stream: bool, **more: Any) -> list[dict[str, Any]]:
    """Return the responses in the events of a stream, or the only one."""
    if not stream:
        return [post(server, stream=False, **more).json()]
    events = stream_events(server, **more)
    return [event["response"] for event in events if "response" in event]


@for_each(
    ("fault", "order"),
    [
        ("duplicate_events", [0, 0, 1, 1, 2, 2]),
        ("duplicate_events,only=response.created", [0, 0, 1, 2]),
        ("reorder_events", [1, 0, 3, 2]),
        ("reorder_events,only=response.created", [1, 0, 2, 3]),
    ],
)
def test_events_are_duplicated_or_reordered(
    server: TestServer, fault: str, order: list[int]
) -> None:
    """All events, or those of one type, are sent twice, or after the next event."""
    server.faults.set(fault, times=1)
    types = [event["type"] for event in stream_events(server)]
    assert types[: len(order)] == [USUAL_EVENTS[number] for number in order]


@for_each("stream", [True, False])
def test_members_are_missing(server: TestServer, stream: bool) -> None:
    """A member is missing from every event and from the response."""
    options: Any = {"input": PROMPT, "tools": [WEATHER]}
    server.faults.set("omit_response_id", times=1)
    server.faults.set("omit_call_name", times=1)
    responses = read_responses(server, stream=stream, **options)
    calls = [call for response in responses for call in response["output"]]
    assert [each.get("id") for each in responses] == [None] * (3 if stream else 1)
    assert [call.get("name") for call in calls] == [None]
    assert any("output_index" in event for event in stream_events(server, **options))
    server.faults.set("omit_output_index", times=1)
    assert not any("output_index" in event for event in stream_events(server, **options))


@for_each(
    ("fault", "stream", "expected"),
    [
        ("anonymous", False, (None, "application/json", True)),
        ("report_unstored", False, (None, "application/json", False)),
        ("stream_content_type=none", True, ("kedge", None, None)),
        ("stream_content_type=plain", True, ("kedge", "text/plain", None)),
        ("stream_content_type=plain", False, ("kedge", "application/json", True)),
    ],
)
def test_headers_and_settings_are_wrong(
    server: TestServer, fault: str, stream: bool, expected: tuple[Any, ...]
) -> None:
    """A fault changes the content type of a stream, removes the server's name, or denies that it stores."""
    server.faults.clear()
    server.faults.set(fault)
    answer = post(server, stream=stream)
    headers = [answer.headers.get(name) for name in ("kedge-server", "content-type")]
    assert (*headers, None if stream else answer.json()["store"]) == expected


@for_each("stream", [False, True])
@for_each(("fault", "call_id"), [("omit_call_id", None), ("empty_call_id", "")])
def test_missing_or_empty_call_id(
    server: TestServer, fault: str, call_id: str | None, stream: bool
) -> None:
    """The call id is missing or empty in every event, and a result may use the item's id instead."""
    server.faults.set(fault, times=1)
    options: Any = {"input": PROMPT, "tools": [WEATHER], "stream": stream}
    responses = read_responses(server, **options)
    calls = [call for response in responses for call in response["output"]]
    assert {call.get("call_id") for call in calls} == {call_id}
    item = make_result(calls[0]["id"])
    answer = post(server, stream=False, input=[item], previous_response_id=responses[-1]["id"])
    assert answer.status_code == 200, answer.text
    assert server.requests[-1].body["input"] == [item]
    call = {k: v for k, v in calls[0].items() if k != "status"} | {"call_id": calls[0]["id"]}
    answer = post(server, stream=False, input=[user_message(PROMPT), call, item])
    assert answer.status_code == 200, answer.text


SCHEMA = {"type": "object", "properties": {}, "additionalProperties": False}
REASONING = [
    {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAAAAB"},
    {"role": "assistant", "content": "Hello"},
]
FORMAT = {"type": "json_schema", "name": "any", "schema": SCHEMA}


@for_each(
    ("fault", "accepted", "rejected", "code"),
    [
        ("refuse_encrypted_reasoning", {}, {"input": REASONING}, "invalid_encrypted_content"),
        ("refuse_empty_input", {"input": "?"}, {"input": []}, "missing_required_parameter"),
        (
            "refuse_output_format",
            {"text": {"format": {"type": "text"}}},
            {"text": {"format": FORMAT}},
            "text.format",
        ),
    ],
)
def test_a_feature_can_be_rejected(
    server: TestServer, client: OpenAI, fault: str, accepted: Any, rejected: Any, code: str
) -> None:
    """A fault rejects encrypted reasoning, empty input or a JSON schema, and nothing else."""
    first = ask(client, "Hi")
    server.faults.set(fault, times=1)
    assert post(server, previous_response_id=first.id, **accepted).status_code == 200
    answer = post(server, previous_response_id=first.id, **rejected)
    assert answer.status_code == 400
    assert code in (answer.json()["error"]["code"], answer.json()["error"]["param"])
    assert not server.faults.armed


NOT_FOUND = "Previous response with id 'resp_x' not found."
NOT_FOUND_CODE = "previous_response_not_found"
LLAMA_CPP = "llama.cpp does not support 'previous_response_id'."
NO_RETENTION = "Previous response cannot be used for this organization due to Zero Data Retention."


@for_each("stream", [False, True])
@for_each(
    ("fault", "status", "expected"),
    [
        ("not_found=openai", 400, [NOT_FOUND, "previous_response_id", NOT_FOUND_CODE]),
        ("not_found=vllm", 404, ["Response with id 'resp_x' not found.", "response_id", 404]),
        ("not_found=ogx", 404, ["Response 'resp_x' not found."]),
        ("not_found=smg", 400, [NOT_FOUND, None, NOT_FOUND_CODE]),
        ("not_found=xai", 404, ["not-found", NO_RETENTION]),
        ("not_found=code", 400, ["We have no recollection of that.", None, NOT_FOUND_CODE]),
        ("refuse_previous_response_id=llama.cpp", 400, [400, LLAMA_CPP]),
        (
            "refuse_previous_response_id=zdr",
            400,
            [NO_RETENTION, "previous_response_id", "unsupported_parameter"],
        ),
    ],
)
def test_errors_of_other_servers(
    server: TestServer, fault: str, status: int, expected: list[Any], stream: bool
) -> None:
    """A previous id is rejected with the message, format and status of a server that does not know it."""
    server.faults.set(fault, times=1)
    assert stream_events(server)
    answer = post(server, stream=stream, previous_response_id="resp_x")
    assert answer.status_code == status
    error = answer.json().get("error")
    found = {**(error if isinstance(error, dict) else answer.json())}
    assert found.pop("type", "invalid_request_error") == "invalid_request_error"
    assert list(found.values()) == expected
    assert not server.faults.armed


def test_a_stream_ends_with_an_error_event(server: TestServer, client: OpenAI) -> None:
    """A stream that fails sends an error event and ends with the final chunk, also if another fault applies."""
    server.faults.set("fail_after_events=3", times=1)
    server.faults.set("omit_response_id", times=1)
    body, ended = decode_chunked(raw_read(server))
    assert ended
    assert event_names(body) == [*USUAL_EVENTS[:3], "error"]
    assert b'"resp_' not in body
    server.faults.set("fail_after_events=3", times=1)
    last = list(ask(client, "Hello", stream=True))[-1]
    assert (last.type, last.code) == ("error", "server_is_overloaded")
    assert ask(client, "Hello").status == "completed"
    with serve(model=FailingModel()) as failing:
        failing.faults.set("omit_response_id")
        events = stream_events(failing)
    assert [event["type"] for event in events][-2:] == ["error", "response.failed"]
    assert "id" not in events[-1]["response"]


@for_each("usage", ["none", "constant", "new", "uncached", "trimmed"])
def test_usage_can_be_misreported(server: TestServer, client: OpenAI, usage: str) -> None:
    """The model sees the complete context, but the reported usage is wrong or missing."""
    spaces = " " * 4_500
    first = ask(client, "My name is Ada. " * 400)
    expected = ask(client, spaces).usage
    server.faults.set(f"report_usage={usage}")
    second = ask(client, "What is my name?", first.id)
    assert "Ada" in second.output_text
    if usage == "trimmed":  # without whitespace
        for text in ([user_message(spaces)], spaces):
            assert ask(client, text).usage.input_tokens < 20 < expected.input_tokens
    else:
        assert (second.usage is None) is (usage == "none")
        assert second.usage is None or 0 < second.usage.input_tokens < 1_000
    server.faults.clear()


def test_response_id_can_be_reused(server: TestServer, client: OpenAI) -> None:
    """A reused id continues the newest response that has it."""
    server.faults.set("reuse_response_id")
    first = ask(client, "My name is Ada.")
    second = ask(client, "My name is Bob.")
    assert first.id == second.id
    for question in ([user_message("What is my name?")], "What is my name?"):
        assert "Bob" in ask(client, question, first.id).output_text


def test_stored_responses_can_be_hidden(server: TestServer, client: OpenAI) -> None:
    """Hidden responses cannot be fetched, but they can be continued."""
    first = ask(client, "My name is Ada.")
    server.faults.set("hide_stored", times=2)
    with pytest.raises(openai.NotFoundError, match=f"Response with id '{first.id}' not found"):
        client.responses.retrieve(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.input_items.list(first.id)
    assert client.responses.retrieve(first.id).id == first.id
    second = ask(client, "What is my name?", first.id)
    assert "Ada" in second.output_text


def streamed_and_listed(server: TestServer, prompt: str) -> list[list[Any]]:
    """Return the output items of the stream's events and those of its last event."""
    events = stream_events(server, input=prompt, tools=[WEATHER])
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    return [done, events[-1]["response"]["output"]]


@for_each(("fault", "prompt"), [("text", "Hello"), ("arguments", PROMPT), ("missing", "Hello")])
def test_the_completed_event_can_differ(server: TestServer, fault: str, prompt: str) -> None:
    """The completed event differs in text, arguments or items; a response without streaming does not."""
    server.faults.set(f"change_completed={fault}")
    streamed, listed = streamed_and_listed(server, prompt)
    assert streamed != listed
    assert len(streamed) - len(listed) == (fault == "missing")
    if fault != "missing":  # else there is nothing to change in the other prompt
        streamed, listed = streamed_and_listed(server, PROMPT if prompt == "Hello" else "Hello")
        assert streamed == listed
    answer = post(server, stream=False)
    assert "changed" not in answer.text
    assert len(answer.json()["output"]) == 1


def test_deltas_repeated_after_the_finish_reason(server: TestServer, client: OpenAI) -> None:
    """Deltas are sent again after the finish reason, so a client that appends them has the answer twice."""

    def read() -> str:
        messages: Any = [{"role": "user", "content": "Hello"}]
        stream = client.chat.completions.create(model="practice", messages=messages, stream=True)
        return "".join(each.choices[0].delta.content or "" for each in stream if each.choices)

    expected = read()
    server.faults.set("repeat_after_finish")
    assert read() == expected * 2


@for_each("stream", [True, False])
def test_lone_surrogate(server: TestServer, stream: bool) -> None:
    """The deltas and the complete text have a lone surrogate; arguments of tool calls do not."""
    server.faults.set("lone_surrogate")
    for prompt, is_changed in (("Say: Done. Really!", True), (PROMPT, False)):
        text = post(server, stream=stream, tools=[WEATHER], input=prompt).text
        assert ("\\ud83d" in text) is is_changed


def test_every_fault_is_tested() -> None:
    """The name of every fault occurs in this file."""
    text = Path(__file__).read_text()
    assert [name for name in KINDS if f'"{name}' not in text] == []


def test_a_body_that_is_invalid_or_too_large_is_rejected_despite_a_fault() -> None:
    """A malformed body is rejected as such, and one without an end as soon as it is too large."""
    head = (
        b"POST /v1/responses HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n"
    )
    with serve(limits=Limits(body_bytes=1_000)) as server:
        server.faults.set("not_found=vllm")
        answer = HTTP.post(f"{server.base_url}/responses", content=b"{", headers=JSON_TYPE)
        assert answer.status_code == 400
        assert "could not parse the JSON body" in answer.json()["error"]["message"]
        with socket.create_connection(server.address, timeout=TIMEOUT) as connection:
            connection.sendall(head + b"800\r\n" + b" " * 2_048 + b"\r\n")
            assert b" 413 " in connection.recv(1_000).splitlines()[0]
