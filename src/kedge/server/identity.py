"""Identify this server to its clients, in a header of every answer.

A client that knows this server need not find out first whether it remembers. While a fault of memory is
armed the header is left out, so that faults strike a client that knows nothing.
"""

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kedge.server.faults.effects import MEMORY_FAULTS
from kedge.server.faults.spec import Faults

IDENTITY_HEADER = (b"kedge-server", b"kedge")


class IdentityMiddleware:
    """Add the identity header to every HTTP response and WebSocket handshake."""

    def __init__(self, app: ASGIApp, faults: Faults | None) -> None:
        self._app = app
        self._faults = faults

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, and mark its answer."""
        if self._faults is not None and MEMORY_FAULTS & self._faults.armed.keys():
            await self._app(scope, receive, send)
            return

        async def send_marked(message: Message) -> None:
            if message["type"] in ("http.response.start", "websocket.accept"):
                message["headers"] = [*message.get("headers", ()), IDENTITY_HEADER]
            await send(message)

        await self._app(scope, receive, send_marked)
