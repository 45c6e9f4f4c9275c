"""The Chat Completions API's stream, decoded: chunks in, the same Events as from everybody else out.

A chunk has no types: what it says is told by the members of its delta, and ``DELTAS`` is the table of
them. The whole answer is one message without an order of its own, so its items (what was thought, what
was said, each call) take their places in the order in which they first appear.

Servers differ most in their calls. The rule is that a call goes by its ``index``, and that the id and the
name come once. Some leave out the index or the id, or both; some number every call 0; some invent a new
id for every piece of one call; some send a call at once, its arguments as an object. ``_Calls`` finds the
place of each, and ``ToolCallState`` does the rest.
"""

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, cast

from kedge.events import fields
from kedge.events.decoder import EventList, StreamDecoder
from kedge.events.fields import JsonObject, MalformedEvent
from kedge.events.surrogates import SurrogateJoiner
from kedge.events.tool_calls import ToolCallState, ToolCallUpdate, valid_call_id
from kedge.events.types import (
    AnomalyNoted,
    OpaqueEvent,
    ReasoningDelta,
    RefusalDelta,
    ResponseCompleted,
    ResponseFailed,
    ResponseIncomplete,
    ResponseStarted,
    StreamEvent,
    StreamFailed,
    TextDelta,
    Usage,
)

log = logging.getLogger(__name__)

Ending = tuple[Literal["completed", "incomplete", "failed"], str]

FINISH_REASONS: dict[str, Ending] = {
    "stop": ("completed", ""),
    "tool_calls": ("completed", ""),
    "function_call": ("completed", ""),
    "eos": ("completed", ""),
    "stop_sequence": ("completed", ""),
    "end_turn": ("completed", ""),
    "tool_use": ("completed", ""),
    "length": ("incomplete", "max_output_tokens"),
    "max_tokens": ("incomplete", "max_output_tokens"),
    "model_length": ("incomplete", "max_output_tokens"),
    "content_filter": ("incomplete", "content_filter"),
    "error": ("failed", "server_error"),
    "abort": ("failed", "cancelled"),
    "cancelled": ("failed", "cancelled"),
    "insufficient_system_resource": ("failed", "server_overloaded"),
}
"""What each ``finish_reason`` means; one that is not here is not known to be the end of an answer."""


@dataclass(slots=True)
class _StreamedCall:
    """A call as the chunks name it."""

    output_index: int
    call_id: str
    name: str

    def is_other_call(self, call_id: str, name: str) -> bool:
        """Whether a piece under the same number begins another call: some number every call 0.

        Another id tells so only together with a name, for some make up an id for every piece.
        """
        renamed = self.call_id and call_id and self.call_id != call_id
        return bool(name and (renamed or name != self.name) and (self.name or renamed))


@dataclass(slots=True)
class _CallIndex:
    """The places of the calls, by whatever the server tells them apart."""

    by_index: dict[int, _StreamedCall] = field(default_factory=dict[int, _StreamedCall])
    by_id: dict[str, _StreamedCall] = field(default_factory=dict[str, _StreamedCall])
    last: _StreamedCall | None = None

    def find(self, index: int, call_id: str, name: str) -> _StreamedCall | None:
        """The call that a piece belongs to; ``None`` if it begins a new one."""
        if index >= 0:
            known = self.by_index.get(index)
            return known if known is None or not known.is_other_call(call_id, name) else None
        if call_id in self.by_id:
            return self.by_id[call_id]
        return None if name else self.last

    def add(self, call: _StreamedCall, index: int) -> None:
        """A new call."""
        if index >= 0:
            self.by_index[index] = call
        if call.call_id:
            self.by_id[call.call_id] = call
        self.last = call


