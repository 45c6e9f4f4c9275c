"""Request ids, the access log, and records of requests for tests.

The log has the method, path, status and duration, never content. A ``RecordedRequest`` also has the
content, so it is only created if there is a listener.
"""

import logging
import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kedge.observe import bind_fields, count, get_logger, measure
from kedge.server.error_response import build_error_response, is_anthropic
from kedge.server.errors import INTERNAL_ERROR
from kedge.server.item_forms import Item

log = get_logger("kedge.access")
ROUTINE_PATH = re.compile(r"/healthz|/metrics|/static/.*|/api/conversations/[^/]+/runs")
"""Paths that monitoring and an open page request every few seconds."""
server_log = logging.getLogger("kedge.server")


def log_failure(message: str, error: Exception) -> None:
    """Log the type of an error; its message may quote the conversation and is logged at DEBUG only."""
    server_log.error("%s: %s", message, ", ".join(_list_types(error)))
    server_log.debug("%s", message, exc_info=error)


def _list_types(error: Exception) -> list[str]:
    """Return the name of an error's type, or of the types in a group."""
    if not isinstance(error, ExceptionGroup):
        return [type(error).__name__]
    group = cast("ExceptionGroup[Exception]", error)
    return [name for inner in group.exceptions for name in _list_types(inner)]


@dataclass(slots=True)
class RecordedRequest:
    """One request and its outcome.

    ``context`` has the items that the model received, oldest first.
    """

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
    seconds: float = 0.0
    reply: bytes = b""
    """The beginning of the response body, if a recorder requests it."""


WEBSOCKET_SCOPE_KEY = "kedge.place"
"""The scope key of a request over a WebSocket; its value has the unstored responses of its lane."""

RESPONSE_HEADERS_KEY = "kedge.response_headers"
"""The key of a request's scope under which handlers collect headers for its response."""

STATUS_KEY = "kedge.status"
"""The key of a request's scope for the status of its response; 0 until the response has started."""

Listener = Callable[[RecordedRequest], None]
FinishListener = Callable[[RecordedRequest, Scope], None]


class AccessLogMiddleware:
    """Middleware that assigns an id to each request, logs it, and calls the listener.

    It also handles internal errors: with a 500 in the format of the API if no response has started,
    and with a log record that does not quote the conversation.

    Args:
        app: The app that requests are passed to.
        listener: Called with the record of every request when it starts.
        on_finish: Called with the record and the scope of every request when it ends.
        reply_bytes: The number of bytes of each response body in the record at its end.
    """

    def __init__(
        self,
        app: ASGIApp,
        listener: Listener | None = None,
        on_finish: FinishListener | None = None,
        reply_bytes: int = 0,
    ) -> None:
        self._app = app
        self._listener = listener
        self._on_finish = on_finish
        self._reply_bytes = reply_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on; the response headers contain its id."""
        if scope["type"] == "http":
            await self._handle_request(scope, receive, send)
        elif scope["type"] == "websocket":
            await self._handle_websocket(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _handle_websocket(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a connection on; each message on it becomes a separate request."""
        request_id = f"req_{os.urandom(16).hex()}"
        extra_headers = [(b"x-request-id", request_id.encode())]
        scope[RESPONSE_HEADERS_KEY] = extra_headers

        async def send_with_id(message: Message) -> None:
            if message["type"] in ("websocket.accept", "websocket.http.response.start"):
                message["headers"] = [*message.get("headers", []), *extra_headers]
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception as error:  # noqa: BLE001 - only this connection fails
            log_failure(f"{request_id} failed with an internal error", error)

    async def _handle_request(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_id = f"req_{os.urandom(16).hex()}"
        started = time.perf_counter()
        scope["kedge.request_id"] = request_id
        extra_headers = [(b"x-request-id", request_id.encode())]
        if is_anthropic(scope):
            extra_headers.append((b"request-id", request_id.encode()))
        scope[RESPONSE_HEADERS_KEY] = extra_headers
        exchange = self._record_request(scope, request_id)
        scope[STATUS_KEY] = 0
        reply = bytearray()

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                scope[STATUS_KEY] = message["status"]
                message["headers"] = [*message["headers"], *extra_headers]
                if exchange is not None:
                    exchange.status = message["status"]
            elif len(reply) < self._reply_bytes:
                reply.extend(message.get("body", b""))
            await send(message)

        with bind_fields(request_id=request_id):
            try:
                await self._app(scope, receive, send_with_id)
            except Exception as error:
                log_failure(f"{request_id} failed with an internal error", error)
                if scope[STATUS_KEY]:
                    raise  # a response has started: the connection must be closed
                await build_error_response(scope, INTERNAL_ERROR())(scope, receive, send_with_id)
            finally:
                took, status = time.perf_counter() - started, scope[STATUS_KEY]
                record_metrics(scope, status, took)
                log.log(
                    choose_level(scope, status),
                    "%s %s %d %.1fms %s",
                    "WS" if WEBSOCKET_SCOPE_KEY in scope else scope["method"],
                    scope["path"],
                    status,
                    took * 1000,
                    request_id,
                )
                if exchange is not None and self._on_finish is not None:
                    exchange.seconds, exchange.reply = took, bytes(reply[: self._reply_bytes])
                    self._on_finish(exchange, scope)

    def _record_request(self, scope: Scope, request_id: str) -> RecordedRequest | None:
        if self._listener is None and self._on_finish is None:
            return None
        headers = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
        }
        exchange = RecordedRequest(scope["method"], scope["path"], request_id, headers)
        exchange.transport = "websocket" if WEBSOCKET_SCOPE_KEY in scope else "http"
        scope["kedge.exchange"] = exchange
        if self._listener is not None:
            self._listener(exchange)
        return exchange


def choose_level(scope: Scope, status: int) -> int:
    """Return the level at which a request is logged: DEBUG for routine ones that succeeded."""
    is_routine = scope["method"] == "GET" and ROUTINE_PATH.fullmatch(scope["path"]) is not None
    return logging.DEBUG if is_routine and 0 < status < 400 else logging.INFO


def record_metrics(scope: Scope, status: int, seconds: float) -> None:
    """Count a request by the pattern of its route, since a path may contain an id."""
    route = getattr(scope.get("route"), "path", "") or "none"
    count("server_requests_total", route=route, status=str(status))
    measure("server_request_duration_seconds", seconds, route=route)
