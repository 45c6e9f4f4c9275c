"""Run a model for one request, within its deadline, until it ends; generate and store a response.

Stored responses and answers of the stateless APIs (Chat Completions, Messages), streams, background responses and
responses over a WebSocket process the output differently, but all of them are one ``Generation.run``. So all failures
while a model writes are handled here, once: an error of the model, a bug in it, the deadline, a client that
disconnects, a server that shuts down.

A response ends in exactly one way: completed or incomplete with its output stored, or failed or cancelled
without output.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from kedge._internal.json_text import encode
from kedge._internal.large_json import LARGE_BYTES
from kedge._internal.responsive import TimeSlice
from kedge.errors import StoreError
from kedge.observe import count
from kedge.server import object_forms, token_counting
from kedge.server.encrypted_content import CompactedContext, build_compaction_item
from kedge.server.errors import DATABASE_UNAVAILABLE, INTERNAL_ERROR, RESPONSE_LOST, ApiError
from kedge.server.http import get_service, respond_encoded
from kedge.server.models import ModelUsage, OutputEvent
from kedge.server.output_writer import OutputWriter, StreamEvent, count_answer, precount_output
from kedge.server.prepare import ResponseDraft, add_summary
from kedge.server.request_log import RecordedRequest, log_failure
from kedge.server.sse import DONE_FRAME, STREAM_START, BufferedSender, encode_events
from kedge.server.state import ServerState, StopStatus
from kedge.server.stop_sequences import apply_stop_sequences
from kedge.server.storage.context import EMPTY_CONTEXT, Context, LaneMemory, extend_context
from kedge.server.storage.items import has_compaction
from kedge.server.storage.responses import ResponseEntry, ResponseResult
from kedge.store.database.responses import slice_from_compaction

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kedge._internal.access_tokens import TokenReservation

MAX_QUEUE_SECONDS = 24 * 3600.0
"""Seconds for which a queued response waits for a slot."""

T = TypeVar("T")


Frames = list[bytes]
Emit = Callable[[Frames], Awaitable[None]]


class Generation(ABC):
    """One answer while a model writes it, which is the ASGI response to a request for a stream.

    It ends exactly once: complete, with an error, or stopped from outside.

    Args:
        service: The server; the generation is listed in its ``running`` until it ends.
        draft: The prepared request.
        writer: The writer that collects the output.
        response_id: The id of the response.
        recorded: The record of the request, if there is a listener.
    """

    last_frame = b""
    """The bytes that are sent after the last frame of a stream."""
    is_background = False
    """Whether the answer is generated for any number of readers, or for none."""

    def __init__(
        self,
        service: ServerState,
        draft: ResponseDraft,
        writer: OutputWriter,
        response_id: str,
        recorded: RecordedRequest | None,
    ) -> None:
        self.error: ApiError | None = None
        """The error that the model raised, if any."""
        self._on_output: Callable[[], None] | None = None
        """Called when the model has produced something."""
        self.is_complete = False
        self.is_streamed = draft.prompt.stream
        self.reservation: TokenReservation | None = None
        """The tokens that are reserved for the answer, if its caller has a limit."""
        self.service = service
        self._draft = draft
        self._writer = writer
        self._stop_status: StopStatus | None = None
        self._receive: Receive | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._is_started = False
        self._timeout: asyncio.Timeout | None = None
        self._recorded = recorded
        if recorded is not None:
            recorded.model_items = draft.prompt.ask.items
            recorded.response_id = response_id
        service.running.add(self)

    @property
    def is_cancelled(self) -> bool:
        """Whether the client is gone or has cancelled."""
        return self._stop_status == "cancelled"

    @property
    def failure(self) -> ApiError | None:
        """The error to respond with, if the answer has ended without being complete and there is a client."""
        if self.is_complete or self.is_cancelled:
            return None
        return self.error or INTERNAL_ERROR()

    @property
    def start_error(self) -> ApiError | None:
        """The error to respond with if the stream has not been opened."""
        return self.failure

    def stop(self, status: StopStatus) -> None:
        """Stop from outside, with this status."""
        self._stop_status = status
        if self._timeout is not None and not self._timeout.expired():
            self._timeout.reschedule(asyncio.get_running_loop().time())

    def end(self) -> None:
        """Release all resources. May be called more than once."""
        self.service.running.discard(self)
        self._receive = None
        self._on_output = None
        if self._watcher is not None:
            self._watcher.cancel()
            self._watcher = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send every frame of the stream, or raise the error of a model that failed before its first output."""
        try:
            async with BufferedSender(send, STREAM_START, self._draft.model.grace) as outbox:
                self._on_output = outbox.release
                await self.run(outbox.put, receive)
                if self.start_error is None:
                    outbox.release()
        finally:
            self.end()
        if self.start_error is not None and not outbox.is_released:
            raise self.start_error
        await send({"type": "http.response.body", "body": self.last_frame, "more_body": False})

    async def run(
        self, emit: Emit, receive: Receive | None = None, slots: asyncio.Semaphore | None = None
    ) -> None:
        """Run the model until the answer ends, and settle it.

        Args:
            emit: Called with the frames of a stream.
            receive: Receives the messages of the client, who stops the run if it disconnects.
            slots: Run when one of these slots is free.
        """
        self._receive = receive
        seconds = self.service.settings.limits.answer_seconds
        try:
            if slots is None:
                await self._limit(self._write(emit), seconds)
            elif await self._limit(slots.acquire(), MAX_QUEUE_SECONDS):
                try:
                    await self._limit(self._write(emit), seconds)
                finally:
                    slots.release()
        except ApiError as error:
            self.error = error
        except StoreError as error:
            log_failure("the database failed", error)
            self.error = DATABASE_UNAVAILABLE(problem=error.problem)
        except Exception as error:  # noqa: BLE001 - no failure of a model may stop the server
            log_failure("the model failed", error)
        finally:
            self.end()

        if self.reservation is not None:
            await self._settle_tokens(self.reservation)
        # A client that has cancelled has left, unless the answer is read by others as well.
        has_reader = self.is_background or self.is_complete or not self.is_cancelled
        if self.is_streamed and has_reader and not self._is_left_to_others:
            await emit(self._finish())

    async def _limit(self, work: Coroutine[Any, Any, T], seconds: float) -> T | None:
        """Run a coroutine until its time is over, or the generation is stopped; return its result, or None.

        If it waits, ``_handle_wait`` is called in the next turn of the loop. Most requests are answered in one turn.
        """
        if self._stop_status is not None:
            seconds = 0.0
        waiting = asyncio.get_running_loop().call_soon(self._handle_wait)
        timeout = asyncio.timeout(seconds)
        self._timeout = timeout
        try:
            async with timeout:
                return await work
        except TimeoutError:
            if self._stop_status is None and not timeout.expired():
                raise  # an error of the model, such as of its own connection
            return None
        finally:
            waiting.cancel()
            self._timeout = None

    async def _settle_tokens(self, reservation: "TokenReservation") -> None:
        """Count the tokens of the answer, also of a partial one: leaving early must not evade a limit."""
        self.reservation = None
        if self._is_left_to_others:
            return
        used = 0
        if self._is_started:
            self._writer.close_open_item()
            await precount_output(self._writer)
            used = self._count_usage().total
            if not self.is_complete:  # a model may have reported its usage before it wrote more
                used = max(used, count_answer(self._writer, self._draft.usage).total)
        await self.service.access.settle(reservation, used)

    async def _write(self, emit: Emit) -> None:
        """Emit the frames of the answer as it is written, then record the answer."""
        self._is_started = True
        await self._start(emit)
        if not self._draft.skip_model:
            await self._run_model(emit)
        await precount_output(self._writer)
        has_expired = self._timeout is not None and self._timeout.expired()
        if self._stop_status is None and not has_expired:
            await self._complete()
            self.is_complete = True

    async def _run_model(self, emit: Emit) -> None:
        """Write what the model says, up to the first stop sequence, and emit the frames of a stream."""
        time_slice = await TimeSlice.begin()  # a model may always have more to say
        prompt = self._draft.prompt
        answer = self._draft.model.answer(prompt)
        pieces = answer
        if prompt.stop:
            pieces = apply_stop_sequences(answer, prompt.stop)
        try:
            async for piece in pieces:
                if self._on_output is not None:
                    self._on_output()
                events = self._writer.feed(piece)
                if self.is_streamed:
                    await emit(self._render(events, piece))
                await time_slice.share()
        finally:
            await _stop_model(answer)

    def _handle_wait(self) -> None:
        """Handle the first time that the generation waits."""
        if self._receive is not None:
            watching = self._watch_client(self._receive)
            self._watcher = asyncio.get_running_loop().create_task(watching)

    async def _watch_client(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.stop("cancelled")

    @property
    def _is_left_to_others(self) -> bool:
        """Whether another server continues this answer."""
        return False

    def _count_usage(self) -> ModelUsage:
        """Return the usage that the model reported, or the tokens of the request and the counted answer."""
        return self._writer.usage or count_answer(self._writer, self._draft.usage)

    async def _complete(self) -> None:  # noqa: B027 - most answers are not stored
        """Record the complete answer."""

    @abstractmethod
    async def _start(self, emit: Emit) -> None:
        """Emit the frames that open a stream, and prepare what the model needs."""

    @abstractmethod
    def _render(self, events: list[StreamEvent], piece: OutputEvent) -> Frames:
        """Return the frames for a piece of output, which are these events of the Responses API."""

    @abstractmethod
    def _finish(self) -> Frames:
        """Return the frames that end the stream: the end of a complete answer, or the failure."""

    @abstractmethod
    def serialize(self) -> bytes:
        """Return the complete answer as JSON."""


async def _stop_model(answer: AsyncIterator[OutputEvent]) -> None:
    """Stop the model that writes an answer; an iterator without ``aclose`` has nothing to stop."""
    aclose = getattr(answer, "aclose", None)
    if aclose is not None:
        await aclose()


async def _discard(_: object) -> None:
    """Emit nothing: the answer is not streamed."""


async def respond(request: Request, run: Generation) -> Any:
    """Respond to a request with its answer, complete or as a stream.

    Raises:
        ApiError: If there is a client, but no complete answer.
    """
    if run.is_streamed:
        return run
    await run.run(_discard, request.receive)
    if run.failure is not None:
        raise run.failure
    return respond_encoded(run.serialize() if run.is_complete else b"")


async def respond_stateless(
    request: Request, draft: ResponseDraft, build_run: Callable[[], Generation]
) -> Any:
    """Reserve the tokens of a request and generate its response, complete or as a stream."""
    service = get_service(request)
    reservation = await service.reserve_tokens(draft.usage.input, draft.prompt.max_tokens)
    run = build_run()
    run.reservation = reservation
    return await respond(request, run)


class StoredState(Enum):
    """What the database contains of a response, from its request until it is settled.

    A response that is not stored remains ``NOTHING``.
    """

    NOTHING = auto()
    """No row: the response becomes one when it is complete, or when its model makes the server wait."""
    QUEUED = auto()
    """A row of a background response that waits for a slot."""
    IN_PROGRESS = auto()
    """A row of a response whose model runs."""
    SETTLED = auto()
    """The row with its result; or the run has ended, so nothing more is stored by it."""


UNSETTLED_STATES = frozenset({StoredState.QUEUED, StoredState.IN_PROGRESS})
"""States with a row that still needs a result."""


class ResponseRun(Generation):
    """One response while it is written.

    Args:
        service: The server.
        draft: The prepared request.
        unstored: The unstored responses of the connection, if it is a WebSocket.
        recorded: The record of the request, if there is a listener.
        first_event: The number of the first event, if another server did not finish the response. Its conversation is
            already locked.

    Raises:
        ApiError: If the conversation is locked for another response.
    """

    last_frame = DONE_FRAME

    def __init__(
        self,
        service: ServerState,
        draft: ResponseDraft,
        unstored: LaneMemory | None = None,
        recorded: RecordedRequest | None = None,
        first_event: int | None = None,
    ) -> None:
        history = draft.history
        self._locked = history.conversation
        if self._locked is not None and first_event is None:
            service.conversations.acquire(self._locked, history.node)
        self.id: str = draft.request_fields["id"]
        super().__init__(service, draft, _build_writer(service, draft), self.id, recorded)
        self.is_background = bool(draft.request_fields["background"])
        self.node = service.nodes.keys.parse_node(draft.key)
        self._unstored = unstored
        self._entry = _build_entry(draft, self.node, is_background=self.is_background)
        self._stored_state = StoredState.NOTHING
        self._result_fields: Mapping[str, Any] = object_forms.IN_PROGRESS_FIELDS
        if first_event is not None:
            self._mark_queued()
        self._response_json = b""
        self._next_event = first_event or 0
        self._is_lost = False
        self.before_settle: Callable[[], None] | None = None
        """Called before the result of the response is stored."""

    def enqueue(self) -> Frames:
        """Store the response as queued and return the first frames of its stream."""
        self._mark_queued()
        self._insert()
        return self._encode_states("created", "queued")

    async def _start(self, emit: Emit) -> None:
        """Store the response before the client has its id.

        Until then the client cannot request the response, so a response that is not streamed is stored as in progress
        only if its model makes the server wait.
        """
        if self._stored_state is StoredState.SETTLED:
            return  # cancelled while it was queued
        # Each state is set before a wait, in which the response may be cancelled.
        if self._stored_state is StoredState.QUEUED:
            self._stored_state = StoredState.IN_PROGRESS
            self._result_fields = object_forms.IN_PROGRESS_FIELDS
            await self.service.run(self.service.responses.mark_in_progress, self.node)
            await emit(self._encode_states("in_progress"))
        elif self.is_streamed:
            if self._stored_state is StoredState.NOTHING and self._draft.store:
                self._stored_state = StoredState.IN_PROGRESS
                await self.service.run(self._insert, is_long=self._draft.is_large)
            await emit(self._encode_states("created", "in_progress"))
        if self._draft.compacted is not None:
            await emit(await self._compact(self._draft.compacted))

    def _mark_queued(self) -> None:
        self._stored_state = StoredState.QUEUED
        self._result_fields = object_forms.QUEUED_FIELDS

    async def _compact(self, compacted: CompactedContext) -> Frames:
        """Add the compaction of the context to the output, with the model's summary."""
        draft = await add_summary(self._draft, compacted)
        self._draft = draft
        if self._recorded is not None:
            self._recorded.model_items = draft.prompt.ask.items
        id = object_forms.make_item_id("compaction", draft.key, self._writer.number)
        items = (draft.compacted or compacted).items
        item = build_compaction_item(self.service.cipher, id, items)
        events = self._writer.add_item(item, "response.compaction.compacting")
        return self._render(events) if self.is_streamed else []

    def _render(self, events: list[StreamEvent], piece: OutputEvent | None = None) -> Frames:
        frames = encode_events(events, self._next_event)
        self._next_event += len(frames)
        return frames

    def _encode_states(self, *names: str) -> Frames:
        if not self.is_streamed:
            return []
        response = self._build_response([])
        return self._render([{"type": f"response.{name}", "response": response} for name in names])

    def serialize(self) -> bytes:
        """Return the complete response as JSON."""
        return self._response_json

    @property
    def start_error(self) -> ApiError | None:
        """The error of the model; without one, the response itself says that it has failed."""
        return self.error

    @property
    def _failure(self) -> tuple[StopStatus, ApiError | str | None]:
        """The status of a response that is not complete, and the reason."""
        if self._stop_status is not None:
            return self._stop_status, object_forms.STOPPED_MESSAGE
        return "failed", self.error

    def snapshot(self) -> bytes:
        """Return a response that has not been generated yet as JSON."""
        return encode(self._build_response([]))

    def cancel(self) -> None:
        """Cancel the response on request of its client: it is cancelled when this returns."""
        self.stop("cancelled")
        self.end()

    def end(self) -> None:
        """Release all resources; a response that is not settled by now has failed."""
        if self in self.service.running:
            self._count_response()
        super().end()
        is_unsettled = self._stored_state in UNSETTLED_STATES
        self._stored_state = StoredState.SETTLED
        if is_unsettled and self._is_left_to_others:
            self._locked = None  # the lock belongs to the response
        elif is_unsettled:
            if self.before_settle is not None:
                self.before_settle()
            status, cause = self._failure
            self.service.submit(self._store_failure, status, cause, is_long=self._draft.is_large)
        elif self._locked is not None:
            self.service.submit(self._unlock, is_long=self._draft.is_large)

    def _count_response(self) -> None:
        """Count the response for the metrics, by what it continues and how it has ended."""
        history = self._draft.history
        memory = "nothing"
        if history.conversation is not None:
            memory = "conversation"
        elif history.node is not None:
            memory = "response"
        status: str = self._failure[0]
        if self.is_complete:
            status = self._result_fields["status"]
        count("server_responses_total", memory=memory, status=status)

    def _store_failure(self, status: str, cause: ApiError | str | None) -> None:
        """Unlock the conversation, and then store the failure of the response."""
        self._unlock()
        self.service.responses.fail(self.node, status, cause)

    @property
    def _is_left_to_others(self) -> bool:
        """Whether another server continues this response, because this one is stopping or was too slow."""
        is_left = self._stop_status == "failed" or self._is_lost
        return is_left and self.is_background and self.service.claims is not None

    def _handle_wait(self) -> None:
        super()._handle_wait()
        # If it took long, or a round trip, this would be useless for the client.
        is_stored = self._stored_state is not StoredState.NOTHING
        if is_stored or self._draft.is_large or not self.service.is_database_free:
            return
        # The loop calls this method, so nothing else would report an error.
        try:
            self.begin()
        except ApiError as error:
            self._abandon(error)
        except StoreError as error:
            log_failure("the database failed", error)
            self._abandon(DATABASE_UNAVAILABLE(problem=error.problem))

    def _abandon(self, error: ApiError) -> None:
        """Stop the model, whose answer could not be stored."""
        self.error = error
        self.stop("failed")

    def begin(self) -> None:
        """Store the response as in progress, before its client receives the id."""
        if self._draft.store:
            self._stored_state = StoredState.IN_PROGRESS
            self._insert()

    def _insert(self) -> None:
        barrier = has_compaction(self._draft.input)
        is_queued = self._stored_state is StoredState.QUEUED
        self.service.responses.begin(self._entry, barrier=barrier, queued=is_queued)

    async def _complete(self) -> None:
        draft = self._draft
        writer = self._writer
        self._result_fields = object_forms.build_finished_fields(
            reason=writer.incomplete_reason,
            now=int(self.service.clock()),
            usage=object_forms.build_usage(self._count_usage()),
        )
        if writer.reasoning_texts:
            self.service.remember_reasoning(writer.items, writer.reasoning_texts)

        result_json = encode(self._result_fields)
        output = encode(writer.items)
        if draft.store:
            if self.before_settle is not None:
                self.before_settle()
            is_long = draft.is_large or len(output) > LARGE_BYTES
            await self.service.run(self._store_result, result_json, output, is_long=is_long)
        if self._unstored is not None:
            context = None if draft.store else self._build_context(len(output))
            self._unstored.memory.store(self._unstored.lane, self.id, context)
        request_json = self._entry.request_json
        self._response_json = object_forms.join_response(request_json, result_json, output)

    def _store_result(self, result_json: bytes, output: bytes) -> None:
        """Store the result; the conversation is unlocked with it, because any client may continue it then."""
        entry = self._entry
        is_new = self._stored_state is StoredState.NOTHING
        try:
            context = self._build_context(len(entry.input) + len(output))
            result = ResponseResult(
                status=self._result_fields["status"],
                result_json=result_json,
                output=output,
                barrier=has_compaction(context.items),
                tokens=context.own_tokens,
            )
            is_stored = self.service.responses.settle(entry, result, is_new=is_new)
        except BaseException:
            self._unlock()
            raise
        self._stored_state = StoredState.SETTLED
        self._locked = None
        if is_stored:
            self.service.nodes.cache.put(self.node, entry.parent, context)
        elif self.service.claims is not None:
            self._is_lost = True
            raise RESPONSE_LOST()

    def _unlock(self) -> None:
        """Unlock the conversation, unless that was done before."""
        if self._locked is not None:
            self.service.conversations.release(self._locked)
            self._locked = None

    def _build_context(self, size: int) -> Context:
        """Return the context that ends with this response, which adds ``size`` bytes to it."""
        draft = self._draft
        items = [*draft.input, *self._writer.items]
        if has_compaction(items):
            retained = slice_from_compaction(items)
            model_items = self.service.expand_items(retained)
            tokens = token_counting.count_items(model_items)
            return extend_context(EMPTY_CONTEXT, retained, model_items, tokens, size)

        history = draft.history.context
        tokens = draft.new_tokens + sum(self._writer.count_each())
        if not (draft.history.in_memory and draft.store):
            return extend_context(history, items, items, tokens, size)

        # Only a connection has the history, so the row of this response contains all of it.
        all_items = [*history.list_items(), *items]
        all_model_items = [*history.list_model_items(), *items]
        return extend_context(
            EMPTY_CONTEXT, all_items, all_model_items, history.tokens + tokens, size
        )

    def _build_response(self, output: Sequence[Any]) -> dict[str, Any]:
        return {**self._draft.request_fields, **self._result_fields, "output": output}

    def _finish(self) -> Frames:
        if self.is_complete:
            return self._render(build_last_events(self._build_response(self._writer.items)))
        status, cause = self._failure
        self._result_fields = object_forms.build_failed_fields(status, cause)
        return self._render(build_last_events(self._build_response([])))


def _build_writer(service: ServerState, draft: ResponseDraft) -> OutputWriter:
    """Return the writer of the output items, which are numbered after the items of the request."""
    body = draft.prompt.body
    reasoning: Mapping[str, Any] = body.get("reasoning") or {}
    encrypt: Callable[[Any], str] | None = None
    if service.cipher.is_available:
        encrypt = service.cipher.encrypt
    return OutputWriter(
        draft.key,
        number=len(draft.input),
        encrypt=encrypt,
        encrypt_reasoning=service.encrypts_reasoning(body),
        show_summary=bool(reasoning.get("summary") or reasoning.get("generate_summary")),
    )


def _build_entry(draft: ResponseDraft, node: int, *, is_background: bool) -> ResponseEntry:
    """Return what is stored of a response before its model runs."""
    body: bytes | None = None
    if is_background or draft.idempotency_key is not None:
        # Another server may have to generate the response; a repeated request must be the same.
        body = encode(draft.prompt.body)
    return ResponseEntry(
        node=node,
        key=draft.key,
        parent=draft.history.node,
        conversation=draft.history.conversation,
        request_json=encode(draft.request_fields),
        input=draft.input_json,
        body=body,
        idempotency_key=draft.idempotency_key,
        background=is_background,
    )


def build_repeated_events(response: dict[str, Any]) -> list[StreamEvent]:
    """Return the events of a finished response whose request was repeated, with each item in one piece."""
    started: dict[str, Any] = {**response, **object_forms.IN_PROGRESS_FIELDS, "output": []}
    events: list[StreamEvent] = [
        {"type": "response.created", "response": started},
        {"type": "response.in_progress", "response": started},
    ]
    for index, item in enumerate(response["output"]):
        event: StreamEvent = {"output_index": index, "item": item}
        events.append({"type": "response.output_item.added", **event})
        events.append({"type": "response.output_item.done", **event})
    return events + build_last_events(response)


def build_last_events(response: dict[str, Any]) -> list[StreamEvent]:
    """Return the events that end the stream of a response."""
    if response["status"] not in {"failed", "cancelled"}:
        return [{"type": f"response.{response['status']}", "response": response}]
    failed: StreamEvent = {"type": "response.failed", "response": response}
    if response["status"] == "cancelled":
        return [failed]  # the API has no event for a cancelled response
    return [{"type": "error", **response["error"], "param": None}, failed]
