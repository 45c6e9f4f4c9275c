"""The start of a stream is delayed until its model has begun."""

import asyncio
from typing import Any

from starlette.types import Message

from kedge.server.sse import DelayedStart
from server.waiting import TIMEOUT

START: Message = {"type": "http.response.start", "status": 200, "headers": []}


async def open_delayed(grace: float) -> tuple[DelayedStart, list[Any]]:
    """Return a delayed start that has received its first message, and the list of sent messages."""
    sent: list[Any] = []

    async def send(message: Message) -> None:
        sent.append(message)

    opening = DelayedStart(send, grace)
    await opening(START)
    return opening, sent


async def test_messages_are_sent_at_once_without_grace() -> None:
    """Without a grace period, the start of the response is sent immediately."""
    opening, sent = await open_delayed(0)
    assert opening.released
    assert sent == [START]


async def test_messages_wait_for_the_release_with_grace() -> None:
    """With a grace period, messages are sent in order after the release."""
    opening, sent = await open_delayed(60)
    await opening({"type": "http.response.body", "body": b"a", "more_body": True})
    assert sent == []
    await opening.release()
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]
    opening.close()


async def test_grace_period_ends() -> None:
    """After the grace period, the start is sent without a release."""
    started = asyncio.Event()

    async def send(_: Message) -> None:
        started.set()

    opening = DelayedStart(send, 0.001)
    await opening(START)
    async with asyncio.timeout(TIMEOUT):
        await started.wait()
    assert opening.released
    opening.close()
