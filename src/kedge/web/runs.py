"""Runs of the page and the API: turns that continue independently of a connection.

A run is a task that sends one message and publishes events. Any number of clients can follow it from its
first event, so a page that was reloaded attaches again, and any client can stop it. It ends when its
turn ends, when it is stopped, when its conversation is deleted, or when the server shuts down.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal

from kedge.server.request_log import log_failure
from kedge.server.sse import FollowedLog
from kedge.turns import new_id

if TYPE_CHECKING:
    from kedge.conversation import Reply
    from kedge.errors import KedgeError


EventDict = dict[str, Any]
RunStatus = Literal["running", "done", "failed", "cancelled"]
MAX_FINISHED = 50
"""The number of finished runs whose events can still be read."""
HEARTBEAT_SECONDS = 15.0
"""Seconds without an event after which a follower gets a heartbeat."""


class TurnRun:
    """One run: its events so far, its status and, at its end, its result.

    Args:
        conversation: The id of the conversation.
        at: The node before the question.
        text: The message that is sent, for display.
        question: The node of the question, if it is stored already.
        newest: The newest node of the tree before the run.
    """

    def __init__(
        self, conversation: str, at: int, text: str, question: int = 0, newest: int = 0
    ) -> None:
        self.id = new_id("run")
        self.conversation = conversation
        self.at = at
        self.text = text
        self.question = question
        self.newest = newest
        self.status: RunStatus = "running"
        self.started_at = time.time()
        self.reply: Reply | None = None
        self.error: KedgeError | None = None
        self.task: asyncio.Task[None] | None = None
        self._log = FollowedLog[EventDict]()

    def has_asked(self, node: int) -> bool:
        """Return whether a question belongs to this run."""
        return node == self.question or node > self.newest

    def publish(self, event: EventDict) -> None:
        """Add an event and wake the followers."""
        self._log.append([event])

    def finish(self, status: RunStatus, event: EventDict) -> None:
        """End the run with its last event."""
        self.status = status
        self.publish(event)
        self._log.finish()

    async def follow(self) -> AsyncGenerator[EventDict | None]:
        """Yield all events from the first one; None is a heartbeat."""
        async for events in self._log.follow(heartbeat_seconds=HEARTBEAT_SECONDS):
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


class RunRegistry:
    """The runs of a server: all running ones, and the last finished ones."""

    def __init__(self) -> None:
        self._running: dict[str, TurnRun] = {}
        self._finished: deque[TurnRun] = deque(maxlen=MAX_FINISHED)

    def start(self, run: TurnRun, work: Callable[[TurnRun], Awaitable[None]]) -> TurnRun:
        """Start a run; ``work`` publishes its events and finishes it."""
        self._running[run.id] = run
        run.task = asyncio.create_task(self._drive(run, work))
        return run

    def list(self, conversation: str) -> list[TurnRun]:
        """Return the running runs of a conversation, in the order of their start."""
        return [run for run in self._running.values() if run.conversation == conversation]

    def get(self, conversation: str, run_id: str) -> TurnRun | None:
        """Return a run of a conversation, running or finished."""
        runs = (*self._running.values(), *self._finished)
        return next((r for r in runs if (r.id, r.conversation) == (run_id, conversation)), None)

    async def stop_all(self, conversation: str | None = None) -> None:
        """Stop the runs of a conversation, or all of them."""
        for run in list(self._running.values()):
            if conversation in (None, run.conversation):
                await run.stop()

    async def _drive(self, run: TurnRun, work: Callable[[TurnRun], Awaitable[None]]) -> None:
        try:
            with suppress(asyncio.CancelledError):  # by ``stop``; the work has published the end
                await work(run)
        except Exception as error:  # noqa: BLE001 - a task has no caller; followers need an end
            log_failure("internal error of a run", error)
            message = "internal error; the log has the details"
            run.finish("failed", {"type": "error", "code": "bug", "message": message, "url": ""})
        finally:
            del self._running[run.id]
            self._finished.append(run)
            if run.status == "running":  # cancelled before it started
                run.finish("cancelled", {"type": "cancelled", "url": ""})
