"""One attempt of a tool call, within the tool's concurrency limit and timeout.

Async functions run in the event loop, others in a thread. A thread cannot be stopped, only abandoned:
after a timeout or a cancellation it still counts under the tool's limit until it ends; otherwise a tool limited to
one call could run twice at once. When abandoned threads hold the whole limit, waiting calls fail with
``ConcurrencyExhausted`` instead of waiting for threads that may never end.
"""

import math
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from inspect import isawaitable
from typing import Any
from weakref import WeakKeyDictionary

from anyio import (
    CapacityLimiter,
    Event,
    Lock,
    current_effective_deadline,
    get_cancelled_exc_class,
    move_on_after,
    to_thread,
)
from anyio.lowlevel import RunVar

from kedge.tools.output import to_parts
from kedge.tools.tool import AnyTool
from kedge.turns import Part

Parts = tuple[Part, ...]
Arguments = dict[str, Any]

MAX_THREADS = 40
"""Maximum number of sync tools running at once in an event loop. They do not share anyio's default threads:
a tool that itself needs one of those could wait for itself."""


class AttemptTimeout(TimeoutError):
    """The attempt took longer than the tool's timeout."""


class SelfCancelled(Exception):
    """The function was cancelled although the call was not."""


class ConcurrencyExhausted(Exception):
    """The limit of a tool is used up by threads whose calls timed out and which have not ended."""

    def __init__(self, size: int) -> None:
        super().__init__(f"it is busy: {size} earlier call(s) timed out and are still running")


class ConcurrencyLimiter:
    """Allows at most ``size`` calls at a time, in order of arrival.

    ``abandoned`` has the threads whose calls have ended before them. A thread that ends wakes no waiting call, which
    would have to happen in the event loop: while other calls run, the next one to finish does, and when only abandoned
    threads are left, there are no waiting calls.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.running = 0
        self.abandoned: set[object] = set()
        self._arrivals = Lock()
        self._finished = Event()

    @asynccontextmanager
    async def acquire(self) -> AsyncGenerator[None]:
        """Wait until a call may run, and count it.

        Raises:
            ConcurrencyExhausted: Abandoned threads hold the whole limit.
        """
        async with self._arrivals:  # only the first one waits for a call to finish
            while self.running + len(self.abandoned) >= self.size:
                if not self.running:
                    raise ConcurrencyExhausted(self.size)
                self._finished = Event()
                await self._finished.wait()
            self.running += 1
        try:
            yield
        finally:
            self.running -= 1
            self._finished.set()


_limiters: RunVar[WeakKeyDictionary[AnyTool, ConcurrencyLimiter]] = RunVar("kedge_tool_limiters")
_thread_limiter: RunVar[CapacityLimiter] = RunVar("kedge_tool_threads")


def get_limiter(tool: AnyTool) -> ConcurrencyLimiter | None:
    """Return the limiter of a tool in the running event loop, or None if the tool has no limit."""
    if not tool.concurrency:
        return None
    limiters = _get_or_set(_limiters, WeakKeyDictionary[AnyTool, ConcurrencyLimiter])
    return limiters.setdefault(tool, ConcurrencyLimiter(tool.concurrency))


def _get_or_set(variable: RunVar[Any], create: Callable[[], Any]) -> Any:
    try:
        return variable.get()
    except LookupError:
        variable.set(create())
        return variable.get()


async def invoke_tool(tool: AnyTool, arguments: Arguments, on_start: Callable[[], None]) -> Parts:
    """Run the function once; ``on_start`` is called when its timeout starts."""
    async with AsyncExitStack() as stack:
        if limiter := get_limiter(tool):
            await stack.enter_async_context(limiter.acquire())
        if tool.is_async:
            run = partial(_run_in_loop, tool, arguments)
        else:  # the timeout starts once a thread is free
            threads = _get_or_set(_thread_limiter, partial(CapacityLimiter, MAX_THREADS))
            await stack.enter_async_context(threads)
            run = ThreadRun(tool, arguments, limiter.abandoned if limiter else set()).run
        on_start()
        with move_on_after(tool.timeout):
            try:
                return await run()
            except get_cancelled_exc_class() as error:
                if current_effective_deadline() == -math.inf:
                    raise
                raise SelfCancelled("it was cancelled from within") from error
        raise AttemptTimeout(f"it took longer than {tool.timeout:g} s")


async def _run_in_loop(tool: AnyTool, arguments: Arguments) -> Parts:
    with _replace_generator_exit():
        return to_parts(await tool.function(**arguments))


@dataclass(eq=False)
class ThreadRun:
    """A function running in a thread, which counts under the limit of its tool if it is abandoned.

    The thread and the event loop each set a flag before they read the other's flag. The second one reads
    the flag of the first, so the thread does not count after it has ended.
    """

    tool: AnyTool
    arguments: Arguments
    abandoned_threads: set[object]
    started: bool = False
    ended: bool = False
    abandoned: bool = False

    async def run(self) -> Parts:
        """Start the thread and wait for it; abandon it on cancellation."""
        try:
            done = await to_thread.run_sync(
                self.call_function, abandon_on_cancel=True, limiter=CapacityLimiter(1)
            )
        except get_cancelled_exc_class():
            self.abandon()
            raise
        return to_parts(await done) if isawaitable(done) else done

    def call_function(self) -> Any:
        """Call the function. Runs in the thread."""
        self.started = True
        try:
            if self.abandoned:
                return ()
            with _replace_generator_exit():
                value = self.tool.function(**self.arguments)
            return value if isawaitable(value) else to_parts(value)
        finally:
            self.ended = True
            self.abandoned_threads.discard(self)

    def abandon(self) -> None:
        """Abandon the thread; if it has started, it counts until it ends."""
        self.abandoned = True
        if self.started:
            self.abandoned_threads.add(self)
            if self.ended:
                self.abandoned_threads.discard(self)


@contextmanager
def _replace_generator_exit() -> Generator[None]:
    """Raise ``RuntimeError`` for ``GeneratorExit``, which would close the generators of the run's events."""
    try:
        yield
    except GeneratorExit as error:
        raise RuntimeError("the function raised GeneratorExit") from error
