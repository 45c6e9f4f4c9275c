"""Run the app with uvicorn, also in a thread, with the server's limits and an orderly shutdown.

On shutdown, running responses have some time to finish. Those that do not finish are marked as failed in
the database and for their clients, and only then the connections are closed.
"""

import asyncio
import errno
import logging
import math
import signal
import socket
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeVar

import uvicorn
from uvicorn.server import HANDLED_SIGNALS

from kedge._internal.event_loops import run_in_thread
from kedge.errors import CannotServe
from kedge.server.connections import CONNECTION_SHARE, ConnectionTable, get_descriptor_limit
from kedge.server.http_protocol import MAX_INCOMPLETE_BYTES, LimitedHttpProtocol

if TYPE_CHECKING:
    from kedge.server.request_log import RecordedRequest
    from kedge.server.settings import Settings
    from kedge.server.state import ServerState

CLOSE_SECONDS = 2.0
"""Seconds for which connections may flush their responses after the last run has ended."""

IDLE_SECONDS = 75.0
"""Seconds after which an idle connection is closed, as by default in `kedge.server.settings.Limits`."""

WRITE_SECONDS = 60.0
"""Seconds after which a connection is closed whose client does not read, as in `kedge.server.settings.Limits`."""

PING_TIMEOUT_SECONDS = 60.0
"""Seconds for which a WebSocket client may not answer a ping; slow readers are still connected."""

MAX_ACCEPTED = 100
"""The number of connections that are accepted in one turn of the loop."""

LISTEN_BACKLOG = 2048
"""The number of connections that wait in the system until they are accepted, if it permits as many."""

EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
"""The errors after which asyncio accepts no connection for a second."""

TICKS_PER_SECOND = 10
"""The ticks that uvicorn counts in each second."""

ACCEPT_LOOP_TURNS = 3
"""Turns of the loop after which asyncio has announced an accepted connection."""

CLIENT_PROBLEMS = (
    "Unsupported upgrade request.",
    "ASGI callable returned without completing handshake.",
    "Invalid UTF-8 sequence received from client.",
)
"""Messages with which uvicorn reports what a client did as a problem."""


