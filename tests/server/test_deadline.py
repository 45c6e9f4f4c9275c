"""A deadline ends a block that waits too long, and reports when waiting begins."""

import asyncio

import pytest

from kedge.server.deadline import Deadline


async def test_a_block_that_does_not_wait_is_left_alone() -> None:
    """``on_wait`` is not called, and no timer is left."""
    waits: list[int] = []
    with Deadline(0, lambda: waits.append(1)) as deadline:
        pass
    await asyncio.sleep(0)
    assert not deadline.cancelled
    assert waits == []


async def test_a_block_that_waits_too_long_is_ended() -> None:
    """As if it had finished; ``cancelled`` is set."""
    waits: list[int] = []
    with Deadline(0, lambda: waits.append(1)) as deadline:
        await asyncio.Event().wait()
    assert deadline.cancelled
    assert waits == [1]
    await asyncio.sleep(0)  # the task itself goes on


async def test_a_block_can_be_ended_from_outside() -> None:
    """Now, or before it was even entered."""
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
    """The deadline changes neither."""

    async def work(number: int) -> float:
        with Deadline(60):
            await asyncio.sleep(0)
            return 42 / number
        return 0

    assert await work(1) == 42
    with pytest.raises(ZeroDivisionError):
        await work(0)


async def test_a_cancellation_by_another_caller_propagates() -> None:
    """Also when it comes together with our own."""
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
