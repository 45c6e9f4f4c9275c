"""The endpoint ``POST /v1/chat/completions``."""

from typing import Any

from starlette.requests import Request

from kedge.server import errors
from kedge.server.chat_completions import parse
from kedge.server.chat_completions.parse import parse_request
from kedge.server.chat_completions.serialize import CompletionSerializer
from kedge.server.http import (
    get_recorded_request,
    get_service,
    read_json,
    respond_bytes,
    respond_json,
    validate,
)
from kedge.server.output_writer import OutputWriter
from kedge.server.sse import DisconnectWatcher, EventStream
from kedge.server.state import ServerState
from kedge.server.stateless_run import (
    PreparedRequest,
    StatelessRequest,
    StatelessRun,
    get_object,
    prepare,
)


async def create(request: Request) -> Any:
    """Answer ``POST /v1/chat/completions``, whole or as a stream."""
    body: Any = await read_json(request)
    question = validate(request, parse_request, body)
    service = get_service(request)
    put = await _prepare(service, question)
    voice = CompletionSerializer(
        f"chatcmpl-{put.key}",
        question.body["model"],
        int(service.clock()),
        include_usage=bool(get_object(body, "stream_options").get("include_usage")),
    )
    exchange = get_recorded_request(request)
    if exchange is not None:
        exchange.context = tuple(put.prompt.ask.items)
        exchange.response_id = f"chatcmpl-{put.key}"
    reply = StatelessRun(service, put, OutputWriter(put.key, len(question.input)), voice)
    if question.stream:
        return EventStream(reply)
    with DisconnectWatcher(reply, request.receive) as watch:
        whole = await reply.generate(watch.start)
    return respond_bytes(b"") if whole is None else respond_json(whole)


async def _prepare(service: ServerState, request: StatelessRequest) -> PreparedRequest:
    """Put the question; what every endpoint refuses, this one refuses in its own words."""
    model: str = request.body["model"]
    try:
        return await prepare(service, request)
    except errors.ApiError as error:
        if error.template is errors.MODEL_NOT_FOUND and model:
            raise errors.MODEL_NOT_ACCESSIBLE(model=model) from None
        if error.template is not errors.CONTEXT_TOO_LONG:
            raise
        raise parse.CONTEXT_LENGTH_EXCEEDED(window=service.find_model(model).window) from None
