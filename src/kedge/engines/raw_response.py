"""A response over any transport, whose body is not read yet, and the rules by which all of them are read.

Every transport returns a ``RawResponse``: HTTP with Kedge's own client or one of a package, WebSocket, and a response
that is fetched or continued later. A ``ResponseReader`` does no I/O, so that chained clients, which see a body as it
passes, read it by the same rules.
"""

from collections.abc import AsyncIterator, Callable, Mapping
from inspect import iscoroutine
from typing import TYPE_CHECKING, Any, cast

import msgspec
from anyio import CancelScope, current_time

from kedge._internal.json_text import decode
from kedge._internal.responsive import TimeSlice
from kedge.engines.http_errors import ErrorBuilder
from kedge.engines.response_bytes import PART_BYTES
from kedge.errors import ServerFailed, StreamTooLarge
from kedge.events import StreamEvent
from kedge.wire.decoder import BLANKS, read_kind

if TYPE_CHECKING:
    from kedge.engines.transport import Client
    from kedge.wire.decoder import StreamDecoder

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
    if media_type in _UNLABELED:
        return requested
    return media_type == EVENT_STREAM


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

    client: "Client"
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
        if self._is_first and self.is_stream:
            kind = read_kind(chunk)
            if kind:
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
        if self.is_stream:
            return decoder.close()
        if is_cut:
            return []
        body = bytes(self._body).lstrip(BLANKS)
        if read_kind(body) == "stream":
            return [*decoder.feed(body), *decoder.close()]
        try:
            parsed: object = decode(body)
        except (ValueError, RecursionError):
            parsed = None
        response: dict[str, Any] = {}
        if isinstance(parsed, dict):
            response = cast("dict[str, Any]", parsed)
        if response.keys() & decoder.RESPONSE_FIELDS:
            # Only an escape can contain half a character; searching for one is cheaper than a walk over the response.
            return decoder.feed_whole(response, repair=b"\\u" in body)
        # An object without any member of a response is not an empty response: some gateways report
        # errors with status 200, in the usual form or in an object of another form.
        if not response.get("error"):
            raise ServerFailed("the server returned a body that is not a response", retryable=True)
        return [*decoder.feed_message(response), *decoder.close()]