@dataclass(slots=True)
class _CompletionState:
    """What has to be remembered from one chunk to the next."""

    calls: ToolCallState = field(default_factory=ToolCallState)
    joiner: SurrogateJoiner = field(default_factory=SurrogateJoiner)
    call_index: _CallIndex = field(default_factory=_CallIndex)
    item_indices: dict[str, int] = field(default_factory=dict[str, int])
    item_count: int = 0
    facts: JsonObject = field(default_factory=dict[str, Any])
    usage: Usage | None = None
    finish_reason: str = ""
    has_message: bool = False  # whether there is a message, be it an empty one
    ended: bool = False

    def item_index(self, item: str) -> int:
        """The place of what was thought, or of what was said."""
        if item not in self.item_indices:
            self.item_indices[item] = self.next_index()
        return self.item_indices[item]

    def next_index(self) -> int:
        """The place of a new item."""
        self.item_count += 1
        return self.item_count - 1


class ChatDecoder(StreamDecoder):
    """Decodes the chunks of one chat completion."""

    RESPONSE_FIELDS: ClassVar[frozenset[str]] = frozenset({"choices"})

    def __init__(self, **bounds: int) -> None:
        super().__init__(**bounds)
        self._state = _CompletionState()

    @property
    def calls(self) -> ToolCallState:
        """The tool calls of the response."""
        return self._state.calls

    @property
    def ended(self) -> bool:
        """Whether the answer is known to have ended."""
        return self._state.ended

    def feed_whole(self, response: dict[str, Any], *, repair: bool = True) -> list[StreamEvent]:
        """Take a whole completion: one chunk that says everything."""
        found: EventList = []
        self._decode_message(response, "", found)
        state = self._state
        if state.has_message:
            state.finish_reason = state.finish_reason or "stop"  # it is whole; some do not say why
        elif not state.finish_reason and not any(
            isinstance(event, StreamFailed) for event in found
        ):
            words = "the server answered without an answer: its choices are empty"
            found.append(StreamFailed("server_error", words))
        return [*found, *self.close()]

    def _decode_message(self, message: JsonObject, event: str, found: EventList) -> None:
        if self._state.ended:
            return
        if message.get("error"):
            found.append(StreamFailed(**fields.read_error(message)))
        elif "choices" in message or "usage" in message:
            self._read_chunk(message, found)
        else:
            self._emit_opaque(event or fields.get_text(message, "object"), message, found)

    def _read_chunk(self, chunk: JsonObject, found: EventList) -> None:
        state = self._state
        _update_facts(state, chunk, found)
        try:
            for choice in _get_choices(chunk):
                if fields.get_part_index(choice, "index") == 0:
                    self._read_choice(choice, found)
        except MalformedEvent as problem:
            self._report_malformed("chunk", chunk, str(problem), found)

    def _read_choice(self, choice: JsonObject, found: EventList) -> None:
        given: object = choice.get("delta") or choice.get("message") or {}
        if not isinstance(given, dict):
            raise MalformedEvent("delta is no object")
        if choice.get("error"):
            found.append(StreamFailed(**fields.read_error(choice)))
        told = cast("JsonObject", given)
        delta = {name: value for name, value in told.items() if value is not None}
        if self._state.finish_reason:
            # Some servers repeat the complete message after the chunk that ends it.
            if delta.keys() & DELTA_READERS.keys():
                log.warning("a delta after finish_reason is ignored")
            return
        self._state.has_message = self._state.has_message or bool(told)
        if delta.get("reasoning_content") and "reasoning" in delta:
            del delta["reasoning"]  # the same words under both of their names
        for name, read in DELTA_READERS.items():
            if name in delta:
                read(self._state, delta.pop(name), found)
        rest = {
            name: value for name, value in delta.items() if name not in _IGNORED_FIELDS and value
        }
        if rest:
            found.append(OpaqueEvent("delta", rest))
        self._state.finish_reason = fields.get_text(choice, "finish_reason")

    def _finish(self, found: EventList) -> None:
        state = self._state
        if state.ended or not state.finish_reason:
            return  # nothing says that the model had finished
        state.ended = True
        status, code = FINISH_REASONS.get(state.finish_reason, ("incomplete", state.finish_reason))
        facts: JsonObject = {**_response_facts(state), "status": status}
        match status:
            case "completed":
                _resolve_calls(state, found)
                found.append(ResponseCompleted(**facts, usage=state.usage))
            case "incomplete":
                found.append(ResponseIncomplete(**facts, reason=code, usage=state.usage))
            case "failed":
                found.append(ResponseFailed(**facts, code=code, usage=state.usage))
        state.calls.log_summary()

    def _repair_message(self, message: JsonObject, event: str) -> JsonObject:
        return message  # every text goes through ``halves``

    def _expects_json(self, event: str) -> bool:
        return event in ("", "error", "message")


