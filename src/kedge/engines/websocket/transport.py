"""A transport that sends responses over WebSocket, with the interface of the HTTP transport.

Everything else (conversation objects, audits, token counts) is sent over HTTP. An error message raises
the same error as a response with an error status; a connection that ends in the middle of an answer raises
the error of a cut stream. Responses that only the connection remembered are lost, so the next plan sends
everything.
"""

import json
from asyncio import timeout
from collections.abc import AsyncGenerator, Callable
from functools import partial
from typing import Any, cast

from msgspec import structs
from websockets.asyncio.client import ClientConnection
from websockets.exceptions import InvalidStatus, WebSocketException
from websockets.http11 import Response as HandshakeResponse

from kedge._internal.arguments import check_positive_int
from kedge._internal.event_loops import PerLoop
from kedge.engines.http_client import wait_to_retry
from kedge.engines.loading import LoadingWait, is_loading
from kedge.engines.raw_response import RawResponse
from kedge.engines.transport import AnyClient, Transport, build_url
from kedge.engines.websocket import connection as sockets
from kedge.engines.websocket.connection import SocketMessage
from kedge.errors import EngineError, RequestRefused, StreamCut, Unreachable
from kedge.evidence.server_evidence import read_identity
from kedge.planning import AnchorRecord, get_state
from kedge.turns import Turn

MAX_RECORDS_CHECKED = 256
"""The number of a Turn's newest records that are searched for responses that a connection remembers."""
MAX_ROTATIONS = 3
"""The number of times a request is moved to a new connection because the old one reached its maximum age."""
MIN_OPEN_SECONDS = 10.0
"""The time in which a connection must open, unless the connect timeout of the client is longer."""


class HandshakeRefused(Exception):
    """An error of a server that answered the handshake of a WebSocket with another status than 101."""

    def __init__(self, response: HandshakeResponse) -> None:
        super().__init__(f"HTTP {response.status_code}")
        self.response = response


class _Connection(ClientConnection):
    """A connection whose handshake does not follow redirects, which would send the key elsewhere."""

    async def handshake(self, *values: Any, **options: Any) -> None:
        try:
            await super().handshake(*values, **options)
        except InvalidStatus as error:  # the error by which the library recognizes a redirect
            raise HandshakeRefused(error.response) from None


