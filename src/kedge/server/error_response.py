"""Build error responses in the format of the API that a request uses.

Everything below ``/v1/messages`` is Anthropic's API, and so is a route that both APIs have if the
request has Anthropic's version header. Everything else is OpenAI's.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.routing import Match, Route
from starlette.types import Scope

from kedge.server import errors
from kedge.server.access import AccessPolicy, Rejection
from kedge.server.anthropic.errors import error_body, error_status
from kedge.server.errors import ApiError
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
