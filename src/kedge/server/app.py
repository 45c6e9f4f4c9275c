"""The ASGI app: routes, small endpoints, middleware, error responses, and the deletion of expired responses."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from datetime import UTC, datetime
from typing import Any

from anyio.lowlevel import checkpoint
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocket

from kedge.database.health import HealthCheck
from kedge.errors import StoreError
from kedge.server.access import AccessPolicy
from kedge.server.anthropic import endpoint as messages
from kedge.server.auth import ServerAuthMiddleware
from kedge.server.background import BackgroundJobs
from kedge.server.chat_completions import endpoint as chat_completions
from kedge.server.error_response import (
    build_error_response,
    format_allowed_methods,
    is_anthropic,
)
from kedge.server.errors import (
    DATABASE_UNAVAILABLE,
    METHOD_NOT_ALLOWED,
    MODEL_NOT_ACCESSIBLE,
    UNKNOWN_ROUTE,
    ApiError,
)
from kedge.server.faults.effects import MEMORY_FAULTS
from kedge.server.faults.middleware import FaultMiddleware
from kedge.server.faults.spec import Faults
from kedge.server.http import EncodedResponse, get_service, respond_json
from kedge.server.models import Model
from kedge.server.request_log import (
    RESPONSE_HEADERS_KEY,
    STATUS_KEY,
    AccessLogMiddleware,
    FinishListener,
    Listener,
    log_failure,
)
from kedge.server.routes import conversations, responses
from kedge.server.settings import Settings
from kedge.server.state import ServerState
from kedge.server.storage.claims import ReplicaClaims
from kedge.server.websocket import ServerConnection

log = logging.getLogger("kedge.server")

WATCH_SECONDS = 1.0
"""Seconds between two checks for responses that other servers have cancelled or not finished."""
CLEANUP_ROUNDS = 60
"""The number of these checks after which old events are deleted."""


async def healthz(request: Request) -> Response:
    """Answer ``GET /healthz``: with 503 if a database does not answer."""
    health: HealthCheck = request.app.state.health
    if await health.run():
        return respond_json({"status": "ok"})
    body = {"status": "unavailable", "reason": "the database does not answer"}
    return JSONResponse(body, 503)


async def metrics(request: Request) -> Response:
    """Answer ``GET /metrics`` with the metrics of this process, for Prometheus."""
    from kedge.observe.prometheus import render

    body, content_type = render(request.headers.get("accept", ""))
    return Response(body, headers={"content-type": content_type})


async def list_models(request: Request) -> Response:
    """Answer ``GET /v1/models``."""
    models = get_service(request).models
    data = [_serialize_model(request, name, model) for name, model in models.items()]
    if not is_anthropic(request.scope):
        return respond_json({"object": "list", "data": data})
    names = list(models)
    page = {"has_more": False, "first_id": names[0], "last_id": names[-1]}
    return respond_json({"data": data, **page})


async def retrieve_model(request: Request) -> Response:
    """Answer ``GET /v1/models/{id}``."""
    name: str = request.path_params["id"]
    model = get_service(request).models.get(name)
    if model is None:
        raise MODEL_NOT_ACCESSIBLE(model=name)
    return respond_json(_serialize_model(request, name, model))


def _serialize_model(request: Request, name: str, model: Model) -> dict[str, Any]:
    if not is_anthropic(request.scope):
        return {"id": name, "object": "model", "created": 0, "owned_by": "kedge"}
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": datetime.fromtimestamp(0, UTC).isoformat().replace("+00:00", "Z"),
        "lifecycle": "active",
        "max_input_tokens": model.window,
    }


async def serve_websocket(websocket: WebSocket) -> None:
    """Serve a WebSocket connection to ``/v1/responses``."""
    service = get_service(websocket)
    await ServerConnection(service, websocket.scope, websocket.receive, websocket.send).serve()


class Endpoint:
    """A handler as an ASGI app, whose errors are converted to responses by ``ErrorMiddleware``.

    Starlette's wrapper of a function would do that a second time for each request.

    Args:
        handler: Returns the response to a request, which is itself an ASGI app.
    """

    def __init__(self, handler: Callable[[Request], Awaitable[ASGIApp]]) -> None:
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        response = await self._handler(Request(scope, receive, send))
        await response(scope, receive, send)


_CONVERSATION_PATH = "/v1/conversations/{id}"
_ITEM_PATH = "/v1/conversations/{id}/items/{item}"

ROUTES = [
    Route("/v1/responses", Endpoint(responses.create), methods=["POST"]),
    Route("/v1/responses/input_tokens", Endpoint(responses.count_input_tokens), methods=["POST"]),
    Route("/v1/responses/compact", Endpoint(responses.compact_context), methods=["POST"]),
    Route("/v1/responses/{id}", Endpoint(responses.retrieve), methods=["GET"]),
    Route("/v1/responses/{id}", Endpoint(responses.delete), methods=["DELETE"]),
    Route("/v1/responses/{id}/cancel", Endpoint(responses.cancel), methods=["POST"]),
    Route("/v1/responses/{id}/input_items", Endpoint(responses.list_input_items), methods=["GET"]),
    Route("/v1/conversations", Endpoint(conversations.create), methods=["POST"]),
    Route(_CONVERSATION_PATH, Endpoint(conversations.retrieve), methods=["GET"]),
    Route(_CONVERSATION_PATH, Endpoint(conversations.update), methods=["POST"]),
    Route(_CONVERSATION_PATH, Endpoint(conversations.delete), methods=["DELETE"]),
    Route(f"{_CONVERSATION_PATH}/items", Endpoint(conversations.list_items), methods=["GET"]),
    Route(f"{_CONVERSATION_PATH}/items", Endpoint(conversations.add_items), methods=["POST"]),
    Route(_ITEM_PATH, Endpoint(conversations.retrieve_item), methods=["GET"]),
    Route(_ITEM_PATH, Endpoint(conversations.delete_item), methods=["DELETE"]),
    Route("/v1/chat/completions", Endpoint(chat_completions.create), methods=["POST"]),
    Route("/v1/messages", Endpoint(messages.create), methods=["POST"]),
    Route("/v1/messages/count_tokens", Endpoint(messages.count_tokens), methods=["POST"]),
    Route("/v1/models", Endpoint(list_models), methods=["GET"]),
    Route("/v1/models/{id:path}", Endpoint(retrieve_model), methods=["GET"]),
    Route("/healthz", Endpoint(healthz), methods=["GET"]),
    Route("/metrics", Endpoint(metrics), methods=["GET"]),
]
"""All HTTP routes."""


WEBSOCKET_ROUTES = [WebSocketRoute("/v1/responses", serve_websocket)]
"""All WebSocket routes."""


class ErrorMiddleware:
    """Middleware that converts expected errors to responses; any other one is an internal error.

    Starlette's own middleware builds a response in another thread, and wraps ``send`` twice.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, and respond to it if it fails."""
        try:
            await self._app(scope, receive, send)
        except (ApiError, StoreError, HTTPException, ClientDisconnect) as error:
            if scope.get(STATUS_KEY) != 0:
                raise  # it is a WebSocket, or a response has started
            await _build_response(scope, error)(scope, receive, send)


