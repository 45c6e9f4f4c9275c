"""WebSocket connections of uvicorn that share the event loop, with limits on fragments and unread pongs.

uvicorn parses everything that a socket has received at once, and collects the fragments of a message without a limit on
their number. A fragment may be empty: the 256 KB of one read have 43,000 of them, which take a third of a second, and
no limit of size ever applies. Here received bytes are parsed in small pieces, as long as the time slice of the
connection lasts and the app has read all messages before. The socket is not read while bytes are left.

Each ping is answered with a pong. A client that sends pings and reads nothing gets only the newest pong when it reads
again, as RFC 6455 allows (5.5.3), so that no memory is needed for the others.
"""

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from uvicorn.server import ServerState
from websockets.frames import CloseCode, Frame
from websockets.protocol import State

from kedge._internal.responsive import TimeSlice, call_in_turn

if TYPE_CHECKING:
    from uvicorn.config import Config

    from kedge.server.connections import ConnectionTable

MAX_FRAGMENTS = 16_384
"""The maximum number of fragments of a message."""
PIECE_BYTES = 1024
"""The size of the pieces in which received bytes are parsed."""


class LimitedWebSocketProtocol(WebSocketsSansIOProtocol):
    """One WebSocket connection."""

    def __init__(
        self,
        config: "Config",
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.read_paused = False
        self._table = cast("ConnectionTable", server_state)
        self._unparsed = bytearray()
        self._is_scheduled = False
        self._unsent_pong = b""

    def connection_lost(self, exc: Exception | None) -> None:
        """End a connection, which was counted before it became a WebSocket."""
        super().connection_lost(exc)
        self._table.remove(self.transport)

    def data_received(self, data: bytes) -> None:
        """Parse what was received, the request for the connection at once."""
        if not self.handshake_initiated:
            super().data_received(data)
            return
        self._unparsed += data
        if not self._is_scheduled:
            self._parse()

    def _parse(self) -> None:
        """Parse received bytes until the time slice is over, or the app has a message to read."""
        self._is_scheduled = False
        time_slice = TimeSlice()
        while self._unparsed and not self.read_paused and not self.transport.is_closing():
            piece = bytes(self._unparsed[:PIECE_BYTES])
            del self._unparsed[:PIECE_BYTES]
            super().data_received(piece)
            if time_slice.is_over:
                break
        self._continue()

    def _continue(self) -> None:
        """Parse the rest later, and read from the socket only if there is none."""
        if not self._unparsed and not self.read_paused:
            self.transport.resume_reading()
            return
        self.transport.pause_reading()
        if not self.read_paused and not self._is_scheduled and not self.transport.is_closing():
            self._is_scheduled = True
            call_in_turn(self._parse)

    async def receive(self) -> Any:
        """Return the next message to the app, and continue to parse when it has read all of them."""
        message = await self.queue.get()
        if self.read_paused and self.queue.empty():
            self.read_paused = False
            self._continue()
        return message

    async def send(self, message: Mapping[str, object]) -> None:
        """Send a message of the app; after a close the rest is parsed up to the close of the client.

        Raises:
            ClientDisconnected: The client has left.
        """
        if self.transport.is_closing() and not self.close_sent:
            raise ClientDisconnected  # for asyncio every further write would be worth a log record
        await super().send(cast("Any", message))
        self._continue()

    def handle_cont(self, event: Frame) -> None:
        """Add a fragment to a message, or close the connection if it has too many."""
        if len(self.frames) < MAX_FRAGMENTS:
            super().handle_cont(event)
        elif not self.close_sent:
            reason = f"a message has at most {MAX_FRAGMENTS:,} fragments"
            self.conn.fail(CloseCode.MESSAGE_TOO_BIG, reason)
            self.handle_parser_exception()

    def handle_ping(self) -> None:
        """Answer pings, or retain the newest pong while the client does not read."""
        frames = self.conn.data_to_send()
        if self.writable.is_set() or self.conn.state is not State.OPEN:
            self.transport.write(b"".join(frames))
        elif frames:
            self._unsent_pong = frames[-1]

    def resume_writing(self) -> None:
        """Continue to write after the client has read, first the newest pong."""
        super().resume_writing()
        pong = self._unsent_pong
        self._unsent_pong = b""
        if self.conn.state is State.OPEN:
            self.transport.write(pong)
