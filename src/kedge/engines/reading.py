"""Reading an answer: events of a stream as they come, or of a whole response at once."""

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from kedge.engines.transport import Reply
from kedge.errors import ServerFailed, StreamCut
from kedge.events import StreamEvent
from kedge.events.responses import ResponsesDecoder


async def read(decoder: ResponsesDecoder, reply: Reply) -> AsyncGenerator[StreamEvent]:
    """The events of the answer, whichever way it comes; a broken connection is the last to be told."""
    cut: StreamCut | None = None
    if reply.is_stream:
        try:
            async with aclosing(reply.chunks) as chunks:
                async for chunk in chunks:
                    for event in decoder.feed(chunk):
                        yield event
        except StreamCut as error:
            cut = error
    else:
        body = b"".join([chunk async for chunk in reply.chunks])
        whole = _parsed(body, reply)
        begun = {name: value for name, value in whole.items() if name != "output"}
        ended = f"response.{whole.get('status') or 'completed'}"
        # Only an escape can hide half a character; to look for one is cheaper than to walk the answer.
        feed = decoder.feed_message if b"\\u" in body else decoder.feed_parsed
        for kind, response in (("response.created", begun), (ended, whole)):
            for event in feed({"type": kind, "response": response}):
                yield event
    for event in decoder.close():
        yield event
    if cut:
        raise cut


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
