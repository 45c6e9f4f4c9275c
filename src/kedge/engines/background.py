"""Responses that a server generates in the background: wait for their end, and continue their streams.

Such a response continues when its connection ends. It is paid for once, so it is fetched by its id and never
requested again: as a stream from the event after the last one received, or else as an object once it has ended.
"""

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from dataclasses import dataclass

from anyio import sleep

from kedge.engines.transport import RawResponse, Transport
from kedge.errors import EngineError, RequestRefused, StreamCut
from kedge.events.responses import RUNNING, ResponsesDecoder
from kedge.security.urls import quote_segment

POLL_SECONDS = (0.2, 5.0)
"""The first and the longest pause between two requests for a response that has not ended."""
MAX_CONTINUATIONS = 4
"""How often in a row a stream is continued without a new event."""


@dataclass(frozen=True, slots=True)
class FetchedResponse:
    """A response object that was fetched by its id."""

    content: bytes
    provider: str
    request_id: str = ""
    is_stream: bool = False

    async def chunks(self) -> AsyncGenerator[bytes]:
        """Yield the object."""
        yield await self.body()

    async def body(self) -> bytes:
        """Return the object."""
        return self.content

    async def aclose(self) -> None:
        """Do nothing: it was read already."""


async def fetch_response(transport: Transport, response_id: str, *, wait: bool) -> RawResponse:
    """Return a response, with ``wait`` when it has ended."""
    pause, longest = POLL_SECONDS
    while True:
        found = await transport.request_json("get", f"/responses/{quote_segment(response_id)}")
        if not wait or found.get("status") not in RUNNING:
            return FetchedResponse(json.dumps(found).encode(), transport.provider)
        await sleep(pause)
        pause = min(pause * 1.5, longest)


async def stream_response(
    transport: Transport, response_id: str, decoder: ResponsesDecoder
) -> RawResponse:
    """Return the stream of a response from its start; when it has ended, if the server does not stream it."""
    try:
        reply = await _open_stream(transport, response_id, decoder)
    except RequestRefused as error:
        if error.status == 404:
            raise
        return await fetch_response(transport, response_id, wait=True)
    if reply.is_stream:
        return ContinuedStream(transport, reply, decoder)
    await reply.aclose()
    return await fetch_response(transport, response_id, wait=True)


async def _open_stream(
    transport: Transport, response_id: str, decoder: ResponsesDecoder
) -> RawResponse:
    last = decoder.last_sequence_number
    after = {"starting_after": last} if last >= 0 else {}
    path = f"/responses/{quote_segment(response_id)}"
    return await transport.get_stream(path, stream="true", **after)


class ContinuedStream:
    """A stream that is continued on another connection if its connection ends before the response.

    Args:
        transport: The connection to the server.
        reply: The stream so far.
        decoder: The decoder that reads it, and knows the id and the last event of the response.
    """

    def __init__(self, transport: Transport, reply: RawResponse, decoder: ResponsesDecoder) -> None:
        self._transport = transport
        self._reply = reply
        self._decoder = decoder

    @property
    def provider(self) -> str:
        """The provider of the response."""
        return self._reply.provider

    @property
    def request_id(self) -> str:
        """The server's id of the first request."""
        return self._reply.request_id

    @property
    def is_stream(self) -> bool:
        """Whether the body is a stream of events."""
        return self._reply.is_stream

    async def chunks(self) -> AsyncGenerator[bytes]:
        """Yield the body as it arrives, on as many connections as are needed."""
        decoder, tries, last = self._decoder, 0, -1
        while True:
            try:
                async with aclosing(self._reply.chunks()) as chunks:
                    async for chunk in chunks:
                        yield chunk
            except StreamCut:
                if not decoder.response_id:
                    raise
            tries = 0 if decoder.last_sequence_number > last else tries + 1
            last = decoder.last_sequence_number
            if decoder.ended or not decoder.response_id or tries > MAX_CONTINUATIONS:
                return
            if not await self._continue(tries):
                return

    async def _continue(self, tries: int) -> bool:
        """Open the rest of the stream; return whether there is one."""
        await self._reply.aclose()
        await sleep(POLL_SECONDS[0] * tries)
        self._decoder.restart()
        with suppress(EngineError):  # the response can be fetched later
            self._reply = await _open_stream(
                self._transport, self._decoder.response_id, self._decoder
            )
            return self._reply.is_stream
        return False

    async def body(self) -> bytes:
        """Return the complete body."""
        return await self._reply.body()

    async def aclose(self) -> None:
        """Release the connection."""
        await self._reply.aclose()
