"""Run a model for one request, within its deadline, until it ends.

Stored responses (``response_run``) and those of the stateless APIs (Chat Completions, Messages), streams, background
responses and those over a WebSocket process the output differently, but all of them are one ``Generation.run``. So all
failures while a model writes are handled here, once: an error of the model, a bug in it, the deadline, a client that
disconnects, a server that shuts down.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from starlette.requests import Request

from kedge.errors import StoreError
from kedge.server.errors import DATABASE_UNAVAILABLE, INTERNAL_ERROR, ApiError
from kedge.server.http import get_recorded_request, get_service, respond_encoded
from kedge.server.item_forms import (
    Item,
    measure_texts,
    new_unstored_key,
    normalize_items,
    precount,
)
from kedge.server.models import Model, ModelUsage, OutputEvent, Prompt, apply_stop_sequences
from kedge.server.output_writer import OutputWriter, count_answer, count_usage, precount_output
from kedge.server.prepare import (
    EMPTY_HISTORY,
    build_model_input,
    build_prompt,
    read_prompt_cache,
    truncate_to_window,
)
from kedge.server.request_log import log_failure
from kedge.server.sse import DisconnectWatcher, EventStream
from kedge.server.state import ServerState
from kedge.server.storage.context import EMPTY_CONTEXT
from kedge.text.json_text import encode

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
OnWait = Callable[[], None]


class Generation(ABC):
    """One answer while a model writes it.

    It ends exactly once: complete, with an error, or stopped from outside.

    Args:
        service: The server; the generation is listed in its ``running`` until it ends.
        model: The model to run, or None to produce an answer without one.
        prompt: The request to the model.
        writer: The writer that collects the output.
        usage: The usage before the first token of the answer.
    """

    def __init__(
        self,
        service: ServerState,
        model: Model | None,
        prompt: Prompt,
        writer: OutputWriter,
        usage: ModelUsage,
    ) -> None:
        self.grace = 0.0 if model is None else model.grace
        """Seconds for which the start of a stream waits for the first output."""
        self.error: ApiError | None = None
        """The error that the model raised, if any."""
        self.has_output = False
        """Whether the model has produced anything."""
        self.is_complete = False
        self.is_streamed = prompt.stream
        self.reservation: TokenReservation | None = None
        """The tokens that are reserved for the answer, if its caller has a limit."""
        self._service = service
        self._model = model
        self._prompt = prompt
        self._writer = writer
        self._input_usage = usage
        self._stop_status: str | None = None
        self._on_wait: OnWait | None = None
        self._is_started = False
        self._deadline = Deadline(service.settings.limits.answer_seconds)
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
        self._service.running.discard(self)
        self._on_wait = None  # its object may refer to this one

    async def generate(self, on_wait: OnWait) -> bytes | None:
        """Run the model without streaming; ``on_wait`` is called the first time that this waits.

        Returns:
            The complete answer as JSON, or None if there is no client left to read it.

        Raises:
            ApiError: If there is a client, but no complete answer.
        """
        await self.run(_discard, on_wait)
        if not self.is_complete and not self.is_cancelled:
            raise self.error or INTERNAL_ERROR()
        return self._serialize() if self.is_complete else None

    async def run(
        self,
        emit: Emit,
        on_wait: OnWait | None = None,
        slots: asyncio.Semaphore | None = None,
    ) -> None:
        """Run the model until the answer ends, and settle it.

        Args:
            emit: Called with the frames of a stream.
            on_wait: Called the first time that this waits.
            slots: Run when one of these slots is free.
        """
        self._on_wait = on_wait
        try:
            if slots is None:
                await self._deadline.run(self._emit_all(emit), self._handle_wait)
            elif await self._deadline.run(slots.acquire(), seconds=MAX_QUEUE_SECONDS):
                try:
                    await self._deadline.run(self._emit_all(emit), self._handle_wait)
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
        await self._settle_tokens()
        if self.is_streamed and self._has_reader:
            await emit(self._finish())

    async def _settle_tokens(self) -> None:
        """Count the tokens of the answer, also of a partial one: leaving early must not evade a limit."""
        reservation, self.reservation = self.reservation, None
        if reservation is None or self._is_left_to_others:
            return
        used = 0
        if self._is_started:
            self._writer.close_open_item()
            await precount_output(self._writer)
            used = self._count_usage().total
            if not self.is_complete:  # a model may have reported its usage before it wrote more
                used = max(used, count_answer(self._writer, self._input_usage).total)
        await self._service.access.settle(reservation, used)

    async def _emit_all(self, emit: Emit) -> None:
        async with aclosing(self._write()) as written:
            async for frames in written:
                if frames:
                    await emit(frames)

    async def _write(self) -> AsyncGenerator[Frames]:
        """Yield the frames of the answer as it is written, then record the answer."""
        self._is_started = True
        yield await self._start()
        yield await self._prepare()
        if self._model is not None:
            pieces, stops = self._model.answer(self._prompt), self._prompt.stop
            try:
                async for piece in apply_stop_sequences(pieces, stops) if stops else pieces:
                    self.has_output = True
                    if self.is_streamed:
                        yield self._render(piece)
                    else:
                        self._writer.consume(piece)
            finally:
                if (aclose := getattr(pieces, "aclose", None)) is not None:
                    await aclose()  # stops the model
        await precount_output(self._writer)
        if not self._deadline.cancelled:
            await self._complete()

    def _handle_wait(self) -> None:
        """Handle the first time that the generation waits."""
        if self._on_wait is not None:
            self._on_wait()

    @property
    def _has_reader(self) -> bool:
        """Whether a client reads the end of the stream."""
        return self.is_complete or not self.is_cancelled

    @property
    def _is_left_to_others(self) -> bool:
        """Whether another server continues this answer."""
        return False

    def _count_usage(self) -> ModelUsage:
        """Return the tokens of the request and of the answer."""
        return count_usage(self._writer, self._input_usage)

    async def _complete(self) -> None:
        """Record the complete answer."""
        self.is_complete = True

    async def _prepare(self) -> Frames:
        """Prepare the generation before the model runs, and return the frames for that."""
        return []

    @abstractmethod
    async def _start(self) -> Frames:
        """Return the frames that open a stream."""

    @abstractmethod
    def _render(self, piece: OutputEvent) -> Frames:
        """Feed a piece of output to the writer and return the frames for it."""

    @abstractmethod
    def _finish(self) -> Frames:
        """Return the frames that end the stream: the end of a complete answer, or the failure."""

    @abstractmethod
    def _serialize(self) -> bytes:
        """Return the complete answer as JSON."""


async def _discard(_: object) -> None:
    """Emit nothing: the answer is not streamed."""


async def respond(request: Request, run: Generation, last_frame: bytes = b"") -> Any:
    """Respond to a request with its answer: with the frames of a stream, and this one at their end, or complete."""
    if run.is_streamed:
        return EventStream(run, last_frame)
    with DisconnectWatcher(partial(run.stop, "cancelled"), request.receive) as watcher:
        return respond_encoded(await run.generate(watcher.start) or b"")


def get_object(body: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a parameter that is an object, or an empty one if it is missing or null."""
    return body.get(name) or {}


