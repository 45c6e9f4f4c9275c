"""Send one WebSocket message as a request through the app, and its response as messages.

The request passes the same middleware as one over HTTP (request id, access log, authentication, fault
injection), so its response is the same. Only the format differs: events are sent as messages, and an
error is an event, too.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, cast

from starlette.types import ASGIApp, Message, Scope

from kedge.server.json_codec import decode, encode
from kedge.server.request_log import WEBSOCKET_SCOPE_KEY
from kedge.server.websocket.memory import LaneMemory

RESPONSES_PATH = "/v1/responses"
FRAME_END = b"\n\n"
DONE = b"data: [DONE]"
FORWARDED_HEADERS = (b"retry-after", b"x-request-id")
"""Headers of an error response that are included in the message."""
FAILURE_EVENTS = frozenset({"error", "response.failed"})
HOP_HEADERS = frozenset({b"connection", b"upgrade", b"content-length", b"content-type"})

SendMessage = Callable[[bytes], Awaitable[None]]
"""Sends one message to the client."""


class AsgiBridge:
    """One request of a WebSocket connection."""

    def __init__(
        self, stream_id: str | None, closed: asyncio.Event, send_message: SendMessage
    ) -> None:
        self._suffix = b"" if stream_id is None else b',"stream_id":' + encode(stream_id) + b"}"
        self._stream_id = stream_id
        self._closed = closed
        self._send_message = send_message
        self._status = 0
        self._headers: dict[bytes, bytes] = {}
        self._buffer = b""
        self.has_failed = False
        self.is_complete = False
        """Whether the response is complete; if not, the connection must be closed, as with HTTP."""

    async def handle(
        self, app: ASGIApp, outer: Scope, body: Mapping[str, Any], memory: LaneMemory
    ) -> None:
        """Send a request through the app, and its response to the client."""
        # Escaped to ASCII, so that lone surrogates reach the validation and are rejected there.
        self._body: bytes | None = json.dumps(body).encode()
        await app(_build_scope(outer, memory), self._receive, self._send)

    async def _receive(self) -> Message:
        body, self._body = self._body, None
        if body is not None:
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
            if frame != DONE:
                await self._forward_event(frame)

    async def _forward_event(self, frame: bytes) -> None:
        name, _, data = frame.partition(b"\ndata: ")
        kind = name.removeprefix(b"event: ").decode()
        self.has_failed = self.has_failed or kind in FAILURE_EVENTS
        if kind == "error":
            data = encode(_nest_error(decode(data)))
        await self._send_message(data[:-1] + self._suffix if self._suffix else data)

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
        await self._send_message(
            encode_error(self._status, {**fields, "headers": headers}, self._stream_id)
        )


def encode_error(status: int, error: Mapping[str, Any], stream_id: str | None) -> bytes:
    """Encode an error as a WebSocket message."""
    lane = {} if stream_id is None else {"stream_id": stream_id}
    return encode({"type": "error", "status": status, **lane, "error": error})


def _nest_error(event: dict[str, Any]) -> dict[str, Any]:
    """Convert the error event of a stream to that of a WebSocket, with the error in its own member."""
    outside = {"type": event.pop("type"), "sequence_number": event.pop("sequence_number")}
    return {**outside, "error": {"type": "server_error", **event}}


def _build_scope(outer: Scope, memory: LaneMemory) -> Scope:
    headers = [pair for pair in outer["headers"] if not _is_socket_header(pair[0])]
    return {
        "type": "http",
        "asgi": outer["asgi"],
        "http_version": outer["http_version"],
        "method": "POST",
        "scheme": {"ws": "http", "wss": "https"}[outer["scheme"]],
        "path": RESPONSES_PATH,
        "raw_path": RESPONSES_PATH.encode(),
        "query_string": b"",
        "root_path": outer["root_path"],
        "headers": [*headers, (b"content-type", b"application/json")],
        "client": outer["client"],
        "server": outer["server"],
        "state": outer.get("state", {}),
        WEBSOCKET_SCOPE_KEY: memory,
    }


def _is_socket_header(name: bytes) -> bool:
    return name in HOP_HEADERS or name.startswith(b"sec-websocket-")
