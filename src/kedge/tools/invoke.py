"""One attempt of a tool call, within the tool's concurrency limit and timeout.

Async functions run in the event loop, others in a thread. A thread cannot be stopped, only abandoned:
after a timeout or a cancellation it retains its permit under the tool's limit until it ends.
"""

import math
from collections.abc import Callable, Generator
from contextlib import AsyncExitStack, contextmanager
from functools import partial
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

from kedge.tools.concurrency import ConcurrencyPermit
from kedge.tools.output import to_parts
from kedge.tools.registry import AnyTool
from kedge.tools.signature import is_async
from kedge.turns import Part

Parts = tuple[Part, ...]
Arguments = dict[str, Any]

MAX_THREADS = 40
"""Maximum number of sync tools running at once in an event loop. They do not share anyio's default threads:
a tool that itself needs one of those could wait for itself."""

_thread_limiter: RunVar[CapacityLimiter | None] = RunVar("kedge_tool_threads")


class AttemptTimeout(TimeoutError):
    """The attempt took longer than the tool's timeout."""


class SelfCancelled(Exception):
    """The function was cancelled although the call was not."""


async def invoke_tool(tool: AnyTool, arguments: Arguments, on_start: Callable[[], None]) -> Parts:
    """Run the function once; ``on_start`` is called when its timeout starts."""
    async with AsyncExitStack() as stack:
        permit = None
        if tool.limit:
            permit = await stack.enter_async_context(tool.limit.current_limiter().acquire())
        if is_async(tool.function):
            run = partial(_run_in_loop, tool, arguments)
        else:
            await stack.enter_async_context(_get_thread_limiter())
            run = ThreadRun(tool, arguments, permit).run
        on_start()
        with move_on_after(tool.timeout), _detect_self_cancellation():
            return await run()
        raise AttemptTimeout(f"it took longer than {tool.timeout:g} s")


async def _run_in_loop(tool: AnyTool, arguments: Arguments) -> Parts:
    with _replace_generator_exit():
        return to_parts(await tool.function(**arguments))


def _get_thread_limiter() -> CapacityLimiter:
    """Return the limiter of tool threads; the timeout starts once a thread is free."""
    limiter = _thread_limiter.get(None)
    if limiter is None:
        limiter = CapacityLimiter(MAX_THREADS)
        _thread_limiter.set(limiter)
    return limiter


class ThreadRun:
    """A function running in a thread, and its permit if the thread is abandoned.

    The thread and the event loop each set a flag before they read the other's flag. The second one reads
    the flag of the first, so the permit is released exactly once.
    """

    def __init__(
        self, tool: AnyTool, arguments: Arguments, permit: ConcurrencyPermit | None
    ) -> None:
        self.tool = tool
        self.arguments = arguments
        self.permit = permit
        self.started = self.ended = self.abandoned = False

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
            if self.permit:
                self.permit.release()

    def abandon(self) -> None:
        """Abandon the thread; if it has started, it retains the permit."""
        self.abandoned = True
        if self.permit and self.started:
            self.permit.transfer_to_thread()
            if self.ended:
                self.permit.release()


@contextmanager
def _detect_self_cancellation() -> Generator[None]:
    """Raise ``SelfCancelled`` if the function was cancelled and the surrounding scope was not."""
    try:
        yield
    except get_cancelled_exc_class() as error:
        if current_effective_deadline() == -math.inf:
            raise
        raise SelfCancelled("it was cancelled from within") from error


@contextmanager
def _replace_generator_exit() -> Generator[None]:
    """Raise ``RuntimeError`` for ``GeneratorExit``, which would close the generators of the run's events."""
    try:
        yield
    except GeneratorExit as error:
        raise RuntimeError("the function raised GeneratorExit") from error
