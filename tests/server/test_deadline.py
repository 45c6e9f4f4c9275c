"""A generation ends a coroutine that waits too long, and reports when waiting begins."""

import asyncio
import weakref
from typing import Any, cast

import pytest

from kedge.server.response_run import Generation


class LimitedRun(Generation):
    """A generation without an answer, which records when it waits."""

    _start = _render = _finish = serialize = cast("Any", Generation.end)

    def __init__(self) -> None:
        self.waits: list[int] = []
        self._stop_status = None
        self._timeout = None

    def _handle_wait(self) -> None:
        self.waits.append(1)


async def return_at_once() -> int:
    """Return a number without waiting."""
    return 42


async def wait_forever() -> int:
    """Wait until the task is cancelled."""
    await asyncio.Event().wait()
    return 42


async def test_coroutine_that_does_not_wait_is_not_cancelled() -> None:
    """A coroutine that does not wait is not ended, and no wait is reported."""
    run = LimitedRun()
    assert await run._limit(return_at_once(), 0) == 42
    await asyncio.sleep(0)
    assert run.waits == []


async def test_a_coroutine_that_waits_too_long_is_ended() -> None:
    """A coroutine that waits too long ends without an error, and the wait is reported once."""
    run = LimitedRun()
    assert await run._limit(wait_forever(), 0) is None
    assert run.waits == [1]
    await asyncio.sleep(0)  # the task itself continues


async def test_coroutine_can_be_stopped_explicitly() -> None:
    """A coroutine can be stopped while it waits, or before it is run; one that does not wait ends."""
    run = LimitedRun()
    asyncio.get_running_loop().call_soon(run.stop, "cancelled")
    assert await run._limit(wait_forever(), 60) is None
    for work, result in ((wait_forever, None), (return_at_once, 42)):
        early = LimitedRun()
        early.stop("failed")
        assert await early._limit(work(), 60) == result
        await asyncio.sleep(0)  # the task itself continues


async def test_a_timeout_of_the_coroutine_itself_is_an_error() -> None:
    """Only the time of the generation ends it without an error, not a TimeoutError of its model."""

    async def raise_timeout() -> None:
        raise TimeoutError

    with pytest.raises(TimeoutError):
        await LimitedRun()._limit(raise_timeout(), 60)


async def test_errors_and_results_pass_through() -> None:
    """A limit changes neither results nor exceptions."""

    async def work(number: int, turns: int) -> float:
        for _ in range(turns):
            await asyncio.sleep(0)
        return 42 / number

    for turns in range(3):
        assert await LimitedRun()._limit(work(1, turns), 60) == 42
        with pytest.raises(ZeroDivisionError):
            await LimitedRun()._limit(work(0, turns), 60)


async def test_a_coroutine_can_handle_errors_of_what_it_waits_for() -> None:
    """An error of a future is raised where the coroutine waits for it, and it can continue."""
    loop = asyncio.get_running_loop()
    futures = [loop.create_future() for _ in range(3)]

    async def work() -> list[str]:
        results: list[str] = []
        for future in futures:
            try:
                results.append(await future)
            except ValueError as error:
                results.append(str(error))
        return results

    loop.call_soon(futures[0].set_exception, ValueError("first"))
    loop.call_soon(futures[1].set_result, "second")
    loop.call_soon(futures[2].set_exception, ValueError("third"))
    assert await LimitedRun()._limit(work(), 60) == ["first", "second", "third"]


async def test_a_cancellation_by_another_caller_propagates() -> None:
    """Cancellation of the task propagates, also together with that of the generation."""
    for both in (False, True):
        run = LimitedRun()
        task = asyncio.create_task(run._limit(wait_forever(), 60))
        await asyncio.sleep(0)
        if both:
            run.stop("cancelled")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_a_generation_is_freed_without_a_collection() -> None:
    """Nothing refers to a generation after its coroutine has ended."""
    for work in (return_at_once(), asyncio.sleep(0)):
        run = LimitedRun()
        await run._limit(work, 60)
        freed = weakref.ref(run)
        del run
        assert freed() is None
