"""Worker threads that run the transactions of a database for an event loop."""

import asyncio
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from contextvars import Context, copy_context
from functools import partial
from queue import SimpleQueue
from typing import Any, Self, TypeVar

from kedge.errors import StoreError

T = TypeVar("T")

_Job = Callable[[], Callable[[], object]]
"""Does the work, and returns a function that reports its result."""
_Jobs = SimpleQueue[_Job | None]


class Workers:
    """Threads that run the work of a database: at most ``limit``, started when all others are busy.

    A `ThreadPoolExecutor` is not used because its futures, locks and bookkeeping cost 30 microseconds of
    CPU for each job, as much as a small transaction. A worker notifies the event loop directly.
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
        waiter: _WorkResult[T] = _WorkResult()

        def job() -> Callable[[], object]:
            try:
                if waiter.cancelled():
                    return _do_nothing
                return partial(waiter.report, waiter.set_result, runner(work))
            except BaseException as error:  # noqa: BLE001 - the caller raises it
                return partial(waiter.report, waiter.set_exception, error)

        self._submit(job)
        return await waiter

    def run_sync(self, runner: Callable[[Any], T], work: object) -> T:
        """Run work in a thread, and wait for it."""
        future: Future[T] = Future()

        def job() -> Callable[[], object]:
            try:
                return partial(future.set_result, runner(work))
            except BaseException as error:  # noqa: BLE001 - the caller raises it
                return partial(future.set_exception, error)

        self._submit(job)
        return future.result()

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
        report = job()
        # The caller may submit the next job as soon as it has the result, and this thread shall run it.
        with lock:
            idle[0] += 1
        report()
        del job, report  # otherwise the result would stay in memory until the next job


def _stop_threads(jobs: _Jobs, threads: list[threading.Thread]) -> None:
    for _ in threads:
        jobs.put(None)
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join()


def _do_nothing() -> None:
    pass


class _WorkResult(asyncio.Future[T]):
    """The result of work in a thread, which one task awaits.

    A plain future resumes its task in the next iteration of the event loop, and an iteration costs about as much as
    the thread's notification. This one resumes it in the same iteration.
    """

    _resume: tuple[Callable[[Self], object], Context]

    def add_done_callback(
        self, fn: Callable[[Self], object], /, *, context: Context | None = None
    ) -> None:
        """Set the function that resumes the task."""
        self._resume = fn, context or copy_context()

    def cancel(self, msg: Any | None = None) -> bool:
        """Resume the task with the error; the result will be ignored."""
        is_cancelled = super().cancel(msg)
        if is_cancelled:
            function, context = self._resume
            self.get_loop().call_soon(function, self, context=context)
        return is_cancelled

    def report(self, set_result: Callable[[Any], None], result: object) -> None:
        """Set the result in the event loop, and resume the task; called in another thread."""
        with suppress(RuntimeError):  # the loop was closed
            self.get_loop().call_soon_threadsafe(self._finish, set_result, result)

    def _finish(self, set_result: Callable[[Any], None], result: object) -> None:
        if not self.done():
            set_result(result)
            function, context = self._resume
            context.run(function, self)


def closed_error() -> StoreError:
    """Return the error for work that is submitted after the threads were stopped."""
    return StoreError("the store is closed; open it again")
