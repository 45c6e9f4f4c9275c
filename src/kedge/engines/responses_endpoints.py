"""Further endpoints of the Responses API: the identity of a server, and responses in the background.

A response that a server generates in the background continues when its connection ends. It is paid for once, so it is
fetched by its id and never requested again: as a stream from the event after the last one received, or else as an
object once it has ended.
"""

from collections.abc import AsyncGenerator

from anyio import sleep

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
CONTINUATION_SECONDS = 0.2
"""The seconds before a stream is continued, for each time in a row without a new event."""
MAX_CONTINUATIONS = 4
"""How often in a row a stream is continued without a new event."""


async def identify_server(transport: Transport) -> None:
    """Send a small request, so that the server identifies itself in the response headers."""
    try:
        await transport.request_json("get", "/models")
    except EngineError:
        transport.identity = transport.identity or ""


async def fetch_response(transport: Transport, response_id: str, *, wait: bool) -> RawResponse:
    """Return a response, with ``wait`` when it has ended."""
    pauses = RESPONSE_POLLS.pauses()
    while True:
        reply = await transport.send(f"/responses/{quote_segment(response_id)}", method="GET")
        if not wait:
            return reply
        content = await reply.read()
        if parse_object(content).get("status") not in RUNNING:
            source = _yield_once(content)
            return RawResponse(reply.client, reply.errors, source, lambda: None, reply.headers)
        await sleep(next(pauses))


async def _yield_once(content: bytes) -> AsyncGenerator[bytes]:
    yield content


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
        return continue_stream(transport, reply, decoder)
    await reply.aclose()
    return await fetch_response(transport, response_id, wait=True)


async def _open_stream(
    transport: Transport, response_id: str, decoder: ResponsesDecoder
) -> RawResponse:
    path = f"/responses/{quote_segment(response_id)}"
    query: dict[str, str | int] = {"stream": "true"}
    if decoder.last_sequence_number >= 0:
        query["starting_after"] = decoder.last_sequence_number
    return await transport.send(path, method="GET", streaming=True, query=query)


def continue_stream(
    transport: Transport, reply: RawResponse, decoder: ResponsesDecoder
) -> RawResponse:
    """Return a stream that is continued on another connection if its connection ends before the response.

    Args:
        transport: The connection to the server.
        reply: The stream so far.
        decoder: The decoder that reads it, and knows the id and the last event of the response.
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
            await sleep(CONTINUATION_SECONDS * tries)
            decoder.restart()
            try:
                reply = await _open_stream(transport, decoder.response_id, decoder)
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
