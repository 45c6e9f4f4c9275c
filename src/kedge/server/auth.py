"""Middleware that rejects requests with too large headers, a wrong host name, or a wrong token.

If there are tokens, every route except ``/healthz`` needs one. A named token gives its caller access to the
responses of its namespace, within its limits; the server's own token gives access to the administrator's.
"""

import logging
import math
from itertools import chain

from starlette.types import ASGIApp, Receive, Scope, Send

from kedge.errors import StoreError
from kedge.server.access import (
    CALLER_KEY,
    LOOPBACK_NAMES,
    AccessPolicy,
    Caller,
    CallerRegistry,
    WindowCounts,
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
    ErrorTemplate,
)
from kedge.server.request_log import RESPONSE_HEADERS_KEY

__all__ = ["LOOPBACK_NAMES", "PUBLIC_PATHS", "ServerAuthMiddleware"]

log = logging.getLogger("kedge.server")

PUBLIC_PATHS = frozenset({"/healthz"})
METRICS_PATH = "/metrics"


class ServerAuthMiddleware:
    """Middleware that rejects unauthorized requests, with an error of the API that they use.

    Args:
        app: The app that requests are passed to.
        token: The token that clients must send, or None.
        hosts: The accepted host names, or None for any.
        header_bytes: The maximum size of all headers.
        callers: Named tokens that are accepted as well, or None.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        token: str | None,
        hosts: frozenset[str] | None,
        header_bytes: int,
        callers: CallerRegistry | None = None,
    ) -> None:
        self._app = app
        self._callers = callers
        self._header_bytes = header_bytes
        self._policy = AccessPolicy(token, hosts)
        self._has_tokens = token is not None or callers is not None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or reject it."""
        if scope["type"] in ("http", "websocket"):
            error = self._find_error(scope)
            if error is None and not self._has_tokens:
                scope[CALLER_KEY] = None
            elif error is None:
                error = await self._authenticate(scope)
            if error is not None:
                await build_error_response(scope, error)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _find_error(self, scope: Scope) -> ApiError | None:
        if sum(map(len, chain.from_iterable(scope["headers"]))) > self._header_bytes:
            return HEADERS_TOO_LARGE(most=self._header_bytes)
        policy = self._policy
        if not policy.allows_host(scope):
            return HOST_NOT_ALLOWED()
        if policy.hosts is not None and scope["type"] == "websocket" and not is_same_origin(scope):
            return ORIGIN_NOT_ALLOWED()
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
        if scope["path"] in PUBLIC_PATHS or not await self._needs_token():
            scope[CALLER_KEY] = None
            return None
        api_key = _read_api_key(scope)
        if not api_key:
            return API_KEY_MISSING()
        if self._policy.matches_token(api_key):
            scope[CALLER_KEY] = None
            return None
        caller: Caller | None = None
        if self._callers is not None:
            caller = await self._callers.find(api_key.decode("latin-1"))
        if caller is None:
            return API_KEY_INVALID()
        needed = "metrics" if scope["path"] == METRICS_PATH else "server"
        if needed not in caller.scopes:
            return TOKEN_SCOPE_MISSING(scope=needed)
        scope[CALLER_KEY] = caller
        # On a WebSocket each message is counted as a request.
        return await self._check_limits(scope, caller) if scope["type"] == "http" else None

    async def _needs_token(self) -> bool:
        if self._policy.token is not None:
            return True
        return self._callers is not None and await self._callers.is_required()

    async def _check_limits(self, scope: Scope, caller: Caller) -> ApiError | None:
        """Count a request, and add the rate limit headers of the hosted API to its response."""
        if self._callers is None or not has_limits(caller):
            return None
        counts = await self._callers.count(caller.name, requests=1)
        headers = rate_limit_headers(caller, counts)
        scope.get(RESPONSE_HEADERS_KEY, []).extend(
            (name.encode(), value.encode()) for name, value in headers.items()
        )
        exceeded = find_exceeded_limit(caller, counts)
        if exceeded is None:
            return None
        error = exceeded(seconds=f"{counts.seconds_left:.3g}")
        error.headers["retry-after"] = str(math.ceil(counts.seconds_left))
        return error


def has_limits(caller: Caller) -> bool:
    """Return whether a caller has a limit."""
    return caller.requests_per_minute is not None or caller.tokens_per_minute is not None


def find_exceeded_limit(caller: Caller, counts: WindowCounts) -> ErrorTemplate | None:
    """Return the error of the limit that a counted request exceeds, or None."""
    if caller.requests_per_minute is not None and counts.requests > caller.requests_per_minute:
        return RATE_LIMITED
    if caller.tokens_per_minute is not None and counts.tokens >= caller.tokens_per_minute:
        return TOKENS_LIMITED
    return None


def rate_limit_headers(caller: Caller, counts: WindowCounts) -> dict[str, str]:
    """Return the rate limit headers of the hosted API, for the limits of a caller."""
    used = {
        "requests": (caller.requests_per_minute, counts.requests),
        "tokens": (caller.tokens_per_minute, counts.tokens),
    }
    headers: dict[str, str] = {}
    for name, (limit, count) in used.items():
        if limit is not None:
            headers[f"x-ratelimit-limit-{name}"] = str(limit)
            headers[f"x-ratelimit-remaining-{name}"] = str(max(limit - count, 0))
            headers[f"x-ratelimit-reset-{name}"] = f"{math.ceil(counts.seconds_left)}s"
    return headers


def _read_api_key(scope: Scope) -> bytes:
    """Return the bearer token or, for Anthropic's API, the key in the ``x-api-key`` header."""
    if is_anthropic(scope) and (key := read_header(scope, b"x-api-key").strip()):
        return key
    return read_bearer_token(scope)
