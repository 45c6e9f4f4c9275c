"""One connection with its lanes and its reader, and the pool that chooses the lane of a request.

A lane has one response at a time. The server remembers the newest response of each lane for as long as the
connection is open, stored or not. If a continuation fails on the lane of its parent, the server forgets
that parent, and so does the lane.

A pool has a few connections, each with a few lanes, all of one event loop. A request gets the lane of its parent if
possible, else one that loses no response. If all lanes are busy, it waits. A lane that remembers a response which was
not stored is used for another conversation only if there is no other lane.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any, cast

from websockets.asyncio.client import ClientConnection
from websockets.exceptions import WebSocketException
from websockets.frames import CloseCode

from kedge._internal.json_text import decode
from kedge.observe import get_logger

MAX_BUFFERED_BYTES = 32 * 1024 * 1024
"""The maximum bytes buffered for a reader. A slower reader is disconnected, so that others can continue."""
REMEMBERED_TYPES = ("response.completed", "response.incomplete")
TERMINAL_TYPES = (*REMEMBERED_TYPES, "response.failed", "response.cancelled")


class SocketMessage:
    """One message of a server: its bytes and its parsed content.

    Attributes:
        kind: The type of the message.
        is_rejection: Whether it rejects a request; an error within a stream has a sequence number.
        is_last: Whether it is the last message of its response.
        response_id: The id of the response object of an event, if it has one.
        error: The error object of an error message; some servers send its members without ``error``.
    """

    def __init__(self, data: bytes, payload: Mapping[str, Any]) -> None:
        self.data = data
        self.payload = payload
        self.kind = str(payload.get("type") or "")
        if not self.kind and "error" in payload:
            self.kind = "error"
        self.is_rejection = self.kind == "error" and "sequence_number" not in payload
        self.is_last = self.kind in TERMINAL_TYPES or self.is_rejection
        self.response_id = ""
        response = payload.get("response")
        if isinstance(response, dict):
            self.response_id = str(cast("dict[str, Any]", response).get("id") or "")
        self.error: Mapping[str, Any] = {}
        if self.kind == "error":
            error: object = payload.get("error") or payload
            if isinstance(error, Mapping):
                self.error = cast("Mapping[str, Any]", error)
            else:
                self.error = {"message": error}


class LaneFailed(Exception):
    """The connection was closed, or the reader fell too far behind."""


class Lane:
    """One lane of a connection.

    Args:
        connection: The connection.
        name: Its ``stream_id``; empty for the only lane of a connection without lanes.
    """

    def __init__(self, connection: "SocketConnection", name: str) -> None:
        self.connection = connection
        self.name = name
        self.latest_id = ""
        """The response that the server remembers for this lane."""
        self.busy = False
        """Whether the lane has a request that is not finished."""
        self.abandoned = False
        """Whether the running response has no reader."""
        self.finished = False
        """Whether the last message of the running response has arrived."""
        self.started = False
        """Whether the first message of the running response has arrived."""
        self.request_bytes = 0
        self._announces = False
        """Whether the server starts a response with its object, as it should."""
        self._previous_id = ""
        """The response before the running one."""
        self._parent_id = ""
        """The response that the request continues."""
        self._inbox = asyncio.Queue[SocketMessage | LaneFailed]()
        self._buffered_bytes = 0
        self._overflowed = False

    def begin(self, parent_id: str) -> None:
        """Start a request that continues the response ``parent_id``, or none if it is empty."""
        self.busy = True
        self.abandoned = False
        self.finished = False
        self.started = False
        self.request_bytes = 0
        self._parent_id = parent_id
        self._inbox = asyncio.Queue[SocketMessage | LaneFailed]()
        self._buffered_bytes = 0
        self._overflowed = False

    def receive(self, message: SocketMessage) -> None:
        """Process a message from the server."""
        if self._is_stale(message):
            return
        # What the server remembers, and whether the response has ended.
        if message.is_last:
            self.finished = True
            self._previous_id = message.response_id
        if message.kind in REMEMBERED_TYPES:
            self.latest_id = message.response_id
        elif message.is_last and self.latest_id == self._parent_id:
            self.latest_id = ""
        if not self.abandoned and not self._overflowed:
            self._inbox.put_nowait(message)
            self._buffered_bytes += len(message.data)
            if self._buffered_bytes > MAX_BUFFERED_BYTES:
                self.fail("the reader of an answer fell too far behind")
                self._overflowed = True

    def fail(self, reason: str) -> None:
        """Signal that no more messages will arrive."""
        self._inbox.put_nowait(LaneFailed(reason))

    async def next_message(self) -> SocketMessage:
        """Return the next message; raise ``LaneFailed`` if there will be none."""
        message = await self._inbox.get()
        if isinstance(message, LaneFailed):
            raise message
        self._buffered_bytes -= len(message.data)
        return message

    def _is_stale(self, message: SocketMessage) -> bool:
        """Return whether an event belongs to the previous response: a repeated one may arrive late."""
        if self.started:
            return False
        # A server may issue an id twice; the first event of a response does not arrive late.
        is_of_previous = (
            bool(message.response_id)
            and message.response_id == self._previous_id
            and message.kind != "response.created"
        )
        is_announcement = "response" in message.payload and not is_of_previous
        # A server that does not announce a response is recognized by its first one, before which nothing is late.
        is_bare_start = (
            message.kind.startswith("response.") and not is_of_previous and not self._announces
        )
        self.started = message.kind == "error" or is_announcement or is_bare_start
        self._announces = self._announces or is_announcement
        return not self.started


log = get_logger("kedge.engines.websocket.connection")

CONNECTION_LIMIT_CODE = "websocket_connection_limit_reached"
"""The error code for a connection that has reached its maximum age."""


class SocketConnection:
    """An open connection with a maximum number of lanes; a single lane has no name."""

    def __init__(
        self,
        socket: ClientConnection,
        max_lanes: int,
        created_at: float,
        on_change: Callable[["SocketConnection"], None],
    ) -> None:
        self.lanes: list[Lane] = []
        self.created_at = created_at
        self.retired = False
        """Whether the connection accepts no new requests, because it is old or closed."""
        self._socket = socket
        self.max_lanes = max_lanes
        self._on_change = on_change
        self._unreadable = ""
        """What to add to the reason of a failure after a message that is not JSON."""
        self._reader = asyncio.get_running_loop().create_task(self._read())

    def add_lane(self) -> Lane:
        """Add a lane."""
        name = ""
        if self.max_lanes > 1:
            name = f"k{len(self.lanes)}"
        lane = Lane(self, name)
        self.lanes.append(lane)
        return lane

    async def send(self, lane: Lane, body: bytes) -> None:
        """Send a request on a lane; ``body`` is its JSON object."""
        lane.request_bytes = len(body)
        members = '"type":"response.create",'
        if lane.name:
            members += f'"stream_id":"{lane.name}",'
        await self._socket.send(f"{{{members}{body[1:].decode()}")

    def is_too_large(self, lane: Lane) -> bool:
        """Return whether the server closed the connection because of the request of a lane: the largest unanswered."""
        largest = max((each.request_bytes for each in self.lanes if not each.started), default=0)
        is_rejected = self._socket.close_code == CloseCode.MESSAGE_TOO_BIG
        return is_rejected and not lane.started and lane.request_bytes == largest

    async def close(self) -> None:
        """Close the connection; running responses are cancelled, here and on the server."""
        self._fail("the connection was closed")
        if self._reader.cancelled():
            # The loop is about to end and has cancelled its tasks: there is no time for a close handshake.
            self._socket.transport.close()
            await asyncio.sleep(0)
            return
        # The reader continues meanwhile: unread messages would precede the server's close frame.
        await self._close_socket()
        await asyncio.wait([self._reader])

    async def _read(self) -> None:
        try:
            while True:
                data = await self._socket.recv(decode=False)
                try:
                    payload = decode(data)
                except (ValueError, RecursionError):
                    self._dispatch_unreadable(data)
                    continue
                if isinstance(payload, dict):
                    self._dispatch(SocketMessage(data, cast("dict[str, Any]", payload)))
        except (WebSocketException, OSError) as error:
            log.debug("a connection ended: %s", type(error).__name__)
            self._fail(f"the connection broke ({type(error).__name__}){self._unreadable}")
            await self._close_socket()

    async def _close_socket(self) -> None:
        with suppress(WebSocketException, OSError):
            await self._socket.close()

    def _dispatch_unreadable(self, data: bytes) -> None:
        """Pass a message that is not JSON to every running response: it may belong to any of them.

        The decoder reports it, and the response fails unless its other messages contain everything.
        """
        log.warning("a message of %d bytes is not JSON", len(data))
        self._unreadable = " after a message that is not JSON"
        for lane in self.lanes:
            if lane.busy:
                lane.receive(SocketMessage(data, {}))

    def _dispatch(self, message: SocketMessage) -> None:
        lane = self._find_lane(message)
        if message.error.get("code") == CONNECTION_LIMIT_CODE:
            self.retired = True
            if "stream_id" not in message.payload and self.max_lanes > 1:
                lane = None  # the message belongs to no request
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
        if not name and len(busy) == 1:  # a message without a lane belongs to the only one
            return busy[0]
        return None

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


MAX_CONNECTION_AGE = 55 * 60.0
"""Seconds after which a connection is replaced, because servers close connections after an hour."""


class ConnectionPool:
    """The connections of one event loop."""

    def __init__(
        self, open_socket: Callable[[], Awaitable[ClientConnection]], connections: int, lanes: int
    ) -> None:
        self._open_socket = open_socket
        self._max_connections = connections
        self._max_lanes = lanes
        self._connections: list[SocketConnection] = []
        self._opening_count = 0
        self._lane_available = asyncio.Event()
        self._close_tasks: set[asyncio.Task[None]] = set()

    def live_response_ids(self) -> set[str]:
        """Return the ids of the responses that the server remembers on an open connection."""
        lanes = (lane for connection in self._connections for lane in connection.lanes)
        return {lane.latest_id for lane in lanes if lane.latest_id}

    async def acquire(self, parent_id: str) -> Lane:
        """Return a lane for a request that continues ``parent_id``, or nothing; wait for a free lane."""
        while True:
            self._retire_expired()
            lane = self._find_lane(parent_id) or await self._open_connection()
            if lane is not None:
                lane.begin(parent_id)
                return lane
            self._lane_available.clear()
            await self._lane_available.wait()

    async def aclose(self) -> None:
        """Close all connections."""
        connections = self._connections
        self._connections = []
        for connection in connections:
            await connection.close()
        for task in list(self._close_tasks):
            await task

    def release(self, lane: Lane) -> None:
        """Release a lane; if its response has not ended, wait for it or cancel it."""
        connection = lane.connection
        if lane.finished or connection.retired:
            connection.release(lane)
            return
        lane.abandoned = True
        others = [each for each in connection.lanes if each is not lane]
        if not any(each.busy or each.latest_id for each in others):
            # Nothing else is lost with the connection, and only closing it stops the model.
            self._close(connection)

    def _find_lane(self, parent_id: str) -> Lane | None:
        """Return the lane that remembers a response, or else one that loses nothing, or else any free lane."""
        open_connections = [each for each in self._connections if not each.retired]
        if parent_id:
            for lane in (lane for each in open_connections for lane in each.lanes):
                if lane.latest_id != parent_id:
                    continue
                if lane.busy:
                    return _find_free_lane(lane.connection)
                return lane
        for may_forget in (False, True):
            for connection in open_connections:
                lane = _find_free_lane(connection)
                if lane is not None and (may_forget or not lane.latest_id):
                    return lane
            if self._can_open():
                break
        return None

    def _can_open(self) -> bool:
        return len(self._connections) + self._opening_count < self._max_connections

    async def _open_connection(self) -> Lane | None:
        if not self._can_open():
            return None
        self._opening_count += 1
        try:
            socket = await self._open_socket()
        finally:
            self._opening_count -= 1
            self._lane_available.set()
        now = asyncio.get_running_loop().time()
        connection = SocketConnection(socket, self._max_lanes, now, self._on_change)
        self._connections.append(connection)
        return connection.add_lane()

    def _retire_expired(self) -> None:
        old = asyncio.get_running_loop().time() - MAX_CONNECTION_AGE
        for connection in list(self._connections):
            if connection.created_at < old or connection.retired:
                connection.retired = True
                self._on_change(connection)

    def _on_change(self, connection: SocketConnection) -> None:
        if connection.retired and not any(lane.busy for lane in connection.lanes):
            self._close(connection)
        self._lane_available.set()

    def _close(self, connection: SocketConnection) -> None:
        if connection in self._connections:
            self._connections.remove(connection)
            task = asyncio.get_running_loop().create_task(connection.close())
            self._close_tasks.add(task)
            task.add_done_callback(self._close_tasks.discard)


def _find_free_lane(connection: SocketConnection) -> Lane | None:
    """Return a free lane of this connection: one that remembers nothing, a new one, or any."""
    free = [lane for lane in connection.lanes if not lane.busy]
    for lane in free:
        if not lane.latest_id:
            return lane
    if len(connection.lanes) < connection.max_lanes:
        return connection.add_lane()
    if not free:
        return None
    return free[0]
