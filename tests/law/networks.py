"""Where the servers of a round run: behind sockets, or in the event loop of their clients.

Both have the real clients, encoders, parsers and apps. In memory, the bytes of HTTP and WebSocket are passed from one
protocol to the other without sockets and threads, which takes a fraction of the CPU time.
"""

import asyncio
import functools
import os
import socket
import ssl
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any, cast
from unittest.mock import patch

import aiohttp

from app_thread import serve_app
from kedge.server.settings import Limits, Settings
from kedge.server.state import ServerState
from kedge.server.uvicorn_server import LimitedServer, bind
from kedge.testing import TestServer, serve
from kedge.testing.server import SHUTDOWN_SECONDS

Protocol = Any
"""A protocol of asyncio; libraries annotate different base classes."""


@dataclass
class Network(ABC):
    """Opens servers, and lists those that were opened."""

    servers: list[TestServer] = field(default_factory=list[TestServer])

    @abstractmethod
    def open_server(self) -> AbstractAsyncContextManager[TestServer]:
        """Run a server of Kedge inside the block."""

    @abstractmethod
    def open_app(self, app: Any) -> AbstractAsyncContextManager[str]:
        """Run an ASGI app inside the block, which gets its address."""


class SocketNetwork(Network):
    """Servers in threads, behind sockets of the loopback interface."""

    @asynccontextmanager
    async def open_server(self) -> AsyncGenerator[TestServer]:
        """Run a server of Kedge in a thread."""
        with serve() as server:
            self.servers.append(server)
            yield server

    @asynccontextmanager
    async def open_app(self, app: Any) -> AsyncGenerator[str]:
        """Run an ASGI app in a thread."""
        with serve_app(app) as url:
            yield url


@dataclass
class MemoryNetwork(Network):
    """Servers in the event loop of their clients. Nothing else can be reached."""

    listeners: dict[int, LimitedServer] = field(default_factory=dict[int, LimitedServer])
    """The server behind each port."""

    @contextmanager
    def install(self) -> Iterator[None]:
        """Connect the clients of the running loop in memory."""
        loop = asyncio.get_running_loop()

        async def create_connection(
            factory: Callable[[], Protocol], host: str | None = None, port: int = 0, **_: Any
        ) -> tuple[asyncio.Transport, Protocol]:
            return self._connect(factory, port)

        async def connect_aiohttp(connector: Any, request: Any, *_: Any) -> Protocol:
            factory = getattr(connector, "_factory")  # noqa: B009 - as its subclasses do
            try:
                return self._connect(factory, request.url.port)[1]
            except OSError as error:
                raise aiohttp.ClientConnectorError(request.connection_key, error) from error

        # All addresses are plain HTTP, so that nothing uses the certificates, which take 40 ms to load.
        context = functools.cache(ssl.create_default_context)
        with (
            patch.object(loop, "create_connection", create_connection),
            patch.object(aiohttp.TCPConnector, "_create_connection", connect_aiohttp),
            patch.object(ssl, "create_default_context", context),
        ):
            yield

    @asynccontextmanager
    async def open_server(self) -> AsyncGenerator[TestServer]:
        """Run a server of Kedge in this loop."""
        server = _MemoryServer(Settings(limits=Limits(shutdown_seconds=SHUTDOWN_SECONDS)))
        self.servers.append(server)
        try:
            async with self._listen(server.address[1], server.uvicorn):
                yield server
        finally:
            server.close()

    @asynccontextmanager
    async def open_app(self, app: Any) -> AsyncGenerator[str]:
        """Run an ASGI app in this loop."""
        with bind("127.0.0.1", 0) as reserved:
            port = reserved.getsockname()[1]
            async with self._listen(port, LimitedServer(app)):
                yield f"http://127.0.0.1:{port}"

    @asynccontextmanager
    async def _listen(self, port: int, server: LimitedServer) -> AsyncGenerator[None]:
        server.config.load()
        server.lifespan = server.config.lifespan_class(server.config)
        server.servers = []
        await server.lifespan.startup()
        await server.on_tick(0)  # sets the headers of all responses
        self.listeners[port] = server
        try:
            yield
        finally:
            del self.listeners[port]
            for task in server.server_state.tasks:  # of streams that nobody reads
                task.cancel()
            for connection in list(server.server_state.connections):
                cast("Any", connection).transport.close()
            await asyncio.sleep(0)
            await server.lifespan.shutdown()

    def _connect(
        self, factory: Callable[[], Protocol], port: int
    ) -> tuple[asyncio.Transport, Protocol]:
        server = self.listeners.get(port)
        if server is None:
            raise ConnectionRefusedError(f"no server in memory has the port {port}")
        accept = cast("Any", server.config.http_protocol_class)
        accepted = accept(
            config=server.config, server_state=server.server_state, app_state=server.lifespan.state
        )
        protocol = factory()
        client, remote = _PipeEnd(protocol), _PipeEnd(accepted)
        client.peer, remote.peer = remote, client
        accepted.connection_made(remote)
        protocol.connection_made(client)
        return client, protocol


