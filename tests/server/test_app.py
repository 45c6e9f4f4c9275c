"""The HTTP around the API: routes, methods, bodies, limits, tokens and host names."""

import asyncio
import logging
import re
import socket
from contextlib import suppress
from http.client import HTTPConnection
from typing import Any

import httpx2
import pytest
from starlette.routing import Route

from kedge.server.app import ROUTES
from kedge.server.settings import Limits
from kedge.server.uvicorn_server import HeadBuffer
from kedge.testing import TestServer, serve
from server.waiting import TIMEOUT

"""How long a test waits for what must happen soon, on a busy machine."""

HELLO_REQUEST: dict[str, Any] = {"model": "m", "input": "hello"}


def read_error(answer: httpx2.Response) -> dict[str, Any]:
    """Read the error of an answer, which always has the shape of the API's."""
    body = answer.json()
    assert body.keys() == {"error"}
    assert body["error"].keys() == {"message", "type", "param", "code"}
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-request-id"].startswith("req_")
    return body["error"]


def test_an_unknown_route_is_404_in_the_shape_of_the_api(http: httpx2.Client) -> None:
    """The error names method and path."""
    answer = http.get("/v1/nothing")
    assert answer.status_code == 404
    assert read_error(answer)["message"] == "Invalid URL (GET /v1/nothing)"


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: f"{sorted(route.methods)}{route.path}")
def test_a_wrong_method_is_405_and_names_the_right_ones(http: httpx2.Client, route: Route) -> None:
    """Every path lists all the methods it knows."""
    path = re.sub(r"{.*?}", "x", route.path)
    answer = http.request("PATCH", path)
    assert answer.status_code == 405
    assert answer.json()["error"].get("code", "method_not_supported") == "method_not_supported"
    same = {
        method for other in ROUTES if other.path == route.path for method in other.methods or ()
    }
    assert same <= set(answer.headers["allow"].split(", "))


