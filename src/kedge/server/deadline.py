"""A time limit for a coroutine, which costs almost nothing if the coroutine does not wait."""

import asyncio
from collections.abc import Callable, Coroutine, Generator
from types import coroutine
from typing import Any, TypeVar

T = TypeVar("T")

# Why not ``asyncio.timeout``. Most requests are answered within one turn of the loop: their body
# arrived with their headers, and the practice model does not wait. For these, creating and cancelling
# a timer would be most of the cost. So the first step of the coroutine is run without one, and if it
# ends there, nothing else happens. Only if it waits a callback is scheduled for the next turn of the
# loop: then the timer starts, and ``on_wait`` is called once, which is the time to store a response
# as in progress and to watch for a disconnect.
#
# Other code can cancel the task, too. An expired deadline cancels the task, and at the end of the
# coroutine reverts exactly its own cancellation (``uncancel``). If the count of pending cancellations
# has grown by more than one since the coroutine began to wait, another caller has cancelled the task,
# and CancelledError must propagate.


class Deadline:
    """The end of a coroutine after a time, or when it is cancelled from outside.

    Args:
        seconds: The maximum time of the coroutine, from the first time that it waits.
    """

    def __init__(self, seconds: float) -> None:
        self.cancelled = False
        """Whether the time is over, or ``cancel`` was called."""
        self._seconds = seconds
        self._task: asyncio.Task[object] | None = None

    async def run(
        self, work: Coroutine[Any, Any, T], on_wait: Callable[[], None] | None = None
    ) -> T | None:
        """Run a coroutine.

        Args:
            work: The coroutine.
            on_wait: Called once, the first time that the coroutine waits.

        Returns:
            Its result, or None if the deadline ended it.
        """
        steps = work.__await__()
        try:
            future = next(steps)
        except StopIteration as end:
            return end.value
        self._task = task = asyncio.current_task()
        assert task is not None  # noqa: S101 - we are in a coroutine
        cancel_count = task.cancelling()
        self._timer = asyncio.get_running_loop().call_soon(self._start_timer, on_wait)
        if self.cancelled:
            task.cancel()
        try:
            return await _resume(steps, future)
        except asyncio.CancelledError:
            if not self.cancelled or task.cancelling() - 1 > cancel_count:
                raise
            return None
        finally:
            self._timer.cancel()
            self._task = None
            if self.cancelled:
                task.uncancel()

    def cancel(self) -> None:
        """End the coroutine now, or as soon as it waits."""
        if not self.cancelled:
            self.cancelled = True
            if self._task is not None:
                self._task.cancel()

    def _start_timer(self, on_wait: Callable[[], None] | None) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._seconds, self.cancel)
        if on_wait is not None:
            on_wait()


@coroutine
def _resume(steps: Generator[Any, Any, T], future: Any) -> Generator[Any, Any, T]:
    """Continue a coroutine that waits for a future."""
    try:
        while True:
            try:
                result = yield future
            except BaseException as error:  # noqa: BLE001 - the coroutine handles it
                future = steps.throw(error)
            else:
                future = steps.send(result)
    except StopIteration as end:
        return end.value
