"""HTTP behavior of the server: routes, methods, bodies, limits, tokens and host names."""

import asyncio
import gzip
import json
import logging
import re
import socket
from contextlib import suppress
from http.client import HTTPConnection
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest
from starlette.applications import Starlette
from starlette.middleware.gzip import GZipMiddleware
from starlette.types import Receive, Scope, Send

from for_each import for_each
from kedge.server import app as server_app
from kedge.server.app import ROUTES
from kedge.server.errors import INPUT_REQUIRED
from kedge.server.request_log import log_failure
from kedge.server.settings import Limits
from kedge.server.uvicorn_server import LimitedServer, bind
from kedge.testing import TestServer, serve
from server.conftest import open_client
from server.waiting import TIMEOUT

HELLO_REQUEST: dict[str, Any] = {"model": "m", "input": "hello"}


def read_error(answer: httpx2.Response) -> dict[str, Any]:
    """Return the error of a response after checking that it has the format of the API."""
    body = answer.json()
    assert body.keys() == {"error"}
    assert body["error"].keys() == {"message", "type", "param", "code"}
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-request-id"].startswith("req_")
    return body["error"]


@for_each("path", ["/v1/nothing", "/", "/v1/responses/", "/v1/responses/resp_x/nothing"])
def test_unknown_route_is_404(http: httpx2.Client, path: str) -> None:
    """The error of an unknown route has the API's format and contains method and path."""
    answer = http.get(path)
    assert answer.status_code == 404
    assert read_error(answer)["message"] == f"Invalid URL (GET {path})"


async def test_a_program_can_add_middleware() -> None:
    """Middleware that is added to the app is outside of that of the server."""
    app = server_app.create_app()
    app.add_middleware(GZipMiddleware, minimum_size=1)
    transport = httpx2.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http,
    ):
        answer = await http.get("/v1/nothing")
    assert answer.status_code == 404
    assert answer.headers["content-encoding"] == "gzip"
    read_error(answer)


