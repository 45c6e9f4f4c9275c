"""Events that come at once travel together; none is lost, none overtakes another."""

import asyncio

import pytest
from starlette.types import Message

from kedge.server.sse import MAX_PENDING_BYTES, BufferedSender


class FakeSocket:
    """Takes what is sent; while it is closed, sending waits."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.open = asyncio.Event()
        self.open.set()

    async def send(self, message: Message) -> None:
        await self.open.wait()
        self.bodies.append(message["body"])


async def run_other_tasks() -> None:
    """Let the other tasks run, as a model does that waits for something."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_frames_that_come_at_once_travel_together() -> None:
    """One write for all that was there when the model came to wait, and at the end."""
    wire = FakeSocket()
    async with BufferedSender(wire.send) as outbox:
        await outbox.put(b"a")
        await outbox.put(b"b")
        await run_other_tasks()
        assert wire.bodies == [b"ab"]
        await outbox.put(b"c")
        await run_other_tasks()
        await outbox.put(b"d")
        await outbox.put(b"e")
    assert wire.bodies == [b"ab", b"c", b"de"]


async def test_a_slow_socket_slows_the_writer_down() -> None:
    """Past a bound, whoever puts waits until the socket takes what there is."""
    wire = FakeSocket()
    wire.open.clear()
    async with BufferedSender(wire.send) as outbox:
        await outbox.put(b"x")
        more = asyncio.create_task(outbox.put(b"y" * MAX_PENDING_BYTES + b"z"))
        await run_other_tasks()
        waited = not more.done()
        wire.open.set()
        await asyncio.wait_for(more, 10)
    assert waited
    assert b"".join(wire.bodies) == b"x" + b"y" * MAX_PENDING_BYTES + b"z"


async def test_nothing_is_lost_when_the_end_comes_while_frames_are_being_sent() -> None:
    """The end waits for a write that is under way, and comes after it."""
    wire = FakeSocket()

    async def write() -> None:
        async with BufferedSender(wire.send) as outbox:
            await outbox.put(b"a")
            wire.open.clear()
            await run_other_tasks()  # now the frame is held by a write that waits
            await outbox.put(b"b")

    writing = asyncio.create_task(write())
    await run_other_tasks()
    await run_other_tasks()
    assert not writing.done()
    wire.open.set()
    await asyncio.wait_for(writing, 10)
    assert b"".join(wire.bodies) == b"ab"


async def test_a_socket_that_fails_is_not_passed_over() -> None:
    """What went wrong while sending in the background is raised at the end."""

    async def send(_: Message) -> None:
        raise OSError("gone")

    async def write() -> None:
        async with BufferedSender(send) as outbox:
            await outbox.put(b"a")
            await run_other_tasks()

    with pytest.raises(OSError, match="gone"):
        await write()
