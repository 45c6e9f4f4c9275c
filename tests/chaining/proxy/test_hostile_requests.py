"""Table tests: which servers receive a hostile request, and with which credentials.

Every entry is sent through a proxy and to a server, each over HTTP and as the handshake of a WebSocket. A second
server stands for a host of an attacker; nothing may ever reach it.
"""

import socket
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.types import Scope
from starlette.websockets import WebSocket

from app_thread import serve_app
from chaining.proxy.running import serve_proxy
from for_each import for_each
from kedge.testing.server import serve

LIMIT = 60
LOGIN = f"Basic {b64encode(b'svc:secret').decode()}"
HANDSHAKE = (
    "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
)
PATHS = r"""
    /v1%2F@EVIL/x /v1%2f@EVIL/x /v1%2Fx /v1%2F..%2Fx /v1%5C@EVIL/x /v1%3F@EVIL/x /v1%23@EVIL/x
    /%76%31/x /%76%31%2F@EVIL/x /%2Fv1/x //v1/x //EVIL/v1/x /v1 /v1@EVIL/x /v1:80@EVIL/x /v1.EVIL/x
    /v1//EVIL/x /v1//@EVIL/x /v1/./x /v1/../x /v1/../../x /v1/%2e%2e/x /v1/%2E%2e%2fx
    /v1/%252e%252e/x /v1/..;/x /v1/..;a=b/x /v1/..%3b/x /..;/v1/x /../v1/x /v1/a/..\..\x
    /v1/\\EVIL/x \v1\x /v1/x#@EVIL/ /v1/x%0d%0aHost:%20EVIL http://EVIL/v1/x
    http://EVIL/v1%2F@EVIL/x http://svc:secret@EVIL/v1/x ws://EVIL/v1/x EVIL:80 @EVIL/v1/x
    * ?@EVIL/v1/x #@EVIL/v1/x
"""
"""Request targets that are rejected, and that no server receives; EVIL is the address of the attacker's server."""
FORWARDED = """
    /v1/x /v1/@EVIL/x /v1/%40EVIL/x /v1/x%2F@EVIL /v1/http://EVIL/x /v1/x?@EVIL/
    /v1/x?url=http://EVIL/#@EVIL /v1/x/a//b /v1/models/org%2Fmodel
"""
"""Unusual request targets that the upstream, and nobody else, receives."""
HEADERS = [
    "Host: localhost\r\nX-Forwarded-Host: EVIL\r\nX-Forwarded-For: EVIL\r\nForwarded: host=EVIL",
    "Host: localhost\r\nX-Original-URL: http://EVIL/\r\nX-Rewrite-URL: http://EVIL/",
    "Host: localhost\r\nReferer: http://EVIL/\r\nLocation: http://EVIL/",
    "Host: localhost\r\nOpenAI-Base-Url: http://EVIL/v1",
    "Host: localhost\r\nConnection: close, x-kedge-token",
]
"""Headers that do not change who receives a request."""
UNUSUAL_HEADERS = ["Host: localhost\r\nX-Folded: a\r\n Host: EVIL"]
"""Headers that a parser may reject."""
REJECTED_HEADERS = [
    "Host: evil.example",
    "Host: EVIL.example",
    "Host: localhost@EVIL.example",
    "Host: ",
    "Host: localhost\r\nHost: EVIL",
]
"""Headers with which a request is rejected."""
CROSS_SITE = [
    "Origin: http://evil.example\r\n",
    "Origin: http://localhost:3000\r\n",
    "Origin: null\r\n",
    "Sec-Fetch-Site: cross-site\r\n",
    "Sec-Fetch-Site: same-site\r\n",
    "Sec-Fetch-Site: Cross-Site\r\nSec-Fetch-Mode: no-cors\r\nSec-Fetch-Dest: image\r\n",
    "Origin: http://evil.example\r\nSec-Fetch-Site: cross-site\r\n",
]
"""Headers of browsers, for a page of another origin."""
SAME_SITE = [
    "",
    "Origin: http://PROXY\r\n",
    "Sec-Fetch-Site: none\r\n",
    "Origin: http://PROXY\r\nSec-Fetch-Site: same-origin\r\n",
]
"""Headers of programs, and of browsers for a page of the same origin. PROXY is the host of the proxy."""
BODIES = [
    b'{"model":"m","input":"Hi","base_url":"http://EVIL/v1"}',
    b'{"model":"m","input":"Hi","background":true,"webhook":"http://EVIL/"}',
    b'{"model":"m","input":[{"role":"user","content":[{"type":"input_image","image_url":"http://EVIL/a"}]}]}',
    b'{"model":"m","input":[{"role":"user","content":[{"type":"input_file","file_url":"http://EVIL/a"}]}]}',
    b'{"model":"m","input":"Hi","tools":[{"type":"mcp","server_label":"a","server_url":"http://EVIL/"}]}',
    b'{"model":"http://EVIL/v1#m","input":"Hi"}',
    b'{"model":"responses:http://EVIL/v1#m","input":"Hi"}',
    b'{"model":"m","input":"Hi","previous_response_id":"../../@EVIL/x"}',
    b'{"model":"m","input":"Hi","conversation":"@EVIL/x"}',
    b"GET http://EVIL/ HTTP/1.1\r\nHost: EVIL\r\n\r\n",
    b"\x1f\x8b\x08\x00",
    b"[" * 10_000,
]
"""Bodies that do not change who receives a request."""


