"""The Responses API's stream, decoded: bytes of SSE or messages of a WebSocket in, Events out.

What each type of event means is in ``kedge.events.table``; events come with numbers, by which duplicates
are recognised and gaps noted.
"""

import logging
from typing import Any, ClassVar

from kedge.events.calls import ToolCallState
from kedge.events.decoder import StreamDecoder
from kedge.events.reading import Malformed, Members, index, word
from kedge.events.sequence import SequenceCheck
from kedge.events.sse import MAX_LINE, MAX_MESSAGE
from kedge.events.surrogates import mended
from kedge.events.table import DELTAS, OPAQUE, TABLE, Found, StreamState
from kedge.events.types import StreamEvent

log = logging.getLogger(__name__)


class ResponsesDecoder(StreamDecoder):
    """Decodes the stream of one response.

    ``stream_id`` is the lane of a WebSocket that carries several responses at once; messages of other
    lanes are passed over.
    """

    ANSWER: ClassVar[frozenset[str]] = frozenset({"output", "status"})

    def __init__(
        self,
        *,
        stream_id: str = "",
        max_line: int = MAX_LINE,
        max_message: int = MAX_MESSAGE,
    ) -> None:
        super().__init__(max_line=max_line, max_message=max_message)
        self.duplicates = self.gaps = self.late = 0
        self._stream_id = stream_id
        self._state = StreamState()
        self._sequence = SequenceCheck()

    @property
    def calls(self) -> ToolCallState:
        """The tool calls of the response."""
        return self._state.calls

    @property
    def ended(self) -> bool:
        """Whether the response's terminal event has come."""
        return self._state.ended

    def feed_parsed(self, message: dict[str, Any]) -> list[StreamEvent]:
        """Take one message whose text is known to hold no half characters; it is not walked."""
        found: Found = []
        self._take(message, "", found)
        return found

    def feed_whole(self, response: dict[str, Any], *, torn: bool = True) -> list[StreamEvent]:
        """Take a whole response: the events of its beginning and of its end."""
        begun = {name: value for name, value in response.items() if name != "output"}
        ended = f"response.{response.get('status') or 'completed'}"
        feed = self.feed_message if torn else self.feed_parsed
        return [
            *feed({"type": "response.created", "response": begun}),
            *feed({"type": ended, "response": response}),
            *self.close(),
        ]

    def _take(self, message: Members, event: str, found: Found) -> None:
        kind = message.get("type")
        if type(kind) is not str:
            kind = "error" if "error" in message else event
            if not kind:
                self._note_malformed(event, message, "no type", found)
                return
            message["type"] = kind
        if self._state.ended or self._foreign(message) or self._repeated(kind, message, found):
            return
        reader = TABLE.get(kind)
        if reader is None:
            self._opaque(kind, message, found, known=kind in OPAQUE)
            return
        try:
            reader(self._state, message, found)
        except Malformed as problem:
            self._note_malformed(kind, message, str(problem), found)

    def _is_ours(self, event: str) -> bool:
        return not event or event == "error" or event.startswith("response.")

    def _mended(self, message: Members, event: str) -> Members:
        clean = mended(message)
        if (word(message, "type") or event) in DELTAS and "delta" in message:
            clean["delta"] = message["delta"]
        return clean

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
