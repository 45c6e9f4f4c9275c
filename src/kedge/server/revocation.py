"""End requests and WebSockets as soon as the named token or the session that they rely on ends.

The app in question sees a client that disconnects, so streams, generations and connections end in the way that they
have anyway, wherever they wait. The client gets the response to a revoked token, if no other response has started.
"""

import asyncio
import json
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kedge.errors import StoreError, StoreReplaced
from kedge.server.access import AccessPolicy, Grant
from kedge.server.errors import encode_error_event

log = logging.getLogger("kedge.server")

CHECK_SECONDS = 0.5
"""Seconds between two checks of the tokens with unfinished requests; another process may revoke them."""
POLICY_VIOLATION = 1008
"""The close code of the WebSocket of a revoked token."""


class RevocationWatch:
    """The unfinished requests of named tokens and sessions, which end with their token or session.

    Args:
        policy: Decides whether a token or a session is still valid.
        reject: Returns the response to a request, as JSON, whose token or session ends before it is answered.
        check_seconds: Seconds between two checks of the tokens with unfinished requests.
    """

    def __init__(
        self,
        policy: AccessPolicy,
        reject: Callable[[Scope], Response],
        check_seconds: float = CHECK_SECONDS,
    ) -> None:
        self._policy = policy
        self._reject = reject
        self._check_seconds = check_seconds
        self._watched: dict[Grant, set[WatchedConnection]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._checker: asyncio.Task[None] | None = None

    async def run(
        self, app: ASGIApp, grant: Grant, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Pass a request on to an app, until it is answered or its token or session has ended."""
        connection = WatchedConnection(scope, receive, send)
        self._watched.setdefault(grant, set()).add(connection)
        if self._checker is None or self._checker.done():
            self._checker = self._start_task(self._check_tokens())
        try:
            await app(scope, connection.receive, connection.send)
        finally:
            self._watched.get(grant, set[WatchedConnection]()).discard(connection)
            if connection.revoked.is_set():
                await connection.ended.wait()

    async def _check_tokens(self) -> None:
        while self._watched:
            await asyncio.sleep(self._check_seconds)
            for grant, connections in list(self._watched.items()):
                if not connections:
                    del self._watched[grant]
                elif not await self._is_valid(grant):
                    for connection in self._watched.pop(grant):
                        connection.revoked.set()
                        self._start_task(connection.end(self._reject))

    async def _is_valid(self, grant: Grant) -> bool:
        try:
            return await self._policy.is_valid(grant)
        except StoreReplaced as error:  # until a restart no revocation would be noticed
            log.warning("the requests of a token end, because it cannot be checked: %s", error)
            return False
        except StoreError as error:  # what was known before applies until the store answers
            log.warning("a token could not be checked: %s", error)
            return True

    def _start_task(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


async def receive_until(receive: Receive, end: asyncio.Event) -> Message | None:
    """Return the next message of a client, or None if the event is set before."""
    receiving = asyncio.ensure_future(receive())
    ending = asyncio.ensure_future(end.wait())
    try:
        await asyncio.wait((receiving, ending), return_when=asyncio.FIRST_COMPLETED)
        return None if end.is_set() else receiving.result()
    finally:
        receiving.cancel()
        ending.cancel()


class WatchedConnection:
    """A request or a WebSocket, whose client seems to disconnect when its token or session ends."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope = scope
        self._receive = receive
        self._send = send
        self._lock = asyncio.Lock()
        self._is_started = False
        self._is_finished = False
        self._has_length = False
        self.revoked = asyncio.Event()
        self.ended = asyncio.Event()

    async def receive(self) -> Message:
        """Return the next message of the client, or its disconnect if the token is revoked."""
        disconnect = {"type": f"{self._scope['type']}.disconnect", "code": POLICY_VIOLATION}
        return await receive_until(self._receive, self.revoked) or disconnect

    async def send(self, message: Message) -> None:
        """Send a message of the app, unless the token is revoked."""
        async with self._lock:
            if self.revoked.is_set():
                return
            if message["type"] in ("http.response.start", "websocket.accept"):
                names = [name.lower() for name, _ in message.get("headers", ())]
                self._has_length = b"content-length" in names
                self._is_started = True
            elif message["type"] in ("http.response.body", "websocket.close"):
                self._is_finished = not message.get("more_body")
            await self._send(message)

    async def end(self, reject: Callable[[Scope], Response]) -> None:
        """End the response or the connection, because the token is revoked."""
        try:
            async with self._lock:
                if not self._is_finished:
                    await self._send_end(reject(self._scope))
        except OSError:  # the client is gone
            pass
        finally:
            self.ended.set()

    async def _send_end(self, rejection: Response) -> None:
        if self._scope["type"] == "websocket":
            if self._is_started:
                error = json.loads(bytes(rejection.body))["error"]
                event = encode_error_event(error, status=rejection.status_code)
                await self._send({"type": "websocket.send", "text": event.decode()})
            await self._send({"type": "websocket.close", "code": POLICY_VIOLATION})
        elif not self._is_started:
            await rejection(self._scope, self._receive, self._send)
        elif not self._has_length:  # the connection of any other response is closed as incomplete
            await self._send({"type": "http.response.body", "body": b""})
