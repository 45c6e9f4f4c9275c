"""The Messages API of Anthropic, decoded: typed events in, the same Events as from everybody else out.

A message is a list of content blocks, each begun, grown by deltas and stopped under its ``index``; each
becomes an item of output, and its index its place. ``TABLE`` says which function reads which event, and
``DELTAS`` which kind of delta. What is in neither is passed on; a delta of an unknown kind is added to
its block member by member, so that a block of tomorrow is kept whole.

A block that stopped is told as finished only when the next one begins or the message says why it ended:
at the limit of tokens the last block is stopped like any other, and is not whole.
"""

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, cast

from kedge.events import fields
from kedge.events.decoder import EventList, StreamDecoder
from kedge.events.fields import JsonObject, MalformedEvent
from kedge.events.surrogates import SurrogateJoiner, repair_surrogates
from kedge.events.tool_calls import ToolCallState, ToolCallUpdate
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

log = logging.getLogger(__name__)

NATIVE_KEY = "anthropic"
"""The member of an item that keeps what only this API knows of it."""
REDACTED_REASONING = "redacted"
"""What that member says of a thought that nobody may read."""
_ITEM_TYPES = {"text": "message", "thinking": "reasoning", "redacted_thinking": "reasoning"}
_CALL_FIELDS = frozenset({"type", "id", "name", "input"})


@dataclass(slots=True)
class ContentBlockBuilder:
    """One content block as it grows."""

    block: JsonObject
    output_index: int
    item_id: str
    pieces: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    stopped: bool = False
    is_complete: bool = False
    """Whether its ``ItemCompleted`` was emitted."""
    start: JsonObject = field(init=False)
    """The block as it was when it started."""

    def __post_init__(self) -> None:
        self.start = dict(self.block)

    @property
    def type(self) -> str:
        """The API's name for this kind of block."""
        return fields.get_text(self.block, "type")

    @property
    def item_type(self) -> str:
        """The type of the item that it becomes."""
        return _ITEM_TYPES.get(self.type, self.type)

    def is_repeated_by(self, block: JsonObject) -> bool:
        """Return whether a block that starts under the same index is this one, started again."""
        if not self.stopped:
            return (self.type, self.block.get("id")) == (block.get("type"), block.get("id"))
        # An empty text may start anew; what has content of its own is the same block once more.
        return block == self.start and any(block[name] for name in block if name != "type")

    def append(self, name: str, piece: str) -> None:
        """Some more of one of its texts."""
        self.pieces.setdefault(name, []).append(piece)

    def merge(self, name: str, value: Any) -> None:
        """Some more of any of its members."""
        there = self.block.get(name)
        if isinstance(there, str) and isinstance(value, str):
            self.block[name] = there + value
        elif isinstance(there, list) and isinstance(value, list):
            self.block[name] = [*cast("list[Any]", there), *cast("list[Any]", value)]
        else:
            self.block[name] = value

    def text(self, name: str) -> str:
        """One of its texts: what it began with, and what was added."""
        return repair_surrogates(
            fields.get_text(self.block, name) + "".join(self.pieces.get(name, ()))
        )


def complete_block(builder: ContentBlockBuilder, calls: ToolCallState) -> EventList:
    """What to tell of a block that is whole."""
    if builder.type == "tool_use":
        return _complete_call(builder, calls)
    item = _ITEM_BUILDERS.get(builder.type, _build_native_item)(builder)
    identity = {"id": builder.item_id} if builder.type in _ITEM_BUILDERS and builder.item_id else {}
    return [ItemCompleted({**item, **identity}, builder.output_index)]


def _complete_call(builder: ContentBlockBuilder, calls: ToolCallState) -> EventList:
    block, arguments = builder.block, builder.text("input")
    if not arguments.strip():
        given = block.get("input")
        arguments = json.dumps({} if given is None else given, ensure_ascii=False)
    call_id, name = block.get("id"), fields.get_text(block, "name")
    seen = ToolCallUpdate(call_id, name, builder.item_id, builder.output_index, arguments=arguments)
    call, events = calls.finish(seen)
    if not call.name:
        return [*events, AnomalyNoted("malformed", "a tool call without a name")]
    item: JsonObject = {
        "type": "function_call",
        "call_id": call.call_id,
        "name": call.name,
        "arguments": call.arguments,
        **({"id": builder.item_id} if builder.item_id else {}),
    }
    rest = {k: v for k, v in block.items() if k not in _CALL_FIELDS and v is not None}
    if rest.get("caller") == {"type": "direct"}:
        del rest["caller"]
    return [
        *events,
        ItemCompleted({**item, **({NATIVE_KEY: rest} if rest else {})}, builder.output_index),
    ]


