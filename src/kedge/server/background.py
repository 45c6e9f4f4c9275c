"""Responses that are written whether or not anybody waits for them, and their events, kept for a while.

A job takes its turn among a few that run at once. Its events go into a log from which any number of
readers may read at their own pace, from any place, while it grows and for some minutes after. Logs are
bounded together: those of finished jobs go first, then the oldest events of the one that grows.
"""

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Sequence
from itertools import islice

from kedge.server import errors
from kedge.server.answering import Run
from kedge.server.output import Event
from kedge.server.settings import Limits
from kedge.server.sse import Cut, Frames

CHUNK = 64
"""How many events are given to a reader at once."""


class EventLog:
    """The events of one stream, as the frames that were or will be sent."""

    def __init__(self) -> None:
        self.size = 0
        self.ended_at: float | None = None
        self._framed = Frames()
        self._held: deque[bytes] = deque()
        self._first = 0
        self._news = asyncio.Event()

    def add(self, events: Sequence[Event]) -> None:
        """Write events down, and wake those who wait for them."""
        frames = [self._framed(event) for event in events]
        self._held.extend(frames)
        self.size += sum(map(len, frames))
        self._wake()

    def end(self, now: float) -> None:
        """Say that nothing more will come."""
        self.ended_at = now
        self._wake()

    def drop_oldest(self) -> bool:
        """Drop one event; say whether there was one to spare."""
        if len(self._held) < 2:
            return False
        self.size -= len(self._held.popleft())
        self._first += 1
        return True

    def holds(self, after: int) -> bool:
        """Whether everything after this event is still here, or yet to come."""
        return after + 1 >= self._first

    async def read(self, after: int) -> AsyncIterator[bytes]:
        """Give what comes after this event, as it comes, up to the end.

        Raises ``Cut`` for a reader who is so slow that events were dropped before it came to them.
        """
        place = after + 1
        while True:
            if not self.holds(place - 1):
                raise Cut
            news = self._news
            start = place - self._first
            frames = list(islice(self._held, start, start + CHUNK))
            if frames:
                place += len(frames)
                yield b"".join(frames)
            elif self.ended_at is not None:
                return
            else:
                await news.wait()

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()


class Background:
    """The jobs of one server that are not finished, and the logs of those that were watched."""

    def __init__(self, limits: Limits, clock: Callable[[], float]) -> None:
        self._limits = limits
        self._clock = clock
        self._turns = asyncio.Semaphore(limits.background_running)
        self._jobs: dict[str, Run] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._logs: OrderedDict[str, EventLog] = OrderedDict()

    def check_room(self) -> None:
        """Refuse one job more than may wait."""
        if len(self._jobs) >= self._limits.background_running + self._limits.background_waiting:
            raise errors.BACKGROUND_FULL()

    def start(self, run: Run, *, watched: bool) -> EventLog:
        """Let a response be written in its turn; only the events of a watched one are kept."""
        id: str = run.draft.asked["id"]
        log = EventLog()
        self._jobs[id] = run
        if watched:
            self._logs[id] = log
        log.add(run.queue())
        task = asyncio.get_running_loop().create_task(self._work(id, run, log))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return log

    def running(self, id: str) -> Run | None:
        """Find the job of a response that is not finished."""
        return self._jobs.get(id)

    def log(self, id: str) -> EventLog | None:
        """Find the events of a response, if they are kept."""
        self._forget_old()
        return self._logs.get(id)

    async def _work(self, id: str, run: Run, log: EventLog) -> None:
        watched = id in self._logs

        async def emit(events: Sequence[Event]) -> None:
            if watched:
                log.add(events)
                self._bound(log)

        try:
            await run.later(self._turns, emit)
        finally:
            self._jobs.pop(id, None)
            log.end(self._clock())
            self._forget_old()

    def _forget_old(self) -> None:
        """Drop the logs that were finished long enough ago."""
        oldest = self._clock() - self._limits.stream_seconds
        old = [id for id, log in self._logs.items() if log.ended_at and log.ended_at <= oldest]
        for id in old:
            del self._logs[id]

    def _bound(self, growing: EventLog) -> None:
        held = sum(log.size for log in self._logs.values())
        ended = [id for id, log in self._logs.items() if log.ended_at is not None]
        for id in ended:
            if held <= self._limits.stream_bytes:
                return
            held -= self._logs.pop(id).size
        before = growing.size
        while held - (before - growing.size) > self._limits.stream_bytes:
            if not growing.drop_oldest():
                return
