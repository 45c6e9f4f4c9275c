"""Middleware that rejects requests with too large headers, a wrong host name, or a wrong token.

If a token is set, every route except ``/healthz`` needs it.
"""

from starlette.types import ASGIApp, Receive, Scope, Send

from kedge.server.access import (
    LOOPBACK_NAMES,
    AccessPolicy,
    is_same_origin,
    read_bearer_token,
    read_header,
)
from kedge.server.error_response import build_error_response, is_anthropic
from kedge.server.errors import (
    API_KEY_INVALID,
    API_KEY_MISSING,
    HEADERS_TOO_LARGE,
    HOST_NOT_ALLOWED,
    ORIGIN_NOT_ALLOWED,
    ApiError,
)

__all__ = ["LOOPBACK_NAMES", "PUBLIC_PATHS", "ServerAuthMiddleware"]

PUBLIC_PATHS = frozenset({"/healthz"})


class ServerAuthMiddleware:
    """Rejects requests that may not come in, with an error of the API that they use.

    Args:
        app: The app behind it.
        token: The token that clients must send, or None.
        hosts: The accepted host names, or None for any.
        header_bytes: The maximum size of all headers.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        token: str | None,
        hosts: frozenset[str] | None,
        header_bytes: int,
    ) -> None:
        self._app = app
        self._header_bytes = header_bytes
        self._policy = AccessPolicy(token, hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or reject it."""
        is_request = scope["type"] in ("http", "websocket")
        if is_request and (error := self._find_error(scope)) is not None:
            await build_error_response(scope, error)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _find_error(self, scope: Scope) -> ApiError | None:
        if sum(len(name) + len(value) for name, value in scope["headers"]) > self._header_bytes:
            return HEADERS_TOO_LARGE(most=self._header_bytes)
        policy = self._policy
        if not policy.allows_host(scope):
            return HOST_NOT_ALLOWED()
        if policy.hosts is not None and scope["type"] == "websocket" and not is_same_origin(scope):
            return ORIGIN_NOT_ALLOWED()
        if policy.token is None or scope["path"] in PUBLIC_PATHS:
            return None
        given = _read_api_key(scope)
        if not given:
            return API_KEY_MISSING()
        return None if policy.matches_token(given) else API_KEY_INVALID()


def _read_api_key(scope: Scope) -> bytes:
    """Return the bearer token; for Anthropic's API also the key in its own header."""
    if is_anthropic(scope) and (key := read_header(scope, b"x-api-key").strip()):
        return key
    return read_bearer_token(scope)
