"""One WebSocket connection: messages in, events out, within its limits.

A lane (``stream_id``) is a queue: its requests run one after the other, those of different lanes at
the same time, as many as may. The connection lives for its time and is then closed, as soon as what
runs on it has ended; so it is when the server stops.
"""

import asyncio
import re
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

from starlette.types import Receive, Scope, Send

from kedge.server import errors
from kedge.server.service import Service
from kedge.server.shapes.language import kind_of
from kedge.server.sockets.inner import Inner, envelope
from kedge.server.sockets.memory import Memory, Place
from kedge.server.validation import parse_body

DEFAULT = ""
"""The name, among ourselves, of the lane that has none; no client can send it."""

STREAM_ID = re.compile(r"[A-Za-z0-9_.-]{1,256}")
CREATE = "response.create"

GOING_AWAY, RESTARTING, BROKEN, NOT_TEXT = 1001, 1012, 1011, 1003


@dataclass(frozen=True, slots=True)
class Job:
    """A request that waits for its turn."""

    stream_id: str | None
    body: dict[str, Any]
    size: int


class Connection:
    """One connection, from its handshake to its end."""

    def __init__(self, service: Service, scope: Scope, receive: Receive, send: Send) -> None:
        self._service = service
        self._limits = service.settings.limits
        self._scope = scope
        self._receive = receive
        self._send = send
        self._memory = Memory(self._limits.socket_memory_bytes)
        self._lanes: dict[str, deque[Job]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._waiting = 0
        self._waiting_bytes = 0
        self._turns = asyncio.Semaphore(self._limits.socket_in_flight)
        self._gone = asyncio.Event()
        self._opened = service.clock()
        self._parting: errors.ApiError | None = None
        self._close_code = 0

    async def serve(self) -> None:
        """Take the connection, and everything that comes over it."""
        await self._receive()  # what announces the connection
        await self._send({"type": "websocket.accept"})
        self._service.sockets.add(self)
        loop = asyncio.get_running_loop()
        timer = loop.call_later(self._limits.socket_seconds, self._expire)
        try:
            await self._read()
        finally:
            timer.cancel()
            self._gone.set()
            self._service.sockets.discard(self)
            if self._tasks:
                await asyncio.wait(self._tasks)

    def finish(self) -> None:
        """Take no more requests, because the server stops."""
        self._part(RESTARTING, errors.SERVER_STOPPING())

    def _part(self, code: int, words: errors.ApiError) -> None:
        """Close with these words, as soon as the requests that were taken are answered."""
        self._close_code = self._close_code or code
        self._parting = self._parting or words
        if not self._tasks:
            self._start(self._close())

    def hang_up(self) -> None:
        """Break off, whatever runs on it."""
        self._start(self._close(BROKEN))

    def forget(self) -> None:
        """Lose everything that was only remembered here."""
        self._memory.clear()

    async def _read(self) -> None:
        while True:
            message = await self._receive()
            if message["type"] == "websocket.disconnect":
                return
            text = message.get("text")
            if text is None:
                await self._close(NOT_TEXT)
            else:
                await self._take(text)

    async def _take(self, text: str) -> None:
        stream_id: str | None = None
        try:
            body = _message(text)
            stream_id = _lane_of(body)
            self._queue(Job(stream_id, body, len(text)))
        except errors.ApiError as error:
            await self._refuse(error, stream_id)

    def _queue(self, job: Job) -> None:
        if self._parting is None and self._age() >= self._limits.socket_seconds:
            self._expire()
        if self._parting is not None:
            raise self._parting
        lane = DEFAULT if job.stream_id is None else job.stream_id
        if lane not in self._lanes and lane is not DEFAULT:
            named = len(self._lanes.keys() - {DEFAULT})
            if named >= self._limits.socket_lanes:
                raise errors.TOO_MANY_LANES(most=self._limits.socket_lanes)
        size = self._waiting_bytes + job.size
        if self._waiting >= self._limits.socket_waiting or size > self._limits.body_bytes:
            raise errors.TOO_MANY_WAITING()
        self._waiting += 1
        self._waiting_bytes = size
        queue = self._lanes.setdefault(lane, deque())
        queue.append(job)
        if len(queue) == 1:
            self._start(self._work(lane, queue))

    async def _work(self, lane: str, queue: deque[Job]) -> None:
        """Answer the requests of a lane, one after the other, until none is left."""
        while queue and not self._gone.is_set():
            async with self._turns:
                job = queue[0]
                self._waiting -= 1
                self._waiting_bytes -= job.size
                if not self._gone.is_set():
                    await self._answer(job, lane)
            queue.popleft()

    async def _answer(self, job: Job, lane: str) -> None:
        inner = Inner(job.stream_id, self._gone, self._say)
        body = {name: value for name, value in job.body.items() if name not in ENVELOPE}
        place = Place(self._memory, lane)
        await inner.ask(self._scope["app"], self._scope, {**body, "stream": True}, place)
        previous = body.get("previous_response_id")
        if inner.failed and isinstance(previous, str):
            self._memory.forget(lane, previous)
        if not inner.ended:
            await self._close(BROKEN)

    def _expire(self) -> None:
        minutes = f"{self._limits.socket_seconds / 60:g}"
        self._part(GOING_AWAY, errors.SOCKET_TOO_OLD(minutes=minutes))

    def _age(self) -> float:
        return self._service.clock() - self._opened

    def _start(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._close_code = self._close_code or BROKEN  # a bug of ours; it is in the log already
        if self._close_code and not self._tasks and not self._gone.is_set():
            self._start(self._close())

    async def _close(self, code: int = 0) -> None:
        if self._gone.is_set():
            return
        if self._parting is not None and not code:
            await self._refuse(self._parting, None)
        self._gone.set()
        with suppress(OSError, RuntimeError):  # it is closed already
            await self._send({"type": "websocket.close", "code": code or self._close_code})

    async def _refuse(self, error: errors.ApiError, stream_id: str | None) -> None:
        await self._say(envelope(error.status, error.body()["error"], stream_id))

    async def _say(self, message: bytes) -> None:
        if not self._gone.is_set():
            with suppress(OSError):  # the client is gone, and whoever reads is told so
                await self._send({"type": "websocket.send", "text": message.decode()})


ENVELOPE = frozenset({"type", "stream_id"})
"""What of a message is not the request itself."""


def _message(text: str) -> dict[str, Any]:
    body = parse_body(text.encode())
    if type(body) is not dict:
        raise errors.BODY_NOT_OBJECT(got=kind_of(body))
    held = cast("dict[str, Any]", body)
    if "type" not in held:
        raise errors.MISSING(path="type")
    if held["type"] != CREATE:
        raise errors.WRONG_VALUE(path="type", value=held["type"], supported=f"'{CREATE}'")
    return held


def _lane_of(body: Mapping[str, Any]) -> str | None:
    if "stream_id" not in body:
        return None
    stream_id = body["stream_id"]
    if not isinstance(stream_id, str) or not STREAM_ID.fullmatch(stream_id):
        raise errors.BAD_STREAM_ID()
    return stream_id