class SocketTransport(Transport):
    """Sends responses to one server over WebSocket, and everything else over HTTP."""

    always_streams = True

    def __init__(
        self, make_client: Callable[[], AnyClient], provider: str, *, connections: int, lanes: int
    ) -> None:
        super().__init__(make_client, provider)
        check_positive_int("connections", connections)
        check_positive_int("lanes", lanes)
        self._pools = PerLoop(
            lambda: sockets.ConnectionPool(self._open_socket, connections, lanes),
            lambda pool: pool.aclose(),
        )

    async def aclose(self) -> None:
        """Close the connections of the running loop."""
        await self._pools.aclose()
        await super().aclose()

    def live_anchors(self, turn: Turn) -> tuple[AnchorRecord, ...]:
        """Return the unstored records of a Turn that an open connection remembers, as if they were stored."""
        pool = self._pools.get_existing()
        if pool is None:
            return ()
        live_ids = pool.live_response_ids()
        if not live_ids:
            return ()
        newest = get_state(turn).anchors[-MAX_RECORDS_CHECKED:]
        live = (r for r in reversed(newest) if not r.stored and r.response_id in live_ids)
        return tuple(structs.replace(record, stored=True) for record in live)

    async def send(
        self,
        path: str,
        body: bytes | None = None,
        *,
        retry: bool = True,
        parent_id: str | None = None,
        **options: Any,
    ) -> RawResponse:
        """Send a request that continues a response on its lane, where the answer is always streamed."""
        if parent_id is None or body is None:
            return await super().send(path, body, retry=retry, **options)
        max_retries = self.client.max_retries
        retries = max_retries if retry else 0
        rotations = MAX_ROTATIONS
        loading = LoadingWait()
        while True:
            try:
                return await self._create_response(body, parent_id)
            except EngineError as error:
                if error.code == sockets.CONNECTION_LIMIT_CODE and rotations:
                    rotations -= 1
                elif retries and is_loading(error):
                    await loading.pause(error)
                else:
                    retries = await wait_to_retry(error, retries, max_retries)

    async def _create_response(self, content: bytes, parent_id: str) -> RawResponse:
        pool = self._pools.get()
        client = self.client
        lane = await pool.acquire(parent_id)
        release = partial(pool.release, lane)
        try:
            first = await self._send_on_lane(lane, content)
        except BaseException:
            release()
            raise
        messages = self._read_messages(lane, first)
        return RawResponse(client, client.errors, messages, release, is_stream=True)

    async def _read_messages(
        self, lane: sockets.Lane, message: SocketMessage
    ) -> AsyncGenerator[bytes]:
        """Yield the messages of a response as they arrive, up to the last, each as a server-sent event."""
        while True:
            yield b"data: %b\n\n" % b" ".join(message.data.splitlines())
            if message.is_last:
                return
            try:
                async with timeout(self.client.timeouts.read):
                    message = await lane.next_message()
            except (sockets.LaneFailed, TimeoutError) as error:
                reason = str(error) or "no message arrived in time"
                raise self._fail(StreamCut, f"the response was cut: {reason}") from None

    async def _send_on_lane(self, lane: sockets.Lane, content: bytes) -> SocketMessage:
        try:
            async with timeout(self.client.timeouts.read):
                await lane.connection.send(lane, content)
                first = await lane.next_message()
        except TimeoutError:
            raise self._fail(Unreachable, "the server did not answer in time") from None
        except (sockets.LaneFailed, WebSocketException, OSError) as error:
            if lane.connection.is_too_large(lane):
                message = f"the server accepts no WebSocket message of {len(content)} bytes"
                raise RequestRefused(message, provider=self.provider, status=413) from None
            if isinstance(error, sockets.LaneFailed):
                raise self._fail(StreamCut, f"there was no response: {error}") from None
            message = f"the connection ended before the request was sent ({type(error).__name__})"
            raise self._fail(Unreachable, message) from None
        if first.is_rejection:
            raise self._error_from_message(first)
        return first

    def _error_from_message(self, message: SocketMessage) -> EngineError:
        """Return the error that a response over HTTP would have, from a message that rejects a request."""
        status = message.payload.get("status") or message.payload.get("status_code")
        if not isinstance(status, int):
            status = 400
        headers: dict[str, str] = {}
        members = message.error.get("headers") or message.payload.get("headers")
        if isinstance(members, dict):
            for name, value in cast("dict[str, Any]", members).items():
                headers[name.lower()] = str(value)
        return self.client.errors.build_error(status, json.dumps({"error": message.error}), headers)

    def _fail(self, kind: type[StreamCut | Unreachable], message: str) -> EngineError:
        return kind(message, provider=self.provider, retryable=True)

    async def _open_socket(self) -> ClientConnection:
        client = self.client
        open_timeout = client.timeouts.connect
        if open_timeout is not None:
            open_timeout = max(open_timeout, MIN_OPEN_SECONDS)
        try:
            socket = await client.open_socket(
                build_url(client.errors, "/responses"),
                open_timeout=open_timeout,
                create_connection=_Connection,
            )
        except HandshakeRefused as error:
            raise self._error_from_handshake(error.response) from None
        except (WebSocketException, OSError, TimeoutError) as error:
            message = f"could not open a WebSocket to the server ({type(error).__name__})"
            raise self._fail(Unreachable, message) from None
        self.identity = ""
        if socket.response is not None:
            self.identity = read_identity(socket.response.headers)
        return socket

    def _error_from_handshake(self, response: HandshakeResponse) -> EngineError:
        status = response.status_code
        text = bytes(response.body or b"").decode("utf-8", "replace")
        url = build_url(self.client.errors, "/responses")
        error = self.client.errors.build_error(status, text, response.headers, url=url)
        if 300 <= status < 400:
            return error
        # Many servers answer with 403 and without a message on a path without WebSockets.
        if type(error) is RequestRefused or (status == 403 and not text):
            problem = f"this server has no WebSocket endpoint ({status})"
            message = f"{problem}: omit transport='websocket'; its answer: {error.message}"
            return RequestRefused(message, provider=self.provider, status=status)
        return error
