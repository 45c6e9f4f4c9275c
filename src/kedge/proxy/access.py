"""Access to a proxy: tokens, users and rate limits.

A client's ``Authorization`` header is for the upstream, so it sends the token of the proxy in a separate
header, ``x-kedge-token``, which is not forwarded. This is the token that the proxy was started with, or a
named token of a user from the proxy's store.
"""

from collections import deque

from anyio import CancelScope
from starlette.responses import Response
from starlette.types import Scope

from kedge.errors import StoreError
from kedge.observe import get_logger
from kedge.proxy.usage import Estimate, UsageReader, estimate_tokens, read_member
from kedge.security.access_tokens import TokenReservation
from kedge.server.access import (
    CALLER_KEY,
    LOOPBACK_NAMES,
    AccessPolicy,
    TokenCheck,
    check_counts,
    is_same_origin,
    parse_host_name,
    read_header,
)
from kedge.server.error_response import EscapedJSONResponse
from kedge.server.revocation import RevocationWatch
from kedge.store import AccessToken, TokenRegistry

log = get_logger("kedge.proxy")

TOKEN_HEADER = "x-kedge-token"
LAST_EVENTS = frozenset({"response.completed", "response.incomplete", "response.failed", "error"})
"""The events that end a response on a WebSocket."""


class ProxyGuard:
    """The check of the host name, the origin, the token and the limits of requests.

    Args:
        token: The token that the proxy was started with, which is the administrator's; empty for none.
        registry: The named tokens that are accepted as well, or None.
        any_host: Accept any `Host` header while no token is needed.
    """

    def __init__(self, token: str, registry: TokenRegistry | None, *, any_host: bool) -> None:
        self._policy = AccessPolicy(token or None, None if any_host else LOOPBACK_NAMES, registry)
        self._registry = registry
        self.watch = RevocationWatch(registry, _reject_revoked)

    async def check(self, scope: Scope, needed: str) -> Response | None:
        """Find the caller of a request and return an error response if it is rejected, or None.

        Args:
            scope: The request; its `AccessToken` is added under `CALLER_KEY`.
            needed: The scope that the token must have.
        """
        policy = self._policy
        if not await policy.needs_token():
            if not is_same_origin(scope):
                return build_error(
                    403, "requests from web pages of another origin are not allowed without a token"
                )
            if policy.allows_host(scope):
                return None
            name = parse_host_name(read_header(scope, b"host"))
            return build_error(
                403, f"host {name!r} is not allowed; use a loopback name, or set a token"
            )
        sent_token = read_header(scope, TOKEN_HEADER.encode())
        if policy.matches_token(sent_token):
            return None
        try:
            caller = await policy.find_caller(sent_token)
            if caller is None:
                return build_error(401, f"send a token of the proxy in the {TOKEN_HEADER} header")
            is_counted = needed == "server" and scope["type"] == "http"
            check = await policy.check_caller(caller, needed, is_counted=is_counted)
        except StoreError as error:
            return _build_store_error(error)
        if check.problem != "scope":
            scope[CALLER_KEY] = caller
        return _build_rejection(check)

    async def check_message(self, caller: AccessToken | None) -> Response | None:
        """Check a message of a WebSocket, which counts as one request."""
        if caller is None or self._registry is None:
            return None
        try:
            if not await self._registry.is_valid(caller):
                return _reject_revoked()
            return _build_rejection(
                await self._policy.check_caller(caller, "server", is_counted=True)
            )
        except StoreError as error:
            return _build_store_error(error)

    async def reserve(
        self, caller: AccessToken | None, estimate: Estimate
    ) -> TokenReservation | Response | None:
        """Reserve the estimated tokens of a request; return None if its caller has no limit, or the rejection."""
        if caller is None or self._registry is None or caller.tokens_per_minute is None:
            return None
        try:
            reserved = await self._registry.reserve(caller, estimate.input + estimate.output)
        except StoreError as error:
            return _build_store_error(error)
        if isinstance(reserved, TokenReservation):
            return reserved
        return _build_rejection(check_counts(caller, reserved))

    async def settle(
        self, caller: AccessToken | None, reservation: TokenReservation | None, tokens: int
    ) -> None:
        """Count tokens that a model used; the response itself is not affected if that fails."""
        if self._registry is None or caller is None:
            return
        try:
            if reservation is not None:
                await self._registry.settle(reservation, tokens)
            elif tokens:
                await self._registry.count(caller.name, tokens=tokens)
        except StoreError as error:
            log.warning("the tokens of a response could not be counted: %s", error)


def is_limited(caller: AccessToken | None) -> bool:
    """Return whether a caller has a limit of tokens."""
    return caller is not None and caller.tokens_per_minute is not None


class SocketMeter:
    """The tokens of the responses on one WebSocket: reserved for each request, and counted at its end.

    Args:
        guard: The guard of the proxy.
        caller: The caller, or None for the administrator.
    """

    def __init__(self, guard: ProxyGuard, caller: AccessToken | None) -> None:
        self._guard, self._caller = guard, caller
        self._lanes: dict[str | None, deque[tuple[TokenReservation | None, UsageReader]]] = {}

    async def check(self, message: str | bytes) -> Response | None:
        """Check a message of the client, and reserve the tokens of its response; return the rejection or None."""
        if rejection := await self._guard.check_message(self._caller):
            return rejection
        if not is_limited(self._caller):
            return None
        estimate = estimate_tokens(message)
        reserved = await self._guard.reserve(self._caller, estimate)
        if isinstance(reserved, Response):
            return reserved
        lane = self._lanes.setdefault(read_member(message, "stream_id"), deque())
        lane.append((reserved, UsageReader("", estimate.input)))
        return None

    async def count(self, data: str | bytes) -> None:
        """Count the tokens in a message of the upstream."""
        lane = self._lanes.get(read_member(data, "stream_id")) if self._lanes else None
        if not lane:
            return
        reservation, reader = lane[0]
        reader.read(data)
        if read_member(data, "type") in LAST_EVENTS:
            lane.popleft()
            await self._guard.settle(self._caller, reservation, reader.finish())

    async def close(self) -> None:
        """Count what passed of the responses that did not end."""
        with CancelScope(shield=True):
            for reservation, reader in [each for lane in self._lanes.values() for each in lane]:
                await self._guard.settle(self._caller, reservation, reader.finish())


def _build_rejection(check: TokenCheck) -> Response | None:
    if check.problem is None:
        return None
    code = "proxy_error" if check.problem == "scope" else "rate_limit_exceeded"
    rejection = build_error(check.status, check.message, code)
    rejection.headers.update(check.headers)
    return rejection


def _reject_revoked(_: Scope | None = None) -> Response:
    return build_error(401, "the token was revoked; send a valid one")


def _build_store_error(error: StoreError) -> Response:
    log.warning("a token could not be checked: %s", error)
    return build_error(503, "the token could not be checked; try again")


def build_error(status: int, message: str, code: str = "proxy_error") -> Response:
    """Return an error of the proxy itself, in the form of OpenAI's API."""
    error = {"message": message, "type": "kedge_proxy", "param": None, "code": code}
    return EscapedJSONResponse({"error": error}, status)
