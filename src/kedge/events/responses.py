"""Decode streams of the Responses API, from SSE bytes or WebSocket messages.

``EVENT_READERS`` maps each event type to the function that reads it; ``OPAQUE_TYPES`` are known types that are
passed on without being interpreted. Sequence numbers reveal duplicate events and gaps.
"""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import ClassVar

from kedge.events import fields
from kedge.events.decoder import (
    DecoderState,
    EventList,
    FinalStatus,
    StreamDecoder,
)
from kedge.events.fields import (
    CALL_ARGUMENTS,
    JsonObject,
    MalformedEvent,
    get_index,
    get_text,
    repair_surrogates,
)
from kedge.events.items import OutputItem, ToolCall, read_item
from kedge.events.sse import MAX_LINE, MAX_MESSAGE, SequenceChecker, SequenceStatus
from kedge.events.types import (
    AnomalyNoted,
    ItemCompleted,
    OpaqueEvent,
    PartCompleted,
    PartKind,
    ReasoningDelta,
    RefusalDelta,
    ResponseStarted,
    StreamFailed,
    TextDelta,
    build_delta,
)
from kedge.turns.frozen_json import wrap

DeltaEvent = TextDelta | RefusalDelta | ReasoningDelta
ITEM_TYPES: dict[PartKind, str] = {
    "text": "message",
    "refusal": "message",
    "summary": "reasoning",
    "reasoning": "reasoning",
}
"""The type of the item that a part of this kind belongs to."""


@dataclass(slots=True)
class StreamedPart:
    """A part of an item, and whether its text was emitted and is complete."""

    item: OutputItem
    kind: PartKind
    index: int
    is_emitted: bool = False
    is_complete: bool = False


@dataclass(slots=True)
class StreamState(DecoderState):
    """The state of the decoder between two events."""

    parts: dict[tuple[PartKind, int, int], StreamedPart] = field(
        default_factory=dict[tuple["PartKind", int, int], StreamedPart]
    )
    """The parts by kind, output index and their index in the item."""
    places: dict[tuple[object, ...], tuple[str, StreamedPart]] = field(
        default_factory=dict[tuple[object, ...], tuple[str, StreamedPart]]
    )
    """The item id and the part for what events say about their place, because most events are deltas."""
    response_id: str = ""

    def find_part(
        self, kind: PartKind, message: JsonObject, index: str
    ) -> tuple[str, StreamedPart]:
        """Return the item id and the part of an event; an item that was never announced starts with it."""
        sent = kind, message.get("item_id"), message.get("output_index"), message.get(index)
        try:
            found = self.places.get(sent)
        except TypeError:  # an index that is an object or an array
            found, sent = None, (kind,)
        if found is None or found[1].item.completed:
            item_id, at = get_text(message, "item_id"), fields.get_part_index(message, index)
            item = self.calls.place(ITEM_TYPES[kind], item_id, get_index(message))
            part = StreamedPart(item, kind, at)
            part = self.parts.setdefault((kind, item.output_index, at), part)
            found = self.places[sent] = item_id, part
        return found


EventReader = Callable[[StreamState, JsonObject, EventList], None]


def _read_response_started(state: StreamState, message: JsonObject, found: EventList) -> None:
    """Read the start of the response; ``queued`` and ``in_progress`` may repeat it."""
    if state.started:
        found.append(OpaqueEvent(message["type"], message))
        return
    state.started = True
    started = ResponseStarted(**fields.read_facts(fields.get_object(message, "response")))
    state.response_id = started.response_id
    found.append(started)


def _read_item_added(state: StreamState, message: JsonObject, found: EventList) -> None:
    item = fields.require_object(message, "item")
    found += state.calls.start(read_item(item, get_index(message)))


def _read_item_done(state: StreamState, message: JsonObject, found: EventList) -> None:
    item = fields.require_object(message, "item")
    ended, events = state.calls.finish(read_item(item, get_index(message)))
    found += events
    if isinstance(ended, ToolCall):
        if not ended.name:
            raise MalformedEvent("the tool call has no name")
        item = ended.complete_item(item)
    found.append(ItemCompleted(item, ended.output_index))


