"""Test the HTTP client and transport: headers, proxies, retries, timeouts, errors, and the size of responses."""

import asyncio
import gzip
import inspect
import json
import socket
import threading
import zlib
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from types import SimpleNamespace
from typing import Any

import aiohttp
import httpcore2
import pytest
from starlette.requests import Request
from starlette.responses import Response
from websockets.asyncio.server import ServerConnection
from websockets.asyncio.server import serve as serve_socket

from engines.fake_server import (
    TURN,
    RecordingServer,
    catch_error,
    chunked_head,
    connect_to,
    json_response,
    make_handler,
    open_engine,
    read_request,
    serve_bytes,
    serve_handler,
    sse_response,
)
from for_each import for_each
from kedge._internal import responsive
from kedge.engines import http_client, loading, response_bytes
from kedge.engines.http_client import MAX_RETRY_AFTER, HttpClient, Timeouts, find_proxy
from kedge.engines.http_errors import MAX_MESSAGE_LENGTH, ErrorBuilder
from kedge.engines.raw_response import RawResponse
from kedge.engines.response_bytes import (
    LIMIT_VARIABLE,
    MAX_ERROR_BYTES,
    PART_BYTES,
    PIECE_BYTES,
    make_inflater,
    resolve_limit,
)
from kedge.errors import (
    CannotConnect,
    EngineError,
    InvalidSetting,
    NotAuthorized,
    RateLimited,
    RequestRefused,
    ServerFailed,
    StreamCut,
    StreamTooLarge,
    Unreachable,
)
from kedge.events import ResponseStarted
from kedge.planning import get_state
from kedge.providers import connect
from kedge.testing import TestServer

SECRET = "secret-77"
LIMIT = 200_000
ITEM = {"type": "message", "role": "assistant", "content": "5", "id": "m"}
ANSWER = {"id": "resp_1", "status": "completed", "output": [ITEM]}
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n"


@for_each(
    ("response", "kind", "message"),
    [
        (b"", Unreachable, "could not reach"),
        (HEAD + b'{"id"', StreamCut, "broke in the middle"),
    ],
)
async def test_broken_connection_is_a_retryable_error(
    response: bytes, kind: type[EngineError], message: str
) -> None:
    """A failure below HTTP raises a typed, retryable error with the Turn that was sent."""
    assert (await catch_error(kind, response, message)).retryable


OK_LINE = b"HTTP/1.1 200 OK\r\n"
CHUNKED_LINES = OK_LINE + b"Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
INVALID_RESPONSES = {
    "another protocol": (
        b"220 smtp.example.org ESMTP\r\n\r\n",
        "status line.*is the base URL correct",
    ),
    "long header": (OK_LINE + b"X-Long: %b\r\n\r\n" % (b"a" * 70_000), ""),
    "many headers": (OK_LINE + b"X-Header: a\r\n" * 1_000 + b"\r\n", ""),
    "no header": (OK_LINE + b"nothing\r\n\r\n", ""),
    "size of the first chunk": (CHUNKED_LINES + b"zz\r\n{}\r\n0\r\n\r\n", ""),
    "end of the first chunk": (CHUNKED_LINES + b"2\r\n{}xx0\r\n\r\n", ""),
    "length": (OK_LINE + b"Content-Length: two\r\n\r\n{}", ""),
    "two lengths": (OK_LINE + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}", ""),
}
"""Responses that are no valid HTTP, and what their error says besides that."""


@for_each("name", INVALID_RESPONSES)
async def test_a_response_that_is_not_valid_http_is_a_permanent_error(name: str) -> None:
    """The server has answered, and may have been paid for it: the request is not sent again."""
    response, message = INVALID_RESPONSES[name]
    accepted: list[socket.socket] = []
    with serve_bytes(response, accepted=accepted) as url:
        async with connect(f"responses:{url}#m", max_retries=2) as engine:
            with pytest.raises(ServerFailed, match=f"not valid HTTP.*{message}") as exc_info:
                await engine.run(TURN)
    assert not exc_info.value.retryable
    assert len(accepted) == 1
    for received in ("smtp.example", "aaaa", "nothing", "zz", "xx0", "two"):
        assert received not in str(exc_info.value)


