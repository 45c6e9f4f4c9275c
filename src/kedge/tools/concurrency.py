"""How many calls of one tool run at once.

A limit belongs to a tool and holds wherever the tool is used in one event loop. A thread cannot be
stopped: when a call in a thread runs out of time, the thread goes astray and keeps its place until
it ends, for otherwise a tool that may run once would run twice. When stray threads hold all places,
those who wait are told so instead of waiting on them.
"""

from collections import deque
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from anyio import Event
from anyio.lowlevel import RunVar


class AllPermitsAbandoned(Exception):
    """Every place is held by a thread that ran out of time and has not ended."""


class Permit:
    """The right to run once."""

    def __init__(self, limiter: "ConcurrencyLimiter") -> None:
        self._limiter = limiter

    def transfer_to_thread(self) -> None:
        """Keep the place for a thread that goes on by itself. Called in the event loop."""
        self._limiter.abandoned.add(self)

    def release(self) -> None:
        """Free the place of a stray thread that has ended. Called in any thread."""
        # Nobody is woken here. As long as others run, the next of them to leave will do it; and
        # where only stray threads are left, nobody waits.
        self._limiter.abandoned.discard(self)


@dataclass(slots=True, eq=False)
class _Waiter:
    event: Event = field(default_factory=Event)
    admitted: bool = False


class ConcurrencyLimiter:
    """Lets at most ``size`` run at a time, first come, first served."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.running = 0
        self.abandoned: set[Permit] = set()
        self._queue: deque[_Waiter] = deque()

    @asynccontextmanager
    async def acquire(self) -> AsyncGenerator[Permit]:
        """Wait for a place and hold it. Raises ``AllStray`` when none can be expected."""
        await self._wait_for_permit()
        try:
            yield Permit(self)
        finally:
            self._release()

    async def _wait_for_permit(self) -> None:
        if len(self.abandoned) >= self.size:
            raise AllPermitsAbandoned
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
            # Else only stray threads are left: wake the next without a place, to be told.
            self._queue.popleft().event.set()

    def _cancel_wait(self, waiter: _Waiter) -> None:
        if waiter.admitted:
            self._release()
        elif waiter in self._queue:
            self._queue.remove(waiter)

    def _is_free(self) -> bool:
        return self.running + len(self.abandoned) < self.size


class ConcurrencyLimit:
    """At most ``size`` at once, counted in each event loop."""

    def __init__(self, size: int) -> None:
        self.size = size

    def current_limiter(self) -> ConcurrencyLimiter:
        """The gate of the running event loop."""
        gates = _limiters.get(None)
        if gates is None:
            gates = WeakKeyDictionary[ConcurrencyLimit, ConcurrencyLimiter]()
            _limiters.set(gates)
        return gates.setdefault(self, ConcurrencyLimiter(self.size))


_limiters: RunVar[WeakKeyDictionary[ConcurrencyLimit, ConcurrencyLimiter] | None] = RunVar(
    "kedge_tool_gates"
)
