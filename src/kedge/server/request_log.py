"""Every request has an id, a line in the access log, and, for tests, a record of itself.

The log names method, path, status and time, and never what was said. A record (``Exchange``) holds
everything, so it is made only where somebody listens.
"""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from secrets import token_hex
from typing import Any, Literal

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kedge.observe import bind_fields, count, measure
from kedge.server.error_response import build_error_response, is_anthropic
from kedge.server.errors import INTERNAL_ERROR
from kedge.server.json_codec import Item

log = logging.getLogger("kedge.access")
server_log = logging.getLogger("kedge.server")


def log_failure(message: str, error: Exception) -> None:
    """Log a failure by its kind; its words may quote the conversation, so they are for debugging."""
    server_log.error("%s: %s", message, type(error).__name__)
    server_log.debug("%s", message, exc_info=error)


@dataclass(slots=True)
class RecordedRequest:
    """One request and what became of it. ``context`` is what the model saw, oldest item first."""

    method: str
    path: str
    request_id: str
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    raw: bytes = b""
    body: Any = None
    status: int = 0
    context: tuple[Item, ...] | None = None
    response_id: str | None = None
    transport: Literal["http", "websocket"] = "http"


WEBSOCKET_SCOPE_KEY = "kedge.place"
"""A request that came over a WebSocket has this in its scope: its place in the socket's memory."""

RESPONSE_HEADERS_KEY = "kedge.response_headers"
"""The key of a request's scope under which handlers collect headers for its response."""

Listener = Callable[[RecordedRequest], None]


class AccessLogMiddleware:
    """Middleware: gives each request its id, logs it, and tells the listener.

    It also answers for the server's own bugs: with a 500 in the shape of the API where nothing was
    answered yet, and in the log without the words of the error, which may quote the conversation.
    """

    def __init__(self, app: ASGIApp, listener: Listener | None = None) -> None:
        self._app = app
        self._listener = listener

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, with its id in the headers of the answer."""
        if scope["type"] == "http":
            await self._handle_request(scope, receive, send)
        elif scope["type"] == "websocket":
            await self._handle_websocket(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _handle_websocket(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a connection on; every request over it comes here again, as a request."""
        request_id = f"req_{token_hex(16)}"

        async def send_with_id(message: Message) -> None:
            if message["type"] in ("websocket.accept", "websocket.http.response.start"):
                given = message.get("headers", [])
                message["headers"] = [*given, (b"x-request-id", request_id.encode())]
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception as error:  # noqa: BLE001 - the connection ends, the server goes on
            log_failure(f"{request_id} met a bug of the server", error)

    async def _handle_request(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_id = f"req_{token_hex(16)}"
        started = time.perf_counter()
        scope["kedge.request_id"] = request_id
        extra_headers: list[tuple[bytes, bytes]] = []
        scope[RESPONSE_HEADERS_KEY] = extra_headers
        exchange = self._record_request(scope, request_id)
        names = [b"x-request-id", *([b"request-id"] if is_anthropic(scope) else [])]
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                ids = [(name, request_id.encode()) for name in names]
                message["headers"] = [*message["headers"], *ids, *extra_headers]
                if exchange is not None:
                    exchange.status = status
            await send(message)

        with bind_fields(request_id=request_id):
            try:
                await self._app(scope, receive, send_with_id)
            except Exception as error:
                log_failure(f"{request_id} met a bug of the server", error)
                if status:
                    raise  # too late to say anything: the connection must break
                await build_error_response(scope, INTERNAL_ERROR())(scope, receive, send_with_id)
            finally:
                took = time.perf_counter() - started
                _record_metrics(scope, status, took)
                log.info(
                    "%s %s %d %.1fms %s",
                    "WS" if WEBSOCKET_SCOPE_KEY in scope else scope["method"],
                    scope["path"],
                    status,
                    took * 1000,
                    request_id,
                )

    def _record_request(self, scope: Scope, request_id: str) -> RecordedRequest | None:
        if self._listener is None:
            return None
        headers = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
        }
        exchange = RecordedRequest(scope["method"], scope["path"], request_id, headers)
        exchange.transport = "websocket" if WEBSOCKET_SCOPE_KEY in scope else "http"
        scope["kedge.exchange"] = exchange
        self._listener(exchange)
        return exchange


def _record_metrics(scope: Scope, status: int, seconds: float) -> None:
    """Count a request under the pattern of its route: a path may hold an id."""
    route = getattr(scope.get("route"), "path", "") or "none"
    count("server_requests_total", route=route, status=str(status))
    measure("server_request_duration_seconds", seconds, route=route)
