"""A limit on how long something may wait, which costs nothing where nothing waits.

Most requests are answered without the loop ever getting a turn: their body has arrived with their
headers and the practice model is instant. So no timer is set until the loop does get a turn; then
``waiting`` is told, once, and the time begins to run.
"""

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Self


class Deadline:
    """A block of code that may be ended from outside or by the clock.

    An ended block is left as if it had finished; ``ended`` tells that it had not.
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
        task, self._task = self._task, None
        assert task is not None  # noqa: S101 - set when the block was entered
        # Only our own cancellation is taken back; one of somebody else goes on.
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
