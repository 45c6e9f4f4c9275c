"""Who may talk to the server: modest headers, the right host name, the right token.

A server on loopback needs no token, but any page in a browser on the same machine can reach it
under a name of its own that resolves to 127.0.0.1; so there the ``Host`` header must be a loopback
name. A page may also open a WebSocket to any name, and then says where it comes from: that must be
the server itself. Where a token is set, every route but ``/healthz`` needs it.
"""

import hmac

from starlette.types import ASGIApp, Receive, Scope, Send

from kedge.server.error_response import build_error_response, is_anthropic
from kedge.server.errors import (
    API_KEY_INVALID,
    API_KEY_MISSING,
    HEADERS_TOO_LARGE,
    HOST_NOT_ALLOWED,
    ORIGIN_NOT_ALLOWED,
    ApiError,
)

PUBLIC_PATHS = frozenset({"/healthz"})
LOOPBACK_NAMES = frozenset({"127.0.0.1", "localhost", "[::1]"})


class ServerAuthMiddleware:
    """Middleware that refuses strangers. ``hosts`` limits the names that are answered to."""

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
        self._token = None if token is None else token.encode()
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or refuse it."""
        asks = scope["type"] in ("http", "websocket")
        if asks and (error := self._find_error(scope)) is not None:
            await build_error_response(scope, error)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _find_error(self, scope: Scope) -> ApiError | None:
        if sum(len(name) + len(value) for name, value in scope["headers"]) > self._header_bytes:
            return HEADERS_TOO_LARGE(most=self._header_bytes)
        if (
            self._hosts is not None
            and _parse_host_name(_read_header(scope, b"host")) not in self._hosts
        ):
            return HOST_NOT_ALLOWED()
        if self._hosts is not None and scope["type"] == "websocket" and _is_cross_origin(scope):
            return ORIGIN_NOT_ALLOWED()
        if self._token is None or scope["path"] in PUBLIC_PATHS:
            return None
        given = _read_api_key(scope)
        if not given:
            return API_KEY_MISSING()
        return None if hmac.compare_digest(given, self._token) else API_KEY_INVALID()


def _read_api_key(scope: Scope) -> bytes:
    """Read the key of a request: a bearer token, for Anthropic's API also under its own name."""
    if is_anthropic(scope) and (key := _read_header(scope, b"x-api-key").strip()):
        return key
    scheme, _, given = _read_header(scope, b"authorization").partition(b" ")
    return given.strip() if scheme.lower() == b"bearer" else b""


def _read_header(scope: Scope, header_name: bytes) -> bytes:
    for name, value in scope["headers"]:
        if name == header_name:
            return value
    return b""


def _is_cross_origin(scope: Scope) -> bool:
    origin = _read_header(scope, b"origin")
    return bool(origin) and origin.partition(b"://")[2] != _read_header(scope, b"host")


def _parse_host_name(host: bytes) -> str:
    """Read the name out of ``name:port``; an IPv6 address keeps its brackets."""
    name = host.decode("latin-1").lower()
    if name.startswith("["):
        return name.partition("]")[0] + "]"
    return name.partition(":")[0]
