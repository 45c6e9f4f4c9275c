"""Decode streams of the Chat Completions API.

Chunks have no type; ``DELTA_READERS`` maps the fields of a delta to functions. The API returns one message without
an order of its parts, so the output items (reasoning, message, each call) are numbered in the order in which
they first appear.

Servers differ most in their tool calls. By the API a call is identified by its ``index``, and its id and name
are sent once. Some servers omit the index, the id or both; some number every call 0; some send a new id
with every piece of one call; some send a complete call at once, its arguments as an object; some repeat the name
in every piece, others split it. ``find_call`` finds the call that a piece belongs to, and ``ItemTable`` does
the rest. A call is announced when its name is known: when its first arguments or something else follow.

Some servers repeat the answer after ``finish_reason``, and some send a ``finish_reason`` with every chunk. So text
after it is held back while it repeats the answer from the start, and is part of the answer otherwise; a call
after it is ignored if it is one of those before. Some servers send no ``finish_reason`` at all, only ``[DONE]``.
"""

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, cast

from msgspec import structs

from kedge.events import fields
from kedge.events.decoder import (
    DecoderState,
    EventList,
    FinalStatus,
    StreamDecoder,
)
from kedge.events.fields import JsonObject, MalformedEvent, repair_surrogates
from kedge.events.items import ToolCall, read_call_id
from kedge.events.types import (
    ItemCompleted,
    OpaqueEvent,
    ResponseStarted,
    StreamFailed,
    Usage,
    build_delta,
)
from kedge.turns.server_fields import CHAT_CALL, CHAT_MESSAGE

log = logging.getLogger(__name__)

TextKind = Literal["text", "refusal", "reasoning"]

