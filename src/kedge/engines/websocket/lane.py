"""One lane of a connection: one response at a time, its messages, and what the server remembers of it.

The server remembers the newest response of each lane for as long as the connection lives, stored or not.
A continuation that fails on the lane of its parent makes the server forget that parent, and the lane too.
"""

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import Any, cast


@dataclass(frozen=True, slots=True)
class SocketMessage:
    """One message of a server: its bytes and its parsed content."""

    data: bytes
    payload: dict[str, Any]

    @property
    def kind(self) -> str:
        """Its type."""
        return str(self.payload.get("type") or ("error" if "error" in self.payload else ""))

    @property
    def is_rejection(self) -> bool:
        """Whether it rejects a request; an error within a stream has a sequence number."""
        return self.kind == "error" and "sequence_number" not in self.payload

    @property
    def is_last(self) -> bool:
        """Whether it is the last message of its response."""
        return self.kind in TERMINAL_TYPES or self.is_rejection

    @property
    def response_id(self) -> str:
        """The complete response object of an event, if it has one."""
        response = self.payload.get("response")
        found = cast("dict[str, Any]", response) if isinstance(response, dict) else {}
        return str(found.get("id") or "")

    @property
    def error(self) -> dict[str, Any]:
        """The error object, if it is an error."""
        error = self.payload.get("error") if self.kind == "error" else None
        return cast("dict[str, Any]", error) if isinstance(error, dict) else {}


MAX_BUFFERED_BYTES = 32 * 1024 * 1024
"""Bytes that may be buffered for a reader. A slower reader is disconnected, so that others can continue."""
TERMINAL_TYPES = frozenset(
    {"response.completed", "response.incomplete", "response.failed", "response.cancelled"}
)
REMEMBERED_TYPES = frozenset({"response.completed", "response.incomplete"})


class LaneFailed(Exception):
    """The connection was closed, or the reader fell too far behind."""


class Lane:
    """One lane. ``name`` is its ``stream_id``; the lane without one has an empty name."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.latest_id = ""
        """The response that the server remembers for this lane."""
        self.busy = False
        self.abandoned = False
        """Whether the running response has no reader."""
        self.finished = False
        """Whether the last message of that response has arrived."""
        self._overflowed = False
        self._started = False
        self._previous_id = ""
        self._parent_id = ""
        self._inbox: deque[SocketMessage] = deque()
        self._buffered_bytes = 0
        self._wakeup = asyncio.Event()
        self._failure = ""

    def begin(self, parent_id: str) -> None:
        """Start a request that continues ``after``, or nothing."""
        self.busy, self.abandoned, self.finished, self._overflowed = True, False, False, False
        self._parent_id, self._failure, self._started = parent_id, "", False
        self._inbox.clear()
        self._buffered_bytes = 0

    def receive(self, message: SocketMessage) -> None:
        """Process a message from the server."""
        if self._is_stale(message):
            return
        self._update_state(message)
        if not self.abandoned and not self._overflowed:
            self._inbox.append(message)
            self._buffered_bytes += len(message.data)
            if self._buffered_bytes > MAX_BUFFERED_BYTES:
                self.fail("the reader of an answer fell too far behind")
                self._overflowed = True
            self._wakeup.set()

    def fail(self, reason: str) -> None:
        """Signal that no more messages will arrive."""
        self._failure = reason
        self._wakeup.set()

    async def next_message(self) -> SocketMessage:
        """Return the next message; raise ``LaneFailed`` if there will be none."""
        while not self._inbox:
            if self._failure:
                raise LaneFailed(self._failure)
            self._wakeup.clear()
            await self._wakeup.wait()
        message = self._inbox.popleft()
        self._buffered_bytes -= len(message.data)
        return message

    def _is_stale(self, message: SocketMessage) -> bool:
        """Return whether an event belongs to the previous response: a repeated one may arrive late."""
        if not self._started:
            known = bool(message.response_id) and message.response_id == self._previous_id
            # A server may issue an id twice; the first event of a response does not arrive late.
            known = known and message.kind != "response.created"
            self._started = message.kind == "error" or ("response" in message.payload and not known)
        return not self._started

    def _update_state(self, message: SocketMessage) -> None:
        """Update what the server remembers and whether the response has ended."""
        if message.is_last:
            self.finished, self._previous_id = True, message.response_id
        if message.kind in REMEMBERED_TYPES:
            self.latest_id = message.response_id
        elif message.is_last and self.latest_id == self._parent_id:
            self.latest_id = ""
