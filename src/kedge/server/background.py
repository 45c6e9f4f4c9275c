"""Background responses: a queue of jobs, and logs of their events.

A few jobs run at once, the others wait. The events of a streamed job go to a log that any number of
readers can read, each at its own speed and from any event, until some minutes after the job has ended.
The logs have a common size limit: logs of finished jobs are dropped first, then the oldest events of
the log that grows.
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
"""Maximum number of events that a reader gets at once."""


class EventLog:
    """The events of one stream, encoded as frames."""

    def __init__(self) -> None:
        self.size = 0
        self.ended_at: float | None = None
        self._encoder = SSEEncoder()
        self._frames: deque[bytes] = deque()
        self._first_index = 0
        self._new_events = asyncio.Event()

    def add(self, events: Sequence[StreamEvent]) -> None:
        """Append events and wake the readers."""
        frames = [self._encoder(event) for event in events]
        self._frames.extend(frames)
        self.size += sum(map(len, frames))
        self._notify_readers()

    def end(self, now: float) -> None:
        """Mark the log as complete."""
        self.ended_at = now
        self._notify_readers()

    def drop_oldest(self) -> bool:
        """Drop the oldest event; return False if only one is left."""
        if len(self._frames) < 2:
            return False
        self.size -= len(self._frames.popleft())
        self._first_index += 1
        return True

    def has_events_after(self, after: int) -> bool:
        """Return whether no event after this one was dropped."""
        return after + 1 >= self._first_index

    async def read(self, after: int) -> AsyncIterator[bytes]:
        """Yield the frames after this event, as they are added, until the log is complete.

        Raises:
            EventsDropped: If the reader is so slow that its next event was dropped.
        """
        next_index = after + 1
        while True:
            if not self.has_events_after(next_index - 1):
                raise EventsDropped
            new_events = self._new_events
            start = next_index - self._first_index
            frames = list(islice(self._frames, start, start + MAX_EVENTS_PER_READ))
            if frames:
                next_index += len(frames)
                yield b"".join(frames)
            elif self.ended_at is not None:
                return
            else:
                await new_events.wait()

    def _notify_readers(self) -> None:
        self._new_events.set()
        self._new_events = asyncio.Event()


class BackgroundJobs:
    """The unfinished background jobs of one server, and the logs of streamed jobs."""

    def __init__(self, limits: Limits, clock: Callable[[], float]) -> None:
        self._limits = limits
        self._clock = clock
        self._slots = asyncio.Semaphore(limits.background_running)
        self._jobs: dict[str, ResponseRun] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._logs: OrderedDict[str, EventLog] = OrderedDict()

    def check_capacity(self) -> None:
        """Raise an ``ApiError`` if the queue is full."""
        if len(self._jobs) >= self._limits.background_running + self._limits.background_waiting:
            raise errors.BACKGROUND_QUEUE_FULL()

    def start(self, run: ResponseRun, *, retain_events: bool) -> EventLog:
        """Queue a response; its events are only retained if it is streamed."""
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
        """Return the run of an unfinished response, or None."""
        return self._jobs.get(id)

    def get_log(self, id: str) -> EventLog | None:
        """Return the events of a response, or None if they are not stored."""
        self._drop_expired_logs()
        return self._logs.get(id)

    async def _run_job(self, id: str, run: ResponseRun, log: EventLog) -> None:
        is_retained = id in self._logs

        async def emit(events: Sequence[StreamEvent]) -> None:
            if is_retained:
                log.add(events)
                self._enforce_byte_limit(log)

        try:
            await run.run_queued(self._slots, emit)
        finally:
            self._jobs.pop(id, None)
            log.end(self._clock())
            self._drop_expired_logs()

    def _drop_expired_logs(self) -> None:
        """Drop logs that were completed more than ``stream_seconds`` ago."""
        oldest = self._clock() - self._limits.stream_seconds
        old = [id for id, log in self._logs.items() if log.ended_at and log.ended_at <= oldest]
        for id in old:
            del self._logs[id]

    def _enforce_byte_limit(self, active: EventLog) -> None:
        total = sum(log.size for log in self._logs.values())
        ended = [id for id, log in self._logs.items() if log.ended_at is not None]
        for id in ended:
            if total <= self._limits.stream_bytes:
                return
            total -= self._logs.pop(id).size
        before = active.size
        while total - (before - active.size) > self._limits.stream_bytes:
            if not active.drop_oldest():
                return