@for_each("start", [OK_LINE, b"HTTP/1.1 20", OK_LINE + b"Content-Length: 2\r\nX-"])
async def test_a_connection_that_breaks_in_the_headers_is_not_a_missing_answer(
    start: bytes,
) -> None:
    """The server had begun to answer, so the request is not sent again."""
    accepted: list[socket.socket] = []
    with serve_bytes(start, accepted=accepted) as url:
        async with connect(f"responses:{url}#m", max_retries=2) as engine:
            with pytest.raises(StreamCut):
                await engine.run(TURN)
    assert len(accepted) == 1


async def test_headers_of_many_kilobytes_are_accepted() -> None:
    """Some gateways describe in a header of a response how they have routed its request."""
    body = json.dumps(ANSWER).encode()
    lines = OK_LINE + b"Content-Type: application/json\r\nContent-Length: %d\r\n" % len(body)
    response = lines + b"X-Route: %b\r\n\r\n%b" % (b"a" * 60_000, body)
    with serve_bytes(response) as url:
        async with connect(f"responses:{url}#m") as engine:
            turn = await engine.run(TURN)
    assert turn.blocks[-1].text == "5"


@pytest.mark.parametrize("coding", ["br", "zstd"])
async def test_a_compression_that_was_not_requested_is_a_permanent_error(coding: str) -> None:
    """The server was reached and has generated an answer, so the request is not sent again."""
    received: list[bytes] = []

    async def answer(request: Request) -> Response:
        received.append(await request.body())
        return Response(b"x", headers={"content-encoding": coding})

    error = await catch_error(ServerFailed, answer, "compresses", max_retries=2)
    assert not error.retryable
    assert len(received) == 1


@pytest.mark.parametrize(("sent", "expected"), [(b"", Unreachable), (HEAD + b'{"id"', StreamCut)])
async def test_timeout_is_a_typed_error(sent: bytes, expected: type[EngineError]) -> None:
    """The client's timeout applies before the response and in the middle of it."""
    # On a busy machine the start of the response may take longer than a short timeout.
    for timeout in (0.05, 1, 60):
        with serve_bytes(sent, keep_open=True) as url:
            async with connect(f"responses:{url}#m", max_retries=0, timeout=timeout) as engine:
                with pytest.raises((Unreachable, StreamCut)) as exc_info:
                    await engine.run(TURN)
        assert "in time" in str(exc_info.value) or "Timeout" in str(exc_info.value)
        assert exc_info.value.retryable
        assert exc_info.value.turn is TURN
        if isinstance(exc_info.value, expected):
            return
    pytest.fail(f"{exc_info.value!r} is not a {expected.__name__}")


async def test_client_retries_the_same_request() -> None:
    """Two failures and an answer give one answer to the same request, and an anchor."""
    busy = Response("busy", 500, headers={"retry-after-ms": "1"})
    server = RecordingServer(busy, busy, json_response(ANSWER))
    async with connect_to(server.handle, max_retries=2) as engine:
        turn = await engine.run(TURN)
    assert server.bodies == [server.bodies[0]] * 3
    assert [block.kind for block in turn.blocks] == ["user", "assistant"]
    assert get_state(turn).previous_response_id == "resp_1"


LOADING = {"error": {"code": 503, "message": "Loading model", "type": "unavailable_error"}}


