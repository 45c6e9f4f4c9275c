"""Tests that a proxy forwards nothing of another client and nothing outside of its base URL."""

import asyncio
import http.client
import json
import socket
import threading
from base64 import b64encode
from collections.abc import AsyncIterator, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2
import pytest
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route, WebSocketRoute
from starlette.types import Message
from starlette.websockets import WebSocket
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosedError, InvalidStatus
from websockets.sync.client import connect as connect_socket
from websockets.typing import Subprotocol

from app_thread import serve_app
from chaining.proxy.running import open_asgi, open_store, serve_proxy
from engines.fake_server import serve_bytes, serve_handler
from for_each import for_each
from kedge.chaining.proxy import app as proxy_app
from kedge.chaining.proxy import create_proxy_app
from kedge.server.settings import Limits

LIMIT = 300


@dataclass
class Upstream:
    """An upstream that records the requests it receives."""

    url: str = ""
    seen: list[tuple[str, str, dict[str, str], bytes]] = field(
        default_factory=list[tuple[str, str, dict[str, str], bytes]]
    )
    waiting: threading.Event = field(default_factory=threading.Event)
    left: threading.Event = field(default_factory=threading.Event)
    close: tuple[int, str] = (0, "")

    def build(self) -> Starlette:
        methods = ["GET", "POST", "DELETE", "PROPFIND", "TRACE"]
        return Starlette(
            routes=[
                Route("/v1/wait", self.wait, methods=methods),
                Route("/v1/responses", self.wait, methods=methods),
                Route("/v1/cut", self.cut),
                Route("/v1/redirects/{status:int}", self.redirect_request, methods=methods),
                Route("/{path:path}", self.echo, methods=methods),
                WebSocketRoute("/v1/denied", self.deny),
                WebSocketRoute("/v1/realtime", self.echo_socket),
                WebSocketRoute("/v1/closing", self.close_socket),
            ]
        )

    async def echo(self, request: Request) -> Response:
        try:
            body = await request.body()
        except ClientDisconnect:
            self.left.set()
            return Response()
        self.seen.append((request.method, request.url.path, dict(request.headers), body))
        answer = JSONResponse({})
        answer.set_cookie("session", "of-the-first-client")
        return answer

    async def wait(self, request: Request) -> Response:
        await request.body()
        self.waiting.set()
        while (await request.receive())["type"] != "http.disconnect":
            pass
        self.left.set()
        return Response()

    async def cut(self, request: Request) -> Response:
        async def chunks() -> AsyncIterator[bytes]:
            yield b"only this"

        return StreamingResponse(chunks(), headers={"content-length": "100"})

    async def deny(self, socket: WebSocket) -> None:
        rejection = JSONResponse({"error": "no key"}, 401, {"retry-after": "7"})
        await socket.send_denial_response(rejection)

    async def redirect_request(self, request: Request) -> Response:
        target = request.query_params["to"].replace("UPSTREAM", self.url)
        return Response(status_code=request.path_params["status"], headers={"location": target})

    async def echo_socket(self, socket: WebSocket) -> None:
        await socket.accept("realtime")
        await socket.send_json(dict(socket.headers))
        await socket.close()

    async def close_socket(self, socket: WebSocket) -> None:
        await socket.accept(headers=[(b"x-request-id", b"req_1")])
        message = await socket.receive()
        if message["type"] == "websocket.receive":
            await socket.close(3000, "invalid key")
            return
        self.close = message["code"], message["reason"]
        self.left.set()


@pytest.fixture
def upstream() -> Iterator[Upstream]:
    server = Upstream()
    with serve_app(server.build()) as url:
        server.url = url
        yield server


@pytest.fixture
def proxy(upstream: Upstream) -> Iterator[str]:
    with serve_proxy(f"{upstream.url}/v1") as url:
        yield url


def request(proxy: str, method: str, path: str, **options: Any) -> int:
    """Send a request exactly as written and return the status of its response."""
    with closing(open_connection(proxy)) as connection:
        connection.request(method, path, **options)
        answer = connection.getresponse()
        answer.read()
        return answer.status


