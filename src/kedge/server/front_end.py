"""How the server reads the credentials of requests, and formats errors in the format of the API that a request uses.

If there are tokens, every route except ``/healthz`` needs one. A named token gives its caller access to the
responses of its namespace, within its limits; the server's own token gives access to the administrator's.

Everything below ``/v1/messages`` is Anthropic's API, and so is a route that both APIs have if the
request has Anthropic's version header. Everything else is OpenAI's.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.routing import Match, Route
from starlette.types import Scope

from kedge.server import errors
from kedge.server.access import (
    AccessPolicy,
    Credentials,
    Rejection,
    read_bearer_token,
    read_header,
)
from kedge.server.anthropic.errors import error_body, error_status
from kedge.server.errors import ApiError
from kedge.server.request_log import REQUEST_ID_KEY, FrontEnd, Headers
from kedge.text.json_text import encode, encode_escaped

JSON_HEADERS = {"content-type": "application/json"}
MODELS_PATHS = "/v1/models/"
MESSAGES_PATHS = "/v1/messages/"
"""The beginning of the paths of these routes, with a slash at their end."""


class EscapedJSONResponse(JSONResponse):
    """A response with JSON that may contain recorded text: lone surrogates are escaped."""

    def render(self, content: Any) -> bytes:
        """Encode the content."""
        return encode_escaped(content)


def is_anthropic(scope: Scope) -> bool:
    """Return whether a request uses Anthropic's API."""
    path = f"{scope['path']}/"
    if path.startswith(MESSAGES_PATHS):
        return True
    is_shared = path.startswith(MODELS_PATHS)
    return is_shared and any(name == b"anthropic-version" for name, _ in scope["headers"])


def render_error(scope: Scope, error: ApiError) -> tuple[int, Mapping[str, Any]]:
    """Return the status and the body of an error response."""
    if is_anthropic(scope):
        return error_status(error), error_body(error, scope.get("kedge.request_id"))
    return error.status, error.body()


def build_error_response(scope: Scope, error: ApiError) -> Response:
    """Build the response for an error."""
    status, body = render_error(scope, error)
    return Response(encode(body), status, JSON_HEADERS | error.headers)


def build_access_error(rejection: Rejection, policy: AccessPolicy) -> errors.ApiError:
    """Return a rejection as an error of the API."""
    match rejection.problem:
        case "headers":
            return errors.HEADERS_TOO_LARGE(most=policy.header_bytes)
        case "host":
            return errors.HOST_NOT_ALLOWED()
        case "origin":
            return errors.ORIGIN_NOT_ALLOWED()
        case "missing":
            return errors.API_KEY_MISSING()
        case "invalid":
            return errors.API_KEY_INVALID()
        case "scope":
            return errors.TOKEN_SCOPE_MISSING(scope=rejection.needed)
        case "requests":
            return errors.RATE_LIMITED(seconds=f"{rejection.seconds_left:.3g}")
        case "tokens":
            return errors.TOKENS_LIMITED(seconds=f"{rejection.seconds_left:.3g}")
        case "outage":
            return errors.DATABASE_UNAVAILABLE()


def format_allowed_methods(routes: Iterable[Route], scope: Scope) -> str:
    """Return the ``allow`` header for a path: the methods of all routes that it matches."""
    fitting = (route for route in routes if route.matches(scope)[0] is not Match.NONE)
    return ", ".join(sorted(set[str]().union(*(route.methods or () for route in fitting))))


PUBLIC_PATHS = frozenset({"/healthz"})
METRICS_PATH = "/metrics"
IDENTITY_HEADER = (b"kedge-server", b"kedge")


class ServerFrontEnd(FrontEnd):
    """The front end of the server, with the errors of the API that a request uses.

    Each response and WebSocket handshake has the identity header: a client that recognizes this server does not need
    evidence that it uses stored context.

    Args:
        policy: Decides who may send requests.
        is_hidden: Returns whether the header is omitted, so that a client does not recognize the server.
    """

    def __init__(self, policy: AccessPolicy, is_hidden: Callable[[], bool]) -> None:
        super().__init__(policy)
        self._is_hidden = is_hidden

    def read_credentials(self, scope: Scope) -> Credentials:
        """Read the bearer token or, for Anthropic's API, the key in the ``x-api-key`` header."""
        key = read_header(scope, b"x-api-key").strip() if is_anthropic(scope) else b""
        return Credentials(
            key or read_bearer_token(scope),
            needed="metrics" if scope["path"] == METRICS_PATH else "server",
            is_public=scope["path"] in PUBLIC_PATHS,
        )

    def build_rejection(self, scope: Scope, rejection: Rejection) -> Response:
        """Return the error of the API."""
        return build_error_response(scope, build_access_error(rejection, self.policy))

    def build_failure(self, scope: Scope) -> Response:
        """Return an internal error of the API."""
        return build_error_response(scope, errors.INTERNAL_ERROR())

    def list_headers(self, scope: Scope) -> Headers:
        """Return the id of a request, and the identity of the server."""
        headers = super().list_headers(scope)
        if is_anthropic(scope):
            headers.append((b"request-id", scope[REQUEST_ID_KEY].encode()))
        if not self._is_hidden():
            headers.append(IDENTITY_HEADER)
        return headers
