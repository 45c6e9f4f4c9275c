"""WebSocket mode: many responses over one connection, which also has unstored responses in memory.

A connection receives requests and sends events, within its limits. A lane (``stream_id``) is a queue: its requests run
one after the other, requests of different lanes at the same time, up to a limit. Each request is sent through the same
app as over HTTP, and its response is sent back as messages. After its lifetime, or when the server stops, the
connection is closed as soon as its running requests have ended.
"""

import asyncio
import json
import re
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, cast

from msgspec import Struct
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocketDisconnect

from kedge._internal.json_text import decode, encode
from kedge._internal.large_json import LARGE_BYTES
from kedge._internal.responsive import TimeSlice, compute
from kedge.server import errors
from kedge.server.request_log import WEBSOCKET_SCOPE_KEY
from kedge.server.schema.requests import parse_body
from kedge.server.sse import DONE_FRAME, FRAME_END
from kedge.server.state import ServerState
from kedge.server.storage.context import LaneMemory, SocketMemory

RESPONSES_PATH = "/v1/responses"
FORWARDED_HEADERS = (b"retry-after", b"x-request-id")
"""Headers of an error response that are included in the message."""
FAILURE_EVENTS = frozenset({"error", "response.failed"})
SHARED_SCOPE = ("asgi", "http_version", "root_path", "client", "server")
"""The members of the scope of a connection that are in the scope of each request."""
HOP_HEADERS = frozenset({b"connection", b"upgrade", b"content-length", b"content-type"})

SendMessage = Callable[[bytes], Awaitable[None]]
"""Sends one message to the client."""


class AsgiBridge:
    """One request of a WebSocket connection, sent through the app, and its response, sent as messages.

    The request passes the same middleware as one over HTTP (request id, access log, authentication, fault
    injection), so its response is the same. Only the format differs: events are sent as messages, and an
    error is an event, too.
    """

    def __init__(
        self, stream_id: str | None, closed: asyncio.Event, send_message: SendMessage
    ) -> None:
        self._suffix = b""
        """The end of each event on a lane with a name."""
        if stream_id is not None:
            self._suffix = b',"stream_id":' + encode(stream_id) + b"}"
        self._stream_id = stream_id
        self._closed = closed
        self._send_message = send_message
        self._status = 0
        self._headers: dict[bytes, bytes] = {}
        self._body: bytes | None = None
        self._buffer = b""
        self.has_failed = False
        self.is_complete = False
        """Whether the response is complete; if not, the connection must be closed, as with HTTP."""

    async def handle(
        self,
        app: ASGIApp,
        outer: Scope,
        body: Mapping[str, Any],
        memory: LaneMemory,
        *,
        is_long: bool,
    ) -> None:
        """Send a request through the app, and its response to the client."""
        # Escaped to ASCII, so that lone surrogates reach the validation and are rejected there.
        text = await compute(partial(json.dumps, body), is_long=is_long)
        self._body = text.encode()
        await app(_build_scope(outer, memory), self._receive, self._send)

    async def _receive(self) -> Message:
        body = self._body
        if body is not None:
            self._body = None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._closed.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            self._headers = dict(message["headers"])
            return
        self._buffer += message.get("body", b"")
        self.is_complete = not message.get("more_body")
        if self._status == 200:
            await self._forward_events()
        elif self.is_complete:
            await self._forward_error()

    async def _forward_events(self) -> None:
        *frames, self._buffer = self._buffer.split(FRAME_END)
        for frame in frames:
            if frame + FRAME_END != DONE_FRAME:
                await self._forward_event(frame)

    async def _forward_event(self, frame: bytes) -> None:
        name, _, data = frame.partition(b"\ndata: ")
        kind = name.removeprefix(b"event: ").decode()
        self.has_failed = self.has_failed or kind in FAILURE_EVENTS
        if kind == "error":
            event = decode(data)
            number = event.pop("sequence_number")
            await self._send_error({**event, "type": "server_error"}, sequence_number=number)
        else:
            if self._suffix:
                data = data[:-1] + self._suffix
            await self._send_message(data)

    async def _forward_error(self) -> None:
        self.has_failed = True
        body: dict[str, Any] = decode(self._buffer)
        # Injected faults may have the error format of another server, which is sent unchanged.
        error = body.get("error")
        fields = cast("dict[str, Any]", error) if isinstance(error, dict) else body
        headers = {
            name.decode(): self._headers[name].decode()
            for name in FORWARDED_HEADERS
            if name in self._headers
        }
        await self._send_error({**fields, "headers": headers}, status=self._status)

    async def _send_error(self, error: Mapping[str, Any], **members: object) -> None:
        await self._send_message(errors.encode_error_event(error, self._stream_id, **members))


