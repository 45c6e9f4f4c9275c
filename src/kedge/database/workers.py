"""Worker threads that run the transactions of a database for an event loop."""

import asyncio
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, TypeVar

from kedge.errors import StoreError

T = TypeVar("T")

_AnyFuture = asyncio.Future[Any] | Future[Any]
_Report = Callable[[_AnyFuture, Any], None]
"""Sets the result or the error of a future."""
_Job = tuple[Callable[[Any], Any], object, _AnyFuture]
"""A function, its argument, and the future that gets the result."""
_Jobs = SimpleQueue[_Job | None]


class Workers:
    """Threads that run the work of a database: at most ``limit``, started when all others are busy.

    A `ThreadPoolExecutor` is not used because its futures, locks and bookkeeping cost 30 microseconds of
    CPU for each job, as much as a small transaction.
    """

    def __init__(self, limit: int, name: str) -> None:
        self._limit = limit
        self._name = name
        self._jobs: _Jobs = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._idle = [0]
        self._lock = threading.Lock()
        self._is_closed = False
        # Also at the end of the program, and when the store is garbage-collected without being closed.
        self._stop = weakref.finalize(self, _stop_threads, self._jobs, self._threads)

    async def run(self, runner: Callable[[Any], T], work: object) -> T:
        """Run work in a thread, unless the caller is cancelled before it starts."""
        waiter: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._submit((runner, work, waiter))
        return await waiter

    def run_sync(self, runner: Callable[[Any], T], work: object) -> T:
        """Run work in a thread, and wait for it."""
        waiter: Future[T] = Future()
        self._submit((runner, work, waiter))
        return waiter.result()

    def close(self) -> None:
        """Finish the work that was submitted, and stop the threads."""
        with self._lock:
            self._is_closed = True
        self._stop()

    def _submit(self, job: _Job) -> None:
        with self._lock:
            if self._is_closed:
                raise closed_error()
            self._jobs.put(job)
            if self._idle[0]:
                self._idle[0] -= 1
            elif len(self._threads) < self._limit:
                name = f"{self._name}_{len(self._threads)}"
                arguments = (self._jobs, self._idle, self._lock)
                thread = threading.Thread(target=_run_jobs, name=name, args=arguments, daemon=True)
                self._threads.append(thread)
                thread.start()


def _run_jobs(jobs: _Jobs, idle: list[int], lock: threading.Lock) -> None:
    """Run jobs until one is None; the thread has no reference to its `Workers`."""
    while (job := jobs.get()) is not None:
        runner, work, waiter = job
        report, result = _set_result, None
        try:
            if not waiter.cancelled():
                result = runner(work)
        except BaseException as error:  # noqa: BLE001 - the caller raises it
            report, result = _set_error, error
        # The caller may submit the next job as soon as it has the result, and this thread shall run it.
        with lock:
            idle[0] += 1
        _deliver(waiter, report, result)
        del job, runner, work, waiter, result  # or they would stay until the next job


def _stop_threads(jobs: _Jobs, threads: list[threading.Thread]) -> None:
    for _ in threads:
        jobs.put(None)
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join()


def _deliver(waiter: _AnyFuture, report: _Report, result: Any) -> None:
    """Set the result of a future in the thread where it is awaited."""
    if isinstance(waiter, Future):
        report(waiter, result)
        return
    with suppress(RuntimeError):  # the event loop was closed
        waiter.get_loop().call_soon_threadsafe(report, waiter, result)


def _set_result(waiter: _AnyFuture, result: Any) -> None:
    if not waiter.done():
        waiter.set_result(result)


def _set_error(waiter: _AnyFuture, error: Any) -> None:
    if not waiter.done():
        waiter.set_exception(error)


def closed_error() -> StoreError:
    """Return the error for work that is submitted after the threads were stopped."""
    return StoreError("the store is closed; open it again")
