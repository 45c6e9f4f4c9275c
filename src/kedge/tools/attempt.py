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

from kedge.tools.limits import AllStray, Place
from kedge.tools.output import output_parts
from kedge.tools.registry import AnyTool
from kedge.tools.signature import is_async
from kedge.turns import Part

Parts = tuple[Part, ...]
Arguments = dict[str, Any]

THREADS = 40
"""How many sync tools run at once in an event loop. They have threads of their own: if they shared
those of everybody, a tool that needs one of these could wait for itself."""

_threads: RunVar[CapacityLimiter | None] = RunVar("kedge_tool_threads")


class OutOfTime(TimeoutError):
    """The attempt took longer than its tool allows."""


class Stuck(Exception):
    """No place is free and none can be expected: earlier calls go on in abandoned threads."""


class CancelledItself(Exception):
    """The function was cancelled, though nobody cancelled the call."""


async def attempt(tool: AnyTool, arguments: Arguments, began: Callable[[], None]) -> Parts:
    """Run the function once; ``began`` is called when its time starts."""
    runs = _in_loop(tool, arguments) if is_async(tool.function) else _in_thread(tool, arguments)
    async with runs as run:
        began()
        with move_on_after(tool.timeout), _own_cancellation():
            return await run()
        raise OutOfTime(f"it took longer than {tool.timeout:g} s")


Run = Callable[[], Awaitable[Parts]]


@asynccontextmanager
async def _in_loop(tool: AnyTool, arguments: Arguments) -> AsyncGenerator[Run]:
    async def run() -> Parts:
        return output_parts(await tool.function(**arguments))

    async with _place(tool):
        yield run


@asynccontextmanager
async def _in_thread(tool: AnyTool, arguments: Arguments) -> AsyncGenerator[Run]:
    async with _place(tool) as place, _free_thread():
        yield ThreadRun(tool, arguments, place).run


@asynccontextmanager
async def _place(tool: AnyTool) -> AsyncGenerator[Place | None]:
    if tool.limit is None:
        yield None
        return
    try:
        async with tool.limit.gate().place() as place:
            yield place
    except AllStray:
        size = tool.limit.size
        raise Stuck(f"it is busy: {size} earlier call(s) ran out of time and still run") from None


def _free_thread() -> CapacityLimiter:
    """Wait for a thread with this, so that the clock starts when there is one."""
    limiter = _threads.get(None)
    if limiter is None:
        limiter = CapacityLimiter(THREADS)
        _threads.set(limiter)
    return limiter


class ThreadRun:
    """A function in a thread, and who holds its place when the thread is abandoned.

    The thread and the event loop each write their own flag before they read the other's, so
    whichever comes second sees the first and the place is given back exactly once.
    """

    def __init__(self, tool: AnyTool, arguments: Arguments, place: Place | None) -> None:
        self.tool = tool
        self.arguments = arguments
        self.place = place
        self.started = self.ended = self.abandoned = False

    async def run(self) -> Parts:
        """Start the thread and wait for it, or abandon it."""
        try:
            done = await to_thread.run_sync(
                self.work, abandon_on_cancel=True, limiter=CapacityLimiter(1)
            )
        except get_cancelled_exc_class():
            self.abandon()
            raise
        return output_parts(await done) if isawaitable(done) else done

    def work(self) -> Any:
        """Run the function, in the thread."""
        self.started = True
        try:
            if self.abandoned:
                return ()
            value = self.tool.function(**self.arguments)
            return value if isawaitable(value) else output_parts(value)
        finally:
            self.ended = True
            if self.place:
                self.place.give_back()

    def abandon(self) -> None:
        """Leave the thread to itself, and its place to it if it has begun."""
        self.abandoned = True
        if self.place and self.started:
            self.place.leave_to_thread()
            if self.ended:
                self.place.give_back()


@contextmanager
def _own_cancellation() -> Generator[None]:
    """Tell a cancellation that the function brought upon itself from one that is meant for us."""
    try:
        yield
    except get_cancelled_exc_class() as error:
        if current_effective_deadline() == -math.inf:
            raise
        raise CancelledItself("it was cancelled from within") from error
