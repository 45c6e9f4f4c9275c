"""Decode streams of the Responses API, from SSE bytes or WebSocket messages.

``EVENT_READERS`` maps each event type to the method that reads it; events of other types are passed on without being
interpreted. Sequence numbers reveal duplicate events and gaps.
"""

import logging
from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec

from kedge.events import types
from kedge.events.types import PartKind, TextDelta, build_delta
from kedge.turns.frozen_json import wrap
from kedge.wire import fields
from kedge.wire.decoder import FinalStatus, StreamDecoder
from kedge.wire.fields import JsonObject, MalformedEvent, get_index, get_text
from kedge.wire.items import OutputItem, ToolCall, read_item
from kedge.wire.sse import SequenceChecker, SequenceStatus

log = logging.getLogger(__name__)


class StreamedPart(msgspec.Struct):
    """A part of an item, and whether its text was emitted and is complete."""

    item: OutputItem
    kind: PartKind
    index: int
    is_emitted: bool = False
    is_complete: bool = False


_STATUS_ENDINGS: dict[str, FinalStatus] = {
    "completed": "completed",
    "": "completed",  # some servers send no status
    "complete": "completed",  # of some gateways
    "incomplete": "incomplete",
}


RUNNING = frozenset({"queued", "in_progress"})
"""The statuses of a response that has not ended."""


_PART_KINDS: dict[str, tuple[PartKind, str]] = {
    form: (kind, member) for kind, (form, member, _) in fields.PART_FORMS.items()
}
"""The kind of each type of part, and the member with its text."""


