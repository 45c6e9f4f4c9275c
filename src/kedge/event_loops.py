"""Call async code from sync code, and manage resources that belong to one event loop.

A connection pool belongs to the loop that opened it, so ``PerLoop`` holds one per loop. Every loop closes its async
generators before it ends. Each resource is therefore owned by such a generator: it is closed in its own loop,
by ``run_sync``, ``asyncio.run`` and servers alike, even if the program never closes it.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

import anyio

from kedge.errors import KedgeError

T = TypeVar("T")
Finalizer = AsyncGenerator[None]


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
        await finalizer.aclose()

    task = asyncio.get_running_loop().create_task(close())
    _close_tasks.add(task)
    task.add_done_callback(_close_tasks.discard)


def run_sync(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine from sync code: ``run_sync(engine.run(turn))``.

    Args:
        work: The coroutine.

    Returns:
        Its result.

    Raises:
        KedgeError: If an event loop is already running in this thread.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return anyio.run(_await, work)
    work.close()
    raise KedgeError("run_sync was called inside a running event loop; use await instead")


async def _await(work: Coroutine[Any, Any, T]) -> T:
    return await work
