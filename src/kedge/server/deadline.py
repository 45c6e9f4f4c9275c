"""A time limit for a block of code, which costs almost nothing if the block does not wait."""

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Self

# Why not ``asyncio.timeout``. Most requests are answered within one turn of the loop: their body
# arrived with their headers, and the practice model does not wait. For these, creating and cancelling
# a timer would be most of the cost. So entering the block only schedules a callback for the next turn
# of the loop; a block that ends before that cancels it, without further cost. The callback runs only
# if the block really waits: then the timer starts, and ``on_wait`` is called once, which is the time to
# store a response as in progress and to watch for a disconnect.
#
# Other code can cancel the task, too. An expired deadline cancels the task, and on leaving the block
# reverts exactly its own cancellation (``uncancel``). If the count of pending cancellations was already
# higher when the block was entered, or has grown by more than one, another caller has cancelled the
# task, and CancelledError must propagate.


class Deadline:
    """A block of code that ends after a time, or when it is cancelled from outside.

    A block that was ended is left as if it had finished; ``cancelled`` is set then.

    Args:
        seconds: The maximum time of the block, from the first time that it waits.
        on_wait: Called once, the first time that the block waits.
    """

    def __init__(self, seconds: float, on_wait: Callable[[], None] | None = None) -> None:
        self.cancelled = False
        self._seconds = seconds
        self._on_wait = on_wait
        self._task: asyncio.Task[object] | None = None

    def __enter__(self) -> Self:
        self._task = asyncio.current_task()
        assert self._task is not None  # noqa: S101 - we are in a coroutine
        self._cancel_count = self._task.cancelling()
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.Handle = self._loop.call_soon(self._start_timer)
        if self.cancelled:
            self._task.cancel()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        self._timer.cancel()
        self._on_wait = None  # its object may refer to the deadline, a cycle
        task, self._task = self._task, None
        assert task is not None  # noqa: S101 - set when the block was entered
        ours = self.cancelled and task.uncancel() <= self._cancel_count
        return ours and kind is asyncio.CancelledError

    def cancel(self) -> None:
        """End the block now, or as soon as it is entered."""
        if not self.cancelled:
            self.cancelled = True
            if self._task is not None:
                self._task.cancel()

    def _start_timer(self) -> None:
        self._timer = self._loop.call_later(self._seconds, self.cancel)
        if self._on_wait is not None:
            self._on_wait()