def _get_choices(chunk: JsonObject) -> list[JsonObject]:
    choices: object = chunk.get("choices") or []
    if not isinstance(choices, list):
        raise MalformedEvent("choices is no array")
    listed = cast("list[Any]", choices)
    return [cast("JsonObject", choice) for choice in listed if isinstance(choice, dict)]


# What the members of a delta say.


def _read_content(state: _CompletionState, value: object, found: EventList) -> None:
    """Text; or, from some servers, a list of parts."""
    if isinstance(value, list):
        for part in cast("list[Any]", value):
            _read_part(state, part, found)
        return
    _emit_delta(state, "text", _check_text(value, "content"), found)


def _read_part(state: _CompletionState, part: object, found: EventList) -> None:
    if not isinstance(part, dict):
        raise MalformedEvent("a part of content is no object")
    given = cast("JsonObject", part)
    match given.get("type"):
        case "text" | "output_text":
            _emit_delta(state, "text", fields.require_text(given, "text"), found)
        case "refusal":
            _emit_delta(state, "refusal", fields.require_text(given, "refusal"), found)
        case "thinking":
            thought = given.get("thinking")
            texts = cast("list[Any]", thought) if isinstance(thought, list) else [thought]
            for text in texts:
                said = cast("JsonObject", text).get("text") if isinstance(text, dict) else text
                _emit_delta(state, "reasoning", _check_text(said, "thinking"), found)
        case _:
            found.append(OpaqueEvent("part", given))


def _read_refusal(state: _CompletionState, value: object, found: EventList) -> None:
    _emit_delta(state, "refusal", _check_text(value, "refusal"), found)


def _read_reasoning(state: _CompletionState, value: object, found: EventList) -> None:
    _emit_delta(state, "reasoning", _check_text(value, "reasoning"), found)


def _emit_delta(
    state: _CompletionState,
    kind: Literal["text", "refusal", "reasoning"],
    text: str,
    found: EventList,
) -> None:
    delta = state.joiner.feed(kind, text)
    if not delta:
        return
    match kind:
        case "text":
            found.append(TextDelta(delta, "", state.item_index("message")))
        case "refusal":
            found.append(RefusalDelta(delta, "", state.item_index("message"), 1))
        case "reasoning":
            found.append(ReasoningDelta(delta, "reasoning", "", state.item_index("reasoning")))


def _read_tool_calls(state: _CompletionState, value: object, found: EventList) -> None:
    if not isinstance(value, list):
        raise MalformedEvent("tool_calls is no array")
    for entry in cast("list[Any]", value):
        if not isinstance(entry, dict):
            raise MalformedEvent("a tool call is no object")
        _read_call(state, cast("JsonObject", entry), found)


def _read_function_call(state: _CompletionState, value: object, found: EventList) -> None:
    """The one call of the API's first years."""
    _read_call(state, {"function": value}, found)


