"""Runs of the page and the API, which continue without a connection.

A run is a task that sends one message and publishes events. Any number of clients can follow it from its
first event, so a page that was reloaded attaches again, and any client can stop it. It ends when its
answer is complete, when it is stopped, when its conversation is deleted, or when the server shuts down.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from kedge.conversation import Reply
from kedge.errors import KedgeError, describe_for_client
from kedge.server.request_log import log_failure
from kedge.server.sse import FollowedLog
from kedge.turns import new_id

EventDict = dict[str, Any]
RunStatus = Literal["running", "done", "failed", "cancelled"]
MAX_FINISHED = 50
MAX_FINISHED_EVENTS = 100_000
HEARTBEAT_SECONDS = 15.0
"""Seconds without an event after which a follower gets a heartbeat."""


@dataclass(eq=False)
class Run:
    """One run: its events so far, its status and, at its end, its result.

    Args:
        conversation: The id of the conversation.
        at: The node before the question.
        message: The message that is sent, for display.
        question: The node of the question, if it is stored already.
        newest: The newest node of the tree before the run.
    """

    conversation: str
    at: int
    message: str
    question: int = 0
    newest: int = 0
    id: str = field(default_factory=lambda: new_id("run"))
    status: RunStatus = "running"
    started_at: float = field(default_factory=time.time)
    reply: Reply | None = None
    error: KedgeError | None = None
    task: "asyncio.Task[None] | None" = None
    log: FollowedLog[EventDict] = field(default_factory=FollowedLog[EventDict])

    def has_asked(self, node: int) -> bool:
        """Return whether a question belongs to this run."""
        return node == self.question or node > self.newest

    def publish(self, event: EventDict) -> None:
        """Add an event and wake the followers."""
        self.log.append([event])

    def finish(self, status: RunStatus, event: EventDict) -> None:
        """End the run with its last event."""
        self.status = status
        self.publish(event)
        self.log.finish()

    async def follow(self) -> AsyncGenerator[EventDict | None]:
        """Yield all events from the first one; None is a heartbeat."""
        async for events in self.log.follow(heartbeat_seconds=HEARTBEAT_SECONDS):
            for event in events or (None,):
                yield event

    async def wait(self) -> None:
        """Wait until the run has ended."""
        if self.task is not None:
            await asyncio.wait([self.task])

    async def stop(self) -> None:
        """Stop the run, and wait until its partial answer is stored."""
        if self.task is not None:
            self.task.cancel()
        await self.wait()


Work = Callable[[Run], Awaitable[EventDict]]
FindUrl = Callable[[Run], Awaitable[str]]


class RunRegistry:
    """The runs of a server: all active runs, and the last finished ones.

    Args:
        max_finished: The number of finished runs whose events can still be read.
        max_finished_events: The number of events of all finished runs. The oldest runs are dropped first, the newest
            never.
    """

    def __init__(
        self, max_finished: int = MAX_FINISHED, max_finished_events: int = MAX_FINISHED_EVENTS
    ) -> None:
        self._max_finished = max_finished
        self._max_finished_events = max_finished_events
        self._running: dict[str, Run] = {}
        self._finished: deque[Run] = deque()

    def start(self, run: Run, work: Work, find_url: FindUrl) -> Run:
        """Start a run.

        Args:
            run: The run.
            work: Publishes the events of the run, and returns the members of the last one.
            find_url: Returns the URL of what a failed or stopped run stored; empty if it stored nothing.
        """
        self._running[run.id] = run
        run.task = asyncio.create_task(self._drive(run, work, find_url))
        return run

    def list(self, conversation: str) -> list[Run]:
        """Return the running runs of a conversation, in the order of their start."""
        return [run for run in self._running.values() if run.conversation == conversation]

    def get(self, conversation: str, run_id: str) -> Run | None:
        """Return a run of a conversation, running or finished."""
        for run in (*self._running.values(), *self._finished):
            if run.id == run_id and run.conversation == conversation:
                return run
        return None

    async def stop_all(self, conversation: str | None = None) -> None:
        """Stop the runs of a conversation, or all of them."""
        for run in list(self._running.values()):
            if conversation in (None, run.conversation):
                await run.stop()

    async def _drive(self, run: Run, work: Work, find_url: FindUrl) -> None:
        """Run the work; the last event is ``done``, ``cancelled`` or ``error``."""
        try:
            run.finish("done", {"type": "done", **await work(run)})
        except asyncio.CancelledError:  # by ``stop``
            run.finish("cancelled", {"type": "cancelled", "url": await find_url(run)})
        except KedgeError as error:
            run.error = error
            message = describe_for_client(error)
            url = await find_url(run)
            run.finish("failed", _build_error(type(error).__name__, message, url))
        except Exception as error:  # noqa: BLE001 - a task has no caller; followers need an end
            log_failure("internal error of a run", error)
            run.finish("failed", _build_error("bug", "internal error; the log has the details"))
        finally:
            del self._running[run.id]
            if run.status == "running":  # stopped again meanwhile
                run.finish("cancelled", {"type": "cancelled", "url": ""})
            self._retain(run)

    def _retain(self, run: Run) -> None:
        """Retain a finished run, and drop the oldest ones above the limits."""
        self._finished.append(run)
        event_count = sum(finished.log.next_number for finished in self._finished)
        while len(self._finished) > 1 and (
            len(self._finished) > self._max_finished or event_count > self._max_finished_events
        ):
            event_count -= self._finished.popleft().log.next_number


def _build_error(code: str, message: str, url: str = "") -> EventDict:
    """Return the last event of a run that failed."""
    return {"type": "error", "code": code, "message": message, "url": url}
