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


async def test_a_coroutine_that_waits_too_long_or_is_stopped_ends() -> None:
    """It ends without an error, and a wait is reported once; a coroutine that does not wait is not ended."""
    for work, result, waits in ((return_at_once, 42, []), (wait_forever, None, [1])):
        run = LimitedRun()
        assert await run._limit(work(), 0) == result
        assert run.waits == waits
        early = LimitedRun()
        early.stop("failed")
        assert await early._limit(work(), 60) == result
        await asyncio.sleep(0)  # the task itself continues
    run = LimitedRun()
    asyncio.get_running_loop().call_soon(run.stop, "cancelled")
    assert await run._limit(wait_forever(), 60) is None


async def test_errors_and_results_pass_through() -> None:
    """A limit changes neither results nor exceptions, which a coroutine can handle where it waits."""
    loop = asyncio.get_running_loop()
    futures = [loop.create_future() for _ in range(3)]

    async def work(failure: BaseException | None) -> list[str]:
        results: list[str] = []
        for future in futures:
            try:
                results.append(await future)
            except ValueError as error:
                results.append(str(error))
        if failure is not None:
            raise failure
        return results

    loop.call_soon(futures[0].set_exception, ValueError("first"))
    loop.call_soon(futures[1].set_result, "second")
    loop.call_soon(futures[2].set_exception, ValueError("third"))
    assert await LimitedRun()._limit(work(None), 60) == ["first", "second", "third"]
    for failure in (ZeroDivisionError(), TimeoutError()):  # not that of the generation
        with pytest.raises(type(failure)):
            await LimitedRun()._limit(work(failure), 60)


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
