"""The endpoint ``POST /v1/chat/completions``."""

from typing import Any

from starlette.requests import Request

from kedge.server import errors
from kedge.server.completions import refusals
from kedge.server.completions.reading import read
from kedge.server.completions.voice import ChatVoice
from kedge.server.http import answer, answer_json, exchange_of, read_json, service_of
from kedge.server.output import Writer
from kedge.server.service import Service
from kedge.server.sse import Watch
from kedge.server.stateless.question import Asked, Question, asked, within
from kedge.server.stateless.reply import Reply, ReplyStream


async def create(request: Request) -> Any:
    """Answer ``POST /v1/chat/completions``, whole or as a stream."""
    body: Any = await read_json(request)
    question = read(body)
    service = service_of(request)
    put = _put(service, question)
    voice = ChatVoice(
        f"chatcmpl-{put.key}",
        question.body["model"],
        int(service.clock()),
        usage=bool(within(body, "stream_options").get("include_usage")),
    )
    exchange = exchange_of(request)
    if exchange is not None:
        exchange.context = tuple(put.prompt.ask.items)
        exchange.response_id = f"chatcmpl-{put.key}"
    reply = Reply(service, put, Writer(put.key, len(question.input)), voice)
    if question.live:
        return ReplyStream(reply)
    with Watch(reply, request.receive) as watch:
        whole = await reply.whole(watch.start)
    return answer(b"") if whole is None else answer_json(whole)


def _put(service: Service, question: Question) -> Asked:
    """Put the question; what every endpoint refuses, this one refuses in its own words."""
    model: str = question.body["model"]
    try:
        return asked(service, question)
    except errors.ApiError as error:
        if error.situation is errors.MODEL_NOT_FOUND and model:
            raise errors.MODEL_UNKNOWN(model=model) from None
        if error.situation is not errors.CONTEXT_TOO_LONG:
            raise
        raise refusals.TOO_LONG(window=service.find_model(model).window) from None