class ResponsesDecoder(StreamDecoder):
    """Decodes a stream of the Responses API.

    Args:
        **bounds: ``max_line`` and ``max_message``, as for ``StreamDecoder``.

    Attributes:
        response_id: The id of the response; empty until it is known.
    """

    RESPONSE_FIELDS: ClassVar[frozenset[str]] = frozenset({"output", "status"})

    def __init__(self, **bounds: int) -> None:
        super().__init__(**bounds)
        self.response_id = ""
        self._sequence: SequenceChecker | None = None
        self._parts: dict[tuple[PartKind, int, int], StreamedPart] = {}
        """The parts by kind, output index and their index in the item."""
        self._places: dict[tuple[object, ...], tuple[str, StreamedPart]] = {}
        """The item id and the part for what events say about their place, because most events are deltas."""

    @property
    def last_sequence_number(self) -> int:
        """The highest sequence number so far; -1 if there is none."""
        return self._sequence.last if self._sequence else -1

    def _read_whole(self, response: JsonObject) -> None:
        if response.get("error") and not response.get("status"):
            self._read_error(response)  # some gateways send errors with HTTP 200
            return
        facts = fields.read_facts(response)
        without_output = {name: value for name, value in response.items() if name != "output"}
        if facts["status"] in RUNNING:  # it continues in the background
            without_output["background"] = True
            self._start({**facts, "response": without_output, "background": True})
        else:
            self._start({**facts, "response": without_output})
            self._end_response(response, facts, "completed")

    def _decode_message(self, message: JsonObject, event: str) -> None:
        kind = message.get("type")
        if type(kind) is not str:
            kind = "error" if "error" in message else event
            if not kind:
                self._report_malformed(event, message, "no type")
                return
            message["type"] = kind
        if self.ended:
            return
        if not self._is_duplicate(kind, message):
            self._read_event(kind, message)

    def _is_duplicate(self, kind: str, message: JsonObject) -> bool:
        """Return whether an event was received before, by its sequence number; report an event out of order."""
        if self._sequence is None:
            self._sequence = SequenceChecker()
        sequence = self._sequence
        number = message.get("sequence_number")
        if type(number) is not int or number < 0 or not sequence.reliable:
            return False
        delta = message.get("delta")
        if type(delta) is not str:  # an object has no hash
            delta = None
        output_index = message.get("output_index")
        if type(output_index) is not int:
            output_index = -1
        status = sequence.classify(number, hash((kind, output_index, delta)))
        if status != "fresh" or not sequence.reliable:
            self._report_order(status, number)
        return status == "duplicate"

    def _repair_message(self, message: JsonObject, event: str) -> JsonObject:
        clean = fields.repair_surrogates(message)
        if (get_text(message, "type") or event) in DELTA_TYPES and "delta" in message:
            clean["delta"] = message["delta"]
        elif clean != message:
            self._replaced = True
        return clean

    def _report_order(self, status: SequenceStatus, number: int) -> None:
        """Report an event that arrived twice, late, or after missing ones."""
        match status:
            case "duplicate":
                log.debug("event %d was received twice; the second is ignored", number)
            case "gap":
                detail = f"events are missing before sequence number {number}"
                self._report_anomaly("gap", detail)
            case "late":
                self._report_anomaly("late", f"event {number} arrived late")
            case "fresh":
                log.warning(
                    "sequence number %d was used twice; sequence numbers are ignored", number
                )

    # The start and the end of items.

    def _read_response_started(self, message: JsonObject) -> None:
        """Read the start of the response; ``queued`` and ``in_progress`` may repeat it."""
        if self._started:
            self._events.append(types.OpaqueEvent(message["type"], message))
            return
        self._start(fields.read_facts(fields.get_object(message, "response")))

    def _start(self, facts: JsonObject) -> None:
        self._started = True
        self.response_id = facts["response_id"]
        self._events.append(types.ResponseStarted(**facts))

    def _read_item_added(self, message: JsonObject) -> None:
        item = fields.require_object(message, "item")
        self.calls.start(read_item(item, get_index(message)))

    def _read_item_done(self, message: JsonObject) -> None:
        item = fields.require_object(message, "item")
        finished = self.calls.finish(read_item(item, get_index(message)))
        if isinstance(finished, ToolCall):
            if not finished.name:
                raise MalformedEvent("the tool call has no name")
            item = finished.complete_item(item)
        self._events.append(types.ItemCompleted(item, finished.output_index))

    # The parts of items.

    def _find_part(
        self, kind: PartKind, message: JsonObject, index: str
    ) -> tuple[str, StreamedPart]:
        """Return the item id and the part of an event; an item that was never announced starts with it."""
        place: tuple[object, ...] = (
            kind,
            message.get("item_id"),
            message.get("output_index"),
            message.get(index),
        )
        try:
            known = self._places.get(place)
        except TypeError:  # an index that is an object or an array
            known = None
            place = (kind,)
        if known is not None and not known[1].item.completed:
            return known
        item_id = get_text(message, "item_id")
        part_index = fields.get_part_index(message, index)
        item = self.calls.place(fields.PART_FORMS[kind][2], item_id, get_index(message))
        part = StreamedPart(item, kind, part_index)
        part = self._parts.setdefault((kind, item.output_index, part_index), part)
        self._places[place] = (item_id, part)
        return item_id, part

    def _read_delta(self, message: JsonObject, kind: PartKind, index: str) -> None:
        delta = message.get("delta")
        if type(delta) is not str:
            delta = fields.require_text(message, "delta")
        item_id, part = self._find_part(kind, message, index)
        output_index = part.item.output_index
        if self._joiner.pending or not delta.isascii():
            delta = self._joiner.feed((kind, item_id, output_index, part.index), delta)
        if kind == "text" and message.get("logprobs"):
            self._logprobs += fields.read_logprobs(message)
        if not delta:
            return
        part.is_emitted = True
        if kind == "text":  # most events
            logprobs = self._take_logprobs()
            self._events.append(TextDelta(delta, item_id, output_index, part.index, logprobs))
        else:
            self._events.append(build_delta(kind, delta, item_id, output_index, part.index))

    def _read_part_done(self, message: JsonObject, kind: PartKind, index: str) -> None:
        text = fields.require_text(message, fields.PART_FORMS[kind][1])
        self._complete_part(*self._find_part(kind, message, index), text, message)

    def _complete_part(
        self, item_id: str, part: StreamedPart, text: str, container: JsonObject
    ) -> None:
        """Emit the end of a part, and first its text if the server sent no delta of it."""
        kind = part.kind
        output_index = part.item.output_index
        self._joiner.discard((kind, item_id, output_index, part.index))
        if text and not part.is_emitted:
            logprobs = fields.read_logprobs(container)
            self._events.append(
                build_delta(kind, text, item_id, output_index, part.index, logprobs)
            )
        if text:
            part.is_emitted = True
            part.is_complete = True
        self._events.append(types.PartCompleted(kind, text, item_id, output_index, part.index))

    def _read_part_object(self, message: JsonObject, index: str) -> None:
        """Read a finished part object, which counts if no other event completed the part."""
        self._events.append(types.OpaqueEvent(message["type"], message))
        content = fields.get_object(message, "part")
        kind, member = _PART_KINDS.get(get_text(content, "type"), ("text", ""))
        text = get_text(content, member)
        known = self._parts.get((kind, get_index(message), fields.get_part_index(message, index)))
        if not text or (known and known.is_complete):
            return
        item_id, part = self._find_part(kind, message, index)
        if not part.is_complete:
            self._complete_part(item_id, part, text, content)

    # The arguments of calls.

    def _read_arguments_delta(self, message: JsonObject) -> None:
        item_id = get_text(message, "item_id")
        output_index = get_index(message)
        delta = fields.require_text(message, "delta")
        delta = self._joiner.feed((item_id, output_index), delta)
        if delta:
            self.calls.append_arguments(item_id, output_index, delta)

    def _read_arguments_done(self, message: JsonObject, member: str) -> None:
        item_id = get_text(message, "item_id")
        output_index = get_index(message)
        self._joiner.discard((item_id, output_index))
        arguments = fields.get_arguments(message, member)
        if arguments is None:
            arguments = fields.require_text(message, member)
        self.calls.set_arguments(item_id, output_index, arguments)

    # The end of a response. If the event type and the status of the response differ, the worse one is used.

    def _read_error(self, message: JsonObject) -> None:
        self._events.append(types.StreamFailed(**fields.read_error(message)))

    def _read_terminal(self, message: JsonObject, ending: FinalStatus, code: str = "") -> None:
        response = fields.get_object(message, "response")
        self._end_response(response, fields.read_facts(response), ending, code)

    def _end_response(
        self, response: JsonObject, facts: JsonObject, ending: FinalStatus, code: str = ""
    ) -> None:
        self._started = True
        if self._replaced or self._joiner.replaced or self._joiner.pending:
            detail = "the output holds lone surrogates, which were replaced by U+FFFD"
            self._events.append(types.AnomalyNoted("replaced_text", detail))
        usage = fields.read_usage(response)
        status = _choose_worse(ending, _STATUS_ENDINGS.get(facts["status"], "failed"))
        if status == "failed":
            code, message = _read_failure(response, code)
            self._end(("failed", code, message), {**facts, "usage": usage})
            return
        if isinstance(response.get("output"), list):
            facts |= self._read_output(response["output"])
        if status == "completed":
            self.calls.resolve_open()
        reason = get_text(fields.get_object(response, "incomplete_details"), "reason")
        self._end((status, reason, ""), {**facts, "usage": usage})

    def _read_output(self, listed: list[Any]) -> JsonObject:
        """Return the items that a finished response lists; its calls complete the calls of the stream."""
        items = fields.list_objects(listed)
        if len(items) < len(listed):
            detail = "the finished response lists something that is not an item"
            self._events.append(types.AnomalyNoted("malformed", detail))
        output: list[JsonObject] = []
        indexes: list[int] = []
        for listed_item, streamed_item in zip(items, self.calls.reconcile(items), strict=True):
            item = listed_item
            if isinstance(streamed_item, ToolCall):
                item = streamed_item.complete_item(listed_item)
                if item is not listed_item and _contradicts_call(listed_item, item):
                    detail = f"call {streamed_item.call_id!r} differs in the finished response"
                    self._events.append(types.AnomalyNoted("contradiction", detail))
            indexes.append(streamed_item.output_index)
            output.append(item)
        return {"output": tuple(map(wrap, output)), "indexes": tuple(indexes)}

    EVENT_READERS: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "response.created": (_read_response_started,),
        "response.queued": (_read_response_started,),
        "response.in_progress": (_read_response_started,),
        "response.output_item.added": (_read_item_added,),
        "response.output_item.done": (_read_item_done,),
        "response.output_text.delta": (_read_delta, "text", "content_index"),
        "response.output_text.done": (_read_part_done, "text", "content_index"),
        "response.refusal.delta": (_read_delta, "refusal", "content_index"),
        "response.refusal.done": (_read_part_done, "refusal", "content_index"),
        "response.reasoning_summary_text.delta": (_read_delta, "summary", "summary_index"),
        "response.reasoning_summary_text.done": (_read_part_done, "summary", "summary_index"),
        "response.reasoning_text.delta": (_read_delta, "reasoning", "content_index"),
        "response.reasoning_text.done": (_read_part_done, "reasoning", "content_index"),
        "response.content_part.done": (_read_part_object, "content_index"),
        "response.reasoning_summary_part.done": (_read_part_object, "summary_index"),
        "response.function_call_arguments.delta": (_read_arguments_delta,),
        "response.function_call_arguments.done": (_read_arguments_done, "arguments"),
        "response.custom_tool_call_input.delta": (_read_arguments_delta,),
        "response.custom_tool_call_input.done": (_read_arguments_done, "input"),
        "response.completed": (_read_terminal, "completed"),
        "response.incomplete": (_read_terminal, "incomplete"),
        "response.failed": (_read_terminal, "failed"),
        "response.cancelled": (_read_terminal, "failed", "cancelled"),
        "response.done": (_read_terminal, "completed"),  # of some gateways; the status decides
        "error": (_read_error,),
    }


def _choose_worse(ending: FinalStatus, status: FinalStatus) -> FinalStatus:
    """Return the worse of the ending by the type of the event and by the status of the response."""
    if "failed" in (ending, status):
        return "failed"
    if status == "completed":
        return ending
    return status


def _read_failure(response: JsonObject, code: str) -> tuple[str, str]:
    """Return the code and the message of a failure."""
    error = fields.read_error({"error": response.get("error") or {}})
    status = get_text(response, "status")
    message = ""
    if status not in ("failed", "cancelled", ""):
        code = code or "status_mismatch"
        message = f"the terminal event does not match the status of the response ({status})"
    return error["code"] or code or status, error["message"] or message


def _contradicts_call(item: JsonObject, known: JsonObject) -> bool:
    """Return whether a listed call differs from the streamed one; a missing member does not."""
    for name in ("call_id", "name", fields.CALL_ARGUMENTS[item["type"]]):
        value = get_text(item, name)
        if value and value != known[name]:
            return True
    return False


DELTA_TYPES = frozenset(kind for kind in ResponsesDecoder.EVENT_READERS if kind.endswith(".delta"))
"""The deltas whose text is passed through the ``SurrogateJoiner``."""
