"""Event loops: one way from sync code into async code, and things that live as long as a loop.

A connection pool belongs to the loop that opened it. ``PerLoop`` keeps one for each loop. Every loop
closes its async generators before it ends, so each thing is held by one: whatever was opened is closed
in its own loop, by ``run_sync``, ``asyncio.run`` and servers alike, also where nobody remembers to.
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
    """A thing for each event loop, made when it is first asked for."""

    def __init__(self, make: Callable[[], T], close: Callable[[T], Awaitable[None]]) -> None:
        self._make = make
        self._close = close
        self._entries: WeakKeyDictionary[asyncio.AbstractEventLoop, tuple[T, Finalizer]] = (
            WeakKeyDictionary()
        )

    def get(self) -> T:
        """The thing of the running loop."""
        loop = asyncio.get_running_loop()
        kept = self._entries.get(loop)
        if kept is None:
            thing = self._make()
            kept = self._entries[loop] = thing, _start_finalizer(thing, self._close)
        return kept[0]

    def get_existing(self) -> T | None:
        """The thing of the running loop, if there is one."""
        try:
            kept = self._entries.get(asyncio.get_running_loop())
        except RuntimeError:  # no loop runs
            return None
        return kept and kept[0]

    async def aclose(self) -> None:
        """Close the thing of the running loop, if there is one."""
        kept = self._entries.pop(asyncio.get_running_loop(), None)
        if kept is not None:
            await kept[1].aclose()

    def __del__(self) -> None:
        for loop, (_, keeper) in list(self._entries.items()):
            with suppress(RuntimeError):  # the loop is closed, and so is what it held
                loop.call_soon_threadsafe(_schedule_close, keeper)


_finalizers: set[Finalizer] = set()  # a loop holds its generators weakly
_close_tasks: set[asyncio.Task[None]] = set()


def _start_finalizer(resource: T, close: Callable[[T], Awaitable[None]]) -> Finalizer:
    """A generator that closes the thing when it is closed, known to the running loop."""

    async def keep() -> Finalizer:
        try:
            yield
        finally:
            _finalizers.discard(keeper)
            await close(resource)

    keeper = keep()
    with suppress(StopIteration):
        anext(keeper).send(None)  # the first step, up to where it waits; no need to wait for that
    _finalizers.add(keeper)
    return keeper


def _schedule_close(finalizer: Finalizer) -> None:
    # A task of our own, not the generator's: cancelled at the end of the loop before it has begun, it
    # leaves the generator for the loop to close.
    async def close() -> None:
        await finalizer.aclose()

    task = asyncio.get_running_loop().create_task(close())
    _close_tasks.add(task)
    task.add_done_callback(_close_tasks.discard)


def run_sync(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end from sync code: ``run_sync(engine.run(turn))``."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return anyio.run(_await, work)
    work.close()
    raise KedgeError("run_sync was called inside a running event loop; use await there instead")


async def _await(work: Coroutine[Any, Any, T]) -> T:
    return await work
