"""Background responses: a queue of jobs, and logs of their events.

A few jobs run at once, the others wait. The events of a streamed job are written to a log that any number
of readers can read, each at its own speed and from any event, until some minutes after the job has ended.
The logs have a common size limit: logs of finished jobs are dropped first, then the oldest events of
the log that grows.

If several servers use one database, the events are also stored there, so that every server can replay
the stream, and other servers continue the jobs of a server that stops or crashes (``storage.postgres``). Readers
poll: a batch of events is stored at most every 0.1 seconds, and `docs/server.md` has the measurements.
"""

import asyncio
import logging
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Sequence

from kedge._internal.json_text import decode
from kedge._internal.wait_policy import WaitPolicy
from kedge.errors import StoreError
from kedge.server import errors
from kedge.server.object_forms import UNFINISHED_STATUSES
from kedge.server.prepare import prepare_claimed
from kedge.server.request_log import log_failure
from kedge.server.response_run import ResponseRun, build_last_events
from kedge.server.settings import Limits
from kedge.server.sse import EventsDropped, FollowedLog, encode_events
from kedge.server.state import ServerState
from kedge.server.storage.postgres import ClaimedResponse, ReplicaClaims

log = logging.getLogger("kedge.server")

STORE_SECONDS = 0.1
"""Seconds for which events are collected before they are stored."""
EVENT_POLLS = WaitPolicy(
    "a read of the stored events of a background response, since the last new one",
    first=0.05,
    longest=0.4,
)


class EventRecorder:
    """A recorder that stores the events of a stream in the database, in batches and in order."""

    def __init__(self, service: ServerState, node: int, start: int) -> None:
        self._service = service
        self._node = node
        self._next = start
        self._frames: list[bytes] = []
        self._timer: asyncio.TimerHandle | None = None

    def add(self, frames: Sequence[bytes]) -> None:
        """Add frames, which are stored within ``STORE_SECONDS``."""
        self._frames.extend(frames)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(STORE_SECONDS, self.flush)

    def flush(self) -> None:
        """Store the added frames before any work that is submitted later."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        frames = self._frames
        self._frames = []
        if frames and self._service.claims is not None:
            first = self._next
            self._next += len(frames)
            self._service.submit(self._service.claims.add_events, self._node, first, frames)


class EventLog(FollowedLog[bytes]):
    """The events of one stream, encoded as frames.

    Args:
        start: The number of the first event.
    """

    def __init__(self, start: int = 0) -> None:
        super().__init__(start)
        self.size = 0
        self.ended_at: float | None = None

    def append(self, entries: Sequence[bytes]) -> None:
        """Append frames and wake the readers."""
        super().append(entries)
        self.size += sum(map(len, entries))

    def end(self, now: float) -> None:
        """Mark the log as complete."""
        self.ended_at = now
        self.finish()

    def drop_oldest(self) -> bytes | None:
        """Drop the oldest frame and return it; None if only one is left."""
        dropped = super().drop_oldest()
        self.size -= len(dropped or b"")
        return dropped

    async def read(self, after: int) -> AsyncIterator[bytes]:
        """Yield the frames after this event, as they are added, until the log is complete.

        Raises:
            EventsDropped: If the reader is so slow that its next event was dropped.
        """
        async for frames in self.follow(after):
            yield b"".join(frames)


class BackgroundJobs:
    """The unfinished background jobs of one server, and the logs of streamed jobs."""

    def __init__(self, limits: Limits, clock: Callable[[], float]) -> None:
        self._limits = limits
        self._clock = clock
        self._slots = asyncio.Semaphore(limits.background_running)
        self.jobs: dict[str, ResponseRun] = {}
        """The runs of unfinished responses by id."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._logs: OrderedDict[str, EventLog] = OrderedDict()
        self._claimed: deque[ClaimedResponse] = deque()

    def check_capacity(self) -> None:
        """Raise an ``ApiError`` if the queue is full."""
        if len(self.jobs) >= self._limits.background_running + self._limits.background_waiting:
            raise errors.BACKGROUND_QUEUE_FULL()

    def start(self, run: ResponseRun, log: EventLog) -> None:
        """Start a queued response; its events are only retained if it is streamed."""
        self.jobs[run.id] = run
        recorder: EventRecorder | None = None
        if run.is_streamed:
            self._logs[run.id] = log
            if run.service.claims is not None:
                recorder = EventRecorder(run.service, run.node, log.next_number)
                run.before_settle = recorder.flush
        task = asyncio.get_running_loop().create_task(self._run_job(run, log, recorder))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def resume(self, service: ServerState, claims: ReplicaClaims) -> None:
        """Run background responses that other servers did not finish, as long as there are free slots."""
        free_slots = self._limits.background_running - len(self.jobs)
        self._claimed += await service.run(claims.claim, free_slots - len(self._claimed))
        while self._claimed:
            # If the database fails meanwhile, the next round continues here: no other server claims it.
            await self._resume_claimed(service, claims, self._claimed[0])
            self._claimed.popleft()

    async def _resume_claimed(
        self, service: ServerState, claims: ReplicaClaims, claimed: ClaimedResponse
    ) -> None:
        view = service.view_namespace(claimed.namespace)
        log.info("continuing the background response of another server: %s", claimed.key)
        first = await service.run(claims.count_events, claimed.node)
        try:
            draft = await service.run(prepare_claimed, view, claimed)
            run = ResponseRun(view, draft, first_event=first)
        except StoreError:
            raise
        except errors.ApiError as error:
            await service.run(_fail_claimed, view, claimed, error)
            return
        except Exception as error:  # noqa: BLE001 - such as of a request to a newer version
            if not isinstance(error, LookupError):
                log_failure("a background response of another server cannot be continued", error)
            await service.run(_fail_claimed, view, claimed, None)
            return
        self.start(run, EventLog(first))

    async def stop_lost(self, service: ServerState, claims: ReplicaClaims) -> None:
        """Stop jobs that were cancelled through another server, or that another server has claimed."""
        nodes = {run.node: run for run in self.jobs.values()}
        if nodes:
            for node in await service.run(claims.find_lost, list(nodes)):
                nodes[node].stop("cancelled")

    async def open_stream(
        self, service: ServerState, id: str, node: int, after: int
    ) -> AsyncIterator[bytes] | None:
        """Return the frames of a response after an event, or None if they are not stored.

        With several servers they are read from the database, because another one may be generating them.
        """
        if service.claims is not None:
            is_stored = await service.run(service.claims.count_events, node)
            if not is_stored:
                return None
            return read_stored_events(service, service.claims, node, after)
        self._drop_expired_logs()
        log = self._logs.get(id)
        if log is None or not log.has_all_after(after):
            return None
        return log.read(after)

    async def _run_job(
        self, run: ResponseRun, log: EventLog, recorder: EventRecorder | None
    ) -> None:

        async def emit(frames: Sequence[bytes]) -> None:
            if not frames:
                return
            log.append(frames)
            if recorder is not None:
                recorder.add(frames)
            self._enforce_byte_limit(log)

        try:
            await run.run(emit, slots=self._slots)
        finally:
            self.jobs.pop(run.id, None)
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
            if active.drop_oldest() is None:
                return


