"""The Responses API's stream, decoded: bytes of SSE or messages of a WebSocket in, Events out.

One decoder serves one response. What each type of event means is in ``kedge.events.table``. Nothing that
a server writes makes the decoder raise (but for ``StreamTooLarge``): an event that cannot be read is
noted with its type, number and member names, and the stream goes on. The assembler hears what was noted
and does not take a damaged stream for a whole one.
"""

import json
import logging
from collections.abc import Mapping
from typing import Any, cast

from kedge.events.calls import ToolCallState
from kedge.events.reading import Malformed, Members, described, index, word
from kedge.events.sequence import SequenceCheck
from kedge.events.sse import MAX_LINE, MAX_MESSAGE, SSEDecoder, SSEMessage
from kedge.events.surrogates import mended
from kedge.events.table import DELTAS, OPAQUE, TABLE, Found, StreamState
from kedge.events.types import AnomalyKind, AnomalyNoted, OpaqueEvent, StreamEvent

log = logging.getLogger(__name__)

DONE = "[DONE]"

# A log probability of minus infinity is no JSON, but servers write it; it is not worth an event.
_JSON = json.JSONDecoder(parse_constant=lambda _: None)


class ResponsesDecoder:
    """Decodes the stream of one response.

    ``stream_id`` is the lane of a WebSocket that carries several responses at once; messages of other
    lanes are passed over.
    """

    def __init__(
        self,
        *,
        stream_id: str = "",
        max_line: int = MAX_LINE,
        max_message: int = MAX_MESSAGE,
    ) -> None:
        self.duplicates = self.gaps = self.late = self.malformed = self.unknown = 0
        self._stream_id = stream_id
        self._sse = SSEDecoder(max_line=max_line, max_message=max_message)
        self._state = StreamState()
        self._sequence = SequenceCheck()
        self._closed = False

    @property
    def calls(self) -> ToolCallState:
        """The tool calls of the response."""
        return self._state.calls

    @property
    def ended(self) -> bool:
        """Whether the response's terminal event has come."""
        return self._state.ended

    def feed(self, chunk: bytes) -> list[StreamEvent]:
        """Take some bytes of an SSE stream; give the events that they complete."""
        found: Found = []
        for message in self._sse.feed(chunk):
            self._read(message, found)
        return found

    def feed_parsed(self, message: dict[str, Any]) -> list[StreamEvent]:
        """Take one message whose text is known to hold no half characters; it is not walked."""
        found: Found = []
        self._take(message, "", found)
        return found

    def feed_message(self, message: str | bytes | Mapping[str, Any]) -> list[StreamEvent]:
        """Take one message of a WebSocket; give the events it holds."""
        found: Found = []
        if isinstance(message, Mapping):
            self._take(_mended(dict(message), ""), "", found)
        else:
            text = message if isinstance(message, str) else message.decode("utf-8", "replace")
            self._read(SSEMessage("", text), found)
        return found

    def close(self) -> list[StreamEvent]:
        """Take the end of the stream; give the event that lacked only its closing blank line."""
        found: Found = []
        if not self._closed:
            self._closed = True
            for message in self._sse.close():
                if _parsed(message.data) is None:
                    log.debug("the stream was cut inside an event")
                else:
                    self._read(message, found)
            if not self.ended:
                self.calls.log_summary()
        return found

    def _read(self, message: SSEMessage, found: Found) -> None:
        event, data = message
        if data.startswith(DONE):
            return
        parsed = _parsed(data)
        if parsed is None:
            # Somebody else's keep-alive needs no JSON; an event of ours does.
            if not event or event == "error" or event.startswith("response."):
                self._malformed(event, None, "not a JSON object", found)
            return
        if "\\ud" in data or "\\uD" in data:
            parsed = _mended(parsed, event)
        self._take(parsed, event, found)

    def _take(self, message: Members, event: str, found: Found) -> None:
        kind = message.get("type")
        if type(kind) is not str:
            kind = "error" if "error" in message else event
            if not kind:
                self._malformed(event, message, "no type", found)
                return
            message["type"] = kind
        if self._state.ended or self._foreign(message) or self._repeated(kind, message, found):
            return
        reader = TABLE.get(kind)
        if reader is None:
            self._opaque(kind, message, found)
            return
        try:
            reader(self._state, message, found)
        except Malformed as problem:
            self._malformed(kind, message, str(problem), found)

    def _foreign(self, message: Members) -> bool:
        lane = message.get("stream_id")
        return bool(lane and self._stream_id and lane != self._stream_id)

    def _repeated(self, kind: str, message: Members, found: Found) -> bool:
        """Whether the event came before; gaps and late events are noted on the way."""
        number = message.get("sequence_number")
        if type(number) is not int or number < 0 or not self._sequence.reliable:
            return False
        delta = message.get("delta")
        same = (kind, index(message), delta if type(delta) is str else None)
        match self._sequence.see(number, hash(same)):
            case "fresh":
                if not self._sequence.reliable:
                    log.warning("event number %d came twice; the numbers are ignored", number)
            case "duplicate":
                self.duplicates += 1
                log.debug("event number %d came twice; the second is ignored", number)
                return True
            case "gap":
                self.gaps += 1
                self._note("gap", f"events are missing before number {number}", found)
            case "late":
                self.late += 1
                self._note("late", f"event number {number} came late", found)
        return False

    def _opaque(self, kind: str, message: Members, found: Found) -> None:
        if kind not in OPAQUE:
            self.unknown += 1
            log.debug("an event of an unknown type is passed on: %s", described(kind, message, "-"))
        found.append(OpaqueEvent(kind, message))

    def _malformed(self, kind: str, message: object, problem: str, found: Found) -> None:
        self.malformed += 1
        self._note("malformed", described(kind, message, problem), found)

    def _note(self, kind: AnomalyKind, detail: str, found: Found) -> None:
        log.warning("the stream is not in order (%s): %s", kind, detail)
        found.append(AnomalyNoted(kind, detail))


def _parsed(data: str) -> Members | None:
    try:
        value = _JSON.decode(data)
    except (ValueError, RecursionError):  # a number of too many digits is a ValueError as well
        return None
    return cast("Members", value) if type(value) is dict else None


def _mended(message: Members, event: str) -> Members:
    """The message with torn characters mended, but for a delta: its other half may follow."""
    clean = mended(message)
    if (word(message, "type") or event) in DELTAS and "delta" in message:
        clean["delta"] = message["delta"]
    return clean
