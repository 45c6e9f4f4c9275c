"""Access to a proxy: tokens, users and rate limits, and the token counts of what it passes on.

A client's ``Authorization`` header is for the upstream, so it sends the token of the proxy in a separate
header, ``x-kedge-token``, which is not forwarded. This is the token that the proxy was started with, or a
named token of a user from the proxy's store. The tokens of a request are estimated before, and read on the way.
"""

import re
import zlib
from collections import deque
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from anyio import CancelScope
from starlette.responses import Response
from starlette.types import Scope

from kedge._internal.json_text import decode_object
from kedge._internal.large_json import LARGE_BYTES
from kedge._internal.responsive import compute
from kedge.chaining.rewrite import MAX_BODY_BYTES
from kedge.engines.response_bytes import iter_parts, make_inflater
from kedge.errors import StreamTooLarge
from kedge.observe import get_logger
from kedge.server import access, errors
from kedge.server.http_protocol import MAX_INCOMPLETE_BYTES
from kedge.server.request_log import EscapedJSONResponse, FrontEnd
from kedge.store import AccessToken, TokenRegistry
from kedge.usage.tokens import count_text
from kedge.wire.decoder import read_kind
from kedge.wire.fields import get_count, get_object, list_objects
from kedge.wire.sse import SSEDecoder

if TYPE_CHECKING:
    from kedge._internal.access_tokens import TokenReservation

log = get_logger("kedge.chaining.proxy")

INPUT_COUNTS = (
    "input_tokens",
    "prompt_tokens",
    "cache_creation_input_tokens",
    "cache_read_input_tokens",
)
"""Members with input tokens: OpenAI's counts, or Anthropic's, which counts cached tokens separately."""
OUTPUT_COUNTS = ("output_tokens", "completion_tokens")
OUTPUT_LIMITS = ("max_output_tokens", "max_completion_tokens", "max_tokens")
"""Members of a request that limit its output."""
BYTES_PER_TOKEN = 4
"""The bytes of a request for each estimated token of its input."""
COUNTED_DELTAS = 1_000
"""The number of deltas of a stream that are counted together."""
NOT_WRITTEN = frozenset({"type", "role", "id", "signature"})
"""Members of a delta that are not text of the model."""
_ENCODED_DATA = re.compile(rb"[A-Za-z0-9+/=_-]{1000,}")


class Estimate(NamedTuple):
    """The estimated tokens of a request."""

    input: int
    output: int

    @property
    def total(self) -> int:
        """The tokens to reserve."""
        return self.input + self.output


