"""The app: every route of the server, its errors in the API's own shape, its housekeeping."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator

from anyio.lowlevel import checkpoint
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Match, Route, WebSocketRoute
from starlette.types import Scope
from starlette.websockets import WebSocket

from kedge.server import conversations, listing, responses
from kedge.server.access import Access, Listener
from kedge.server.background import Background
from kedge.server.completions import endpoint as chat
from kedge.server.errors import UNKNOWN_ROUTE, WRONG_METHOD, ApiError
from kedge.server.faults.injection import Injection
from kedge.server.guard import Guard
from kedge.server.http import answer, answer_json, service_of
from kedge.server.messages import endpoint as messages
from kedge.server.refusing import refuse
from kedge.server.service import Service
from kedge.server.settings import Settings
from kedge.server.sockets.connection import Connection


async def healthz(_: Request) -> Response:
    """Answer ``GET /healthz``."""
    return answer_json({"status": "ok"})


async def metrics(request: Request) -> Response:
    """Answer ``GET /metrics``: what this process has counted, for Prometheus."""
    from kedge.observe.prometheus import render

    body, content_type = render(request.headers.get("accept", ""))
    return Response(body, headers={"content-type": content_type})


async def socket(websocket: WebSocket) -> None:
    """Take a WebSocket connection to ``/v1/responses``."""
    service = service_of(websocket)
    await Connection(service, websocket.scope, websocket.receive, websocket.send).serve()


_CONVERSATION = "/v1/conversations/{id}"
_ITEM = "/v1/conversations/{id}/items/{item}"

ROUTES = [
    Route("/v1/responses", responses.create, methods=["POST"]),
    Route("/v1/responses/input_tokens", responses.input_tokens, methods=["POST"]),
    Route("/v1/responses/compact", responses.compact_context, methods=["POST"]),
    Route("/v1/responses/{id}", responses.retrieve, methods=["GET"]),
    Route("/v1/responses/{id}", responses.delete, methods=["DELETE"]),
    Route("/v1/responses/{id}/cancel", responses.cancel, methods=["POST"]),
    Route("/v1/responses/{id}/input_items", responses.input_items, methods=["GET"]),
    Route("/v1/conversations", conversations.create, methods=["POST"]),
    Route(_CONVERSATION, conversations.retrieve, methods=["GET"]),
    Route(_CONVERSATION, conversations.update, methods=["POST"]),
    Route(_CONVERSATION, conversations.delete, methods=["DELETE"]),
    Route(f"{_CONVERSATION}/items", conversations.list_items, methods=["GET"]),
    Route(f"{_CONVERSATION}/items", conversations.add_items, methods=["POST"]),
    Route(_ITEM, conversations.retrieve_item, methods=["GET"]),
    Route(_ITEM, conversations.delete_item, methods=["DELETE"]),
    Route("/v1/chat/completions", chat.create, methods=["POST"]),
    Route("/v1/messages", messages.create, methods=["POST"]),
    Route("/v1/messages/count_tokens", messages.count_tokens, methods=["POST"]),
    Route("/v1/models", listing.list_models, methods=["GET"]),
    Route("/v1/models/{id:path}", listing.retrieve_model, methods=["GET"]),
    Route("/healthz", healthz, methods=["GET"]),
    Route("/metrics", metrics, methods=["GET"]),
]
"""Every route, as it stands in the documentation."""


SOCKETS = [WebSocketRoute("/v1/responses", socket)]
"""Where a WebSocket may be opened."""


def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)  # noqa: S101 - registered for these only
    return refuse(request.scope, error)


def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)  # noqa: S101 - registered for these only
    where = {"method": request.method, "path": request.url.path}
    if error.status_code != 405:
        return refuse(request.scope, UNKNOWN_ROUTE(**where))
    refused = refuse(request.scope, WRONG_METHOD(**where))
    refused.headers["allow"] = ", ".join(sorted(_methods(request.scope)))
    return refused


def _methods(scope: Scope) -> set[str]:
    fitting = (route for route in ROUTES if route.matches(scope)[0] is not Match.NONE)
    return set[str]().union(*(route.methods or () for route in fitting))


def _on_client_gone(_: Request, __: Exception) -> Response:
    return answer(b"")  # nobody reads it


def create_app(settings: Settings | None = None, listener: Listener | None = None) -> Starlette:
    """Build the ASGI app of one server; ``listener`` is told of every request."""
    settings = settings or Settings()
    service = Service(settings)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncGenerator[None]:
        keeping = asyncio.create_task(_keep_house(service))
        try:
            yield
        finally:
            keeping.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await keeping
            await service.aclose()

    app = Starlette(
        routes=[*ROUTES, *SOCKETS],
        lifespan=lifespan,
        middleware=[
            Middleware(Access, listener=listener),
            Middleware(
                Guard,
                token=settings.token,
                hosts=settings.hosts,
                header_bytes=settings.limits.header_bytes,
            ),
            *([] if settings.faults is None else [Middleware(Injection, faults=settings.faults)]),
        ],
        exception_handlers={
            ApiError: _on_api_error,
            HTTPException: _on_http_error,
            ClientDisconnect: _on_client_gone,
        },
    )
    app.router.redirect_slashes = False  # the API has one name for each thing
    app.state.service = service
    app.state.background = Background(settings.limits, settings.clock)
    return app


async def _keep_house(service: Service) -> None:
    """Delete what has expired: at the start, and then from time to time, a little at once."""
    while True:
        while service.responses.purge():
            await checkpoint()
        await asyncio.sleep(service.settings.purge_every)