@pytest.mark.parametrize("api", ["responses", "chat", "sdk openai"])
async def test_server_that_loads_its_model_is_waited_for(api: str) -> None:
    """More rejections than retries are waited for as the server asks, and a listener learns of each pause."""
    headers = {"retry-after-ms": "1", "x-should-retry": "true"}
    answers = [Response(json.dumps(LOADING), 503, headers)] * 8
    message = {"role": "assistant", "content": "Hi"}
    chat = {"id": "c", "choices": [{"message": message, "finish_reason": "stop"}]}
    server = RecordingServer(*answers, json_response(chat if api == "chat" else ANSWER))
    waited: list[float] = []
    token = loading.loading_listener.set(waited.append)
    try:
        async with connect_to(server.handle, api, max_retries=1) as engine:
            turn = await engine.run(TURN)
    finally:
        loading.loading_listener.reset(token)
    assert turn[-1].kind == "assistant"
    assert len(server.bodies) == 9
    assert len(waited) == (4 if api == "sdk openai" else 8)  # the package has repeated each once
    assert waited == sorted(waited)


@for_each(
    ("settings", "limit", "requests"),
    [({"max_retries": 0}, 300.0, 1), ({"max_retries": 2}, 0.3, 1), ({"max_retries": 2}, 0.002, 2)],
)
async def test_wait_for_a_model_is_limited(
    settings: dict[str, Any], limit: float, requests: int
) -> None:
    """The error is that of the server, which a caller without retries gets at once."""
    server = RecordingServer(*[json_response(LOADING, 503)] * 5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "MAX_LOADING_SECONDS", limit)
        first = 0.001 if limit < 0.1 else 0.5
        patch.setattr(loading, "LOADING_WAITS", replace(loading.LOADING_WAITS, first=first))
        error = await catch_error(ServerFailed, server.handle, "Loading model", **settings)
    assert str(error) == "responses, HTTP 503: Loading model"
    assert len(server.bodies) == requests


@for_each(
    ("status", "message", "expected"),
    [
        (503, "Loading model", True),
        (503, "The model meta-llama is currently loading", True),
        (503, "the server is loading the model", True),
        (503, "The model is overloaded", False),
        (500, "Loading model", False),
        (503, "overloading models is not allowed", False),
    ],
)
def test_rejection_of_a_loading_server_is_recognized(
    status: int, message: str, expected: bool
) -> None:
    """Only a server that is not available because of its model is waited for."""
    assert loading.is_loading(ServerFailed(message, status=status)) is expected


@pytest.mark.parametrize("api", ["responses", "chat", "sdk openai", "sdk anthropic"])
async def test_doubled_path_is_named(server: TestServer, api: str) -> None:
    """A 404 of an address with a part that occurs twice says so once, whichever server answers."""
    with serve_handler(make_handler(lambda: Response("Not Found", 404))) as other:
        for url in (server.base_url, other):
            async with open_engine(api, f"{url}/v1") as engine:
                with pytest.raises(RequestRefused, match="/v1 twice") as raised:
                    await engine.run(TURN)
            assert str(raised.value).count("base URL") == 1
            assert "/v1/v1/" in str(raised.value)


def test_engine_is_used_in_two_event_loops(
    server: TestServer, caplog: pytest.LogCaptureFixture
) -> None:
    """Two event loops use one engine without warnings; each loop has its own connection."""
    engine = connect(f"responses:{server.base_url}#practice")
    asyncio.run(engine.run(TURN))
    asyncio.run(engine.run(TURN))
    assert [record for record in caplog.records if record.name == "asyncio"] == []


async def test_connection_is_reused() -> None:
    """Requests reuse one connection, streamed or not."""
    ports: list[int] = []

    async def answer(request: Request) -> Response:
        assert request.client is not None
        ports.append(request.client.port)
        response = {**ANSWER, "id": f"resp_{len(ports)}"}
        if (await request.json())["stream"]:
            return sse_response({"type": "response.completed", "response": response})
        return json_response(response)

    async with connect_to(answer) as engine:
        for streaming in (False, True, True, False):
            await engine.run(TURN, streaming=streaming)
    assert len(ports) == 4
    assert len(set(ports)) == 1


