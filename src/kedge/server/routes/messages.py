"""The endpoints ``POST /v1/messages`` and ``POST /v1/messages/count_tokens``."""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from kedge.server.anthropic import errors
from kedge.server.anthropic.parse import (
    API_VERSIONS,
    check_thinking_blocks,
    is_thinking_enabled,
    is_thinking_shown,
    parse_count_request,
    parse_request,
)
from kedge.server.anthropic.serialize import MessageSerializer
from kedge.server.http import (
    get_recorded_request,
    get_service,
    read_json,
    respond_bytes,
    respond_json,
    validate,
)
from kedge.server.models import PracticeModel
from kedge.server.output_writer import OutputWriter
from kedge.server.sse import DisconnectWatcher, EventStream
from kedge.server.stateless_run import StatelessRun, prepare


async def create(request: Request) -> Any:
    """Answer ``POST /v1/messages``, whole or as a stream."""
    version = read_version(request)
    body: Any = await read_json(request)
    service = get_service(request)
    question = validate(request, parse_request, body, service.cipher.decrypt, version)
    put = await prepare(service, question)
    if isinstance(put.model, PracticeModel):  # others may not have thought at all
        check_thinking_blocks(body)
    id = f"msg_{put.key}"
    exchange = get_recorded_request(request)
    if exchange is not None:
        exchange.context = tuple(put.prompt.ask.items)
        exchange.response_id = id
    writer = OutputWriter(
        put.key,
        len(question.input),
        encrypt=service.cipher.encrypt,
        encrypt_reasoning=True,
        show_summary=is_thinking_shown(body),
        call_prefix="toolu",
    )
    voice = MessageSerializer(
        id,
        question.body["model"],
        include_thinking=is_thinking_enabled(body),
        show_thinking=is_thinking_shown(body),
        request_id=request.scope.get("kedge.request_id"),
    )
    reply = StatelessRun(service, put, writer, voice)
    if question.stream:
        return EventStream(reply)
    with DisconnectWatcher(reply, request.receive) as watch:
        whole = await reply.generate(watch.start)
    return respond_bytes(b"") if whole is None else respond_json(whole)


async def count_tokens(request: Request) -> Response:
    """Answer ``POST /v1/messages/count_tokens``."""
    read_version(request)
    body = await read_json(request)
    service = get_service(request)
    counted = validate(request, parse_count_request, body, service.cipher.decrypt)
    put = await prepare(service, counted)
    return respond_json({"input_tokens": put.input_tokens})


def read_version(request: Request) -> str:
    """Read which version of the API a request means; refuse one that does not say."""
    version = request.headers.get("anthropic-version")
    if version is None:
        raise errors.VERSION_MISSING()
    if version not in API_VERSIONS:
        raise errors.VERSION_UNKNOWN(version=version)
    return version