def estimate_tokens(body: bytes | str, length: int = 0) -> Estimate:
    """Estimate the tokens of a request: those of its text, and the largest output that it allows.

    Args:
        body: The body of the request, if it is known.
        length: Its size otherwise.
    """
    if isinstance(body, str):
        body = body.encode("utf-8", "surrogatepass")
    size = len(_ENCODED_DATA.sub(b"", body)) or length  # images and files are no text
    members = decode_object(body)
    limits = [get_count(members, name) for name in OUTPUT_LIMITS]
    output = max(limits) or access.DEFAULT_OUTPUT_TOKENS
    return Estimate(size // BYTES_PER_TOKEN, output * (get_count(members, "n") or 1))


class UsageReader:
    """A reader of the token counts of a response, of any API, while it is passed on.

    What passed of a stream counts as well, if it ends without its usage.

    Args:
        content_type: The content type of the response.
        input_tokens: The estimated input, for streams that end without their usage.
        encoding: The compression of the response; the size of one that cannot be read is counted.
    """

    def __init__(self, content_type: str, input_tokens: int = 0, encoding: str = "") -> None:
        self._inflate = make_inflater(encoding)
        self._events: SSEDecoder | None = None
        """The decoder of a stream; None for a response that is one object."""
        if content_type.startswith("text/event-stream"):
            self._events = SSEDecoder()
        self._body = bytearray()
        self._is_first = True
        self._input = 0
        self._output = 0
        self._passed = 0
        """The counted tokens of the output that passed since the server last reported its own count."""
        self._input_estimate = input_tokens
        self._texts: list[str] = []

    def feed(self, chunk: bytes) -> None:
        """Read more of the response, as received."""
        for _ in self.read_in_steps(chunk):
            pass

    def read_in_steps(self, chunk: bytes) -> Iterator[None]:
        """Read more of the response as ``feed``, and yield after each step of a few milliseconds at most."""
        if self._inflate is not None:
            try:
                for piece in self._inflate(chunk):
                    for part in iter_parts(piece):
                        self._read_piece(part)
                        yield
            except zlib.error:
                self._inflate = None
        if self._inflate is None:
            self._passed += len(chunk) // BYTES_PER_TOKEN

    def _read_piece(self, chunk: bytes) -> None:
        if self._is_first:
            kind = read_kind(chunk)
            self._is_first = not kind
            if kind == "object":
                self._events = None
        if self._events is None:
            self._body += chunk[: MAX_BODY_BYTES - len(self._body)]
            return
        try:
            for message in self._events.feed(chunk):
                self.read(message.data)
        except StreamTooLarge:
            log.warning("the tokens of a response could not be counted: an event is too large")
            self._events = SSEDecoder()

    def finish(self) -> int:
        """Return the tokens of the response: those of its input and its output."""
        if self._events is None and read_kind(bytes(self._body)) == "stream":
            self._events = SSEDecoder()  # some servers send streams without their content type
            self._read_piece(bytes(self._body))
            self._body.clear()
        if self._events is not None:
            for message in self._events.close():  # an event without a blank line at its end
                self.read(message.data)
        if self._body:
            self.read(self._body)
            if self._body.startswith(b"{") and not decode_object(self._body):  # cut off
                self._passed += len(self._body) // BYTES_PER_TOKEN
        self._count_passed()
        if self._passed and not self._input:
            self._input = self._input_estimate
        return self._input + self._output + self._passed

    def read(self, data: str | bytes | bytearray) -> None:
        """Read a response or an event."""
        event = decode_object(data)
        input_tokens, output_tokens = find_token_counts(event)
        # The events of a stream repeat or complete the counts: the largest ones are those of the response.
        self._input = max(self._input, input_tokens)
        if output_tokens > self._output:
            self._output = output_tokens
            self._passed = 0
            self._texts = []
        for holder in (event, *list_objects(event.get("choices"))):
            self._texts += _iter_texts(holder.get("delta"))
        if len(self._texts) >= COUNTED_DELTAS:
            self._count_passed()

    def _count_passed(self) -> None:
        self._passed += count_text("".join(self._texts))
        self._texts = []


def find_token_counts(event: dict[str, Any]) -> tuple[int, int]:
    """Return the input and output tokens in a response or an event of OpenAI's and Anthropic's APIs."""
    holders = (event, get_object(event, "response"), get_object(event, "message"))
    usages = [holder.get("usage") for holder in holders]
    return (
        max(sum(get_count(usage, name) for name in INPUT_COUNTS) for usage in usages),
        max(sum(get_count(usage, name) for name in OUTPUT_COUNTS) for usage in usages),
    )


def _iter_texts(value: Any) -> Iterator[str]:
    """Yield the texts in a delta."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for element in cast("list[Any]", value):
            yield from _iter_texts(element)
    elif isinstance(value, dict):
        for name, member in cast("dict[str, Any]", value).items():
            if name not in NOT_WRITTEN:
                yield from _iter_texts(member)


TOKEN_HEADER = "x-kedge-token"
LAST_EVENTS = frozenset({"response.completed", "response.incomplete", "response.failed", "error"})
"""The events that end a response on a WebSocket."""


PLAN_KEY = "kedge.plan"
"""The key of a request's scope for what was sent to the upstream."""
METRICS_PATHS = frozenset({"/metrics", "/report"})


class ProxyFrontEnd(FrontEnd):
    """The front end of a proxy, with errors in the form of OpenAI's API."""

    description_key = PLAN_KEY

    def read_credentials(self, scope: Scope) -> access.Credentials | None:
        """Read the token of the proxy; the health of the proxy is public."""
        if scope["path"] == "/healthz":
            return None
        token = access.read_header(scope, TOKEN_HEADER.encode())
        if scope["path"] in METRICS_PATHS:
            return access.Credentials(token, needed="metrics")
        return access.Credentials(token, needed="server")

    def build_rejection(self, scope: Scope, rejection: access.Rejection) -> Response:
        """Return an error of the proxy."""
        return build_rejection(rejection, scope)

    def build_failure(self, scope: Scope) -> Response:
        """Return an internal error of the proxy."""
        return build_error(500, "internal error; the log has the details")

    def list_headers(self, scope: Scope) -> list[tuple[bytes, bytes]]:
        """Return no headers: those of the upstream are passed on."""
        return []


def create_policy(
    token: str, registry: TokenRegistry | None, *, any_host: bool = False
) -> access.AccessPolicy:
    """Return the access policy of a proxy.

    Args:
        token: The token that the proxy was started with, which is the administrator's; empty for none.
        registry: The named tokens that are accepted as well, or None.
        any_host: Accept any `Host` header while no token is needed.
    """
    return access.AccessPolicy(token or None, any_host, registry, MAX_INCOMPLETE_BYTES)


def build_rejection(rejection: access.Rejection, scope: Scope) -> Response:
    """Return a rejection as an error of the proxy."""
    match rejection.error:
        case errors.HEADERS_TOO_LARGE:
            message = "the headers of the request are too large"
        case errors.HOST_NOT_ALLOWED:
            name = access.parse_host_name(access.read_header(scope, b"host"))
            message = f"host {name!r} is not allowed; use a loopback name, or set a token"
        case errors.ORIGIN_NOT_ALLOWED:
            message = "requests from web pages of another origin are not allowed without a token"
        case errors.API_KEY_MISSING | errors.API_KEY_INVALID:
            message = rejection.message or f"send a token of the proxy in the {TOKEN_HEADER} header"
        case _:
            message = rejection.message
    code = "proxy_error"
    if rejection.status == 429:
        code = "rate_limit_exceeded"
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

    def __init__(self, policy: access.AccessPolicy, caller: AccessToken | None) -> None:
        self._policy = policy
        self._caller = caller
        self._lanes: dict[str | None, deque[tuple[TokenReservation | None, UsageReader]]] = {}

    async def check(self, message: str | bytes) -> access.Rejection | None:
        """Check a message of the client, and reserve the tokens of its response; return the rejection or None."""
        rejection = await self._policy.check_message(self._caller)
        if rejection is not None:
            return rejection
        if not is_limited(self._caller):
            return None
        is_long = len(message) > LARGE_BYTES
        estimate = await compute(partial(estimate_tokens, message), is_long=is_long)
        reserved = await self._policy.reserve(self._caller, estimate.total)
        if isinstance(reserved, access.Rejection):
            return reserved
        members = await compute(partial(decode_object, message), is_long=is_long)
        lane = self._lanes.setdefault(_find_lane(members), deque())
        lane.append((reserved, UsageReader("", estimate.input)))
        return None

    async def count(self, data: str | bytes) -> None:
        """Count the tokens in a message of the upstream."""
        if not self._lanes:
            return
        event = decode_object(data)
        lane = self._lanes.get(_find_lane(event))
        if not lane:
            return
        reservation, reader = lane[0]
        reader.read(data)
        if str(event.get("type")) in LAST_EVENTS:
            lane.popleft()
            await self._policy.settle(reservation, reader.finish(), self._caller)

    async def close(self) -> None:
        """Count what passed of the responses that did not end."""
        with CancelScope(shield=True):
            for lane in list(self._lanes.values()):
                for reservation, reader in list(lane):
                    await self._policy.settle(reservation, reader.finish(), self._caller)


def _find_lane(message: dict[str, Any]) -> str | None:
    """Return the stream of a WebSocket that a message belongs to."""
    stream_id = message.get("stream_id")
    if isinstance(stream_id, str):
        return stream_id
    return None


def build_error(status: int, message: str, code: str = "proxy_error") -> Response:
    """Return an error of the proxy itself, in the form of OpenAI's API."""
    error = {"message": message, "type": "kedge_proxy", "param": None, "code": code}
    return EscapedJSONResponse({"error": error}, status)
