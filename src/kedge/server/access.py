"""Access control by host name, origin, token and rate limit, shared by the server, the page and the proxy.

A server on loopback needs no token, but any web page in a browser on the same machine can reach it
through a host name that resolves to 127.0.0.1. So there the ``Host`` header must be a loopback name. A
web page may also send requests to a loopback name. So a request that needs no token must not come from a page of
another origin, by its ``Origin`` and ``Sec-Fetch-Site`` headers: over HTTP and WebSocket, whatever its method.
"""

import hmac
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, NamedTuple, Protocol

from starlette.types import Scope

from kedge.security.access_tokens import AccessToken, TokenReservation, TokenUse

_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^\[\]:]*)(?::[0-9]*)?")
DEFAULT_OUTPUT_TOKENS = 4_096
"""The estimated output of a request that does not limit its output."""

LOOPBACK_NAMES = frozenset({"127.0.0.1", "localhost", "[::1]"})
SAFE_SITES = frozenset({b"", b"same-origin", b"none"})
"""Values of ``Sec-Fetch-Site`` for requests of programs, of the server's own pages and of the user."""

CALLER_KEY = "kedge.caller"
"""The key of a request's scope for the `AccessToken` that it was sent with; None for the administrator.

A request that the server has not accepted does not have it."""


class CallerRegistry(Protocol):
    """Protocol of registries that find the callers of tokens, and count their requests and tokens."""

    async def is_required(self) -> bool:
        """Return whether requests need a token even if the server itself has none."""
        ...

    async def find(self, token: str) -> AccessToken | None:
        """Return the caller of a token, or None."""
        ...

    async def is_valid(self, token: AccessToken) -> bool:
        """Return whether a token that was found before has not been revoked."""
        ...

    async def count(self, name: str, *, requests: int = 0, tokens: int = 0) -> TokenUse:
        """Add to the counts of the current minute, and return them."""
        ...

    async def reserve(self, token: AccessToken, tokens: int) -> TokenReservation | TokenUse:
        """Count the estimated tokens of a request, or return the counts if the limit is reached."""
        ...

    async def settle(self, reservation: TokenReservation, tokens: int) -> None:
        """Replace the estimate of a reservation by the tokens that were used."""
        ...


class TokenCheck(NamedTuple):
    """The check of a named token for a request.

    ``problem`` is the reason for which the request is rejected: the missing scope, or the exceeded limit of requests or
    tokens. The page and the proxy send ``message``, the server the messages of the hosted API. ``headers`` are the rate
    limit headers of the hosted API.
    """

    problem: Literal["scope", "requests", "tokens"] | None = None
    message: str = ""
    headers: Mapping[str, str] = MappingProxyType({})
    seconds_left: float = 0.0

    @property
    def status(self) -> int:
        """The HTTP status of the rejection."""
        return 403 if self.problem == "scope" else 429


@dataclass(frozen=True, slots=True)
class AccessPolicy:
    """The accepted host names, and the tokens that clients must send.

    Args:
        token: The server's own token, which is that of the administrator, or None.
        hosts: The accepted host names, or None for any.
        registry: Named tokens that are accepted as well, or None.
    """

    token: str | None = None
    hosts: frozenset[str] | None = None
    registry: CallerRegistry | None = None

    def allows_host(self, scope: Scope) -> bool:
        """Return whether the request's ``Host`` is accepted."""
        return self.hosts is None or parse_host_name(read_header(scope, b"host")) in self.hosts

    def matches_token(self, candidate: bytes) -> bool:
        """Return whether this is the token, in constant time."""
        return self.token is not None and hmac.compare_digest(candidate, self.token.encode())

    async def needs_token(self) -> bool:
        """Return whether requests need a token."""
        if self.token is not None:
            return True
        return self.registry is not None and await self.registry.is_required()

    async def find_caller(self, token: bytes) -> AccessToken | None:
        """Return the named token with this secret, or None."""
        return await self.registry.find(token.decode("latin-1")) if self.registry else None

    async def check_caller(
        self, caller: AccessToken, needed: str, *, is_counted: bool
    ) -> TokenCheck:
        """Check whether a named token has a scope, and count the request if its token has limits."""
        if needed not in caller.scopes:
            message = f"this token lacks the scope {needed}; use a token with this scope"
            return TokenCheck("scope", message)
        limits = (caller.requests_per_minute, caller.tokens_per_minute)
        if self.registry is None or not is_counted or limits == (None, None):
            return TokenCheck()
        return check_counts(caller, await self.registry.count(caller.name, requests=1))


def check_counts(caller: AccessToken, counts: TokenUse) -> TokenCheck:
    """Check the counts of a named token against its limits."""
    limits = (caller.requests_per_minute, caller.tokens_per_minute)
    seconds = math.ceil(counts.seconds_left)
    headers: dict[str, str] = {}
    used = zip(("requests", "tokens"), limits, (counts.requests, counts.tokens), strict=True)
    for name, limit, count in used:
        if limit is not None:
            headers[f"x-ratelimit-limit-{name}"] = str(limit)
            headers[f"x-ratelimit-remaining-{name}"] = str(max(limit - count, 0))
            headers[f"x-ratelimit-reset-{name}"] = f"{seconds}s"
    if caller.requests_per_minute is not None and counts.requests > caller.requests_per_minute:
        problem = "requests"
    elif caller.tokens_per_minute is not None and counts.tokens >= caller.tokens_per_minute:
        problem = "tokens"
    else:
        return TokenCheck(headers=headers)
    headers["retry-after"] = str(seconds)
    message = f"the limit of this token is reached; try again in {seconds} seconds"
    return TokenCheck(problem, message, headers, counts.seconds_left)


def is_same_origin(scope: Scope) -> bool:
    """Return whether a request was sent by a program, or by a browser for a page of the server itself.

    Programs send neither of the two headers.
    """
    if read_header(scope, b"sec-fetch-site").lower() not in SAFE_SITES:
        return False
    origin = read_header(scope, b"origin").lower()
    return not origin or origin.partition(b"://")[2] == read_header(scope, b"host").lower()


def is_compressed(scope: Scope) -> bool:
    """Return whether the body of a request has a content encoding, which no server of Kedge decodes."""
    codings = [value for name, value in scope["headers"] if name == b"content-encoding"]
    return any(coding.strip().lower() not in (b"", b"identity") for coding in codings)


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
    """Return the name in ``name:port``, or an empty text; an IPv6 address includes its brackets."""
    match = _HOST.fullmatch(host.decode("latin-1").lower())
    return match[1] if match else ""
