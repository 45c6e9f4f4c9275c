"""One lane of a connection: a response at a time, its messages, and what the server remembers of it.

The server remembers the newest response of each lane for as long as the connection lives, stored or not.
A continuation that fails on the lane of its parent makes it forget that; so do we.
"""

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import Any, cast


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a server: its bytes, and what it says."""

    data: bytes
    said: dict[str, Any]

    @property
    def kind(self) -> str:
        """Its type."""
        return str(self.said.get("type") or ("error" if "error" in self.said else ""))

    @property
    def is_refusal(self) -> bool:
        """Whether it refuses a request; an error within a stream has its number there."""
        return self.kind == "error" and "sequence_number" not in self.said

    @property
    def is_last(self) -> bool:
        """Whether nothing follows of its response."""
        return self.kind in ENDS or self.is_refusal

    @property
    def response_id(self) -> str:
        """The response that it tells of as a whole, if it does."""
        response = self.said.get("response")
        found = cast("dict[str, Any]", response) if isinstance(response, dict) else {}
        return str(found.get("id") or "")

    @property
    def error(self) -> dict[str, Any]:
        """What is wrong, if it is an error."""
        error = self.said.get("error") if self.kind == "error" else None
        return cast("dict[str, Any]", error) if isinstance(error, dict) else {}


MOST_BUFFERED = 32 * 1024 * 1024
"""Bytes that may wait for a reader. One who is further behind is cut off, so that others may go on."""
ENDS = frozenset(
    {"response.completed", "response.incomplete", "response.failed", "response.cancelled"}
)
KEPT = frozenset({"response.completed", "response.incomplete"})


class Lost(Exception):
    """The connection was closed, or the reader fell too far behind."""


class Lane:
    """One lane. ``name`` is its ``stream_id``; the lane without one has an empty name."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.latest = ""
        """The response that the server remembers for this lane."""
        self.busy = False
        self.abandoned = False
        """Whether nobody reads the response that is on it."""
        self.finished = False
        """Whether the last message of that response has come."""
        self._deaf = False
        self._begun = False
        self._last = ""
        self._after = ""
        self._inbox: deque[Message] = deque()
        self._size = 0
        self._news = asyncio.Event()
        self._lost = ""

    def begin(self, after: str) -> None:
        """Take a request that continues ``after``, or nothing."""
        self.busy, self.abandoned, self.finished, self._deaf = True, False, False, False
        self._after, self._lost, self._begun = after, "", False
        self._inbox.clear()
        self._size = 0

    def take(self, message: Message) -> None:
        """Take a message from the server."""
        if self._is_stale(message):
            return
        self._note(message)
        if not self.abandoned and not self._deaf:
            self._inbox.append(message)
            self._size += len(message.data)
            if self._size > MOST_BUFFERED:
                self.lose("the reader of an answer fell too far behind")
                self._deaf = True
            self._news.set()

    def lose(self, why: str) -> None:
        """Say that no more messages will come."""
        self._lost = why
        self._news.set()

    async def next(self) -> Message:
        """The next message; raises ``Lost``."""
        while not self._inbox:
            if self._lost:
                raise Lost(self._lost)
            self._news.clear()
            await self._news.wait()
        message = self._inbox.popleft()
        self._size -= len(message.data)
        return message

    def _is_stale(self, message: Message) -> bool:
        """Whether it belongs to the response before: one that was said twice may come late."""
        if not self._begun:
            known = bool(message.response_id) and message.response_id == self._last
            self._begun = message.kind == "error" or ("response" in message.said and not known)
        return not self._begun

    def _note(self, message: Message) -> None:
        """Keep up with what the server remembers, and with how far it is."""
        if message.is_last:
            self.finished, self._last = True, message.response_id
        if message.kind in KEPT:
            self.latest = message.response_id
        elif message.is_last and self.latest == self._after:
            self.latest = ""
