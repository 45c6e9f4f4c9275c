"""Further endpoints of the Responses API: the identity of a server, and responses in the background.

A response that a server generates in the background continues when its connection ends. It is paid for once, so it is
fetched by its id and never requested again: as a stream from the event after the last one received, or else as an
object once it has ended.
"""

import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kedge._internal.urls import quote_segment
from kedge._internal.wait_policy import WaitPolicy
from kedge.engines.http_errors import parse_object
from kedge.engines.raw_response import RawResponse
from kedge.engines.transport import Transport
from kedge.errors import EngineError, RequestRefused, StreamCut
from kedge.wire.responses import RUNNING, ResponsesDecoder

RESPONSE_POLLS = WaitPolicy(
    "a request for a response that has not ended", first=0.2, longest=5.0, factor=1.5
)
MISSING_WAITS = WaitPolicy(
    "a request for a young response that the server does not have: it may not have reached each replica",
    first=1.0,
    longest=60.0,
)
YOUNG_SECONDS = 60.0
"""The age up to which "not found" does not mean that a server has no response."""
MISSING_STATUSES = (404, 410)
"""The HTTP statuses of a response that is not found."""
CONTINUATION_SECONDS = 0.2
"""The seconds before a stream is continued, for each time in a row without a new event."""
MAX_CONTINUATIONS = 4
"""How often in a row a stream is continued without a new event."""

Clock = Callable[[], float]
Sleep = Callable[[float], Awaitable[None]]


async def identify_server(transport: Transport) -> None:
    """Send a small request, so that the server identifies itself in the response headers."""
    try:
        await transport.request_json("get", "/models")
    except EngineError:
        transport.identity = transport.identity or ""


def names_response(error: EngineError, response_id: str) -> bool:
    """Return whether an error says of a response, and not only of a path, that it does not exist.

    A gateway without a route, or with the address of another server, may repeat the path, which ends with the id.
    """
    pattern = rf"(?<![\w/-]){re.escape(response_id)}(?![\w-])"
    return any(re.search(pattern, text) for text in (error.message, str(error.body or "")))


@dataclass(frozen=True, slots=True)
class BackgroundResponse:
    """A response that a server generates in the background.

    Attributes:
        transport: The connection to the server.
        response_id: Its id.
        created_at: When it was requested, as a Unix time.
        clock: Returns the time.
        sleep: Waits for a number of seconds.
    """

    transport: Transport
    response_id: str
    created_at: float
    clock: Clock
    sleep: Sleep

    async def send(
        self,
        *,
        action: str = "",
        content: bytes | None = None,
        method: str = "GET",
        streaming: bool = False,
        query: Mapping[str, Any] | None = None,
    ) -> RawResponse:
        """Send a request about the response; it is repeated while the response is young and not found.

        Args:
            action: The end of the path, which is sent to the response.
            content: The body.
            method: The HTTP method.
            streaming: Whether a stream is requested.
            query: The parameters of the URL.
        """
        path = f"/responses/{quote_segment(self.response_id)}{action}"
        age = max(self.clock() - self.created_at, 0.0)
        pauses = MISSING_WAITS.pauses_within(YOUNG_SECONDS - age)
        while True:
            try:
                return await self.transport.send(
                    path, content, method=method, streaming=streaming, query=query
                )
            except RequestRefused as error:
                pause = next(pauses, None)
                if error.status not in MISSING_STATUSES or pause is None:
                    raise
            await self.sleep(pause)

    async def fetch(self, *, wait: bool) -> RawResponse:
        """Return the response, with ``wait`` when it has ended."""
        pauses = RESPONSE_POLLS.pauses()
        while True:
            reply = await self.send()
            if not wait:
                return reply
            content = await reply.read()
            if parse_object(content).get("status") not in RUNNING:
                source = _yield_once(content)
                return RawResponse(reply.client, reply.errors, source, lambda: None, reply.headers)
            await self.sleep(next(pauses))

    async def cancel(self) -> dict[str, Any]:
        """Stop the response, and return it."""
        reply = await self.send(action="/cancel", content=b"{}", method="POST")
        return parse_object(await reply.read())

    async def stream(self, decoder: ResponsesDecoder) -> RawResponse:
        """Return the stream of the response from its start; when it has ended, if the server does not stream it."""
        try:
            reply = await self.open_stream(decoder)
        except RequestRefused as error:
            if error.status in MISSING_STATUSES:
                raise
            return await self.fetch(wait=True)
        if reply.is_stream:
            return continue_stream(reply, decoder, lambda _: self)
        await reply.aclose()
        return await self.fetch(wait=True)

    async def open_stream(self, decoder: ResponsesDecoder) -> RawResponse:
        """Return the stream of the response from the event after the last one that the decoder has received."""
        query: dict[str, str | int] = {"stream": "true"}
        if decoder.last_sequence_number >= 0:
            query["starting_after"] = decoder.last_sequence_number
        return await self.send(streaming=True, query=query)


async def _yield_once(content: bytes) -> AsyncGenerator[bytes]:
    yield content


def continue_stream(
    reply: RawResponse, decoder: ResponsesDecoder, locate: Callable[[str], BackgroundResponse]
) -> RawResponse:
    """Return a stream that is continued on another connection if its connection ends before the response.

    Args:
        reply: The stream so far.
        decoder: The decoder that reads it, and knows the id and the last event of the response.
        locate: Returns the response with an id.
    """

    async def read() -> AsyncGenerator[bytes]:
        nonlocal reply
        tries = 0
        last = -1
        while True:
            try:
                while chunk := await reply.next_chunk():
                    yield chunk
            except StreamCut:
                if not decoder.response_id:
                    raise
            if decoder.last_sequence_number > last:
                tries = 0
            else:
                tries += 1
            last = decoder.last_sequence_number
            if decoder.ended or not decoder.response_id or tries > MAX_CONTINUATIONS:
                return
            await reply.aclose()
            response = locate(decoder.response_id)
            await response.sleep(CONTINUATION_SECONDS * tries)
            decoder.restart()
            try:
                reply = await response.open_stream(decoder)
            except EngineError:  # the response can be fetched later
                return
            if not reply.is_stream:
                return

    async def release() -> None:
        await reply.aclose()

    tap = reply.tap
    reply.tap = None  # the tap gets the parts of all connections at the end
    return RawResponse(
        reply.client, reply.errors, read(), release, reply.headers, reply.is_stream, tap=tap
    )
