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


async def test_a_slow_socket_slows_the_writer_down_and_loses_nothing() -> None:
    """Above the limit, ``put`` waits for the socket; later frames are sent together, also after the block's end."""
    socket = FakeSocket()
    socket.open.clear()
    order: list[str] = []
    sent = asyncio.Event()
    leaving = asyncio.Event()
    large = b"y" * MAX_PENDING_BYTES + b"z"

    async def write() -> None:
        async with BufferedSender(socket.send) as outbox:
            await outbox.put([b"x"])
            assert await socket.wait_for_send() == b"x"
            sent.set()
            await outbox.put([large])
            order.append("returned")
            socket.open.clear()
            await outbox.put([b"a"])
            await outbox.put([b"b"])
            leaving.set()

    writing = asyncio.create_task(write())
    await sent.wait()
    order.append("opened")
    socket.open.set()
    await leaving.wait()
    assert not writing.done()
    socket.open.set()
    await writing
    assert order == ["opened", "returned"]
    assert socket.bodies == [b"x", large, b"ab"]


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


async def test_a_grace_period_ends_with_a_release_or_by_itself() -> None:
    """The start is sent at its end, before the frames; a block that ends before without a release sends nothing."""
    socket = FakeSocket()
    async with BufferedSender(socket.send, STREAM_START, grace=60) as outbox:
        await outbox.put([b"a"])
        await asyncio.sleep(0)
    assert not outbox.is_released
    assert socket.types == []
    async with BufferedSender(socket.send, STREAM_START, grace=60) as outbox:
        await outbox.put([b"a"])
        outbox.release()
        assert await socket.wait_for_send() == b"start"
    assert socket.types == ["http.response.start", "http.response.body"]
    for grace in (0.0, 0.001):
        socket = FakeSocket()
        async with BufferedSender(socket.send, STREAM_START, grace=grace) as outbox:
            assert await socket.wait_for_send() == b"start"
            assert outbox.is_released