LATER = format_datetime(datetime.now(UTC) + timedelta(days=1), usegmt=True)


@for_each(
    ("headers", "least", "most"),
    [
        ({"retry-after": "2"}, 2, 2),
        ({"retry-after-ms": "1500", "retry-after": "2"}, 1.5, 1.5),
        ({"retry-after-ms": "soon", "retry-after": "2"}, 2, 2),
        ({"retry-after": LATER}, 1, 86_400),
        ({"retry-after": "Wed, 21 Oct 2015 07:28:00 GMT"}, 0, 0),
        *(({"retry-after": value}, None, None) for value in ("inf", "nan", "-1", "soon", "")),
    ],
)
async def test_retry_after_is_read_in_every_form(
    headers: dict[str, str], least: float | None, most: float | None
) -> None:
    """A server may send seconds or a date, and OpenAI also sends milliseconds; other values are ignored."""
    delay = (await catch_error(RateLimited, Response("busy", 429, headers))).retry_after
    if least is None or most is None:
        assert delay is None
    else:
        assert delay is not None
        assert least <= delay <= most


async def test_deeply_nested_error_body_is_an_error_of_the_server() -> None:
    """A body that is nested too deeply to be parsed is the message of the error."""
    await catch_error(RequestRefused, Response("[" * 100_000, 400))


async def test_error_in_a_list_is_read() -> None:
    """Google's server of the Chat Completions API sends its errors in a list."""
    body = {"code": 429, "message": "Quota exceeded.", "status": "RESOURCE_EXHAUSTED"}
    error = await catch_error(RateLimited, json_response([{"error": body}], 429), api="chat")
    assert (error.message, error.code) == ("Quota exceeded.", "429")


@for_each("api", ["responses", "sdk openai"])
async def test_an_error_has_only_whole_characters(api: str) -> None:
    """A server may cut a character in half, or send headers that are not UTF-8; the error can be stored and shown."""
    body = rb'{"error": {"message": "no \ud83d", "code": "\ud83d", "param": "\ud83d"}}'
    for status, headers in ((400, {"x-request-id": "\xfc"}), (302, {"location": "http://a/\xfc"})):
        error = await catch_error(RequestRefused, Response(body, status, headers), api=api)
        shown = f"{error} {error.message} {error.code} {error.param} {error.request_id}"
        assert shown.encode("utf-8", "replace") == shown.encode()


async def test_truncated_message_contains_no_part_of_the_key() -> None:
    """A long error message is redacted before it is truncated, so that no part of the key is shown."""
    key = "sk-" + "7" * 40
    answer = Response("x" * (MAX_MESSAGE_LENGTH - 20) + key, 400)
    assert "sk-" not in str(await catch_error(RequestRefused, answer, api_key=key))


@for_each(
    ("header", "value"),
    [
        ("Authorization", f"Bearer {SECRET}"),
        ("Authorization", f"Bearer {SECRET}=="),
        ("Authorization", f'Digest username="{SECRET}", response="{SECRET}2"'),
        ("api-key", SECRET),
        ("Helicone-Auth", SECRET),
        ("Cookie", f"session={SECRET}"),
        ("Cookie", f"session={SECRET}; other={SECRET}="),
        ("cookie", f'a={SECRET};b="{SECRET} 2" ; {SECRET}'),
    ],
)
async def test_credentials_in_headers_are_redacted(header: str, value: str) -> None:
    """A message that repeats the credentials of a header is an error without them, as for an API key."""

    async def refuse(request: Request) -> Response:
        return Response(f"not valid: {request.headers[header]}", 401)

    error = await catch_error(
        NotAuthorized, refuse, r"not valid: (\w+ )?\*\*\*", default_headers={header: value}
    )
    assert SECRET not in str(error)


