"""The generation loop: run a model for one request, within its deadline, until it ends.

Stored responses (``response_run``) and stateless ones (``stateless_run``) process the output differently,
but generate it in the same way. So all failures while a model writes are handled here, once: an error of
the model, a bug in it, the deadline, a client that disconnects, a server that shuts down.
"""

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from kedge.errors import StoreError
from kedge.server.errors import DATABASE_UNAVAILABLE, INTERNAL_ERROR, ApiError
from kedge.server.models import (
    ItemClosed,
    ItemDelta,
    ItemOpened,
    Model,
    ModelUsage,
    OutputEvent,
    OutputTruncated,
    Prompt,
)
from kedge.server.output_writer import OutputWriter, count_answer, count_usage, precount_output
from kedge.server.request_log import log_failure
from kedge.server.state import ServerState

if TYPE_CHECKING:
    from kedge.security.access_tokens import TokenReservation


import asyncio

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
        self, work: Coroutine[Any, Any, T], on_wait: Callable[[], None] | None = None
    ) -> T | None:
        """Run a coroutine.

        Args:
            work: The coroutine.
            on_wait: Called once if the coroutine waits, in the next turn of the loop. Most requests are answered
                within one turn.

        Returns:
            Its result, or None if the deadline ended it.
        """
        waiting = asyncio.get_running_loop().call_soon(on_wait) if on_wait is not None else None
        try:
            async with asyncio.timeout(0 if self._is_cancelled else self._seconds) as self._timeout:
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


Chunk = TypeVar("Chunk")
"""The type that a subclass emits while it streams: events, or encoded frames."""

Emit = Callable[[Chunk], Awaitable[None]]
OnWait = Callable[[], None]


