"""WebSockets through a proxy: messages are passed on in both directions, and their tokens are counted."""

import json
from collections import deque
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from anyio import CancelScope, create_task_group
from anyio.abc import TaskGroup
from starlette.types import Scope
from starlette.websockets import WebSocket, WebSocketDisconnect
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Response as HandshakeResponse

from kedge._internal.json_text import decode_object
from kedge._internal.large_json import LARGE_BYTES
from kedge._internal.responsive import TimeSlice, compute
from kedge.chaining.proxy.access import TOKEN_HEADER, build_rejection, is_limited
from kedge.chaining.proxy.headers import filter_headers
from kedge.chaining.proxy.token_counts import UsageReader, estimate_tokens
from kedge.server.access import CALLER_KEY, AccessPolicy, Rejection
from kedge.server.errors import encode_error_event
from kedge.store import AccessToken

if TYPE_CHECKING:
    from kedge._internal.access_tokens import TokenReservation

HANDSHAKE = frozenset({b"host", b"origin", b"content-length", TOKEN_HEADER.encode()})
"""Headers of a WebSocket's handshake that are not forwarded, besides those of the protocol itself."""
HANDSHAKE_ANSWER = frozenset({b"content-length", b"location"})
"""Headers of the upstream's handshake response that are not forwarded: a redirect would bypass the proxy."""
LOCAL_CLOSE_CODES = {1005: 1000, 1006: 1011, 1015: 1011}
"""Close codes that are never sent, because they describe a missing code, and those that are sent instead."""
LAST_EVENTS = frozenset({"response.completed", "response.incomplete", "response.failed", "error"})
"""The events that end a response on a WebSocket."""


class Connect(connect):
    """Opens a connection to the upstream, and follows no redirect to another server."""

    def process_redirect(self, exc: Exception) -> Exception:
        """Return the error of a redirect, which is raised."""
        return exc


def list_handshake_headers(response: HandshakeResponse) -> list[tuple[bytes, bytes]]:
    """Return the headers of the upstream's handshake response that are passed on."""
    headers = (
        (key.encode(), value.encode("latin-1")) for key, value in response.headers.raw_items()
    )
    return filter_headers(headers, HANDSHAKE_ANSWER)


class SocketRelay:
    """Two connected WebSockets: of a client, and of the proxy to the upstream.

    Args:
        socket: The connection of the client.
        upstream: The connection to the upstream.
        policy: The access policy of the proxy.
    """

    def __init__(self, socket: WebSocket, upstream: ClientConnection, policy: AccessPolicy) -> None:
        self._socket = socket
        self._upstream = upstream
        self._meter = SocketMeter(policy, socket.scope.get(CALLER_KEY))
        self._close_code = 1000
        """With what the upstream's connection is closed: as the client closed its own."""
        self._close_reason = ""

    async def run(self) -> None:
        """Pass messages on in both directions until either side closes its connection."""
        async with create_task_group() as group:
            group.start_soon(self._send_to_upstream, group)
            with suppress(WebSocketDisconnect):
                with suppress(ConnectionClosed):
                    await self._send_to_client()
                if not group.cancel_scope.cancel_called:
                    await self._close_client()
            group.cancel_scope.cancel()
        await self._meter.close()
        await self._upstream.close(self._close_code, self._close_reason)

    async def _send_to_client(self) -> None:
        time_slice = TimeSlice()  # the upstream may always have sent more
        async for data in self._upstream:
            await time_slice.share()
            await self._meter.count(data)
            if isinstance(data, str):
                await self._socket.send_text(data)
            else:
                await self._socket.send_bytes(data)

    async def _send_to_upstream(self, group: TaskGroup) -> None:
        """Pass on the messages of the client, and end the relay when the client disconnects."""
        time_slice = TimeSlice()  # a client may have sent many messages
        try:
            while True:
                await time_slice.share()
                message = await self._socket.receive()
                if message["type"] == "websocket.disconnect":
                    code: int = message["code"]
                    self._close_code = LOCAL_CLOSE_CODES.get(code, code)
                    self._close_reason = message.get("reason") or ""
                    break
                data = message.get("text")
                if data is None:
                    data = message["bytes"]
                rejection = await self._meter.check(data)
                if rejection is None:
                    await self._upstream.send(data)
                else:
                    error = _format_socket_error(rejection, self._socket.scope)
                    await self._socket.send_text(error)
        except ConnectionClosed:  # the other direction passes on the close code
            return
        except WebSocketDisconnect:
            pass
        group.cancel_scope.cancel()

    async def _close_client(self) -> None:
        """Close the connection of the client as the upstream closed its own."""
        code = self._upstream.close_code or 1006
        await self._socket.close(LOCAL_CLOSE_CODES.get(code, code), self._upstream.close_reason)


def _format_socket_error(rejection: Rejection, scope: Scope) -> str:
    """Return a rejection as a WebSocket message, in the form of OpenAI's API."""
    error = json.loads(bytes(build_rejection(rejection, scope).body))["error"]
    fields = {**error, "headers": dict(rejection.headers)}
    return encode_error_event(fields, status=rejection.status).decode()


class SocketMeter:
    """The tokens of the responses on one WebSocket: reserved for each request, and counted at its end.

    Args:
        policy: The access policy of the proxy.
        caller: The caller, or None for the administrator.
    """

    def __init__(self, policy: AccessPolicy, caller: AccessToken | None) -> None:
        self._policy = policy
        self._caller = caller
        self._lanes: dict[str | None, deque[tuple[TokenReservation | None, UsageReader]]] = {}

    async def check(self, message: str | bytes) -> Rejection | None:
        """Check a message of the client, and reserve the tokens of its response; return the rejection or None."""
        rejection = await self._policy.check_message(self._caller)
        if rejection is not None:
            return rejection
        if not is_limited(self._caller):
            return None
        is_long = len(message) > LARGE_BYTES
        estimate = await compute(partial(estimate_tokens, message), is_long=is_long)
        reserved = await self._policy.reserve(self._caller, estimate.total)
        if isinstance(reserved, Rejection):
            return reserved
        members = await compute(partial(decode_object, message), is_long=is_long)
        lane = self._lanes.setdefault(_find_lane(members), deque())
        lane.append((reserved, UsageReader("", estimate.input)))
        return None

    async def count(self, data: str | bytes) -> None:
        """Count the tokens in a message of the upstream."""
        if not self._lanes:
            return
        event = decode_object(data)
        lane = self._lanes.get(_find_lane(event))
        if not lane:
            return
        reservation, reader = lane[0]
        reader.read(data)
        if str(event.get("type")) in LAST_EVENTS:
            lane.popleft()
            await self._policy.settle(reservation, reader.finish(), self._caller)

    async def close(self) -> None:
        """Count what passed of the responses that did not end."""
        with CancelScope(shield=True):
            for lane in list(self._lanes.values()):
                for reservation, reader in list(lane):
                    await self._policy.settle(reservation, reader.finish(), self._caller)


def _find_lane(message: dict[str, Any]) -> str | None:
    """Return the stream of a WebSocket that a message belongs to."""
    stream_id = message.get("stream_id")
    if isinstance(stream_id, str):
        return stream_id
    return None