@dataclass(frozen=True, slots=True)
class StatelessRequest:
    """One stateless request: its items, oldest first, and its parameters."""

    input: Sequence[Item]
    body: Mapping[str, Any]
    stream: bool = False
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request that is ready for its model; ids of the response are derived from ``key``."""

    key: str
    model: Model
    prompt: Prompt
    usage: ModelUsage
    """The usage before the first token of the answer."""


async def prepare(
    service: ServerState, request: StatelessRequest, *, automatic_cache: bool = False
) -> PreparedRequest:
    """Prepare a request for its model, or raise an error if it is too long for the model.

    With ``automatic_cache`` its prompt is cached without breakpoints.
    """
    body = request.body
    model = service.find_model(body["model"])
    key = new_unstored_key()
    items = normalize_items(request.input, key)
    count = partial(build_model_input, service, body, EMPTY_HISTORY, items)
    await precount(measure_texts((items, body.get("instructions"), body.get("tools"))), count)
    counted = count()
    model_input = truncate_to_window(counted, body, model.window)
    prompt = build_prompt(
        service, body, model_input.items, stream=request.stream, stop=request.stop
    )
    cached = 0
    if automatic_cache and model_input is counted:
        cached = read_prompt_cache(service, body, EMPTY_CONTEXT, items, counted)
    return PreparedRequest(key, model, prompt, ModelUsage(model_input.tokens, 1, cached))


class Serializer(Protocol):
    """Protocol of serializers, each of which writes responses in the format of one API.

    The bytes are frames of a stream; ``writer`` has the output so far, including the newest piece.
    """

    def start(self, usage: ModelUsage) -> bytes:
        """Return the frames that open the stream."""
        ...

    def delta(self, piece: OutputEvent, writer: OutputWriter) -> bytes:
        """Return the frames for one piece of output."""
        ...

    def end(self, writer: OutputWriter, usage: ModelUsage) -> bytes:
        """Return the frames that end the stream."""
        ...

    def error(self, error: ApiError) -> bytes:
        """Return the frames that end the stream with an error."""
        ...

    def response(self, writer: OutputWriter, usage: ModelUsage) -> Mapping[str, Any]:
        """Return the complete response."""
        ...


class StatelessRun(Generation):
    """One stateless response while it is written. It is not stored."""

    def __init__(
        self,
        service: ServerState,
        request: PreparedRequest,
        writer: OutputWriter,
        serializer: Serializer,
    ) -> None:
        super().__init__(service, request.model, request.prompt, writer, request.usage)
        self._serializer = serializer

    @property
    def start_error(self) -> ApiError | None:
        """The error to respond with if the stream has not been opened."""
        failed = not self.is_complete and not self.is_cancelled
        return (self.error or INTERNAL_ERROR()) if failed else None

    async def _start(self) -> Frames:
        return [self._serializer.start(self._input_usage)] if self.is_streamed else []

    def _render(self, piece: OutputEvent) -> Frames:
        self._writer.consume(piece)
        frames = self._serializer.delta(piece, self._writer)
        return [frames] if frames else []

    def _finish(self) -> Frames:
        if self.is_complete:
            return [self._serializer.end(self._writer, self._count_usage())]
        return [self._serializer.error(self.error or INTERNAL_ERROR())]

    def _serialize(self) -> bytes:
        return encode(self._serializer.response(self._writer, self._count_usage()))


async def respond_stateless(
    request: Request,
    prepared: PreparedRequest,
    response_id: str,
    writer: OutputWriter,
    serializer: Serializer,
) -> Any:
    """Record the request and generate its response, complete or as a stream."""
    recorded = get_recorded_request(request)
    if recorded is not None:
        recorded.context = tuple(prepared.prompt.ask.items)
        recorded.response_id = response_id
    service = get_service(request)
    reservation = await service.reserve_tokens(prepared.usage.input, prepared.prompt.max_tokens)
    run = StatelessRun(service, prepared, writer, serializer)
    run.reservation = reservation
    return await respond(request, run)
