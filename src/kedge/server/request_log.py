"""Request ids, access, the access log, and records of requests, for every front end.

The log has the method, path, status and duration, never content. A ``RecordedRequest`` also has the
content, so it is only created if there is a listener. The requests of a named token or a session end as soon as it does
(``revocation``).
"""

import logging
import os
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, cast

from starlette.datastructures import Headers as RequestHeaders
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocketDisconnect

from kedge._internal.json_text import encode_escaped
from kedge.observe import bind_fields, count, get_logger, measure
from kedge.server import access
from kedge.server.access import AccessPolicy, Credentials, Rejection
from kedge.server.object_forms import Item
from kedge.server.revocation import RevocationWatch

if TYPE_CHECKING:
    from kedge.store.database.transactions import HealthCheck

LOST_CONNECTION = 1006
"""The close code of a WebSocket that ended without one."""

log = get_logger("kedge.access")
ROUTINE_PATH = re.compile(
    r"/healthz|/metrics|/static/.*|/api/(choices|session|conversations/[^/]+/runs)"
)
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
    """One request and its outcome."""

    method: str
    path: str
    request_id: str
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    raw: bytes = b""
    body: Any = None
    status: int = 0
    model_items: Sequence[Item] | None = None
    """The items that the model received, oldest first. In a chain they are a list that is built when it is read."""
    response_id: str | None = None
    transport: Literal["http", "websocket"] = "http"
    seconds: float = 0.0
    reply: bytes = b""
    """The beginning of the response body, if a recorder requests it."""
    error: bytes = b""
    """The beginning of the body of an error response."""

    @property
    def context(self) -> tuple[Item, ...] | None:
        """The items that the model received, oldest first."""
        return None if self.model_items is None else tuple(self.model_items)


WEBSOCKET_SCOPE_KEY = "kedge.lane_memory"
"""The scope key of a request over a WebSocket; its value has the unstored responses of its lane."""

RESPONSE_HEADERS_KEY = "kedge.response_headers"
"""The key of a request's scope under which handlers collect headers for its response."""

STATUS_KEY = "kedge.status"
"""The key of a request's scope for the status of its response; 0 until the response has started."""

REQUEST_ID_KEY = "kedge.request_id"
RECORD_KEY = "kedge.record"
"""The key of a request's scope for its record, if there is a listener."""
START_MESSAGES = ("http.response.start", "websocket.accept", "websocket.http.response.start")
"""The messages with the headers of a response."""
SWITCHING_PROTOCOLS = 101
FIRST_ERROR_STATUS = 400
MAX_ERROR_BYTES = 4_096
"""The bytes of an error response that are recorded, also if no other response is."""

Headers = list[tuple[bytes, bytes]]

Listener = Callable[[RecordedRequest], None]
FinishListener = Callable[[RecordedRequest, Scope], None]


class EscapedJSONResponse(JSONResponse):
    """A response with JSON that may contain recorded text: lone surrogates are escaped."""

    def render(self, content: Any) -> bytes:
        """Encode the content."""
        return encode_escaped(content)


async def healthz(request: Request) -> Response:
    """Answer ``GET /healthz``: with 503 if a database does not answer or cannot be written."""
    health: HealthCheck = request.app.state.health
    if await health.run():
        return JSONResponse({"status": "ok"})
    reason = "the database does not answer or cannot be written; the log has the details"
    return JSONResponse({"status": "unavailable", "reason": reason}, 503)


async def metrics(request: Request) -> Response:
    """Answer ``GET /metrics`` with the metrics of this process, for Prometheus."""
    from kedge.observe.prometheus import render

    body, content_type = render(request.headers.get("accept", ""))
    return Response(body, headers={"content-type": content_type})


class FrontEnd(ABC):
    """What the server, the page, the proxy and MCP servers do differently with a request and its response.

    Args:
        policy: Decides who may send requests.
    """

    default_headers: Sequence[tuple[bytes, bytes]] = ()
    """Headers of each response that does not set them itself."""
    description_key = REQUEST_ID_KEY
    """The key of a request's scope for what the log shows besides method, path, status and time."""

    def __init__(self, policy: AccessPolicy) -> None:
        self.policy = policy

    @abstractmethod
    def read_credentials(self, scope: Scope) -> Credentials | None:
        """Read what a request presents; None if it is not checked."""

    @abstractmethod
    def build_rejection(self, scope: Scope, rejection: Rejection) -> Response:
        """Return the response to a request that is rejected."""

    @abstractmethod
    def build_failure(self, scope: Scope) -> Response:
        """Return the response to a request that an internal error ends."""

    def list_headers(self, scope: Scope) -> Headers:
        """Return headers that are added to the response to a request."""
        return [(b"x-request-id", scope[REQUEST_ID_KEY].encode())]


