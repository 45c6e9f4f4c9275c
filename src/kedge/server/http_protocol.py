"""HTTP/1.1 connections of uvicorn and h11, with a limit for everything that a client decides.

h11 parses one request at a time, limits what is incomplete (the head of a request, the line before a chunk and the
trailers after the last one, which are ignored), and answers in HTTP/1.1 if a client offers HTTP/2 without TLS, as
Java's does with every request. What is added here: clients that finish sending before they receive, small reads, a
limit for requests that wait on one connection, and an end for bodies that cannot be parsed.
"""

import asyncio
from collections.abc import Callable
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, cast

import h11
from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle
from uvicorn.server import ServerState

if TYPE_CHECKING:
    from starlette.types import ASGIApp
    from uvicorn.config import Config

    from kedge.server.connections import ConnectionTable

MAX_INCOMPLETE_BYTES = 64 * 1024
"""The bytes of headers, trailers or the line before a chunk that are retained until they are complete."""

READ_BYTES = 16 * 1024
"""The bytes of a connection that are parsed at once; thousands of one-letter chunks take some milliseconds."""

PROBE_SECONDS = 1.0
"""Seconds before each of the two probes of a client that has finished sending, but has no complete response yet."""

RESPONSE_START = b"HTTP/1.1 "
"""The bytes with which every response starts."""


def build_rejection(status: HTTPStatus, message: str, *headers: str) -> bytes:
    """Return a response to a client whose connection is closed."""
    lines = [
        f"HTTP/1.1 {status} {status.phrase}",
        "content-type: text/plain; charset=utf-8",
        f"content-length: {len(message)}",
        "connection: close",
        *headers,
    ]
    return "\r\n".join([*lines, "", message]).encode()


TOO_MANY_CONNECTIONS = build_rejection(
    HTTPStatus.SERVICE_UNAVAILABLE,
    "The server has too many connections; try again later.",
    "retry-after: 1",
)
HEADERS_TOO_LARGE = build_rejection(
    HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "The headers of the request are too large."
)


class PipelineFlow(FlowControl):
    """The flow control of a connection, which does not receive more requests while many wait for an answer.

    uvicorn receives while a request is answered, to notice a client that leaves. What such a client sends meanwhile is
    retained until the answer is complete.

    Args:
        transport: The transport of the connection.
        is_full: Returns whether enough is retained.
    """

    def __init__(self, transport: asyncio.Transport, is_full: Callable[[], bool]) -> None:
        super().__init__(transport)
        self._is_full = is_full

    def resume_reading(self) -> None:
        """Receive again, unless enough is retained."""
        if not self._is_full():
            super().resume_reading()


class ProbedTransport:
    """The transport of a request until its response starts, whose first bytes are sent as probes.

    Args:
        cycle: The request and its response.
    """

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._transport = cycle.transport
        self._sent = 0

    def probe(self) -> None:
        """Send the next byte of the response."""
        self._transport.write(RESPONSE_START[self._sent : self._sent + 1])
        self._sent += 1

    def write(self, data: bytes) -> None:
        """Send the rest of the start of the response, and from now on everything."""
        self._transport.write(data[self._sent :])
        self._cycle.transport = self._transport

    def is_closing(self) -> bool:
        """Return whether the connection is being closed."""
        return self._transport.is_closing()

    def close(self) -> None:
        """Close the connection."""
        self._transport.close()