def _build_message(builder: ContentBlockBuilder) -> JsonObject:
    part: JsonObject = {"type": "output_text", "text": builder.text("text")}
    if builder.block.get("citations"):
        part["citations"] = builder.block["citations"]
    return {"type": "message", "role": "assistant", "content": [part]}


def _build_reasoning(builder: ContentBlockBuilder) -> JsonObject:
    thought = builder.text("thinking")
    item: JsonObject = {"type": "reasoning", "summary": []}
    if thought:
        item["content"] = [{"type": "reasoning_text", "text": thought}]
    return {**item, "encrypted_content": fields.get_text(builder.block, "signature")}


def _build_redacted_reasoning(builder: ContentBlockBuilder) -> JsonObject:
    sealed = fields.get_text(builder.block, "data")
    return {
        "type": "reasoning",
        "summary": [],
        "encrypted_content": sealed,
        NATIVE_KEY: REDACTED_REASONING,
    }


def _build_native_item(builder: ContentBlockBuilder) -> JsonObject:
    """A block of a kind that only this API knows, whole."""
    written = builder.text("input") if builder.pieces else ""
    try:
        given = {"input": json.loads(written)} if written.strip() else {}
    except ValueError:
        given = {"input": written}
    return repair_surrogates({**builder.block, **given})


_ITEM_BUILDERS: dict[str, Callable[[ContentBlockBuilder], JsonObject]] = {
    "text": _build_message,
    "thinking": _build_reasoning,
    "redacted_thinking": _build_redacted_reasoning,
}


Ending = tuple[Literal["completed", "refused", "paused", "cut"], str]

STOP_REASONS: dict[str, Ending] = {
    "end_turn": ("completed", ""),
    "tool_use": ("completed", ""),
    "stop_sequence": ("completed", ""),
    "refusal": ("refused", "refusal"),
    "pause_turn": ("paused", "pause_turn"),
    "max_tokens": ("cut", "max_output_tokens"),
    "model_context_window_exceeded": ("cut", "model_context_window_exceeded"),
}
"""What each ``stop_reason`` means; one that is not here is not known to be the end of an answer."""

DEFAULT_REFUSAL = "The model declined to answer."
"""The words of a refusal for which the provider gives none."""


@dataclass(slots=True)
class _MessageState:
    """What has to be remembered from one event to the next."""

    calls: ToolCallState = field(default_factory=ToolCallState)
    joiner: SurrogateJoiner = field(default_factory=SurrogateJoiner)
    blocks: list[ContentBlockBuilder] = field(default_factory=list[ContentBlockBuilder])
    by_index: dict[int, ContentBlockBuilder] = field(default_factory=dict[int, ContentBlockBuilder])
    message: JsonObject = field(default_factory=dict[str, Any])
    usage: JsonObject = field(default_factory=dict[str, Any])
    started: bool = False
    ended: bool = False

    def find_block(self, message: JsonObject) -> ContentBlockBuilder:
        """The block that an event speaks of."""
        index = fields.get_index(message, "index")
        if index not in self.by_index:
            raise MalformedEvent("index names no block that was begun")
        return self.by_index[index]

    def next_index(self) -> int:
        """Return the output index after those of all blocks."""
        return max((block.output_index for block in self.blocks), default=-1) + 1

    def item_id(self, index: int) -> str:
        """A name for an item: this API gives none, and planning goes by them."""
        known = fields.get_text(self.message, "id")
        return f"{known}.{index}" if known else ""