def _delta_reader(kind: PartKind, index: str) -> EventReader:
    def read(state: StreamState, message: JsonObject, found: EventList) -> None:
        delta = message.get("delta")
        if type(delta) is not str:
            delta = fields.require_text(message, "delta")
        item_id, part = state.find_part(kind, message, index)
        output_index = part.item.output_index
        if state.joiner.pending or not delta.isascii():
            delta = state.joiner.feed((kind, item_id, output_index, part.index), delta)
        if kind == "text" and message.get("logprobs"):
            state.logprobs += fields.read_logprobs(message)
        if not delta:
            return
        part.is_emitted = True
        if kind == "text":  # most events
            logprobs = state.take_logprobs() if state.logprobs else ()
            found.append(TextDelta(delta, item_id, output_index, part.index, logprobs))
        else:
            found.append(build_delta(kind, delta, item_id, output_index, part.index))

    return read


def _part_done_reader(kind: PartKind, member: str, index: str) -> EventReader:
    def read(state: StreamState, message: JsonObject, found: EventList) -> None:
        text = fields.require_text(message, member)
        _complete_part(state, *state.find_part(kind, message, index), text, message, found)

    return read


def _complete_part(
    state: StreamState,
    item_id: str,
    part: StreamedPart,
    text: str,
    container: JsonObject,
    found: EventList,
) -> None:
    """Emit the end of a part, and first its text if the server sent no delta of it."""
    kind, place = part.kind, (item_id, part.item.output_index, part.index)
    state.joiner.discard((kind, *place))
    if text:
        if not part.is_emitted:
            found.append(build_delta(kind, text, *place, fields.read_logprobs(container)))
        part.is_emitted = part.is_complete = True
    found.append(PartCompleted(kind, text, *place))


_PART_KINDS: dict[str, tuple[PartKind, str]] = {
    form: (kind, member) for kind, (form, member) in fields.PART_FORMS.items()
}
"""The kind of each type of part, and the member with its text."""


def _part_object_reader(index: str) -> EventReader:
    """Return a reader of a finished part object, which counts if no other event completed the part."""

    def read(state: StreamState, message: JsonObject, found: EventList) -> None:
        found.append(OpaqueEvent(message["type"], message))
        content = fields.get_object(message, "part")
        kind, member = _PART_KINDS.get(get_text(content, "type"), ("text", ""))
        place = kind, get_index(message), fields.get_part_index(message, index)
        known = state.parts.get(place)
        text = get_text(content, member)
        if text and not (known and known.is_complete):
            item_id, part = state.find_part(kind, message, index)
            if not part.is_complete:
                _complete_part(state, item_id, part, text, content, found)

    return read


def _read_arguments_delta(state: StreamState, message: JsonObject, found: EventList) -> None:
    delta, place = message.get("delta"), _get_call_place(message)
    if type(delta) is not str:
        delta = fields.require_text(message, "delta")
    if state.joiner.pending or not delta.isascii():
        delta = state.joiner.feed(place, delta)
    if delta:
        found += state.calls.append_arguments(*place, delta)


def _arguments_done_reader(member: str) -> EventReader:
    def read(state: StreamState, message: JsonObject, _: EventList) -> None:
        place = _get_call_place(message)
        state.joiner.discard(place)
        arguments = fields.get_arguments(message, member)
        if arguments is None:
            arguments = fields.require_text(message, member)
        state.calls.set_arguments(*place, arguments)

    return read


def _get_call_place(message: JsonObject) -> tuple[str, int]:
    """Return the item id and the index of an event about arguments."""
    item_id, index = message.get("item_id"), message.get("output_index")
    if type(item_id) is str and type(index) is int and index >= 0:  # most events
        return item_id, index
    return get_text(message, "item_id"), get_index(message)


def _read_error(_: StreamState, message: JsonObject, found: EventList) -> None:
    found.append(StreamFailed(**fields.read_error(message)))


# The end of a response. If the event type and the status of the response differ, the worse one is used.

_STATUS_ENDINGS: dict[str, FinalStatus] = {
    "completed": "completed",
    "": "completed",  # some servers send no status
    "complete": "completed",  # of some gateways
    "incomplete": "incomplete",
}


RUNNING = frozenset({"queued", "in_progress"})
"""The statuses of a response that has not ended."""


def _worse_status(one: FinalStatus, other: FinalStatus) -> FinalStatus:
    return "failed" if "failed" in (one, other) else one if other == "completed" else other


