"""Events that come at once travel together; none is lost, none overtakes another."""

import asyncio

import pytest
from starlette.types import Message

from kedge.server.sse import MOST_WAITING, Outbox


class Wire:
    """Takes what is sent; while it is closed, sending waits."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.open = asyncio.Event()
        self.open.set()

    async def send(self, message: Message) -> None:
        await self.open.wait()
        self.bodies.append(message["body"])


async def pause() -> None:
    """Let the other tasks run, as a model does that waits for something."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_frames_that_come_at_once_travel_together() -> None:
    """One write for all that was there when the model came to wait, and at the end."""
    wire = Wire()
    async with Outbox(wire.send) as outbox:
        await outbox.put(b"a")
        await outbox.put(b"b")
        await pause()
        assert wire.bodies == [b"ab"]
        await outbox.put(b"c")
        await pause()
        await outbox.put(b"d")
        await outbox.put(b"e")
    assert wire.bodies == [b"ab", b"c", b"de"]


async def test_a_slow_socket_slows_the_writer_down() -> None:
    """Past a bound, whoever puts waits until the socket takes what there is."""
    wire = Wire()
    wire.open.clear()
    async with Outbox(wire.send) as outbox:
        await outbox.put(b"x")
        more = asyncio.create_task(outbox.put(b"y" * MOST_WAITING + b"z"))
        await pause()
        waited = not more.done()
        wire.open.set()
        await asyncio.wait_for(more, 10)
    assert waited
    assert b"".join(wire.bodies) == b"x" + b"y" * MOST_WAITING + b"z"


async def test_nothing_is_lost_when_the_end_comes_while_frames_are_being_sent() -> None:
    """The end waits for a write that is under way, and comes after it."""
    wire = Wire()

    async def write() -> None:
        async with Outbox(wire.send) as outbox:
            await outbox.put(b"a")
            wire.open.clear()
            await pause()  # now the frame is held by a write that waits
            await outbox.put(b"b")

    writing = asyncio.create_task(write())
    await pause()
    await pause()
    assert not writing.done()
    wire.open.set()
    await asyncio.wait_for(writing, 10)
    assert b"".join(wire.bodies) == b"ab"


async def test_a_socket_that_fails_is_not_passed_over() -> None:
    """What went wrong while sending in the background is raised at the end."""

    async def send(_: Message) -> None:
        raise OSError("gone")

    async def write() -> None:
        async with Outbox(send) as outbox:
            await outbox.put(b"a")
            await pause()

    with pytest.raises(OSError, match="gone"):
        await write()