class AnthropicDecoder(StreamDecoder):
    """Decodes the events of one message."""

    RESPONSE_FIELDS: ClassVar[frozenset[str]] = frozenset({"content"})

    def __init__(self, **bounds: int) -> None:
        super().__init__(**bounds)
        self._state = _MessageState()

    @property
    def calls(self) -> ToolCallState:
        """The tool calls of the response."""
        return self._state.calls

    @property
    def ended(self) -> bool:
        """Whether the message has stopped."""
        return self._state.ended

    def feed_whole(self, response: dict[str, Any], *, repair: bool = True) -> list[StreamEvent]:
        """Take a whole message: its blocks begin and stop one after the other."""
        whole = repair_surrogates(response) if repair else response
        content: Any = whole.get("content")
        told: list[JsonObject] = [{"type": "message_start", "message": whole}]
        for index, block in enumerate(content if isinstance(content, list) else []):  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
            told.append({"type": "content_block_start", "index": index, "content_block": block})
            told.append({"type": "content_block_stop", "index": index})
        reason = {"stop_reason": "end_turn"} if not whole.get("stop_reason") else {}
        told.append({"type": "message_delta", "delta": {**whole, **reason}})
        told.append({"type": "message_stop"})
        found: EventList = []
        for message in told:
            self._decode_message(message, "", found)
        return [*found, *self.close()]

    def _decode_message(self, message: JsonObject, event: str, found: EventList) -> None:
        if self._state.ended:
            return
        kind = fields.get_text(message, "type") or ("error" if "error" in message else event)
        read = EVENT_READERS.get(kind)
        if read is None:
            self._emit_opaque(kind, message, found, known=kind == "ping")
            return
        try:
            read(self._state, message, found)
        except MalformedEvent as problem:
            self._report_malformed(kind, message, str(problem), found)

    def _repair_message(self, message: JsonObject, event: str) -> JsonObject:
        return message  # texts of deltas go through ``halves``, the others are mended in the end

    def _expects_json(self, event: str) -> bool:
        return not event or event in EVENT_READERS


# What the events say.


def _read_message_start(state: _MessageState, message: JsonObject, found: EventList) -> None:
    if state.started:
        return
    state.started = True
    state.message = {
        k: v for k, v in fields.require_object(message, "message").items() if k != "content"
    }
    _update_usage(state, state.message)
    found.append(ResponseStarted(**_response_facts(state)))


def _read_block_start(state: _MessageState, message: JsonObject, found: EventList) -> None:
    block = dict(fields.require_object(message, "content_block"))
    key = fields.get_index(message, "index")
    index = key = key if key >= 0 else state.next_index()
    known = state.by_index.get(key)
    if known is not None:
        if known.is_repeated_by(block):
            log.warning(
                "content_block_start of block %d is repeated; the repetition is ignored", key
            )
            return
        index = state.next_index()  # another block under an index that is in use
    _complete_blocks(state, found)
    growing = ContentBlockBuilder(block, index, state.item_id(index))
    state.blocks.append(growing)
    state.by_index[key] = growing
    if growing.type == "tool_use":
        name = fields.get_text(growing.block, "name")
        seen = ToolCallUpdate(growing.block.get("id"), name, growing.item_id, index)
        found += state.calls.start(seen)
        return
    found.append(ItemStarted(growing.item_type, growing.item_id, index))
    for name in ("text", "thinking"):
        if growing.type == name and (begun := fields.get_text(growing.block, name)):
            found += _build_delta(growing, name, repair_surrogates(begun))


def _read_block_delta(state: _MessageState, message: JsonObject, found: EventList) -> None:
    growing, delta = state.find_block(message), fields.require_object(message, "delta")
    read = DELTA_READERS.get(fields.get_text(delta, "type"))
    if read is not None:
        read(state, growing, delta, found)
        return
    found.append(OpaqueEvent("content_block_delta", message))
    for name, value in delta.items():
        if name != "type":
            growing.merge(name, value)


def _read_block_stop(state: _MessageState, message: JsonObject, _: EventList) -> None:
    """Nothing is told yet: see the module."""
    state.find_block(message).stopped = True


def _read_message_delta(state: _MessageState, message: JsonObject, _: EventList) -> None:
    delta = fields.require_object(message, "delta")
    for name in ("stop_reason", "stop_sequence", "stop_details"):
        state.message[name] = delta.get(name) or state.message.get(name)
    _update_usage(state, message)


def _read_message_stop(state: _MessageState, _: JsonObject, found: EventList) -> None:
    state.ended = True
    reason = fields.get_text(state.message, "stop_reason")
    ending, word = STOP_REASONS.get(reason, ("cut", reason or "unknown"))
    if ending == "refused" and not all(growing.stopped for growing in state.blocks):
        ending = "cut"
    if ending != "cut":
        _complete_blocks(state, found)
    if ending == "refused":
        _emit_refusal(state, found)
    facts, usage = _response_facts(state), read_usage(state.usage)
    if ending in ("completed", "refused"):
        events, unresolved = state.calls.resolve_open()
        found += events
        found += [AnomalyNoted("unresolved_call", name) for name in unresolved]
        found.append(ResponseCompleted(**facts, usage=usage))
    else:
        found.append(ResponseIncomplete(**facts, reason=word, usage=usage))
    state.calls.log_summary()


