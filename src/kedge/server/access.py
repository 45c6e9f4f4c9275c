"""Access control by host name, origin and token, shared by the server, the page and the proxy.

A server on loopback needs no token, but any web page in a browser on the same machine can reach it
through a host name that resolves to 127.0.0.1. So there the ``Host`` header must be a loopback name. A
web page may also send requests to a loopback name; its ``Origin`` header must then be the server itself.
"""

import hmac
from dataclasses import dataclass
from typing import Protocol

from starlette.types import Scope

LOOPBACK_NAMES = frozenset({"127.0.0.1", "localhost", "[::1]"})

CALLER_KEY = "kedge.caller"
"""The key of a request's scope for the `Caller` whose token it was sent with; None for the administrator.

A request that the server has not accepted does not have it."""


class Caller(Protocol):
    """The owner of a named token. The administrator, who uses the server's own token, is not a caller."""

    @property
    def name(self) -> str:
        """The name of the token."""
        ...

    @property
    def namespace(self) -> str:
        """The namespace of the caller; empty for that of the administrator."""
        ...

    @property
    def scopes(self) -> frozenset[str]:
        """The scopes of the token: ``server``, ``page``, ``api``, ``metrics``."""
        ...

    @property
    def requests_per_minute(self) -> int | None:
        """The maximum number of requests per minute, or None."""
        ...

    @property
    def tokens_per_minute(self) -> int | None:
        """The maximum number of tokens of models per minute, or None."""
        ...


class WindowCounts(Protocol):
    """The counts of a token in the current minute."""

    @property
    def requests(self) -> int:
        """The number of requests."""
        ...

    @property
    def tokens(self) -> int:
        """The number of tokens of models."""
        ...

    @property
    def seconds_left(self) -> float:
        """The seconds until the next minute."""
        ...


class CallerRegistry(Protocol):
    """Protocol of registries that find the callers of tokens, and count their requests and tokens."""

    async def is_required(self) -> bool:
        """Return whether requests need a token even if the server itself has none."""
        ...

    async def find(self, token: str) -> Caller | None:
        """Return the caller of a token, or None."""
        ...

    async def count(self, name: str, *, requests: int = 0, tokens: int = 0) -> WindowCounts:
        """Add to the counts of the current minute, and return them."""
        ...


@dataclass(frozen=True, slots=True)
class AccessPolicy:
    """The accepted host names, and the token that clients must send.

    Args:
        token: The token, or None if no token is required.
        hosts: The accepted host names, or None for any.
    """

    token: str | None = None
    hosts: frozenset[str] | None = None

    def allows_host(self, scope: Scope) -> bool:
        """Return whether the request's ``Host`` is accepted."""
        return self.hosts is None or parse_host_name(read_header(scope, b"host")) in self.hosts

    def matches_token(self, candidate: bytes) -> bool:
        """Return whether this is the token, in constant time."""
        return self.token is not None and hmac.compare_digest(candidate, self.token.encode())


def is_same_origin(scope: Scope) -> bool:
    """Return whether the ``Origin`` of a request is absent or the server itself."""
    origin = read_header(scope, b"origin").lower()
    return not origin or origin.partition(b"://")[2] == read_header(scope, b"host").lower()


def read_bearer_token(scope: Scope) -> bytes:
    """Return the bearer token of the ``Authorization`` header, or an empty value."""
    scheme, _, token = read_header(scope, b"authorization").partition(b" ")
    return token.strip() if scheme.lower() == b"bearer" else b""


def read_header(scope: Scope, header_name: bytes) -> bytes:
    """Return the first header of this (lowercase) name, or an empty value."""
    for name, value in scope["headers"]:
        if name == header_name:
            return value
    return b""


def parse_host_name(host: bytes) -> str:
    """Return the name in ``name:port``; an IPv6 address includes its brackets."""
    name = host.decode("latin-1").lower()
    if name.startswith("["):
        return name.partition("]")[0] + "]"
    return name.partition(":")[0]
