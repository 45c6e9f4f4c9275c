"""Middleware that rejects requests with too large headers, a wrong host name, or a wrong token.

If there are tokens, every route except ``/healthz`` needs one. A named token gives its caller access to the
responses of its namespace, within its limits; the server's own token gives access to the administrator's.
"""

import logging
from itertools import chain

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from kedge.errors import StoreError
from kedge.server.access import (
    CALLER_KEY,
    AccessPolicy,
    is_same_origin,
    read_bearer_token,
    read_header,
)
from kedge.server.error_response import build_error_response, is_anthropic
from kedge.server.errors import (
    API_KEY_INVALID,
    API_KEY_MISSING,
    DATABASE_UNAVAILABLE,
    HEADERS_TOO_LARGE,
    HOST_NOT_ALLOWED,
    ORIGIN_NOT_ALLOWED,
    RATE_LIMITED,
    TOKEN_SCOPE_MISSING,
    TOKENS_LIMITED,
    ApiError,
)
from kedge.server.request_log import RESPONSE_HEADERS_KEY
from kedge.server.revocation import RevocationWatch

log = logging.getLogger("kedge.server")

PUBLIC_PATHS = frozenset({"/healthz"})
METRICS_PATH = "/metrics"


class ServerAuthMiddleware:
    """Middleware that rejects unauthorized requests, with an error of the API that they use.

    Args:
        app: The app that requests are passed to.
        policy: The accepted host names and tokens.
        header_bytes: The maximum size of all headers.
    """

    def __init__(self, app: ASGIApp, *, policy: AccessPolicy, header_bytes: int) -> None:
        self._app = app
        self._header_bytes = header_bytes
        self._policy = policy
        self._watch = RevocationWatch(policy.registry, _reject_revoked)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or reject it."""
        if scope["type"] in ("http", "websocket"):
            error = self._find_error(scope) or await self._authenticate(scope)
            if error is not None:
                await build_error_response(scope, error)(scope, receive, send)
                return
        await self._watch.run(self._app, scope, receive, send)

    def _find_error(self, scope: Scope) -> ApiError | None:
        if sum(map(len, chain.from_iterable(scope["headers"]))) > self._header_bytes:
            return HEADERS_TOO_LARGE(most=self._header_bytes)
        policy = self._policy
        if not policy.allows_host(scope):
            return HOST_NOT_ALLOWED()
        return None

    async def _authenticate(self, scope: Scope) -> ApiError | None:
        """Find the caller of a request, and return the error if it is rejected, or None."""
        try:
            return await self._find_caller(scope)
        except StoreError as error:
            log.warning("a token could not be checked: %s", error)
            return DATABASE_UNAVAILABLE()

    async def _find_caller(self, scope: Scope) -> ApiError | None:
        """Set the caller of a request, None for the administrator, and return the error if it is rejected."""
        if not await self._policy.needs_token():
            scope[CALLER_KEY] = None
            return None if is_same_origin(scope) else ORIGIN_NOT_ALLOWED()
        if scope["path"] in PUBLIC_PATHS:
            scope[CALLER_KEY] = None
            return None
        api_key = _read_api_key(scope)
        if not api_key:
            return API_KEY_MISSING()
        if self._policy.matches_token(api_key):
            scope[CALLER_KEY] = None
            return None
        caller = await self._policy.find_caller(api_key)
        if caller is None:
            return API_KEY_INVALID()
        needed = "metrics" if scope["path"] == METRICS_PATH else "server"
        # On a WebSocket each message is counted as a request.
        is_counted = scope["type"] == "http"
        check = await self._policy.check_caller(caller, needed, is_counted=is_counted)
        if check.problem == "scope":
            return TOKEN_SCOPE_MISSING(scope=needed)
        scope[CALLER_KEY] = caller
        scope.get(RESPONSE_HEADERS_KEY, []).extend(
            (name.encode(), value.encode()) for name, value in check.headers.items()
        )
        if check.problem is None:
            return None
        template = RATE_LIMITED if check.problem == "requests" else TOKENS_LIMITED
        return template(seconds=f"{check.seconds_left:.3g}")


def _reject_revoked(scope: Scope) -> Response:
    return build_error_response(scope, API_KEY_INVALID())


def _read_api_key(scope: Scope) -> bytes:
    """Return the bearer token or, for Anthropic's API, the key in the ``x-api-key`` header."""
    if is_anthropic(scope) and (key := read_header(scope, b"x-api-key").strip()):
        return key
    return read_bearer_token(scope)
