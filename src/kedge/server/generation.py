"""Run a model for one request, within its deadline, until it ends.

Stored responses (``response_run``) and those of the stateless APIs (Chat Completions, Messages), streams, background
responses and those over a WebSocket process the output differently, but all of them are one ``Generation.run``. So all
failures while a model writes are handled here, once: an error of the model, a bug in it, the deadline, a client that
disconnects, a server that shuts down.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.requests import Request
from starlette.types import Receive

from kedge.errors import StoreError
from kedge.server.errors import DATABASE_UNAVAILABLE, INTERNAL_ERROR, ApiError
from kedge.server.http import get_service, respond_encoded
from kedge.server.models import ModelUsage, OutputEvent, apply_stop_sequences
from kedge.server.output_writer import OutputWriter, StreamEvent, count_answer, precount_output
from kedge.server.prepare import ResponseDraft
from kedge.server.request_log import RECORD_KEY, RecordedRequest, log_failure
from kedge.server.sse import EventStream
from kedge.server.state import ServerState

if TYPE_CHECKING:
    from kedge.security.access_tokens import TokenReservation

MAX_QUEUE_SECONDS = 24 * 3600.0
"""Seconds for which a queued response waits for a slot."""

T = TypeVar("T")


class Deadline:
    """The end of a coroutine after a time, or when it is cancelled from outside.

    Args:
        seconds: The maximum time of the coroutine.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._is_cancelled = False
        self._timeout: asyncio.Timeout | None = None

    @property
    def cancelled(self) -> bool:
        """Whether the time is over, or ``cancel`` was called."""
        return self._is_cancelled or (self._timeout is not None and self._timeout.expired())

    async def run(
        self,
        work: Coroutine[Any, Any, T],
        on_wait: Callable[[], None] | None = None,
        seconds: float | None = None,
    ) -> T | None:
        """Run a coroutine.

        Args:
            work: The coroutine.
            on_wait: Called once if the coroutine waits, in the next turn of the loop. Most requests are answered
                within one turn.
            seconds: The maximum time of this coroutine, if it is another one.

        Returns:
            Its result, or None if the deadline ended it.
        """
        waiting = asyncio.get_running_loop().call_soon(on_wait) if on_wait is not None else None
        try:
            limit = self._seconds if seconds is None else seconds
            async with asyncio.timeout(0 if self._is_cancelled else limit) as self._timeout:
                return await work
        except TimeoutError:
            if not self.cancelled:
                raise
            return None
        finally:
            if waiting is not None:
                waiting.cancel()
            self._is_cancelled, self._timeout = self.cancelled, None

    def cancel(self) -> None:
        """End the coroutine now, or as soon as it waits."""
        if self._timeout is not None and not self.cancelled:
            self._timeout.reschedule(asyncio.get_running_loop().time())
        self._is_cancelled = True


Frames = list[bytes]
Emit = Callable[[Frames], Awaitable[None]]


