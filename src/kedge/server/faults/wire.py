"""The connection, as the server sees it while faults are armed.

The server reads its request here and writes its answer here. A stream is passed on event by event
and may break off; any other answer is passed on when it is whole, perhaps as another.
"""

import asyncio
import json
from collections.abc import Mapping

from starlette.types import Message, Receive, Send

from kedge.server import errors
from kedge.server.faults.effects import EDITS, ORDER, Answer, Asked, Body, not_found_as
from kedge.server.faults.frames import Edited, Frames, Step, framed
from kedge.server.faults.language import Fault
from kedge.server.refusing import refusal
from kedge.server.wire import encode

DISCONNECT: Message = {"type": "http.disconnect"}


class Wire:
    """Both ends of one connection."""

    def __init__(
        self, armed: Mapping[str, Fault], asked: Asked, receive: Receive, send: Send
    ) -> None:
        self._armed = armed
        self._asked = asked
        self._receive = receive
        self._send = send
        self._request: bytes | None = asked.request()
        self._cut = asyncio.Event()
        self._status = 0
        self._headers: list[tuple[bytes, bytes]] = []
        self._whole = b""
        self._frames: Frames | None = None
        self._sent = 0

    async def receive(self) -> Message:
        """Give the request once, and then nothing until the client leaves or is cut off."""
        if self._request is not None:
            request, self._request = self._request, None
            return {"type": "http.request", "body": request, "more_body": False}
        ends = [asyncio.ensure_future(self._receive()), asyncio.ensure_future(self._cut.wait())]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for end in ends:
                end.cancel()
        return DISCONNECT

    async def send(self, message: Message) -> None:
        """Pass the answer on: a stream event by event, anything else when it is whole."""
        if self._cut.is_set():
            return
        if message["type"] == "http.response.start":
            await self._begin(message)
        elif self._frames is not None:
            await self._pass(self._frames, message)
        else:
            self._whole += message.get("body", b"")
            if not message.get("more_body"):
                await self._finish()

    async def _begin(self, message: Message) -> None:
        self._asked.record()
        self._status, self._headers = message["status"], message["headers"]
        if dict(self._headers).get(b"content-type", b"").startswith(b"text/event-stream"):
            self._frames = Frames(self._steps())
            await self._send(message)
            self._breaks("cut_after_events")
            await self._fails()

    def _steps(self) -> list[Step]:
        steps: list[Step] = [Edited(self._edit)] if self._armed.keys() & EDITS.keys() else []
        for name, make in ORDER.items():
            if name in self._armed:
                steps.append(make(self._asked.strike(self._armed[name])))
        return steps

    def _edit(self, event: Body) -> None:
        for name, edit in EDITS.items():
            fault = self._armed.get(name)
            if fault is not None and edit(fault, self._asked, event):
                self._asked.strike(fault)

    async def _pass(self, frames: Frames, message: Message) -> None:
        for frame in frames.feed(message.get("body", b"")):
            if self._breaks("cut_in_event"):
                await self._more(frame[: len(frame) // 2])
                return
            await self._more(frame)
            self._sent += 1
            if self._breaks("cut_after_events") or await self._fails():
                return
        if not message.get("more_body"):
            for frame in frames.rest():
                await self._more(frame)
            await self._send({"type": "http.response.body", "body": b""})

    async def _more(self, data: bytes) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    def _breaks(self, name: str) -> bool:
        """Break the connection if this fault says so here: an answer without an end is cut off."""
        fault = self._armed.get(name)
        if fault is None or fault.value != self._sent:
            return False
        self._asked.strike(fault)
        self._cut.set()
        return True

    async def _fails(self) -> bool:
        """End the stream with an error event, if a fault says so here."""
        if not self._breaks("fail_after_events"):
            return False
        await self._send({"type": "http.response.body", "body": self._failure()})
        return True

    def _failure(self) -> bytes:
        error = errors.OVERLOADED()
        body = dict(refusal(self._asked.scope, error)[1])
        if self._asked.remembers:
            body = {**body["error"], "type": "error", "sequence_number": self._sent}
        return framed(body)

    async def _finish(self) -> None:
        headers = [pair for pair in self._headers if pair[0] != b"content-length"]
        await answer_with(self._rewritten(), self._send, headers)

    def _rewritten(self) -> Answer:
        body: Body = json.loads(self._whole)
        other = not_found_as(self._armed.get("not_found"), self._asked, body)
        if other is not None:
            return other
        if self._status == 200:
            self._edit({"type": "", "response": body})
        return Answer(self._status, body)


async def answer_with(
    answer: Answer, send: Send, headers: list[tuple[bytes, bytes]] | None = None
) -> None:
    """Send an answer as JSON."""
    body = encode(answer.body)
    given = [(b"content-type", b"application/json")] if headers is None else headers
    await send(
        {
            "type": "http.response.start",
            "status": answer.status,
            "headers": [*given, *answer.headers, (b"content-length", str(len(body)).encode())],
        }
    )
    await send({"type": "http.response.body", "body": body})
