"""Refusing a request in the words and the shape of the API that it speaks.

Everything under ``/v1/messages`` is Anthropic's, and so is any other route that both APIs have when
the request carries Anthropic's version header. All the rest is OpenAI's.
"""

from collections.abc import Mapping
from typing import Any

from starlette.responses import Response
from starlette.types import Scope

from kedge.server.errors import ApiError
from kedge.server.messages.words import body_of, status_of
from kedge.server.wire import encode

JSON = {"content-type": "application/json"}
SHARED = "/v1/models"
OWN = "/v1/messages"


def is_anthropic(scope: Scope) -> bool:
    """Tell whether a request speaks Anthropic's API."""
    path: str = scope["path"]
    if path == OWN or path.startswith(f"{OWN}/"):
        return True
    shared = path == SHARED or path.startswith(f"{SHARED}/")
    return shared and any(name == b"anthropic-version" for name, _ in scope["headers"])


def refusal(scope: Scope, error: ApiError) -> tuple[int, Mapping[str, Any]]:
    """Give the status and the body with which a request is refused."""
    if is_anthropic(scope):
        return status_of(error), body_of(error, scope.get("kedge.request_id"))
    return error.status, error.body()


def refuse(scope: Scope, error: ApiError) -> Response:
    """Answer with an error."""
    status, body = refusal(scope, error)
    return Response(encode(body), status, JSON | error.headers)