def test_cookies_of_one_client_do_not_reach_another(upstream: Upstream, proxy: str) -> None:
    """Cookies of the upstream are forwarded to the client that received them and are not stored."""
    with httpx2.Client() as first, httpx2.Client() as second:
        assert first.get(f"{proxy}/v1/a").cookies["session"] == "of-the-first-client"
        second.get(f"{proxy}/v1/b")
        first.get(f"{proxy}/v1/c")
    cookies = [headers.get("cookie") for _, _, headers, _ in upstream.seen]
    assert cookies == [None, None, "session=of-the-first-client"]


def test_no_header_is_added(upstream: Upstream, proxy: str) -> None:
    """A request with one header arrives with one header, besides that of its connection."""
    assert send_raw(proxy, b"GET /v1/plain HTTP/1.1\r\nhost: localhost\r\n\r\n")[0] == 200
    assert upstream.seen[-1][2].keys() - {"connection"} == {"host"}


def test_the_length_of_a_body_is_forwarded(upstream: Upstream, proxy: str) -> None:
    """Some upstreams need it, also of an empty body."""
    request(proxy, "POST", "/v1/files", body=b"abc", headers={"content-type": "text/plain"})
    request(proxy, "POST", "/v1/responses/resp_1/cancel")
    assert [headers["content-length"] for _, _, headers, _ in upstream.seen] == ["3", "0"]
    assert all("transfer-encoding" not in headers for _, _, headers, _ in upstream.seen)
    assert [body for *_, body in upstream.seen] == [b"abc", b""]


@for_each("method", ["DELETE", "PROPFIND", "TRACE"])
def test_every_method_is_forwarded_with_its_body(
    upstream: Upstream, proxy: str, method: str
) -> None:
    """Also methods that HTTP does not define, and bodies in chunks."""
    assert request(proxy, method, "/v1/files", body=iter([b"ab", b"c"])) == 200
    sent_method, path, _, body = upstream.seen[-1]
    assert (sent_method, path, body) == (method, "/v1/files", b"abc")


def send_raw(proxy: str, content: bytes) -> tuple[int, bytes]:
    """Send a request exactly as written and return the status and the body of its response."""
    address = urlsplit(proxy)
    with socket.create_connection((address.hostname, address.port), LIMIT) as connection:
        connection.sendall(content)
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        return answer.status, answer.read()


def open_connection(proxy: str) -> http.client.HTTPConnection:
    return http.client.HTTPConnection(urlsplit(proxy).netloc, timeout=LIMIT)


def test_a_request_that_servers_read_differently_is_no_other_request(
    upstream: Upstream, proxy: str
) -> None:
    """A chunked body with a length is rejected, or forwarded without the length; a URL that is too long is rejected."""
    head = b"POST /v1/files HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\n"
    body = b"transfer-encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n"
    assert send_raw(proxy, head + body)[0] in (200, 400)
    for _, _, headers, received in upstream.seen:
        assert received == b"hi"
        assert "content-length" not in headers
    long = b"GET /v1/models?name=" + b"a" * 66_000 + b" HTTP/1.1\r\nhost: localhost\r\n\r\n"
    assert send_raw(proxy, long)[0] == 400


