"""Access to a proxy: tokens, users and rate limits.

A client's ``Authorization`` header is for the upstream, so it sends the token of the proxy in a separate
header, ``x-kedge-token``, which is not forwarded. This is the token that the proxy was started with, or a
named token of a user from the proxy's store.
"""

from collections.abc import Mapping
from typing import Any

from starlette.responses import Response
from starlette.types import Scope

from kedge.errors import StoreError, StreamTooLarge
from kedge.events.sse import SSEDecoder
from kedge.incremental.rewrite import MAX_BODY_BYTES
from kedge.json_codec import decode
from kedge.observe import get_logger
from kedge.server.access import (
    CALLER_KEY,
    LOOPBACK_NAMES,
    AccessPolicy,
    TokenCheck,
    is_same_origin,
    parse_host_name,
    read_header,
)
from kedge.server.error_response import EscapedJSONResponse
from kedge.server.revocation import RevocationWatch
from kedge.store import AccessToken, TokenRegistry

log = get_logger("kedge.proxy")

TOKEN_HEADER = "x-kedge-token"
INPUT_COUNTS = (
    "input_tokens",
    "prompt_tokens",
    "cache_creation_input_tokens",
    "cache_read_input_tokens",
)
"""Members with input tokens: OpenAI's counts, or Anthropic's, which counts cached tokens separately."""
OUTPUT_COUNTS = ("output_tokens", "completion_tokens")


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

    async def count_message(self, caller: AccessToken | None, data: str | bytes) -> None:
        """Count the tokens in a message of the upstream on a WebSocket."""
        if caller is not None and caller.tokens_per_minute is not None:
            await self.count_tokens(caller, sum(read_usage(data)))

    async def count_tokens(self, caller: AccessToken, tokens: int) -> None:
        """Count tokens that a model used; the response itself is not affected if that fails."""
        if self._registry is None or not tokens:
            return
        try:
            await self._registry.count(caller.name, tokens=tokens)
        except StoreError as error:
            log.warning("the tokens of a response could not be counted: %s", error)


class UsageReader:
    """A reader of the token counts of a response, of any API, while it is passed on.

    Args:
        content_type: The content type of the response, which must not be compressed.
    """

    def __init__(self, content_type: str) -> None:
        self._events = SSEDecoder() if content_type.startswith("text/event-stream") else None
        self._body = bytearray()
        self._input = self._output = 0

    def feed(self, chunk: bytes) -> None:
        """Read more of the response."""
        if self._events is None:
            self._body += chunk[: MAX_BODY_BYTES - len(self._body)]
            return
        try:
            for message in self._events.feed(chunk):
                self._read(message.data)
        except StreamTooLarge:
            log.warning("the tokens of a response could not be counted: an event is too large")
            self._events = SSEDecoder()

    def finish(self) -> int:
        """Return the tokens of the response: those of its input and its output."""
        if self._events is None and self._body.startswith((b"data:", b"event:", b":")):
            self._events = SSEDecoder()  # some servers send streams without their content type
            self.feed(bytes(self._body) + b"\n\n")
        elif self._events is None:
            self._read(self._body)
        return self._input + self._output

    def _read(self, data: str | bytearray) -> None:
        # The events of a stream repeat or complete the counts: the largest ones are those of the response.
        input_tokens, output_tokens = read_usage(data)
        self._input = max(self._input, input_tokens)
        self._output = max(self._output, output_tokens)


def read_usage(data: str | bytes | bytearray) -> tuple[int, int]:
    """Return the input and output tokens in a response or an event of OpenAI's and Anthropic's APIs."""
    has_usage = '"usage"' in data if isinstance(data, str) else b'"usage"' in data
    if not has_usage:
        return 0, 0
    try:
        event: Any = decode(data)
    except (ValueError, RecursionError):
        return 0, 0
    containers = [event, *(_get_object(event, name) for name in ("response", "message"))]
    usages = [_get_object(container, "usage") for container in containers]
    return (
        max(sum(_read_count(usage, name) for name in INPUT_COUNTS) for usage in usages),
        max(sum(_read_count(usage, name) for name in OUTPUT_COUNTS) for usage in usages),
    )


def _get_object(value: Any, name: str) -> Mapping[str, Any]:
    member = value.get(name) if isinstance(value, Mapping) else None  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    return member if isinstance(member, Mapping) else {}  # pyright: ignore[reportUnknownVariableType]


def _read_count(usage: Mapping[str, Any], name: str) -> int:
    count = usage.get(name)
    return max(count, 0) if isinstance(count, int) else 0


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