def _read_error(_: _MessageState, message: JsonObject, found: EventList) -> None:
    told = fields.read_error(message)
    found.append(StreamFailed(**{**told, "code": told.get("code") or told.get("kind", "")}))


EventReader = Callable[[_MessageState, JsonObject, EventList], None]
EVENT_READERS: dict[str, EventReader] = {
    "message_start": _read_message_start,
    "content_block_start": _read_block_start,
    "content_block_delta": _read_block_delta,
    "content_block_stop": _read_block_stop,
    "message_delta": _read_message_delta,
    "message_stop": _read_message_stop,
    "error": _read_error,
}


# What deltas add to their blocks.

DeltaReader = Callable[[_MessageState, ContentBlockBuilder, JsonObject, EventList], None]


def _text_delta_reader(name: Literal["text", "thinking"]) -> DeltaReader:
    def read(
        state: _MessageState, growing: ContentBlockBuilder, delta: JsonObject, found: EventList
    ) -> None:
        piece = fields.require_text(delta, name)
        growing.append(name, piece)
        if said := state.joiner.feed((name, growing.output_index), piece):
            found += _build_delta(growing, name, said)

    return read


def _build_delta(block: ContentBlockBuilder, name: str, text: str) -> EventList:
    if name == "text":
        return [TextDelta(text, block.item_id, block.output_index)]
    return [ReasoningDelta(text, "reasoning", block.item_id, block.output_index)]


def _read_signature(
    _: _MessageState, block: ContentBlockBuilder, delta: JsonObject, __: EventList
) -> None:
    block.block["signature"] = fields.require_text(delta, "signature")


def _read_input_json(
    state: _MessageState, block: ContentBlockBuilder, delta: JsonObject, found: EventList
) -> None:
    piece = fields.require_text(delta, "partial_json")
    block.append("input", piece)
    said = state.joiner.feed(("input", block.output_index), piece)
    if said and block.type == "tool_use":
        found += state.calls.append_arguments(block.item_id, block.output_index, said)


def _read_citation(
    _: _MessageState, block: ContentBlockBuilder, delta: JsonObject, __: EventList
) -> None:
    block.merge("citations", [delta.get("citation")])


DELTA_READERS: dict[str, DeltaReader] = {
    "text_delta": _text_delta_reader("text"),
    "thinking_delta": _text_delta_reader("thinking"),
    "signature_delta": _read_signature,
    "input_json_delta": _read_input_json,
    "citations_delta": _read_citation,
}


# Finished blocks.


def _complete_blocks(state: _MessageState, found: EventList) -> None:
    """Tell that the blocks so far are whole."""
    for growing in state.blocks:
        if not growing.is_complete:
            growing.is_complete = True
            found += complete_block(growing, state.calls)


def _emit_refusal(state: _MessageState, found: EventList) -> None:
    """The model was stopped because it should not answer: say so in a block of its own."""
    details = state.message.get("stop_details")
    told = cast("JsonObject", details) if isinstance(details, dict) else {}
    words = repair_surrogates(fields.get_text(told, "explanation")) or DEFAULT_REFUSAL
    place = state.next_index()
    item_id = state.item_id(place)
    content = [{"type": "refusal", "refusal": words}]
    item: JsonObject = {"type": "message", "role": "assistant", "content": content}
    found.append(RefusalDelta(words, item_id, place))
    found.append(ItemCompleted({**item, **({"id": item_id} if item_id else {})}, place))


# What the events say about the message as a whole.


def _response_facts(state: _MessageState) -> JsonObject:
    return {
        "response_id": fields.get_text(state.message, "id"),
        "model": fields.get_text(state.message, "model"),
        "response": state.message,
    }


def _update_usage(state: _MessageState, message: JsonObject) -> None:
    """Counts are cumulative: the last word on each counts."""
    counts = message.get("usage")
    if isinstance(counts, dict):
        state.usage |= {k: v for k, v in cast("JsonObject", counts).items() if v is not None}


def read_usage(counts: JsonObject) -> Usage | None:
    """The tokens, if they were counted; what was read from a cache or written to it was read too."""
    if not counts:
        return None
    cached = fields.get_count(counts, "cache_read_input_tokens")
    kept = fields.get_count(counts, "cache_creation_input_tokens")
    read = fields.get_count(counts, "input_tokens") + cached + kept
    written = fields.get_count(counts, "output_tokens")
    thought = fields.get_count(counts.get("output_tokens_details"), "thinking_tokens")
    return Usage(read, cached, written, thought, read + written, kept)
