"""Event loops: call async code from sync code, and manage resources that belong to one event loop.

A connection pool belongs to the loop that opened it, so ``PerLoop`` stores one per loop. Every loop closes its
async generators before it ends. Each resource is therefore owned by such a generator: it is closed in its own
loop, under ``run_sync``, ``asyncio.run`` and servers, even if the program never closes it.

Sync code calls async code on one background loop per process, so that its calls reuse connections. A facade lists the
methods of a class; each has the signature and the docstring of its async method:

    class SyncEngine(SyncFacade["Engine"]):
        run = wrap_method(Engine.run)
"""

import asyncio
import atexit
import os
import threading
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from functools import wraps
from inspect import isawaitable
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, Self, TypeVar, cast
from weakref import WeakKeyDictionary

import anyio

from kedge.errors import KedgeError

P = ParamSpec("P")
T = TypeVar("T")
V = TypeVar("V")
FacadeT = TypeVar("FacadeT", bound="SyncFacade[Any]")
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
        self._entries = WeakKeyDictionary[asyncio.AbstractEventLoop, tuple[T, Finalizer]]()

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
_tasks: set[asyncio.Task[None]] = set()  # and to its tasks


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

    _start_task(close())


def _start_task(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """Start a task of the running loop that lives until its end."""
    task = asyncio.get_running_loop().create_task(work)
    _tasks.add(task)
    task.add_done_callback(_tasks.discard)
    return task


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


async def await_value(value: T | Awaitable[T]) -> T:
    """Return the value, awaited if it is awaitable: that of a function which may be sync or async."""
    if isawaitable(value):
        return await value
    return cast("T", value)


async def run_to_end(work: Coroutine[Any, Any, T]) -> T:
    """Run work to its end, also if the caller is cancelled meanwhile.

    A cancelled write may be dropped or be under way already. After this the caller knows what is stored.
    """
    task = asyncio.create_task(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        with anyio.CancelScope(shield=True):
            await asyncio.gather(task, return_exceptions=True)
        raise


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


if hasattr(os, "register_at_fork"):  # not on Windows
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
                with suppress(TimeoutError):  # that of a coroutine is raised below
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
        self._task = _start_task(self._run())
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
    if asyncio.iscoroutine(work):
        return SyncCall(cast("Coroutine[Any, Any, T]", work)).run()
    return SyncCall(await_value(work)).run()


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
