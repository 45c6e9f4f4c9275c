"""The endpoints ``POST /v1/messages`` and ``POST /v1/messages/count_tokens``."""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from kedge.server.http import answer, answer_json, exchange_of, read_json, service_of
from kedge.server.messages import refusals
from kedge.server.messages.reading import VERSIONS, check_thoughts, read, read_count, shows, thinks
from kedge.server.messages.voice import MessageVoice
from kedge.server.models import PracticeModel
from kedge.server.output import Writer
from kedge.server.sse import Watch
from kedge.server.stateless.question import asked
from kedge.server.stateless.reply import Reply, ReplyStream


async def create(request: Request) -> Any:
    """Answer ``POST /v1/messages``, whole or as a stream."""
    version = version_of(request)
    body: Any = await read_json(request)
    service = service_of(request)
    question = read(body, service.sealer.open, version)
    put = asked(service, question)
    if isinstance(put.model, PracticeModel):  # others may not have thought at all
        check_thoughts(body)
    id = f"msg_{put.key}"
    exchange = exchange_of(request)
    if exchange is not None:
        exchange.context = tuple(put.prompt.ask.items)
        exchange.response_id = id
    writer = Writer(
        put.key,
        len(question.input),
        seal=service.sealer.seal,
        sealed=True,
        shown=shows(body),
        calls="toolu",
    )
    voice = MessageVoice(
        id,
        question.body["model"],
        thinks=thinks(body),
        shows=shows(body),
        request_id=request.scope.get("kedge.request_id"),
    )
    reply = Reply(service, put, writer, voice)
    if question.live:
        return ReplyStream(reply)
    with Watch(reply, request.receive) as watch:
        whole = await reply.whole(watch.start)
    return answer(b"") if whole is None else answer_json(whole)


async def count_tokens(request: Request) -> Response:
    """Answer ``POST /v1/messages/count_tokens``."""
    version_of(request)
    body = await read_json(request)
    service = service_of(request)
    put = asked(service, read_count(body, service.sealer.open))
    return answer_json({"input_tokens": put.input_tokens})


def version_of(request: Request) -> str:
    """Read which version of the API a request means; refuse one that does not say."""
    version = request.headers.get("anthropic-version")
    if version is None:
        raise refusals.VERSION_MISSING()
    if version not in VERSIONS:
        raise refusals.VERSION_UNKNOWN(version=version)
    return version
