"""One stateless answer while it is written: told as it comes, or given whole.

It ends in one of three ways: whole, refused by an error that its voice words, or not at all because
its client went away. Nothing is kept.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from starlette.types import Receive, Scope, Send

from kedge.server.deadline import Deadline
from kedge.server.errors import INTERNAL_ERROR, ApiError
from kedge.server.item_forms import normalize_items
from kedge.server.json_codec import Item
from kedge.server.models import Model, ModelUsage, OutputEvent, Prompt, stream_output
from kedge.server.output_writer import OutputWriter, count_usage, precount_output
from kedge.server.prepare import ModelInput, build_ask, count_instruction_tokens, truncate_to_window
from kedge.server.request_log import log_failure
from kedge.server.sse import SSE_HEADERS, BufferedSender, DelayedStart, DisconnectWatcher
from kedge.server.state import ServerState
from kedge.server.stop_sequences import apply_stop_sequences
from kedge.server.storage.ids import new_key
from kedge.server.token_counting import count_items, precount


def get_object(body: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Give a parameter that is an object; an empty one where it was left out or is null."""
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
    """A question that is ready for its model; ``key`` names what is written in answer to it."""

    key: str
    model: Model
    prompt: Prompt
    input_tokens: int


async def prepare(service: ServerState, request: StatelessRequest) -> PreparedRequest:
    """Prepare a request for the model that it names, or raise an error if it is too long for it."""
    body = request.body
    model = service.find_model(body["model"])
    key = new_key(0)
    items = normalize_items(request.input, key)

    def count() -> int:
        return count_instruction_tokens(body) + count_items(items)

    await precount((items, body.get("instructions"), body.get("tools")), count)
    view = truncate_to_window(ModelInput(items, count()), body, model.window)
    prompt = Prompt(
        ask=build_ask(body, view.items),
        body=body,
        stream=request.stream,
        max_tokens=body.get("max_output_tokens"),
        stop=request.stop,
        decrypt_reasoning=service.decrypt_reasoning,
    )
    return PreparedRequest(key, model, prompt, view.tokens)


class Serializer(Protocol):
    """How one API tells an answer.

    The bytes are frames of a stream; ``writer`` holds what was written so far, the newest piece
    included.
    """

    def start(self, input_tokens: int) -> bytes:
        """Open the stream."""
        ...

    def delta(self, piece: OutputEvent, writer: OutputWriter) -> bytes:
        """Tell of one piece."""
        ...

    def end(self, writer: OutputWriter, usage: ModelUsage) -> bytes:
        """Close the stream."""
        ...

    def error(self, error: ApiError) -> bytes:
        """Break the stream off with an error."""
        ...

    def response(self, writer: OutputWriter, usage: ModelUsage) -> Mapping[str, Any]:
        """Give the whole answer at once."""
        ...


class StatelessRun:
    """One answer. ``stop`` ends it from outside."""

    def __init__(
        self,
        service: ServerState,
        request: PreparedRequest,
        writer: OutputWriter,
        serializer: Serializer,
    ) -> None:
        self._service = service
        self._request = request
        self._writer = writer
        self._serializer = serializer
        self._deadline = Deadline(service.settings.limits.answer_seconds, self._handle_wait)
        self._on_wait: Callable[[], None] | None = None
        self.error: ApiError | None = INTERNAL_ERROR()  # until the answer is whole
        self.has_output = False
        """Whether the model has said anything."""
        self.grace = request.model.grace
        self._disconnected = False
        service.running.add(self)

    async def generate(self, on_wait: Callable[[], None]) -> Mapping[str, Any] | None:
        """Write the answer and give it whole; None where nobody is left to read it."""
        self._on_wait = on_wait
        given: Mapping[str, Any] = {}
        try:
            with self._deadline:
                async for piece in self._iter_output():
                    self._writer.consume(piece)
                await precount_output(self._writer)
                given = self._serializer.response(self._writer, self._count_usage())
                self.error = None
        except ApiError as error:
            self.error = error
        except Exception as error:  # noqa: BLE001 - whatever a model does, the server goes on
            log_failure("the model failed", error)
        finally:
            self.close()
        if self.failure is not None:
            raise self.failure
        return None if self._disconnected else given

    async def stream(
        self, send: Callable[[bytes], Awaitable[None]], on_wait: Callable[[], None]
    ) -> None:
        """Write the answer and tell it as it comes."""
        self._on_wait = on_wait
        try:
            with self._deadline:
                await send(self._serializer.start(self._request.input_tokens))
                async for piece in self._iter_output():
                    self.has_output = True
                    self._writer.consume(piece)
                    if told := self._serializer.delta(piece, self._writer):
                        await send(told)
                await precount_output(self._writer)
                self.error = None
        except ApiError as error:
            self.error = error
        except Exception as error:  # noqa: BLE001 - whatever a model does, the server goes on
            log_failure("the model failed", error)
        finally:
            self.close()
        if self.error is None:
            await send(self._serializer.end(self._writer, self._count_usage()))
        elif self.failure is not None:
            await send(self._serializer.error(self.failure))

    def stop(self, status: str) -> None:
        """End the answer from outside, as ``failed`` or as ``cancelled``."""
        self._disconnected = status == "cancelled"
        self._deadline.cancel()

    @property
    def failure(self) -> ApiError | None:
        """Why there is no answer; None where there is one, or nobody to read it."""
        return None if self._disconnected else self.error

    def close(self) -> None:
        """Let go of everything."""
        self._service.running.discard(self)

    def _handle_wait(self) -> None:
        if self._on_wait is not None:
            self._on_wait()

    async def _iter_output(self) -> AsyncIterator[OutputEvent]:
        prompt = self._request.prompt
        async with stream_output(self._request.model, prompt) as pieces:
            async for piece in apply_stop_sequences(pieces, prompt.stop) if prompt.stop else pieces:
                yield piece

    def _count_usage(self) -> ModelUsage:
        return count_usage(self._writer, self._request.input_tokens)


class StatelessStream:
    """The answer to a streaming request: an ASGI response that runs the model."""

    def __init__(self, run: StatelessRun) -> None:
        self._run = run

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send every frame."""
        opening = DelayedStart(send, self._run.grace)

        async def put(frames: bytes) -> None:
            if not opening.released and self._run.has_output:
                await opening.release()
            await outbox.put(frames)

        try:
            await opening({"type": "http.response.start", "status": 200, "headers": SSE_HEADERS})
            async with BufferedSender(opening) as outbox:
                with DisconnectWatcher(self._run, receive) as watch:
                    await self._run.stream(put, watch.start)
        finally:
            self._run.close()
            opening.close()
        if self._run.failure is not None and not opening.released:
            raise self._run.failure
        await opening.release()
        await send({"type": "http.response.body", "body": b"", "more_body": False})