class LimitedServer(uvicorn.Server):
    """A uvicorn server with a limited number of connections, whose process ends normally after a signal.

    Args:
        app: The app.
        idle_seconds: The time between two requests on a connection, and for the headers of one.
        write_seconds: The time for which a client may read nothing of a response.
        descriptors_each: The descriptors that a connection needs at most, also for requests to other servers.
        trusted_proxies: Addresses or networks of reverse proxies, which may have any number of the connections.
        **options: Further options of ``uvicorn.Config``.
    """

    def __init__(
        self,
        app: Any,
        idle_seconds: float = IDLE_SECONDS,
        write_seconds: float = WRITE_SECONDS,
        *,
        descriptors_each: int = 1,
        trusted_proxies: str = "",
        **options: Any,
    ) -> None:
        descriptors = get_descriptor_limit()
        most = max(1, int(descriptors * CONNECTION_SHARE / descriptors_each))
        defaults: dict[str, Any] = {
            "http": LimitedHttpProtocol,
            "ws": "kedge.server.websocket_protocol:LimitedWebSocketProtocol",
            "ws_ping_timeout": PING_TIMEOUT_SECONDS,
            "loop": "asyncio",
            "log_config": None,
            "access_log": False,
            "server_header": False,
            "h11_max_incomplete_event_size": MAX_INCOMPLETE_BYTES,
            "timeout_keep_alive": math.ceil(idle_seconds),
            # asyncio accepts as many connections at once, before the first of them is counted.
            "backlog": max(1, min(MAX_ACCEPTED, int(descriptors * (1 - CONNECTION_SHARE)) // 8)),
        }
        super().__init__(uvicorn.Config(app, **defaults | options))
        logging.getLogger("uvicorn.error").addFilter(_is_problem)
        self._idle_seconds = idle_seconds
        self._write_seconds = write_seconds
        self._table = ConnectionTable(most, trusted_proxies)
        self.server_state = self._table

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until the server is stopped.

        Without descriptors for new connections, asyncio reports one problem for each of a hundred attempts, and tries
        again after a second.
        """
        loop = asyncio.get_running_loop()
        previous_handler = loop.get_exception_handler()

        def handle_problem(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
            error = context.get("exception")
            if isinstance(error, OSError) and error.errno in EXHAUSTED and "socket" in context:
                self._table.report_exhausted(error)
            elif previous_handler is not None:
                previous_handler(loop, context)
            else:
                loop.default_exception_handler(context)

        loop.set_exception_handler(handle_problem)
        try:
            await super().serve(sockets)
        finally:
            loop.set_exception_handler(previous_handler)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to listen; more connections wait in the system than are accepted at once."""
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(LISTEN_BACKLOG)

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        """Handle signals inside the block. uvicorn would raise them again at its end."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        previous_handlers = {
            number: signal.signal(number, self.handle_exit) for number in HANDLED_SIGNALS
        }
        try:
            yield
        finally:
            for number, handler in previous_handlers.items():
                signal.signal(number, handler)

    async def on_tick(self, counter: int) -> bool:
        """Close connections that wait too long for a request, and those whose clients do not read."""
        self._table.close_idle(self._idle_seconds)
        if counter % TICKS_PER_SECOND == 0:
            self._table.close_unread(self._write_seconds)
        return await super().on_tick(counter)


def _is_problem(record: logging.LogRecord) -> bool:
    """Return whether a log record is about something else than a client, or a response that the shutdown cut off.

    uvicorn reports a WebSocket that was rejected with a response as if the app had not answered, and a message of a
    client that is not UTF-8 with a traceback.
    """
    error = record.exc_info[1] if record.exc_info else None
    return record.msg not in CLIENT_PROBLEMS and not isinstance(error, asyncio.CancelledError)


class UvicornServer(LimitedServer):
    """A server of Kedge that can be started and stopped from any thread without polling.

    Args:
        app: The app of a server, or an app around it that shares its ``state``.
        on_started: Called when requests are accepted.
    """

    def __init__(self, app: Any, *, on_started: Callable[[], None] | None = None) -> None:
        self._service: ServerState = app.state.service
        settings = self._service.settings
        self._limits = settings.limits
        super().__init__(
            app,
            self._limits.idle_seconds,
            self._limits.write_seconds,
            trusted_proxies=settings.trusted_proxies,
            ws_max_size=self._limits.body_bytes,
            ws_per_message_deflate=False,
            lifespan="on",
            proxy_headers=bool(settings.trusted_proxies),
            forwarded_allow_ips=settings.trusted_proxies,
        )
        self._on_started = on_started
        self._wake = asyncio.Event()
        self.loop: asyncio.AbstractEventLoop | None = None

    async def main_loop(self) -> None:
        """Tick once a second, and immediately when the server must stop."""
        self.loop = asyncio.get_running_loop()
        if self._on_started is not None:
            self._on_started()
        ticks = 0
        while not await self.on_tick(ticks):
            ticks += TICKS_PER_SECOND
            try:
                async with asyncio.timeout(1.0):
                    await self._wake.wait()
            except TimeoutError:
                continue

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop accepting requests, finish or fail running responses, then close all connections."""
        await stop_listening(self, sockets or [])
        for socket_ in list(self._service.sockets):
            socket_.finish()
        self._close_connections(requests_only=True)
        await self._wait_until(lambda: not self._service.running, self._limits.shutdown_seconds)
        for run in list(self._service.running):
            run.stop("failed")
        await self._wait_until(lambda: self._close_connections(requests_only=True), CLOSE_SECONDS)
        self._close_connections()
        for task in self.server_state.tasks:
            task.cancel()
        await self._wait_until(lambda: not self.server_state.tasks, CLOSE_SECONDS)
        await self.lifespan.shutdown()

    def _close_connections(self, *, requests_only: bool = False) -> bool:
        """Close each connection: at once if it is idle, otherwise after its response."""
        for connection in list(self.server_state.connections):
            if requests_only and not isinstance(connection, LimitedHttpProtocol):
                continue  # a WebSocket closes itself after its last response
            connection.shutdown()
        return not self.server_state.connections

    async def _wait_until(self, done: Callable[[], bool], seconds: float) -> None:
        end = time.monotonic() + seconds
        pause = 0.001
        while not done() and time.monotonic() < end and not self.force_exit:
            await asyncio.sleep(pause)
            pause = min(pause * 2, 0.05)

    def stop(self) -> None:
        """Request the server to stop, from any thread. This has no effect if it has stopped."""
        self.should_exit = True
        if self.loop is not None:
            with suppress(RuntimeError):  # its loop is closed
                self.loop.call_soon_threadsafe(self._wake.set)

    def handle_exit(self, sig: int, frame: Any) -> None:
        """Stop on a signal; on a second one, without waiting for running responses."""
        super().handle_exit(sig, frame)
        self.stop()


async def stop_listening(server: uvicorn.Server, listeners: Sequence[socket.socket]) -> None:
    """Accept no more connections.

    Args:
        server: The server, which is running in this event loop.
        listeners: Its listening sockets, which are closed.
    """
    loop = asyncio.get_running_loop()
    for listener in listeners:
        loop.remove_reader(listener.fileno())
    for _ in range(ACCEPT_LOOP_TURNS):
        # A connection that is accepted but not yet announced when its server is closed would
        # stay open forever (an assertion fails inside asyncio before Python 3.12).
        await asyncio.sleep(0)
    for listener in (*server.servers, *listeners):
        listener.close()


def bind(host: str, port: int) -> socket.socket:
    """Bind a listening socket.

    Args:
        host: A name or an address, IPv4 or IPv6.
        port: The port, or 0 for any free one.

    Returns:
        The listening socket.

    Raises:
        CannotServe: If the port is in use or the address cannot be bound.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Without the protocol asyncio does not recognize TCP and does not disable Nagle's algorithm.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(128)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise CannotServe(
                f"port {port} is in use: stop the program that listens on it, or use another --port"
            ) from error
        raise CannotServe(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
    return listener


T = TypeVar("T")

CALL_TIMEOUT_SECONDS = 60.0


class ServerThread:
    """A server with an event loop in its own thread, for sync and async code.

    Args:
        settings: The settings of the server.
        listener: Called with the record of every request, in the thread of the server.
    """

    def __init__(
        self, settings: "Settings", listener: "Callable[[RecordedRequest], None] | None" = None
    ) -> None:
        from kedge.server.app import create_app

        self.settings = settings
        app = create_app(settings, listener)
        self._service: ServerState = app.state.service
        self._socket = bind("127.0.0.1", 0)
        self.address: tuple[str, int] = self._socket.getsockname()
        self.url = "http://{}:{}".format(*self.address)
        """The address of the server: ``http://127.0.0.1:<port>``."""
        self.base_url = f"{self.url}/v1"
        """The base URL for clients of the API: ``http://127.0.0.1:<port>/v1``."""
        self._ready = threading.Event()
        self._server = UvicornServer(app, on_started=self._ready.set)
        self._thread = threading.Thread(target=self._run, name="kedge-server", daemon=True)

    def start(self) -> None:
        """Start serving; requests are accepted when this returns.

        Raises:
            CannotServe: If the server did not start.
        """
        self._thread.start()
        self._ready.wait()
        if not self._server.started:
            raise CannotServe("the server in this process could not start")

    def stop(self) -> None:
        """Stop serving, and wait until the server has stopped."""
        self._server.stop()
        self._thread.join()

    def call(self, work: "Callable[[ServerState], T]") -> T:
        """Call a function with the server's state, in the thread of the server.

        Args:
            work: The function.

        Returns:
            Its result.

        Raises:
            CannotServe: If the server is not running.
        """

        async def inside() -> T:
            return work(self._service)

        if self._server.loop is None or not self._thread.is_alive():
            raise CannotServe("the server in this process is not running")
        future = asyncio.run_coroutine_threadsafe(inside(), self._server.loop)
        return future.result(CALL_TIMEOUT_SECONDS)

    def _run(self) -> None:
        try:
            run_in_thread(self._server.serve(sockets=[self._socket]))
        finally:
            self._ready.set()