async def test_the_client_determines_how_long_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The proxy waits longer than clients do for an answer, and reports soon that there is no connection."""
    timeouts: list[dict[str, float]] = []

    def respond(request: httpx2.Request) -> httpx2.Response:
        timeouts.append(request.extensions["timeout"])
        raise httpx2.ConnectTimeout("")

    create_client = partial(httpx2.AsyncClient, transport=httpx2.MockTransport(respond))
    monkeypatch.setattr(proxy_app, "_create_client", create_client)
    async with open_asgi() as client:
        answer = await client.post("/v1/responses", json={"input": "Hello"})
    assert (answer.status_code, answer.json()["error"]["type"]) == (502, "kedge_proxy")
    assert answer.json()["error"]["message"].endswith(": ConnectTimeout")
    assert timeouts[0]["connect"] < 600 < timeouts[0]["read"]  # the timeout of the SDKs


async def test_an_unknown_route_is_an_error_of_the_proxy() -> None:
    """A client whose base URL lacks `/v1` gets an error in the form of the API that says what is forwarded."""
    async with open_asgi() as client:
        answer = await client.post("/responses", json={"input": "Hello"})
        wrong_method = await client.post("/healthz")
    allowed = set(wrong_method.headers["allow"].split(", "))
    assert (wrong_method.status_code, allowed) == (405, {"GET", "HEAD"})
    assert (answer.status_code, answer.json()["error"]["type"]) == (404, "kedge_proxy")
    assert "/v1" in answer.json()["error"]["message"]


async def test_an_invalid_status_is_a_bad_gateway() -> None:
    """A status that the HTTP server cannot send is reported to the client."""
    async with open_asgi(lambda _: httpx2.Response(700)) as client:
        answer = await client.get("/v1/models")
    assert answer.status_code == 502
    assert "700" in answer.json()["error"]["message"]


@for_each(
    ("status", "target", "location"),
    [
        (307, "UPSTREAM/v1/files?a=b", "/v1/files?a=b"),
        (301, "../files", "/v1/files"),
        (302, "/v1/files", "/v1/files"),
        (302, "/login", None),
        (307, "UPSTREAM/v10/files", None),
        (307, "https://other.example/v1/files", None),
        (308, "//other.example/v1/files", None),
        (302, "http://[/v1", None),
        (201, "https://other.example/v1/files", "https://other.example/v1/files"),
    ],
)
def test_a_redirect_does_not_leave_the_proxy(
    proxy: str, status: int, target: str, location: str | None
) -> None:
    """Clients send their request and their keys again to the address of a redirect."""
    answer = httpx2.post(f"{proxy}/v1/redirects/{status}", params={"to": target})
    assert answer.status_code == status
    assert answer.headers.get("location") == location


def test_the_password_of_an_upstream(upstream: Upstream, tmp_path: Path) -> None:
    """It replaces the client's key, redirects are followed below the proxy, and it is not stored."""
    address = upstream.url.replace("//", "//ada:secret@")
    login = f"Basic {b64encode(b'ada:secret').decode()}"
    headers = {"authorization": "Bearer key"}
    with open_store(tmp_path) as store:
        with serve_proxy(f"{address}/v1", store=store) as proxy:
            for target in ("UPSTREAM/v1/files", "files"):
                answer = httpx2.get(f"{proxy}/v1/redirects/307?to={target}")
                assert answer.headers["location"].startswith("/v1/")
            httpx2.post(f"{proxy}/v1/x/responses", json={}, headers=headers)
            assert upstream.seen[-1][2]["authorization"] == login
            url = f"{proxy.replace('http', 'ws')}/v1/realtime"
            protocols = [Subprotocol("realtime")]
            with connect_socket(url, additional_headers=headers, subprotocols=protocols) as client:
                assert json.loads(client.recv())["authorization"] == login
        [row] = asyncio.run(store.list_proxied())
    assert row.upstream == f"{upstream.url}/v1"


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [("POST", "/v1/responses", b'{"model":"m","input":"Hi"}'), ("GET", "/v1/wait", None)],
)
def test_a_disconnecting_client_closes_its_upstream_request(
    upstream: Upstream, proxy: str, method: str, path: str, body: bytes | None
) -> None:
    """The upstream request is closed also before its response, so that nothing is generated in vain."""
    connection = open_connection(proxy)
    connection.request(method, path, body, {"content-type": "application/json"})
    assert upstream.waiting.wait(LIMIT)
    connection.close()
    assert upstream.left.wait(LIMIT)


async def test_a_cancelled_request_ends() -> None:
    """A stopping server cancels its requests while their clients are still connected."""
    waiting = asyncio.Event()
    left = asyncio.Event()

    async def wait(_: httpx2.Request) -> httpx2.Response:
        waiting.set()
        try:
            await asyncio.Event().wait()
        finally:
            left.set()
        return httpx2.Response(200)

    async with open_asgi(wait) as client:
        task = asyncio.create_task(client.get("/v1/models"))
        await asyncio.wait_for(waiting.wait(), LIMIT)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(task, LIMIT)
    assert left.is_set()


