"""A time limit for a coroutine that can be ended from outside, and reports when it begins to wait."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Deadline:
    """The end of a coroutine after a time, or when it is cancelled from outside.

    Args:
        seconds: The maximum time of the coroutine.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._is_cancelled = False
        self._timeout: asyncio.Timeout | None = None

    @property
    def cancelled(self) -> bool:
        """Whether the time is over, or ``cancel`` was called."""
        return self._is_cancelled or (self._timeout is not None and self._timeout.expired())

    async def run(
        self, work: Coroutine[Any, Any, T], on_wait: Callable[[], None] | None = None
    ) -> T | None:
        """Run a coroutine.

        Args:
            work: The coroutine.
            on_wait: Called once if the coroutine waits, in the next turn of the loop. Most requests are answered
                within one turn.

        Returns:
            Its result, or None if the deadline ended it.
        """
        waiting = asyncio.get_running_loop().call_soon(on_wait) if on_wait is not None else None
        try:
            async with asyncio.timeout(0 if self._is_cancelled else self._seconds) as self._timeout:
                return await work
        except TimeoutError:
            if not self.cancelled:
                raise
            return None
        finally:
            if waiting is not None:
                waiting.cancel()
            self._is_cancelled, self._timeout = self.cancelled, None

    def cancel(self) -> None:
        """End the coroutine now, or as soon as it waits."""
        if self._timeout is not None and not self.cancelled:
            self._timeout.reschedule(asyncio.get_running_loop().time())
        self._is_cancelled = True
