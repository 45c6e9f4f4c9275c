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

from kedge.server.faults.effects import BEFORE, MEMORY, RESPONSES, Answer, Asked, Body
from kedge.server.faults.language import Fault, Faults
from kedge.server.faults.wire import Wire, answer_with
from kedge.server.recall import recalling

PATHS = frozenset({RESPONSES, "/v1/chat/completions", "/v1/messages"})
"""Where faults strike."""


class Injection:
    """Middleware: lets the armed faults strike."""

    def __init__(self, app: ASGIApp, faults: Faults) -> None:
        self._app = app
        self._faults = faults
        self._nameless: dict[str, str] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, through whatever faults are armed."""
        if not concerns(scope) or not (self._faults.armed or self._nameless):
            await self._app(scope, receive, send)
            return
        asked = await self._asked(scope, receive)
        asked.record()
        armed = self._faults.armed
        slow = armed.get("slow_first_byte")
        if slow is not None:
            await asyncio.sleep(asked.strike(slow).value)
        answer = instead(armed, asked)
        if answer is not None:
            await answer_with(answer, send)
            return
        wire = Wire(armed, asked, receive, send)
        with recalling(left(armed, asked)):
            await self._app(scope, wire.receive, wire.send)

    async def _asked(self, scope: Scope, receive: Receive) -> Asked:
        raw = await read(receive)
        body: Any = None
        with suppress(ValueError, RecursionError):
            body = json.loads(raw)
        held = cast("Body", body) if isinstance(body, dict) else {}
        forget = scope["app"].state.service.forget
        exchange = scope.get("kedge.exchange")
        return Asked(scope, raw, held, forget, self._faults.spend, self._nameless, exchange)


def concerns(scope: Scope) -> bool:
    """Tell whether faults may strike this request: not on an address that others can reach."""
    if (scope["type"], scope.get("method")) != ("http", "POST") or scope["path"] not in PATHS:
        return False
    try:
        return ip_address(scope["server"][0]).is_loopback
    except (KeyError, TypeError, ValueError):
        return False


async def read(receive: Receive) -> bytes:
    """Read a request's whole body."""
    chunks: list[bytes] = []
    more = True
    while more:
        message = await receive()
        chunks.append(message.get("body", b""))
        more = message.get("more_body", False)
    return b"".join(chunks)


def instead(armed: Mapping[str, Fault], asked: Asked) -> Answer | None:
    """Find the answer that a fault gives in the server's place, if one does."""
    for name, strike in BEFORE.items():
        fault = armed.get(name)
        answer = fault and strike(fault, asked)
        if fault is not None and answer is not None:
            asked.strike(fault)
            return answer
    return None


def left(armed: Mapping[str, Fault], asked: Asked) -> int | None:
    """Say how many responses of the past are left to see; None if all are."""
    body = asked.body
    if not asked.remembers or not (body.get("previous_response_id") or body.get("conversation")):
        return None
    limits = [limit(asked.strike(armed[name])) for name, limit in MEMORY.items() if name in armed]
    return min(limits, default=None)