class Generation(ABC, Generic[Chunk]):
    """One answer while a model writes it.

    It ends exactly once: complete, with an error, or stopped from outside.

    Args:
        service: The server; the generation is listed in its ``running`` until it ends.
        model: The model to run, or None to produce an answer without one.
        prompt: The request to the model.
        writer: The writer that collects the output.
    """

    def __init__(
        self, service: ServerState, model: Model | None, prompt: Prompt, writer: OutputWriter
    ) -> None:
        self.grace = 0.0 if model is None else model.grace
        """Seconds for which the start of a stream waits for the first output."""
        self.error: ApiError | None = None
        """The error that the model raised, if any."""
        self.has_output = False
        """Whether the model has produced anything."""
        self.is_complete = False
        self.reservation: TokenReservation | None = None
        """The tokens that are reserved for the answer, if its caller has a limit."""
        self._service = service
        self._model = model
        self._prompt = prompt
        self._writer = writer
        self._stop_status: str | None = None
        self._on_wait: OnWait | None = None
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

    async def _generate(self, on_wait: OnWait) -> bool:
        """Run the model without streaming.

        Returns:
            Whether the answer is complete; if not, there is no client left to read it.

        Raises:
            ApiError: If there is a client, but no complete answer.
        """
        self._on_wait = on_wait
        await self._run(self._write(None))
        if not self.is_complete and not self.is_cancelled:
            raise self.error or INTERNAL_ERROR()
        return self.is_complete

    async def _stream(self, emit: Emit[Chunk], on_wait: OnWait) -> None:
        """Run the model and emit the answer as it is written."""
        self._on_wait = on_wait
        await self._run_stream(emit, self._start)
        if self.is_complete or not self.is_cancelled:
            await emit(self._finish())

    async def _run_stream(self, emit: Emit[Chunk], start: Callable[[], Chunk]) -> None:
        async def work() -> None:
            await emit(await self._service.run(start))
            await self._write(emit)

        await self._run(work())

    async def _run(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await self._deadline.run(work, self._handle_wait)
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

    async def _settle_tokens(self) -> None:
        """Count the tokens of the answer, also of a partial one: leaving early must not evade a limit."""
        reservation, self.reservation = self.reservation, None
        if reservation is None or self._is_left_to_others:
            return
        self._writer.close_open_item()
        await precount_output(self._writer)
        used = self._count_usage().total
        if not self.is_complete:  # a model may have reported its usage before it wrote more
            used = max(used, count_answer(self._writer, self._input_usage).total)
        await self._service.access.settle(reservation, used)

    async def _write(self, emit: Emit[Chunk] | None) -> None:
        before = await self._prepare()
        if emit is not None and before:
            await emit(before)
        if self._model is not None:
            await self._write_output(self._model.answer(self._prompt), emit)
        await precount_output(self._writer)
        if not self._deadline.cancelled:
            await self._complete()
            self.is_complete = True

    async def _write_output(
        self, pieces: AsyncIterator[OutputEvent], emit: Emit[Chunk] | None
    ) -> None:
        stops = self._prompt.stop
        try:
            async for piece in apply_stop_sequences(pieces, stops) if stops else pieces:
                self.has_output = True
                if emit is None:
                    self._writer.consume(piece)
                elif chunk := self._render(piece):
                    await emit(chunk)
        finally:
            if (aclose := getattr(pieces, "aclose", None)) is not None:
                await aclose()  # stops the model

    def _handle_wait(self) -> None:
        """Handle the first time that the generation waits."""
        if self._on_wait is not None:
            self._on_wait()

    async def _prepare(self) -> Chunk | None:
        """Prepare the generation before the model runs, and return the chunks to emit for that."""
        return None

    async def _complete(self) -> None:
        """Record the complete answer."""

    @abstractmethod
    async def stream(self, send: Emit[bytes], on_wait: OnWait) -> None:
        """Send every frame, and call ``on_wait`` the first time that this waits."""

    @property
    @abstractmethod
    def _input_usage(self) -> ModelUsage:
        """The usage before the first token of the answer."""

    @property
    def _is_left_to_others(self) -> bool:
        """Whether another server continues this answer."""
        return False

    def _count_usage(self) -> ModelUsage:
        """Return the tokens of the request and of the answer."""
        return count_usage(self._writer, self._input_usage)

    @abstractmethod
    def _start(self) -> Chunk:
        """Return the chunks that open the stream."""

    @abstractmethod
    def _render(self, piece: OutputEvent) -> Chunk:
        """Feed a piece of output to the writer and return the chunk to emit for it, which may be empty."""

    @abstractmethod
    def _finish(self) -> Chunk:
        """Return the chunks that end the stream: the end of a complete answer, or the failure."""


async def apply_stop_sequences(
    events: AsyncIterator[OutputEvent], stops: tuple[str, ...]
) -> AsyncIterator[OutputEvent]:
    """Yield the events of an answer up to the first stop sequence in its text."""
    pending: str | None = None  # the end of the open text; None if no text is open
    logprobs: tuple[Mapping[str, Any], ...] = ()  # of tokens that are in this end, or before it
    before = 0  # the characters of these tokens that were sent
    async for piece in events:
        if isinstance(piece, ItemOpened):
            pending, logprobs, before = "" if piece.kind == "text" else None, (), 0
        elif pending is not None and isinstance(piece, ItemDelta):
            pending, logprobs = pending + piece.text, logprobs + piece.logprobs
            text, stop_sequence = _find_first_stop(pending, stops)
            if stop_sequence:
                yield ItemDelta(text, _take_logprobs(logprobs, before + len(text)))
                yield ItemClosed(stop_sequence)
                return
            end = len(pending) - _partial_stop_length(pending, stops)
            text, pending = pending[:end], pending[end:]
            if text:
                yield ItemDelta(text, () if pending else logprobs)
                before, logprobs = (before + len(text), logprobs) if pending else (0, ())
            continue
        elif pending and isinstance(piece, ItemClosed | OutputTruncated):
            yield ItemDelta(pending, logprobs)
            pending = None
        yield piece


def _take_logprobs(
    logprobs: tuple[Mapping[str, Any], ...], end: int
) -> tuple[Mapping[str, Any], ...]:
    """Return the log probabilities of the tokens that start before a position in their text."""
    start = 0
    for index, each in enumerate(logprobs):
        if start >= end:
            return logprobs[:index]
        start += len(str(each.get("token")))
    return logprobs


def _find_first_stop(text: str, stops: tuple[str, ...]) -> tuple[str, str]:
    """Return the text before the first stop sequence, and that sequence."""
    positions = [(at, stop) for stop in stops if (at := text.find(stop)) >= 0]
    at, stop = min(positions, default=(len(text), ""))
    return text[:at], stop


def _partial_stop_length(text: str, stops: tuple[str, ...]) -> int:
    """Return the length of the end of a text that may be the beginning of a stop sequence."""
    longest = max(len(stop) for stop in stops) - 1
    for length in range(min(longest, len(text)), 0, -1):
        if any(stop.startswith(text[-length:]) for stop in stops):
            return length
    return 0
