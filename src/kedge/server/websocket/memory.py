"""The unstored responses of one connection: the newest of each lane.

Stored responses are in the database and not here. Everything is dropped when the connection is closed.
The memory has a size limit: the response of the least recently used lane is dropped first, the newest
response never.
"""

from collections import OrderedDict
from dataclasses import dataclass

from kedge.server.storage.context import Context


@dataclass(frozen=True, slots=True)
class UnstoredResponse:
    """The id of a response, and the context that ends with it."""

    id: str
    context: Context
    size: int


class SocketMemory:
    """The newest unstored response of each lane, in about ``max_bytes``."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._size = 0
        self._lanes: OrderedDict[str, UnstoredResponse] = OrderedDict()

    def __len__(self) -> int:
        return len(self._lanes)

    def find(self, id: str) -> Context | None:
        """Return the context of a response of any lane, or None."""
        return next((each.context for each in self._lanes.values() if each.id == id), None)

    def store(self, lane: str, id: str, context: Context) -> None:
        """Store a response instead of the lane's previous one."""
        self.forget(lane)
        response = self._lanes[lane] = UnstoredResponse(id, context, context.total_size())
        self._size += response.size
        while self._size > self._max_bytes and len(self._lanes) > 1:
            self.forget(next(iter(self._lanes)))

    def forget(self, lane: str, id: str | None = None) -> None:
        """Delete the response of a lane; with an id, only if it is that response."""
        response = self._lanes.get(lane)
        if response is not None and id in (None, response.id):
            del self._lanes[lane]
            self._size -= response.size

    def clear(self) -> None:
        """Delete all responses."""
        self._lanes.clear()
        self._size = 0


@dataclass(frozen=True, slots=True)
class LaneMemory:
    """The unstored responses of a connection, for a request on one lane."""

    memory: SocketMemory
    lane: str

    def find(self, id: str) -> Context | None:
        """Return the context of a response of this connection, or None."""
        return self.memory.find(id)

    def store(self, id: str, context: Context | None) -> None:
        """Store the lane's newest response; one without a context is in the database."""
        if context is None:
            self.memory.forget(self.lane)
        else:
            self.memory.store(self.lane, id, context)
