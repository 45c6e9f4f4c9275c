"""HTTP transport: sends bodies as bytes through a client, and reads responses over any transport by one set of rules.

Every transport returns a ``RawResponse``, whose body is not read yet: HTTP with Kedge's own client or one of a package,
WebSocket, and a response that is fetched or continued later. A ``ResponseReader`` does no I/O, so that chained clients,
which see a body as it passes, read it by the same rules.

The maximum size applies to the decompressed bytes of a body or of a complete stream: two megabytes of gzip can become
gigabytes. The HTTP libraries decompress in pieces of at most a megabyte; so does ``make_inflater``, where raw bytes are
passed on.
"""

import zlib
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterator, Mapping
from contextlib import suppress
from inspect import iscoroutine
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias, cast

import msgspec
from anyio import CancelScope, current_time

from kedge._internal.arguments import check_positive_int, read_variable
from kedge._internal.event_loops import PerLoop
from kedge._internal.json_text import decode, encode
from kedge._internal.responsive import TimeSlice
from kedge._internal.urls import parse_base_url
from kedge.engines.http_errors import ErrorBuilder, parse_object
from kedge.engines.loading import LoadingWait
from kedge.engines.request_options import encode_params, encode_tool
from kedge.errors import EngineError, InvalidSetting, RequestRefused, ServerFailed, StreamTooLarge
from kedge.events import StreamEvent
from kedge.evidence.server_evidence import read_identity
from kedge.planning import AnchorRecord
from kedge.turns import Turn
from kedge.wire.decoder import BLANKS, read_kind

if TYPE_CHECKING:
    from anthropic import AsyncAnthropic
    from openai import AsyncOpenAI

    from kedge.engines.http_client import HttpClient
    from kedge.engines.sdk_client import SdkClient
    from kedge.wire.decoder import StreamDecoder

Sdk = Literal["openai", "anthropic"]
Client: TypeAlias = "HttpClient | SdkClient"
Content = bytes | None
Headers = Mapping[str, str]
Query = Mapping[str, Any] | None
AnyClient: TypeAlias = "Client | AsyncOpenAI | AsyncAnthropic"


MAX_RESPONSE_BYTES = 128 * 1024 * 1024
"""The default, which is enough for a response with several generated images."""
MAX_ERROR_BYTES = 1_000_000
"""The bytes of an error's body that are read."""
LIMIT_VARIABLE = "KEDGE_MAX_RESPONSE_BYTES"
"""The environment variable with another default."""
PIECE_BYTES = 1024 * 1024
"""The maximum size of a decompressed piece."""
KEEP_ALIVE = 4.0
"""Seconds for which an unused connection stays open: less than the 5 of uvicorn and Node, so that no request meets a
connection that its server is closing."""
READABLE_CODINGS = ("identity", "gzip", "x-gzip", "deflate")
"""The compressions of responses that can be read."""

Inflater = Callable[[bytes], Iterator[bytes]]


def resolve_limit(max_bytes: int | None = None) -> int:
    """Return the maximum size of a response: the given one, that of the environment, or the default.

    Raises:
        InvalidSetting: It is not a positive integer.
    """
    if max_bytes is not None:
        return check_positive_int("max_response_bytes", max_bytes)
    text = read_variable(LIMIT_VARIABLE)
    if not text:
        return MAX_RESPONSE_BYTES
    if not (text.isascii() and text.isdigit() and int(text)):
        raise InvalidSetting(f"{LIMIT_VARIABLE} must be a positive integer, not {text!r}")
    return int(text)


async def read_start(chunks: AsyncIterable[bytes], errors: tuple[type[Exception], ...]) -> bytes:
    """Return the start of an error's body, as far as it can be read."""
    body = bytearray()
    with suppress(*errors):
        async for chunk in chunks:
            body += chunk
            if len(body) > MAX_ERROR_BYTES:
                break
    return bytes(body[:MAX_ERROR_BYTES])


def make_inflater(encoding: str) -> Inflater | None:
    """Return a function that decompresses the chunks of a body in pieces, or None for an unknown compression."""
    encoding = encoding.lower()
    if encoding in ("", "identity"):
        return lambda chunk: iter((chunk,))
    if encoding not in READABLE_CODINGS:
        return None
    window = zlib.MAX_WBITS if encoding == "deflate" else 16 + zlib.MAX_WBITS
    decompressor: Any = zlib.decompressobj(window)

    def inflate(chunk: bytes) -> Iterator[bytes]:
        while piece := decompressor.decompress(chunk, PIECE_BYTES):
            yield piece
            chunk = decompressor.unconsumed_tail

    return inflate


PART_BYTES = 4096
"""The bytes of a stream that are decoded before other tasks may run."""


def iter_parts(piece: bytes) -> Iterator[bytes]:
    """Yield a piece of a body in parts, each of which is decoded in a few milliseconds."""
    for start in range(0, len(piece), PART_BYTES):
        yield piece[start : start + PART_BYTES]


