"""The middleware that lets the armed faults strike, between the guard and the routes.

A request for an answer (a response, a chat completion, a message) is read whole. A fault may answer
it in the server's place, limit what the server recalls for it, change the answer or break the
connection. Nothing else of
the server knows that faults exist, and without an armed fault a request passes untouched.
"""

import asyncio
import json
from collections.abc import Mapping
from contextlib import suppress
from ipaddress import ip_address
from typing import Any, cast

from starlette.types import ASGIApp, Receive, Scope, Send

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
from kedge.server.storage.context import limit_history

FAULT_PATHS = frozenset({RESPONSES_PATH, "/v1/chat/completions", "/v1/messages"})
"""Where faults strike."""


class FaultMiddleware:
    """Middleware: lets the armed faults strike."""

    def __init__(self, app: ASGIApp, faults: Faults) -> None:
        self._app = app
        self._faults = faults
        self._withheld_call_ids: dict[str, str] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, through whatever faults are armed."""
        if not is_eligible(scope) or not (self._faults.armed or self._withheld_call_ids):
            await self._app(scope, receive, send)
            return
        asked = await self._read_request(scope, receive)
        asked.update_access_record()
        armed = self._faults.armed
        slow = armed.get("slow_first_byte")
        if slow is not None:
            await asyncio.sleep(asked.record_fault(slow).value)
        answer = find_override(armed, asked)
        if answer is not None:
            await send_response(answer, send)
            return
        wire = FaultyConnection(armed, asked, receive, send)
        with limit_history(find_history_limit(armed, asked)):
            await self._app(scope, wire.receive, wire.send)

    async def _read_request(self, scope: Scope, receive: Receive) -> FaultedRequest:
        raw = await read_body(receive)
        body: Any = None
        with suppress(ValueError, RecursionError):
            body = json.loads(raw)
        held = cast("Body", body) if isinstance(body, dict) else {}
        forget = scope["app"].state.service.forget
        exchange = scope.get("kedge.exchange")
        return FaultedRequest(
            scope, raw, held, forget, self._faults.consume, self._withheld_call_ids, exchange
        )


def is_eligible(scope: Scope) -> bool:
    """Tell whether faults may strike this request: not on an address that others can reach."""
    if (scope["type"], scope.get("method")) != ("http", "POST") or scope["path"] not in FAULT_PATHS:
        return False
    try:
        return ip_address(scope["server"][0]).is_loopback
    except (KeyError, TypeError, ValueError):
        return False


async def read_body(receive: Receive) -> bytes:
    """Read a request's whole body."""
    chunks: list[bytes] = []
    more = True
    while more:
        message = await receive()
        chunks.append(message.get("body", b""))
        more = message.get("more_body", False)
    return b"".join(chunks)


def find_override(armed: Mapping[str, Fault], request: FaultedRequest) -> FaultResponse | None:
    """Find the answer that a fault gives in the server's place, if one does."""
    for name, strike in RESPONSE_OVERRIDES.items():
        fault = armed.get(name)
        answer = fault and strike(fault, request)
        if fault is not None and answer is not None:
            request.record_fault(fault)
            return answer
    return None


def find_history_limit(armed: Mapping[str, Fault], request: FaultedRequest) -> int | None:
    """Say how many responses of the past are left to see; None if all are."""
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
