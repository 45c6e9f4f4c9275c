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
from kedge.server.output_writer import StreamEvent
from kedge.server.response_run import ResponseRun
from kedge.server.settings import Limits
from kedge.server.sse import EventsDropped, SSEEncoder

MAX_EVENTS_PER_READ = 64
"""How many events are given to a reader at once."""


class EventLog:
    """The events of one stream, as the frames that were or will be sent."""

    def __init__(self) -> None:
        self.size = 0
        self.ended_at: float | None = None
        self._encoder = SSEEncoder()
        self._frames: deque[bytes] = deque()
        self._first_index = 0
        self._new_events = asyncio.Event()

    def add(self, events: Sequence[StreamEvent]) -> None:
        """Write events down, and wake those who wait for them."""
        frames = [self._encoder(event) for event in events]
        self._frames.extend(frames)
        self.size += sum(map(len, frames))
        self._notify_readers()

    def end(self, now: float) -> None:
        """Say that nothing more will come."""
        self.ended_at = now
        self._notify_readers()

    def drop_oldest(self) -> bool:
        """Drop one event; say whether there was one to spare."""
        if len(self._frames) < 2:
            return False
        self.size -= len(self._frames.popleft())
        self._first_index += 1
        return True

    def has_events_after(self, after: int) -> bool:
        """Whether everything after this event is still here, or yet to come."""
        return after + 1 >= self._first_index

    async def read(self, after: int) -> AsyncIterator[bytes]:
        """Give what comes after this event, as it comes, up to the end.

        Raises ``Cut`` for a reader who is so slow that events were dropped before it came to them.
        """
        place = after + 1
        while True:
            if not self.has_events_after(place - 1):
                raise EventsDropped
            news = self._new_events
            start = place - self._first_index
            frames = list(islice(self._frames, start, start + MAX_EVENTS_PER_READ))
            if frames:
                place += len(frames)
                yield b"".join(frames)
            elif self.ended_at is not None:
                return
            else:
                await news.wait()

    def _notify_readers(self) -> None:
        self._new_events.set()
        self._new_events = asyncio.Event()


class BackgroundJobs:
    """The jobs of one server that are not finished, and the logs of those that were watched."""

    def __init__(self, limits: Limits, clock: Callable[[], float]) -> None:
        self._limits = limits
        self._clock = clock
        self._slots = asyncio.Semaphore(limits.background_running)
        self._jobs: dict[str, ResponseRun] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._logs: OrderedDict[str, EventLog] = OrderedDict()

    def check_capacity(self) -> None:
        """Refuse one job more than may wait."""
        if len(self._jobs) >= self._limits.background_running + self._limits.background_waiting:
            raise errors.BACKGROUND_QUEUE_FULL()

    def start(self, run: ResponseRun, *, retain_events: bool) -> EventLog:
        """Let a response be written in its turn; only the events of a watched one are kept."""
        id: str = run.draft.request_fields["id"]
        log = EventLog()
        self._jobs[id] = run
        if retain_events:
            self._logs[id] = log
        log.add(run.enqueue())
        task = asyncio.get_running_loop().create_task(self._run_job(id, run, log))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return log

    def get_run(self, id: str) -> ResponseRun | None:
        """Find the job of a response that is not finished."""
        return self._jobs.get(id)

    def get_log(self, id: str) -> EventLog | None:
        """Find the events of a response, if they are kept."""
        self._drop_expired_logs()
        return self._logs.get(id)

    async def _run_job(self, id: str, run: ResponseRun, log: EventLog) -> None:
        watched = id in self._logs

        async def emit(events: Sequence[StreamEvent]) -> None:
            if watched:
                log.add(events)
                self._enforce_byte_limit(log)

        try:
            await run.run_queued(self._slots, emit)
        finally:
            self._jobs.pop(id, None)
            log.end(self._clock())
            self._drop_expired_logs()

    def _drop_expired_logs(self) -> None:
        """Drop the logs that were finished long enough ago."""
        oldest = self._clock() - self._limits.stream_seconds
        old = [id for id, log in self._logs.items() if log.ended_at and log.ended_at <= oldest]
        for id in old:
            del self._logs[id]

    def _enforce_byte_limit(self, active: EventLog) -> None:
        held = sum(log.size for log in self._logs.values())
        ended = [id for id, log in self._logs.items() if log.ended_at is not None]
        for id in ended:
            if held <= self._limits.stream_bytes:
                return
            held -= self._logs.pop(id).size
        before = active.size
        while held - (before - active.size) > self._limits.stream_bytes:
            if not active.drop_oldest():
                return
