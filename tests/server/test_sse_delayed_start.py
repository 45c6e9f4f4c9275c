"""The opening of a stream, held back until its model has begun."""

import asyncio
from typing import Any

from starlette.types import Message

from kedge.server.sse import DelayedStart
from server.waiting import TIMEOUT

START: Message = {"type": "http.response.start", "status": 200, "headers": []}


async def open_delayed(grace: float) -> tuple[DelayedStart, list[Any]]:
    """An opening that was asked to send its start, and what it has sent."""
    sent: list[Any] = []

    async def send(message: Message) -> None:
        sent.append(message)

    opening = DelayedStart(send, grace)
    await opening(START)
    return opening, sent


async def test_without_grace_everything_passes_at_once() -> None:
    """A model that cannot refuse needs no waiting."""
    opening, sent = await open_delayed(0)
    assert opening.released
    assert sent == [START]


async def test_with_grace_everything_waits_for_the_release() -> None:
    """And comes in its order then."""
    opening, sent = await open_delayed(60)
    await opening({"type": "http.response.body", "body": b"a", "more_body": True})
    assert sent == []
    await opening.release()
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]
    opening.close()


async def test_a_slow_model_is_not_waited_for_for_ever() -> None:
    """After its grace the stream is opened."""
    begun = asyncio.Event()

    async def send(_: Message) -> None:
        begun.set()

    opening = DelayedStart(send, 0.001)
    await opening(START)
    async with asyncio.timeout(TIMEOUT):
        await begun.wait()
    assert opening.released
    opening.close()
