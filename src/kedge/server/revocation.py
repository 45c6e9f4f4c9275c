"""End the requests and WebSockets of a named token as soon as it is revoked.

The app in question sees a client that disconnects. So streams, generations and connections end in the way
that they have anyway, wherever they wait.
"""

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kedge.errors import StoreError
from kedge.observe import get_logger
from kedge.security.access_tokens import AccessToken
from kedge.server.access import CALLER_KEY, CallerRegistry

log = get_logger("kedge.server")

CHECK_SECONDS = 0.5
"""Seconds between two checks of the tokens with unfinished requests; another process may revoke them."""
POLICY_VIOLATION = 1008
"""The close code of the WebSocket of a revoked token."""


class RevocationWatch:
    """The unfinished requests of named tokens, which end when their token is revoked.

    Args:
        registry: The named tokens, or None if there are none.
        reject: Returns the response to a request, as JSON, whose token is revoked before it is answered.
    """

    def __init__(
        self, registry: CallerRegistry | None, reject: Callable[[Scope], Response]
    ) -> None:
        self._registry = registry
        self._reject = reject
        self._watched: dict[AccessToken, set[_Connection]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._checker: asyncio.Task[None] | None = None

    async def run(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on to an app, until it is answered or its token is revoked."""
        caller: AccessToken | None = scope.get(CALLER_KEY)
        if caller is None or self._registry is None:
            await app(scope, receive, send)
            return
        connection = _Connection(scope, receive, send)
        self._watched.setdefault(caller, set()).add(connection)
        if self._checker is None or self._checker.done():
            self._checker = self._start_task(self._check_tokens(self._registry))
        try:
            await app(scope, connection.receive, connection.send)
        finally:
            self._watched.get(caller, set[_Connection]()).discard(connection)
            if connection.revoked.is_set():
                await connection.ended.wait()

    async def _check_tokens(self, registry: CallerRegistry) -> None:
        while self._watched:
            await asyncio.sleep(CHECK_SECONDS)
            for caller, connections in list(self._watched.items()):
                if not connections:
                    del self._watched[caller]
                elif not await _is_valid(registry, caller):
                    for connection in self._watched.pop(caller):
                        connection.revoked.set()
                        self._start_task(connection.end(self._reject))

    def _start_task(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


async def _is_valid(registry: CallerRegistry, caller: AccessToken) -> bool:
    try:
        return await registry.is_valid(caller)
    except StoreError as error:  # what was known before applies until the store answers
        log.warning("a token could not be checked: %s", error)
        return True


class _Connection:
    """A request or a WebSocket, whose client seems to disconnect when its token is revoked."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope, self._receive, self._send = scope, receive, send
        self._lock = asyncio.Lock()
        self._is_started = self._is_finished = self._has_length = False
        self.revoked = asyncio.Event()
        self.ended = asyncio.Event()

    async def receive(self) -> Message:
        """Return the next message of the client, or its disconnect if the token is revoked."""
        message = asyncio.ensure_future(self._receive())
        revoked = asyncio.ensure_future(self.revoked.wait())
        try:
            await asyncio.wait((message, revoked), return_when=asyncio.FIRST_COMPLETED)
            if not self.revoked.is_set():
                return message.result()
        finally:
            message.cancel()
            revoked.cancel()
        return {"type": f"{self._scope['type']}.disconnect", "code": POLICY_VIOLATION}

    async def send(self, message: Message) -> None:
        """Send a message of the app, unless the token is revoked."""
        async with self._lock:
            if self.revoked.is_set():
                return
            match message["type"]:
                case "http.response.start":
                    names = [name.lower() for name, _ in message.get("headers", ())]
                    self._has_length = b"content-length" in names
                    self._is_started = True
                case "websocket.accept":
                    self._is_started = True
                case "http.response.body" | "websocket.close":
                    self._is_finished = not message.get("more_body")
                case _:
                    pass
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
                event = {"type": "error", "status": rejection.status_code, "error": error}
                await self._send({"type": "websocket.send", "text": json.dumps(event)})
            await self._send({"type": "websocket.close", "code": POLICY_VIOLATION})
        elif not self._is_started:
            await rejection(self._scope, self._receive, self._send)
        elif not self._has_length:  # the connection of any other response is closed as incomplete
            await self._send({"type": "http.response.body", "body": b""})
