"""Resources and locks of async code that may be used by several event loops.

A connection pool belongs to the loop that opened it, so ``PerLoop`` stores one per loop. Every loop closes its
async generators before it ends. Each resource is therefore owned by such a generator: it is closed in its own
loop, under ``run_sync``, ``asyncio.run`` and servers, even if the program never closes it.
"""

import asyncio
import threading
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar
from weakref import WeakKeyDictionary

import anyio

T = TypeVar("T")
Finalizer = AsyncGenerator[None]


class AsyncResource:
    """A resource that ``async with`` closes at its end."""

    async def aclose(self) -> None:
        """Close the resource."""
        raise NotImplementedError

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    if not TYPE_CHECKING:  # a type checker reports that there is no `with`

        def __enter__(self) -> None:
            """Name the two statements that work."""
            name = type(self).__name__
            raise TypeError(
                f"use `async with {name}(…)` in async code, `with {name}(…).sync` in sync code"
            )

        def __exit__(self, *_: object) -> None:
            """Exist, so that `with` calls ``__enter__``."""


ResourceT = TypeVar("ResourceT", bound=AsyncResource)


class SharedResource(Generic[ResourceT]):
    """A resource of several users, closed by the last of them.

    Args:
        resource: The resource; the caller is its first user.
    """

    def __init__(self, resource: ResourceT) -> None:
        self.resource = resource
        self._users = 1
        self._lock = threading.Lock()

    def add_user(self) -> bool:
        """Count a further user; return False if the last one has closed the resource."""
        with self._lock:
            self._users += self._users > 0
            return self._users > 0

    async def aclose(self) -> None:
        """Close the resource, unless it has other users."""
        with self._lock:
            self._users -= 1
            is_last = not self._users
        if is_last:
            await self.resource.aclose()


class PerLoop(Generic[T]):
    """A resource per event loop, created on first use.

    Args:
        make: Creates the resource.
        close: Closes it.
    """

    def __init__(self, make: Callable[[], T], close: Callable[[T], Awaitable[None]]) -> None:
        self._make = make
        self._close = close
        self._entries: WeakKeyDictionary[asyncio.AbstractEventLoop, tuple[T, Finalizer]] = (
            WeakKeyDictionary()
        )

    def get(self) -> T:
        """Return the resource of the running loop."""
        loop = asyncio.get_running_loop()
        entry = self._entries.get(loop)
        if entry is None:
            resource = self._make()
            entry = self._entries[loop] = resource, _start_finalizer(resource, self._close)
        return entry[0]

    def get_existing(self) -> T | None:
        """Return the resource of the running loop, if there is one."""
        try:
            entry = self._entries.get(asyncio.get_running_loop())
        except RuntimeError:  # no loop is running
            return None
        return entry and entry[0]

    async def aclose(self) -> None:
        """Close the resource of the running loop, if there is one."""
        entry = self._entries.pop(asyncio.get_running_loop(), None)
        if entry is not None:
            await entry[1].aclose()

    def __del__(self) -> None:
        for loop, (_, finalizer) in list(self._entries.items()):
            with suppress(RuntimeError):  # the loop is closed, and so are its resources
                loop.call_soon_threadsafe(_schedule_close, finalizer)


_finalizers: set[Finalizer] = set()  # a loop has only weak references to its generators
_close_tasks: set[asyncio.Task[None]] = set()


def _start_finalizer(resource: T, close: Callable[[T], Awaitable[None]]) -> Finalizer:
    """Return a generator that closes the resource when the running loop closes the generator."""

    async def finalize() -> Finalizer:
        try:
            yield
        finally:
            _finalizers.discard(finalizer)
            await close(resource)

    finalizer = finalize()
    with suppress(StopIteration):
        anext(finalizer).send(None)  # run it up to its yield, which does not block
    _finalizers.add(finalizer)
    return finalizer


def _schedule_close(finalizer: Finalizer) -> None:
    # A separate task: if it is cancelled at the end of the loop before it has started, the generator is
    # still open, and the loop closes it.
    async def close() -> None:
        await asyncio.sleep(0)  # a loop that is ending starts to close its generators now
        if finalizer in _finalizers:
            await finalizer.aclose()

    task = asyncio.get_running_loop().create_task(close())
    _close_tasks.add(task)
    task.add_done_callback(_close_tasks.discard)


class SharedLock:
    """A lock for tasks on several event loops, acquired in order of arrival."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queue: deque[Future[None]] = deque()

    @asynccontextmanager
    async def acquire(self) -> AsyncGenerator[None]:
        """Wait for all tasks that came earlier, and hold the lock."""
        admitted: Future[None] = Future()
        with self._lock:
            self._queue.append(admitted)
            self._admit_first()
        try:
            if not admitted.done():
                await asyncio.shield(asyncio.wrap_future(admitted))  # only the wait is cancelled
            yield
        finally:
            with self._lock:
                self._queue.remove(admitted)
                self._admit_first()

    def _admit_first(self) -> None:
        if self._queue and not self._queue[0].done():
            self._queue[0].set_result(None)


async def run_to_end(work: Coroutine[Any, Any, T]) -> T:
    """Run work to its end, also if the caller is cancelled meanwhile.

    A cancelled write may be dropped or be under way already. After this the caller knows what is stored.
    """
    # Awaiting a future that the task sets takes fewer iterations of the event loop than `asyncio.shield`.
    outcome: asyncio.Future[T] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(_report_result(work, outcome))
    try:
        return await outcome
    except asyncio.CancelledError:
        with anyio.CancelScope(shield=True):
            await asyncio.gather(task, return_exceptions=True)
        raise


async def _report_result(work: Coroutine[Any, Any, T], outcome: asyncio.Future[T]) -> None:
    """Run work, and set its result or its error, unless the caller was cancelled."""
    try:
        result = await work
    except BaseException as error:
        if outcome.done():
            raise
        outcome.set_exception(error)
    else:
        if not outcome.done():
            outcome.set_result(result)