def _build_response(
    scope: Scope, error: ApiError | StoreError | HTTPException | ClientDisconnect
) -> Response:
    match error:
        case ApiError():
            return build_error_response(scope, error)
        case StoreError():
            log.error("%s", error)
            return build_error_response(scope, DATABASE_UNAVAILABLE())
        case ClientDisconnect():
            return EncodedResponse(b"")  # there is no client to read it
        case HTTPException():
            return _build_routing_error(scope, error)


def _build_routing_error(scope: Scope, error: HTTPException) -> Response:
    route = {"method": scope["method"], "path": scope["path"]}
    if error.status_code != 405:
        return build_error_response(scope, UNKNOWN_ROUTE(**route))
    response = build_error_response(scope, METHOD_NOT_ALLOWED(**route))
    response.headers["allow"] = format_allowed_methods(ROUTES, scope)
    return response


IDENTITY_HEADER = (b"kedge-server", b"kedge")


class IdentityMiddleware:
    """Middleware that adds the identity header to every HTTP response and WebSocket handshake.

    A client that recognizes this server does not need evidence that it uses stored context. While a fault
    of stored state is active, the header is omitted, so that the client does not recognize the server.
    """

    def __init__(self, app: ASGIApp, faults: Faults | None) -> None:
        self._app = app
        self._faults = faults

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, and add the header to its response."""
        is_hidden = self._faults is not None and MEMORY_FAULTS & self._faults.armed.keys()
        if not is_hidden and scope["type"] != "lifespan":
            scope[RESPONSE_HEADERS_KEY].append(IDENTITY_HEADER)
        await self._app(scope, receive, send)


class _ServerApp(Starlette):
    """A Starlette app with middleware of its own instead of the two for errors that Starlette adds."""

    def __init__(self, wrap: Callable[[ASGIApp], ASGIApp], **members: Any) -> None:
        super().__init__(**members)
        self._wrap = wrap

    def build_middleware_stack(self) -> ASGIApp:
        """Wrap the routes, and then add the middleware of a program that extends the app."""
        app = self._wrap(self.router)
        for middleware, arguments, options in reversed(self.user_middleware):
            app = middleware(app, *arguments, **options)
        return app


def create_app(
    settings: Settings | None = None,
    listener: Listener | None = None,
    *,
    on_finish: FinishListener | None = None,
    reply_bytes: int = 0,
) -> Starlette:
    """Build the ASGI app of one server.

    Args:
        settings: The settings of the server.
        listener: Called with the record of every request when it starts.
        on_finish: Called with the record and the scope of every request when it ends.
        reply_bytes: The number of bytes of each response body in the record at its end.

    Returns:
        The app; ``app.state.service`` is the state of the server.

    Raises:
        CannotServe: If the database cannot be opened.
    """
    settings = settings or Settings()
    service = ServerState(settings)
    background = BackgroundJobs(settings.limits, settings.clock)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncGenerator[None]:
        tasks = [asyncio.create_task(_purge_periodically(service))]
        if service.claims is not None:
            tasks.append(asyncio.create_task(_renew_claims(service.claims)))
            tasks.append(asyncio.create_task(_watch_claims(service, service.claims, background)))
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            await service.aclose()

    def wrap(app: ASGIApp) -> ASGIApp:
        app = ErrorMiddleware(app)
        if settings.faults is not None:
            app = FaultMiddleware(app, settings.faults)
        policy = AccessPolicy(settings.token, settings.hosts, settings.callers)
        app = ServerAuthMiddleware(app, policy=policy, header_bytes=settings.limits.header_bytes)
        app = IdentityMiddleware(app, settings.faults)
        return AccessLogMiddleware(app, listener, on_finish, reply_bytes)

    app = _ServerApp(wrap, routes=[*ROUTES, *WEBSOCKET_ROUTES], lifespan=lifespan)
    app.router.redirect_slashes = False  # the API has one URL for each resource
    app.state.service = service
    app.state.health = HealthCheck(service.check_database)
    app.state.background = background
    return app


async def _purge_periodically(service: ServerState) -> None:
    """Delete expired responses, at the start and then periodically, in small batches."""
    while True:
        with _log_outage():
            while await service.run(service.purge):
                await checkpoint()
        await asyncio.sleep(service.settings.purge_every)


async def _renew_claims(claims: ReplicaClaims) -> None:
    """Renew the claims of this server, in a separate thread so that nothing delays it."""
    while True:
        with _log_outage():
            await asyncio.to_thread(claims.renew)
        await asyncio.sleep(claims.lease_seconds / 3)


async def _watch_claims(
    service: ServerState, claims: ReplicaClaims, background: BackgroundJobs
) -> None:
    """Continue or fail unfinished responses of servers that are gone, and stop those that others cancelled."""
    round = 0
    while True:
        with _log_outage():
            await background.stop_lost(service, claims)
            await service.run(claims.fail_lost)
            await background.resume(service, claims)
            if round % CLEANUP_ROUNDS == 0:
                await service.run(claims.delete_old, service.settings.limits.stream_seconds)
        round += 1
        await asyncio.sleep(WATCH_SECONDS)


@contextlib.contextmanager
def _log_outage() -> Generator[None]:
    """Log why a round failed, and continue: the next one may find the database, or space on its disk."""
    try:
        yield
    except StoreError as error:
        log.warning("%s", error)
    except Exception as error:  # noqa: BLE001 - otherwise responses would never expire again
        log_failure("a periodic task of the server failed", error)
