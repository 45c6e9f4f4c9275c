"""Background work of the page and the API: runs that continue without a connection, deletions, recorded requests.

A run is a task that sends one message and publishes events. Any number of clients can follow it from its
first event, so a page that was reloaded attaches again, and any client can stop it. It ends when its
answer is complete, when it is stopped, when its conversation is deleted, or when the server shuts down.

A deletion can be undone for a time. The conversation is hidden from lists at once. The time at which it is deleted
is in the store, by the clock of the database, so that any server on the store deletes it then, also if the server that
scheduled it was stopped or killed. A deletion that fails is tried again. If a server on SQLite shuts down, it deletes
what it has scheduled at once, because there may be no other server.

The requests that other programs send to the server of this process are recorded in the namespace of their user, so that
other users do not see them; their content is stored only if ``keep_bodies`` is set. Requests of the page are not
recorded: they are shown with their conversation.
"""

import asyncio
import secrets
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from starlette.requests import HTTPConnection
from starlette.types import Scope

from kedge._internal.json_text import decode_object, encode
from kedge.conversation import Reply
from kedge.engines.http_errors import parse_error
from kedge.engines.request_log import MAX_CODE_LENGTH, MAX_ERROR_LENGTH
from kedge.engines.responses import delete_unused_objects
from kedge.errors import KedgeError, StoreError, describe_for_client
from kedge.observe import get_logger
from kedge.server.access import CALLER_KEY
from kedge.server.practice_model.context import last_user_text
from kedge.server.request_log import RecordedRequest, log_failure
from kedge.server.sse import FollowedLog
from kedge.store import AccessToken, ConversationRow, ProxiedRequest, Store
from kedge.store.proxied_requests import MAX_PROXIED, RequestRecorder
from kedge.turns import new_id
from kedge.web.models import ModelSelector
from kedge.web.transcript import summarize_text
from kedge.wire.fields import get_text, list_objects, read_conversation_id

EventDict = dict[str, Any]
RunStatus = Literal["running", "done", "failed", "cancelled"]
MAX_FINISHED = 50
"""The number of finished runs whose events can still be read."""
MAX_FINISHED_EVENTS = 100_000
"""The events of all of them together; the oldest runs are dropped first, the newest never."""
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
    """The runs of a server: all running ones, and the last finished ones."""

    def __init__(self) -> None:
        self._running: dict[str, Run] = {}
        self._finished: deque[Run] = deque()

    def start(self, run: Run, work: Work, find_url: FindUrl) -> Run:
        """Start a run.

        Args:
            run: The run.
            work: Publishes its events, and returns the members of the last one.
            find_url: Returns the URL of what it stored, if it failed or was stopped; empty if it stored nothing.
        """
        self._running[run.id] = run
        run.task = asyncio.create_task(self._drive(run, work, find_url))
        return run

    def list(self, conversation: str) -> list[Run]:
        """Return the running runs of a conversation, in the order of their start."""
        return [run for run in self._running.values() if run.conversation == conversation]

    def get(self, conversation: str, run_id: str) -> Run | None:
        """Return a run of a conversation, running or finished."""
        runs = (*self._running.values(), *self._finished)
        return next((r for r in runs if (r.id, r.conversation) == (run_id, conversation)), None)

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
            event = {"code": type(error).__name__, "message": describe_for_client(error)}
            run.finish("failed", {"type": "error", **event, "url": await find_url(run)})
        except Exception as error:  # noqa: BLE001 - a task has no caller; followers need an end
            log_failure("internal error of a run", error)
            message = "internal error; the log has the details"
            run.finish("failed", {"type": "error", "code": "bug", "message": message, "url": ""})
        finally:
            del self._running[run.id]
            if run.status == "running":  # stopped again meanwhile
                run.finish("cancelled", {"type": "cancelled", "url": ""})
            self._retain(run)

    def _retain(self, run: Run) -> None:
        """Retain a finished run, and drop the oldest ones above the limits."""
        self._finished.append(run)
        events = sum(each.log.next_number for each in self._finished)
        while len(self._finished) > 1 and (
            len(self._finished) > MAX_FINISHED or events > MAX_FINISHED_EVENTS
        ):
            events -= self._finished.popleft().log.next_number


