"""How many connections a server has, and which of them it closes, over real sockets."""

import asyncio
import http.client
import logging
import re
import resource
import select
import socket
import subprocess
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect
from websockets.frames import Frame, Opcode
from websockets.sync.client import connect as connect_socket

from app_thread import run_server, serve_app
from for_each import for_each
from forked import ForkedProcess
from kedge.chaining.proxy import create_proxy_app
from kedge.server.connections import find_address, get_descriptor_limit, name_client
from kedge.server.settings import Limits
from kedge.testing import serve
from server.gated_model import GatedModel
from server.waiting import TIMEOUT, wait_until

RUN_LIMITED = """
import resource, sys
from kedge.__main__ import main
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv.pop(1)), int(sys.argv.pop(1))))
main()
"""
"""A program that runs a command with a soft and a hard limit of descriptors."""
GET = b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n"


class RunningCommand:
    """A server in a process of its own.

    Args:
        process_id: The id of the process.
        port: Its port.
        log: What it has written to standard error.
    """

    def __init__(self, process_id: int, port: int, log: Path) -> None:
        self.process_id = process_id
        self.port = port
        self.log = log

    def connect(self, client: str) -> socket.socket:
        """Connect to the server from an address of this machine."""
        return connect(self.port, client)

    def list_records(self) -> list[str]:
        """Return the log records, except those of requests."""
        lines = self.log.read_text().splitlines()
        return [line for line in lines if "kedge.access" not in line]


@contextmanager
def run_command(
    name: str, folder: Path, soft: int, hard: int, *more: str
) -> Iterator[RunningCommand]:
    """Run a server with these limits of descriptors, and more options, until the block ends."""
    options = {
        "serve": ["--db", ":memory:", "--no-page", "--store", str(folder / "store.db")],
        "proxy": ["--db", ":memory:", "--upstream", "http://127.0.0.1:1/v1"],
        "mcp": ["--http", "--allow-write", "--store", str(folder / "store.db")],
    }
    log = folder / "log.txt"
    with log.open("wb") as errors:
        limits = [str(soft), str(hard)]
        command = ["-c", RUN_LIMITED, *limits, name, "--port", "0", *options[name], *more]
        process = ForkedProcess(command, stdout=subprocess.PIPE, stderr=errors, text=True)
    assert process.stdout is not None
    try:
        port = int(re.findall(r"127\.0\.0\.1:(\d+)", process.stdout.readline())[0])
        yield RunningCommand(process.pid, port, log)
    finally:
        process.kill()
        process.communicate()


def connect(port: int, client: str = "127.0.0.1") -> socket.socket:
    """Connect to a server from an address of this machine."""
    return socket.create_connection(("127.0.0.1", port), TIMEOUT, source_address=(client, 0))


def read_status(connection: socket.socket) -> int:
    """Return the status of the next response, or 0 if the server closes the connection without one."""
    response = http.client.HTTPResponse(connection)
    try:
        response.begin()
    except (http.client.RemoteDisconnected, ConnectionError):
        return 0
    response.read()
    return response.status


def request_health(connection: socket.socket) -> int:
    """Return the status of a request on a connection."""
    connection.sendall(GET)
    return read_status(connection)


def count_open(connections: list[socket.socket]) -> int:
    """Return how many of these connections, on which the server sends nothing, it has not closed."""
    closed = select.poll()
    for connection in connections:
        closed.register(connection, select.POLLIN)
    return len(connections) - len(closed.poll(0))