@dataclass
class RecordingServer:
    """A server that records the targets and the credentials of everything it receives."""

    url: str = ""
    redirect_to: str = ""
    seen: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])

    @property
    def address(self) -> str:
        return self.url.removeprefix("http://")

    @contextmanager
    def run(self) -> Iterator["RecordingServer"]:
        route = Route("/{path:path}", self.answer, methods=["GET", "POST"])
        app = Starlette(routes=[route, WebSocketRoute("/{path:path}", self.answer_socket)])
        with serve_app(app) as self.url:
            yield self

    def record(self, scope: Scope) -> None:
        credentials = [v.decode() for k, v in scope["headers"] if k == b"authorization"]
        self.seen.append((scope["raw_path"].decode(), ", ".join(credentials)))

    async def answer(self, request: Request) -> Response:
        self.record(request.scope)
        return RedirectResponse(self.redirect_to) if self.redirect_to else JSONResponse({})

    async def answer_socket(self, socket: WebSocket) -> None:
        self.record(socket.scope)
        if self.redirect_to:
            await socket.send_denial_response(RedirectResponse(self.redirect_to))
        else:
            await socket.accept()
            await socket.close()


@dataclass
class Servers:
    """A proxy in front of an upstream, a server, and the server of the attacker."""

    proxy: str
    server: str
    base_path: str
    upstream: RecordingServer
    evil: RecordingServer


@pytest.fixture(scope="module", params=["", "/base"])
def running(request: pytest.FixtureRequest) -> Iterator[Servers]:
    """Yield the servers; the base URL of the upstream has a path, or none."""
    with RecordingServer().run() as upstream, RecordingServer().run() as evil, serve() as server:
        address = f"http://svc:secret@{upstream.address}{request.param}"
        with serve_proxy(address) as proxy:
            yield Servers(proxy, server.url, request.param, upstream, evil)


@pytest.fixture
def servers(running: Servers) -> Iterator[Servers]:
    """Yield the servers, and check that nothing has reached the attacker."""
    running.upstream.seen.clear()
    yield running
    assert running.evil.seen == []


def send(url: str, request: bytes) -> int:
    """Send a request exactly as written and return the status of its response, 0 for none."""
    name, _, port = url.removeprefix("http://").partition(":")
    with socket.create_connection((name, int(port)), LIMIT) as connection:
        connection.sendall(request)
        answer = b""
        with suppress(ConnectionError):
            while chunk := connection.recv(65_536):
                answer += chunk
                if b"\r\n\r\n" in answer:
                    break
    return int(answer.split(b" ", 2)[1]) if answer.startswith(b"HTTP/1.1 ") else 0


def build_request(target: str, servers: Servers, upgrade: str) -> bytes:
    target = target.replace("EVIL", servers.evil.address)
    authorization = "Authorization: Bearer key-of-the-client\r\n"
    return f"GET {target} HTTP/1.1\r\nHost: localhost\r\n{authorization}{upgrade}\r\n".encode()


@for_each("upgrade", ["", HANDSHAKE])
@for_each("path", PATHS.split())
def test_a_path_that_leaves_the_base_url_reaches_nobody(
    servers: Servers, path: str, upgrade: str
) -> None:
    """A target whose raw form does not begin with /v1/, or that leaves the base URL, is rejected, also by a server."""
    for url in (servers.proxy, servers.server):
        assert 400 <= send(url, build_request(path, servers, upgrade)) < 500
    assert servers.upstream.seen == []


