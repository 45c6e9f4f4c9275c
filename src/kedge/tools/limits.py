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


class AllStray(Exception):
    """Every place is held by a thread that ran out of time and has not ended."""


class Place:
    """The right to run once."""

    def __init__(self, gate: "Gate") -> None:
        self._gate = gate

    def leave_to_thread(self) -> None:
        """Keep the place for a thread that goes on by itself. Called in the event loop."""
        self._gate.strays.add(self)

    def give_back(self) -> None:
        """Free the place of a stray thread that has ended. Called in any thread."""
        # Nobody is woken here. As long as others run, the next of them to leave will do it; and
        # where only stray threads are left, nobody waits.
        self._gate.strays.discard(self)


@dataclass(slots=True, eq=False)
class _Waiting:
    event: Event = field(default_factory=Event)
    admitted: bool = False


class Gate:
    """Lets at most ``size`` run at a time, first come, first served."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.running = 0
        self.strays: set[Place] = set()
        self._queue: deque[_Waiting] = deque()

    @asynccontextmanager
    async def place(self) -> AsyncGenerator[Place]:
        """Wait for a place and hold it. Raises ``AllStray`` when none can be expected."""
        await self._enter()
        try:
            yield Place(self)
        finally:
            self._leave()

    async def _enter(self) -> None:
        if len(self.strays) >= self.size:
            raise AllStray
        if self._is_free() and not self._queue:
            self.running += 1
            return
        waiting = _Waiting()
        self._queue.append(waiting)
        try:
            await waiting.event.wait()
        except BaseException:
            self._give_up(waiting)
            raise
        if not waiting.admitted:
            await self._enter()

    def _leave(self) -> None:
        self.running -= 1
        while self._queue:
            if self._is_free():
                self.running += 1
                self._queue[0].admitted = True
            elif self.running:
                break
            # Else only stray threads are left: wake the next without a place, to be told.
            self._queue.popleft().event.set()

    def _give_up(self, waiting: _Waiting) -> None:
        if waiting.admitted:
            self._leave()
        elif waiting in self._queue:
            self._queue.remove(waiting)

    def _is_free(self) -> bool:
        return self.running + len(self.strays) < self.size


class Limit:
    """At most ``size`` at once, counted in each event loop."""

    def __init__(self, size: int) -> None:
        self.size = size

    def gate(self) -> Gate:
        """The gate of the running event loop."""
        gates = _gates.get(None)
        if gates is None:
            gates = WeakKeyDictionary[Limit, Gate]()
            _gates.set(gates)
        return gates.setdefault(self, Gate(self.size))


_gates: RunVar[WeakKeyDictionary[Limit, Gate] | None] = RunVar("kedge_tool_gates")