class Generation(ABC):
    """One answer while a model writes it.

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
        self.grace = draft.model.grace
        """Seconds for which the start of a stream waits for the first output."""
        self.error: ApiError | None = None
        """The error that the model raised, if any."""
        self.has_output = False
        """Whether the model has produced anything."""
        self.is_complete = False
        self.is_streamed = draft.prompt.stream
        self.reservation: TokenReservation | None = None
        """The tokens that are reserved for the answer, if its caller has a limit."""
        self.service = service
        self._draft = draft
        self._writer = writer
        self._stop_status: str | None = None
        self._receive: Receive | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._is_started = False
        self._deadline = Deadline(service.settings.limits.answer_seconds)
        self._recorded = recorded
        if recorded is not None:
            recorded.model_items, recorded.response_id = draft.prompt.ask.items, response_id
        service.running.add(self)

    @property
    def is_cancelled(self) -> bool:
        """Whether the client is gone or has cancelled."""
        return self._stop_status == "cancelled"

    @property
    def start_error(self) -> ApiError | None:
        """The error to respond with if the stream has not been opened."""
        return self.error

    def stop(self, status: str) -> None:
        """Stop from outside: as ``failed`` if the server shuts down, else as ``cancelled``."""
        self._stop_status = status
        self._deadline.cancel()

    def end(self) -> None:
        """Release all resources. May be called more than once."""
        self.service.running.discard(self)
        self._receive = None
        if self._watcher is not None:
            self._watcher.cancel()
            self._watcher = None

    async def run(
        self,
        emit: Emit,
        receive: Receive | None = None,
        slots: asyncio.Semaphore | None = None,
    ) -> None:
        """Run the model until the answer ends, and settle it.

        Args:
            emit: Called with the frames of a stream.
            receive: Receives the messages of the client, who stops the run if it disconnects.
            slots: Run when one of these slots is free.
        """
        self._receive = receive
        try:
            if slots is None:
                await self._deadline.run(self._write(emit), self._handle_wait)
            elif await self._deadline.run(slots.acquire(), seconds=MAX_QUEUE_SECONDS):
                try:
                    await self._deadline.run(self._write(emit), self._handle_wait)
                finally:
                    slots.release()
        except ApiError as error:
            self.error = error
        except StoreError as error:
            log_failure("the database failed", error)
            self.error = DATABASE_UNAVAILABLE()
        except Exception as error:  # noqa: BLE001 - no failure of a model may stop the server
            log_failure("the model failed", error)
        finally:
            self.end()
        if self.reservation is not None:
            await self._settle_tokens(self.reservation)
        has_reader = self.is_background or self.is_complete or not self.is_cancelled
        if self.is_streamed and has_reader and not self._is_left_to_others:
            await emit(self._finish())

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
            prompt = self._draft.prompt
            pieces, stops = self._draft.model.answer(prompt), prompt.stop
            try:
                async for piece in apply_stop_sequences(pieces, stops) if stops else pieces:
                    self.has_output = True
                    events = self._writer.feed(piece)
                    if self.is_streamed:
                        await emit(self._render(piece, events))
            finally:
                if (aclose := getattr(pieces, "aclose", None)) is not None:
                    await aclose()  # stops the model
        await precount_output(self._writer)
        if not self._deadline.cancelled:
            await self._complete()
            self.is_complete = True

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
        """Return the usage that the model reported, or that of the request and the counted answer."""
        return self._writer.usage or count_answer(self._writer, self._draft.usage)

    async def _complete(self) -> None:  # noqa: B027 - most answers are not stored
        """Record the complete answer."""

    @abstractmethod
    async def _start(self, emit: Emit) -> None:
        """Emit the frames that open a stream, and prepare what the model needs."""

    @abstractmethod
    def _render(self, piece: OutputEvent, events: list[StreamEvent]) -> Frames:
        """Return the frames for a piece of output, which are these events of the Responses API."""

    @abstractmethod
    def _finish(self) -> Frames:
        """Return the frames that end the stream: the end of a complete answer, or the failure."""

    @abstractmethod
    def serialize(self) -> bytes:
        """Return the complete answer as JSON."""


async def _discard(_: object) -> None:
    """Emit nothing: the answer is not streamed."""


async def respond(request: Request, run: Generation) -> Any:
    """Respond to a request with its answer, complete or as a stream.

    Raises:
        ApiError: If there is a client, but no complete answer.
    """
    if run.is_streamed:
        return EventStream(run)
    await run.run(_discard, request.receive)
    if not run.is_complete and not run.is_cancelled:
        raise run.error or INTERNAL_ERROR()
    return respond_encoded(run.serialize() if run.is_complete else b"")


class StatelessRun(Generation):
    """One response of a stateless API while it is written. It is not stored.

    Args:
        request: The request.
        draft: The prepared request.
        writer: The writer that collects the output.
        response_id: The id of the response.
    """

    def __init__(
        self, request: Request, draft: ResponseDraft, writer: OutputWriter, response_id: str
    ) -> None:
        service, recorded = get_service(request), request.scope.get(RECORD_KEY)
        super().__init__(service, draft, writer, response_id, recorded)

    @property
    def start_error(self) -> ApiError | None:
        """The error to respond with if the stream has not been opened."""
        failed = not self.is_complete and not self.is_cancelled
        return (self.error or INTERNAL_ERROR()) if failed else None

    async def _start(self, emit: Emit) -> None:
        if self.is_streamed:
            await emit([self._encode_start()])

    def _finish(self) -> Frames:
        if self.is_complete:
            return [self._encode_end(self._count_usage())]
        return [self._encode_error(self.error or INTERNAL_ERROR())]

    @abstractmethod
    def _encode_start(self) -> bytes:
        """Return the frames that open the stream."""

    @abstractmethod
    def _encode_end(self, usage: ModelUsage) -> bytes:
        """Return the frames that end the stream of a complete answer."""

    @abstractmethod
    def _encode_error(self, error: ApiError) -> bytes:
        """Return the frames that end the stream with an error."""


async def respond_stateless(
    request: Request, draft: ResponseDraft, build_run: Callable[[], StatelessRun]
) -> Any:
    """Reserve the tokens of a request and generate its response, complete or as a stream."""
    service = get_service(request)
    reservation = await service.reserve_tokens(draft.usage.input, draft.prompt.max_tokens)
    run = build_run()
    run.reservation = reservation
    return await respond(request, run)
