"""Middleware that applies the active faults, between authentication and the routes.

The body of a request (for a response, a chat completion or a message) is read first. A fault may
respond instead of the server, limit the history that the server uses, change the response or cut the
connection. A stream is forwarded event by event and may be cut; any other response is forwarded when it is
complete. No other part of the server handles faults, and without an active fault a request is passed on
unchanged.
"""

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, cast

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kedge._internal.json_text import copy_value, decode, encode_escaped
from kedge._internal.urls import is_loopback
from kedge.server import errors
from kedge.server.faults import KINDS, Fault, Faults, effects
from kedge.server.faults.effects import Body, FaultedRequest, FrameRewriter
from kedge.server.http import build_error_response, collect_body, render_error
from kedge.server.revocation import receive_until
from kedge.server.storage.context import limit_history

DISCONNECT: Message = {"type": "http.disconnect"}


class FaultyConnection:
    """The ``receive`` and ``send`` of one request."""

    def __init__(
        self, armed: Mapping[str, Fault], request: FaultedRequest, receive: Receive, send: Send
    ) -> None:
        self._armed = armed
        self._faulted_request = request
        self._receive = receive
        self._send = send
        self._request_body: bytes | None = request.build_request_body()
        self._is_cut = asyncio.Event()
        self._status = 0
        self._headers: list[tuple[bytes, bytes]] = []
        self._response_body = b""
        self._frames: FrameRewriter | None = None
        self._sent_events = 0

    async def receive(self) -> Message:
        """Return the request once, then wait until the client disconnects or is cut off."""
        if self._request_body is not None:
            request_body = self._request_body
            self._request_body = None
            return {"type": "http.request", "body": request_body, "more_body": False}
        await receive_until(self._receive, self._is_cut)
        return DISCONNECT

    async def send(self, message: Message) -> None:
        """Forward the response: a stream event by event, any other when it is complete."""
        if self._is_cut.is_set():
            return
        if message["type"] == "http.response.start":
            await self._start_response(message)
        elif self._frames is not None:
            await self._forward_events(self._frames, message)
        else:
            self._response_body += message.get("body", b"")
            if not message.get("more_body"):
                await self._build_response()(self._faulted_request.scope, self.receive, self._send)

    async def _start_response(self, message: Message) -> None:
        self._faulted_request.update_access_record()
        self._status = message["status"]
        self._headers = message["headers"]
        if dict(self._headers).get(b"content-type", b"").startswith(b"text/event-stream"):
            steps = [
                step(self._faulted_request.record_fault(fault))
                for fault, step in iter_effects(self._armed, "step")
            ]
            has_edit = any(iter_effects(self._armed, "edit"))
            self._frames = FrameRewriter(steps, self._edit_event if has_edit else None)
            await self._send({**message, "headers": self._change_content_type()})
            self._cut_if_due("cut_after_events")
            await self._fail_if_due()

    def _change_content_type(self) -> list[tuple[bytes, bytes]]:
        fault = self._armed.get("stream_content_type")
        if fault is None:
            return self._headers
        self._faulted_request.record_fault(fault)
        others = [pair for pair in self._headers if pair[0] != b"content-type"]
        if fault.value == "none":
            return others
        return [*others, (b"content-type", b"text/plain")]

    def _edit_event(self, event: Body) -> None:
        for fault, edit in iter_effects(self._armed, "edit"):
            before = copy_value(event)
            edit(fault, self._faulted_request, event)
            if event != before:
                self._faulted_request.record_fault(fault)

    async def _forward_events(self, frames: FrameRewriter, message: Message) -> None:
        for frame in frames.feed(message.get("body", b"")):
            if self._cut_if_due("cut_in_event"):
                await self._send_chunk(frame[: len(frame) // 2])
                return
            await self._send_chunk(frame)
            self._sent_events += 1
            if self._cut_if_due("cut_after_events") or await self._fail_if_due():
                return
        if not message.get("more_body"):
            for frame in frames.flush():
                await self._send_chunk(frame)
            await self._send({"type": "http.response.body", "body": b""})

    async def _send_chunk(self, data: bytes) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    def _cut_if_due(self, name: str) -> bool:
        """Cut the connection if this fault applies now, so that the response has no end."""
        fault = self._armed.get(name)
        if fault is None or fault.value != self._sent_events:
            return False
        self._faulted_request.record_fault(fault)
        self._is_cut.set()
        return True

    async def _fail_if_due(self) -> bool:
        """End the stream with an error event, if a fault applies now."""
        if not self._cut_if_due("fail_after_events"):
            return False
        await self._send({"type": "http.response.body", "body": self._encode_failure()})
        return True

    def _encode_failure(self) -> bytes:
        error = errors.OVERLOADED()
        body = dict(render_error(self._faulted_request.scope, error)[1])
        if self._faulted_request.is_stateful:
            body = {**body["error"], "type": "error", "sequence_number": self._sent_events}
        return effects.encode_frame(body)

    def _build_response(self) -> Response:
        body: Body = decode(self._response_body)
        other = effects.translate_not_found(
            self._armed.get("not_found"), self._faulted_request, body
        )
        if other is not None:
            return other
        event: Body = {"type": "", "response": body}
        if self._status == 200:
            self._edit_event(event)
        response = Response(encode_escaped(event["response"]), self._status)
        headers = [pair for pair in self._headers if pair[0] != b"content-length"]
        response.raw_headers = [*headers, *response.raw_headers]
        return response


def iter_effects(armed: Mapping[str, Fault], effect: str) -> Iterator[tuple[Fault, Any]]:
    """Yield the active faults with an effect of this name, each with the effect, in the order of ``KINDS``."""
    for name, kind in KINDS.items():
        if name in armed and effect in kind.effects:
            yield armed[name], kind.effects[effect]


FAULT_PATHS = frozenset({effects.RESPONSES_PATH, "/v1/chat/completions", "/v1/messages"})
"""The endpoints to which faults apply."""
STORED_PATHS = f"{effects.RESPONSES_PATH}/"
"""The beginning of the paths of stored responses."""


class FaultMiddleware:
    """Middleware that applies the active faults to requests and responses."""

    def __init__(self, app: ASGIApp, faults: Faults) -> None:
        self._app = app
        self._faults = faults
        self._withheld_call_ids: dict[str, str] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request with the active faults."""
        armed = self._faults.armed
        is_active = bool(armed or self._withheld_call_ids) and _is_loopback(scope)
        if not is_active or scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        method: str = scope["method"]
        path: str = scope["path"]
        hidden = armed.get("hide_stored")
        if method == "POST" and path in FAULT_PATHS:
            await self._apply_faults(scope, receive, send)
        elif method == "GET" and path.startswith(STORED_PATHS) and hidden is not None:
            self._faults.consume(hidden)
            error = errors.RESPONSE_NOT_FOUND(id=path.split("/")[3])
            await build_error_response(scope, error)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _apply_faults(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request for a response with the active faults."""
        limits = scope["app"].state.service.settings.limits
        try:
            raw = await collect_body(scope, receive, limits.body_bytes, limits.read_seconds)
            request = self._parse_request(scope, raw)
        except errors.ApiError as error:
            await build_error_response(scope, error)(scope, receive, send)
            return
        except ClientDisconnect:
            return
        request.update_access_record()
        armed = self._faults.armed
        slow = armed.get("slow_first_byte")
        if slow is not None and not await _delay(scope, receive, request.record_fault(slow).value):
            await build_error_response(scope, errors.INTERNAL_ERROR())(scope, receive, send)
            return
        override = find_override(armed, request)
        if override is not None:
            await override(scope, receive, send)
            return
        connection = FaultyConnection(armed, request, receive, send)
        with limit_history(find_history_limit(armed, request)):
            await self._app(scope, connection.receive, connection.send)

    def _parse_request(self, scope: Scope, raw: bytes) -> FaultedRequest:
        body: Any = None
        with suppress(ValueError, RecursionError):
            body = decode(raw)
        members = cast("Body", body) if isinstance(body, dict) else {}
        return FaultedRequest(scope, raw, members, self._faults.consume, self._withheld_call_ids)


class _DelayedRequest:
    """A request that is not handled yet; the server stops it as it stops a response in progress."""

    def __init__(self) -> None:
        self.stopped = asyncio.Event()

    def stop(self, _status: str) -> None:
        """End the wait."""
        self.stopped.set()


async def _delay(scope: Scope, receive: Receive, seconds: float) -> bool:
    """Wait, and return whether the client is still there and the server is not stopping."""
    running = scope["app"].state.service.running
    delayed = _DelayedRequest()
    running.add(delayed)
    try:
        async with asyncio.timeout(seconds):
            await receive_until(receive, delayed.stopped)
    except TimeoutError:
        return True
    finally:
        running.discard(delayed)
    return False


def _is_loopback(scope: Scope) -> bool:
    """Return whether a request was sent to a loopback address; faults apply nowhere else."""
    try:
        return is_loopback(scope["server"][0])
    except (KeyError, TypeError):
        return False


def find_override(armed: Mapping[str, Fault], request: FaultedRequest) -> Response | None:
    """Return the response of the first fault that answers instead of the server, or None."""
    for fault, override in iter_effects(armed, "override"):
        response: Response | None = override(fault, request)
        if response is not None:
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
    limits: list[int] = []
    forget = armed.get("forget_silently")
    if forget is not None:
        request.record_fault(forget)
        limits.append(0)
    remember = armed.get("remember")
    if remember is not None:
        request.record_fault(remember)
        limits.append(remember.value)
    return min(limits, default=None)