FINISH_REASONS: dict[str, tuple[FinalStatus, str]] = {
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
"""The meaning of each ``finish_reason``; with any other the response is ``incomplete``."""


@dataclass(slots=True, eq=False)
class _StreamedCall(ToolCall):
    """A call as the chunks identify it."""

    is_announced: bool = False
    """Whether the call was started, because its name is complete."""

    def is_other_call(self, call_id: str, name: str, listed: set[int]) -> bool:
        """Return whether a piece under the same index starts another call: some number every call 0.

        A different id counts only together with a name, because some servers send a new id with every piece.
        Another name continues that of a call without arguments, but not in the same list.
        """
        renamed = bool(self.call_id and call_id and self.call_id != call_id)
        if not name or renamed or not self.name or name == self.name:
            return bool(name) and renamed
        return self.is_announced or self.output_index in listed

    def extend(self, call_id: str, problem: str, name: str) -> None:
        """Add what a piece holds about a call that is not announced; its name may be a part or repeated."""
        if not self.call_id:
            self.call_id, self.fallback = call_id, problem
        self.name = name if name.startswith(self.name) else self.name + name


@dataclass(slots=True)
class _CompletionState(DecoderState):
    """The state of the decoder between two chunks."""

    calls_by_index: dict[int, _StreamedCall] = field(default_factory=dict[int, _StreamedCall])
    calls_by_id: dict[str, _StreamedCall] = field(default_factory=dict[str, _StreamedCall])
    last_call: _StreamedCall | None = None
    item_indices: dict[str, int] = field(default_factory=dict[str, int])
    item_count: int = 0
    facts: JsonObject = field(default_factory=dict[str, Any])
    usage: Usage | None = None
    finish_reason: str = ""
    has_message: bool = False  # even an empty one
    has_failed: bool = False
    texts: dict[TextKind, list[str]] = field(default_factory=dict["TextKind", list[str]])
    repeated: dict[TextKind, int] = field(default_factory=dict["TextKind", int])
    """How many characters of each text were repeated after the finish reason."""
    continued: bool = False
    """Whether the answer went on after its finish reason."""
    text_logprobs: tuple[Mapping[str, Any], ...] = ()
    details: list[JsonObject] = field(default_factory=list[JsonObject])
    """Reasoning in the form of OpenRouter, with signatures and encrypted parts."""
    annotations: list[Any] = field(default_factory=list[Any])
    members: JsonObject = field(default_factory=dict[str, Any])
    """Members of the message that only some servers send, such as signatures."""
    call_members: dict[int, JsonObject] = field(default_factory=dict[int, JsonObject])
    """The same of the calls, by output index."""
    has_items: bool = False
    """Whether the items with these members were emitted."""

    def find_call(
        self, index: int, call_id: str, name: str, listed: set[int]
    ) -> _StreamedCall | None:
        """Return the call of a piece by its index, by its id or as the last one; None if it starts a new one."""
        known = self.calls_by_index.get(index) if index >= 0 else self.calls_by_id.get(call_id)
        if known is not None:
            return None if known.is_other_call(call_id, name, listed) else known
        return None if name or index >= 0 else self.last_call

    def add_call(self, call: _StreamedCall, index: int) -> None:
        """Add a new call."""
        self.last_call = self.calls_by_index[index] = call
        if call.call_id:
            self.calls_by_id[call.call_id] = call

    def get_call(self, call: _StreamedCall) -> ToolCall:
        """Return a call that is announced."""
        return cast("ToolCall", self.calls.items[call.output_index])

    def item_index(self, item: str) -> int:
        """Return the output index of the reasoning or of the message."""
        if item not in self.item_indices:
            self.item_indices[item] = self.next_index()
        return self.item_indices[item]

    def next_index(self) -> int:
        """Return the output index of a new item."""
        self.item_count += 1
        return self.item_count - 1


class ChatDecoder(StreamDecoder[_CompletionState]):
    """Decodes a stream of the Chat Completions API.

    Args:
        **bounds: ``max_line`` and ``max_message``, as for ``StreamDecoder``.
    """

    RESPONSE_FIELDS: ClassVar[frozenset[str]] = frozenset({"choices"})

    def __init__(self, **bounds: int) -> None:
        super().__init__(_CompletionState(), **bounds)

    def _split_response(self, response: JsonObject) -> Iterator[JsonObject]:
        yield response
        state = self._state
        if state.has_message:
            state.finish_reason = state.finish_reason or "stop"  # some servers send no reason
        elif not state.finish_reason and not state.has_failed:
            message = "the server returned a completion without choices"
            yield {"error": {"code": "server_error", "message": message}}

    def _decode_message(self, message: JsonObject, event: str, found: EventList) -> None:
        if self._state.ended:
            return
        if message.get("error") or "error" in (event, message.get("object")):
            self._fail(message, found)
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
        state = self._state
        raw: object = choice.get("delta")
        if raw is None or (raw == {} and not state.has_message):
            raw = cast("object", choice.get("message")) or {}
        if not isinstance(raw, dict):
            raise MalformedEvent("delta is not an object")
        if choice.get("error"):
            self._fail(choice, found)
        if logprobs := fields.get_object(choice, "logprobs"):
            state.logprobs += fields.read_logprobs({"logprobs": logprobs.get("content")})
        raw_fields = cast("JsonObject", raw)
        delta = {name: value for name, value in raw_fields.items() if value is not None}
        state.has_message = state.has_message or bool(raw_fields)
        if delta.get("reasoning_content") and "reasoning" in delta:
            del delta["reasoning"]  # some servers send the same text under both names
        for name, read in DELTA_READERS.items():
            if name in delta:
                read(state, delta.pop(name), found)
        rest = {
            name: value for name, value in delta.items() if name not in _IGNORED_FIELDS and value
        }
        if rest:
            found.append(OpaqueEvent("delta", rest))
            for name, value in rest.items():
                state.members[name] = fields.merge_values(state.members.get(name), value)
        if not state.finish_reason or state.continued:
            reason = fields.get_text(choice, "finish_reason")
            state.finish_reason = reason or state.finish_reason

    def _fail(self, message: JsonObject, found: EventList) -> None:
        self._state.has_failed = True
        found.append(StreamFailed(**fields.read_error(message), usage=read_usage(message)))

    def _read_done(self, found: EventList) -> None:
        """Complete an answer without a finish reason, unless the end of a call is missing."""
        state = self._state
        if state.has_message and not state.finish_reason and not state.has_failed:
            calls = state.calls.sorted_calls()
            if all(call.custom or not call.arguments or _is_complete(call) for call in calls):
                state.finish_reason = "stop"
        self._finish(found)

    def _finish(self, found: EventList) -> None:
        state = self._state
        _announce_call(state, found)
        if state.ended:
            return
        reason = state.finish_reason
        if not reason:  # the model may not have finished
            if self._closed:
                _emit_items(state, found, completed=False)
            return
        status, code = FINISH_REASONS.get(reason.lower(), ("incomplete", reason))
        if status == "completed":
            _add_empty_arguments(state)
            found += state.calls.resolve_open()
        _emit_items(state, found, completed=status == "completed")
        more = {"status": status, "usage": state.usage}
        state.end(found, (status, code, ""), _response(state), more)

    def _expects_json(self, event: str) -> bool:
        return event in ("", "error", "message")


def _get_choices(chunk: JsonObject) -> list[JsonObject]:
    choices: object = chunk.get("choices") or []
    if not isinstance(choices, list):
        raise MalformedEvent("choices is not an array")
    return fields.list_objects(cast("object", choices))


# Readers of the fields of a delta.

DeltaReader = Callable[[_CompletionState, object, EventList], None]


def _read_content(state: _CompletionState, value: object, found: EventList) -> None:
    """Read text or, from some servers, a list of parts."""
    if isinstance(value, list):
        for part in cast("list[Any]", value):
            _read_part(state, part, found)
        return
    _emit_delta(state, "text", fields.check_text(value, "content"), found)


def _read_part(state: _CompletionState, part: object, found: EventList) -> None:
    if not isinstance(part, dict):
        raise MalformedEvent("a part of content is not an object")
    content_part = cast("JsonObject", part)
    match content_part.get("type"):
        case "text" | "output_text":
            _emit_delta(state, "text", fields.require_text(content_part, "text"), found)
        case "refusal":
            _emit_delta(state, "refusal", fields.require_text(content_part, "refusal"), found)
        case "thinking":
            value = content_part.get("thinking")
            for entry in cast("list[Any]", value) if isinstance(value, list) else [value]:
                text = cast("JsonObject", entry).get("text") if isinstance(entry, dict) else entry
                _emit_delta(state, "reasoning", fields.check_text(text, "thinking"), found)
        case _:
            state.annotations.append(content_part)
            found.append(OpaqueEvent("part", content_part))


def _text_reader(kind: TextKind) -> DeltaReader:
    def read(state: _CompletionState, value: object, found: EventList) -> None:
        _emit_delta(state, kind, fields.check_text(value, kind), found)

    return read


def _read_details(state: _CompletionState, value: object, _: EventList) -> None:
    """Read reasoning details, of which a piece with the same index and type continues the last one."""
    for piece in fields.list_objects(value):
        if not state.item_count:  # what comes after an answer belongs to it
            state.item_index("reasoning")
        place = piece.get("index"), piece.get("type")
        known = [each for each in state.details if (each.get("index"), each.get("type")) == place]
        if not known or place[0] is None:
            state.details.append(dict(piece))
            continue
        for name, member in piece.items():
            if name in _DETAIL_TEXTS:
                known[-1][name] = fields.merge_values(known[-1].get(name), member)
            elif member is not None:
                known[-1][name] = member


_DETAIL_TEXTS = ("text", "summary", "data")
"""The members of reasoning details that are sent in pieces."""


def _read_annotations(state: _CompletionState, value: object, _: EventList) -> None:
    state.annotations += fields.list_objects(value)


def _emit_items(state: _CompletionState, found: EventList, *, completed: bool) -> None:
    """Emit the items with what the deltas of the common events cannot express."""
    if state.has_items:
        return
    state.has_items = True
    ending: JsonObject = {} if completed else {"status": "incomplete"}
    native = dict(state.members)
    if state.details and "reasoning" not in state.item_indices:
        native["reasoning_details"] = state.details
    elif state.details:
        is_last = len(state.item_indices) == 1 and not state.calls.sorted_calls()
        index = state.item_index("reasoning")
        item = {**_build_reasoning(state, index), **(ending if is_last else {})}
        found.append(ItemCompleted(repair_surrogates(item), index))
    members = {CHAT_MESSAGE: native} if native else {}
    has_message = "message" in state.item_indices or not state.calls.sorted_calls()
    if has_message and (members or state.annotations):
        item = {**_build_message(state), **members, **ending}
        found.append(ItemCompleted(repair_surrogates(item), state.item_index("message")))
        members = {}
    for call in state.calls.sorted_calls():
        own = state.call_members.get(call.output_index)
        more = {**members, **({CHAT_CALL: own} if own else {})}
        if more and call.completed:
            members = {}
            found.append(
                ItemCompleted(
                    {**call.complete_item({"type": call.type}), **more}, call.output_index
                )
            )


def _build_reasoning(state: _CompletionState, index: int) -> JsonObject:
    known, text = fields.get_text(state.facts, "id"), "".join(state.texts.get("reasoning", ()))
    sealed = [each.get("signature") or each.get("data") for each in state.details]
    return {
        **fields.build_reasoning(text, next((each for each in sealed if each), "")),
        CHAT_MESSAGE: {"reasoning_details": state.details},
        **({"id": f"{known}.{index}"} if known else {}),
    }


def _build_message(state: _CompletionState) -> JsonObject:
    text, refusal = ("".join(state.texts.get(kind, ())) for kind in ("text", "refusal"))
    part: JsonObject = {"type": "output_text", "text": text, "annotations": state.annotations}
    if state.text_logprobs:
        part["logprobs"] = [dict(each) for each in state.text_logprobs]
    refused = [{"type": "refusal", "refusal": refusal}] if refusal else []
    written = [part] if text or state.annotations else []
    return fields.build_message([*written, *refused])


def _emit_delta(state: _CompletionState, kind: TextKind, text: str, found: EventList) -> None:
    delta = state.joiner.feed(kind, text)
    if delta and state.finish_reason and not state.continued:
        delta = _skip_repeated(state, kind, delta)
    if not delta:
        return
    _announce_call(state, found)
    state.texts.setdefault(kind, []).append(delta)
    logprobs = state.take_logprobs() if kind == "text" else ()
    state.text_logprobs += logprobs
    index = state.item_index("reasoning" if kind == "reasoning" else "message")
    found.append(build_delta(kind, delta, "", index, int(kind == "refusal"), logprobs))


def _skip_repeated(state: _CompletionState, kind: TextKind, delta: str) -> str:
    """Return the text to emit after the finish reason: none while it repeats the answer."""
    known, start = "".join(state.texts.get(kind, ())), state.repeated.get(kind, 0)
    state.texts[kind] = [known]
    if known.startswith(delta, start):
        state.repeated[kind] = start + len(delta)
        return ""
    log.warning("the answer continues after finish_reason")
    state.continued = True
    return known[:start] + delta


def _announce_call(state: _CompletionState, found: EventList) -> None:
    """Start the last call, the name of which is complete now."""
    call = state.last_call
    if call is not None and not call.is_announced:
        found += state.calls.start(call)
        call.is_announced = True


def _read_tool_calls(state: _CompletionState, value: object, found: EventList) -> None:
    if not isinstance(value, list):
        raise MalformedEvent("tool_calls is not an array")
    listed: set[int] = set()
    for entry in cast("list[Any]", value):
        if not isinstance(entry, dict):
            raise MalformedEvent("a tool call is not an object")
        call = cast("JsonObject", entry)
        index = _read_call(state, call, listed, found)
        listed.add(index)
        members = {k: v for k, v in call.items() if k not in _CALL_MEMBERS and v is not None}
        if members and index >= 0:
            state.call_members.setdefault(index, {}).update(members)


def _read_function_call(state: _CompletionState, value: object, found: EventList) -> None:
    """Read the single call of the API's first version."""
    _read_call(state, {"function": value}, set(), found)


def _read_call(
    state: _CompletionState, entry: JsonObject, listed: set[int], found: EventList
) -> int:
    """Read a call or a piece of one, and return its output index; -1 if it is ignored.

    ``listed`` are the output indexes of the earlier calls in the same list.
    """
    custom = isinstance(entry.get("custom"), dict)
    inner: object = entry.get("custom" if custom else "function", entry)
    if inner is not None and not isinstance(inner, dict):
        raise MalformedEvent("a tool call has no function")
    function = cast("JsonObject", inner or {})
    index, name = fields.get_index(entry, "index"), fields.get_text(function, "name")
    call_id, problem = read_call_id(entry.get("id"))
    arguments = function.get("input" if custom else "arguments")
    seen = state.find_call(index, call_id, name, listed)
    if state.finish_reason:
        if _is_repeated(state, seen, name, arguments):
            log.warning("a tool call that is repeated after finish_reason is ignored")
            return -1
        state.continued = True
    if seen and seen.is_announced and name and arguments:
        # Some servers send complete calls that share an id or an index. Complete arguments cannot be
        # extended, so this is another call, or a repetition; a list does not repeat a call.
        known, in_list = state.get_call(seen), seen.output_index in listed
        if _is_complete(known):
            if not in_list and known.arguments == _argument_text(arguments):
                return seen.output_index
            seen = None
        elif in_list and (index < 0 or not call_id):
            seen = None
    if seen is None:
        _announce_call(state, found)
        place = "custom_tool_call" if custom else "function_call", "", state.next_index()
        seen = _StreamedCall(*place, call_id=call_id, name=name, fallback=problem)
        state.add_call(seen, index)
    elif not seen.is_announced:
        seen.extend(call_id, problem, name)
    elif name or (call_id and not seen.call_id):
        seen.call_id, seen.name = seen.call_id or call_id, seen.name or name
        found += state.calls.start(seen)
    if arguments not in (None, ""):
        _announce_call(state, found)
    _read_arguments(state, arguments, seen.output_index, found)
    return seen.output_index


def _is_repeated(
    state: _CompletionState, seen: _StreamedCall | None, name: str, arguments: object
) -> bool:
    """Return whether a piece after the finish reason belongs to a call that is complete."""
    if seen is not None:
        known = state.get_call(seen) if seen.is_announced else None
        return known is not None and (known.custom or _is_complete(known))
    text = _argument_text(arguments or "")
    calls = [call for call in state.calls.sorted_calls() if call.name == name]
    return any(not text or call.arguments == text for call in calls)


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
            state.calls.set_arguments("", output_index, _argument_text(arguments))


def _argument_text(arguments: object) -> str:
    if isinstance(arguments, str):
        return arguments
    return json.dumps(arguments, ensure_ascii=False)


def _is_complete(call: ToolCall) -> bool:
    """Return whether the arguments of a function call are a complete JSON object."""
    if call.custom or not call.arguments.rstrip().endswith("}"):
        return False
    try:
        return isinstance(json.loads(call.arguments), dict)
    except (ValueError, RecursionError):
        return False


_CALL_MEMBERS = frozenset({"index", "id", "type", "function", "custom", "name", "arguments"})
"""The members of a call that are read."""
DELTA_READERS: dict[str, DeltaReader] = {
    "reasoning_details": _read_details,
    "reasoning_content": _text_reader("reasoning"),
    "reasoning": _text_reader("reasoning"),
    "content": _read_content,
    "refusal": _text_reader("refusal"),
    "tool_calls": _read_tool_calls,
    "function_call": _read_function_call,
    "annotations": _read_annotations,
}
"""The fields of a delta that are read, in this order."""
_IGNORED_FIELDS = frozenset({"role", "name", "channel"})
"""Fields that are ignored; any other is stored with the message, and passed on as an ``OpaqueEvent``."""


def _add_empty_arguments(state: _CompletionState) -> None:
    """Set empty arguments for calls that have none, because their response is complete."""
    for call in state.calls.sorted_calls():
        if not call.completed and call.name and not call.arguments:
            state.calls.set_arguments("", call.output_index, "" if call.custom else "{}")


# Fields of the response itself.


def _update_facts(state: _CompletionState, chunk: JsonObject, found: EventList) -> None:
    """Update the response fields, of which the first value is used, and usage, of which the last is used."""
    began = bool(state.facts)
    for name in ("id", "model", "created"):
        state.facts[name] = state.facts.get(name) or chunk.get(name)
    state.usage = read_usage(chunk) or state.usage
    if not began:
        found.append(ResponseStarted(**fields.read_facts(_response(state))))


def _response(state: _CompletionState) -> JsonObject:
    """Return what the chunks say about the response."""
    return {**state.facts, "finish_reason": state.finish_reason or None}


def _find_usage(chunk: JsonObject) -> JsonObject | None:
    """Return the counts of a chunk; Moonshot puts them into the choice, and Groq into ``x_groq``."""
    choices = fields.list_objects(chunk.get("choices"))[:1]
    holders = (chunk, fields.get_object(chunk, "x_groq"), *choices)
    return next((usage for each in holders if (usage := fields.get_object(each, "usage"))), None)


_CACHED_NAMES = ("prompt_cache_hit_tokens", "num_cached_tokens", "cached_tokens")
"""The names of DeepSeek, Mistral and others for cached tokens."""


def read_usage(chunk: JsonObject) -> Usage | None:
    """Return the token counts of a chunk, if there are any."""
    counts = _find_usage(chunk)
    if not counts:
        return None
    usage = fields.read_counts(counts, "prompt", "completion")
    cached = max(fields.get_count(counts, name) for name in _CACHED_NAMES)
    return structs.replace(usage, cached_tokens=usage.cached_tokens or cached)
