"""A deadline ends a coroutine that waits too long, and reports when waiting begins."""

import asyncio
import weakref

import pytest

from kedge.server.response_run import Deadline


async def return_at_once() -> int:
    """Return a number without waiting."""
    return 42


async def wait_forever() -> int:
    """Wait until the task is cancelled."""
    await asyncio.Event().wait()
    return 42


async def test_coroutine_that_does_not_wait_is_not_cancelled() -> None:
    """For a coroutine that does not wait, ``on_wait`` is not called and the deadline does not apply."""
    waits: list[int] = []
    deadline = Deadline(0)
    assert await deadline.run(return_at_once(), lambda: waits.append(1)) == 42
    await asyncio.sleep(0)
    assert not deadline.cancelled
    assert waits == []


async def test_a_coroutine_that_waits_too_long_is_ended() -> None:
    """A coroutine that waits too long ends without an error, and ``cancelled`` is set."""
    waits: list[int] = []
    deadline = Deadline(0)
    assert await deadline.run(wait_forever(), lambda: waits.append(1)) is None
    assert deadline.cancelled
    assert waits == [1]
    await asyncio.sleep(0)  # the task itself continues


async def test_coroutine_can_be_cancelled_explicitly() -> None:
    """A coroutine can be cancelled while it waits, or before it is run; one that does not wait ends."""
    deadline = Deadline(60)
    asyncio.get_running_loop().call_soon(deadline.cancel)
    assert await deadline.run(wait_forever()) is None
    assert deadline.cancelled
    for work, result in ((wait_forever, None), (return_at_once, 42)):
        early = Deadline(60)
        early.cancel()
        assert await early.run(work()) == result
        assert early.cancelled
        await asyncio.sleep(0)  # the task itself continues


async def test_errors_and_results_pass_through() -> None:
    """A deadline changes neither results nor exceptions."""

    async def work(number: int, turns: int) -> float:
        for _ in range(turns):
            await asyncio.sleep(0)
        return 42 / number

    for turns in range(3):
        assert await Deadline(60).run(work(1, turns)) == 42
        with pytest.raises(ZeroDivisionError):
            await Deadline(60).run(work(0, turns))


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
    assert await Deadline(60).run(work()) == ["first", "second", "third"]


async def test_a_cancellation_by_another_caller_propagates() -> None:
    """Cancellation of the task propagates, also together with the deadline's own."""
    for both in (False, True):
        deadline = Deadline(60)
        task = asyncio.create_task(deadline.run(wait_forever()))
        await asyncio.sleep(0)
        if both:
            deadline.cancel()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_an_object_with_a_deadline_is_freed_without_a_collection() -> None:
    """A deadline does not refer to the object that it called back."""

    class Owner:
        def __init__(self) -> None:
            self.deadline = Deadline(60)

        def handle_wait(self) -> None: ...

    for work in (return_at_once(), asyncio.sleep(0)):
        owner = Owner()
        await owner.deadline.run(work, owner.handle_wait)
        freed = weakref.ref(owner)
        del owner
        assert freed() is None
