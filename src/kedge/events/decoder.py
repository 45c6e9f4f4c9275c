"""What the decoders of all APIs share: bytes of SSE or messages in, Events out.

One decoder serves one response. Nothing that a server writes makes it raise (but for ``StreamTooLarge``):
what cannot be read is noted with its type, number and member names, and the stream goes on. The
assembler hears what was noted and does not take a damaged stream for a whole one.
"""

import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, cast

from kedge.events.fields import JsonObject, describe_event
from kedge.events.sse import MAX_LINE, MAX_MESSAGE, SSEDecoder, SSEMessage
from kedge.events.tool_calls import ToolCallState
from kedge.events.types import AnomalyKind, AnomalyNoted, OpaqueEvent, StreamEvent

log = logging.getLogger(__name__)

DONE = "[DONE]"
EventList = list[StreamEvent]

# A log probability of minus infinity is no JSON, but servers write it; it is not worth an event.
_json_decoder = json.JSONDecoder(parse_constant=lambda _: None)


class StreamDecoder(ABC):
    """Decodes the stream of one response; the subclasses know what its messages mean."""

    RESPONSE_FIELDS: ClassVar[frozenset[str]]
    """Members of which a whole answer has at least one."""

    def __init__(self, *, max_line: int = MAX_LINE, max_message: int = MAX_MESSAGE) -> None:
        self.malformed = self.unknown = 0
        self._sse = SSEDecoder(max_line=max_line, max_message=max_message)
        self._closed = False

    @property
    @abstractmethod
    def calls(self) -> ToolCallState:
        """The tool calls of the response."""

    @property
    @abstractmethod
    def ended(self) -> bool:
        """Whether the response's terminal event has come."""

    @abstractmethod
    def feed_whole(self, response: dict[str, Any], *, repair: bool = True) -> list[StreamEvent]:
        """Take a whole response and the end; ``torn`` tells whether it may hold half characters."""

    def feed(self, chunk: bytes) -> list[StreamEvent]:
        """Take some bytes of an SSE stream; give the events that they complete."""
        found: EventList = []
        for message in self._sse.feed(chunk):
            self._read_sse_message(message, found)
        return found

    def feed_message(self, message: str | bytes | Mapping[str, Any]) -> list[StreamEvent]:
        """Take one message of a WebSocket; give the events it holds."""
        found: EventList = []
        if isinstance(message, Mapping):
            self._decode_message(self._repair_message(dict(message), ""), "", found)
        else:
            text = message if isinstance(message, str) else message.decode("utf-8", "replace")
            self._read_sse_message(SSEMessage("", text), found)
        return found

    def close(self) -> list[StreamEvent]:
        """Take the end of the stream; give the event that lacked only its closing blank line."""
        found: EventList = []
        if not self._closed:
            self._closed = True
            for message in self._sse.close():
                if message.data.startswith(DONE) or _parse_object(message.data) is not None:
                    self._read_sse_message(message, found)
                else:
                    log.debug("the stream was cut inside an event")
            self._finish(found)
            if not self.ended:
                self.calls.log_summary()
        return found

    @abstractmethod
    def _decode_message(self, message: JsonObject, event: str, found: EventList) -> None:
        """Read one message; ``event`` is the name under which it came, if any."""

    @abstractmethod
    def _repair_message(self, message: JsonObject, event: str) -> JsonObject:
        """The message with torn characters mended, but for deltas: their other half may follow."""

    @abstractmethod
    def _expects_json(self, event: str) -> bool:
        """Whether an event of this name should have been JSON; others are somebody's keep-alive."""

    def _finish(self, found: EventList) -> None:  # noqa: B027 - for most, nothing
        """The stream said that it is done, or it is over: what that means, if anything."""

    def _read_sse_message(self, message: SSEMessage, found: EventList) -> None:
        event, data = message
        if data.startswith(DONE):
            self._finish(found)
            return
        parsed = _parse_object(data)
        if parsed is None:
            if self._expects_json(event):
                self._report_malformed(event, None, "not a JSON object", found)
            return
        if "\\ud" in data or "\\uD" in data:
            parsed = self._repair_message(parsed, event)
        self._decode_message(parsed, event, found)

    def _emit_opaque(
        self, kind: str, message: JsonObject, found: EventList, *, known: bool = False
    ) -> None:
        if not known:
            self.unknown += 1
            log.debug(
                "an event of an unknown type is passed on: %s", describe_event(kind, message, "-")
            )
        found.append(OpaqueEvent(kind, message))

    def _report_malformed(self, kind: str, message: object, problem: str, found: EventList) -> None:
        self.malformed += 1
        self._report_anomaly("malformed", describe_event(kind, message, problem), found)

    def _report_anomaly(self, kind: AnomalyKind, detail: str, found: EventList) -> None:
        log.warning("the stream is not in order (%s): %s", kind, detail)
        found.append(AnomalyNoted(kind, detail))


def _parse_object(data: str) -> JsonObject | None:
    try:
        value = _json_decoder.decode(data)
    except (ValueError, RecursionError):  # a number of too many digits is a ValueError as well
        return None
    return cast("JsonObject", value) if type(value) is dict else None
