"""The ASGI app of the page and the API, alone or together with the server in one process.

The page sends its requests through the server of the same process.
"""

import asyncio
import hashlib
import secrets
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from kedge._internal.display import capitalize
from kedge.engines import Engine
from kedge.providers import connect
from kedge.server.app import create_app
from kedge.server.http import format_allowed_methods
from kedge.server.request_log import RequestMiddleware
from kedge.server.settings import Limits, Settings
from kedge.server.storage.database import IN_MEMORY
from kedge.server.uvicorn_server import UvicornServer
from kedge.store import AccessToken, open_store
from kedge.web import api, pages, security
from kedge.web.models import ModelSelector
from kedge.web.openapi import REPORTED_ERRORS, map_error
from kedge.web.page_templates import render_page
from kedge.web.server_requests import PAGE_HEADER, PAGE_KEY, ServerRequests
from kedge.web.service import ConversationService, UserServices

READ_SECONDS = Limits().read_seconds
ROUTES = [
    *pages.ROUTES,
    *(operation.route for operation in api.OPERATIONS),
    Route("/api/openapi.json", api.read_openapi),
]
"""Every route of the page and of the API."""


async def _on_error(request: Request, error: Exception) -> Response:
    """Return an error of the API, or a page about it."""
    if request.url.path.startswith("/api/"):
        response = _build_api_error(error)
    else:
        response = await _render_error(request, error)
    if response.status_code == 405:
        response.headers["allow"] = format_allowed_methods(ROUTES, request.scope)
    return response


def _build_api_error(error: Exception) -> Response:
    match error:
        case HTTPException(status_code=405):
            return security.error_response(405, "not_allowed", "method not allowed")
        case HTTPException(status_code=status):
            message = "not found; /api/openapi.json lists the routes"
            return security.error_response(status, "not_found", message)
        case _:
            status, code, message = map_error(error)
            return security.error_response(status, code, message)


async def _render_error(request: Request, error: Exception) -> Response:
    match error:
        case HTTPException(status_code=405 as status):
            title = "Not allowed"
            text = "This page does not accept that."
        case HTTPException(status_code=status):
            title = "Not found"
            text = "There is no such page."
        case _:
            status, _, message = map_error(error)
            title = _ERROR_TITLES.get(status, "Request failed")
            text = f"{capitalize(message)}."
    return await render_page(
        request, "error.html", section="", status=status, title=title, message=text
    )


_ERROR_TITLES = {404: "Not found", 413: "Request too large"}


def create_page(
    service: ConversationService,
    auth: security.PageAuth | None = None,
    base_url: str = "",
    services: UserServices | None = None,
    read_seconds: float = READ_SECONDS,
) -> Starlette:
    """Build the ASGI app of the page.

    Args:
        service: The service of the administrator.
        auth: The access policy of the page.
        base_url: The API address shown to users.
        services: The services of all users; by default, everyone is the administrator.
        read_seconds: The time to receive a request body.
    """
    auth = auth or security.PageAuth()
    app = Starlette(
        routes=ROUTES,
        middleware=[Middleware(RequestMiddleware, security.PageFrontEnd(auth))],
        exception_handlers=dict.fromkeys((HTTPException, *REPORTED_ERRORS), _on_error),
    )
    app.router.redirect_slashes = False
    app.state.services = services or UserServices(service)
    app.state.auth = auth
    app.state.login_throttle = security.LoginThrottle()
    app.state.base_url = base_url
    app.state.read_seconds = read_seconds
    app.state.recorder = None
    app.state.stopping = lambda: False
    return app


class PathDispatch:
    """A server and a page as one app: requests are dispatched by their paths.

    Each has its own middleware, so a cookie of the page does not grant access to the server.
    """

    def __init__(self, server: Starlette, page: Starlette) -> None:
        self.server = server
        self.page = page
        self.state = server.state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Dispatch a request by its path."""
        is_page = scope["type"] == "http" and not is_server_path(scope["path"])
        app: ASGIApp = self.page if is_page else self.server
        await app(scope, receive, send)


def is_server_path(path: str) -> bool:
    """Return whether a path belongs to the server."""
    return path in ("/v1", "/healthz", "/metrics") or path.startswith("/v1/")


@dataclass(frozen=True, slots=True)
class PageSettings:
    """Settings of a page: the address of its store, and settings of every Conversation."""

    store: str
    keep_bodies: bool = False
    requires_token: bool = False
    """Whether a token is required even if none has been created."""
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])


@asynccontextmanager
async def open_page_server(
    settings: Settings, page: PageSettings, url: str, started: Callable[[], None] | None = None
) -> AsyncGenerator[UvicornServer]:
    """Create a server with a page, ready to ``serve``; ``url`` is the address of both."""
    async with (
        open_store(page.store, keep_bodies=page.keep_bodies) as store,
        connect_own_server(settings, url) as engine,
        AsyncExitStack() as stack,
    ):
        models = ModelSelector(engine, model_names(settings), f"{url}/v1")
        stack.push_async_callback(models.aclose)
        tokens = security.DelegatedTokens(store, required=page.requires_token)
        settings = replace(settings, callers=tokens)
        service = ConversationService(store, models, page.settings)

        def connect_as(caller: AccessToken) -> Engine:
            return connect_own_server(settings, url, tokens.issue(caller))

        services = UserServices(service, connect_as)
        stack.push_async_callback(services.aclose)
        await service.deletions.resume(store, models)
        limits = settings.limits
        auth = security.PageAuth(settings.token, settings.any_host, tokens, limits.header_bytes)
        recorder = ServerRequests(store, f"{url}/v1")
        recording = asyncio.create_task(recorder.run())
        stack.push_async_callback(lambda: recording)
        stack.callback(recorder.stop)
        app = create_page(service, auth, f"{url}/v1", services, limits.read_seconds)
        app.state.recorder = recorder
        api = create_app(settings, on_finish=recorder.record, reply_bytes=recorder.reply_bytes)
        api.state.health.add(store.database.check_health)
        server = UvicornServer(PathDispatch(api, app), on_started=started)
        app.state.stopping = lambda: server.should_exit
        yield server


def connect_own_server(settings: Settings, url: str, token: str | None = None) -> Engine:
    """Return an engine for the server of this process, by default with the token in its settings."""
    return connect(
        f"responses:{url}/v1#{model_names(settings)[0]}",
        api_key=token or settings.token,
        scope=database_scope(settings.db),
        retention=settings.retention,
        default_headers={PAGE_HEADER: PAGE_KEY},
    )


def model_names(settings: Settings) -> tuple[str, ...]:
    """Return the names of the server's models, the default first."""
    names = tuple(settings.models) or (settings.model.name,)
    first = names[0]
    if settings.default and settings.default in names:
        first = settings.default
    return (first, *(name for name in names if name != first))


def database_scope(db: str) -> str:
    """Return the scope of a server database: the same file has the same scope at any address."""
    if db == IN_MEMORY:
        return f"kedge/{secrets.token_hex(8)}"
    return f"kedge/{hashlib.sha256(db.encode()).hexdigest()[:16]}"