async def test_each_value_of_several_cookies_is_redacted() -> None:
    """A message that repeats only a value of one pair does not show it either."""
    headers = {"Cookie": 'session="first-1"; token=first-12=; theme=dark'}
    answer = Response("unknown: first-1, first-12=, dark", 401)
    expected = r"unknown: \*\*\*, \*\*\*, \*\*\*"
    await catch_error(NotAuthorized, answer, expected, default_headers=headers)


@for_each(
    ("status", "message", "retryable"),
    [
        (500, "image input is not supported", False),
        (500, "This model does not support tools", False),
        (501, "no", False),
        (500, "internal error", True),
        (503, "loading the model", True),
    ],
)
async def test_a_permanent_failure_is_not_retryable(
    status: int, message: str, retryable: bool
) -> None:
    """llama.cpp reports an unsupported request as HTTP 500; sending it again cannot help."""
    answer = json_response({"error": {"message": message, "code": status}}, status)
    assert (await catch_error(ServerFailed, answer)).retryable is retryable


KINDS = ["responses", "chat", "anthropic", "sdk openai", "sdk anthropic"]


@for_each("api", [*KINDS, "sdk openai over aiohttp"])
@for_each("status", [301, 307])
async def test_redirect_is_not_followed(api: str, status: int) -> None:
    """A redirect cannot send the conversation and the key elsewhere; the error names the address."""
    elsewhere = RecordingServer(json_response({}))
    with serve_handler(elsewhere.handle) as other:
        headers = {"location": f"{other}/responses?token=secret"}
        moved = Response(status_code=status, headers=headers)
        match = f"redirects to {other}/responses;"
        error = await catch_error(RequestRefused, moved, match, api=api, api_key="sk-secret")
    assert elsewhere.paths == []
    assert (error.status, error.retryable) == (status, False)


@for_each(
    ("status", "headers", "expected"),
    [
        (400, {}, 1),
        (503, {"retry-after-ms": "1"}, 2),
        (409, {"retry-after-ms": "1"}, 2),
        (422, {"retry-after-ms": "1"}, 1),
        (422, {"retry-after-ms": "1", "x-should-retry": "true"}, 2),
        (503, {"retry-after-ms": "1", "x-should-retry": "false"}, 1),
        (503, {"retry-after": str(MAX_RETRY_AFTER + 1)}, 1),
    ],
)
async def test_server_decides_about_retries(
    status: int, headers: dict[str, str], expected: int
) -> None:
    """A temporary error is repeated, unless the server says otherwise or requests a long delay."""
    server = RecordingServer(Response("busy", status, headers))
    options = {"keep_reasoning": False}  # otherwise the first request would be repeated without it
    await catch_error(EngineError, server.handle, max_retries=1, options=options)
    assert len(server.bodies) == expected


@for_each("length", [3 * MAX_ERROR_BYTES, 10])
async def test_error_with_an_unusual_body_has_its_status(length: int) -> None:
    """A long body is read in part, and one that breaks off as far as it arrived."""
    body = b"x" * min(length, 2 * MAX_ERROR_BYTES)
    head = f"HTTP/1.1 400 Bad\r\nContent-Length: {length + 1}\r\n\r\n".encode()
    assert (await catch_error(RequestRefused, head + body, r"x{10}")).status == 400


async def test_headers_of_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """The headers of settings replace those of the environment, in any case; None removes one."""
    received: dict[str, str] = {}

    async def refuse(request: Request) -> Response:
        assert len(request.headers.getlist("user-agent")) == 1
        received.update(request.headers)
        return json_response({"error": {"message": "no"}}, 400)

    monkeypatch.setenv("OPENAI_CUSTOM_HEADERS", "X-Team: red\nX-Gone: yes\nnonsense")
    monkeypatch.setenv("OPENAI_ORG_ID", "org-1")
    headers = {"x-team": "blue", "X-Gone": None, "user-agent": "mine/1"}
    with serve_handler(refuse) as url:
        settings = {"base_url": url, "api_key": "sk-1", "default_headers": headers}
        async with connect("openai:gpt-5.1", **settings) as engine:
            with pytest.raises(RequestRefused):
                await engine.run(TURN)
    assert received["authorization"] == "Bearer sk-1"
    assert received["openai-organization"] == "org-1"
    assert received["x-team"] == "blue"
    assert received["user-agent"] == "mine/1"
    assert "x-gone" not in received