def _terminal_reader(ending: FinalStatus, code: str = "") -> EventReader:
    def read(state: StreamState, message: JsonObject, found: EventList) -> None:
        response = fields.get_object(message, "response")
        state.started = True
        if state.replaced or state.joiner.replaced:
            detail = "the output holds lone surrogates, which were replaced by U+FFFD"
            found.append(AnomalyNoted("replaced_text", detail))
        status = _worse_status(ending, _STATUS_ENDINGS.get(get_text(response, "status"), "failed"))
        more: JsonObject = {"usage": fields.read_usage(response)}
        reason, failure = get_text(fields.get_object(response, "incomplete_details"), "reason"), ""
        if status == "failed":
            reason, failure = _read_failure(response, code)
        else:
            more |= _read_output(state, response, found)
        if status == "completed":
            found += state.calls.resolve_open()
        state.end(found, (status, reason, failure), response, more)

    return read


def _read_failure(response: JsonObject, code: str) -> tuple[str, str]:
    """Return the code and the message of a failure."""
    error = fields.read_error({"error": response.get("error") or {}})
    status = get_text(response, "status")
    message = ""
    if status not in ("failed", "cancelled", ""):
        code = code or "status_mismatch"
        message = f"the terminal event does not match the status of the response ({status})"
    return error["code"] or code or status, error["message"] or message


def _read_output(state: StreamState, response: JsonObject, found: EventList) -> JsonObject:
    """Return the items that a finished response lists; calls in the list complete the open ones."""
    if not isinstance(response.get("output"), list):
        return {}
    items = fields.list_objects(response["output"])
    if len(items) < len(response["output"]):
        found.append(
            AnomalyNoted("malformed", "the finished response lists something that is not an item")
        )
    matched = state.calls.reconcile(items)
    for at, (known, events) in enumerate(matched):
        found += events
        if isinstance(known, ToolCall):
            if _contradicts_call(items[at], known):
                detail = f"call {known.call_id!r} differs in the finished response"
                found.append(AnomalyNoted("contradiction", detail))
            items[at] = known.complete_item(items[at])
    indexes = tuple(known.output_index for known, _ in matched)
    return {"output": tuple(map(wrap, items)), "indexes": indexes}


def _contradicts_call(item: JsonObject, call: ToolCall) -> bool:
    """Return whether a listed call differs from the streamed one; a missing member does not."""
    known = (call.call_id, call.name, call.arguments)
    listed = (get_text(item, name) for name in ("call_id", "name", CALL_ARGUMENTS[item["type"]]))
    return any(one and one != other for one, other in zip(listed, known, strict=True))


EVENT_READERS: dict[str, EventReader] = {
    "response.created": _read_response_started,
    "response.queued": _read_response_started,
    "response.in_progress": _read_response_started,
    "response.output_item.added": _read_item_added,
    "response.output_item.done": _read_item_done,
    "response.output_text.delta": _delta_reader("text", "content_index"),
    "response.output_text.done": _part_done_reader("text", "text", "content_index"),
    "response.refusal.delta": _delta_reader("refusal", "content_index"),
    "response.refusal.done": _part_done_reader("refusal", "refusal", "content_index"),
    "response.reasoning_summary_text.delta": _delta_reader("summary", "summary_index"),
    "response.reasoning_summary_text.done": _part_done_reader("summary", "text", "summary_index"),
    "response.reasoning_text.delta": _delta_reader("reasoning", "content_index"),
    "response.reasoning_text.done": _part_done_reader("reasoning", "text", "content_index"),
    "response.content_part.done": _part_object_reader("content_index"),
    "response.reasoning_summary_part.done": _part_object_reader("summary_index"),
    "response.function_call_arguments.delta": _read_arguments_delta,
    "response.function_call_arguments.done": _arguments_done_reader("arguments"),
    "response.custom_tool_call_input.delta": _read_arguments_delta,
    "response.custom_tool_call_input.done": _arguments_done_reader("input"),
    "response.completed": _terminal_reader("completed"),
    "response.incomplete": _terminal_reader("incomplete"),
    "response.failed": _terminal_reader("failed"),
    "response.cancelled": _terminal_reader("failed", "cancelled"),
    "response.done": _terminal_reader("completed"),  # of some gateways; the status decides
    "error": _read_error,
}

DELTA_TYPES = frozenset(kind for kind in EVENT_READERS if kind.endswith(".delta"))
"""The deltas whose text is passed through the ``SurrogateJoiner``."""

