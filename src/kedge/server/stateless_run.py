"""Responses of the stateless APIs (Chat Completions, Messages): prepared, generated, never stored."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from starlette.requests import Request

from kedge.server.errors import INTERNAL_ERROR, ApiError
from kedge.server.generation import Frames, Generation, respond
from kedge.server.http import get_recorded_request, get_service
from kedge.server.item_forms import (
    Item,
    count_item,
    measure_texts,
    new_unstored_key,
    normalize_items,
    precount,
)
from kedge.server.models import Model, ModelUsage, OutputEvent, Prompt
from kedge.server.output_writer import OutputWriter
from kedge.server.prepare import (
    ModelInput,
    build_prompt,
    count_instruction_tokens,
    read_prompt_cache,
    truncate_to_window,
)
from kedge.server.state import ServerState
from kedge.server.storage.context import EMPTY_CONTEXT
from kedge.text.json_text import encode


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

    def count() -> ModelInput:
        counts = tuple(map(count_item, items))
        return ModelInput(items, count_instruction_tokens(body) + sum(counts), counts)

    texts = (items, body.get("instructions"), body.get("tools"))
    await precount(measure_texts(texts), count)
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
