"""The base class of all stream decoders: SSE bytes or parsed messages in, events out.

One decoder reads one response. No server data makes it raise, except that ``StreamTooLarge`` limits memory:
an event that cannot be parsed is reported as ``AnomalyNoted`` with its type, number and member names, and
decoding continues. The assembler then does not report a damaged stream as complete.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar, Literal, cast

from kedge._internal.json_text import decode
from kedge.events import types
from kedge.events.types import OpaqueEvent
from kedge.wire import fields
from kedge.wire.fields import JsonObject, MalformedEvent
from kedge.wire.items import ItemTable
from kedge.wire.sse import BYTE_ORDER_MARK, MAX_LINE, MAX_MESSAGE, SSEDecoder, SSEMessage

log = logging.getLogger(__name__)

DONE = "[DONE]"
JSON_EVENTS = ("", "error", "message")
"""Names of events that must be JSON, like the events of the API; others are keep-alives of proxies."""
FinalStatus = Literal["completed", "incomplete", "failed"]
Ending = tuple[FinalStatus, str, str]
"""How a response ends: its status, the reason or error code, and the error message."""

BLANKS = BYTE_ORDER_MARK + b" \t\r\n"
"""The bytes that may precede the content of a body."""

_SSE_FIELDS = (b":", b"data:", b"event:", b"id:", b"retry:")


def read_kind(body: bytes) -> Literal["", "object", "stream", "other"]:
    """Return what a body begins as, whatever its content type; nothing if it is blank so far."""
    start = body.lstrip(BLANKS)
    if not start:
        return ""
    if start.startswith(b"{"):
        return "object"  # no event starts like this
    if start.startswith(_SSE_FIELDS):
        return "stream"
    return "other"


class StreamDecoder(ABC):
    """Decodes the stream of one response; the base class of the decoders of each API.

    Args:
        max_line: The maximum length of an SSE line, in bytes.
        max_message: The maximum length of an SSE message, in bytes.

    Attributes:
        calls: The output items of the response, and its tool calls.
        ended: Whether the terminal event of the response was decoded.
    """

    RESPONSE_FIELDS: ClassVar[frozenset[str]]
    """Members of which a complete response object has at least one."""
    EVENT_READERS: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    """The method that reads each type of event, and its arguments after the event."""
    NATIVE_API: ClassVar[str] = ""
    """The API that items of unknown types are of; empty for the Responses API."""

    def __init__(self, *, max_line: int = MAX_LINE, max_message: int = MAX_MESSAGE) -> None:
        self.calls = ItemTable()
        self.ended = False
        self._started = False
        self._closed = False
        self._joiner = fields.SurrogateJoiner()
        self._logprobs: tuple[Mapping[str, Any], ...] = ()
        """Log probabilities of tokens whose text follows: a token may be a part of a character."""
        self._replaced = False
        """Whether a message other than a delta contained a lone surrogate, which was replaced."""
        self._events = self.calls.events
        """The events that are emitted next."""
        self._make_sse = partial(SSEDecoder, max_line=max_line, max_message=max_message)
        self._sse: SSEDecoder | None = None

    def feed_whole(
        self, response: dict[str, Any], *, repair: bool = True
    ) -> list[types.StreamEvent]:
        """Decode a response that was not streamed, and close the decoder.

        Args:
            response: The parsed response object.
            repair: Whether its texts may contain lone surrogates, which are then replaced.

        Returns:
            The events of the response.
        """
        if repair:
            repaired = fields.repair_surrogates(response)
            self._replaced = repaired != response
            response = repaired
        self._read_whole(response)
        return self._close()

    def feed(self, chunk: bytes) -> list[types.StreamEvent]:
        """Decode a chunk of an SSE stream.

        Args:
            chunk: Any number of bytes; events may be split anywhere.

        Returns:
            The events that this chunk completes.

        Raises:
            StreamTooLarge: If a line or message exceeds its limit.
        """
        if self._sse is None:
            self._sse = self._make_sse()
        for message in self._sse.feed(chunk):
            self._read_sse_message(message)
        return self._take_events()

    def feed_message(self, message: str | bytes | Mapping[str, Any]) -> list[types.StreamEvent]:
        """Decode one WebSocket message.

        Args:
            message: The message as text, as bytes or parsed.

        Returns:
            The events in the message.
        """
        if isinstance(message, Mapping):
            self._decode_message(self._repair_message(dict(message), ""), "")
            return self._take_events()
        if isinstance(message, bytes):
            message = message.decode("utf-8", "replace")
        self._read_sse_message(SSEMessage("", message))
        return self._take_events()

    def restart(self) -> None:
        """Discard an event that is not complete, because the stream continues on another connection."""
        self._sse = None

    def close(self) -> list[types.StreamEvent]:
        """End the stream; may be called more than once.

        Returns:
            The events of a last message that lacks only its closing blank line, and the events that the
            end of the stream implies.
        """
        if self._closed:
            return []
        self._closed = True
        if self._sse is not None:
            for message in self._sse.close():
                self._read_sse_message(message)
        return self._close()

    def _close(self) -> list[types.StreamEvent]:
        self._closed = True
        self._finish()
        if not self.ended:
            self.calls.log_summary()
        return self._take_events()

    def _take_events(self) -> list[types.StreamEvent]:
        """Return and remove the events that are emitted next."""
        events = self._events.copy()
        self._events.clear()
        return events

    @abstractmethod
    def _read_whole(self, response: JsonObject) -> None:
        """Read a response that was not streamed."""

    @abstractmethod
    def _decode_message(self, message: JsonObject, event: str) -> None:
        """Decode one parsed message; ``event`` is its SSE event name, if any."""

    def _repair_message(self, message: JsonObject, event: str) -> JsonObject:
        """Replace lone surrogates, except in deltas, whose other half may follow.

        By default nothing is replaced, because a decoder may pass every text through its joiner instead.
        """
        del event
        return message

    def _finish(self) -> None:  # noqa: B027 - most APIs imply none
        """Emit the events that the end of the stream implies."""

    def _read_done(self) -> None:  # noqa: B027 - most APIs have a terminal event
        """Read the marker at the end of a stream."""

    def _end(self, ending: Ending, facts: JsonObject) -> None:
        """Emit the end of the response, with these fields of the event."""
        self.ended = True
        status, code, message = ending
        if status == "completed":
            self._events.append(types.ResponseCompleted(**facts))
        elif status == "incomplete":
            self._events.append(types.ResponseIncomplete(**facts, reason=code))
        else:
            self._events.append(types.ResponseFailed(**facts, code=code, message=message))
        self.calls.log_summary()

    def _take_logprobs(self) -> tuple[Mapping[str, Any], ...]:
        """Return and remove the log probabilities of a text."""
        logprobs = self._logprobs
        self._logprobs = ()
        return logprobs

    def _read_sse_message(self, message: SSEMessage) -> None:
        event, data = message
        try:
            # A log probability may be -Infinity, which is not JSON.
            parsed = decode(data, parse_constant=lambda _: None)
        except (ValueError, RecursionError):  # a number with too many digits is a ValueError
            parsed = None
        if type(parsed) is not dict:
            if data.startswith(DONE):
                self._read_done()
            elif self._closed:
                log.debug("the stream ended inside an event")
            elif event in JSON_EVENTS or event in self.EVENT_READERS or event[:9] == "response.":
                self._report_malformed(event, None, "not a JSON object")
            return
        content = cast("JsonObject", parsed)
        if "\\ud" in data or "\\uD" in data:
            content = self._repair_message(content, event)
        self._decode_message(content, event)

    def _read_event(self, kind: str, message: JsonObject) -> None:
        """Read an event with the method for its type; pass it on if there is none."""
        reader = self.EVENT_READERS.get(kind)
        if reader is None:
            self._events.append(OpaqueEvent(kind, message))
            return
        read, *arguments = reader
        try:
            read(self, message, *arguments)
        except MalformedEvent as problem:
            self._report_malformed(kind, message, str(problem))

    def _report_malformed(self, kind: str, message: object, problem: str) -> None:
        self._report_anomaly("malformed", fields.describe_malformed(kind, message, problem))

    def _report_anomaly(self, kind: types.AnomalyKind, detail: str) -> None:
        log.warning("stream problem (%s): %s", kind, detail)
        self._events.append(types.AnomalyNoted(kind, detail))