def test_proxies_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """``HTTPS_PROXY`` and ``NO_PROXY`` have their usual meaning; a proxy cannot reach this machine's loopback."""
    for name in ("http_proxy", "HTTP_PROXY", "no_proxy", "https_proxy", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy:3128")
    monkeypatch.setenv("HTTP_PROXY", "http://proxy:3128")
    monkeypatch.setenv("NO_PROXY", "ollama,.internal")
    assert find_proxy("https://api.openai.com/v1") == "http://proxy:3128"
    assert find_proxy("http://ollama:11434/v1") is None
    assert find_proxy("https://models.internal:8443/v1") is None
    assert find_proxy("http://ada:secret@ollama:11434/v1") is None
    for host in ("localhost", "127.0.0.1", "[::1]"):
        assert find_proxy(f"http://{host}:8484/v1") is None


async def test_request_is_sent_through_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request goes to the proxy that the environment names, which answers for the host."""
    body = json.dumps(ANSWER).encode()
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    with serve_bytes(head % len(body) + body) as url:
        monkeypatch.setenv("HTTP_PROXY", url.removesuffix("/v1"))
        monkeypatch.setenv("NO_PROXY", "")
        async with connect("responses:http://model.invalid/v1#m", max_retries=0) as engine:
            turn = await engine.run(TURN)
    assert [block.kind for block in turn.blocks] == ["user", "assistant"]


async def test_certificates_that_cannot_be_read_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of certificates that does not exist is an error that names its variable."""
    monkeypatch.setenv("SSL_CERT_FILE", "/nowhere/certificates.pem")
    uncached = inspect.unwrap(httpcore2.default_ssl_context)
    monkeypatch.setattr(httpcore2, "default_ssl_context", uncached)
    async with connect("responses:https://model.invalid/v1#m") as engine:
        with pytest.raises(CannotConnect, match="SSL_CERT_FILE or SSL_CERT_DIR cannot be read: No"):
            await engine.run(TURN)


async def test_broken_connection_is_retried() -> None:
    """A connection that breaks before an answer is retried as often as ``max_retries`` allows."""
    accepted: list[None] = []

    async def close(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted.append(None)
        writer.close()

    async with await asyncio.start_server(close, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
        async with connect(f"responses:{url}#m", max_retries=1) as engine:
            with pytest.raises(Unreachable):
                await engine.run(TURN)
    assert len(accepted) == 2


async def test_a_connection_that_was_closed_while_the_loop_was_busy_is_not_used() -> None:
    """A request that is not repeated gets a new connection, although the loop has not read the end of the old one."""
    closed = threading.Event()
    body = json.dumps(ANSWER).encode()
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"

    def answer() -> None:
        for _ in range(2):
            connection, _ = listener.accept()
            read_request(connection)
            connection.sendall(head % len(body) + body)
            connection.close()
            closed.set()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        async with connect(f"responses:{url}#m", max_retries=0) as engine:
            await engine.run(TURN)
            assert closed.wait(300)  # the loop does nothing meanwhile
            await engine.run(TURN)
        thread.join(300)


def test_timeouts_are_read_in_every_form() -> None:
    """A timeout is a number of seconds, None for no limit, or an object of httpx."""
    from httpx2 import Timeout

    assert Timeouts.of(3) == Timeouts(3, 3)
    assert Timeouts.of(None) == Timeouts(None, None)
    assert Timeouts.of(Timeout(30, connect=2)) == Timeouts(2, 30)


async def test_engine_that_is_closed_during_an_answer_reports_a_broken_connection() -> None:
    """Closing an engine in another task ends its streams with an error of the engine."""
    event = {"type": "response.created", "response": {"id": "resp_1", "status": "in_progress"}}
    data = b"data: %s\n\n" % json.dumps(event).encode()
    with serve_bytes(chunked_head(data), keep_open=True) as url:
        engine = connect(f"responses:{url}#m")
        async with engine.stream(TURN) as stream:
            async for each in stream:
                if isinstance(each, ResponseStarted):
                    break
            await engine.aclose()
            with pytest.raises(StreamCut, match="the connection broke"):
                await stream.finish()


async def test_a_call_that_is_cancelled_in_an_error_releases_its_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The next call can use the only connection, although the body of the error has not arrived."""
    started = asyncio.Event()

    async def wait(*_: object) -> bytes:
        started.set()
        return await asyncio.Future[bytes]()

    monkeypatch.setattr(http_client, "MAX_CONNECTIONS", 1)
    monkeypatch.setattr(http_client, "read_start", wait)
    with serve_bytes(HEAD.replace(b"200 OK", b"500 Failed"), keep_open=True) as url:
        async with connect(f"responses:{url}#m", max_retries=0) as engine:
            for _ in range(2):
                started.clear()
                task = asyncio.create_task(engine.run(TURN))
                await asyncio.wait_for(started.wait(), 60)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task


def make_client() -> HttpClient:
    """Return a client of a server that does not exist."""
    return HttpClient(ErrorBuilder("test", "http://127.0.0.1:1", ""), {}, max_retries=0)


async def test_closed_client_cannot_reach_its_server() -> None:
    """A request that is repeated after its engine was closed fails with an error of the engine."""
    client = make_client()
    await client.close()
    with pytest.raises(Unreachable):
        await client.send("GET", "http://127.0.0.1:1/", None, {}, query=None, retry=True)


async def test_timeout_of_a_connection_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that times out is reported as such, although its root cause is a cancellation."""

    async def time_out(*_: object, **__: object) -> None:
        raise aiohttp.ConnectionTimeoutError("timeout") from asyncio.CancelledError()

    monkeypatch.setattr(aiohttp.ClientSession, "request", time_out)
    client = make_client()
    with pytest.raises(Unreachable, match="did not answer in time"):
        await client.send("GET", "http://127.0.0.1:1/", None, {}, query=None, retry=True)
    await client.close()


EVENT = b'data: {"type":"response.in_progress","padding":"%b"}\n\n' % (b"x" * 100_000)


COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "deflate": zlib.compress,
    "identity": bytes,
}


@for_each("api", KINDS)
@for_each("encoding", COMPRESS)
@for_each("streaming", [False, True])
async def test_a_response_is_limited(api: str, encoding: str, streaming: bool) -> None:
    """A body or a stream that is larger after decompression is an error, which names the setting."""
    body = EVENT * 10 if streaming else json.dumps({"id": "resp_1", "x": "x" * 1_000_000}).encode()
    content_type = "text/event-stream" if streaming else "application/json"
    headers = {"content-encoding": encoding, "content-type": content_type}
    answer = Response(COMPRESS[encoding](body), headers=headers)
    settings: Any = {"options": {"streaming": streaming}, "max_response_bytes": LIMIT}
    error = await catch_error(StreamTooLarge, answer, "max_response_bytes", api=api, **settings)
    assert (error.limit, error.retryable) == (LIMIT, False)


@pytest.mark.parametrize("api", ["sdk openai", "sdk anthropic"])
async def test_the_body_of_an_error_is_read_in_part(
    api: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client of a package, which reads errors completely, gets only the start of a large one."""
    monkeypatch.setattr(response_bytes, "MAX_ERROR_BYTES", 100)
    body = gzip.compress(b"x" * MAX_ERROR_BYTES)
    answer = Response(body, 400, {"content-encoding": "gzip"})
    error = await catch_error(RequestRefused, answer, r"x{100}", api=api)
    assert "x" * 101 not in str(error)


@for_each("api", KINDS)
async def test_the_body_of_an_error_is_decompressed(api: str) -> None:
    """The message in a compressed error is reported."""
    body = gzip.compress(b'{"error":{"message":"no such model"}}')
    answer = Response(body, 400, {"content-encoding": "gzip"})
    await catch_error(RequestRefused, answer, "no such model", api=api)


async def test_messages_of_a_websocket_are_limited() -> None:
    """A response of many messages is limited as a stream is."""

    async def answer(connection: ServerConnection) -> None:
        await connection.recv()
        created = {"type": "response.created", "response": {"id": "resp_1"}}
        await connection.send(json.dumps(created))
        while True:
            await connection.send(json.dumps({"type": "response.in_progress", "x": "x" * 100_000}))

    async with serve_socket(answer, "127.0.0.1", 0) as server:
        port = next(iter(server.sockets)).getsockname()[1]
        model = f"responses:http://127.0.0.1:{port}/v1#m"
        settings: Any = {"transport": "websocket", "max_retries": 0}
        async with connect(model, max_response_bytes=LIMIT, **settings) as engine:
            with pytest.raises(StreamTooLarge, match="max_response_bytes"):
                await engine.run(TURN)


def test_the_environment_sets_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """A given limit takes precedence, and an invalid one is an error."""
    monkeypatch.setenv(LIMIT_VARIABLE, " 5000 ")
    assert (resolve_limit(), resolve_limit(7)) == (5000, 7)
    for text in ("0", "-1", "many", "1.5"):
        monkeypatch.setenv(LIMIT_VARIABLE, text)
        with pytest.raises(InvalidSetting, match=LIMIT_VARIABLE):
            resolve_limit()
    with pytest.raises(InvalidSetting, match="max_response_bytes"):
        connect("responses:http://127.0.0.1:1/v1#m", max_response_bytes=0)


@for_each("encoding", COMPRESS)
def test_bodies_are_decompressed_in_pieces(encoding: str) -> None:
    """A small chunk does not become a large piece, and all pieces together are the body."""
    body = b"x" * (3 * PIECE_BYTES + 1)
    compressed = COMPRESS[encoding](body)
    inflate = make_inflater(encoding)
    assert inflate is not None
    halves = compressed[: len(compressed) // 2], compressed[len(compressed) // 2 :]
    pieces = [piece for half in halves for piece in inflate(half)]
    assert b"".join(pieces) == body
    assert encoding == "identity" or max(map(len, pieces)) <= PIECE_BYTES


async def test_the_limit_itself_is_allowed() -> None:
    """Only a byte more than the limit is an error."""
    body = b'{"id": "resp_1", "status": "completed", "output": []}'
    async with connect_to(Response(body), max_response_bytes=len(body)) as engine:
        await engine.run(TURN)
    await catch_error(StreamTooLarge, Response(body), max_response_bytes=len(body) - 1)


async def test_a_server_that_has_always_sent_more_does_not_stop_other_tasks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each part of a body that has arrived already is one turn, so a large chunk is several."""
    monkeypatch.setattr(responsive, "SLICE_SECONDS", 0.0)
    others = 0

    async def send_body() -> AsyncIterator[bytes]:
        for _ in range(5):
            yield b"x" * PART_BYTES
        yield b"y" * PART_BYTES * 5

    async def run_beside() -> None:
        nonlocal others
        while True:
            await asyncio.sleep(0)
            others += 1

    client: Any = SimpleNamespace(read_errors=(OSError,), max_response_bytes=10**6)
    errors = ErrorBuilder("test", "http://127.0.0.1", None)
    response = RawResponse(client, errors, send_body(), lambda: None)
    beside = asyncio.create_task(run_beside())
    body = await response.read()
    beside.cancel()
    assert body == b"x" * PART_BYTES * 5 + b"y" * PART_BYTES * 5
    assert others >= 10