def _build_scope(outer: Scope, memory: LaneMemory) -> Scope:
    headers = [
        (name, value)
        for name, value in outer["headers"]
        if name not in HOP_HEADERS and not name.startswith(b"sec-websocket-")
    ]
    return {
        **{name: outer[name] for name in SHARED_SCOPE},
        "type": "http",
        "method": "POST",
        "scheme": {"ws": "http", "wss": "https"}[outer["scheme"]],
        "path": RESPONSES_PATH,
        "raw_path": RESPONSES_PATH.encode(),
        "query_string": b"",
        "headers": [*headers, (b"content-type", b"application/json")],
        "state": outer.get("state", {}),
        WEBSOCKET_SCOPE_KEY: memory,
    }


DEFAULT_LANE = ""
"""The internal name of the lane without a ``stream_id``; clients cannot send it."""

STREAM_ID_PATTERN = re.compile(r"[A-Za-z0-9_.-]{1,256}")
CREATE_TYPE = "response.create"

# The close codes of RFC 6455.
GOING_AWAY = 1001
UNSUPPORTED_DATA = 1003
INTERNAL_ERROR = 1011
SERVICE_RESTART = 1012


class QueuedRequest(Struct):
    """A queued request."""

    stream_id: str | None
    body: dict[str, Any]
    size: int


