"""The endpoint ``POST /v1/chat/completions``."""

from typing import Any

from starlette.requests import Request

from kedge.server import errors
from kedge.server.chat_completions.parse import CONTEXT_LENGTH_EXCEEDED, parse_request
from kedge.server.chat_completions.serialize import CompletionSerializer
from kedge.server.http import get_service, read_json, validate
from kedge.server.output_writer import OutputWriter
from kedge.server.state import ServerState
from kedge.server.stateless_run import (
    PreparedRequest,
    StatelessRequest,
    get_object,
    prepare,
    respond,
)


async def create(request: Request) -> Any:
    """Answer ``POST /v1/chat/completions``, complete or as a stream."""
    body: Any = await read_json(request)
    parsed = validate(request, parse_request, body)
    service = get_service(request)
    prepared = await _prepare(service, parsed)
    response_id = f"chatcmpl-{prepared.key}"
    serializer = CompletionSerializer(
        response_id,
        parsed.body["model"],
        int(service.clock()),
        include_usage=bool(get_object(body, "stream_options").get("include_usage")),
    )
    writer = OutputWriter(prepared.key, len(parsed.input))
    return await respond(request, prepared, response_id, writer, serializer)


async def _prepare(service: ServerState, request: StatelessRequest) -> PreparedRequest:
    """Prepare the request; errors of all endpoints get the messages of this API."""
    model: str = request.body["model"]
    try:
        return await prepare(service, request, automatic_cache=True)
    except errors.ApiError as error:
        if error.template is errors.MODEL_NOT_FOUND and model:
            raise errors.MODEL_NOT_ACCESSIBLE(model=model) from None
        if error.template is not errors.CONTEXT_TOO_LONG:
            raise
        raise CONTEXT_LENGTH_EXCEEDED(window=service.find_model(model).window) from None
