"""Keep an event loop responsive: tasks that never wait take turns, and long computations run in threads.

A task that reads a model, an upstream or a stored stream waits only while there is nothing to read. If there always is,
as from a fast model or a local server, no other task runs before its end. So each such loop has a ``TimeSlice``:

    time_slice = TimeSlice()
    async for event in events:
        ...
        await time_slice.share()
"""

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import Context, copy_context
from functools import partial
from time import perf_counter
from typing import Self, TypeVar
from weakref import WeakKeyDictionary

from kedge._internal.event_loops import PerLoop

T = TypeVar("T")

SLICE_SECONDS = 0.002
"""The time for which a task runs before it lets others run."""


# Why a queue. ``asyncio.sleep(0)`` lets every other task of the loop run once. If twenty tasks do that, each of them
# runs for its slice before the loop looks at its sockets again, and a request that needs five turns of the loop waits
# for a hundred slices. Here all of them wait in one queue, and each turn of the loop continues the first of it.


class _TurnQueue:
    """The work of one loop that can wait; one piece of it is done in each turn of the loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: deque[Callable[[], object]] = deque()

    @property
    def is_empty(self) -> bool:
        """Whether nothing is waiting."""
        return not self._waiting

    def add(self, work: Callable[[], object]) -> None:
        """Call a function after all work that was added earlier."""
        self._waiting.append(work)
        if len(self._waiting) == 1:
            self._call_first_later()

    def _call_first_later(self) -> None:
        # Without the context variables of the task that happens to run now.
        self._loop.call_soon(self._call_first, context=Context())

    def _call_first(self) -> None:
        work = self._waiting.popleft()
        if self._waiting:
            self._call_first_later()
        work()


_queues: WeakKeyDictionary[asyncio.AbstractEventLoop, _TurnQueue] = WeakKeyDictionary()


def _find_loop() -> asyncio.AbstractEventLoop | None:
    """Return the running loop; None if it is not one of asyncio, as that of a program with a chained client may be."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _get_queue() -> _TurnQueue | None:
    loop = _find_loop()
    if loop is None:
        return None
    queue = _queues.get(loop)
    if queue is None:
        queue = _TurnQueue(loop)
        _queues[loop] = queue
    return queue


def call_in_turn(work: Callable[[], object]) -> None:
    """Call a function in a later turn of the running loop, after the tasks that came earlier."""
    queue = _get_queue()
    assert queue is not None, "there is no loop of asyncio"  # noqa: S101
    queue.add(work)


class TimeSlice:
    """The time that a task may take before it lets others run; it begins when it is created."""

    def __init__(self) -> None:
        self._end = perf_counter() + SLICE_SECONDS

    @property
    def is_over(self) -> bool:
        """Whether it is time to let others run."""
        return perf_counter() >= self._end

    @classmethod
    async def begin(cls) -> Self:
        """Return a slice that begins after those of the tasks that take turns already.

        So if many tasks start at once, only one of them begins in each turn of the loop.
        """
        queue = _get_queue()
        if queue is not None and not queue.is_empty:
            await _wait_for_turn()
        return cls()

    async def share(self) -> None:
        """Let other tasks run if the slice is over; afterwards the next one begins."""
        if self.is_over:
            await _wait_for_turn()
            self._end = perf_counter() + SLICE_SECONDS


async def _wait_for_turn() -> None:
    queue = _get_queue()
    if queue is not None:
        turn = asyncio.get_running_loop().create_future()
        queue.add(lambda: turn.done() or turn.set_result(None))  # done if the task was cancelled
        await turn


MANY_ITEMS = 1_000
"""The number of items above which a pass over all of them is made in a thread."""
MAX_THREADS = 4
"""The threads of each loop that compute. They share the interpreter with the loop, so more of them would delay it."""


async def _end_threads(threads: ThreadPoolExecutor) -> None:
    threads.shutdown(wait=False)


_threads = PerLoop(lambda: ThreadPoolExecutor(MAX_THREADS, "kedge-compute"), _end_threads)


async def compute(work: Callable[[], T], *, is_long: bool = True) -> T:
    """Call a function that never waits, in a thread if it computes for a long time.

    The threads are not those of ``asyncio.to_thread``: the check of a database does not queue behind computations.

    Args:
        work: The function. In a thread it gets a copy of the context variables.
        is_long: Whether it takes more than some milliseconds.

    Returns:
        Its result.
    """
    loop = _find_loop()
    if loop is None or not is_long:
        return work()
    call = partial(copy_context().run, work)
    return await loop.run_in_executor(_threads.get(), call)
