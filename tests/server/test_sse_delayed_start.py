"""The start of a stream is delayed until its model has begun."""

import asyncio

from starlette.types import Message

from kedge.server.sse import STREAM_START, BufferedSender
from server.waiting import TIMEOUT


class FakeSocket:
    """A socket that records the types of its messages."""

    def __init__(self) -> None:
        self.types: list[str] = []
        self.is_started = asyncio.Event()

    async def send(self, message: Message) -> None:
        self.types.append(message["type"])
        self.is_started.set()

    async def wait_for_start(self) -> None:
        async with asyncio.timeout(TIMEOUT):
            await self.is_started.wait()


async def test_the_start_is_sent_at_once_without_grace() -> None:
    """Without a grace period, the start of the response is sent before any frame."""
    socket = FakeSocket()
    async with BufferedSender(socket.send, STREAM_START):
        await socket.wait_for_start()
        assert socket.types == ["http.response.start"]


async def test_frames_wait_for_the_release_with_grace() -> None:
    """With a grace period, the start and the frames are sent in order after the release."""
    socket = FakeSocket()
    async with BufferedSender(socket.send, STREAM_START, grace=60) as outbox:
        await outbox.put(b"a")
        await asyncio.sleep(0)
        assert socket.types == []
        outbox.release()
        await socket.wait_for_start()
    assert socket.types == ["http.response.start", "http.response.body"]


async def test_nothing_is_sent_without_a_release() -> None:
    """A block that ends within the grace period without a release has sent nothing."""
    socket = FakeSocket()
    async with BufferedSender(socket.send, STREAM_START, grace=60) as outbox:
        await outbox.put(b"a")
    assert not outbox.is_released
    assert socket.types == []


async def test_the_grace_period_ends() -> None:
    """After the grace period, the start is sent without a release."""
    socket = FakeSocket()
    async with BufferedSender(socket.send, STREAM_START, grace=0.001) as outbox:
        await socket.wait_for_start()
        assert outbox.is_released
