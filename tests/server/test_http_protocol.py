"""Connections of all servers: what a client may send, and when its connection ends."""

import asyncio
import http.client
import io
import itertools
import json
import logging
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, cast

import pytest
from starlette.responses import PlainTextResponse
from starlette.types import Message, Receive, Scope, Send

from app_thread import serve_app
from chaining.proxy.running import serve_proxy
from for_each import for_each
from kedge.mcp.server import create_http_app, create_mcp_server
from kedge.server.access import AccessPolicy
from kedge.server.http_protocol import READ_BYTES
from kedge.server.settings import Limits
from kedge.testing import serve
from kedge.tools import Toolbox
from server.gated_model import GatedModel
from server.waiting import TIMEOUT, wait_until

TOKEN = "secret"
CHUNKED = "transfer-encoding: chunked\r\n"
JSON = "content-type: application/json\r\n"
BODY = json.dumps({"model": "m", "input": "hello"}).encode()
MOST_BYTES = 32_000_000
"""More than the buffers of a connection hold, so that a server that has received less has read and dropped some."""


@contextmanager
def serve_responses() -> Iterator[str]:
    """Run the server of `kedge serve`."""
    with serve(token=TOKEN) as server:
        yield server.url


@contextmanager
def serve_forwarding() -> Iterator[str]:
    """Run the server of `kedge proxy`, in front of one of `kedge serve`."""
    with serve() as upstream, serve_proxy(upstream.base_url, token=TOKEN) as url:
        yield url


@contextmanager
def serve_mcp() -> Iterator[str]:
    """Run the server of `kedge mcp --http`."""

    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    with serve_app(create_http_app(create_mcp_server(Toolbox(add)), AccessPolicy(TOKEN))) as url:
        yield url


Serve = Callable[[], AbstractContextManager[str]]
SERVERS: dict[str, tuple[Serve, str, str]] = {
    "serve": (serve_responses, "/v1/responses", f"Authorization: Bearer {TOKEN}"),
    "proxy": (serve_forwarding, "/v1/responses", f"X-Kedge-Token: {TOKEN}"),
    "mcp": (serve_mcp, "/mcp", f"Authorization: Bearer {TOKEN}"),
}
"""Each server with a token, the path of a request, and the header with its token."""


def open_connection(url: str) -> socket.socket:
    """Open a connection to a server."""
    host, _, port = url.removeprefix("http://").removesuffix("/v1").partition(":")
    return socket.create_connection((host, int(port)), TIMEOUT)


def format_head(path: str, *headers: str) -> bytes:
    """Return the head of a request."""
    return "".join([f"POST {path} HTTP/1.1\r\nhost: localhost\r\n", *headers, "\r\n"]).encode()


def format_request(path: str, *headers: str, body: bytes = BODY) -> bytes:
    """Return a request with a JSON body."""
    return format_head(path, JSON, *headers, f"content-length: {len(body)}\r\n") + body


