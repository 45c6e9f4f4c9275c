"""Access control by host name, origin, token and rate limit, for the server, the page, the proxy and MCP servers.

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
from functools import lru_cache
from itertools import chain
from typing import NamedTuple, Protocol

from starlette.types import Scope

from kedge._internal.access_tokens import AccessToken, TokenReservation, TokenUse
from kedge._internal.urls import is_loopback
from kedge.errors import InvalidSetting, KedgeError, StoreError
from kedge.observe import get_logger
from kedge.server import errors

log = get_logger("kedge.server")

_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^\[\]:]*)(?::[0-9]*)?")
DEFAULT_OUTPUT_TOKENS = 4_096
"""The estimated output of a request that does not limit its output."""

SAFE_SITES = frozenset({b"", b"same-origin", b"none"})
"""Values of ``Sec-Fetch-Site`` for requests of programs, of the server's own pages and of the user."""
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})

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


class Credentials(NamedTuple):
    """What a request presents, and what it needs, as its front end reads it."""

    token: bytes = b""
    session: str = ""
    needed: str = "server"
    """The scope that a token must have. A session needs ``page``."""
    is_public: bool = False
    """Whether no token is needed."""
    checks_origin: bool | None = None
    """Whether a page of another origin is rejected; None for only as long as no token is needed."""


NO_VALUES: Mapping[str, str] = {}


class Rejection(NamedTuple):
    """Why a request is rejected. Front ends format it."""

    error: errors.ErrorTemplate
    """The error of the API, and with it the HTTP status."""
    message: str = ""
    headers: Mapping[str, str] = NO_VALUES
    """Headers of the response, such as the headers of the rate limit, as in the hosted API."""
    values: Mapping[str, object] = NO_VALUES
    """The values in the message of the error."""

    @property
    def status(self) -> int:
        """The HTTP status."""
        return self.error.status


REVOKED = Rejection(
    errors.API_KEY_INVALID, "the token was revoked or the session has ended; send a valid one"
)


class Grant(NamedTuple):
    """What an accepted request relies on, which may end before the request: a named token or a session."""

    caller: AccessToken | None
    session: str = ""
    """The session, which ends when it is logged out, when it expires, and with its named token; or an empty text."""


class Access(NamedTuple):
    """The decision about a request: its caller, None for the administrator, or why it is rejected.

    ``headers`` are for the response. A rejection has a caller if it is only about its limits. ``grant`` is None
    for a request that nothing ends: without a token, or with the server's own.
    """

    caller: AccessToken | None = None
    rejection: Rejection | None = None
    headers: Mapping[str, str] = NO_VALUES
    grant: Grant | None = None


class FoundCaller(NamedTuple):
    """Who sent a request: a named token, or None for the administrator."""

    caller: AccessToken | None
    is_session: bool = False


@dataclass(frozen=True, slots=True)
class AccessPolicy:
    """The one decision about who may send a request, for the server, the page, the proxy and MCP servers.

    Args:
        token: The server's own token, which the administrator uses, or None.
        any_host: Whether any host name is accepted while no token is needed, and not only loopback names.
        registry: Named tokens that are accepted as well, or None.
        header_bytes: The maximum size of all headers.
    """

    token: str | None = None
    any_host: bool = False
    registry: CallerRegistry | None = None
    header_bytes: int = 32 * 1024

    def __post_init__(self) -> None:
        """Reject a token that no client could send, such as one with the line break of its file."""
        token = self.token or ""
        if not token.isprintable() or token != token.strip():
            raise InvalidSetting("token must be printable text without spaces at its ends")

    async def authorize(self, scope: Scope, presented: Credentials) -> Access:
        """Decide about a request.

        Args:
            scope: The request or the WebSocket.
            presented: What it presents.

        Returns:
            Its caller, or why it is rejected.
        """
        if sum(map(len, chain.from_iterable(scope["headers"]))) > self.header_bytes:
            too_large = Rejection(errors.HEADERS_TOO_LARGE, values={"most": self.header_bytes})
            return Access(rejection=too_large)
        try:
            needs_token = await self._needs_token()
            host = parse_host_name(read_header(scope, b"host"))
            if not (needs_token or self.any_host or is_loopback(host.strip("[]"))):
                return Access(rejection=Rejection(errors.HOST_NOT_ALLOWED))
            checks_origin = presented.checks_origin
            if checks_origin is None:
                checks_origin = not needs_token
            if checks_origin and not is_same_origin(scope):
                return Access(rejection=Rejection(errors.ORIGIN_NOT_ALLOWED))
            if presented.is_public or not needs_token:
                return Access()
            return await self._identify(scope, presented)
        except StoreError as error:
            if presented.is_public:  # such as the health check, which reports the outage itself
                return Access()
            return Access(rejection=reject_outage(error))

    async def _needs_token(self) -> bool:
        """Return whether requests need a token, because the server has one or there are named tokens."""
        if self.token is not None:
            return True
        return self.registry is not None and await self.registry.is_required()

    async def _identify(self, scope: Scope, presented: Credentials) -> Access:
        sender = await self.find_sender(presented)
        if sender is None:
            error = errors.API_KEY_INVALID if presented.token else errors.API_KEY_MISSING
            return Access(rejection=Rejection(error))
        session = ""
        needed = presented.needed
        if sender.is_session:
            session = presented.session
            needed = "page"
        grant = Grant(sender.caller, session)
        if sender.caller is None:
            return Access(grant=grant if sender.is_session else None)
        is_counted = counts_as_request(scope, needed, is_session=sender.is_session)
        decision = await self._check_caller(sender.caller, needed, is_counted)
        return decision._replace(grant=grant)

    async def is_valid(self, grant: Grant) -> bool:
        """Return whether what a request relies on has not ended since the request was accepted."""
        if grant.caller is None or self.registry is None:
            return True
        return await self.registry.is_valid(grant.caller)

    async def _check_caller(self, caller: AccessToken, needed: str, is_counted: bool) -> Access:
        """Check whether a named token has a scope, and count the request if its token has limits."""
        if needed not in caller.scopes:
            message = f"this token lacks the scope {needed}; use a token with this scope"
            return Access(
                rejection=Rejection(errors.TOKEN_SCOPE_MISSING, message, values={"scope": needed})
            )
        limits = (caller.requests_per_minute, caller.tokens_per_minute)
        if self.registry is None or not is_counted or limits == (None, None):
            return Access(caller)
        return check_counts(caller, await self.registry.count(caller.name, requests=1))

    async def check_message(self, caller: AccessToken | None) -> Rejection | None:
        """Check a message of an accepted WebSocket, which counts as one request."""
        if caller is None or self.registry is None:
            return None
        try:
            if not await self.registry.is_valid(caller):
                return REVOKED
            return (await self._check_caller(caller, "server", is_counted=True)).rejection
        except StoreError as error:
            return reject_outage(error)

    async def reserve(
        self, caller: AccessToken | None, tokens: int
    ) -> TokenReservation | Rejection | None:
        """Reserve the estimated tokens of a request; return None if its caller has no limit of tokens."""
        if caller is None or self.registry is None or caller.tokens_per_minute is None:
            return None
        try:
            reserved = await self.registry.reserve(caller, tokens)
        except StoreError as error:
            return reject_outage(error)
        if isinstance(reserved, TokenReservation):
            return reserved
        return check_counts(caller, reserved).rejection

    async def settle(
        self, reservation: TokenReservation | None, tokens: int, caller: AccessToken | None = None
    ) -> None:
        """Count the tokens that a model used, instead of the reserved tokens, if there is a limit.

        The response itself is not affected if that fails.
        """
        if self.registry is None:
            return
        try:
            if reservation is not None:
                await self.registry.settle(reservation, tokens)
            elif caller is not None and tokens:
                await self.registry.count(caller.name, tokens=tokens)
        except KedgeError as error:
            log.warning("the tokens of a response could not be counted: %s", error)

    async def find_sender(self, presented: Credentials) -> FoundCaller | None:
        """Return who sent a request, or None if it presents nothing valid."""
        if self.matches_token(presented.token):
            return FoundCaller(None)
        if self.registry is None or not presented.token:
            return None
        caller = await self.registry.find(presented.token.decode("latin-1"))
        if caller is None:
            return None
        return FoundCaller(caller)

    def matches_token(self, candidate: bytes) -> bool:
        """Return whether this is the token, in constant time."""
        return self.token is not None and hmac.compare_digest(candidate, self.token.encode())