EVENT_STREAM = "text/event-stream"
DRAIN_SECONDS = 0.1
"""Seconds in which a server must close its stream after the last event; then the connection is dropped."""
_UNLABELED = ("", "text/plain", "application/octet-stream")
"""Content types with which some servers send the stream that was requested."""


def is_event_stream(headers: Mapping[str, str], *, requested: bool) -> bool:
    """Return whether a body is a stream of events.

    Args:
        headers: The headers of the response.
        requested: Whether a stream was requested.
    """
    media_type = headers.get("content-type", "").partition(";")[0].strip().lower()
    return requested if media_type in _UNLABELED else media_type == EVENT_STREAM


class RawResponse(msgspec.Struct):
    """A response whose body is not read yet; it must be closed.

    Attributes:
        client: The client that sent the request.
        errors: Builds the error of a connection that breaks, without the key at the time of the request.
        source: The body as it arrives, decompressed.
        release: Releases the connection; awaited if it is a coroutine function.
        headers: The headers, whose names are case-insensitive.
        is_stream: Whether the body is a stream of events.
        status: The HTTP status.
        tap: Called with the body and the status when the response is closed.
    """

    client: Client
    errors: ErrorBuilder
    source: AsyncIterator[bytes]
    release: Callable[[], object]
    headers: Mapping[str, str] = {}
    is_stream: bool = False
    status: int = 200
    tap: Callable[[bytes, int | None], None] | None = None
    _received: list[bytes] = []
    _size: int = 0
    _drained_at: float = 0.0
    _unread: bytes = b""
    _time_slice: TimeSlice = msgspec.field(default_factory=TimeSlice)

    async def next_chunk(self) -> bytes:
        """Return the next bytes of the body; empty at its end. A server may always have sent more already.

        Raises:
            StreamCut: The connection broke.
            StreamTooLarge: The body is larger than the maximum.
        """
        await self._time_slice.share()
        if not self._unread:
            self._unread = await self._receive()
        chunk = self._unread[:PART_BYTES]
        self._unread = self._unread[PART_BYTES:]
        return chunk

    async def _receive(self) -> bytes:
        try:
            chunk = await anext(self.source, b"")
        except self.client.read_errors as exc:
            raise self.errors.build_cut(exc) from self.errors.find_cause(exc)
        if self.tap:
            self._received.append(chunk)
        self._size += len(chunk)
        if self._size > self.client.max_response_bytes:
            raise StreamTooLarge("response", self.client.max_response_bytes)
        return chunk

    async def drain(self) -> bytes:
        """Return the next bytes after the end of a response, if they arrive within a short time."""
        self._drained_at = self._drained_at or current_time() + DRAIN_SECONDS
        with CancelScope(deadline=self._drained_at):
            return await self.next_chunk()
        return b""

    async def read(self) -> bytes:
        """Return the complete body, and close the response."""
        body = bytearray()
        try:
            while chunk := await self.next_chunk():
                body += chunk
        finally:
            await self.aclose()
        return bytes(body)

    async def aclose(self) -> None:
        """Release the connection, and report what was received."""
        released = self.release()
        if iscoroutine(released):  # that of aiohttp only gives other tasks a turn
            await released
        if self.tap:
            text = self.errors.redact(b"".join(self._received).decode("utf-8", "replace"))
            self.tap(text.encode(), self.status)
            self.tap = None


class ResponseReader(msgspec.Struct):
    """Reads the body of one response into events: a stream, or one JSON object.

    Attributes:
        decoder: The decoder of the API.
        is_stream: Whether the body is read as a stream of events: not if it begins as an object.
    """

    decoder: "StreamDecoder"
    is_stream: bool
    _is_first: bool = True
    _body: bytearray = msgspec.field(default_factory=bytearray)

    @property
    def size(self) -> int:
        """The bytes of a body that is not streamed."""
        return len(self._body)

    def feed(self, chunk: bytes) -> list[StreamEvent]:
        """Return the events that are complete with a chunk."""
        if self._is_first and self.is_stream and (kind := read_kind(chunk)):
            self._is_first = False
            self.is_stream = kind != "object"  # some servers ignore `stream`
        if self.is_stream:
            return self.decoder.feed(chunk)
        self._body += chunk
        return []

    def close(self, *, is_cut: bool = False) -> list[StreamEvent]:
        """Return the events at the end of the body: of a stream, also under another label, or of a JSON object.

        Args:
            is_cut: Whether the connection broke, so that an object is not complete.

        Raises:
            ServerFailed: The body is not a response.
        """
        decoder = self.decoder
        if self.is_stream or is_cut:
            return decoder.close() if self.is_stream else []
        body = bytes(self._body).lstrip(BLANKS)
        if read_kind(body) == "stream":
            return [*decoder.feed(body), *decoder.close()]
        try:
            parsed: object = decode(body)
        except (ValueError, RecursionError):
            parsed = None
        response = cast("dict[str, Any]", parsed) if isinstance(parsed, dict) else {}
        if response.keys() & decoder.RESPONSE_FIELDS:
            # Only an escape can contain half a character; searching for one is cheaper than a walk over the response.
            return decoder.feed_whole(response, repair=b"\\u" in body)
        # An object without any member of a response is not an empty response: some gateways report
        # errors with status 200, in the usual form or in an object of another form.
        if not response.get("error"):
            raise ServerFailed("the server returned a body that is not a response", retryable=True)
        return [*decoder.feed_message(response), *decoder.close()]


