"""Server-sent events: encoding, buffering, and the responses that replay and follow them."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from itertools import islice
from typing import Any, Generic, Self, TypeVar

from starlette.responses import Response, StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from kedge._internal.json_text import encode_escaped
from kedge._internal.responsive import TimeSlice

Entry = TypeVar("Entry")

FRAME_END = b"\n\n"
DONE_FRAME = b"data: [DONE]\n\n"
STREAM_START: Message = {
    "type": "http.response.start",
    "status": 200,
    "headers": [
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"cache-control", b"no-store"),
    ],
}
MAX_ENTRIES_PER_READ = 64
"""The maximum number of entries that a reader of a log gets at once."""
MAX_PENDING_BYTES = 16 * 1024
"""Bytes of frames that may be pending before ``put`` waits for the socket."""


def encode_events(events: Iterable[dict[str, Any]], start: int = 0) -> list[bytes]:
    """Encode events of a stream as frames, and number them from ``start``."""
    frames: list[bytes] = []
    for number, event in enumerate(events, start):
        event["sequence_number"] = number
        frames.append(encode_event(event))
    return frames


def encode_event(event: Mapping[str, Any]) -> bytes:
    """Encode an event with a type as a frame."""
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), encode_escaped(event))


def encode_data(value: object) -> bytes:
    """Encode a JSON value as a frame without a type."""
    return b"data: %b\n\n" % encode_escaped(value)


class EventsDropped(Exception):
    """A stream cannot continue, because its next events were dropped."""


class FollowedLog(Generic[Entry]):
    """A list of entries that grows, which any number of readers follow, each at its own speed and from any entry.

    Args:
        start: The number of the first entry.
    """

    def __init__(self, start: int = 0) -> None:
        self.is_ended = False
        self._entries: deque[Entry] = deque()
        self._first = start
        self._changed = asyncio.Event()

    @property
    def next_number(self) -> int:
        """The number of the next entry."""
        return self._first + len(self._entries)

    def append(self, entries: Sequence[Entry]) -> None:
        """Append entries and wake the readers."""
        self._entries.extend(entries)
        self._wake_readers()

    def finish(self) -> None:
        """Mark the log as complete."""
        self.is_ended = True
        self._wake_readers()

    def drop_oldest(self) -> Entry | None:
        """Drop the oldest entry and return it; None if only one is left."""
        if len(self._entries) < 2:
            return None
        self._first += 1
        return self._entries.popleft()

    def has_all_after(self, number: int) -> bool:
        """Return whether all entries after this one are available."""
        return number + 1 >= self._first

    async def follow(
        self, after: int = -1, heartbeat_seconds: float | None = None
    ) -> AsyncGenerator[list[Entry]]:
        """Yield the entries after this one, as they are added, until the log is complete.

        Args:
            after: The number of an entry; -1 for all.
            heartbeat_seconds: After how many seconds without an entry an empty list is yielded; None for never.

        Raises:
            EventsDropped: If the reader is so slow that its next entry was dropped.
        """
        time_slice = TimeSlice()  # a reader may be fast enough to find new entries each time
        while True:
            if not self.has_all_after(after):
                raise EventsDropped
            changed = self._changed
            start = after + 1 - self._first
            entries = list(islice(self._entries, start, start + MAX_ENTRIES_PER_READ))
            after += len(entries)
            if entries:
                yield entries
                await time_slice.share()
            elif self.is_ended:
                return
            else:
                try:
                    async with asyncio.timeout(heartbeat_seconds):
                        await changed.wait()
                except TimeoutError:
                    yield []

    def _wake_readers(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class EventStreamResponse(StreamingResponse):
    """A response of frames, which is incomplete if they were dropped; for HEAD, only its headers."""

    media_type = "text/event-stream"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the frames."""
        self.headers.setdefault("cache-control", "no-store")
        if scope["method"] == "HEAD":  # without an end the connection could not be used again
            await Response(headers=self.headers)(scope, receive, send)
            return
        with suppress(EventsDropped):
            await super().__call__(scope, receive, send)


def replay(frames: AsyncIterator[bytes]) -> EventStreamResponse:
    """Return recorded frames, and the frames that are added meanwhile, as a response of the API."""

    async def read_all() -> AsyncGenerator[bytes]:
        async for frame in frames:
            yield frame
        yield DONE_FRAME

    return EventStreamResponse(read_all())


# Why there is an outbox. One write to a socket costs more than the event in it, and a fast model
# produces hundreds of events between two turns of the loop. If each were written at once, the server
# would spend its time in ``send``; if they were collected for a fixed time, every stream would be late
# by that time. So ``put`` only appends, and a second task writes what is pending. That task cannot run
# before the producer waits for something, and then it runs at once: events that are produced together
# are sent together, and none is delayed while the loop is idle. Above MAX_PENDING_BYTES the producer
# itself writes, and so waits for a slow reader: that is the only backpressure, and it bounds memory.


class BufferedSender:
    """A sender of frames, in order; frames that were put together are sent together.

    After the headers are sent, an error can no longer have its own HTTP status. So for a model that may
    reject a request, nothing is sent until its first output, or for some seconds.

    Args:
        send: Sends a message.
        start: The message before the first frames.
        grace: Seconds for which nothing is sent, unless ``release`` is called.
    """

    def __init__(self, send: Send, start: Message | None = None, grace: float = 0.0) -> None:
        self._send = send
        self._start = start
        self._grace = grace
        self._pending: list[bytes] = []
        self._size = 0
        self._has_pending = asyncio.Event()
        self._send_lock = asyncio.Lock()
        self._exit_stack = AsyncExitStack()
        self.is_released = False

    async def __aenter__(self) -> Self:
        flush_task = asyncio.create_task(self._flush_when_pending())
        timer = asyncio.get_running_loop().call_later(self._grace, self.release)
        self._exit_stack.push_async_callback(self._close, flush_task, timer)
        if not self._grace:
            self.release()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._exit_stack.aclose()

    async def _close(self, flush_task: "asyncio.Task[None]", timer: asyncio.TimerHandle) -> None:
        timer.cancel()
        if self.is_released:
            await self.flush()  # before the task is cancelled: during a send it would lose frames
        if flush_task.done():
            flush_task.result()
        flush_task.cancel()

    def release(self) -> None:
        """Send what is pending, and from now on all frames."""
        if not self.is_released:
            self.is_released = True
            self._has_pending.set()

    async def put(self, frames: Sequence[bytes]) -> None:
        """Add frames; wait only if more than ``MAX_PENDING_BYTES`` are pending."""
        if not frames:
            return
        self._pending += frames
        self._size += sum(map(len, frames))
        if self.is_released:
            self._has_pending.set()
            if self._size > MAX_PENDING_BYTES:
                await self.flush()

    async def flush(self) -> None:
        """Send the pending frames."""
        async with self._send_lock:
            self._has_pending.clear()
            start = self._start
            if start is not None:
                self._start = None
                await self._send({**start})
            if self._pending:
                body = b"".join(self._pending)
                self._pending.clear()
                self._size = 0
                await self._send({"type": "http.response.body", "body": body, "more_body": True})

    async def _flush_when_pending(self) -> None:
        while True:
            await self._has_pending.wait()
            await self.flush()