def reject_outage(error: StoreError) -> Rejection:
    """Log that a token could not be checked, and return the rejection."""
    log.warning("a token could not be checked: %s", error)
    message = f"the token could not be checked: {error.problem}"
    return Rejection(errors.DATABASE_UNAVAILABLE, message, values={"problem": error.problem})


def check_counts(caller: AccessToken, counts: TokenUse) -> Access:
    """Check the counts of a named token against its limits."""
    seconds = math.ceil(counts.seconds_left)
    headers: dict[str, str] = {}
    limited = (
        ("requests", caller.requests_per_minute, counts.requests),
        ("tokens", caller.tokens_per_minute, counts.tokens),
    )
    for name, limit, count in limited:
        if limit is not None:
            headers[f"x-ratelimit-limit-{name}"] = str(limit)
            headers[f"x-ratelimit-remaining-{name}"] = str(max(limit - count, 0))
            headers[f"x-ratelimit-reset-{name}"] = f"{seconds}s"
    if caller.requests_per_minute is not None and counts.requests > caller.requests_per_minute:
        error = errors.RATE_LIMITED
    elif caller.tokens_per_minute is not None and counts.tokens >= caller.tokens_per_minute:
        error = errors.TOKENS_LIMITED
    else:
        return Access(caller, headers=headers)
    headers["retry-after"] = str(seconds)
    message = f"the limit of this token is reached; try again in {seconds} seconds"
    values = {"seconds": f"{counts.seconds_left:.3g}"}
    return Access(caller, Rejection(error, message, headers, values))


def counts_as_request(scope: Scope, needed: str, *, is_session: bool) -> bool:
    """Return whether a request counts for the limit of its caller.

    Neither reading metrics counts, nor opening a WebSocket, of which each message counts, nor what a page
    reads: it requests changes every two seconds.
    """
    if is_session:
        return scope["method"] not in SAFE_METHODS
    return scope["type"] == "http" and needed != "metrics"


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
    for name, value in scope["headers"]:
        if name == b"content-encoding" and value.strip().lower() not in (b"", b"identity"):
            return True
    return False


def read_bearer_token(scope: Scope) -> bytes:
    """Return the bearer token of the ``Authorization`` header, or an empty value."""
    scheme, _, token = read_header(scope, b"authorization").partition(b" ")
    if scheme.lower() != b"bearer":
        return b""
    return token.strip()


def read_header(scope: Scope, header_name: bytes) -> bytes:
    """Return the first header of this (lowercase) name, or an empty value."""
    for name, value in scope["headers"]:
        if name == header_name:
            return value
    return b""


@lru_cache(maxsize=64)
def parse_host_name(host: bytes) -> str:
    """Return the name in ``name:port``, or an empty text; an IPv6 address includes its brackets."""
    match = _HOST.fullmatch(host.decode("latin-1").lower())
    return match[1] if match else ""