_ITEM_LISTS = frozenset({"input", "messages"})
"""The body members that are rendered from blocks."""
_JSON_HEADERS = {"Content-Type": "application/json"}
_STREAM_HEADERS = {**_JSON_HEADERS, "Accept": EVENT_STREAM}


class Transport:
    """Sends requests to one server.

    Args:
        make_client: Returns the client of an event loop: Kedge's own, or one of the openai or anthropic package.
        provider: The name of the provider.
        sdk: The package of a client that is not Kedge's own.
    """

    always_streams: ClassVar[bool] = False
    """Whether responses are always streamed, so that requests do not say it."""

    def __init__(
        self, make_client: Callable[[], AnyClient], provider: str, sdk: Sdk = "openai"
    ) -> None:
        self._clients: PerLoop[Client] = PerLoop(
            lambda: _adapt_client(make_client(), provider, sdk), lambda client: client.close()
        )
        self.provider = provider
        self.identity: str | None = None
        """The name by which the server identified itself; None before its first answer."""

    async def aclose(self) -> None:
        """Close the connections of the running loop."""
        await self._clients.aclose()

    @property
    def client(self) -> Client:
        """The client of the running loop."""
        return self._clients.get()

    def live_anchors(self, turn: Turn) -> tuple[AnchorRecord, ...]:
        """Return the unstored records of a Turn that a live connection remembers: over HTTP there are none."""
        return ()

    async def send(
        self,
        path: str,
        body: bytes | None = None,
        *,
        method: str = "POST",
        streaming: bool = False,
        retry: bool = True,
        query: Query = None,
        parent_id: str | None = None,
    ) -> RawResponse:
        """Send a request; the reply must be closed.

        Args:
            path: The path below the address of the server.
            body: The body, if it has one.
            method: The HTTP method.
            streaming: Whether a stream is requested.
            retry: Whether a request that fails for a temporary reason is repeated.
            query: The parameters of the URL.
            parent_id: The response that a new response continues, or an empty string; None for all other requests.
        """
        headers = _STREAM_HEADERS if streaming else _JSON_HEADERS
        client = self._clients.get()
        url = build_url(client.errors, path)
        loading = LoadingWait()
        while True:
            try:
                reply = await client.send(method, url, body, headers, query=query, retry=retry)
                break
            except EngineError as error:
                if not (retry and client.max_retries):
                    raise
                await loading.pause(error)
        self.identity = read_identity(reply.headers)
        reply.is_stream = is_event_stream(reply.headers, requested=streaming)
        return reply

    async def request_json(self, method: str, path: str, **query: Any) -> dict[str, Any]:
        """Send a request and return the JSON object of the response; ``json`` is its body."""
        body = query.pop("json", None)
        content = None if body is None else encode_body(body)
        reply = await self.send(path, content, method=method, query=query)
        found = parse_object(await reply.read())
        if not found:
            message = "the server did not answer with a JSON object"
            raise ServerFailed(message, provider=self.provider, retryable=True)
        return found


def build_url(errors: ErrorBuilder, path: str) -> str:
    """Return the URL of a path below the address of a server.

    Raises:
        RequestRefused: The path, which may contain the id of an imported object, would lead elsewhere.
    """
    try:
        return parse_base_url(errors.base_url).join(path)
    except ValueError as error:
        message = f"there is no such object: {error}"
        raise RequestRefused(message, provider=errors.provider, status=404) from None


def _adapt_client(client: AnyClient, provider: str, sdk: Sdk) -> Client:
    if hasattr(client, "read_errors"):  # one of Kedge's own, whose modules take time to import
        return cast("Client", client)
    from kedge.engines.sdk_client import SdkClient

    return SdkClient(cast("AsyncOpenAI | AsyncAnthropic", client), provider, sdk)


def encode_body(body: Mapping[str, Any]) -> bytes:
    """Return the bytes of a request body.

    Raises:
        InvalidSetting: A parameter is not JSON.
    """
    members: list[bytes] = []
    params: dict[str, Any] = {}
    for name, value in body.items():
        if name in _ITEM_LISTS:
            members.append(b'"%b":%b' % (name.encode(), encode(value)))
        elif name == "tools" and type(value) is list:
            listed = map(encode_tool, cast("list[Any]", value))
            members.append(b'"tools":[%b]' % b",".join(listed))
        else:
            params[name] = value
    # The items, which are the longest part, come last.
    return b"{%b}" % b",".join([encode_params(params), *members] if params else members)
