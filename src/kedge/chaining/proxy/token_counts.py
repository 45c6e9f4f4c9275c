"""Token counts of what a proxy passes on: estimated before a request, and read on the way of its response."""

import re
import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple, cast

from kedge._internal.json_text import decode_object
from kedge.chaining.rewrite import MAX_BODY_BYTES
from kedge.engines.response_bytes import iter_parts, make_inflater
from kedge.errors import StreamTooLarge
from kedge.observe import get_logger
from kedge.server.access import DEFAULT_OUTPUT_TOKENS
from kedge.usage.tokens import count_text
from kedge.wire.decoder import read_kind
from kedge.wire.fields import get_count, get_object, list_objects
from kedge.wire.sse import SSEDecoder

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
    output = max(limits) or DEFAULT_OUTPUT_TOKENS
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
