"""The endpoints ``POST /v1/messages`` and ``POST /v1/messages/count_tokens``."""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from kedge.server.anthropic import errors
from kedge.server.anthropic.cache_breakpoints import apply_breakpoints, check_breakpoints
from kedge.server.anthropic.parse import (
    API_VERSIONS,
    check_thinking_blocks,
    is_thinking_enabled,
    is_thinking_shown,
    parse_count_request,
    parse_request,
)
from kedge.server.anthropic.serialize import MessageSerializer
from kedge.server.http import get_service, read_json, respond_json, validate
from kedge.server.models import PracticeModel
from kedge.server.output_writer import OutputWriter
from kedge.server.stateless_run import prepare, respond


async def create(request: Request) -> Any:
    """Answer ``POST /v1/messages``, complete or as a stream."""
    version = read_version(request)
    body: Any = await read_json(request)
    service = get_service(request)
    parsed = validate(request, parse_request, body, service.cipher.decrypt, version)
    check_breakpoints(body)
    prepared = await prepare(service, parsed)
    if isinstance(prepared.model, PracticeModel):  # other models may not have reasoned at all
        check_thinking_blocks(body)
    prepared = apply_breakpoints(service.prompt_cache, body, prepared, service.cipher.decrypt)
    response_id = f"msg_{prepared.key}"
    writer = OutputWriter(
        prepared.key,
        len(parsed.input),
        encrypt=service.cipher.encrypt,
        encrypt_reasoning=True,
        show_summary=is_thinking_shown(body),
        call_prefix="toolu",
    )
    serializer = MessageSerializer(
        response_id,
        parsed.body["model"],
        include_thinking=is_thinking_enabled(body),
        show_thinking=is_thinking_shown(body),
        request_id=request.scope.get("kedge.request_id"),
    )
    return await respond(request, prepared, response_id, writer, serializer)


async def count_tokens(request: Request) -> Response:
    """Answer ``POST /v1/messages/count_tokens``."""
    read_version(request)
    body = await read_json(request)
    service = get_service(request)
    parsed = validate(request, parse_count_request, body, service.cipher.decrypt)
    prepared = await prepare(service, parsed)
    return respond_json({"input_tokens": prepared.input_tokens})


def read_version(request: Request) -> str:
    """Return the API version of a request; reject a missing or unknown one."""
    version = request.headers.get("anthropic-version")
    if version is None:
        raise errors.VERSION_MISSING()
    if version not in API_VERSIONS:
        raise errors.VERSION_UNKNOWN(version=version)
    return version