_OPAQUE_GROUPS = {
    "content_part": "added",
    "output_text.annotation": "added",
    "reasoning_summary_part": "added",
    "file_search_call": "in_progress searching completed",
    "web_search_call": "in_progress searching completed",
    "code_interpreter_call": "in_progress interpreting completed",
    "code_interpreter_call_code": "delta done",
    "image_generation_call": "in_progress generating partial_image completed",
    "mcp_call": "in_progress completed failed",
    "mcp_call_arguments": "delta done",
    "mcp_list_tools": "in_progress completed failed",
    "shell_call_command": "added delta done",
    "shell_call_output_content": "delta done",
    "apply_patch_call_operation_diff": "delta done",
    "compaction": "compacting",
    "audio": "delta done",
    "audio.transcript": "delta done",
    "steer": "accepted pending failed",
}
OPAQUE_TYPES = {
    f"response.{group}.{name}" for group, names in _OPAQUE_GROUPS.items() for name in names.split()
} | {"keepalive"}


log = logging.getLogger(__name__)


class ResponsesDecoder(StreamDecoder[StreamState]):
    """Decodes a stream of the Responses API.

    Args:
        stream_id: The lane of this response on a WebSocket that carries several at once; messages of other
            lanes are ignored.
        max_line: The maximum length of an SSE line, in bytes.
        max_message: The maximum length of an SSE message, in bytes.
    """

    RESPONSE_FIELDS: ClassVar[frozenset[str]] = frozenset({"output", "status"})
    EVENT_READERS = EVENT_READERS

    def __init__(
        self, *, stream_id: str = "", max_line: int = MAX_LINE, max_message: int = MAX_MESSAGE
    ) -> None:
        super().__init__(StreamState(), max_line=max_line, max_message=max_message)
        self.duplicates = self.gaps = self.late = 0
        self._stream_id = stream_id
        self._sequence = SequenceChecker()

    @property
    def response_id(self) -> str:
        """The id of the response; empty until it is known."""
        return self._state.response_id

    @property
    def last_sequence_number(self) -> int:
        """The highest sequence number so far; -1 if there is none."""
        return self._sequence.last

    def _split_response(self, response: JsonObject) -> Iterator[JsonObject]:
        if response.get("error") and not response.get("status"):
            yield {**response, "type": "error"}  # some gateways send errors with HTTP 200
            return
        begun = {name: value for name, value in response.items() if name != "output"}
        if get_text(response, "status") in RUNNING:  # it continues in the background
            yield {"type": "response.created", "response": {**begun, "background": True}}
            return
        yield {"type": "response.created", "response": begun}
        yield {"type": "response.done", "response": response}

    def _decode_message(self, message: JsonObject, event: str, found: EventList) -> None:
        kind = message.get("type")
        if type(kind) is not str:
            kind = "error" if "error" in message else event
            if not kind:
                self._report_malformed(event, message, "no type", found)
                return
            message["type"] = kind
        if self._state.ended or (self._stream_id and self._is_other_stream(message)):
            return
        number = message.get("sequence_number")
        if type(number) is int and number >= 0 and self._sequence.reliable:
            delta, at = message.get("delta"), message.get("output_index")
            same = kind, at if type(at) is int else -1, delta if type(delta) is str else None
            status = self._sequence.classify(number, hash(same))
            if status != "fresh" or not self._sequence.reliable:
                self._report_order(status, number, found)
            if status == "duplicate":
                return
        self._read_event(kind, message, found, known=OPAQUE_TYPES)

    def _expects_json(self, event: str) -> bool:
        return not event or event == "error" or event.startswith("response.")

    def _repair_message(self, message: JsonObject, event: str) -> JsonObject:
        clean = repair_surrogates(message)
        if (get_text(message, "type") or event) in DELTA_TYPES and "delta" in message:
            clean["delta"] = message["delta"]
        elif clean != message:
            self._state.replaced = True
        return clean

    def _is_other_stream(self, message: JsonObject) -> bool:
        lane = message.get("stream_id")
        return bool(lane and lane != self._stream_id)

    def _report_order(self, status: SequenceStatus, number: int, found: EventList) -> None:
        """Report an event that arrived twice, late, or after missing ones."""
        match status:
            case "duplicate":
                self.duplicates += 1
                log.debug("event %d was received twice; the second is ignored", number)
            case "gap":
                self.gaps += 1
                self._report_anomaly(
                    "gap", f"events are missing before sequence number {number}", found
                )
            case "late":
                self.late += 1
                self._report_anomaly("late", f"event {number} arrived late", found)
            case "fresh":
                log.warning(
                    "sequence number %d was used twice; sequence numbers are ignored", number
                )
