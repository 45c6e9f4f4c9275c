"""Access to a proxy: tokens, users and rate limits.

A client's ``Authorization`` header is for the upstream, so it sends the token of the proxy in a separate
header, ``x-kedge-token``, which is not forwarded. This is the token that the proxy was started with, or a
named token of a user from the proxy's store.
"""

from collections import deque
from typing import TYPE_CHECKING

from anyio import CancelScope
from starlette.responses import Response
from starlette.types import Scope

from kedge.proxy.usage import UsageReader, estimate_tokens, read_member
from kedge.server.access import (
    LOOPBACK_NAMES,
    AccessPolicy,
    Credentials,
    Rejection,
    parse_host_name,
    read_header,
)
from kedge.server.error_response import EscapedJSONResponse
from kedge.server.request_log import FrontEnd
from kedge.server.uvicorn_server import MAX_HEADER_BYTES
from kedge.store import AccessToken, TokenRegistry

if TYPE_CHECKING:
    from kedge.security.access_tokens import TokenReservation

TOKEN_HEADER = "x-kedge-token"
LAST_EVENTS = frozenset({"response.completed", "response.incomplete", "response.failed", "error"})
"""The events that end a response on a WebSocket."""


PLAN_KEY = "kedge.plan"
"""The key of a request's scope for what was sent to the upstream."""
METRICS_PATHS = frozenset({"/metrics", "/report"})


class ProxyFrontEnd(FrontEnd):
    """The front end of a proxy, with errors in the form of OpenAI's API."""

    def read_credentials(self, scope: Scope) -> Credentials | None:
        """Read the token of the proxy; the health of the proxy is public."""
        if scope["path"] == "/healthz":
            return None
        needed = "metrics" if scope["path"] in METRICS_PATHS else "server"
        return Credentials(
            read_header(scope, TOKEN_HEADER.encode()),
            needed=needed,
            is_counted=needed == "server" and scope["type"] == "http",
        )

    def build_rejection(self, scope: Scope, rejection: Rejection) -> Response:
        """Return an error of the proxy."""
        return build_rejection(rejection, scope)

    def build_failure(self, scope: Scope) -> Response:
        """Return an internal error of the proxy."""
        return build_error(500, "internal error; the log has the details")

    def list_headers(self, scope: Scope) -> list[tuple[bytes, bytes]]:
        """Return no headers: those of the upstream are passed on."""
        return []

    def describe(self, scope: Scope) -> str:
        """Return what was sent to the upstream."""
        return scope.get(PLAN_KEY, "")


def create_policy(
    token: str, registry: TokenRegistry | None, *, any_host: bool = False
) -> AccessPolicy:
    """Return the access policy of a proxy.

    Args:
        token: The token that the proxy was started with, which is the administrator's; empty for none.
        registry: The named tokens that are accepted as well, or None.
        any_host: Accept any `Host` header while no token is needed.
    """
    hosts = None if any_host else LOOPBACK_NAMES
    return AccessPolicy(token or None, hosts, registry, MAX_HEADER_BYTES, frees_hosts=True)


def build_rejection(rejection: Rejection, scope: Scope) -> Response:
    """Return a rejection as an error of the proxy."""
    match rejection.problem:
        case "headers":
            message = "the headers of the request are too large"
        case "host":
            name = parse_host_name(read_header(scope, b"host"))
            message = f"host {name!r} is not allowed; use a loopback name, or set a token"
        case "origin":
            message = "requests from web pages of another origin are not allowed without a token"
        case "missing" | "invalid":
            message = rejection.message or f"send a token of the proxy in the {TOKEN_HEADER} header"
        case _:
            message = rejection.message
    code = "rate_limit_exceeded" if rejection.status == 429 else "proxy_error"
    response = build_error(rejection.status, message, code)
    response.headers.update(rejection.headers)
    return response


def is_limited(caller: AccessToken | None) -> bool:
    """Return whether a caller has a limit of tokens."""
    return caller is not None and caller.tokens_per_minute is not None


class SocketMeter:
    """The tokens of the responses on one WebSocket: reserved for each request, and counted at its end.

    Args:
        policy: The access policy of the proxy.
        caller: The caller, or None for the administrator.
    """

    def __init__(self, policy: AccessPolicy, caller: AccessToken | None) -> None:
        self._policy, self._caller = policy, caller
        self._lanes: dict[str | None, deque[tuple[TokenReservation | None, UsageReader]]] = {}

    async def check(self, message: str | bytes) -> Rejection | None:
        """Check a message of the client, and reserve the tokens of its response; return the rejection or None."""
        if rejection := await self._policy.check_message(self._caller):
            return rejection
        if not is_limited(self._caller):
            return None
        estimate = estimate_tokens(message)
        reserved = await self._policy.reserve(self._caller, estimate.total)
        if isinstance(reserved, Rejection):
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
            await self._policy.settle(reservation, reader.finish(), self._caller)

    async def close(self) -> None:
        """Count what passed of the responses that did not end."""
        with CancelScope(shield=True):
            for reservation, reader in [each for lane in self._lanes.values() for each in lane]:
                await self._policy.settle(reservation, reader.finish(), self._caller)


def build_error(status: int, message: str, code: str = "proxy_error") -> Response:
    """Return an error of the proxy itself, in the form of OpenAI's API."""
    error = {"message": message, "type": "kedge_proxy", "param": None, "code": code}
    return EscapedJSONResponse({"error": error}, status)