class RequestMiddleware:
    """Middleware that assigns an id to each request, checks whether it may be sent, logs it, and records it.

    It also handles internal errors: with a 500 in the format of the front end if no response has started,
    and with a log record that does not quote the conversation. A request ends when its token is revoked.

    Args:
        app: The app that requests are passed to.
        front: The front end.
        listener: Called with the record of every request when it starts.
        on_finish: Called with the record and the scope of every request when it ends.
        reply_bytes: The number of bytes of each response body in the record at its end.
    """

    def __init__(
        self,
        app: ASGIApp,
        front: FrontEnd,
        listener: Listener | None = None,
        on_finish: FinishListener | None = None,
        reply_bytes: int = 0,
    ) -> None:
        self._app = app
        self._front = front
        self._listener = listener
        self._on_finish = on_finish
        self._reply_bytes = reply_bytes
        reject_revoked = partial(front.build_rejection, rejection=access.REVOKED)
        self._watch = RevocationWatch(front.policy, reject_revoked)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or reject it."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        scope[REQUEST_ID_KEY] = f"req_{os.urandom(16).hex()}"
        scope[RESPONSE_HEADERS_KEY] = self._front.list_headers(scope)
        scope[STATUS_KEY] = 0
        if scope["type"] == "http":
            await self._handle_request(scope, receive, send)
            return
        try:  # each message on it becomes a separate request
            await self._pass_on(scope, receive, self._wrap_send(scope, send))
        except WebSocketDisconnect:
            return  # the client has left
        except Exception as error:  # noqa: BLE001 - only this connection fails
            log_failure(f"{scope[REQUEST_ID_KEY]} failed with an internal error", error)

    async def _handle_request(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = time.perf_counter()
        recorded = self._record_request(scope)
        reply = bytearray()
        send = self._wrap_send(scope, send, reply)
        with bind_fields(request_id=scope[REQUEST_ID_KEY]):
            try:
                await self._pass_on(scope, receive, send)
            except Exception as error:
                log_failure(f"{scope[REQUEST_ID_KEY]} failed with an internal error", error)
                if scope[STATUS_KEY]:
                    raise  # a response has started: the connection must be closed
                await self._front.build_failure(scope)(scope, receive, send)
            finally:
                seconds = time.perf_counter() - started
                self._log_request(scope, seconds)
                if recorded is not None:
                    self._complete_record(recorded, scope, seconds, reply)

    def _complete_record(
        self, recorded: RecordedRequest, scope: Scope, seconds: float, reply: bytearray
    ) -> None:
        """Record the response to a request, and call the listener."""
        recorded.status = scope[STATUS_KEY]
        recorded.seconds = seconds
        recorded.reply = bytes(reply[: self._reply_bytes])
        if recorded.status >= FIRST_ERROR_STATUS:
            recorded.error = bytes(reply[:MAX_ERROR_BYTES])
        if self._on_finish is not None:
            self._on_finish(recorded, scope)

    def _wrap_send(self, scope: Scope, send: Send, reply: bytearray | None = None) -> Send:
        """Return a ``send`` that adds headers, and reads the status and the start of the body."""

        async def send_observed(message: Message) -> None:
            if message["type"] in START_MESSAGES:
                scope[STATUS_KEY] = message.get("status", SWITCHING_PROTOCOLS)
                recorded: RecordedRequest | None = scope.get(RECORD_KEY)
                if recorded is not None:
                    recorded.status = scope[STATUS_KEY]
                headers = [*message.get("headers", ()), *scope[RESPONSE_HEADERS_KEY]]
                names = {name for name, _ in headers}
                headers += [pair for pair in self._front.default_headers if pair[0] not in names]
                message["headers"] = headers
            elif reply is not None and len(reply) < self._count_retained(scope):
                reply.extend(message.get("body", b""))
            try:
                await send(message)
            except OSError as error:  # which means for ASGI that the client has left
                if scope["type"] != "websocket":
                    raise
                raise WebSocketDisconnect(LOST_CONNECTION) from error

        return send_observed

    def _count_retained(self, scope: Scope) -> int:
        """Return how many bytes of a response are retained for its record."""
        if RECORD_KEY in scope and scope[STATUS_KEY] >= FIRST_ERROR_STATUS:
            return max(self._reply_bytes, MAX_ERROR_BYTES)
        return self._reply_bytes

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        presented = self._front.read_credentials(scope)
        if presented is None:
            await self._app(scope, receive, send)
            return
        decision = await self._front.policy.authorize(scope, presented)
        if decision.rejection is None or decision.caller is not None:
            scope[access.CALLER_KEY] = decision.caller
        if decision.rejection is not None:
            rejection = self._front.build_rejection(scope, decision.rejection)
            rejection.headers.update(decision.rejection.headers)
            await rejection(scope, receive, send)
            return
        for name, value in decision.headers.items():
            scope[RESPONSE_HEADERS_KEY].append((name.encode(), value.encode()))
        if decision.grant is None:
            await self._app(scope, receive, send)
        else:
            await self._watch.run(self._app, decision.grant, scope, receive, send)

    def _log_request(self, scope: Scope, seconds: float) -> None:
        """Count a request by the pattern of its route, since a path may contain an id, and log it."""
        status: int = scope[STATUS_KEY]
        route = getattr(scope.get("route"), "path", "") or "none"
        count("server_requests_total", route=route, status=str(status))
        measure("server_request_duration_seconds", seconds, route=route)
        method = "WS" if WEBSOCKET_SCOPE_KEY in scope else scope["method"]
        is_routine = method == "GET" and ROUTINE_PATH.fullmatch(scope["path"]) is not None
        log.log(
            logging.DEBUG if is_routine and 0 < status < 400 else logging.INFO,
            "%s %s %d %.1fms %s",
            method,
            scope["path"],
            status,
            seconds * 1000,
            scope.get(self._front.description_key, ""),
        )

    def _record_request(self, scope: Scope) -> RecordedRequest | None:
        if self._listener is None and self._on_finish is None:
            return None
        headers = RequestHeaders(scope=scope)
        recorded = RecordedRequest(scope["method"], scope["path"], scope[REQUEST_ID_KEY], headers)
        recorded.transport = "websocket" if WEBSOCKET_SCOPE_KEY in scope else "http"
        scope[RECORD_KEY] = recorded
        if self._listener is not None:
            self._listener(recorded)
        return recorded
