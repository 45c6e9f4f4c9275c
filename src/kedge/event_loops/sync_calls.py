"""Call async code from sync code: one background loop per process, so that sync calls reuse connections.

A facade lists the methods of a class; each has the signature and the docstring of its async method:

    class SyncEngine(SyncFacade["Engine"]):
        run = wrap_method(Engine.run)
"""

import asyncio
import atexit
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from functools import wraps
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar, cast

from kedge.errors import KedgeError
from kedge.event_loops.per_loop import ResourceT

P = ParamSpec("P")
T = TypeVar("T")
V = TypeVar("V")
FacadeT = TypeVar("FacadeT", bound="SyncFacade[Any]")


class BackgroundLoop:
    """An event loop in a separate thread, started on first use, for calls from sync code."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = Future()

    def get(self) -> asyncio.AbstractEventLoop:
        """Return the running loop.

        Raises:
            KedgeError: If this is called on that loop, which would wait for itself.
        """
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="kedge-sync", daemon=True)
                self._thread.start()
        if self._thread is threading.current_thread():
            raise KedgeError(
                "a sync call was made by async code that runs inside of a sync call; use await"
            )
        return self._started.result()[0]

    def stop(self) -> None:
        """Stop the loop, which closes its connections first."""
        if self._thread is not None:
            loop, stopped = self._started.result()
            loop.call_soon_threadsafe(stopped.set)
            self._thread.join(MAX_STOP_SECONDS)

    def _run(self) -> None:
        async def serve() -> None:
            stopped = asyncio.Event()
            self._started.set_result((asyncio.get_running_loop(), stopped))
            await stopped.wait()

        run_in_thread(serve())


def run_in_thread(work: Coroutine[Any, Any, object]) -> None:
    """Run a coroutine on a new event loop of this thread, as ``asyncio.run``; also after the main thread has ended.

    ``asyncio.run`` starts a thread to end a loop that has used the thread pool, as for the lookup of a host name.
    Since Python 3.12 that fails at the end of a program. Closing the loop ends the pool as well.

    Args:
        work: The coroutine. What it leaves behind, tasks and generators, is ended.
    """

    async def run() -> None:
        try:
            await work
        finally:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await loop.shutdown_asyncgens()

    loop = asyncio.new_event_loop()
    try:
        loop.run_until_complete(run())
    finally:
        loop.close()


MAX_STOP_SECONDS = 5.0
"""The maximum time that the end of a program waits for connections to close."""
MAX_BLOCK_SECONDS = 1.0
"""The maximum time of one wait of a thread, because a signal that arrives just before a wait does not end it."""
_background = BackgroundLoop()


def _forget_parent_loop() -> None:
    """Start with a new loop in a forked process, in which the thread of the old one does not exist."""
    global _background  # noqa: PLW0603 - one per process
    _background = BackgroundLoop()


os.register_at_fork(after_in_child=_forget_parent_loop)
atexit.register(lambda: _background.stop())  # noqa: PLW0108 - _background is replaced in a forked process


class SyncCall(Generic[T]):
    """A coroutine that runs on the background loop, with the context variables of the caller.

    Args:
        work: The coroutine.
    """

    def __init__(self, work: Coroutine[Any, Any, T]) -> None:
        self._result: Future[T] = Future()
        self._work = work
        self._task: asyncio.Task[None] | None = None
        try:
            self.loop = _background.get()
        except BaseException:
            work.close()
            raise

    @property
    def done(self) -> bool:
        """Whether the coroutine has ended."""
        return self._result.done()

    def start(self) -> Self:
        """Schedule the coroutine on the loop and return this call."""
        self.loop.call_soon_threadsafe(self._create_task)  # copies the context of this thread
        return self

    def run(self) -> T:
        """Start the coroutine and return its result, or raise its error."""
        try:
            return self.start().wait()
        except BaseException:
            self.end()  # an interrupt can also come between the start and the wait
            raise

    def wait(self) -> T:
        """Return the result of the coroutine, or raise its error."""
        return self.wait_for(self._result)

    def wait_for(self, future: "Future[V]") -> V:
        """Return the result of a future that the coroutine sets.

        An exception that ends the waiting itself, such as ``KeyboardInterrupt``, cancels the coroutine and
        is raised once that has ended.
        """
        try:
            while not future.done():
                with suppress(
                    TimeoutError
                ):  # if it is an error of the coroutine, it is raised below
                    return future.result(MAX_BLOCK_SECONDS)
            return future.result()
        except BaseException:
            if not future.done():
                self.end()
            raise

    def cancel(self) -> None:
        """Cancel the coroutine; call this on the loop."""
        if self._task is None:
            self._finish()
        else:
            self._task.cancel()

    def end(self) -> None:
        """Cancel the coroutine and wait for its end."""
        if not self.done:
            self.loop.call_soon_threadsafe(self.cancel)
            self._result.exception()

    def _create_task(self) -> None:
        self._task = self.loop.create_task(self._run())
        self._task.add_done_callback(self._finish)

    async def _run(self) -> None:
        try:
            value = await self._work
        except BaseException as error:  # noqa: BLE001 - raised where the call was made
            self._result.set_exception(error)
        else:
            self._result.set_result(value)

    def _finish(self, _: asyncio.Task[None] | None = None) -> None:
        if not self._result.done():  # cancelled before its first step
            self._work.close()
            self._result.set_exception(asyncio.CancelledError())


async def _wait_for(work: Awaitable[T]) -> T:
    return await work


def run_sync(work: Awaitable[T]) -> T:
    """Run a coroutine, or open a store or a conversation, from sync code: ``run_sync(engine.run(turn))``.

    All calls of a process run on one event loop in a background thread, so connections are reused. Context
    variables of the caller are visible to the coroutine. Inside a running event loop the call blocks
    that loop; use ``await`` there if you can. Ctrl-C cancels the coroutine.

    Args:
        work: The coroutine.

    Returns:
        Its result.

    Raises:
        KedgeError: If it is called by async code that a sync call runs.
    """
    is_coroutine = asyncio.iscoroutine(work)
    return SyncCall(cast("Coroutine[Any, Any, T]", work) if is_coroutine else _wait_for(work)).run()


class SyncFacade(Generic[ResourceT]):
    """The sync methods of an object; ``with`` opens and closes it.

    Args:
        target: The object with the async methods.
    """

    def __init__(self, target: ResourceT) -> None:
        self._target = target

    def __enter__(self) -> Self:
        run_sync(self._target.__aenter__())
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the object."""
        run_sync(self._target.aclose())