class LimitedHttpProtocol(H11Protocol, asyncio.BufferedProtocol):
    """An HTTP connection of uvicorn.

    A client that has finished sending (a half-closed connection) looks like one that has left: both end the stream in
    their direction. So its requests are answered, and meanwhile two bytes of the response are sent that are known
    before: the first letters of its status line, or zeros before the size of its next chunk. If the client has left,
    the first byte makes its system reset the connection, and to send the second one fails, which is a disconnect.
    """

    flow: FlowControl
    """Pauses reading and writing; uvicorn and this class set it when there is a connection."""

    def __init__(
        self,
        config: "Config",
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._table = cast("ConnectionTable", server_state)
        self._is_admitted = False
        self._loaded_app = cast("ASGIApp", self.app)
        self.app = cast("Any", self._run_app)
        self._buffer = bytearray()
        self._has_finished_sending = False
        self._is_chunked = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start with a new connection, or reject it if there are too many."""
        super().connection_made(cast("asyncio.Transport", transport))
        self.flow = PipelineFlow(self.transport, self._has_many_requests)
        self._is_admitted = self._table.admit(self.transport)
        if not self._is_admitted:
            self.transport.write(TOO_MANY_CONNECTIONS)
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """End a connection."""
        super().connection_lost(exc)
        if self._is_admitted:
            self._table.remove(self.transport)

    def data_received(self, data: bytes) -> None:
        """Parse what was received."""
        super().data_received(data)
        if not self._is_idle:
            self._table.mark_busy(self.transport)

    def get_buffer(self, sizehint: int) -> bytearray:
        """Return the buffer of the next read, which bounds how long it takes to parse it."""
        self._buffer = bytearray(READ_BYTES)
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Parse what was read."""
        received = bytes(self._buffer[:nbytes])
        self._buffer = bytearray()
        self.data_received(received)

    def eof_received(self) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride] - as asyncio documents it
        """Return whether the connection stays open, because a complete request is not answered yet."""
        if self._is_idle or self.cycle.more_body:
            return False
        self._has_finished_sending = True
        for number in (1, 2):
            self.loop.call_later(number * PROBE_SECONDS, self._probe_client)
        return True

    def on_response_complete(self) -> None:
        """Start with the next request, if there is one."""
        super().on_response_complete()
        if not self._is_idle:
            return
        self._table.mark_idle(self.transport)
        if self._has_finished_sending:
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """Answer what is not a valid request, and close the connection."""
        if not self._is_idle:  # its body is malformed: the app gets a disconnect
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.close()  # a response has started
            return
        unparsed, _ = self.conn.trailing_data
        if len(unparsed) <= MAX_INCOMPLETE_BYTES:
            super().send_400_response(msg)
            return
        self.transport.write(HEADERS_TOO_LARGE)
        self.transport.close()

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        """Change to WebSocket, whose parser has own limits and leaves what it cannot read without an answer."""
        self._table.mark_busy(self.transport)
        super().handle_websocket_upgrade(event)
        if not cast("Any", self.transport.get_protocol()).handshake_initiated:
            self.send_400_response(
                "A WebSocket is opened with GET, at most 128 headers, and lines of at most 8 KiB."
            )

    @property
    def _is_idle(self) -> bool:
        """Whether no request is being answered."""
        cycle = cast("RequestResponseCycle | None", self.cycle)  # None before the first request
        return cycle is None or cycle.response_complete

    def _has_many_requests(self) -> bool:
        """Return whether the client has sent a lot after the request that is being answered."""
        if self._is_idle or self.cycle.more_body:
            return False
        unparsed, _ = self.conn.trailing_data
        return len(unparsed) > READ_BYTES

    async def _run_app(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the app, and observe whether its response is sent in chunks."""

        async def send_observed(message: Message) -> None:
            if message["type"] == "http.response.start":
                names = {name.lower() for name, _ in message.get("headers", ())}
                has_body = scope["method"] != "HEAD" and message["status"] not in (204, 304)
                may_be_chunked = has_body and scope["http_version"] == "1.1"
                self._is_chunked = may_be_chunked and b"content-length" not in names
            await send(message)

        await self._loaded_app(scope, receive, send_observed)

    def _probe_client(self) -> None:
        """Write the first byte of what follows, if that is known."""
        if self._is_idle or self.transport.is_closing():
            return
        if self.conn.our_state is h11.SEND_RESPONSE:
            probed = cast("Any", self.cycle.transport)
            if not isinstance(probed, ProbedTransport):
                probed = ProbedTransport(self.cycle)
                self.cycle.transport = cast("Any", probed)
            probed.probe()
        elif self.conn.our_state is h11.SEND_BODY and self._is_chunked:
            self.transport.write(b"0")  # the size of the next chunk may have any number of them