def test_an_interrupted_upload_is_not_an_error(
    upstream: Upstream, caplog: pytest.LogCaptureFixture
) -> None:
    """A client that disconnects during its upload leaves no traceback."""
    with serve_proxy(f"{upstream.url}/v1") as proxy:
        for path in ("/v1/responses", "/v1/files"):
            connection = open_connection(proxy)
            connection.putrequest("POST", path)
            connection.putheader("content-length", "100")
            connection.endheaders(b"abc")
            connection.close()
        assert upstream.left.wait(LIMIT)
    assert not [record for record in caplog.records if record.exc_info]


@for_each("path", ["/v1/responses", "/v1/files"])
def test_an_upload_that_does_not_continue_ends(upstream: Upstream, path: str) -> None:
    """A client whose connection is half open does not occupy the proxy and the upstream forever."""
    with serve_proxy(f"{upstream.url}/v1", limits=Limits(read_seconds=0.01)) as proxy:
        connection = open_connection(proxy)
        connection.putrequest("POST", path)
        connection.putheader("content-length", "100")
        connection.endheaders(b"abc")
        answer = connection.getresponse()
        message = b"no part of the request body arrived for 0.01 seconds"
        assert (answer.status, message in answer.read()) == (408, True)
        connection.close()


def test_a_tunnel_is_not_opened(
    upstream: Upstream, proxy: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A response to CONNECT would change the protocol, so the upstream receives no such request."""
    assert request(proxy, "CONNECT", "/v1/models") == 400
    assert upstream.seen == []
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_an_upload_that_the_upstream_does_not_read_ends() -> None:
    """An upstream that accepts a connection and reads nothing does not occupy the proxy for hours."""
    limits = Limits(write_seconds=0.1)
    with socket.create_server(("127.0.0.1", 0)) as upstream:
        port = upstream.getsockname()[1]
        with serve_proxy(f"http://127.0.0.1:{port}/v1", limits=limits) as proxy:
            content = b"x" * 40_000_000  # more than the buffers of the connections hold
            answer = httpx2.post(f"{proxy}/v1/files", content=content, timeout=LIMIT)
    assert answer.status_code == 502
    assert "could not be reached" in answer.json()["error"]["message"]


def test_a_cut_response_is_cut_for_the_client(
    upstream: Upstream, proxy: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The client gets a protocol error, and the log has one record."""
    with pytest.raises(httpx2.RemoteProtocolError):
        httpx2.get(f"{proxy}/v1/cut")
    assert "the upstream cut off its response" in caplog.text
    proxied = [record for record in caplog.records if record.name == "kedge.chaining.proxy"]
    assert len(proxied) == 1


@for_each(("seconds", "connections"), [(300.0, 1), (-1.0, 2)])
def test_an_idle_connection_is_not_used_again(
    monkeypatch: pytest.MonkeyPatch, seconds: float, connections: int
) -> None:
    """After the time of Kedge's own client, because the upstream may be closing it."""
    monkeypatch.setattr(proxy_app, "KEEP_ALIVE", seconds)
    ports = set[int]()

    async def answer(request: Request) -> Response:
        assert request.client is not None
        ports.add(request.client.port)
        return Response()

    with serve_handler(answer) as url, serve_proxy(url) as proxy:
        for _ in range(2):
            assert httpx2.get(f"{proxy}/v1/models").status_code == 200
    assert len(ports) == connections


def test_an_error_does_not_quote_the_upstream(caplog: pytest.LogCaptureFixture) -> None:
    """Bytes that are no response may be the rest of one for another client."""
    with serve_bytes(b"of another client\r\n\r\n") as url, serve_proxy(url) as proxy:
        answer = httpx2.get(f"{proxy}/v1/models")
    message = "the upstream could not be reached: illegal status line"
    assert (answer.status_code, answer.json()["error"]["message"]) == (502, message)
    assert message in caplog.text
    assert "another" not in caplog.text


@for_each(
    ("path", "status", "message"),
    [("/v1/responses", 502, "could not be reached"), ("/v1/%2e%2e/x", 400, "cannot be forwarded")],
)
async def test_a_websocket_that_is_not_forwarded_has_the_error_of_a_request(
    path: str, status: int, message: str
) -> None:
    """The handshake is rejected with the status and the message that a request gets."""
    with serve_proxy("http://127.0.0.1:1/v1") as proxy:
        rejected = httpx2.get(proxy + path)
        with pytest.raises(InvalidStatus) as exc_info:
            await connect(proxy.replace("http", "ws", 1) + path)
    response = exc_info.value.response
    assert rejected.status_code == response.status_code == status
    assert message in rejected.text
    assert message.encode() in (response.body or b"")


async def test_the_websocket_handshake_is_forwarded(upstream: Upstream, proxy: str) -> None:
    """The headers, the subprotocol and the response of an upstream that rejects it are forwarded."""
    url = proxy.replace("http", "ws", 1)
    headers = {"api-key": "azure", "x-kedge-token": "secret"}
    protocols = [Subprotocol("realtime")]
    async with connect(
        f"{url}/v1/realtime", additional_headers=headers, subprotocols=protocols
    ) as socket:
        assert socket.subprotocol == "realtime"
        received = json.loads(await socket.recv())
    assert received["api-key"] == "azure"
    assert "secret" not in str(received)
    with pytest.raises(InvalidStatus) as exc_info:
        await connect(f"{url}/v1/denied")
    response = exc_info.value.response
    assert (response.status_code, response.headers["retry-after"]) == (401, "7")


async def test_the_close_of_a_websocket_is_forwarded(upstream: Upstream, proxy: str) -> None:
    """Each side gets the other's close code and reason, and the client gets the upstream's headers."""
    url = f"{proxy.replace('http', 'ws', 1)}/v1/closing"
    async with connect(url) as socket:
        assert socket.response is not None
        assert socket.response.headers["x-request-id"] == "req_1"
        with suppress(ConnectionClosedError):  # if the upstream closes while the client still sends
            for _ in range(500):
                await socket.send("Hello")
        with pytest.raises(ConnectionClosedError):
            await socket.recv()
        assert (socket.close_code, socket.close_reason) == (3000, "invalid key")
    async with connect(url) as socket:
        await socket.close(4001, "done")
    assert await asyncio.to_thread(upstream.left.wait, LIMIT)
    assert upstream.close == (4001, "done")


@pytest.mark.parametrize("last", ["websocket.accept", "websocket.send", "websocket.close"])
async def test_a_client_that_leaves_during_a_websocket_message_is_no_error(
    last: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing can be passed on any more, and the connection to the upstream is closed."""
    closed = threading.Event()

    async def respond(socket: WebSocket) -> None:
        await socket.accept()
        if last != "websocket.close":
            await socket.send_text("Hello")
            await socket.receive()
        closed.set()

    sent: list[str] = []

    async def receive() -> Message:
        if not sent:
            sent.append("connect")
            return {"type": "websocket.connect"}
        await asyncio.Event().wait()
        return {}

    async def send(message: Message) -> None:
        sent.append(message["type"])
        if message["type"] == last:
            raise OSError("the client is gone")

    with serve_app(Starlette(routes=[WebSocketRoute("/v1/realtime", respond)])) as url:
        app = create_proxy_app(f"{url}/v1", any_host=True)
        scope = {"type": "websocket", "path": "/v1/realtime", "query_string": b"", "headers": []}
        await asyncio.wait_for(app({**scope, "subprotocols": []}, receive, send), LIMIT)
        assert await asyncio.to_thread(closed.wait, LIMIT)
    first = [] if last == "websocket.accept" else ["websocket.accept"]
    assert sent == ["connect", *first, last]
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_many_requests_are_forwarded_at_the_same_time() -> None:
    """The number of concurrent requests is not limited to a pool of a hundred connections."""
    count = 120
    arrived = 0
    all_here = asyncio.Event()

    async def hold(_: Request) -> Response:
        nonlocal arrived
        arrived += 1
        if arrived == count:
            all_here.set()
        await asyncio.wait_for(all_here.wait(), LIMIT)
        return JSONResponse({})

    with serve_app(Starlette(routes=[Route("/v1/models", hold)])) as url:
        async with open_asgi(upstream=url) as client:
            answers = await asyncio.gather(*(client.get("/v1/models") for _ in range(count)))
    assert {each.status_code for each in answers} == {200}
