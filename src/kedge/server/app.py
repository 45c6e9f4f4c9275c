"""The routes of the server."""

import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kedge.server import errors
from kedge.server.access import Access, Exchange, Listener
from kedge.server.answering import Run
from kedge.server.draft import draft
from kedge.server.service import Service
from kedge.server.settings import Settings
from kedge.server.sse import EventStream, Watch
from kedge.server.wire import encode


async def read_json(request: Request) -> Any:
    """Read the body of a request as JSON, within the limits."""
    most = request.app.state.service.settings.limits.body_bytes
    if int(request.headers.get("content-length", 0)) > most:
        raise errors.BODY_TOO_LARGE(most=most)
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > most:
            raise errors.BODY_TOO_LARGE(most=most)
        chunks.append(chunk)
    raw = b"".join(chunks)
    exchange: Exchange | None = request.scope.get("kedge.exchange")
    if exchange is not None:
        exchange.raw = raw
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError):
        raise errors.NOT_JSON() from None
    if exchange is not None:
        exchange.body = body
    return body


def answer(body: bytes, status: int = 200) -> Response:
    """Answer with JSON that is already encoded."""
    return Response(body, status, media_type="application/json")


async def create_response(request: Request) -> Any:
    """Answer ``POST /v1/responses``."""
    body = await read_json(request)
    service: Service = request.app.state.service
    made = draft(service, body)
    exchange: Exchange | None = request.scope.get("kedge.exchange")
    if exchange is not None:
        exchange.context = tuple(made.prompt.ask.items)
        exchange.response_id = made.head["id"]
    run = Run(service, made)
    if made.prompt.live:
        return EventStream(run)
    with Watch(run, request.receive):
        whole = await run.whole()
    return answer(whole or b"")


def on_api_error(_: Request, error: Exception) -> Response:
    """Answer with the error that was raised on purpose."""
    assert isinstance(error, errors.ApiError)  # noqa: S101 - registered for these only
    return answer(encode(error.body()), error.status)


def on_http_error(request: Request, error: Exception) -> Response:
    """Answer an unknown route or a wrong method in the shape of the API's errors."""
    assert isinstance(error, HTTPException)  # noqa: S101 - registered for these only
    where: Mapping[str, str] = {"method": request.method, "path": request.url.path}
    situation = errors.WRONG_METHOD if error.status_code == 405 else errors.UNKNOWN_ROUTE
    made = situation(**where)
    return answer(encode(made.body()), made.status)


def on_bug(_: Request, __: Exception) -> Response:
    """Answer when the server itself is at fault."""
    made = errors.SERVER_FAILED()
    return answer(encode(made.body()), made.status)


ROUTES = [
    Route("/v1/responses", create_response, methods=["POST"]),
]


def create_app(settings: Settings | None = None, listener: Listener | None = None) -> Starlette:
    """Build the ASGI app of one server; ``listener`` is told of every request."""
    service = Service(settings or Settings())

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncGenerator[None]:
        yield
        service.close()

    app = Starlette(
        routes=ROUTES,
        lifespan=lifespan,
        middleware=[Middleware(Access, listener=listener)],
        exception_handlers={
            errors.ApiError: on_api_error,
            HTTPException: on_http_error,
            Exception: on_bug,
        },
    )
    app.state.service = service
    return app