@pytest.mark.parametrize(
    "raw", [b"", b"{", b"\xff\xfe{}", b"[" * 100_000, b'{"a": NaN}', b"nothing", b'{"a": 1} x']
)
def test_a_body_that_is_not_json_is_refused(http: httpx2.Client, raw: bytes) -> None:
    """Whatever it is instead."""
    answer = http.post("/v1/responses", content=raw, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert "could not parse the JSON body" in read_error(answer)["message"]


@pytest.mark.parametrize("raw", [b"[]", b'"x"', b"1", b"null"])
def test_a_body_that_is_no_object_is_refused(http: httpx2.Client, raw: bytes) -> None:
    """JSON, but not a request."""
    answer = http.post("/v1/responses", content=raw, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert read_error(answer)


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", None])
def test_only_json_is_taken(http: httpx2.Client, kind: str | None) -> None:
    """A web page cannot post here behind its reader's back: browsers ask first for JSON."""
    headers = {} if kind is None else {"content-type": kind}
    answer = http.post("/v1/responses", content=b'{"model":"m","input":"x"}', headers=headers)
    assert answer.status_code == 400
    assert read_error(answer)["code"] == "unsupported_content_type"


def test_a_body_that_is_too_large_is_413() -> None:
    """Declared or not: it is not even read to the end."""
    with serve(limits=Limits(body_bytes=1000)) as server:
        small = httpx2.post(
            f"{server.base_url}/responses", verify=False, timeout=TIMEOUT, json=HELLO_REQUEST
        )
        assert small.status_code == 200
        big = {"model": "m", "input": "x" * 2000}
        declared = httpx2.post(
            f"{server.base_url}/responses", verify=False, timeout=TIMEOUT, json=big
        )
        chunked = httpx2.post(
            f"{server.base_url}/responses",
            verify=False,
            timeout=TIMEOUT,
            content=iter([b'{"model":"m","input":"'] + [b"x" * 100] * 20 + [b'"}']),
            headers={"content-type": "application/json"},
        )
        for answer in (declared, chunked):
            assert answer.status_code == 413
            assert read_error(answer)["code"] == "request_too_large"


def send_raw(server: TestServer, *parts: bytes) -> bytes:
    """Send bytes and read until the server closes."""
    with socket.create_connection(server.address, timeout=TIMEOUT) as connection:
        for part in parts:
            connection.sendall(part)
        received = b""
        with suppress(ConnectionResetError):
            while chunk := connection.recv(65536):
                received += chunk
    return received


def test_a_body_that_does_not_come_is_given_up() -> None:
    """A slow client cannot hold a request open for ever."""
    with serve(limits=Limits(read_seconds=0)) as server:
        answer = send_raw(
            server,
            b"POST /v1/responses HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n"
            b"Content-Type: application/json\r\nConnection: close\r\n\r\n{",
        )
    assert answer.startswith(b"HTTP/1.1 408")
    assert b"request_timeout" in answer


@pytest.mark.parametrize("size", [8192, 200_000])
def test_headers_have_a_limit(size: int) -> None:
    """Beyond it the server refuses: with an error of the API, or before it has read them all."""
    with serve(limits=Limits(header_bytes=4096)) as server:
        request = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nX: "
        answer = send_raw(server, request + b"x" * size + b"\r\n\r\n")
    status = answer[9:12]
    assert status in ({b"431", b"400"} if size < 65_536 else {b"400", b""})
    assert status != b"431" or b"request_headers_too_large" in answer


@pytest.mark.parametrize("begun", [b"", b"GET /healthz HTTP/1.1\r\nX: "])
def test_a_connection_that_asks_nothing_is_closed(begun: bytes) -> None:
    """Also one that never finishes its headers."""
    with serve(limits=Limits(idle_seconds=0)) as server:
        assert send_raw(server, begun) == b""


class FakeClock:
    """A clock that the test sets."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


def test_a_connection_that_goes_on_asking_stays_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each request begins the waiting anew, though the connection is quiet whenever it is looked at."""
    hours = FakeClock()
    monkeypatch.setattr("kedge.server.uvicorn_server.time", hours)

    def look(server: TestServer) -> None:
        inside = server._server
        assert inside.loop is not None
        asyncio.run_coroutine_threadsafe(inside.on_tick(1), inside.loop).result(TIMEOUT)

    with serve(limits=Limits(idle_seconds=60)) as server:
        connection = HTTPConnection(*server.address, timeout=TIMEOUT)
        connection.connect()
        first = connection.sock
        for _ in range(4):
            connection.request("GET", "/healthz")
            assert connection.getresponse().read() == b'{"status":"ok"}'
            assert connection.sock is first
            look(server)
            hours.now += 50
        look(server)
        hours.now += 50
        look(server)
        assert first.recv(1) == b""
        connection.close()


class RecordingTransport(asyncio.Transport):
    """A transport that records what is written to it."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []
        self.is_closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written.append(bytes(data))

    def close(self) -> None:
        self.is_closed = True

    def is_closing(self) -> bool:
        return self.is_closed

    def resume_reading(self) -> None:
        raise NotImplementedError


async def test_the_head_of_a_response_is_sent_with_its_body() -> None:
    """In one write; alone only if nothing follows in the same turn of the loop, or at the end."""
    transport = RecordingTransport()
    buffer = HeadBuffer(transport, asyncio.get_running_loop())
    for body in (b"one", b"HTTP/1.0"):
        buffer.write(b"HTTP/1.1 200 OK ")
        buffer.write(b"")
        assert transport.written == []
        buffer.write(body)
        buffer.write(b"more")
        assert transport.written == [b"HTTP/1.1 200 OK " + body, b"more"]
        await asyncio.sleep(0)
        assert transport.written == [b"HTTP/1.1 200 OK " + body, b"more"]
        transport.written.clear()
    buffer.write(b"HTTP/1.1 200 OK ")
    await asyncio.sleep(0)
    assert transport.written == [b"HTTP/1.1 200 OK "]
    buffer.write(b"HTTP/1.1 204 ")
    buffer.close()
    assert transport.written == [b"HTTP/1.1 200 OK ", b"HTTP/1.1 204 "]
    assert buffer.is_closing()


def test_parameters_nested_too_deeply_are_refused(http: httpx2.Client) -> None:
    """A tool's schema is free, but not bottomless."""
    deep: dict[str, Any] = {}
    for _ in range(150):
        deep = {"properties": deep}
    tool = {"type": "function", "name": "f", "parameters": deep}
    answer = http.post("/v1/responses", json={**HELLO_REQUEST, "tools": [tool]})
    assert answer.status_code == 400
    assert read_error(answer)["code"] == "object_above_max_depth"


def test_a_token_is_required_where_one_is_set() -> None:
    """No token, another scheme, a wrong token: 401; the right one: 200; health is open."""
    with (
        serve(token="sésame") as server,
        httpx2.Client(base_url=server.url, verify=False, timeout=TIMEOUT) as http,
    ):
        for given, code in (
            (None, None),
            ("Basic c3Nh", None),
            ("Bearer", None),
            ("Bearer wrong", "invalid_api_key"),
            ("Bearer sésam", "invalid_api_key"),
        ):
            headers = [] if given is None else [(b"authorization", given.encode())]
            for answer in (
                http.post("/v1/responses", json=HELLO_REQUEST, headers=headers),
                http.get("/v1/models", headers=headers),
                http.get("/nowhere", headers=headers),
            ):
                assert answer.status_code == 401
                assert read_error(answer)["code"] == code
                assert "sésame" not in answer.text
        right = [(b"authorization", "Bearer sésame".encode())]
        assert http.post("/v1/responses", json=HELLO_REQUEST, headers=right).status_code == 200
        assert http.get("/healthz").json() == {"status": "ok"}


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:8484", 200),
        ("localhost", 200),
        ("LOCALHOST:1", 200),
        ("[::1]:8484", 200),
        ("evil.example", 403),
        ("evil.example:8484", 403),
        ("localhost.evil.example", 403),
        ("", 403),
    ],
)
def test_a_loopback_server_answers_to_loopback_names_only(
    http: httpx2.Client, host: str, status: int
) -> None:
    """A page that rebinds its own name to 127.0.0.1 gets nothing."""
    answer = http.get("/healthz", headers={"host": host})
    assert answer.status_code == status
    if status == 403:
        assert read_error(answer)["code"] == "host_not_allowed"


