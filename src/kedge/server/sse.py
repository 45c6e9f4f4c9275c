"""Events on the wire: server-sent events over a real socket, as they happen.

A write to a socket costs more than the event in it, so events that come at once travel together: an
``Outbox`` sends whatever has gathered as soon as the model waits for anything.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from typing import Self

from starlette.types import Message, Receive, Scope, Send

from kedge.server.deadline import Deadline
from kedge.server.json_codec import encode
from kedge.server.output_writer import StreamEvent
from kedge.server.response_run import ResponseRun
from kedge.server.state import Stoppable


class DelayedStart:
    """Stands for ``send`` and holds everything back until it is released, or for ``grace``."""

    def __init__(self, send: Send, grace: float) -> None:
        self._send = send
        self._pending: list[Message] = []
        self._send_lock = asyncio.Lock()
        self.released = not grace
        self._timer: asyncio.Task[None] | None = None
        if grace:
            self._timer = asyncio.create_task(self._release_after(grace))

    async def __call__(self, message: Message) -> None:
        """Send a message, now or when the stream is opened."""
        if self.released:
            async with self._send_lock:
                await self._send(message)
        else:
            self._pending.append(message)

    async def release(self) -> None:
        """Open the stream: send what was held back."""
        async with self._send_lock:
            self.released = True
            held, self._pending = self._pending, []
            for message in held:
                await self._send(message)

    def close(self) -> None:
        """Wait no longer."""
        if self._timer is not None:
            self._timer.cancel()

    async def _release_after(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        await self.release()


DONE_FRAME = b"data: [DONE]\n\n"
SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
]
MAX_STREAM_SECONDS = 24 * 3600.0
"""Seconds for which a reader may wait for the end of a stream."""

PREAMBLE_EVENTS = frozenset({"response.created", "response.in_progress"})
"""Events that come before the model has said anything."""
MAX_PENDING_BYTES = 16 * 1024
"""Bytes of events that may gather before the writer of them has to wait for the socket."""


class SSEEncoder:
    """Writes the events of one stream as frames, numbered from nought."""

    def __init__(self) -> None:
        self._number = 0

    def __call__(self, event: StreamEvent) -> bytes:
        """Write the next event."""
        event["sequence_number"] = self._number
        self._number += 1
        return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), encode(event))


class EventStream:
    """The answer to a streaming request: an ASGI response that runs the model."""

    def __init__(self, run: ResponseRun) -> None:
        self._run = run
        self._encoder = SSEEncoder()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send every event, then the terminator."""

        async def emit(events: Sequence[StreamEvent]) -> None:
            if not opening.released and self._has_model_output(events):
                await opening.release()
            await outbox.put(b"".join(map(self._encoder, events)))

        opening = DelayedStart(send, self._run.draft.model.grace)
        try:
            await opening({"type": "http.response.start", "status": 200, "headers": SSE_HEADERS})
            async with BufferedSender(opening) as outbox:
                with DisconnectWatcher(self._run, receive) as watch:
                    await self._run.stream(emit, watch.start)
        finally:
            self._run.end()
            opening.close()
        if self._run.error is not None and not opening.released:
            raise self._run.error
        await opening.release()
        await send({"type": "http.response.body", "body": DONE_FRAME, "more_body": False})

    def _has_model_output(self, events: Sequence[StreamEvent]) -> bool:
        """Whether the model has something to say, and not only the server."""
        return self._run.error is None and any(
            event["type"] not in PREAMBLE_EVENTS for event in events
        )


class EventsDropped(Exception):
    """A stream cannot go on, because what comes next is lost."""


class ReplayStream:
    """The answer to who reads a stream that others may read as well: to leave it stops nothing."""

    def __init__(self, frames: AsyncIterator[bytes]) -> None:
        self._frames = frames
        self._deadline = Deadline(MAX_STREAM_SECONDS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send what there is and what comes, then the terminator."""
        await send({"type": "http.response.start", "status": 200, "headers": SSE_HEADERS})
        with DisconnectWatcher(self, receive) as watch, self._deadline, suppress(EventsDropped):
            watch.start()
            async for frames in self._frames:
                await send({"type": "http.response.body", "body": frames, "more_body": True})
            await send({"type": "http.response.body", "body": DONE_FRAME, "more_body": False})

    def stop(self, status: str) -> None:
        """Leave off, because the reader is gone."""
        self._deadline.cancel()


class BufferedSender:
    """Frames on their way out, sent in their order and together where they came together."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._pending: list[bytes] = []
        self._size = 0
        self._has_pending = asyncio.Event()
        self._send_lock = asyncio.Lock()

    async def __aenter__(self) -> Self:
        self._flush_task = asyncio.create_task(self._flush_when_pending())
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.flush()  # first: a carrier that is cancelled while it sends loses what it holds
        if self._flush_task.done():
            self._flush_task.result()
        self._flush_task.cancel()

    async def put(self, frames: bytes) -> None:
        """Take frames; wait only when more has gathered than should."""
        self._pending.append(frames)
        self._size += len(frames)
        self._has_pending.set()
        if self._size > MAX_PENDING_BYTES:
            await self.flush()

    async def flush(self) -> None:
        """Send what has gathered."""
        async with self._send_lock:
            if not self._pending:
                return
            body = b"".join(self._pending)
            self._pending.clear()
            self._has_pending.clear()
            self._size = 0
            await self._send({"type": "http.response.body", "body": body, "more_body": True})

    async def _flush_when_pending(self) -> None:
        """Send whenever the model lets us: this task runs while the other one waits."""
        while True:
            await self._has_pending.wait()
            await self.flush()


class DisconnectWatcher:
    """Ends a run when its client goes away: once started, it looks until its block is left."""

    def __init__(self, run: Stoppable, receive: Receive) -> None:
        self._run = run
        self._receive = receive
        self._task: asyncio.Task[None] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._task is not None:
            self._task.cancel()

    def start(self) -> None:
        """Begin to look."""
        self._task = asyncio.get_running_loop().create_task(self._wait_for_disconnect())

    async def _wait_for_disconnect(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._run.stop("cancelled")