log = get_logger("kedge.server")

POLL_SECONDS = 30.0
"""Seconds after which a server looks for deletions that others have scheduled."""
RETRY_SECONDS = 2.0
"""Seconds after which a deletion that failed is tried again."""

Scheduled = tuple[Store, ConversationRow]


class DeletionQueue:
    """Deletes conversations when their time for undo is over."""

    def __init__(self) -> None:
        self._store: Store | None = None
        self._models: ModelSelector | None = None
        self._own: dict[int, Scheduled] = {}
        """What this server has scheduled, by the number of the conversation."""
        self._changed = asyncio.Event()
        self._is_closing = False
        self._task: asyncio.Task[None] | None = None

    async def resume(self, store: Store, models: ModelSelector | None = None) -> None:
        """From now on, also delete conversations that other servers have scheduled, and conversation objects."""
        self._store, self._models = store, models
        self._wake()

    async def schedule(self, store: Store, row: ConversationRow, seconds: float) -> None:
        """Delete a conversation after some seconds, unless this is undone."""
        if row.delete_at is None:
            at = await store.database_time() + seconds
            self._own[row.number] = store, await store.schedule_delete(row, at)
            self._wake()

    async def undo(self, store: Store, name: str) -> ConversationRow:
        """Retain a conversation that is about to be deleted.

        Raises:
            NotInStore: It is deleted already.
        """
        row = await store.schedule_delete(name, None)
        self._own.pop(row.number, None)
        return row

    async def aclose(self) -> None:
        """Stop; on SQLite, delete now what this server has scheduled."""
        self._is_closing = True
        if self._task is not None:
            self._changed.set()
            await self._task
        for store, row in list(self._own.values()):
            if store.database.dialect.name == "sqlite":
                await self._delete(store, row)

    def _wake(self) -> None:
        self._changed.set()
        if self._task is None:
            self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while not self._is_closing:
            self._changed.clear()
            pause = await self._delete_due()
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._changed.wait()

    async def _delete_due(self) -> float:
        """Delete what is due, and return the seconds until this is to be done again."""
        try:
            pauses = [await self._delete_if_due(*each) for each in await self._list_scheduled()]
        except StoreError as error:
            log.warning("scheduled deletions could not be read, which is tried again: %s", error)
            return RETRY_SECONDS
        except Exception as error:  # noqa: BLE001 - a task has no caller
            log_failure("internal error of the scheduled deletions", error)
            return POLL_SECONDS
        return min(pauses, default=POLL_SECONDS)

    async def _list_scheduled(self) -> list[Scheduled]:
        if self._store is None:
            return list(self._own.values())
        names = await self._store.namespaces(scheduled=True)
        stores = [self._store, *map(self._store.use_namespace, names)]
        return [(store, row) for store in stores for row in await store.list_scheduled()]

    async def _delete_if_due(self, store: Store, row: ConversationRow) -> float:
        """Delete a conversation if its time is over, and return the seconds until the next attempt."""
        remaining = (row.delete_at or 0.0) - await store.database_time()
        if remaining > 0:
            return min(remaining, POLL_SECONDS)
        return POLL_SECONDS if await self._delete(store, row) else RETRY_SECONDS

    async def _delete(self, store: Store, row: ConversationRow) -> bool:
        """Delete a conversation, unless that was undone; return whether there is nothing more to do."""
        try:
            is_deleted = await store.delete_scheduled(row)
        except StoreError as error:
            log.warning("a scheduled deletion failed and is tried again: %s", error)
            return False
        self._own.pop(row.number, None)
        if is_deleted:
            with suppress(StoreError):  # the next deletion tries it again
                await self._delete_objects(store)
        return True

    async def _delete_objects(self, store: Store) -> None:
        """Delete unused conversation objects; those of users are not visible to the engines of the administrator."""
        if self._models is not None and not store.namespace and not self._is_closing:
            for engine in self._models.engines:
                await delete_unused_objects(engine, store)


PAGE_HEADER = "x-kedge-page"
PAGE_KEY = secrets.token_hex(16)
"""A secret that identifies the requests of this process's page."""
_PATHS = frozenset({"/v1/responses", "/v1/chat/completions", "/v1/messages"})