def test_an_error_after_the_start_of_a_response_closes_the_connection(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error becomes a response only as long as no response has started."""

    async def fail(self: Any, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"first", "more_body": True})
        raise INPUT_REQUIRED()

    monkeypatch.setattr("starlette.responses.Response.__call__", fail)
    with serve() as server:
        request = b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n"
        answer = send_raw(server, request)
    assert answer.endswith(b"5\r\nfirst\r\n")
    assert "failed with an internal error" in caplog.text


NO_JSON = [
    b"", b"nothing", b"{'a': 1}", b"[1, 2,]", b'{"a": 1} x', b'{"a": NaN}', b'{"a": -Infinity}',
    b'{"a": "\xff"}', b'\xef\xbb\xbf{"a": 1}', '{"a": 1}'.encode("utf-16"), b"[" * 100_000,
    b'{"a": ' + b"9" * 5_000 + b"}",
]  # fmt: skip
JSON_TYPE = {"content-type": "application/json"}


@for_each(
    ("raw", "message"),
    [
        *((raw, "could not parse the JSON body") for raw in NO_JSON),
        *((raw, "expected an object") for raw in (b"[]", b'"x"', b"1", b"null")),
    ],
)
def test_a_body_that_is_no_json_object_is_rejected(
    http: httpx2.Client, raw: bytes, message: str
) -> None:
    """A body that is not valid JSON, or not an object, is a 400 error."""
    answer = http.post("/v1/responses", content=raw, headers=JSON_TYPE)
    assert answer.status_code == 400
    assert message in read_error(answer)["message"]


@for_each("kind", ["text/plain", "application/x-www-form-urlencoded", None])
def test_only_json_content_type_is_accepted(http: httpx2.Client, kind: str | None) -> None:
    """Other content types are rejected, because a web page can send them without a preflight request."""
    headers = {} if kind is None else {"content-type": kind}
    answer = http.post("/v1/responses", content=b'{"model":"m","input":"x"}', headers=headers)
    assert answer.status_code == 400
    assert read_error(answer)["code"] == "unsupported_content_type"


def test_wrong_method_is_405_with_allow_header(http: httpx2.Client) -> None:
    """A wrong method is a 405 error whose ``allow`` header lists all methods of the path."""
    methods: dict[str, set[str]] = {}
    for route in ROUTES:
        methods.setdefault(re.sub(r"{.*?}", "x", route.path), set()).update(route.methods or ())
    for path, allowed in methods.items():
        answer = http.request("PATCH", path)
        assert answer.status_code == 405, path
        assert answer.json()["error"].get("code", "method_not_supported") == "method_not_supported"
        assert allowed <= set(answer.headers["allow"].split(", ")), path
    message = http.get("/v1/responses").json()["error"]["message"]
    assert message.startswith("Not allowed to GET on /v1/responses.")


@for_each("path", ["responses", "chat/completions", "messages"])
def test_a_compressed_body_is_415(http: httpx2.Client, path: str) -> None:
    """The error says that compressed bodies are not supported, not that the JSON is wrong."""
    common = [*JSON_TYPE.items(), ("anthropic-version", "2023-06-01")]
    pairs = [*common, ("content-encoding", "gzip"), ("content-encoding", "identity")]
    for headers in (pairs[:-1], pairs, pairs[::-1]):  # whatever the order of several
        answer = http.post(f"/v1/{path}", content=gzip.compress(b"{}"), headers=headers)
        assert answer.status_code == 415
        problem = answer.json()["error"]["message"]
        assert headers != pairs[:-1] or "encoding 'gzip', which is not supported" in problem
    plain = [*common, ("content-encoding", "identity")]
    assert http.post(f"/v1/{path}", content=b"{}", headers=plain).status_code == 400


def test_a_body_that_is_too_large_is_413() -> None:
    """A body above the limit is rejected, with or without a declared length."""
    chunks = [b'{"model":"m","input":"', *[b"x" * 100] * 20, b'"}']
    with serve(limits=Limits(body_bytes=1000)) as server, open_client(server) as http:
        assert http.post("/v1/responses", json=HELLO_REQUEST).status_code == 200
        for content in (b"".join(chunks), iter(chunks)):
            answer = http.post("/v1/responses", content=content, headers=JSON_TYPE)
            assert answer.status_code == 413
            assert read_error(answer)["code"] == "request_too_large"


def send_raw(server: TestServer, *parts: bytes) -> bytes:
    """Send bytes and read until the server closes the connection."""
    with socket.create_connection(server.address, timeout=TIMEOUT) as connection:
        for part in parts:
            connection.sendall(part)
        received = b""
        with suppress(ConnectionResetError):
            while chunk := connection.recv(65536):
                received += chunk
    return received


def test_missing_body_times_out() -> None:
    """A client that does not send its body gets a 408 error."""
    with serve(limits=Limits(read_seconds=0)) as server:
        answer = send_raw(
            server,
            b"POST /v1/responses HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n"
            b"Content-Type: application/json\r\nConnection: close\r\n\r\n{",
        )
    assert answer.startswith(b"HTTP/1.1 408")
    assert b"request_timeout" in answer


def send_forever(connection: socket.socket, data: bytes) -> None:
    """Send data until the server closes the connection, or fail after a gigabyte."""
    for _ in range(1_000_000_000 // len(data)):
        connection.sendall(data)


@for_each("before", [b"", b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n"])
@for_each("line", [b"x", b"x: y\r\n"])
def test_headers_without_an_end_have_a_limit(before: bytes, line: bytes) -> None:
    """A connection is closed when it receives headers without an end, also after a request."""
    with (
        serve(limits=Limits(header_bytes=4096)) as server,
        socket.create_connection(server.address, timeout=TIMEOUT) as connection,
    ):
        connection.sendall(before + b"GET /healthz HTTP/1.1\r\nhost: localhost\r\nX-")
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            send_forever(connection, line * 1_000)


@pytest.mark.parametrize(
    "received", [b"", b"GET / HTTP/1.1\r\nX: ", b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"]
)
async def test_an_idle_connection_is_closed(received: bytes) -> None:
    """A connection is closed before a request, with unfinished headers, and after a request."""
    server = LimitedServer(Starlette(), idle_seconds=0)
    with bind("127.0.0.1", 0) as listener:
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        writer.write(received)
        answer = await asyncio.wait_for(reader.read(), TIMEOUT)
        assert answer[:12] == (b"HTTP/1.1 404" if received.endswith(b"\r\n\r\n") else b"")
        writer.close()
        server.should_exit = True
        await serving


@for_each("cut", [0, 10, 60])
def test_pipelined_requests_are_answered_in_order(server: TestServer, cut: int) -> None:
    """Requests that arrive together, also with the start of another one, are answered one after the other."""
    paths = ["/healthz", "/v1/nothing", "/v1/models"]
    requests = [f"GET {path} HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n".encode() for path in paths]
    last = b"GET /healthz HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n"
    with socket.create_connection(server.address, timeout=TIMEOUT) as connection:
        connection.sendall(b"".join(requests) + last[:cut])
        received = b""
        while received.count(b"HTTP/1.1 ") < len(paths):
            received += connection.recv(65536)
        connection.sendall(last[cut:])
        received += b"".join(iter(lambda: connection.recv(65536), b""))
    assert re.findall(rb"HTTP/1.1 (\d+)", received) == [b"200", b"404", b"200", b"200"]


H2C = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABk\r\n"


@for_each("piece", [1, 150, 65_536])
def test_a_request_that_offers_another_protocol_has_its_body(
    server: TestServer, piece: int
) -> None:
    """Java's client offers HTTP/2 with every request; all of them are answered in HTTP/1.1, also on one connection."""
    body = json.dumps(HELLO_REQUEST).encode()
    head = b"POST /v1/responses HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    sized = head + b"content-length: %d\r\n%b\r\n%b" % (len(body), H2C, body)
    chunk = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    last = b"GET /healthz HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n"
    sent = sized + head + b"transfer-encoding: chunked\r\n" + H2C + b"\r\n" + chunk + sized + last
    with socket.create_connection(server.address, timeout=TIMEOUT) as connection:
        for start in range(0, len(sent), piece):
            connection.sendall(sent[start : start + piece])
        received = b"".join(iter(lambda: connection.recv(65536), b""))
    assert re.findall(rb"HTTP/1.1 (\d+)", received) == [b"200"] * 4
    assert [request.body for request in server.requests[-4:]] == [*[HELLO_REQUEST] * 3, None]


def test_active_connection_stays_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each request restarts the idle timeout, although the connection is idle at every check."""
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    monkeypatch.setattr("kedge.server.connections.time", clock)

    def look(server: TestServer) -> None:
        running = server._server
        assert running.loop is not None
        asyncio.run_coroutine_threadsafe(running.on_tick(1), running.loop).result(TIMEOUT)

    with serve(limits=Limits(idle_seconds=60)) as server:
        connection = HTTPConnection(*server.address, timeout=TIMEOUT)
        connection.connect()
        first = connection.sock
        for _ in range(4):
            connection.request("GET", "/healthz")
            assert connection.getresponse().read() == b'{"status":"ok"}'
            assert connection.sock is first
            look(server)
            clock.now += 50
        look(server)
        clock.now += 50
        look(server)
        assert first.recv(1) == b""
        connection.close()


def test_a_rejected_routine_request_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """What monitoring requests is logged at DEBUG, unless it is rejected."""
    caplog.set_level(logging.DEBUG, "kedge.access")
    with serve(token="secret") as server, open_client(server) as http:
        http.get("/healthz")
        http.get("/metrics")
    levels = [each.levelname for each in caplog.records if each.name == "kedge.access"]
    assert levels == ["DEBUG", "INFO"]


def test_token_is_required_if_set() -> None:
    """A missing or wrong token is a 401 error on every route except the health check."""
    with serve(token="sésame") as server, open_client(server) as http:
        for authorization in ("", "Basic c3Nh", "Bearer", "Bearer wrong", "Bearer sésam"):
            headers = [(b"authorization", authorization.encode())] if authorization else []
            for method, path in (("POST", "/v1/responses"), ("GET", "/v1/models"), ("GET", "/x")):
                answer = http.request(method, path, headers=headers)
                assert answer.status_code == 401
                code = "invalid_api_key" if "Bearer " in authorization else None
                assert read_error(answer)["code"] == code
                assert "sésame" not in answer.text
        right = [(b"authorization", "Bearer sésame".encode())]
        assert http.post("/v1/responses", json=HELLO_REQUEST, headers=right).status_code == 200
        assert http.get("/healthz").json() == {"status": "ok"}


@for_each(
    ("hosts", "status"),
    [
        (["127.0.0.1:8484", "localhost", "LOCALHOST:1", "[::1]:8484", "127.0.0.2"], 200),
        (["evil.example", "evil.example:8484", "localhost.evil.example", ""], 403),
    ],
)
def test_loopback_server_rejects_other_host_names(
    http: httpx2.Client, hosts: list[str], status: int
) -> None:
    """DNS rebinding fails, because other host names get a 403 error."""
    for host in hosts:
        answer = http.get("/healthz", headers={"host": host})
        assert answer.status_code == status, host
        assert status == 200 or read_error(answer)["code"] == "host_not_allowed"


def test_access_log_has_no_content(caplog: pytest.LogCaptureFixture) -> None:
    """The log has method, path, status, time and the unique request id, but no text, query or token."""
    caplog.set_level(logging.DEBUG, logger="kedge")
    hidden = {"authorization": "Bearer hidden"}
    with serve() as server, open_client(server) as http:
        inputs: list[Any] = ["confidential", [{"role": "confidential"}]]
        bodies = [{"model": "m", "input": each} for each in inputs]
        answers = [http.post("/v1/responses?key=hidden", json=b, headers=hidden) for b in bodies]
    ids = {answer.headers["x-request-id"] for answer in answers}
    assert len(ids) == 2
    for shown in (*ids, "POST /v1/responses 200", "POST /v1/responses 400"):
        assert shown in caplog.text
    assert "confidential" not in caplog.text
    assert "hidden" not in caplog.text


def test_unexpected_error_is_500(http: httpx2.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unexpected exception is a 500 error in the API's format, and the server continues to work."""
    monkeypatch.setattr("kedge.server.schema.requests.check_tool_choice", lambda *_: 1 / 0)
    answer = http.post("/v1/responses", json=HELLO_REQUEST)
    assert (answer.status_code, read_error(answer)["type"]) == (500, "server_error")
    monkeypatch.undo()
    assert http.post("/v1/responses", json=HELLO_REQUEST).status_code == 200


def test_types_of_grouped_errors_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    """The log has the type of every error of a group, and not its message."""
    inner = ExceptionGroup("tasks", [KeyError("secret"), ValueError("secret")])
    log_failure("a run failed", ExceptionGroup("all", [inner, OSError("secret")]))
    assert caplog.messages == ["a run failed: KeyError, ValueError, OSError"]
