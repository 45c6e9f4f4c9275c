"""One connection: its lanes, and the reader that passes each message to its lane."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, cast

from kedge.engines.websocket.lane import Lane, SocketMessage
from kedge.json_codec import decode
from kedge.observe import get_logger

if TYPE_CHECKING:
    from openai.resources.responses.responses import AsyncResponsesConnection

log = get_logger("kedge.engines.websocket.connection")

CONNECTION_LIMIT_CODE = "websocket_connection_limit_reached"
"""The error code for a connection that has reached its maximum age."""


class SocketConnection:
    """An open connection with a maximum number of lanes; a single lane has no name."""

    def __init__(
        self,
        socket: "AsyncResponsesConnection",
        max_lanes: int,
        created_at: float,
        on_change: Callable[["SocketConnection"], None],
    ) -> None:
        self.lanes: list[Lane] = []
        self.created_at = created_at
        self.retired = False
        """Whether it accepts no new requests, because it is old or closed."""
        self._socket = socket
        self._max_lanes = max_lanes
        self._on_change = on_change
        self._reader = asyncio.get_running_loop().create_task(self._read())

    @property
    def in_flight(self) -> int:
        """How many responses are running on it."""
        return sum(lane.busy for lane in self.lanes)

    @property
    def has_room(self) -> bool:
        """Whether it may have another lane."""
        return len(self.lanes) < self._max_lanes

    def add_lane(self) -> Lane:
        """Add a lane."""
        lane = Lane(f"k{len(self.lanes)}" if self._max_lanes > 1 else "")
        self.lanes.append(lane)
        return lane

    async def send(self, lane: Lane, body: bytes) -> None:
        """Send a request on a lane; ``body`` is its JSON object."""
        name = f'"stream_id":"{lane.name}",' if lane.name else ""
        await self._socket.send_raw(f'{{"type":"response.create",{name}{body[1:].decode()}')

    async def close(self) -> None:
        """Close it; running responses are cancelled, here and on the server."""
        self._fail("the connection was closed")
        if self._reader.cancelled():
            # The loop is about to end and has cancelled its tasks: there is no time for a close handshake.
            getattr(self._socket, "_connection").transport.close()  # noqa: B009 - the SDK hides it
            await asyncio.sleep(0)
            return
        # The reader continues meanwhile: unread messages would precede the server's close frame.
        await _close_quietly(self._socket.close())
        await asyncio.wait([self._reader])

    async def _read(self) -> None:
        from websockets.exceptions import WebSocketException

        try:
            while True:
                data = await self._socket.recv_bytes()
                payload = decode(data)
                if isinstance(payload, dict):
                    self._dispatch(SocketMessage(data, cast("dict[str, Any]", payload)))
        except (WebSocketException, OSError, ValueError, RecursionError) as error:
            log.debug("a connection ended: %s", type(error).__name__)
            self._fail(f"the connection broke ({type(error).__name__})")
            await _close_quietly(self._socket.close())

    def _dispatch(self, message: SocketMessage) -> None:
        lane = self._find_lane(message)
        if message.error.get("code") == CONNECTION_LIMIT_CODE:
            self.retired = True
            if "stream_id" not in message.payload and self._max_lanes > 1:
                lane = None  # it belongs to no request
        if lane is not None:
            lane.receive(message)
            if lane.abandoned and lane.finished:
                self.release(lane)

    def _find_lane(self, message: SocketMessage) -> Lane | None:
        name = message.payload.get("stream_id") or ""
        busy = [lane for lane in self.lanes if lane.busy]
        for lane in busy:
            if lane.name == name:
                return lane
        # A message without a lane belongs to the only lane.
        return busy[0] if not name and len(busy) == 1 else None

    def release(self, lane: Lane) -> None:
        """Signal that a lane is free."""
        lane.busy = False
        self._on_change(self)

    def _fail(self, reason: str) -> None:
        self.retired = True
        for lane in self.lanes:
            lane.latest_id = ""
            lane.fail(reason)
            if lane.abandoned:
                lane.busy = False
        self._on_change(self)


async def _close_quietly(close: Awaitable[object]) -> None:
    from websockets.exceptions import WebSocketException

    try:
        await close
    except (WebSocketException, OSError):
        return
