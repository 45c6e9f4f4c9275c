"""Worker threads run work in order, report its result, and stop when they are closed."""

import asyncio
import threading
from collections.abc import Iterator
from contextvars import ContextVar

import pytest

from kedge.errors import StoreError
from kedge.store.database.transactions import Workers


@pytest.fixture
def workers() -> Iterator[Workers]:
    """At most eight threads."""
    workers = Workers(8, "test-worker")
    yield workers
    workers.close()


def name_thread(_: object) -> str:
    """Return the name of the thread that runs this."""
    return threading.current_thread().name


async def test_threads_are_limited(workers: Workers) -> None:
    """Any amount of work runs in eight threads with the name of the workers."""
    names = await asyncio.gather(*(workers.run(name_thread, None) for _ in range(200)))
    assert set(names) <= {f"test-worker_{number}" for number in range(8)}


async def test_task_that_was_cancelled_before_is_cancelled(workers: Workers) -> None:
    """A cancellation that is pending when the work is submitted reaches the caller."""

    async def cancel_and_run() -> None:
        task = asyncio.current_task()
        assert task
        task.cancel()
        await workers.run(name_thread, None)

    with pytest.raises(asyncio.CancelledError):
        await asyncio.create_task(cancel_and_run())


async def test_context_of_the_caller_is_kept(workers: Workers) -> None:
    """After the work, the task has the context variables that it had before, and can change them."""
    variable = ContextVar("variable", default="")
    variable.set("before")
    await workers.run(name_thread, None)
    assert variable.get() == "before"
    variable.set("after")
    await workers.run(name_thread, None)
    assert variable.get() == "after"


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


def test_closed_workers_reject_work() -> None:
    """Work that is submitted after the end raises an error of the store."""
    workers = Workers(1, "test-worker")
    assert workers.run_sync(name_thread, None) == "test-worker_0"
    workers.close()
    with pytest.raises(StoreError, match="closed"):
        workers.run_sync(name_thread, None)