def test_models_are_listed(http: httpx2.Client) -> None:
    """There is one; any name is answered by it."""
    (model,) = http.get("/v1/models").json()["data"]
    assert (model["id"], model["object"]) == ("practice", "model")


def test_cancelling_and_resuming_are_refused(http: httpx2.Client) -> None:
    """No response here runs in the background."""
    id_ = http.post("/v1/responses", json=HELLO_REQUEST).json()["id"]
    answer = http.post(f"/v1/responses/{id_}/cancel")
    assert answer.status_code == 400
    assert read_error(answer)["message"] == "Cannot cancel a synchronous response."
    assert http.post("/v1/responses/resp_x/cancel").status_code == 404
    answer = http.get(f"/v1/responses/{id_}?stream=true")
    assert read_error(answer)["param"] == "stream"


def test_the_access_log_does_not_tell_what_was_said(caplog: pytest.LogCaptureFixture) -> None:
    """Method, path, status, time and request id; no text, no query, no token."""
    with (
        caplog.at_level(logging.DEBUG, logger="kedge"),
        serve() as server,
        httpx2.Client(base_url=server.url, verify=False, timeout=TIMEOUT) as http,
    ):
        answer = http.post(
            "/v1/responses?key=hidden",
            json={"model": "m", "input": "confidential"},
            headers={"authorization": "Bearer hidden"},
        )
        http.post("/v1/responses", json={"model": "m", "input": [{"role": "confidential"}]})
    assert answer.headers["x-request-id"] in caplog.text
    assert "POST /v1/responses 200" in caplog.text
    assert "POST /v1/responses 400" in caplog.text
    assert "confidential" not in caplog.text
    assert "hidden" not in caplog.text


def test_every_request_has_an_id_of_its_own(http: httpx2.Client) -> None:
    """Whatever its answer."""
    answers = [http.get("/healthz"), http.get("/x"), http.post("/v1/responses", json=HELLO_REQUEST)]
    ids = {answer.headers["x-request-id"] for answer in answers}
    assert len(ids) == 3


def test_a_bug_is_a_500_in_the_shape_of_the_api(
    server: TestServer, http: httpx2.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the server goes on."""
    monkeypatch.setattr("kedge.server.prepare.check_supported", lambda _: 1 / 0)
    answer = http.post("/v1/responses", json=HELLO_REQUEST)
    assert answer.status_code == 500
    assert answer.json()["error"]["type"] == "server_error"
    monkeypatch.undo()
    assert http.post("/v1/responses", json=HELLO_REQUEST).status_code == 200
