"""The base class of all stream decoders: SSE bytes or parsed messages in, events out.

One decoder reads one response. No server data makes it raise, except that ``StreamTooLarge`` limits memory:
an event that cannot be parsed is reported as ``AnomalyNoted`` with its type, number and member names, and
decoding continues. The assembler then does not report a damaged stream as complete.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Generic, Literal, cast

from typing_extensions import TypeVar

from kedge.events.fields import (
    JsonObject,
    MalformedEvent,
    SurrogateJoiner,
    describe_malformed,
    read_facts,
    repair_surrogates,
)
from kedge.events.items import EventList, ItemTable
from kedge.events.sse import MAX_LINE, MAX_MESSAGE, SSEDecoder, SSEMessage
from kedge.events.types import (
    AnomalyKind,
    AnomalyNoted,
    OpaqueEvent,
    ResponseCompleted,
    ResponseFailed,
    ResponseIncomplete,
    StreamEvent,
)
from kedge.text.json_text import decode

log = logging.getLogger(__name__)

DONE = "[DONE]"
FinalStatus = Literal["completed", "incomplete", "failed"]
Ending = tuple[FinalStatus, str, str]
"""How a response ends: its status, the reason or error code, and the error message."""


@dataclass(slots=True)
class DecoderState:
    """The state between two messages that the decoders of all APIs have."""

    calls: ItemTable = field(default_factory=ItemTable)
    joiner: SurrogateJoiner = field(default_factory=SurrogateJoiner)
    logprobs: tuple[Mapping[str, Any], ...] = ()
    """Log probabilities of tokens whose text follows: a token may be a part of a character."""
    started: bool = False
    ended: bool = False
    replaced: bool = False
    """Whether a message other than a delta contained a lone surrogate, which was replaced."""

    def take_logprobs(self) -> tuple[Mapping[str, Any], ...]:
        """Return and remove the log probabilities of a text."""
        taken, self.logprobs = self.logprobs, ()
        return taken

    def end(self, found: EventList, ending: Ending, response: JsonObject, more: JsonObject) -> None:
        """Emit the end of the response; ``more`` are fields of the event that are not in its object."""
        self.ended = True
        status, code, message = ending
        facts = {**read_facts(response), **more}
        if status == "completed":
            found.append(ResponseCompleted(**facts))
        elif status == "incomplete":
            found.append(ResponseIncomplete(**facts, reason=code))
        else:
            found.append(ResponseFailed(**facts, code=code, message=message))
        self.calls.log_summary()


StateT_co = TypeVar("StateT_co", bound=DecoderState, default=DecoderState, covariant=True)


class StreamDecoder(ABC, Generic[StateT_co]):
    """Decodes the stream of one response; the base class of the decoders of each API.

    Args:
        state: The state between two messages.
        max_line: The maximum length of an SSE line, in bytes.
        max_message: The maximum length of an SSE message, in bytes.
    """

    RESPONSE_FIELDS: ClassVar[frozenset[str]]
    """Members of which a complete response object has at least one."""
    EVENT_READERS: ClassVar[Mapping[str, Callable[[Any, JsonObject, list[Any]], None]]] = {}
    """The function that reads each type of event."""
    NATIVE_API: ClassVar[str] = ""
    """The API that items of unknown types are of; empty for the Responses API."""

    def __init__(
        self, state: StateT_co, *, max_line: int = MAX_LINE, max_message: int = MAX_MESSAGE
    ) -> None:
        self.malformed = self.unknown = 0
        self._state = state
        self._make_sse = partial(SSEDecoder, max_line=max_line, max_message=max_message)
        self._sse = self._make_sse()
        self._closed = False

    @property
    def calls(self) -> ItemTable:
        """The output items of the response, and its tool calls."""
        return self._state.calls

    @property
    def ended(self) -> bool:
        """Whether the terminal event of the response was decoded."""
        return self._state.ended

    def feed_whole(self, response: dict[str, Any], *, repair: bool = True) -> list[StreamEvent]:
        """Decode a response that was not streamed, and close the decoder.

        Args:
            response: The parsed response object.
            repair: Whether its texts may contain lone surrogates, which are then replaced.

        Returns:
            The events of the response.
        """
        whole = repair_surrogates(response) if repair else response
        self._state.replaced = whole != response
        found: EventList = []
        for message in self._split_response(whole):
            self._decode_message(message, "", found)
        return [*found, *self.close()]

    def feed(self, chunk: bytes) -> list[StreamEvent]:
        """Decode a chunk of an SSE stream.

        Args:
            chunk: Any number of bytes; events may be split anywhere.

        Returns:
            The events that this chunk completes.

        Raises:
            StreamTooLarge: If a line or message exceeds its limit.
        """
        found: EventList = []
        for message in self._sse.feed(chunk):
            self._read_sse_message(message, found)
        return found

    def feed_message(self, message: str | bytes | Mapping[str, Any]) -> list[StreamEvent]:
        """Decode one WebSocket message.

        Args:
            message: The message as text, as bytes or parsed.

        Returns:
            The events in the message.
        """
        found: EventList = []
        if isinstance(message, Mapping):
            self._decode_message(self._repair_message(dict(message), ""), "", found)
        else:
            text = message if isinstance(message, str) else message.decode("utf-8", "replace")
            self._read_sse_message(SSEMessage("", text), found)
        return found

    def restart(self) -> None:
        """Discard an event that is not complete, because the stream continues on another connection."""
        self._sse = self._make_sse()

    def close(self) -> list[StreamEvent]:
        """End the stream; may be called more than once.

        Returns:
            The events of a last message that lacks only its closing blank line, and those that the end
            of the stream implies.
        """
        found: EventList = []
        if not self._closed:
            self._closed = True
            for message in self._sse.close():
                self._read_sse_message(message, found)
            self._finish(found)
            if not self.ended:
                self.calls.log_summary()
        return found

    @abstractmethod
    def _split_response(self, response: JsonObject) -> Iterable[JsonObject]:
        """Return a response that was not streamed as the messages of a stream; each is decoded before the next."""

    @abstractmethod
    def _decode_message(self, message: JsonObject, event: str, found: EventList) -> None:
        """Decode one parsed message; ``event`` is its SSE event name, if any."""

    def _repair_message(self, message: JsonObject, event: str) -> JsonObject:
        """Replace lone surrogates, except in deltas, whose other half may follow.

        By default nothing is replaced, because a decoder may pass every text through its joiner instead.
        """
        del event
        return message

    @abstractmethod
    def _expects_json(self, event: str) -> bool:
        """Return whether an event of this name must be JSON; others are keep-alives of proxies."""

    def _finish(self, found: EventList) -> None:
        """Emit the events that the end of the stream implies."""

    def _read_done(self, found: EventList) -> None:
        """Read the marker at the end of a stream."""
        self._finish(found)

    def _read_sse_message(self, message: SSEMessage, found: EventList) -> None:
        event, data = message
        try:
            parsed = decode(data, parse_constant=_read_null)
        except (ValueError, RecursionError):  # a number with too many digits is a ValueError
            parsed = None
        if type(parsed) is not dict:
            if data.startswith(DONE):
                self._read_done(found)
            elif self._closed:
                log.debug("the stream ended inside an event")
            elif self._expects_json(event):
                self._report_malformed(event, None, "not a JSON object", found)
            return
        content = cast("JsonObject", parsed)
        if "\\ud" in data or "\\uD" in data:
            content = self._repair_message(content, event)
        self._decode_message(content, event, found)

    def _read_event(
        self, kind: str, message: JsonObject, found: EventList, *, known: Container[str] = ()
    ) -> None:
        """Read an event with the function for its type; pass it on if there is none."""
        read = self.EVENT_READERS.get(kind)
        if read is None:
            self._emit_opaque(kind, message, found, known=kind in known)
            return
        try:
            read(self._state, message, found)
        except MalformedEvent as problem:
            self._report_malformed(kind, message, str(problem), found)

    def _emit_opaque(
        self, kind: str, message: JsonObject, found: EventList, *, known: bool = False
    ) -> None:
        if not known:
            self.unknown += 1
            log.debug("event of unknown type passed on: %s", describe_malformed(kind, message, "-"))
        found.append(OpaqueEvent(kind, message))

    def _report_malformed(self, kind: str, message: object, problem: str, found: EventList) -> None:
        self.malformed += 1
        self._report_anomaly("malformed", describe_malformed(kind, message, problem), found)

    def _report_anomaly(self, kind: AnomalyKind, detail: str, found: EventList) -> None:
        log.warning("stream problem (%s): %s", kind, detail)
        found.append(AnomalyNoted(kind, detail))


def _read_null(name: str) -> None:
    """Read a log probability of -Infinity, which some servers send and which is not JSON."""
