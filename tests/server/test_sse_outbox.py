"""Frames that are put together are sent together, in order, without loss, and after the start of the stream."""

import asyncio

import pytest
from starlette.types import Message

from kedge.server.sse import MAX_PENDING_BYTES, STREAM_START, BufferedSender
from server.waiting import TIMEOUT


class FakeSocket:
    """A socket that records its sends; while it is not open, sending waits."""

    def __init__(self) -> None:
        self.types: list[str] = []
        self.bodies: list[bytes] = []
        self.open = asyncio.Event()
        self.open.set()
        self._begun: asyncio.Queue[bytes] = asyncio.Queue()

    async def send(self, message: Message) -> None:
        self.types.append(message["type"])
        self._begun.put_nowait(message.get("body", b"start"))
        await self.open.wait()
        self.bodies.append(message.get("body", b"start"))

    async def wait_for_send(self) -> bytes:
        """Wait until the next send has begun and return its body."""
        async with asyncio.timeout(TIMEOUT):
            return await self._begun.get()


async def test_frames_that_are_put_at_once_are_sent_together() -> None:
    """All frames put before a wait are sent in one write."""
    socket = FakeSocket()
    async with BufferedSender(socket.send) as outbox:
        await outbox.put([b"a"])
        await outbox.put([b"b"])
        assert await socket.wait_for_send() == b"ab"
        await outbox.put([b"c"])
        assert await socket.wait_for_send() == b"c"
        await outbox.put([b"d"])
        await outbox.put([b"e"])
    assert socket.bodies == [b"ab", b"c", b"de"]


async def test_a_slow_socket_slows_the_writer_down() -> None:
    """Above the limit, ``put`` returns only after the socket has accepted the pending frames."""
    socket = FakeSocket()
    socket.open.clear()
    order: list[str] = []
    started = asyncio.Event()

    async def put_too_much() -> None:
        started.set()
        await outbox.put([b"y" * MAX_PENDING_BYTES + b"z"])
        order.append("returned")

    async with BufferedSender(socket.send) as outbox:
        await outbox.put([b"x"])
        assert await socket.wait_for_send() == b"x"
        task = asyncio.create_task(put_too_much())
        await started.wait()
        order.append("opened")
        socket.open.set()
        await task
    assert order == ["opened", "returned"]
    assert b"".join(socket.bodies) == b"x" + b"y" * MAX_PENDING_BYTES + b"z"


async def test_nothing_is_lost_when_the_block_ends_during_a_send() -> None:
    """Leaving the block waits for the current send and then sends the rest."""
    socket = FakeSocket()
    socket.open.clear()
    leaving = asyncio.Event()

    async def write() -> None:
        async with BufferedSender(socket.send) as outbox:
            await outbox.put([b"a"])
            assert await socket.wait_for_send() == b"a"
            await outbox.put([b"b"])
            leaving.set()

    writing = asyncio.create_task(write())
    await leaving.wait()
    assert not writing.done()
    socket.open.set()
    await writing
    assert b"".join(socket.bodies) == b"ab"


async def test_an_error_of_the_socket_is_raised_at_the_end() -> None:
    """An error of a send in the background is raised when the block ends."""
    called = asyncio.Event()

    async def send(_: Message) -> None:
        called.set()
        raise OSError("gone")

    async def write() -> None:
        async with BufferedSender(send) as outbox:
            await outbox.put([b"a"])
            await called.wait()

    with pytest.raises(OSError, match="gone"):
        await write()


async def test_the_start_is_sent_at_once_without_grace() -> None:
    """Without a grace period, the start of the response is sent before any frame."""
    socket = FakeSocket()
    async with BufferedSender(socket.send, STREAM_START):
        assert await socket.wait_for_send() == b"start"
        assert socket.types == ["http.response.start"]


async def test_frames_wait_for_the_release_with_grace() -> None:
    """With a grace period, the start and the frames are sent in order after the release."""
    socket = FakeSocket()
    async with BufferedSender(socket.send, STREAM_START, grace=60) as outbox:
        await outbox.put([b"a"])
        await asyncio.sleep(0)
        assert socket.types == []
        outbox.release()
        assert await socket.wait_for_send() == b"start"
    assert socket.types == ["http.response.start", "http.response.body"]


async def test_nothing_is_sent_without_a_release() -> None:
    """A block that ends within the grace period without a release has sent nothing."""
    socket = FakeSocket()
    async with BufferedSender(socket.send, STREAM_START, grace=60) as outbox:
        await outbox.put([b"a"])
    assert not outbox.is_released
    assert socket.types == []


async def test_the_grace_period_ends() -> None:
    """After the grace period, the start is sent without a release."""
    socket = FakeSocket()
    async with BufferedSender(socket.send, STREAM_START, grace=0.001) as outbox:
        assert await socket.wait_for_send() == b"start"
        assert outbox.is_released
