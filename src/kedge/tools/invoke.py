"""One attempt at a call: the function runs, within the tool's limit and its time.

Async functions run in the event loop, others in a thread. A thread cannot be stopped, only abandoned:
when time runs out or the caller is cancelled, the thread is left to itself and keeps its place under
the tool's limit until it ends.
"""

import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import asynccontextmanager, contextmanager
from inspect import isawaitable
from typing import Any

from anyio import (
    CapacityLimiter,
    current_effective_deadline,
    get_cancelled_exc_class,
    move_on_after,
    to_thread,
)
from anyio.lowlevel import RunVar

from kedge.tools.concurrency import AllPermitsAbandoned, Permit
from kedge.tools.output import to_parts
from kedge.tools.registry import AnyTool
from kedge.tools.signature import is_async
from kedge.turns import Part

Parts = tuple[Part, ...]
Arguments = dict[str, Any]

MAX_THREADS = 40
"""How many sync tools run at once in an event loop. They have threads of their own: if they shared
those of everybody, a tool that needs one of these could wait for itself."""

_thread_limiter: RunVar[CapacityLimiter | None] = RunVar("kedge_tool_threads")


class AttemptTimeout(TimeoutError):
    """The attempt took longer than its tool allows."""


class ConcurrencyExhausted(Exception):
    """No place is free and none can be expected: earlier calls go on in abandoned threads."""


class SelfCancelled(Exception):
    """The function was cancelled, though nobody cancelled the call."""


async def invoke_tool(tool: AnyTool, arguments: Arguments, on_start: Callable[[], None]) -> Parts:
    """Run the function once; ``began`` is called when its time starts."""
    runs = (
        _loop_runner(tool, arguments)
        if is_async(tool.function)
        else _thread_runner(tool, arguments)
    )
    async with runs as run:
        on_start()
        with move_on_after(tool.timeout), _detect_self_cancellation():
            return await run()
        raise AttemptTimeout(f"it took longer than {tool.timeout:g} s")


RunFunction = Callable[[], Awaitable[Parts]]


@asynccontextmanager
async def _loop_runner(tool: AnyTool, arguments: Arguments) -> AsyncGenerator[RunFunction]:
    async def run() -> Parts:
        return to_parts(await tool.function(**arguments))

    async with _acquire_permit(tool):
        yield run


@asynccontextmanager
async def _thread_runner(tool: AnyTool, arguments: Arguments) -> AsyncGenerator[RunFunction]:
    async with _acquire_permit(tool) as place, _get_thread_limiter():
        yield ThreadRun(tool, arguments, place).run


@asynccontextmanager
async def _acquire_permit(tool: AnyTool) -> AsyncGenerator[Permit | None]:
    if tool.limit is None:
        yield None
        return
    try:
        async with tool.limit.current_limiter().acquire() as place:
            yield place
    except AllPermitsAbandoned:
        size = tool.limit.size
        raise ConcurrencyExhausted(
            f"it is busy: {size} earlier call(s) ran out of time and still run"
        ) from None


def _get_thread_limiter() -> CapacityLimiter:
    """Wait for a thread with this, so that the clock starts when there is one."""
    limiter = _thread_limiter.get(None)
    if limiter is None:
        limiter = CapacityLimiter(MAX_THREADS)
        _thread_limiter.set(limiter)
    return limiter


class ThreadRun:
    """A function in a thread, and who holds its place when the thread is abandoned.

    The thread and the event loop each write their own flag before they read the other's, so
    whichever comes second sees the first and the place is given back exactly once.
    """

    def __init__(self, tool: AnyTool, arguments: Arguments, permit: Permit | None) -> None:
        self.tool = tool
        self.arguments = arguments
        self.permit = permit
        self.started = self.ended = self.abandoned = False

    async def run(self) -> Parts:
        """Start the thread and wait for it, or abandon it."""
        try:
            done = await to_thread.run_sync(
                self.call_function, abandon_on_cancel=True, limiter=CapacityLimiter(1)
            )
        except get_cancelled_exc_class():
            self.abandon()
            raise
        return to_parts(await done) if isawaitable(done) else done

    def call_function(self) -> Any:
        """Run the function, in the thread."""
        self.started = True
        try:
            if self.abandoned:
                return ()
            value = self.tool.function(**self.arguments)
            return value if isawaitable(value) else to_parts(value)
        finally:
            self.ended = True
            if self.permit:
                self.permit.release()

    def abandon(self) -> None:
        """Leave the thread to itself, and its place to it if it has begun."""
        self.abandoned = True
        if self.permit and self.started:
            self.permit.transfer_to_thread()
            if self.ended:
                self.permit.release()


@contextmanager
def _detect_self_cancellation() -> Generator[None]:
    """Tell a cancellation that the function brought upon itself from one that is meant for us."""
    try:
        yield
    except get_cancelled_exc_class() as error:
        if current_effective_deadline() == -math.inf:
            raise
        raise SelfCancelled("it was cancelled from within") from error
