"""Who may talk to the server: modest headers, the right host name, the right token.

A server on loopback needs no token, but any page in a browser on the same machine can reach it
under a name of its own that resolves to 127.0.0.1; so there the ``Host`` header must be a loopback
name. A page may also open a WebSocket to any name, and then says where it comes from: that must be
the server itself. Where a token is set, every route but ``/healthz`` needs it.
"""

import hmac

from starlette.types import ASGIApp, Receive, Scope, Send

from kedge.server.errors import (
    HEADERS_TOO_LARGE,
    HOST_REFUSED,
    KEY_MISSING,
    KEY_REFUSED,
    ORIGIN_REFUSED,
    ApiError,
)
from kedge.server.refusing import is_anthropic, refuse

OPEN_PATHS = frozenset({"/healthz"})
LOOPBACK_NAMES = frozenset({"127.0.0.1", "localhost", "[::1]"})


class Guard:
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
        if asks and (error := self._objection(scope)) is not None:
            await refuse(scope, error)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _objection(self, scope: Scope) -> ApiError | None:
        if sum(len(name) + len(value) for name, value in scope["headers"]) > self._header_bytes:
            return HEADERS_TOO_LARGE(most=self._header_bytes)
        if self._hosts is not None and _host_name(_header(scope, b"host")) not in self._hosts:
            return HOST_REFUSED()
        if self._hosts is not None and scope["type"] == "websocket" and _is_foreign(scope):
            return ORIGIN_REFUSED()
        if self._token is None or scope["path"] in OPEN_PATHS:
            return None
        given = _key(scope)
        if not given:
            return KEY_MISSING()
        return None if hmac.compare_digest(given, self._token) else KEY_REFUSED()


def _key(scope: Scope) -> bytes:
    """Read the key of a request: a bearer token, for Anthropic's API also under its own name."""
    if is_anthropic(scope) and (key := _header(scope, b"x-api-key").strip()):
        return key
    scheme, _, given = _header(scope, b"authorization").partition(b" ")
    return given.strip() if scheme.lower() == b"bearer" else b""


def _header(scope: Scope, wanted: bytes) -> bytes:
    for name, value in scope["headers"]:
        if name == wanted:
            return value
    return b""


def _is_foreign(scope: Scope) -> bool:
    origin = _header(scope, b"origin")
    return bool(origin) and origin.partition(b"://")[2] != _header(scope, b"host")


def _host_name(host: bytes) -> str:
    """Read the name out of ``name:port``; an IPv6 address keeps its brackets."""
    name = host.decode("latin-1").lower()
    if name.startswith("["):
        return name.partition("]")[0] + "]"
    return name.partition(":")[0]
