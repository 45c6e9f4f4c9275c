"""A deadline ends a block that waits too long, and reports when waiting begins."""

import asyncio
import weakref

import pytest

from kedge.server.deadline import Deadline


async def test_block_that_does_not_wait_is_not_cancelled() -> None:
    """For a block that does not wait, ``on_wait`` is not called and the deadline does not apply."""
    waits: list[int] = []
    with Deadline(0, lambda: waits.append(1)) as deadline:
        pass
    await asyncio.sleep(0)
    assert not deadline.cancelled
    assert waits == []


async def test_a_block_that_waits_too_long_is_ended() -> None:
    """A block that waits too long ends without an error, and ``cancelled`` is set."""
    waits: list[int] = []
    with Deadline(0, lambda: waits.append(1)) as deadline:
        await asyncio.Event().wait()
    assert deadline.cancelled
    assert waits == [1]
    await asyncio.sleep(0)  # the task itself continues


async def test_block_can_be_cancelled_explicitly() -> None:
    """A block can be cancelled while it waits, or before it is entered."""
    with Deadline(60) as deadline:
        asyncio.get_running_loop().call_soon(deadline.cancel)
        await asyncio.Event().wait()
    assert deadline.cancelled
    early = Deadline(60)
    early.cancel()
    with early:
        await asyncio.Event().wait()
    assert early.cancelled


async def test_errors_and_results_pass_through() -> None:
    """A deadline changes neither results nor exceptions."""

    async def work(number: int) -> float:
        with Deadline(60):
            await asyncio.sleep(0)
            return 42 / number
        return 0

    assert await work(1) == 42
    with pytest.raises(ZeroDivisionError):
        await work(0)


async def test_a_cancellation_by_another_caller_propagates() -> None:
    """Cancellation of the task propagates, also together with the deadline's own."""
    for both in (False, True):
        deadline = Deadline(60)

        async def work(deadline: Deadline = deadline) -> None:
            with deadline:
                await asyncio.Event().wait()

        task = asyncio.create_task(work())
        await asyncio.sleep(0)
        if both:
            deadline.cancel()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_an_object_with_a_deadline_is_freed_without_a_collection() -> None:
    """A deadline that was left does not refer to the object that it called back."""

    class Owner:
        def __init__(self) -> None:
            self.deadline = Deadline(60, self.handle_wait)

        def handle_wait(self) -> None: ...

    owner = Owner()
    with owner.deadline:
        pass
    freed = weakref.ref(owner)
    del owner
    assert freed() is None
