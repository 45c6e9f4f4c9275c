"""Worker threads that run the transactions of a database for an event loop."""

import asyncio
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from contextvars import Context
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

from kedge.errors import StoreError

T = TypeVar("T")

_CAN_WATCH_PIPES = os.name == "posix"
"""On Windows, event loops watch only sockets."""

_AnyFuture = asyncio.Future[Any] | Future[Any]
_Report = Callable[[_AnyFuture, Any], None]
"""Sets the result or the error of a future."""
_Deliver = Callable[[_Report, _AnyFuture, Any], None]
"""Calls a `_Report` in the thread where the result is awaited."""
_Job = tuple[Callable[[Any], Any], object, _AnyFuture, _Deliver]
"""A function, its argument, the future that gets the result, and how it gets it."""
_Jobs = SimpleQueue[_Job | None]


class Workers:
    """Threads that run the work of a database: at most ``limit``, started when all others are busy.

    A `ThreadPoolExecutor` is not used because its futures, locks and bookkeeping cost 30 microseconds of
    CPU for each job, as much as a small transaction. A worker reports its result by a `_ResultPipe`.
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
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[T] = loop.create_future()
        self._submit((runner, work, waiter, _find_delivery(loop)))
        return await waiter

    def run_sync(self, runner: Callable[[Any], T], work: object) -> T:
        """Run work in a thread, and wait for it."""
        waiter: Future[T] = Future()
        self._submit((runner, work, waiter, _deliver_here))
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
        runner, work, waiter, deliver = job
        report, result = _set_result, None
        try:
            if not waiter.cancelled():
                result = runner(work)
        except BaseException as error:  # noqa: BLE001 - the caller raises it
            report, result = _set_error, error
        # The caller may submit the next job as soon as it has the result, and this thread shall run it.
        with lock:
            idle[0] += 1
        deliver(report, waiter, result)
        del job, runner, work, waiter, deliver, result  # or they would stay until the next job


def _stop_threads(jobs: _Jobs, threads: list[threading.Thread]) -> None:
    for _ in threads:
        jobs.put(None)
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join()


class _ResultPipe:
    """Passes results to the futures of an event loop, which a byte in a pipe wakes up.

    ``call_soon_threadsafe`` does the same with a pair of sockets and more calls, and costs 20 microseconds of CPU more.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, ends: tuple[int, int]) -> None:
        self._results: deque[tuple[_Report, _AnyFuture, Any]] = deque()
        self._read_end, self._write_end = ends
        os.set_blocking(self._read_end, False)
        os.set_blocking(self._write_end, False)
        # The event loop keeps this object until it is closed, but not the context variables of the present task.
        Context().run(loop.add_reader, self._read_end, self._set_results)

    def __del__(self) -> None:
        os.close(self._read_end)
        os.close(self._write_end)

    def deliver(self, report: _Report, waiter: _AnyFuture, result: Any) -> None:
        """Set a result in the thread of the event loop."""
        self._results.append((report, waiter, result))
        try:  # noqa: SIM105 - the calls of `suppress` would cost as much as the write
            os.write(self._write_end, b"\0")
        except BlockingIOError:
            pass  # the pipe is full, so the event loop will wake up anyway

    def _set_results(self) -> None:
        os.read(self._read_end, 4096)
        while self._results:
            report, waiter, result = self._results.popleft()
            report(waiter, result)


_pipes: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _ResultPipe] = (
    weakref.WeakKeyDictionary()
)


def _find_delivery(loop: asyncio.AbstractEventLoop) -> _Deliver:
    """Return the function that passes results to the futures of an event loop."""
    if not _CAN_WATCH_PIPES:
        return partial(_deliver_soon, loop)
    pipe = _pipes.get(loop)
    if pipe is None:
        try:
            ends = os.pipe()
        except OSError:  # too many open files
            return partial(_deliver_soon, loop)
        pipe = _pipes[loop] = _ResultPipe(loop, ends)
    return pipe.deliver


def _deliver_soon(
    loop: asyncio.AbstractEventLoop, report: _Report, waiter: _AnyFuture, result: Any
) -> None:
    with suppress(RuntimeError):  # the loop was closed
        loop.call_soon_threadsafe(report, waiter, result)


def _deliver_here(report: _Report, waiter: _AnyFuture, result: Any) -> None:
    report(waiter, result)


def _set_result(waiter: _AnyFuture, result: Any) -> None:
    if not waiter.done():
        waiter.set_result(result)


def _set_error(waiter: _AnyFuture, error: Any) -> None:
    if not waiter.done():
        waiter.set_exception(error)


def closed_error() -> StoreError:
    """Return the error for work that is submitted after the threads were stopped."""
    return StoreError("the store is closed; open it again")
