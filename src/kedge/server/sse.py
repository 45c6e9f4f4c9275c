"""Events on the wire: server-sent events over a real socket, as they happen."""

import asyncio
from collections.abc import Sequence

from starlette.types import Receive, Scope, Send

from kedge.server.answering import Run
from kedge.server.output import Event
from kedge.server.wire import encode

DONE = b"data: [DONE]\n\n"
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
]
WATCH_AFTER = 0.05
"""Seconds until a run is worth a task that watches whether its client is still there."""


class EventStream:
    """The answer to a streaming request: an ASGI response that runs the model."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._number = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send every event, then the terminator."""

        async def emit(events: Sequence[Event]) -> None:
            body = b"".join(map(self._frame, events))
            await send({"type": "http.response.body", "body": body, "more_body": True})

        await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
        with Watch(self._run, receive):
            await self._run.live(emit)
        await send({"type": "http.response.body", "body": DONE, "more_body": False})

    def _frame(self, event: Event) -> bytes:
        event["sequence_number"] = self._number
        self._number += 1
        return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), encode(event))


class Watch:
    """Ends a run when its client goes away. Short runs are over before it even looks."""

    def __init__(self, run: Run, receive: Receive) -> None:
        self._run = run
        self._receive = receive
        self._task: asyncio.Task[None] | None = None

    def __enter__(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(WATCH_AFTER, self._start)

    def __exit__(self, *exc: object) -> None:
        self._timer.cancel()
        if self._task is not None:
            self._task.cancel()

    def _start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._look())

    async def _look(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._run.stop("cancelled")
