"""One message as one request: the app answers it as it answers any other, and never knows.

The request goes through the same stack as one over HTTP (its id, its log line, the guard, armed
faults), so that a response made here is in every way one that could have been made there. What
differs is only the form: events travel as messages, and a refusal is an event too.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, cast

from starlette.types import ASGIApp, Message, Scope

from kedge.server.json_codec import encode
from kedge.server.request_log import WEBSOCKET_SCOPE_KEY
from kedge.server.websocket.memory import LaneMemory

RESPONSES_PATH = "/v1/responses"
FRAME_END = b"\n\n"
DONE = b"data: [DONE]"
FORWARDED_HEADERS = (b"retry-after", b"x-request-id")
"""Headers of a refusal that are told within it."""
FAILURE_EVENTS = frozenset({"error", "response.failed"})
HOP_HEADERS = frozenset({b"connection", b"upgrade", b"content-length", b"content-type"})

SendMessage = Callable[[bytes], Awaitable[None]]
"""Sends one message to the client."""


class AsgiBridge:
    """One request on its way through the app."""

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
        """Whether the answer came to its end; if not, the connection is to break, like that of HTTP."""

    async def handle(
        self, app: ASGIApp, outer: Scope, body: Mapping[str, Any], memory: LaneMemory
    ) -> None:
        """Send a request through the app, and tell its answer."""
        # ASCII, because what is no character must reach the checks and be refused there.
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
        *whole, self._buffer = self._buffer.split(FRAME_END)
        for block in whole:
            if block != DONE:
                await self._forward_event(block)

    async def _forward_event(self, block: bytes) -> None:
        name, _, data = block.partition(b"\ndata: ")
        kind = name.removeprefix(b"event: ").decode()
        self.has_failed = self.has_failed or kind in FAILURE_EVENTS
        if kind == "error":
            data = encode(_nest_error(json.loads(data)))
        await self._send_message(data[:-1] + self._suffix if self._suffix else data)

    async def _forward_error(self) -> None:
        self.has_failed = True
        refusal: dict[str, Any] = json.loads(self._buffer)
        # Faults speak in the words of servers whose refusals have other shapes; those go out as they are.
        error = refusal.get("error")
        told = cast("dict[str, Any]", error) if isinstance(error, dict) else refusal
        headers = {
            name.decode(): self._headers[name].decode()
            for name in FORWARDED_HEADERS
            if name in self._headers
        }
        await self._send_message(
            encode_error(self._status, {**told, "headers": headers}, self._stream_id)
        )


def encode_error(status: int, error: Mapping[str, Any], stream_id: str | None) -> bytes:
    """Write an error as the API does on a socket."""
    lane = {} if stream_id is None else {"stream_id": stream_id}
    return encode({"type": "error", "status": status, **lane, "error": error})


def _nest_error(event: dict[str, Any]) -> dict[str, Any]:
    """Write the error of a stream as a socket tells it: its words in a member of their own."""
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
