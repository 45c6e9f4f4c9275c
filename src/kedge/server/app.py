"""The ASGI app: routes, small endpoints, middleware, error responses, and the deletion of expired responses."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from datetime import UTC, datetime
from functools import partial
from http import HTTPStatus
from itertools import count
from typing import Any

from anyio.lowlevel import checkpoint
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, HTTPConnection, Request
from starlette.responses import Response
from starlette.routing import Route, WebSocketRoute
from starlette.types import Scope
from starlette.websockets import WebSocket

from kedge._internal.urls import find_doubled_part
from kedge.errors import StoreError
from kedge.server import errors, http, request_log
from kedge.server.background import BackgroundJobs
from kedge.server.errors import ApiError
from kedge.server.faults.middleware import FaultMiddleware
from kedge.server.models import Model
from kedge.server.routes import chat_completions, conversations, messages, responses
from kedge.server.settings import Settings
from kedge.server.state import ServerState
from kedge.server.storage.postgres import ReplicaClaims
from kedge.server.websocket import ServerConnection
from kedge.store.database.transactions import HealthCheck

log = logging.getLogger("kedge.server")

WATCH_SECONDS = 1.0
"""Seconds between two checks for responses that other servers have cancelled or not finished."""
CLEANUP_ROUNDS = 60
"""The number of these checks after which old events are deleted."""


async def list_models(request: Request) -> Response:
    """Answer ``GET /v1/models``."""
    models = http.get_service(request).models
    data = [_serialize_model(request, name, model) for name, model in models.items()]
    if not http.is_anthropic(request.scope):
        return http.respond_json({"object": "list", "data": data})
    names = list(models)
    page = {"has_more": False, "first_id": names[0], "last_id": names[-1]}
    return http.respond_json({"data": data, **page})


async def retrieve_model(request: Request) -> Response:
    """Answer ``GET /v1/models/{id}``."""
    name: str = request.path_params["id"]
    model = http.get_service(request).models.get(name)
    if model is None:
        raise errors.MODEL_NOT_ACCESSIBLE(model=name)
    return http.respond_json(_serialize_model(request, name, model))


def _serialize_model(request: Request, name: str, model: Model) -> dict[str, Any]:
    if not http.is_anthropic(request.scope):
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
    service = http.get_service(websocket)
    await ServerConnection(service, websocket.scope, websocket.receive, websocket.send).serve()


_CONVERSATION_PATH = "/v1/conversations/{id}"
_ITEM_PATH = "/v1/conversations/{id}/items/{item}"

ROUTES = [
    Route("/v1/responses", responses.create, methods=["POST"]),
    Route("/v1/responses/input_tokens", responses.count_input_tokens, methods=["POST"]),
    Route("/v1/responses/compact", responses.compact_context, methods=["POST"]),
    Route("/v1/responses/{id}", responses.retrieve, methods=["GET"]),
    Route("/v1/responses/{id}", responses.delete, methods=["DELETE"]),
    Route("/v1/responses/{id}/cancel", responses.cancel, methods=["POST"]),
    Route("/v1/responses/{id}/input_items", responses.list_input_items, methods=["GET"]),
    Route("/v1/conversations", conversations.create, methods=["POST"]),
    Route(_CONVERSATION_PATH, conversations.retrieve, methods=["GET"]),
    Route(_CONVERSATION_PATH, conversations.update, methods=["POST"]),
    Route(_CONVERSATION_PATH, conversations.delete, methods=["DELETE"]),
    Route(f"{_CONVERSATION_PATH}/items", conversations.list_items, methods=["GET"]),
    Route(f"{_CONVERSATION_PATH}/items", conversations.add_items, methods=["POST"]),
    Route(_ITEM_PATH, conversations.retrieve_item, methods=["GET"]),
    Route(_ITEM_PATH, conversations.delete_item, methods=["DELETE"]),
    Route("/v1/chat/completions", chat_completions.create, methods=["POST"]),
    Route("/v1/messages", messages.create, methods=["POST"]),
    Route("/v1/messages/count_tokens", messages.count_tokens, methods=["POST"]),
    Route("/v1/models", list_models, methods=["GET"]),
    Route("/v1/models/{id:path}", retrieve_model, methods=["GET"]),
    Route("/healthz", request_log.healthz, methods=["GET"]),
    Route("/metrics", request_log.metrics, methods=["GET"]),
]
"""All HTTP routes."""


WEBSOCKET_ROUTES = [WebSocketRoute("/v1/responses", serve_websocket)]
"""All WebSocket routes."""


async def _respond_error(connection: HTTPConnection, error: Exception) -> Response:
    """Respond to an expected error; any other one is an internal error."""
    match error:
        case _ if connection.scope["type"] != "http":
            raise error
        case ApiError():
            return http.build_error_response(connection.scope, error)
        case HTTPException():
            return _respond_unrouted(connection.scope, error)
        case ClientDisconnect():
            return http.respond_encoded(b"")  # there is no client to read it
        case StoreError():
            log.error("%s", error)
            failure = errors.DATABASE_UNAVAILABLE(problem=error.problem)
            return http.build_error_response(connection.scope, failure)
        case _:
            raise error


def _respond_unrouted(scope: Scope, error: HTTPException) -> Response:
    """Respond to a request for a route that does not exist, or that does not have its method."""
    method = scope["method"]
    path = scope["path"]
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        not_allowed = errors.METHOD_NOT_ALLOWED(method=method, path=path)
        response = http.build_error_response(scope, not_allowed)
        response.headers["allow"] = http.format_allowed_methods(ROUTES, scope)
        return response
    doubled_part = find_doubled_part(path)
    if doubled_part:
        doubled = errors.DOUBLED_ROUTE(method=method, path=path, part=doubled_part)
        return http.build_error_response(scope, doubled)
    return http.build_error_response(scope, errors.UNKNOWN_ROUTE(method=method, path=path))


EXPECTED_ERRORS = (ApiError, StoreError, HTTPException, ClientDisconnect)


def create_app(
    settings: Settings | None = None,
    listener: request_log.Listener | None = None,
    *,
    on_finish: request_log.FinishListener | None = None,
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
    service = ServerState.open(settings)
    background = BackgroundJobs(settings.limits, settings.clock)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncGenerator[None]:
        tasks = _start_tasks(service, background)
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            await service.aclose()

    faults = settings.faults
    front = http.ServerFrontEnd(service.access, faults, encrypts=service.settings.encrypts)
    middleware = [
        Middleware(request_log.RequestMiddleware, front, listener, on_finish, reply_bytes)
    ]
    if faults is not None:
        middleware.append(Middleware(FaultMiddleware, faults))
    app = Starlette(
        routes=[*ROUTES, *WEBSOCKET_ROUTES],
        middleware=middleware,
        exception_handlers=dict.fromkeys(EXPECTED_ERRORS, _respond_error),
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False  # the API has one URL for each resource
    app.state.service = service
    app.state.health = HealthCheck(service.check_health)
    app.state.background = background
    return app


def _start_tasks(service: ServerState, background: BackgroundJobs) -> "list[asyncio.Task[None]]":
    """Start the periodic tasks of a server."""
    work = [_repeat(service.settings.purge_every, partial(_purge, service))]
    claims = service.claims
    if claims is not None:
        # In a separate thread, so that nothing delays it.
        renew = partial(asyncio.to_thread, claims.renew)
        watch = partial(_watch_claims, service, claims, background, count())
        work.append(_repeat(claims.lease_seconds / 3, renew))
        work.append(_repeat(WATCH_SECONDS, watch))
    return [asyncio.create_task(repeated) for repeated in work]


async def _repeat(seconds: float, work: Callable[[], Awaitable[None]]) -> None:
    """Do something now and then periodically.

    If it fails, the log says why: the next time may find the database, or space on its disk.
    """
    while True:
        try:
            await work()
        except StoreError as error:
            log.warning("%s", error)
        except Exception as error:  # noqa: BLE001 - otherwise responses would never expire again
            request_log.log_failure("a periodic task of the server failed", error)
        await asyncio.sleep(seconds)


async def _purge(service: ServerState) -> None:
    """Delete expired responses in small batches."""
    while await service.run(service.purge, is_long=True):
        await checkpoint()


async def _watch_claims(
    service: ServerState, claims: ReplicaClaims, background: BackgroundJobs, rounds: Iterator[int]
) -> None:
    """Continue or fail unfinished responses of servers that are gone, and stop responses that others cancelled."""
    await background.stop_lost(service, claims)
    await service.run(claims.fail_lost)
    await background.resume(service, claims)
    if next(rounds) % CLEANUP_ROUNDS == 0:
        await service.run(claims.delete_old, service.settings.limits.stream_seconds)
