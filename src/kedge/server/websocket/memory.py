"""What one connection remembers of responses that were not stored: the newest of each lane.

A response that *was* stored needs no place here: the database knows it, also after the connection.
Everything is dropped with the connection. The memory is bounded by the bytes that it holds; the lane
that was quiet for longest is forgotten first, and the newest response is never.
"""

from collections import OrderedDict
from dataclasses import dataclass

from kedge.server.storage.context import Context


@dataclass(frozen=True, slots=True)
class UnstoredResponse:
    """One response that is remembered: its id, and the context up to and including it."""

    id: str
    context: Context
    size: int


class SocketMemory:
    """The newest unstored response of each lane, in about ``most_bytes``."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._size = 0
        self._lanes: OrderedDict[str, UnstoredResponse] = OrderedDict()

    def __len__(self) -> int:
        return len(self._lanes)

    def find(self, id: str) -> Context | None:
        """Find the context of a response, whichever lane it came from."""
        return next((kept.context for kept in self._lanes.values() if kept.id == id), None)

    def store(self, lane: str, id: str, context: Context) -> None:
        """Remember a response in the place of the lane's last one."""
        self.forget(lane)
        kept = self._lanes[lane] = UnstoredResponse(id, context, context.total_size())
        self._size += kept.size
        while self._size > self._max_bytes and len(self._lanes) > 1:
            self.forget(next(iter(self._lanes)))

    def forget(self, lane: str, id: str | None = None) -> None:
        """Drop what a lane remembers; given an id, only if that is the response it remembers."""
        kept = self._lanes.get(lane)
        if kept is not None and id in (None, kept.id):
            del self._lanes[lane]
            self._size -= kept.size

    def clear(self) -> None:
        """Drop everything."""
        self._lanes.clear()
        self._size = 0


@dataclass(frozen=True, slots=True)
class LaneMemory:
    """The memory of a connection, as a request on one lane sees it."""

    memory: SocketMemory
    lane: str

    def find(self, id: str) -> Context | None:
        """Find the context of a response of this connection."""
        return self.memory.find(id)

    def store(self, id: str, context: Context | None) -> None:
        """Note the lane's newest response; one without a context was stored elsewhere."""
        if context is None:
            self.memory.forget(self.lane)
        else:
            self.memory.store(self.lane, id, context)