class _MemoryServer(TestServer):
    """A test server in the loop of its clients; a socket reserves its port."""

    @property
    def uvicorn(self) -> LimitedServer:
        return self._server

    def call(self, work: Callable[[ServerState], Any]) -> Any:
        """Call a function with the server's state, which this loop uses."""
        return work(self._service)

    def close(self) -> None:
        """Release the port."""
        self._socket.close()


_SILENT = os.pipe()
"""A pipe that is never readable."""


class _ConnectionSocket:
    """What libraries ask of the socket of a connection."""

    family = socket.AF_INET

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport

    def fileno(self) -> int:
        return -1 if self._transport.is_closing() else _SILENT[0]

    def getpeername(self) -> tuple[str, int]:
        return ("127.0.0.1", 1)

    getsockname = getpeername

    def setsockopt(self, *_: Any) -> None:
        return


class _PipeEnd(asyncio.Transport):
    """One end of a connection, which passes what is written to the protocol of the other end."""

    def __init__(self, protocol: Protocol) -> None:
        super().__init__({"socket": _ConnectionSocket(self), "peername": ("127.0.0.1", 1)})
        self._protocol = protocol
        self._loop = asyncio.get_running_loop()
        self._inbox: deque[bytes] = deque()
        self._is_scheduled = self._is_paused = self._is_closing = self._is_lost = False
        self._has_ended = False
        self.peer: _PipeEnd

    def get_protocol(self) -> Protocol:
        return self._protocol

    def set_protocol(self, protocol: Protocol) -> None:
        self._protocol = protocol

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if data and not self._is_closing:
            self.peer.receive(bytes(data))

    def write_eof(self) -> None:
        self.peer.receive(b"")

    def can_write_eof(self) -> bool:
        return True

    def get_write_buffer_size(self) -> int:
        return 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Ignore the limits: the size of answers is limited."""

    def is_reading(self) -> bool:
        return not self._is_paused and not self._is_closing

    def pause_reading(self) -> None:
        self._is_paused = True

    def resume_reading(self) -> None:
        self._is_paused = False
        self._schedule()

    def is_closing(self) -> bool:
        return self._is_closing

    def close(self) -> None:
        if not self._is_closing:
            self._is_closing = True
            self.peer.receive(b"")
            self._loop.call_soon(self._lose)

    abort = close

    def receive(self, data: bytes) -> None:
        """Pass bytes to the protocol in the next turn of the loop; no bytes are the end."""
        if not self._is_closing:
            self._inbox.append(data)
            self._schedule()

    def _schedule(self) -> None:
        if self._inbox and not self._is_scheduled and not self._is_paused:
            self._is_scheduled = True
            self._loop.call_soon(self._deliver)

    def _deliver(self) -> None:
        self._is_scheduled = False
        while self._inbox and not self._is_paused and not self._is_closing:
            data = self._inbox.popleft()
            if data:
                self._protocol.data_received(data)
            elif not self._protocol.eof_received():
                self.close()

    def _lose(self) -> None:
        if not self._is_lost:
            self._is_lost = True
            self._protocol.connection_lost(None)
