"""Events on the wire: server-sent events over a real socket, as they happen.

A write to a socket costs more than the event in it, so events that come at once travel together: an
``Outbox`` sends whatever has gathered as soon as the model waits for anything.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from typing import Self

from starlette.types import Receive, Scope, Send

from kedge.server.answering import Run
from kedge.server.opening import Opening
from kedge.server.output import Event
from kedge.server.patience import Patience
from kedge.server.service import Stoppable
from kedge.server.wire import encode

DONE = b"data: [DONE]\n\n"
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
]
LONGEST = 24 * 3600.0
"""Seconds for which a reader may wait for the end of a stream."""

PREAMBLE = frozenset({"response.created", "response.in_progress"})
"""Events that come before the model has said anything."""
MOST_WAITING = 16 * 1024
"""Bytes of events that may gather before the writer of them has to wait for the socket."""


class Frames:
    """Writes the events of one stream as frames, numbered from nought."""

    def __init__(self) -> None:
        self._number = 0

    def __call__(self, event: Event) -> bytes:
        """Write the next event."""
        event["sequence_number"] = self._number
        self._number += 1
        return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), encode(event))


class EventStream:
    """The answer to a streaming request: an ASGI response that runs the model."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._framed = Frames()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send every event, then the terminator."""

        async def emit(events: Sequence[Event]) -> None:
            if not opening.released and self._has_begun(events):
                await opening.release()
            await outbox.put(b"".join(map(self._framed, events)))

        opening = Opening(send, self._run.draft.model.grace)
        try:
            await opening({"type": "http.response.start", "status": 200, "headers": HEADERS})
            async with Outbox(opening) as outbox:
                with Watch(self._run, receive) as watch:
                    await self._run.live(emit, watch.start)
        finally:
            self._run.end()
            opening.close()
        if self._run.error is not None and not opening.released:
            raise self._run.error
        await opening.release()
        await send({"type": "http.response.body", "body": DONE, "more_body": False})

    def _has_begun(self, events: Sequence[Event]) -> bool:
        """Whether the model has something to say, and not only the server."""
        return self._run.error is None and any(event["type"] not in PREAMBLE for event in events)


class Cut(Exception):
    """A stream cannot go on, because what comes next is lost."""


class Replay:
    """The answer to who reads a stream that others may read as well: to leave it stops nothing."""

    def __init__(self, frames: AsyncIterator[bytes]) -> None:
        self._frames = frames
        self._patience = Patience(LONGEST)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send what there is and what comes, then the terminator."""
        await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
        with Watch(self, receive) as watch, self._patience, suppress(Cut):
            watch.start()
            async for frames in self._frames:
                await send({"type": "http.response.body", "body": frames, "more_body": True})
            await send({"type": "http.response.body", "body": DONE, "more_body": False})

    def stop(self, status: str) -> None:
        """Leave off, because the reader is gone."""
        self._patience.end()


class Outbox:
    """Frames on their way out, sent in their order and together where they came together."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._waiting: list[bytes] = []
        self._size = 0
        self._filled = asyncio.Event()
        self._sending = asyncio.Lock()

    async def __aenter__(self) -> Self:
        self._carrier = asyncio.create_task(self._carry())
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.flush()  # first: a carrier that is cancelled while it sends loses what it holds
        if self._carrier.done():
            self._carrier.result()
        self._carrier.cancel()

    async def put(self, frames: bytes) -> None:
        """Take frames; wait only when more has gathered than should."""
        self._waiting.append(frames)
        self._size += len(frames)
        self._filled.set()
        if self._size > MOST_WAITING:
            await self.flush()

    async def flush(self) -> None:
        """Send what has gathered."""
        async with self._sending:
            if not self._waiting:
                return
            body = b"".join(self._waiting)
            self._waiting.clear()
            self._filled.clear()
            self._size = 0
            await self._send({"type": "http.response.body", "body": body, "more_body": True})

    async def _carry(self) -> None:
        """Send whenever the model lets us: this task runs while the other one waits."""
        while True:
            await self._filled.wait()
            await self.flush()


class Watch:
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
        self._task = asyncio.get_running_loop().create_task(self._look())

    async def _look(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._run.stop("cancelled")
