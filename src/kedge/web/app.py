"""The ASGI app of the page and the API, and its combination with the server."""

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from kedge.errors import KedgeError, NotInStore
from kedge.server.request_log import AccessLogMiddleware
from kedge.text_format import capitalize
from kedge.web import api, pages
from kedge.web.openapi import RequestError, map_error
from kedge.web.security import LoginThrottle, PageAuth, PageAuthMiddleware, error_response
from kedge.web.service import ConversationService
from kedge.web.templating import render_page
from kedge.web.users import UserServices

ROUTES = [
    *pages.ROUTES,
    *(operation.route for operation in api.OPERATIONS),
    Route("/api/openapi.json", api.read_openapi),
]
"""Every route of the page and of the API."""


def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)  # noqa: S101 - registered for these only
    if request.url.path.startswith("/api/"):
        code, message = (
            ("not_allowed", "method not allowed")
            if error.status_code == 405
            else (
                "not_found",
                "not found; /api/openapi.json lists the routes",
            )
        )
        answer = error_response(error.status_code, code, message)
        answer.headers.update(error.headers or {})
        return answer
    return _render_error(request, error.status_code, "Not found", "There is no such page.")


def _on_kedge_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, KedgeError)  # noqa: S101 - registered for these only
    status, code, message = map_error(error)
    if request.url.path.startswith("/api/"):
        return error_response(status, code, message)
    title = "Not found" if isinstance(error, NotInStore) else "Request failed"
    return _render_error(request, status, title, f"{capitalize(message)}.")


def _on_request_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)  # noqa: S101 - registered for these only
    return _render_error(request, error.status, "Request too large", f"{error.message}.")


def _render_error(request: Request, status: int, title: str, message: str) -> Response:
    return render_page(request, "error.html", here="", status=status, title=title, message=message)


def create_page(
    service: ConversationService,
    auth: PageAuth | None = None,
    base_url: str = "",
    services: UserServices | None = None,
) -> Starlette:
    """Build the ASGI app of the page.

    Args:
        service: The service of the administrator.
        auth: Who may use the page.
        base_url: The API address shown to users.
        services: The services of all users; by default, everyone is the administrator.
    """
    auth = auth or PageAuth()
    app = Starlette(
        routes=ROUTES,
        middleware=[Middleware(AccessLogMiddleware), Middleware(PageAuthMiddleware, terms=auth)],
        exception_handlers={
            HTTPException: _on_http_error,
            KedgeError: _on_kedge_error,
            RequestError: _on_request_error,
        },
    )
    app.router.redirect_slashes = False
    app.state.service = service
    app.state.services = services or UserServices(service)
    app.state.auth = auth
    app.state.login_throttle = LoginThrottle()
    app.state.base_url = base_url
    app.state.recorder = None
    app.state.stopping = lambda: False
    return app


class PathDispatch:
    """A server and a page as one app: the server's paths go to the server, all others to the page.

    Each has its own middleware, so a cookie of the page gives no access to the server.
    """

    def __init__(self, server: Starlette, page: Starlette) -> None:
        self.server, self.page = server, page
        self.state = server.state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Dispatch a request by its path."""
        is_page = scope["type"] == "http" and not is_server_path(scope["path"])
        app: ASGIApp = self.page if is_page else self.server
        await app(scope, receive, send)


def is_server_path(path: str) -> bool:
    """Return whether a path belongs to the server."""
    return path in ("/v1", "/healthz", "/metrics") or path.startswith("/v1/")