def format_chunk(data: bytes) -> bytes:
    """Return a chunk of a body."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def receive_all(connection: socket.socket) -> bytes:
    """Return what a server sends until it closes the connection."""
    received = b""
    with suppress(ConnectionResetError):
        while chunk := connection.recv(65_536):
            received += chunk
    return received


def parse_answer(connection: socket.socket) -> tuple[int, bytes]:
    """Return the status and the body of the next response, as a client reads it."""
    response = http.client.HTTPResponse(connection)
    response.begin()
    return response.status, response.read()


@for_each("name", SERVERS)
def test_a_trailer_is_no_header(name: str) -> None:
    """A token in a trailer does not authenticate, and the request before it is rejected without a token."""
    run, path, token = SERVERS[name]
    with run() as url, open_connection(url) as connection:
        body = format_chunk(BODY) + f"0\r\n{token}\r\nX-Other: 1\r\n\r\n".encode()
        connection.sendall(format_head(path, JSON, CHUNKED) + body)
        status, _ = parse_answer(connection)
    assert status == 401


ENDLESS = {
    "headers": ("", b"", b"a: b\r\n"),
    "one header": ("", b"", b"a"),
    "trailers": (CHUNKED, b"\r\n0\r\n", b"a: b\r\n"),
    "one trailer": (CHUNKED, b"\r\n0\r\n", b"a"),
    "size of a chunk": (CHUNKED, b"\r\n", b"0"),
    "extension of a chunk": (CHUNKED, b"\r\n5;", b"a"),
    "extension of the last chunk": (CHUNKED, b"\r\n0;", b"a"),
}
"""Headers of a request, how it continues, and what it repeats without an end."""


@for_each("part", ENDLESS)
@for_each("name", SERVERS)
def test_what_has_no_end_has_a_limit(name: str, part: str) -> None:
    """A connection is closed when a part of a request that is retained until its end does not end."""
    run, path, token = SERVERS[name]
    header, start, repeated = ENDLESS[part]
    head = format_head(path, JSON, f"{token}\r\n", header).removesuffix(b"\r\n")
    data = repeated * (MOST_BYTES // len(repeated))
    with run() as url, open_connection(url) as connection:
        connection.sendall(head + start)
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            connection.sendall(data)


@for_each("size", [40_000, 60_000, 100_000, 1_000_000])
def test_headers_that_are_too_large_are_431(size: int) -> None:
    """The status is that of the API for headers of any size above the limit, whoever rejects them."""
    with serve() as server, open_connection(server.url) as connection:
        connection.sendall(format_head("/v1/responses", f"x-large: {'a' * size}\r\n"))
        status, body = parse_answer(connection)
    assert status == 431
    assert b"headers" in body


ANSWERED_REQUESTS = 1_500
"""The number of requests with which a server would read more than the buffers hold, at one read for each of them."""


def test_requests_that_wait_on_one_connection_have_a_limit() -> None:
    """A server does not read ahead while it answers, although it watches whether the client leaves."""
    numbers = itertools.count(1)

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        """Answer after some turns of the loop, in which the end of the connection would be noticed."""
        if scope["type"] != "http":
            return
        await receive()
        watching = asyncio.create_task(cast("Coroutine[Any, Any, Message]", receive()))
        for _ in range(5):
            await asyncio.sleep(0)
        watching.cancel()
        is_last = next(numbers) == ANSWERED_REQUESTS
        response = PlainTextResponse("", headers={"connection": "close"} if is_last else None)
        await response(scope, receive, send)

    request = b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n"
    with serve_app(answer) as url, open_connection(url) as connection:
        receiver = threading.Thread(target=receive_all, args=(connection,))
        receiver.start()
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            connection.sendall(request * (ANSWERED_REQUESTS * READ_BYTES // len(request)))
        receiver.join(TIMEOUT)


@for_each("is_answered", [True, False])
def test_a_malformed_body_ends_the_connection_without_an_error(
    caplog: pytest.LogCaptureFixture, is_answered: bool
) -> None:
    """Neither a body that becomes malformed before the response nor one after it leaves a traceback."""
    headers = (JSON, CHUNKED, "" if is_answered else f"authorization: Bearer {TOKEN}\r\n")
    with serve(token=TOKEN) as server, open_connection(server.url) as connection:
        connection.sendall(format_head("/v1/responses", *headers) + format_chunk(b"{"))
        if is_answered:
            assert parse_answer(connection)[0] == 401
        else:
            wait_until(lambda: server.requests)
        connection.sendall(b"no size of a chunk\r\n")
        received = receive_all(connection)
    assert received[:12] == (b"" if is_answered else b"HTTP/1.1 400")
    assert not [each for each in caplog.records if each.levelno >= logging.ERROR]


def finish_sending(connection: socket.socket, data: bytes) -> None:
    """Send data, and close this direction of the connection."""
    connection.sendall(data)
    connection.shutdown(socket.SHUT_WR)


@for_each("name", SERVERS)
def test_a_client_that_finished_sending_is_answered(name: str) -> None:
    """A client may close its direction after the request; then the server closes the connection, too."""
    run, path, token = SERVERS[name]
    with run() as url, open_connection(url) as connection:
        finish_sending(connection, format_request(path, f"{token}\r\n"))
        received = receive_all(connection)
    # The MCP server rejects what is no message of its protocol.
    assert received[:12] == (b"HTTP/1.1 406" if name == "mcp" else b"HTTP/1.1 200")
    assert received.endswith(b"}")


def test_a_client_that_finished_sending_gets_every_answer() -> None:
    """All requests that arrived before the end are answered, in order; the start of another one is dropped."""
    with serve() as server, open_connection(server.url) as connection:
        request = b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n"
        streamed = json.dumps({"model": "m", "input": "hello", "stream": True}).encode()
        stream = format_request("/v1/responses", body=streamed)
        finish_sending(connection, request + stream + request + b"GET /healthz HT")
        received = receive_all(connection)
    assert received.count(b"HTTP/1.1 200 OK") == received.count(b"HTTP/1.1") == 3
    assert b"data: [DONE]\n\n" in received
    assert received.endswith(b'{"status":"ok"}')


@pytest.fixture
def probed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let servers probe clients without a delay."""
    monkeypatch.setattr("kedge.server.http_protocol.PROBE_SECONDS", 0)


