"""Patience: ends what waits too long, tells when waiting begins, and costs nothing otherwise."""

import asyncio

import pytest

from kedge.server.deadline import Deadline


async def test_a_block_that_does_not_wait_is_left_alone() -> None:
    """Nobody is told, and no timer is left."""
    told: list[int] = []
    with Deadline(0, lambda: told.append(1)) as patience:
        pass
    await asyncio.sleep(0)
    assert not patience.cancelled
    assert told == []


async def test_a_block_that_waits_too_long_is_ended() -> None:
    """As if it had finished; what comes after the block can tell."""
    told: list[int] = []
    with Deadline(0, lambda: told.append(1)) as patience:
        await asyncio.Event().wait()
    assert patience.cancelled
    assert told == [1]
    await asyncio.sleep(0)  # the task itself goes on


async def test_a_block_can_be_ended_from_outside() -> None:
    """Now, or before it was even entered."""
    with Deadline(60) as patience:
        asyncio.get_running_loop().call_soon(patience.cancel)
        await asyncio.Event().wait()
    assert patience.cancelled
    early = Deadline(60)
    early.cancel()
    with early:
        await asyncio.Event().wait()
    assert early.cancelled


async def test_errors_and_results_pass_through() -> None:
    """It is not in the way."""

    async def work(number: int) -> float:
        with Deadline(60):
            await asyncio.sleep(0)
            return 42 / number
        return 0

    assert await work(1) == 42
    with pytest.raises(ZeroDivisionError):
        await work(0)


async def test_the_cancellation_of_somebody_else_goes_on() -> None:
    """Also when it comes together with our own."""
    for both in (False, True):
        patience = Deadline(60)

        async def work(held: Deadline = patience) -> None:
            with held:
                await asyncio.Event().wait()

        task = asyncio.create_task(work())
        await asyncio.sleep(0)
        if both:
            patience.cancel()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
