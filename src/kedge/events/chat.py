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
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, cast

from kedge.events import reading
from kedge.events.call import CallSeen, usable
from kedge.events.calls import ToolCallState
from kedge.events.decoder import Found, StreamDecoder
from kedge.events.reading import Malformed, Members
from kedge.events.surrogates import SplitCharacters
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

Ending = tuple[Literal["completed", "incomplete", "failed"], str]

ENDINGS: dict[str, Ending] = {
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
class _Seen:
    """A call as the chunks name it."""

    place: int
    call_id: str
    name: str

    def differs(self, call_id: str, name: str) -> bool:
        """Whether a piece under the same number begins another call: some number every call 0.

        Another id tells so only together with a name, for some make up an id for every piece.
        """
        renamed = self.call_id and call_id and self.call_id != call_id
        return bool(name and (renamed or name != self.name) and (self.name or renamed))


@dataclass(slots=True)
class _Calls:
    """The places of the calls, by whatever the server tells them apart."""

    by_index: dict[int, _Seen] = field(default_factory=dict[int, _Seen])
    by_id: dict[str, _Seen] = field(default_factory=dict[str, _Seen])
    last: _Seen | None = None

    def find(self, index: int, call_id: str, name: str) -> _Seen | None:
        """The call that a piece belongs to; ``None`` if it begins a new one."""
        if index >= 0:
            known = self.by_index.get(index)
            return known if known is None or not known.differs(call_id, name) else None
        if call_id in self.by_id:
            return self.by_id[call_id]
        return None if name else self.last

    def add(self, seen: _Seen, index: int) -> None:
        """A new call."""
        if index >= 0:
            self.by_index[index] = seen
        if seen.call_id:
            self.by_id[seen.call_id] = seen
        self.last = seen


@dataclass(slots=True)
class _State:
    """What has to be remembered from one chunk to the next."""

    calls: ToolCallState = field(default_factory=ToolCallState)
    halves: SplitCharacters = field(default_factory=SplitCharacters)
    named: _Calls = field(default_factory=_Calls)
    places: dict[str, int] = field(default_factory=dict[str, int])
    items: int = 0
    facts: Members = field(default_factory=dict[str, Any])
    usage: Usage | None = None
    finish: str = ""
    answered: bool = False  # whether there is a message, be it an empty one
    ended: bool = False

    def place(self, item: str) -> int:
        """The place of what was thought, or of what was said."""
        if item not in self.places:
            self.places[item] = self.next_place()
        return self.places[item]

    def next_place(self) -> int:
        """The place of a new item."""
        self.items += 1
        return self.items - 1


class ChatDecoder(StreamDecoder):
    """Decodes the chunks of one chat completion."""

    ANSWER: ClassVar[frozenset[str]] = frozenset({"choices"})

    def __init__(self, **bounds: int) -> None:
        super().__init__(**bounds)
        self._state = _State()

    @property
    def calls(self) -> ToolCallState:
        """The tool calls of the response."""
        return self._state.calls

    @property
    def ended(self) -> bool:
        """Whether the answer is known to have ended."""
        return self._state.ended

    def feed_whole(self, response: dict[str, Any], *, torn: bool = True) -> list[StreamEvent]:
        """Take a whole completion: one chunk that says everything."""
        found: Found = []
        self._take(response, "", found)
        state = self._state
        if state.answered:
            state.finish = state.finish or "stop"  # it is whole; some do not say why
        elif not state.finish and not any(isinstance(event, StreamFailed) for event in found):
            words = "the server answered without an answer: its choices are empty"
            found.append(StreamFailed("server_error", words))
        return [*found, *self.close()]

    def _take(self, message: Members, event: str, found: Found) -> None:
        if self._state.ended:
            return
        if message.get("error"):
            found.append(StreamFailed(**reading.error(message)))
        elif "choices" in message or "usage" in message:
            self._chunk(message, found)
        else:
            self._opaque(event or reading.word(message, "object"), message, found)

    def _chunk(self, chunk: Members, found: Found) -> None:
        state = self._state
        _learn(state, chunk, found)
        try:
            for choice in _choices(chunk):
                if reading.place(choice, "index") == 0:
                    self._choice(choice, found)
        except Malformed as problem:
            self._note_malformed("chunk", chunk, str(problem), found)

    def _choice(self, choice: Members, found: Found) -> None:
        given: object = choice.get("delta") or choice.get("message") or {}
        if not isinstance(given, dict):
            raise Malformed("delta is no object")
        if choice.get("error"):
            found.append(StreamFailed(**reading.error(choice)))
        told = cast("Members", given)
        delta = {name: value for name, value in told.items() if value is not None}
        self._state.answered = self._state.answered or bool(told)
        if delta.get("reasoning_content") and "reasoning" in delta:
            del delta["reasoning"]  # the same words under both of their names
        for name, read in DELTAS.items():
            if name in delta:
                read(self._state, delta.pop(name), found)
        rest = {name: value for name, value in delta.items() if name not in _SILENT and value}
        if rest:
            found.append(OpaqueEvent("delta", rest))
        self._state.finish = reading.word(choice, "finish_reason") or self._state.finish

    def _end(self, found: Found) -> None:
        state = self._state
        if state.ended or not state.finish:
            return  # nothing says that the model had finished
        state.ended = True
        status, code = ENDINGS.get(state.finish, ("incomplete", state.finish))
        facts: Members = {**_facts(state), "status": status}
        match status:
            case "completed":
                _settle(state, found)
                found.append(ResponseCompleted(**facts, usage=state.usage))
            case "incomplete":
                found.append(ResponseIncomplete(**facts, reason=code, usage=state.usage))
            case "failed":
                found.append(ResponseFailed(**facts, code=code, usage=state.usage))
        state.calls.log_summary()

    def _mended(self, message: Members, event: str) -> Members:
        return message  # every text goes through ``halves``

    def _is_ours(self, event: str) -> bool:
        return event in ("", "error", "message")


def _choices(chunk: Members) -> list[Members]:
    choices: object = chunk.get("choices") or []
    if not isinstance(choices, list):
        raise Malformed("choices is no array")
    listed = cast("list[Any]", choices)
    return [cast("Members", choice) for choice in listed if isinstance(choice, dict)]


# What the members of a delta say.


def _content(state: _State, value: object, found: Found) -> None:
    """Text; or, from some servers, a list of parts."""
    if isinstance(value, list):
        for part in cast("list[Any]", value):
            _part(state, part, found)
        return
    _say(state, "text", _text(value, "content"), found)


def _part(state: _State, part: object, found: Found) -> None:
    if not isinstance(part, dict):
        raise Malformed("a part of content is no object")
    given = cast("Members", part)
    match given.get("type"):
        case "text" | "output_text":
            _say(state, "text", reading.text(given, "text"), found)
        case "refusal":
            _say(state, "refusal", reading.text(given, "refusal"), found)
        case "thinking":
            thought = given.get("thinking")
            texts = cast("list[Any]", thought) if isinstance(thought, list) else [thought]
            for text in texts:
                said = cast("Members", text).get("text") if isinstance(text, dict) else text
                _say(state, "reasoning", _text(said, "thinking"), found)
        case _:
            found.append(OpaqueEvent("part", given))


def _refusal(state: _State, value: object, found: Found) -> None:
    _say(state, "refusal", _text(value, "refusal"), found)


def _reasoning(state: _State, value: object, found: Found) -> None:
    _say(state, "reasoning", _text(value, "reasoning"), found)


def _say(
    state: _State, kind: Literal["text", "refusal", "reasoning"], text: str, found: Found
) -> None:
    delta = state.halves.take(kind, text)
    if not delta:
        return
    match kind:
        case "text":
            found.append(TextDelta(delta, "", state.place("message")))
        case "refusal":
            found.append(RefusalDelta(delta, "", state.place("message"), 1))
        case "reasoning":
            found.append(ReasoningDelta(delta, "reasoning", "", state.place("reasoning")))


def _tool_calls(state: _State, value: object, found: Found) -> None:
    if not isinstance(value, list):
        raise Malformed("tool_calls is no array")
    for entry in cast("list[Any]", value):
        if not isinstance(entry, dict):
            raise Malformed("a tool call is no object")
        _call(state, cast("Members", entry), found)


def _function_call(state: _State, value: object, found: Found) -> None:
    """The one call of the API's first years."""
    _call(state, {"function": value}, found)


def _call(state: _State, entry: Members, found: Found) -> None:
    custom = isinstance(entry.get("custom"), dict)
    inner = entry.get("custom" if custom else "function", entry)
    if not isinstance(inner, dict):
        raise Malformed("a tool call says nothing of its function")
    said = cast("Members", inner)
    index, name = reading.index(entry, "index"), reading.word(said, "name")
    call_id = entry.get("id")
    seen = state.named.find(index, usable(call_id), name)
    if seen is None:
        seen = _Seen(state.next_place(), usable(call_id), name)
        state.named.add(seen, index)
        found += state.calls.started(CallSeen(call_id, name, "", seen.place, custom))
    elif name or (usable(call_id) and not seen.call_id):
        seen.call_id, seen.name = seen.call_id or usable(call_id), seen.name or name
        found += state.calls.started(CallSeen(seen.call_id, name, "", seen.place, custom))
    _arguments(state, said.get("input" if custom else "arguments"), seen.place, found)


def _arguments(state: _State, written: object, place: int, found: Found) -> None:
    match written:
        case None:
            pass
        case str():
            delta = state.halves.take(("arguments", place), written)
            if delta:
                found += state.calls.wrote("", place, delta)
        case _:
            state.calls.wrote_all("", place, json.dumps(written, ensure_ascii=False))


DELTAS: dict[str, Callable[[_State, object, Found], None]] = {
    "reasoning_content": _reasoning,
    "reasoning": _reasoning,
    "content": _content,
    "refusal": _refusal,
    "tool_calls": _tool_calls,
    "function_call": _function_call,
}
"""The members of a delta that are read, in the order in which they are."""
_SILENT = frozenset({"role", "name", "reasoning_details", "annotations"})
"""Members that say nothing more; what is in neither is passed on as it came."""


def _settle(state: _State, found: Found) -> None:
    """The answer is whole, so its calls are: one without arguments takes none."""
    for call in state.calls.in_order():
        if not call.completed and call.name and not call.arguments:
            state.calls.wrote_all("", call.output_index, "" if call.custom else "{}")
    events, unresolved = state.calls.settle()
    found += events
    found += [AnomalyNoted("unresolved_call", name) for name in unresolved]


# What chunks say about the response as a whole.


def _learn(state: _State, chunk: Members, found: Found) -> None:
    """Every chunk repeats the facts; the first to say one counts, and the last count of tokens."""
    began = bool(state.facts)
    for name in ("id", "model", "created"):
        state.facts[name] = state.facts.get(name) or chunk.get(name)
    state.usage = usage_of(chunk) or state.usage
    if not began:
        found.append(ResponseStarted(**_facts(state)))


def _facts(state: _State) -> Members:
    created = state.facts.get("created")
    return {
        "response_id": reading.word(state.facts, "id"),
        "model": reading.word(state.facts, "model"),
        "created_at": created if type(created) in (int, float) else None,
        "response": {**state.facts, "finish_reason": state.finish or None},
    }


def usage_of(chunk: Members) -> Usage | None:
    """The tokens, if this chunk counts them."""
    given = chunk.get("usage")
    if not isinstance(given, dict):
        return None
    counts = cast("Members", given)
    read = reading.count(counts, "prompt_tokens")
    written = reading.count(counts, "completion_tokens")
    before, after = counts.get("prompt_tokens_details"), counts.get("completion_tokens_details")
    cached = reading.count(before, "cached_tokens")
    return Usage(
        read,
        cached or reading.count(counts, "prompt_cache_hit_tokens"),
        written,
        reading.count(after, "reasoning_tokens"),
        reading.count(counts, "total_tokens") or read + written,
        reading.count(before, "cache_write_tokens"),
    )


def _text(value: object, name: str) -> str:
    if not isinstance(value, str):
        raise Malformed(f"{name} is not a string")
    return value
