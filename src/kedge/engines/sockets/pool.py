"""Which lane a request takes: that of its parent if it can, else one where nothing is lost.

A few connections, each with a few lanes, all of one event loop. Where all of them are busy, a request
waits. A lane that remembers a response which was not stored is taken for another conversation only
when there is no other.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from kedge.engines.sockets.connection import Connection
from kedge.engines.sockets.lanes import Lane

if TYPE_CHECKING:
    from openai.resources.responses.responses import AsyncResponsesConnection

Open = Callable[[], "Awaitable[AsyncResponsesConnection]"]

LIFETIME = 55 * 60.0
"""Seconds after which a connection is replaced: servers close theirs after an hour."""
Taken = tuple[Connection, Lane]


class Pool:
    """The connections of one event loop."""

    def __init__(self, open_one: Open, *, connections: int, lanes: int) -> None:
        self._open_one = open_one
        self._most, self._lanes = connections, lanes
        self._connections: list[Connection] = []
        self._opening = 0
        self._freed = asyncio.Event()
        self._closing: set[asyncio.Task[None]] = set()

    def remembered(self) -> set[str]:
        """The responses that the server remembers on a connection of ours."""
        return {lane.latest for one in self._connections for lane in one.lanes if lane.latest}

    async def take(self, after: str) -> Taken:
        """Find a lane for a request that continues ``after``, or nothing; wait if there is none."""
        while True:
            self._retire()
            found = self._find(after) or await self._opened()
            if found is not None:
                found[1].begin(after)
                return found
            self._freed.clear()
            await self._freed.wait()

    async def aclose(self) -> None:
        """Close all connections."""
        connections, self._connections = self._connections, []
        for connection in connections:
            await connection.close()
        for task in list(self._closing):
            await task

    def leave(self, connection: Connection, lane: Lane) -> None:
        """Give a lane back; one whose response has not ended is first waited for, or given up."""
        if lane.finished or connection.retired:
            connection.release(lane)
            return
        lane.abandoned = True
        others = [each for each in connection.lanes if each is not lane]
        if not any(each.busy or each.latest for each in others):
            # Nothing else is lost with the connection, and only its end stops the model's work.
            self._close(connection)

    def _find(self, after: str) -> Taken | None:
        live = [each for each in self._connections if not each.retired]
        if after:
            for connection in live:
                for lane in connection.lanes:
                    if lane.latest == after:
                        fork = _free(connection) if lane.busy else lane
                        return fork and (connection, fork)
        for connection in live:
            lane = _free(connection)
            if lane is not None and not lane.latest:
                return connection, lane
        if len(self._connections) + self._opening < self._most:
            return None
        for connection in live:
            lane = _free(connection)
            if lane is not None:
                return connection, lane
        return None

    async def _opened(self) -> Taken | None:
        if len(self._connections) + self._opening >= self._most:
            return None
        self._opening += 1
        try:
            socket = await self._open_one()
        finally:
            self._opening -= 1
            self._freed.set()
        now = asyncio.get_running_loop().time()
        connection = Connection(socket, self._lanes, now, self._changed)
        self._connections.append(connection)
        return connection, connection.add_lane()

    def _retire(self) -> None:
        old = asyncio.get_running_loop().time() - LIFETIME
        for connection in list(self._connections):
            if connection.born < old or connection.retired:
                connection.retired = True
                self._changed(connection)

    def _changed(self, connection: Connection) -> None:
        if connection.retired and not connection.in_flight:
            self._close(connection)
        self._freed.set()

    def _close(self, connection: Connection) -> None:
        if connection in self._connections:
            self._connections.remove(connection)
            task = asyncio.get_running_loop().create_task(connection.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)


def _free(connection: Connection) -> Lane | None:
    """A lane of this connection that is free: one that remembers nothing, a new one, or any."""
    free = [lane for lane in connection.lanes if not lane.busy]
    for lane in free:
        if not lane.latest:
            return lane
    if connection.has_room:
        return connection.add_lane()
    return free[0] if free else None