class ServerConnection:
    """One WebSocket connection."""

    def __init__(self, service: ServerState, scope: Scope, receive: Receive, send: Send) -> None:
        self._service = service
        self._limits = service.settings.limits
        self._scope = scope
        self._receive = receive
        self._send = send
        self._memory = SocketMemory(self._limits.socket_memory_bytes)
        self._lanes: dict[str, deque[QueuedRequest]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._queued = 0
        self._queued_bytes = 0
        self._slots = asyncio.Semaphore(self._limits.socket_in_flight)
        self._closed = asyncio.Event()
        self._opened_at = service.clock()
        self._close_error: errors.ApiError | None = None
        self._close_code = 0

    async def serve(self) -> None:
        """Accept the connection and serve its requests until it is closed."""
        await self._receive()  # websocket.connect
        await self._send({"type": "websocket.accept"})
        self._service.sockets.add(self)
        loop = asyncio.get_running_loop()
        timer = loop.call_later(self._limits.socket_seconds, self._expire)
        try:
            await self._read_messages()
        finally:
            timer.cancel()
            self._closed.set()
            self._service.sockets.discard(self)
            if self._tasks:
                await asyncio.wait(self._tasks)

    def finish(self) -> None:
        """Accept no more requests, because the server stops."""
        self._begin_close(SERVICE_RESTART, errors.SERVER_STOPPING())

    def _begin_close(self, code: int, error: errors.ApiError) -> None:
        """Close with this code and error as soon as all accepted requests have ended."""
        self._close_code = self._close_code or code
        self._close_error = self._close_error or error
        if not self._tasks:
            self._start_task(self._close())

    def hang_up(self) -> None:
        """Close the connection at once."""
        self._start_task(self._close(INTERNAL_ERROR))

    def forget(self) -> None:
        """Forget the unstored responses of this connection."""
        self._memory.clear()

    async def _read_messages(self) -> None:
        time_slice = TimeSlice()  # a client may have sent thousands of messages
        while True:
            await time_slice.share()
            message = await self._receive()
            if message["type"] == "websocket.disconnect":
                return
            text = message.get("text")
            if text is None:
                await self._close(UNSUPPORTED_DATA)
            else:
                await self._handle_message(text)

    async def _handle_message(self, text: str) -> None:
        stream_id: str | None = None
        try:
            parse = partial(_parse_message, text)
            body = await compute(parse, is_long=len(text) > LARGE_BYTES)
            stream_id = _parse_stream_id(body)
            self._enqueue(QueuedRequest(stream_id, body, len(text)))
        except errors.ApiError as error:
            await self._send_error(error, stream_id)

    def _enqueue(self, request: QueuedRequest) -> None:
        age = self._service.clock() - self._opened_at
        if self._close_error is None and age >= self._limits.socket_seconds:
            self._expire()
        if self._close_error is not None:
            raise self._close_error
        lane = DEFAULT_LANE if request.stream_id is None else request.stream_id
        if lane not in self._lanes and lane is not DEFAULT_LANE:
            lane_count = len(self._lanes.keys() - {DEFAULT_LANE})
            if lane_count >= self._limits.socket_lanes:
                raise errors.TOO_MANY_LANES(most=self._limits.socket_lanes)
        size = self._queued_bytes + request.size
        if self._queued >= self._limits.socket_waiting or size > self._limits.body_bytes:
            raise errors.WEBSOCKET_QUEUE_FULL()
        self._queued += 1
        self._queued_bytes = size
        queue = self._lanes.setdefault(lane, deque())
        queue.append(request)
        if len(queue) == 1:
            self._start_task(self._run_lane(lane, queue))

    async def _run_lane(self, lane: str, queue: deque[QueuedRequest]) -> None:
        """Run the requests of a lane, one after the other, until none is left."""
        while queue and not self._closed.is_set():
            async with self._slots:
                request = queue[0]
                self._queued -= 1
                self._queued_bytes -= request.size
                if not self._closed.is_set():
                    await self._run_request(request, lane)
            queue.popleft()

    async def _run_request(self, request: QueuedRequest, lane: str) -> None:
        bridge = AsgiBridge(request.stream_id, self._closed, self._send_message)
        body = {name: value for name, value in request.body.items() if name not in ENVELOPE_MEMBERS}
        memory = LaneMemory(self._memory, lane)
        await bridge.handle(
            self._scope["app"],
            self._scope,
            {**body, "stream": True},
            memory,
            is_long=request.size > LARGE_BYTES,
        )
        previous = body.get("previous_response_id")
        if bridge.has_failed and isinstance(previous, str):
            self._memory.forget(lane, previous)
        if not bridge.is_complete:
            await self._close(INTERNAL_ERROR)

    def _expire(self) -> None:
        minutes = f"{self._limits.socket_seconds / 60:g}"
        self._begin_close(GOING_AWAY, errors.CONNECTION_EXPIRED(minutes=minutes))

    def _start_task(self, coroutine: Any) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)

    def _on_task_done(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._close_code = self._close_code or INTERNAL_ERROR  # the error has been logged
        if self._close_code and not self._tasks and not self._closed.is_set():
            self._start_task(self._close())

    async def _close(self, code: int = 0) -> None:
        if self._closed.is_set():
            return
        if self._close_error is not None and not code:
            await self._send_error(self._close_error, None)
        self._closed.set()
        with suppress(WebSocketDisconnect, RuntimeError):  # already closed
            await self._send({"type": "websocket.close", "code": code or self._close_code})

    async def _send_error(self, error: errors.ApiError, stream_id: str | None) -> None:
        fields = error.body()["error"]
        await self._send_message(errors.encode_error_event(fields, stream_id, status=error.status))

    async def _send_message(self, message: bytes) -> None:
        if self._closed.is_set():
            return
        try:
            await self._send({"type": "websocket.send", "text": message.decode()})
        except WebSocketDisconnect:  # the client has left: its responses are cancelled
            self._closed.set()


ENVELOPE_MEMBERS = frozenset({"type", "stream_id"})
"""Members of a message that are not part of the request."""


def _parse_message(text: str) -> dict[str, Any]:
    fields = parse_body(text.encode())
    if "type" not in fields:
        raise errors.MISSING_PARAMETER(path="type")
    if fields["type"] != CREATE_TYPE:
        raise errors.INVALID_VALUE(path="type", value=fields["type"], supported=f"'{CREATE_TYPE}'")
    return fields


def _parse_stream_id(body: Mapping[str, Any]) -> str | None:
    if "stream_id" not in body:
        return None
    stream_id = body["stream_id"]
    if not isinstance(stream_id, str) or not STREAM_ID_PATTERN.fullmatch(stream_id):
        raise errors.INVALID_STREAM_ID()
    return stream_id
