"""Reading an answer: events of a stream as they come, or of a whole response at once."""

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from kedge.engines.transport import Reply
from kedge.errors import ServerFailed, StreamCut
from kedge.events import StreamEvent
from kedge.events.responses import ResponsesDecoder


async def read_stream(decoder: ResponsesDecoder, reply: Reply) -> AsyncGenerator[StreamEvent]:
    """The events of a stream; a broken connection is the last to be told."""
    cut: StreamCut | None = None
    try:
        async with aclosing(reply.chunks()) as chunks:
            async for chunk in chunks:
                for event in decoder.feed(chunk):
                    yield event
    except StreamCut as error:
        cut = error
    for event in decoder.close():
        yield event
    if cut:
        raise cut


async def read_whole(decoder: ResponsesDecoder, reply: Reply) -> list[StreamEvent]:
    """The events that a whole response amounts to."""
    body = await reply.body()
    whole = _parsed(body, reply)
    begun = {name: value for name, value in whole.items() if name != "output"}
    ended = f"response.{whole.get('status') or 'completed'}"
    # Only an escape can hide half a character; to look for one is cheaper than to walk the answer.
    feed = decoder.feed_message if b"\\u" in body else decoder.feed_parsed
    return [
        *feed({"type": "response.created", "response": begun}),
        *feed({"type": ended, "response": whole}),
        *decoder.close(),
    ]


def _parsed(body: bytes, reply: Reply) -> dict[str, Any]:
    try:
        response = json.loads(body)
    except ValueError:
        response = None
    # What holds neither output nor a status is no answer, not even an empty one: some gateways
    # report their troubles in an object of their own, with status 200.
    if not isinstance(response, dict) or not response.keys() & {"output", "status"}:
        words = "the server answered with something that is not a response"
        raise ServerFailed(
            words, provider=reply.provider, request_id=reply.request_id, retryable=True
        )
    return response  # pyright: ignore[reportUnknownVariableType]