@pytest.mark.parametrize(("name", "most"), [("serve", 204), ("proxy", 102), ("mcp", 204)])
def test_a_client_with_too_many_connections_shuts_nobody_out(
    tmp_path: Path, name: str, most: int
) -> None:
    """A server has a quarter of its connections for one client, and the log one record about more."""
    with run_command(name, tmp_path, 64, 256) as server, ExitStack() as stack:
        # The soft limit was raised to the hard one; a proxy needs two descriptors for each connection.
        assert resource.prlimit(server.process_id, resource.RLIMIT_NOFILE) == (256, 256)
        held = [stack.enter_context(server.connect("127.0.0.1")) for _ in range(400)]
        for client in ("127.0.0.1", "127.0.0.2"):
            with server.connect(client) as connection:
                assert request_health(connection) == (404 if name == "mcp" else 200)
        wait_until(lambda: count_open(held) <= most // 4)
        assert count_open(held) >= most // 4 - 1
        wait_until(server.list_records)
        [record] = server.list_records()
    assert f"127.0.0.1 has a quarter of the {most} possible connections" in record


def test_the_connections_of_a_reverse_proxy_are_those_of_many_clients(tmp_path: Path) -> None:
    """An address of the option ``--trusted-proxies`` may have more than a quarter of the connections."""
    with (
        run_command("serve", tmp_path, 128, 128, "--trusted-proxies", "127.0.0.1") as server,
        ExitStack() as stack,
    ):
        held = [stack.enter_context(server.connect("127.0.0.1")) for _ in range(60)]
        with server.connect("127.0.0.1") as connection:
            assert request_health(connection) == 200
        assert count_open(held) == 60


def test_a_server_without_descriptors_closes_idle_connections(tmp_path: Path) -> None:
    """The connections of many clients, and files, use up the descriptors; a new client is served nevertheless."""
    with run_command("serve", tmp_path, 40, 40) as server, ExitStack() as stack:
        for number in range(10, 20):
            for _ in range(8):
                stack.enter_context(server.connect(f"127.0.0.{number}"))
        with server.connect("127.0.0.1") as connection:
            assert request_health(connection) == 200
        [record] = server.list_records()
    assert "a connection could not be accepted: Too many open files" in record


class HoldingApp:
    """An app that answers when the test allows it, and accepts WebSockets."""

    def __init__(self) -> None:
        self.held = threading.Semaphore(0)
        self._release = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        routes = [
            Route("/healthz", self.answer),
            Route("/hold", self.hold),
            WebSocketRoute("/socket", self.accept),
        ]
        self.app = Starlette(routes=routes)

    async def answer(self, _: Request) -> Response:
        """Answer at once."""
        return Response()

    async def hold(self, _: Request) -> Response:
        """Answer when the test allows it."""
        self._loop = asyncio.get_running_loop()
        self.held.release()
        await self._release.wait()
        return Response()

    async def accept(self, websocket: WebSocket) -> None:
        """Accept a WebSocket until it is closed."""
        await websocket.accept()
        try:
            await websocket.receive_text()
        except WebSocketDisconnect:
            return

    def release(self) -> None:
        """Answer the requests that wait."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._release.set)


MOST = 8
"""The number of connections of a server of the tests below; one client has two of them."""


@contextmanager
def serve_few(app: HoldingApp, **options: Any) -> Iterator[int]:
    """Run a server with few connections, and yield its port."""
    each = get_descriptor_limit() // 10
    with serve_app(app.app, descriptors_each=each, **options) as url:
        yield int(url.rpartition(":")[2])


@pytest.fixture
def holding() -> HoldingApp:
    """Return an app that answers when the test allows it."""
    return HoldingApp()


def test_the_longest_idle_connection_of_a_client_is_closed(
    holding: HoldingApp, caplog: pytest.LogCaptureFixture
) -> None:
    """The connection whose last request was answered first is closed; other clients keep theirs."""
    with serve_few(holding) as port, ExitStack() as stack:
        other = stack.enter_context(connect(port, "127.0.0.2"))
        first = stack.enter_context(connect(port))
        second = stack.enter_context(connect(port))
        for connection in (other, first, second, first):
            assert request_health(connection) == 200
        third = stack.enter_context(connect(port))
        assert request_health(third) == 200
        assert read_status(second) == 0
        assert request_health(first) == 200
        fourth = stack.enter_context(connect(port))
        assert request_health(fourth) == 200
        assert read_status(third) == 0
        for connection in (first, fourth, other):
            assert request_health(connection) == 200
    records = [each.getMessage() for each in caplog.records if each.name == "kedge.server"]
    assert [each.partition(";")[0] for each in records] == [
        f"127.0.0.1 has a quarter of the {MOST} possible connections"
    ]


def test_a_connection_with_a_request_is_not_closed(holding: HoldingApp) -> None:
    """A new connection of a client all of whose connections are in use is rejected, and accepted when one is not."""
    with serve_few(holding) as port, ExitStack() as stack:
        busy = [stack.enter_context(connect(port)) for _ in range(2)]
        for connection in busy:
            connection.sendall(b"GET /hold HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert holding.held.acquire(timeout=TIMEOUT)
        with connect(port) as rejected:
            assert read_status(rejected) == 503
        with connect(port, "127.0.0.2") as other:
            assert request_health(other) == 200
        holding.release()
        assert [read_status(connection) for connection in busy] == [200, 200]
        with connect(port) as accepted:
            assert request_health(accepted) == 200


def test_a_trusted_proxy_may_have_all_connections(holding: HoldingApp) -> None:
    """Above the number of the server, the longest idle connection of all clients is closed."""
    with serve_few(holding, trusted_proxies="::1, 127.0.0.0/30") as port, ExitStack() as stack:
        held = [stack.enter_context(connect(port, "127.0.0.1")) for _ in range(MOST)]
        for connection in held:
            assert request_health(connection) == 200
        with connect(port, "127.0.0.2") as connection:
            assert request_health(connection) == 200
        wait_until(lambda: count_open(held) == MOST - 1)
        assert read_status(held[0]) == 0


def test_websockets_count_until_they_are_closed(holding: HoldingApp) -> None:
    """A WebSocket is not closed for a new connection, and makes room when it ends."""
    with serve_few(holding) as port:
        for _ in range(2):
            with connect_socket(f"ws://127.0.0.1:{port}/socket"):
                with connect_socket(f"ws://127.0.0.1:{port}/socket"), connect(port) as rejected:
                    assert read_status(rejected) == 503

                def is_accepted() -> bool:
                    with connect(port) as connection:
                        return request_health(connection) == 200

                wait_until(is_accepted)


class Peer:
    """A transport that knows the address of its client only."""

    def __init__(self, peer: Any) -> None:
        self.peer = peer

    def get_extra_info(self, name: str) -> Any:
        """Return the address of the client."""
        return self.peer if name == "peername" else None


@for_each(
    ("peer", "name"),
    [
        (("192.0.2.7", 1), "192.0.2.7"),
        (("::ffff:192.0.2.7", 1, 0, 0), "192.0.2.7"),
        (("2001:db8:1:2:3:4:5:6", 1, 0, 0), "2001:db8:1:2::/64"),
        (("fe80::1%eth0", 1, 0, 3), "fe80::/64"),
        ("", "a Unix socket"),
    ],
)
def test_a_client_is_an_address_or_a_network_of_ipv6(peer: Any, name: str) -> None:
    """One client has all addresses of its network of IPv6, so these count together."""
    transport: Any = Peer(peer)
    assert name_client(find_address(transport)) == name


def start_reading_nothing(port: int, request: bytes) -> socket.socket:
    """Send a request, and receive nothing but the start of its response."""
    connection = connect(port)
    connection.sendall(request)
    connection.recv(1, socket.MSG_PEEK)
    return connection


STREAM_BODY = b'{"model":"m","input":"x","stream":true}'
STREAM_REQUEST = (
    b"POST /v1/responses HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    b"content-length: %d\r\n\r\n%b" % (len(STREAM_BODY), STREAM_BODY)
)


def test_a_client_that_does_not_read_its_stream_ends_it(caplog: pytest.LogCaptureFixture) -> None:
    """A server closes its connection after some time, says so, and cancels the response."""
    limits = Limits(write_seconds=0)
    with (
        serve(model=GatedModel(words=1_000_000), limits=limits) as server,
        start_reading_nothing(server.address[1], STREAM_REQUEST),
    ):
        wait_until(lambda: server.running == 0)
    [record] = [each for each in caplog.records if "read nothing" in each.getMessage()]
    assert record.levelno == logging.WARNING
    assert "127.0.0.1" in record.getMessage()
    assert not [each for each in caplog.records if each.levelno > logging.WARNING]


HANDSHAKE = (
    b"GET /v1/responses HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade\r\nupgrade: websocket\r\n"
    b"sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)


def test_a_client_that_does_not_read_its_websocket_ends_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A WebSocket has the same deadline: its responses are cancelled, and the connection ends."""
    message = b'{"type":"response.create","model":"m","input":"x"}'
    frame = Frame(Opcode.TEXT, message).serialize(mask=True)
    limits = Limits(write_seconds=0)
    with (
        serve(model=GatedModel(words=1_000_000), limits=limits) as server,
        start_reading_nothing(server.address[1], HANDSHAKE) as connection,
    ):
        connection.sendall(frame)
        wait_until(lambda: server.running == 1)
        wait_until(lambda: server.call(lambda service: not service.sockets))
        assert server.running == 0
    assert "read nothing of a response" in caplog.text
    assert not [each for each in caplog.records if each.levelno > logging.WARNING]


LARGE_EVENT = b'data: "%b"\n\n' % (b"x" * 10_000)


class Writer:
    """An app whose responses and WebSockets do not end before their client leaves."""

    def __init__(self) -> None:
        self.left = threading.Event()
        routes = [
            Route("/v1/{path:path}", self.answer, methods=["GET", "POST"]),
            WebSocketRoute("/v1/{path:path}", self.send_messages),
        ]
        self.app = Starlette(routes=routes)

    async def answer(self, _: Request) -> Response:
        """Stream without an end."""
        return StreamingResponse(self._write(), media_type="text/event-stream")

    async def _write(self) -> AsyncIterator[bytes]:
        try:
            while True:
                yield LARGE_EVENT  # small ones would be parsed one by one until the buffers are full
                await asyncio.sleep(0)  # a server discards what it cannot send without waiting
        finally:
            self.left.set()

    async def send_messages(self, websocket: WebSocket) -> None:
        """Send messages without an end."""
        await websocket.accept()
        try:
            while True:
                await websocket.send_text("x" * 10_000)
        except WebSocketDisconnect:
            self.left.set()


@for_each(
    "request_bytes",
    [
        b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n",
        STREAM_REQUEST,
        HANDSHAKE,
    ],
)
def test_a_proxy_closes_the_upstream_for_a_client_that_does_not_read(
    caplog: pytest.LogCaptureFixture, request_bytes: bytes
) -> None:
    """The upstream's response, or its WebSocket, ends with the connection of the client."""
    writer = Writer()
    caplog.clear()
    with serve_app(writer.app) as upstream:
        proxy_app = create_proxy_app(f"{upstream}/v1")
        with run_server(proxy_app, write_seconds=0) as proxy:
            port = int(proxy.url.rpartition(":")[2])
            with start_reading_nothing(port, request_bytes):

                def has_left() -> bool:
                    proxy.tick()
                    return writer.left.is_set()

                wait_until(has_left)
    assert "read nothing of a response" in caplog.text


def test_a_client_that_reads_slowly_keeps_its_connection() -> None:
    """A response that always waits for its client is not unread while the client reads some of it."""
    writer = Writer()
    with run_server(writer.app, write_seconds=0) as server:
        port = int(server.url.rpartition(":")[2])
        with start_reading_nothing(
            port, b"GET /v1/x HTTP/1.1\r\nhost: localhost\r\n\r\n"
        ) as client:
            for _ in range(5):
                missing = 16_000_000  # more than the buffers of the system hold
                while missing > 0:
                    missing -= len(client.recv(1_000_000))
                server.tick()
            assert not writer.left.is_set()

            def has_left() -> bool:
                server.tick()
                return writer.left.is_set()

            wait_until(has_left)
