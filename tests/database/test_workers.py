"""Worker threads run work in order, report its result, and stop when they are closed."""

import asyncio
import threading
from collections.abc import Iterator
from contextvars import ContextVar

import pytest

from kedge.database.transactions import Workers
from kedge.errors import StoreError


@pytest.fixture
def workers() -> Iterator[Workers]:
    """At most eight threads."""
    workers = Workers(8, "test-worker")
    yield workers
    workers.close()


def name_thread(_: object) -> str:
    """Return the name of the thread that runs this."""
    return threading.current_thread().name


async def test_sequential_work_needs_one_thread(workers: Workers) -> None:
    """A thread is free again before its caller has the result, so no other one is started."""
    names = {await workers.run(name_thread, None) for _ in range(200)}
    assert names == {"test-worker_0"}


async def test_concurrent_work_runs_in_several_threads(workers: Workers) -> None:
    """Work that arrives while all threads are busy starts another one."""
    barrier = threading.Barrier(3)
    places = await asyncio.gather(*(workers.run(lambda _: barrier.wait(10), n) for n in range(3)))
    assert sorted(places) == [0, 1, 2]


async def test_error_of_the_work_is_raised(workers: Workers) -> None:
    """The caller gets the error, and the thread runs further work."""
    with pytest.raises(ZeroDivisionError):
        await workers.run(lambda number: 1 // number, 0)
    assert await workers.run(lambda number: 1 // number, 1) == 1


async def test_cancelled_caller_does_not_wait(workers: Workers) -> None:
    """A caller that is cancelled while its work runs is resumed at once, and the result is ignored."""
    started, release = threading.Event(), threading.Event()

    def work(_: object) -> bool:
        started.set()
        return release.wait(10)

    task = asyncio.create_task(workers.run(work, None))
    await asyncio.to_thread(started.wait, 10)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    release.set()
    assert (await workers.run(name_thread, None)).startswith("test-worker_")


async def test_task_that_was_cancelled_before_is_cancelled(workers: Workers) -> None:
    """A cancellation that is pending when the work is submitted reaches the caller."""

    async def cancel_and_run() -> None:
        task = asyncio.current_task()
        assert task
        task.cancel()
        await workers.run(name_thread, None)

    with pytest.raises(asyncio.CancelledError):
        await asyncio.create_task(cancel_and_run())


async def test_timeout_of_the_caller(workers: Workers) -> None:
    """A timeout ends the wait, and its error is that of the timeout."""
    release = threading.Event()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await workers.run(lambda _: release.wait(10), None)
    release.set()


async def test_context_of_the_caller_is_kept(workers: Workers) -> None:
    """After the work, the task has the context variables that it had before, and can change them."""
    variable = ContextVar("variable", default="")
    variable.set("before")
    await workers.run(name_thread, None)
    assert variable.get() == "before"
    variable.set("after")
    await workers.run(name_thread, None)
    assert variable.get() == "after"


def test_event_loops_one_after_another(workers: Workers) -> None:
    """Each event loop gets its own results."""

    async def use_workers() -> list[int]:
        return await asyncio.gather(*(workers.run(abs, -number) for number in range(20)))

    for _ in range(5):
        assert asyncio.run(use_workers()) == [*range(20)]


def test_result_for_a_closed_event_loop(workers: Workers) -> None:
    """A result that arrives after its event loop was closed is dropped, and the thread runs further work."""
    started, release = threading.Event(), threading.Event()

    def work(_: object) -> bool:
        started.set()
        return release.wait(10)

    loop = asyncio.new_event_loop()
    task = loop.create_task(workers.run(work, None))
    loop.run_until_complete(asyncio.sleep(0))
    assert started.wait(10)
    task.cancel()
    loop.run_until_complete(asyncio.gather(task, return_exceptions=True))
    loop.close()
    release.set()
    assert workers.run_sync(name_thread, None).startswith("test-worker_")


async def test_cancelled_work_is_not_started() -> None:
    """Work that waits for a thread is dropped when its caller is cancelled."""
    alone, ran, release = Workers(1, "test-worker"), list[str](), threading.Event()
    first = asyncio.create_task(alone.run(lambda _: release.wait(10), None))
    second = asyncio.create_task(alone.run(ran.append, "second"))
    await asyncio.sleep(0)
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)
    release.set()
    await first
    alone.close()
    assert ran == []


def test_closed_workers_reject_work() -> None:
    """Work that is submitted after the end raises an error of the store."""
    workers = Workers(1, "test-worker")
    assert workers.run_sync(name_thread, None) == "test-worker_0"
    workers.close()
    with pytest.raises(StoreError, match="closed"):
        workers.run_sync(name_thread, None)
