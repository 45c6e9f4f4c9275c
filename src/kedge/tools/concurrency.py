"""Concurrency limits: the maximum number of concurrent calls of one tool.

A limit belongs to a tool and applies wherever the tool is used in one event loop. A thread cannot be
stopped. When a call in a thread times out, the abandoned thread retains its permit until it ends; otherwise
a tool limited to one call could run twice at once. When abandoned threads hold all permits, waiting calls
fail with ``ConcurrencyExhausted`` instead of waiting for threads that may never end.
"""

from collections import deque
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from anyio import Event
from anyio.lowlevel import RunVar


class ConcurrencyExhausted(Exception):
    """Every permit is held by a thread whose call timed out and which has not ended."""

    def __init__(self, size: int) -> None:
        super().__init__(f"it is busy: {size} earlier call(s) timed out and are still running")


class ConcurrencyPermit:
    """The right to run one call."""

    def __init__(self, limiter: "ConcurrencyLimiter") -> None:
        self._limiter = limiter

    def transfer_to_thread(self) -> None:
        """Retain the permit for an abandoned thread. Called in the event loop."""
        self._limiter.abandoned.add(self)

    def release(self) -> None:
        """Free the permit of an abandoned thread that has ended. Called in any thread."""
        # No waiter is woken here: it would have to happen in the event loop. While other calls run, the
        # next one to finish wakes a waiter; when only abandoned threads are left, there are no waiters.
        self._limiter.abandoned.discard(self)


@dataclass(slots=True, eq=False)
class _Waiter:
    event: Event = field(default_factory=Event)
    admitted: bool = False


class ConcurrencyLimiter:
    """Allows at most ``size`` calls at a time, in order of arrival."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.running = 0
        self.abandoned: set[ConcurrencyPermit] = set()
        self._queue: deque[_Waiter] = deque()

    @asynccontextmanager
    async def acquire(self) -> AsyncGenerator[ConcurrencyPermit]:
        """Wait for a permit and hold it.

        Raises:
            ConcurrencyExhausted: All permits are held by abandoned threads.
        """
        await self._wait_for_permit()
        try:
            yield ConcurrencyPermit(self)
        finally:
            self._release()

    async def _wait_for_permit(self) -> None:
        if len(self.abandoned) >= self.size:
            raise ConcurrencyExhausted(self.size)
        if self._is_free() and not self._queue:
            self.running += 1
            return
        waiting = _Waiter()
        self._queue.append(waiting)
        try:
            await waiting.event.wait()
        except BaseException:
            self._cancel_wait(waiting)
            raise
        if not waiting.admitted:
            await self._wait_for_permit()

    def _release(self) -> None:
        self.running -= 1
        while self._queue:
            if self._is_free():
                self.running += 1
                self._queue[0].admitted = True
            elif self.running:
                break
            # Otherwise only abandoned threads remain: wake the next waiter without a permit, so that it raises.
            self._queue.popleft().event.set()

    def _cancel_wait(self, waiter: _Waiter) -> None:
        if waiter.admitted:
            self._release()
        elif waiter in self._queue:
            self._queue.remove(waiter)

    def _is_free(self) -> bool:
        return self.running + len(self.abandoned) < self.size


class ConcurrencyLimit:
    """A limit of ``size`` concurrent calls per event loop."""

    def __init__(self, size: int) -> None:
        self.size = size

    def current_limiter(self) -> ConcurrencyLimiter:
        """Return the limiter of the running event loop."""
        limiters = _limiters.get(None)
        if limiters is None:
            limiters = WeakKeyDictionary[ConcurrencyLimit, ConcurrencyLimiter]()
            _limiters.set(limiters)
        return limiters.setdefault(self, ConcurrencyLimiter(self.size))


_limiters: RunVar[WeakKeyDictionary[ConcurrencyLimit, ConcurrencyLimiter] | None] = RunVar(
    "kedge_tool_limiters"
)
