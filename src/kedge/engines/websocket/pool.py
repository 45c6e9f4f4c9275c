"""Choose the lane of a request: that of its parent if possible, else one that loses no response.

A pool has a few connections, each with a few lanes, all of one event loop. If all lanes are busy, a
request waits. A lane that remembers a response which was not stored is used for another conversation
only if there is no other lane.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from kedge.engines.websocket.connection import Lane, SocketConnection

if TYPE_CHECKING:
    from websockets.asyncio.client import ClientConnection

OpenSocket = Callable[[], "Awaitable[ClientConnection]"]

MAX_CONNECTION_AGE = 55 * 60.0
"""Seconds after which a connection is replaced, because servers close connections after an hour."""
Lease = tuple[SocketConnection, Lane]


class ConnectionPool:
    """The connections of one event loop."""

    def __init__(self, open_socket: OpenSocket, *, connections: int, lanes: int) -> None:
        self._open_socket = open_socket
        self._max_connections, self._max_lanes = connections, lanes
        self._connections: list[SocketConnection] = []
        self._opening_count = 0
        self._lane_available = asyncio.Event()
        self._close_tasks: set[asyncio.Task[None]] = set()

    def live_response_ids(self) -> set[str]:
        """Return the ids of the responses that the server remembers on an open connection."""
        return {lane.latest_id for one in self._connections for lane in one.lanes if lane.latest_id}

    async def acquire(self, parent_id: str) -> Lease:
        """Return a lane for a request that continues ``parent_id``, or nothing; wait for a free lane."""
        while True:
            self._retire_expired()
            found = self._find_lane(parent_id) or await self._open_connection()
            if found is not None:
                found[1].begin(parent_id)
                return found
            self._lane_available.clear()
            await self._lane_available.wait()

    async def aclose(self) -> None:
        """Close all connections."""
        connections, self._connections = self._connections, []
        for connection in connections:
            await connection.close()
        for task in list(self._close_tasks):
            await task

    def release(self, connection: SocketConnection, lane: Lane) -> None:
        """Release a lane; if its response has not ended, wait for it or cancel it."""
        if lane.finished or connection.retired:
            connection.release(lane)
            return
        lane.abandoned = True
        others = [each for each in connection.lanes if each is not lane]
        if not any(each.busy or each.latest_id for each in others):
            # Nothing else is lost with the connection, and only closing it stops the model.
            self._close(connection)

    def _find_lane(self, parent_id: str) -> Lease | None:
        live = [each for each in self._connections if not each.retired]
        if parent_id:
            for connection in live:
                for lane in connection.lanes:
                    if lane.latest_id == parent_id:
                        fork = _find_free_lane(connection) if lane.busy else lane
                        return fork and (connection, fork)
        for connection in live:
            lane = _find_free_lane(connection)
            if lane is not None and not lane.latest_id:
                return connection, lane
        if len(self._connections) + self._opening_count < self._max_connections:
            return None
        for connection in live:
            lane = _find_free_lane(connection)
            if lane is not None:
                return connection, lane
        return None

    async def _open_connection(self) -> Lease | None:
        if len(self._connections) + self._opening_count >= self._max_connections:
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
        return connection, connection.add_lane()

    def _retire_expired(self) -> None:
        old = asyncio.get_running_loop().time() - MAX_CONNECTION_AGE
        for connection in list(self._connections):
            if connection.created_at < old or connection.retired:
                connection.retired = True
                self._on_change(connection)

    def _on_change(self, connection: SocketConnection) -> None:
        if connection.retired and not connection.in_flight:
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
    if connection.has_room:
        return connection.add_lane()
    return free[0] if free else None