def enqueue_run(run: ResponseRun) -> EventLog:
    """Store a response as queued, with the first events of its stream, and return the log of events."""
    log = EventLog()
    frames = run.enqueue()
    log.append(frames)
    if run.service.claims is not None and run.is_streamed:
        run.service.claims.add_events(run.node, 0, frames)
    return log


def _fail_claimed(
    service: ServerState, claimed: ClaimedResponse, cause: errors.ApiError | None
) -> None:
    service.responses.fail(claimed.node, "failed", cause)
    if claimed.conversation is not None:
        service.conversations.release(claimed.conversation)


async def read_stored_events(
    service: ServerState, claims: ReplicaClaims, node: int, after: int
) -> AsyncIterator[bytes]:
    """Yield the stored frames of a background response after an event, until the response has ended.

    The last events are not stored but derived from the response, so they are available even if its server
    crashed before it could store them.

    Raises:
        EventsDropped: If the response was deleted.
    """
    start = after + 1
    pauses = EVENT_POLLS.pauses()
    while True:
        stored = await service.run(claims.read_events, node, start)
        if stored is None:
            raise EventsDropped
        status, frames = stored
        if frames:
            start += len(frames)
            pauses = EVENT_POLLS.pauses()
            yield b"".join(frames)
        if status not in UNFINISHED_STATUSES:
            try:
                first = await service.run(claims.count_events, node)
                response = await service.run(service.responses.read, node)
            except LookupError:
                raise EventsDropped from None
            frames = encode_events(build_last_events(decode(response)), first)
            yield b"".join(frames[max(start - first, 0) :])
            return
        await asyncio.sleep(next(pauses))
