"""Event loops: one way from sync code into async code, and things that live as long as a loop.

A connection pool belongs to the loop that opened it. ``PerLoop`` keeps one for each loop, and
``run_sync`` closes those of its own loop before the loop ends, so an engine can be used from scripts
and servers alike.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary, WeakSet

import anyio

from kedge.errors import KedgeError

T = TypeVar("T")


class PerLoop(Generic[T]):
    """A thing for each event loop, made when it is first asked for."""

    def __init__(self, make: Callable[[], T], close: Callable[[T], Awaitable[None]]) -> None:
        self._make = make
        self._close = close
        self._things: WeakKeyDictionary[asyncio.AbstractEventLoop, T] = WeakKeyDictionary()
        _all.add(self)

    def get(self) -> T:
        """The thing of the running loop."""
        loop = asyncio.get_running_loop()
        thing = self._things.get(loop)
        if thing is None:
            thing = self._things[loop] = self._make()
        return thing

    async def aclose(self) -> None:
        """Close the thing of the running loop, if there is one."""
        thing = self._things.pop(asyncio.get_running_loop(), None)
        if thing is not None:
            await self._close(thing)


_all: "WeakSet[PerLoop[Any]]" = WeakSet()


def run_sync(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end from sync code: ``run_sync(engine.run(turn))``."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return anyio.run(_to_the_end, work)
    work.close()
    raise KedgeError("run_sync was called inside a running event loop; use await there instead")


async def _to_the_end(work: Coroutine[Any, Any, T]) -> T:
    try:
        return await work
    finally:
        with anyio.CancelScope(shield=True):
            for each in list(_all):
                await each.aclose()
