"""The Messages API of Anthropic, decoded: typed events in, the same Events as from everybody else out.

A message is a list of content blocks, each begun, grown by deltas and stopped under its ``index``; each
becomes an item of output, and its index its place. ``TABLE`` says which function reads which event, and
``DELTAS`` which kind of delta. What is in neither is passed on; a delta of an unknown kind is added to
its block member by member, so that a block of tomorrow is kept whole.

A block that stopped is told as finished only when the next one begins or the message says why it ended:
at the limit of tokens the last block is stopped like any other, and is not whole.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, cast

from kedge.events import reading
from kedge.events.anthropic_blocks import Growing, finished
from kedge.events.call import CallSeen
from kedge.events.calls import ToolCallState
from kedge.events.decoder import Found, StreamDecoder
from kedge.events.reading import Malformed, Members
from kedge.events.surrogates import SplitCharacters, mended
from kedge.events.types import (
    AnomalyNoted,
    ItemCompleted,
    ItemStarted,
    OpaqueEvent,
    ReasoningDelta,
    RefusalDelta,
    ResponseCompleted,
    ResponseIncomplete,
    ResponseStarted,
    StreamEvent,
    StreamFailed,
    TextDelta,
    Usage,
)

Ending = tuple[Literal["completed", "refused", "paused", "cut"], str]

ENDINGS: dict[str, Ending] = {
    "end_turn": ("completed", ""),
    "tool_use": ("completed", ""),
    "stop_sequence": ("completed", ""),
    "refusal": ("refused", "refusal"),
    "pause_turn": ("paused", "pause_turn"),
    "max_tokens": ("cut", "max_output_tokens"),
    "model_context_window_exceeded": ("cut", "model_context_window_exceeded"),
}
"""What each ``stop_reason`` means; one that is not here is not known to be the end of an answer."""

REFUSED = "The model declined to answer."
"""The words of a refusal for which the provider gives none."""


@dataclass(slots=True)
class _State:
    """What has to be remembered from one event to the next."""

    calls: ToolCallState = field(default_factory=ToolCallState)
    halves: SplitCharacters = field(default_factory=SplitCharacters)
    blocks: dict[int, Growing] = field(default_factory=dict[int, Growing])
    message: Members = field(default_factory=dict[str, Any])
    usage: Members = field(default_factory=dict[str, Any])
    started: bool = False
    ended: bool = False

    def growing(self, message: Members) -> Growing:
        """The block that an event speaks of."""
        index = reading.index(message, "index")
        if index not in self.blocks:
            raise Malformed("index names no block that was begun")
        return self.blocks[index]

    def item_id(self, index: int) -> str:
        """A name for an item: this API gives none, and planning goes by them."""
        known = reading.word(self.message, "id")
        return f"{known}.{index}" if known else ""


class AnthropicDecoder(StreamDecoder):
    """Decodes the events of one message."""

    ANSWER: ClassVar[frozenset[str]] = frozenset({"content"})

    def __init__(self, **bounds: int) -> None:
        super().__init__(**bounds)
        self._state = _State()

    @property
    def calls(self) -> ToolCallState:
        """The tool calls of the response."""
        return self._state.calls

    @property
    def ended(self) -> bool:
        """Whether the message has stopped."""
        return self._state.ended

    def feed_whole(self, response: dict[str, Any], *, torn: bool = True) -> list[StreamEvent]:
        """Take a whole message: its blocks begin and stop one after the other."""
        whole = mended(response) if torn else response
        content: Any = whole.get("content")
        told: list[Members] = [{"type": "message_start", "message": whole}]
        for index, block in enumerate(content if isinstance(content, list) else []):  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
            told.append({"type": "content_block_start", "index": index, "content_block": block})
            told.append({"type": "content_block_stop", "index": index})
        reason = {"stop_reason": "end_turn"} if not whole.get("stop_reason") else {}
        told.append({"type": "message_delta", "delta": {**whole, **reason}})
        told.append({"type": "message_stop"})
        found: Found = []
        for message in told:
            self._take(message, "", found)
        return [*found, *self.close()]

    def _take(self, message: Members, event: str, found: Found) -> None:
        if self._state.ended:
            return
        kind = reading.word(message, "type") or ("error" if "error" in message else event)
        read = TABLE.get(kind)
        if read is None:
            self._opaque(kind, message, found, known=kind == "ping")
            return
        try:
            read(self._state, message, found)
        except Malformed as problem:
            self._note_malformed(kind, message, str(problem), found)

    def _mended(self, message: Members, event: str) -> Members:
        return message  # texts of deltas go through ``halves``, the others are mended in the end

    def _is_ours(self, event: str) -> bool:
        return not event or event in TABLE


# What the events say.


def _message_start(state: _State, message: Members, found: Found) -> None:
    if state.started:
        return
    state.started = True
    state.message = {k: v for k, v in reading.members(message, "message").items() if k != "content"}
    _learn_usage(state, state.message)
    found.append(ResponseStarted(**_facts(state)))


def _block_start(state: _State, message: Members, found: Found) -> None:
    _tell_finished(state, found)
    index = reading.index(message, "index")
    index = index if index >= 0 else len(state.blocks)
    growing = Growing(dict(reading.members(message, "content_block")), index, state.item_id(index))
    state.blocks[index] = growing
    if growing.type == "tool_use":
        name = reading.word(growing.block, "name")
        seen = CallSeen(growing.block.get("id"), name, growing.item_id, index)
        found += state.calls.started(seen)
        return
    found.append(ItemStarted(growing.item_type, growing.item_id, index))
    for name in ("text", "thinking"):
        if growing.type == name and (begun := reading.word(growing.block, name)):
            found += _said(growing, name, mended(begun))


def _block_delta(state: _State, message: Members, found: Found) -> None:
    growing, delta = state.growing(message), reading.members(message, "delta")
    read = DELTAS.get(reading.word(delta, "type"))
    if read is not None:
        read(state, growing, delta, found)
        return
    found.append(OpaqueEvent("content_block_delta", message))
    for name, value in delta.items():
        if name != "type":
            growing.join(name, value)


def _block_stop(state: _State, message: Members, _: Found) -> None:
    """Nothing is told yet: see the module."""
    state.growing(message).stopped = True


def _message_delta(state: _State, message: Members, _: Found) -> None:
    delta = reading.members(message, "delta")
    for name in ("stop_reason", "stop_sequence", "stop_details"):
        state.message[name] = delta.get(name) or state.message.get(name)
    _learn_usage(state, message)


def _message_stop(state: _State, _: Members, found: Found) -> None:
    state.ended = True
    reason = reading.word(state.message, "stop_reason")
    ending, word = ENDINGS.get(reason, ("cut", reason or "unknown"))
    if ending == "refused" and not all(growing.stopped for growing in state.blocks.values()):
        ending = "cut"
    if ending != "cut":
        _tell_finished(state, found)
    if ending == "refused":
        _tell_refusal(state, found)
    facts, usage = _facts(state), usage_of(state.usage)
    if ending in ("completed", "refused"):
        events, unresolved = state.calls.settle()
        found += events
        found += [AnomalyNoted("unresolved_call", name) for name in unresolved]
        found.append(ResponseCompleted(**facts, usage=usage))
    else:
        found.append(ResponseIncomplete(**facts, reason=word, usage=usage))
    state.calls.log_summary()


def _error(_: _State, message: Members, found: Found) -> None:
    told = reading.error(message)
    found.append(StreamFailed(**{**told, "code": told.get("code") or told.get("kind", "")}))


Reader = Callable[[_State, Members, Found], None]
TABLE: dict[str, Reader] = {
    "message_start": _message_start,
    "content_block_start": _block_start,
    "content_block_delta": _block_delta,
    "content_block_stop": _block_stop,
    "message_delta": _message_delta,
    "message_stop": _message_stop,
    "error": _error,
}


# What deltas add to their blocks.

DeltaReader = Callable[[_State, Growing, Members, Found], None]


def _words(name: Literal["text", "thinking"]) -> DeltaReader:
    def read(state: _State, growing: Growing, delta: Members, found: Found) -> None:
        piece = reading.text(delta, name)
        growing.add(name, piece)
        if said := state.halves.take((name, growing.place), piece):
            found += _said(growing, name, said)

    return read


def _said(growing: Growing, name: str, words: str) -> Found:
    if name == "text":
        return [TextDelta(words, growing.item_id, growing.place)]
    return [ReasoningDelta(words, "reasoning", growing.item_id, growing.place)]


def _signature(_: _State, growing: Growing, delta: Members, __: Found) -> None:
    growing.block["signature"] = reading.text(delta, "signature")


def _input(state: _State, growing: Growing, delta: Members, found: Found) -> None:
    piece = reading.text(delta, "partial_json")
    growing.add("input", piece)
    said = state.halves.take(("input", growing.place), piece)
    if said and growing.type == "tool_use":
        found += state.calls.wrote(growing.item_id, growing.place, said)


def _citation(_: _State, growing: Growing, delta: Members, __: Found) -> None:
    growing.join("citations", [delta.get("citation")])


DELTAS: dict[str, DeltaReader] = {
    "text_delta": _words("text"),
    "thinking_delta": _words("thinking"),
    "signature_delta": _signature,
    "input_json_delta": _input,
    "citations_delta": _citation,
}


# Finished blocks.


def _tell_finished(state: _State, found: Found) -> None:
    """Tell that the blocks so far are whole."""
    for growing in state.blocks.values():
        if not growing.whole:
            growing.whole = True
            found += finished(growing, state.calls)


def _tell_refusal(state: _State, found: Found) -> None:
    """The model was stopped because it should not answer: say so in a block of its own."""
    details = state.message.get("stop_details")
    told = cast("Members", details) if isinstance(details, dict) else {}
    words = mended(reading.word(told, "explanation")) or REFUSED
    place = max(state.blocks, default=-1) + 1
    item_id = state.item_id(place)
    content = [{"type": "refusal", "refusal": words}]
    item: Members = {"type": "message", "role": "assistant", "content": content}
    found.append(RefusalDelta(words, item_id, place))
    found.append(ItemCompleted({**item, **({"id": item_id} if item_id else {})}, place))


# What the events say about the message as a whole.


def _facts(state: _State) -> Members:
    return {
        "response_id": reading.word(state.message, "id"),
        "model": reading.word(state.message, "model"),
        "response": state.message,
    }


def _learn_usage(state: _State, told: Members) -> None:
    """Counts are cumulative: the last word on each counts."""
    counts = told.get("usage")
    if isinstance(counts, dict):
        state.usage |= {k: v for k, v in cast("Members", counts).items() if v is not None}


def usage_of(counts: Members) -> Usage | None:
    """The tokens, if they were counted; what was read from a cache or written to it was read too."""
    if not counts:
        return None
    cached = reading.count(counts, "cache_read_input_tokens")
    kept = reading.count(counts, "cache_creation_input_tokens")
    read = reading.count(counts, "input_tokens") + cached + kept
    written = reading.count(counts, "output_tokens")
    thought = reading.count(counts.get("output_tokens_details"), "thinking_tokens")
    return Usage(read, cached, written, thought, read + written, kept)
