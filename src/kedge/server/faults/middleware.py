"""Middleware that applies the active faults, between authentication and the routes.

The body of a request (for a response, a chat completion or a message) is read first. A fault may
respond instead of the server, limit the history that the server uses, change the response or cut the
connection. No other part of the server handles faults, and without an active fault a request is passed on
unchanged.
"""

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from ipaddress import ip_address
from typing import Any, cast

from starlette.types import ASGIApp, Receive, Scope, Send

from kedge.server import errors
from kedge.server.error_response import render_error
from kedge.server.faults.connection import FaultyConnection, send_response
from kedge.server.faults.effects import (
    HISTORY_LIMITS,
    RESPONSE_OVERRIDES,
    RESPONSES_PATH,
    Body,
    FaultedRequest,
    FaultResponse,
)
from kedge.server.faults.spec import Fault, Faults
from kedge.server.json_codec import decode
from kedge.server.storage.context import limit_history

FAULT_PATHS = frozenset({RESPONSES_PATH, "/v1/chat/completions", "/v1/messages"})
"""The endpoints to which faults apply."""


class FaultMiddleware:
    """Middleware that applies the active faults to requests and responses."""

    def __init__(self, app: ASGIApp, faults: Faults) -> None:
        self._app = app
        self._faults = faults
        self._withheld_call_ids: dict[str, str] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request with the active faults."""
        if is_fetch(scope) and (hidden := self._faults.armed.get("hide_stored")):
            self._faults.consume(hidden)
            error = errors.RESPONSE_NOT_FOUND(id=scope["path"].split("/")[3])
            await send_response(FaultResponse(*render_error(scope, error)), send)
            return
        if not is_eligible(scope) or not (self._faults.armed or self._withheld_call_ids):
            await self._app(scope, receive, send)
            return
        request = await self._read_request(scope, receive)
        request.update_access_record()
        armed = self._faults.armed
        slow = armed.get("slow_first_byte")
        if slow is not None:
            await asyncio.sleep(request.record_fault(slow).value)
        override = find_override(armed, request)
        if override is not None:
            await send_response(override, send)
            return
        connection = FaultyConnection(armed, request, receive, send)
        with limit_history(find_history_limit(armed, request)):
            await self._app(scope, connection.receive, connection.send)

    async def _read_request(self, scope: Scope, receive: Receive) -> FaultedRequest:
        raw = await read_body(receive)
        body: Any = None
        with suppress(ValueError, RecursionError):
            body = decode(raw)
        members = cast("Body", body) if isinstance(body, dict) else {}
        forget = scope["app"].state.service.forget
        exchange = scope.get("kedge.exchange")
        return FaultedRequest(
            scope, raw, members, forget, self._faults.consume, self._withheld_call_ids, exchange
        )


def is_eligible(scope: Scope) -> bool:
    """Return whether faults may apply to this request: only on a loopback address."""
    is_post = (scope["type"], scope.get("method")) == ("http", "POST")
    return is_post and scope["path"] in FAULT_PATHS and _is_loopback(scope)


def is_fetch(scope: Scope) -> bool:
    """Return whether this request fetches a stored response or its items, on a loopback address."""
    is_get = (scope["type"], scope.get("method")) == ("http", "GET")
    return is_get and scope["path"].startswith(f"{RESPONSES_PATH}/") and _is_loopback(scope)


def _is_loopback(scope: Scope) -> bool:
    try:
        return ip_address(scope["server"][0]).is_loopback
    except (KeyError, TypeError, ValueError):
        return False


async def read_body(receive: Receive) -> bytes:
    """Read the body of a request."""
    chunks: list[bytes] = []
    more = True
    while more:
        message = await receive()
        chunks.append(message.get("body", b""))
        more = message.get("more_body", False)
    return b"".join(chunks)


def find_override(armed: Mapping[str, Fault], request: FaultedRequest) -> FaultResponse | None:
    """Return the response of the first fault that replaces that of the server, or None."""
    for name, build in RESPONSE_OVERRIDES.items():
        fault = armed.get(name)
        response = fault and build(fault, request)
        if fault is not None and response is not None:
            request.record_fault(fault)
            return response
    return None


def find_history_limit(armed: Mapping[str, Fault], request: FaultedRequest) -> int | None:
    """Return the number of earlier responses that the model may see, or None for all."""
    body = request.body
    if not request.is_stateful or not (
        body.get("previous_response_id") or body.get("conversation")
    ):
        return None
    limits = [
        limit(request.record_fault(armed[name]))
        for name, limit in HISTORY_LIMITS.items()
        if name in armed
    ]
    return min(limits, default=None)