def wrap_method(
    method: Callable[Concatenate[ResourceT, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[SyncFacade[ResourceT], P], T]:
    """Return the sync version of a coroutine method, for a facade."""

    @wraps(method)
    def call(facade: SyncFacade[ResourceT], *args: P.args, **kwargs: P.kwargs) -> T:
        return run_sync(method(facade._target, *args, **kwargs))  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]

    return call


def delegate(
    method: Callable[Concatenate[ResourceT, P], T],
) -> Callable[Concatenate[SyncFacade[ResourceT], P], T]:
    """Return a method that does no I/O, for a facade; that of a subclass if it has its own."""

    @wraps(method)
    def call(facade: SyncFacade[ResourceT], *args: P.args, **kwargs: P.kwargs) -> T:
        return getattr(facade._target, method.__name__)(*args, **kwargs)  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]

    return call


def wrap_navigation(
    method: Callable[Concatenate[Any, P], Coroutine[Any, Any, Any]],
) -> Callable[Concatenate[FacadeT, P], FacadeT]:
    """Return the sync version of a coroutine method that returns its object or another one of its class."""

    @wraps(method)
    def call(facade: FacadeT, *args: P.args, **kwargs: P.kwargs) -> FacadeT:
        return type(facade)(run_sync(method(facade._target, *args, **kwargs)))  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]

    return call