@for_each("upgrade", ["", HANDSHAKE])
@for_each("path", FORWARDED.split())
def test_an_unusual_path_reaches_only_the_upstream(
    servers: Servers, path: str, upgrade: str
) -> None:
    """It arrives below the base URL, with the upstream's own credentials; a server does not know it."""
    assert 400 <= send(servers.server, build_request(path, servers, upgrade)) < 500
    servers.upstream.seen.clear()
    status = send(servers.proxy, build_request(path, servers, upgrade))
    assert status == (101 if upgrade else 200)
    expected = path.replace("EVIL", servers.evil.address).partition("?")[0].removeprefix("/v1")
    assert servers.upstream.seen == [(servers.base_path + expected, LOGIN)]


@for_each("upgrade", ["", HANDSHAKE])
@for_each("headers", [*HEADERS, *UNUSUAL_HEADERS, *REJECTED_HEADERS])
def test_headers_do_not_choose_the_host(servers: Servers, headers: str, upgrade: str) -> None:
    """A header changes at most whether the upstream receives a request."""
    servers.upstream.seen.clear()
    text = f"GET /v1/x HTTP/1.1\r\n{headers}\r\n{upgrade}\r\n"
    content = text.replace("EVIL", servers.evil.address).encode()
    status = send(servers.proxy, content)
    is_forwarded = status in (101, 200)
    assert is_forwarded == (headers in HEADERS) or headers in UNUSUAL_HEADERS
    assert is_forwarded or 400 <= status < 500
    assert [login for _, login in servers.upstream.seen] == ([LOGIN] if is_forwarded else [])
    assert 400 <= send(servers.server, content) < 500


@for_each(
    ("start", "rest"),
    [
        ("GET /v1/models", ""),
        ("POST /v1/responses", "Content-Length: 0\r\n"),
        ("GET /v1/responses", HANDSHAKE),
    ],
)
@for_each("headers", [*CROSS_SITE, *SAME_SITE])
def test_web_pages_of_other_sites_reach_nobody(
    servers: Servers, headers: str, start: str, rest: str
) -> None:
    """Without a token, only programs and pages of the same origin reach the upstream or the server."""
    is_rejected = headers in CROSS_SITE
    servers.upstream.seen.clear()
    for url in (servers.proxy, servers.server):
        host = url.removeprefix("http://")
        sent = headers.replace("PROXY", host)
        text = f"{start} HTTP/1.1\r\nHost: {host}\r\n{sent}{rest}\r\n"
        assert send(url, text.encode()) in ([403] if is_rejected else [101, 200, 400])
    logins = [login for _, login in servers.upstream.seen]
    assert logins == ([] if is_rejected else [LOGIN])


@for_each("upgrade", ["", HANDSHAKE])
def test_a_token_replaces_the_check_of_the_origin(servers: Servers, upgrade: str) -> None:
    """A request with the token is accepted from any program, also from one that sends an origin."""
    address = f"http://svc:secret@{servers.upstream.address}{servers.base_path}"
    start = "GET /v1/responses HTTP/1.1\r\nHost: any.example"
    with serve_proxy(address, token="token") as proxy, serve(token="token") as server:
        for url, header, accepted in (
            (proxy, "x-kedge-token: ", 200),
            (server.url, "authorization: Bearer ", 405),
        ):
            text = f"{start}\r\n{CROSS_SITE[-1]}{upgrade}"
            assert send(url, f"{text}\r\n".encode()) == 401
            status = send(url, f"{text}{header}token\r\n\r\n".encode())
            assert status == (101 if upgrade else accepted)


@for_each("body", BODIES)
def test_bodies_do_not_choose_the_host(servers: Servers, body: bytes) -> None:
    """A body is passed on to the upstream; neither the proxy nor a server follows an address in it."""
    servers.upstream.seen.clear()
    body = body.replace(b"EVIL", servers.evil.address.encode())
    head = "HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    request = f"POST /v1/responses {head}Content-Length: {len(body)}\r\n\r\n".encode() + body
    assert send(servers.proxy, request) == 200
    assert servers.upstream.seen == [(f"{servers.base_path}/responses", LOGIN)]
    assert 200 <= send(servers.server, request) < 500


@for_each("upgrade", ["", HANDSHAKE])
def test_a_redirect_is_not_followed(
    servers: Servers, upgrade: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A redirect of the upstream sends neither the proxy nor its client to another host."""
    host = servers.evil.address
    for target in (f"http://{host}/v1/x", f"//{host}/x", f"ws://{host}/x"):
        monkeypatch.setattr(servers.upstream, "redirect_to", target)
        assert send(servers.proxy, build_request("/v1/x", servers, upgrade)) == 307