class ReceivedBytes:
    """What a connection received, which the client of the standard library reads in place of a socket."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def makefile(self, _: str) -> io.BytesIO:
        """Return the data as a file."""
        return io.BytesIO(self._data)


def parse_received(data: bytes) -> tuple[int, bytes]:
    """Return the status and the body of a complete response, as a client reads it."""
    response = http.client.HTTPResponse(cast("Any", ReceivedBytes(data)))
    response.begin()
    return response.status, response.read()


PROBES = {False: b"HT", True: b"\r\n00"}
"""How the bytes end that a client receives up to the second probe, before a response or in a stream."""


@pytest.mark.usefixtures("probed_at_once")
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_finished_sending_waits_for_a_slow_answer(stream: bool) -> None:
    """The probes of its connection change neither the status nor the body."""
    model = GatedModel()
    raw = json.dumps({"model": "m", "input": "wait", "stream": stream}).encode()
    with serve(model=model) as server, open_connection(server.url) as connection:
        connection.sendall(format_request("/v1/responses", body=raw))
        wait_until(lambda: model.waiting)
        received = b""
        while stream and b"answer " not in received:
            received += connection.recv(65_536)
        connection.shutdown(socket.SHUT_WR)
        while not received.endswith(PROBES[stream]):
            received += connection.recv(65_536)
        model.open_gate()
        status, body = parse_received(received + receive_all(connection))
    assert status == 200
    assert b"answer to wait" in body
    assert body.endswith(b"data: [DONE]\n\n" if stream else b"}")


@pytest.mark.usefixtures("probed_at_once")
def test_a_body_that_is_not_sent_in_chunks_has_no_probes() -> None:
    """A client with HTTP/1.0 receives the stream as it is."""
    model = GatedModel()
    raw = json.dumps({"model": "m", "input": "wait", "stream": True}).encode()
    request = format_request("/v1/responses", body=raw).replace(b"HTTP/1.1", b"HTTP/1.0", 1)
    with serve(model=model) as server, open_connection(server.url) as connection:
        connection.sendall(request)
        received = b""
        while b"answer " not in received:
            received += connection.recv(65_536)
        connection.shutdown(socket.SHUT_WR)
        for _ in range(3):  # in which the probes would be sent
            with open_connection(server.url) as other:
                other.sendall(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n")
                assert parse_answer(other)[0] == 200
        model.open_gate()
        received += receive_all(connection)
    assert b"\n00event" not in received
    assert received.endswith(b"data: [DONE]\n\n")


@pytest.mark.usefixtures("probed_at_once")
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_left_is_noticed(stream: bool) -> None:
    """A client that closed its connection after it received everything so far cancels its response."""
    model = GatedModel()
    raw = json.dumps({"model": "m", "input": "wait", "stream": stream}).encode()
    with serve(model=model) as server:
        with open_connection(server.url) as connection:
            connection.sendall(format_request("/v1/responses", body=raw))
            wait_until(lambda: model.waiting)
            while stream and b"answer " not in connection.recv(65_536):
                pass
        wait_until(lambda: model.cancelled)
        wait_until(lambda: server.running == 0)


def test_a_client_that_leaves_within_its_request_is_noticed() -> None:
    """The rest of a body cannot arrive after the end, so the connection is closed at once."""
    with serve(limits=Limits(read_seconds=TIMEOUT)) as server:
        with open_connection(server.url) as connection:
            finish_sending(connection, format_request("/v1/responses")[:-1])
            assert receive_all(connection) == b""
        assert server.running == 0
