"""Reading an answer: events of a stream as they come, or of a whole response at once."""

import json
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from anyio import move_on_after

from kedge.engines.transport import Answer
from kedge.errors import ServerFailed, StreamCut
from kedge.events import ResponseFailed, StreamEvent, StreamFailed
from kedge.events.decoder import StreamDecoder

GRACE = 0.1
"""Seconds that a server has to end its stream after the answer's end, to keep the connection."""


async def read_answer(
    decoder: StreamDecoder, reply: Answer, clean: Callable[[str], str]
) -> AsyncGenerator[StreamEvent]:
    """The events of an answer, whole or as they come, without the key; the reply is closed after."""
    async with aclosing(reply):
        if not reply.is_stream:
            for event in await _read_whole(decoder, reply):
                yield _cleaned(event, clean)
            return
        async with aclosing(_read_stream(decoder, reply)) as events:
            async for event in events:
                yield _cleaned(event, clean)


async def _read_stream(decoder: StreamDecoder, reply: Answer) -> AsyncGenerator[StreamEvent]:
    """The events of a stream up to the end of the answer; a broken connection is told last."""
    cut: StreamCut | None = None
    try:
        async with aclosing(reply.chunks()) as chunks:
            async for chunk in chunks:
                over = False
                for event in decoder.feed(chunk):
                    over = over or isinstance(event, StreamFailed)
                    yield event
                if over or decoder.ended:
                    for event in await _rest(decoder, chunks):
                        yield event
                    break
    except StreamCut as error:
        cut = error
    for event in decoder.close():
        yield event
    if cut:
        raise cut


async def _rest(decoder: StreamDecoder, chunks: AsyncGenerator[bytes]) -> list[StreamEvent]:
    """What follows the end of the answer, from a server that does not take its time over it."""
    found: list[StreamEvent] = []
    with move_on_after(GRACE):
        async for chunk in chunks:
            found += decoder.feed(chunk)
    return found


async def _read_whole(decoder: StreamDecoder, reply: Answer) -> list[StreamEvent]:
    """The events that a whole response amounts to."""
    body = await reply.body()
    whole = _parsed(body, decoder, reply)
    # Only an escape can hide half a character; to look for one is cheaper than to walk the answer.
    return decoder.feed_whole(whole, torn=b"\\u" in body)


def _cleaned(event: StreamEvent, clean: Callable[[str], str]) -> StreamEvent:
    """The event, without the key where a server repeats it."""
    if not isinstance(event, StreamFailed | ResponseFailed):
        return event
    return replace(event, message=clean(event.message), code=clean(event.code))


def _parsed(body: bytes, decoder: StreamDecoder, reply: Answer) -> dict[str, Any]:
    try:
        response = json.loads(body)
    except ValueError:
        response = None
    # What holds nothing of an answer is none, not even an empty one: some gateways report their
    # troubles in an object of their own, with status 200.
    if not isinstance(response, dict) or not response.keys() & decoder.ANSWER:
        words = "the server answered with something that is not a response"
        raise ServerFailed(
            words, provider=reply.provider, request_id=reply.request_id, retryable=True
        )
    return response  # pyright: ignore[reportUnknownVariableType]