class ServerRequests(RequestRecorder):
    """The requests of other programs to one server.

    Args:
        store: The store, without a namespace.
        base_url: The address of the server's API.
    """

    def __init__(self, store: Store, base_url: str) -> None:
        super().__init__(store)
        self._base_url = base_url

    @property
    def reply_bytes(self) -> int:
        """The number of bytes of each response to record."""
        return self.store.body_bytes if self.store.keep_bodies else 0

    def record(self, exchange: RecordedRequest, scope: Scope) -> None:
        """Record a finished request, if another program sent it to generate a response."""
        is_question = exchange.method == "POST" and exchange.path in _PATHS
        is_own = exchange.headers.get(PAGE_HEADER) == PAGE_KEY
        if not is_question or is_own or CALLER_KEY not in scope:  # of no known user
            return
        caller: AccessToken | None = scope[CALLER_KEY]
        self.add(_to_row(exchange, self._base_url), caller.namespace if caller else "")


def _to_row(exchange: RecordedRequest, base_url: str) -> ProxiedRequest:
    body = cast("dict[str, Any]", exchange.body) if isinstance(exchange.body, dict) else {}
    input_items = _read_input(body)
    is_list = isinstance(input_items, list)
    sent = len(cast("list[Any]", input_items)) if is_list else int(input_items is not None)
    context = exchange.context or ()
    anchor = get_text(body, "previous_response_id") or read_conversation_id(body) or ""
    stored = context[: max(len(context) - sent, 0)] if anchor else ()
    error = parse_error(exchange.error.decode(errors="replace")) if exchange.error else {}
    code = error.get("code") or str(exchange.status)
    return ProxiedRequest(
        created_at=time.time(),
        upstream=f"{base_url}{exchange.path.removeprefix('/v1')}",
        model=str(body.get("model") or ""),
        status=exchange.status,
        seconds=exchange.seconds,
        anchor=anchor,
        response_id=exchange.response_id or "",
        sent_blocks=sent,
        full_blocks=sent + len(stored),
        sent_bytes=len(exchange.raw),
        full_bytes=len(exchange.raw) + (len(encode(list(stored))) if stored else 0),
        reason="" if anchor else "new",
        is_refused=400 <= exchange.status < 500,
        error_code=code[:MAX_CODE_LENGTH] if error else "",
        error=error.get("message", "")[:MAX_ERROR_LENGTH],
        request=exchange.raw,
        response=exchange.reply,
    )


def _read_input(body: Mapping[str, Any]) -> Any:
    return body.get("input", body.get("messages"))


def read_message(request: ProxiedRequest) -> str:
    """Return the beginning of the newest user message of a request whose body is stored; empty if there is none."""
    items = _read_input(decode_object(request.request or b""))
    return summarize_text(items if isinstance(items, str) else last_user_text(list_objects(items)))


async def flush_requests(request: HTTPConnection) -> None:
    """Write the pending requests to the store, so that a list has all of them."""
    recorder: RequestRecorder | None = request.app.state.recorder
    if recorder is not None:
        await recorder.flush()


async def load_request(
    request: HTTPConnection, store: Store
) -> tuple[ProxiedRequest, list[ProxiedRequest], list[ProxiedRequest]]:
    """Return the request whose number is in a path, those that it continues, and those that continue it."""
    await flush_requests(request)
    row = await store.get_proxied(request.path_params["number"])
    return row, *find_chain(await store.list_proxied(limit=MAX_PROXIED), row)


def find_chain(
    rows: Sequence[ProxiedRequest], row: ProxiedRequest
) -> tuple[list[ProxiedRequest], list[ProxiedRequest]]:
    """Return the requests that a request continues, oldest first, and those that continue it."""
    by_response = {each.response_id: each for each in rows if each.response_id}
    path: list[ProxiedRequest] = []
    seen = {row.id}
    anchor = by_response.get(row.anchor)
    while anchor is not None and anchor.id not in seen:
        path.append(anchor)
        seen.add(anchor.id)
        anchor = by_response.get(anchor.anchor)
    later = [each for each in rows if row.response_id and each.anchor == row.response_id]
    return path[::-1], sorted(later, key=lambda each: each.id)