def _read_call(state: _CompletionState, entry: JsonObject, found: EventList) -> None:
    custom = isinstance(entry.get("custom"), dict)
    inner = entry.get("custom" if custom else "function", entry)
    if not isinstance(inner, dict):
        raise MalformedEvent("a tool call says nothing of its function")
    said = cast("JsonObject", inner)
    index, name = fields.get_index(entry, "index"), fields.get_text(said, "name")
    call_id = entry.get("id")
    seen = state.call_index.find(index, valid_call_id(call_id), name)
    if seen is None:
        seen = _StreamedCall(state.next_index(), valid_call_id(call_id), name)
        state.call_index.add(seen, index)
        found += state.calls.start(ToolCallUpdate(call_id, name, "", seen.output_index, custom))
    elif name or (valid_call_id(call_id) and not seen.call_id):
        seen.call_id, seen.name = seen.call_id or valid_call_id(call_id), seen.name or name
        found += state.calls.start(
            ToolCallUpdate(seen.call_id, name, "", seen.output_index, custom)
        )
    _read_arguments(state, said.get("input" if custom else "arguments"), seen.output_index, found)


def _read_arguments(
    state: _CompletionState, arguments: object, output_index: int, found: EventList
) -> None:
    match arguments:
        case None:
            pass
        case str():
            delta = state.joiner.feed(("arguments", output_index), arguments)
            if delta:
                found += state.calls.append_arguments("", output_index, delta)
        case _:
            state.calls.set_arguments("", output_index, json.dumps(arguments, ensure_ascii=False))


DELTA_READERS: dict[str, Callable[[_CompletionState, object, EventList], None]] = {
    "reasoning_content": _read_reasoning,
    "reasoning": _read_reasoning,
    "content": _read_content,
    "refusal": _read_refusal,
    "tool_calls": _read_tool_calls,
    "function_call": _read_function_call,
}
"""The members of a delta that are read, in the order in which they are."""
_IGNORED_FIELDS = frozenset({"role", "name", "reasoning_details", "annotations"})
"""Members that say nothing more; what is in neither is passed on as it came."""


def _resolve_calls(state: _CompletionState, found: EventList) -> None:
    """The answer is whole, so its calls are: one without arguments takes none."""
    for call in state.calls.sorted_calls():
        if not call.completed and call.name and not call.arguments:
            state.calls.set_arguments("", call.output_index, "" if call.custom else "{}")
    events, unresolved = state.calls.resolve_open()
    found += events
    found += [AnomalyNoted("unresolved_call", name) for name in unresolved]


# What chunks say about the response as a whole.


def _update_facts(state: _CompletionState, chunk: JsonObject, found: EventList) -> None:
    """Every chunk repeats the facts; the first to say one counts, and the last count of tokens."""
    began = bool(state.facts)
    for name in ("id", "model", "created"):
        state.facts[name] = state.facts.get(name) or chunk.get(name)
    state.usage = read_usage(chunk) or state.usage
    if not began:
        found.append(ResponseStarted(**_response_facts(state)))


def _response_facts(state: _CompletionState) -> JsonObject:
    created = state.facts.get("created")
    return {
        "response_id": fields.get_text(state.facts, "id"),
        "model": fields.get_text(state.facts, "model"),
        "created_at": created if type(created) in (int, float) else None,
        "response": {**state.facts, "finish_reason": state.finish_reason or None},
    }


def read_usage(chunk: JsonObject) -> Usage | None:
    """The tokens, if this chunk counts them."""
    given = chunk.get("usage")
    if not isinstance(given, dict):
        return None
    counts = cast("JsonObject", given)
    read = fields.get_count(counts, "prompt_tokens")
    written = fields.get_count(counts, "completion_tokens")
    before, after = counts.get("prompt_tokens_details"), counts.get("completion_tokens_details")
    cached = fields.get_count(before, "cached_tokens")
    return Usage(
        read,
        cached or fields.get_count(counts, "prompt_cache_hit_tokens"),
        written,
        fields.get_count(after, "reasoning_tokens"),
        fields.get_count(counts, "total_tokens") or read + written,
        fields.get_count(before, "cache_write_tokens"),
    )


def _check_text(value: object, name: str) -> str:
    if not isinstance(value, str):
        raise MalformedEvent(f"{name} is not a string")
    return value
