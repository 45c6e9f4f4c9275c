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

    delayed_start = DelayedStart(send, grace)
    await delayed_start(START)
    return delayed_start, sent


async def test_messages_are_sent_at_once_without_grace() -> None:
    """Without a grace period, the start of the response is sent immediately."""
    delayed_start, sent = await open_delayed(0)
    assert delayed_start.released
    assert sent == [START]


async def test_messages_wait_for_the_release_with_grace() -> None:
    """With a grace period, messages are sent in order after the release."""
    delayed_start, sent = await open_delayed(60)
    await delayed_start({"type": "http.response.body", "body": b"a", "more_body": True})
    assert sent == []
    await delayed_start.release()
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]
    delayed_start.close()


async def test_grace_period_ends() -> None:
    """After the grace period, the start is sent without a release."""
    started = asyncio.Event()

    async def send(_: Message) -> None:
        started.set()

    delayed_start = DelayedStart(send, 0.001)
    await delayed_start(START)
    async with asyncio.timeout(TIMEOUT):
        await started.wait()
    assert delayed_start.released
    delayed_start.close()
