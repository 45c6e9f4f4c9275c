"""Decode streams of Anthropic's Messages API.

A message is a list of content blocks, each of which is started, extended by deltas and stopped under its
``index``; each becomes an output item at that index. ``EVENT_READERS`` maps event types to methods.
Other events are passed on; a delta of an unknown type is merged into its block
field by field, so that a block of a future type is complete.

``ItemCompleted`` is emitted for a stopped block only when the next block starts or the message ends with a known
reason: at the token limit the last block is stopped like any other, and is not complete.
"""

import json
import logging
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, cast

import msgspec
from msgspec import structs

from kedge.events import types
from kedge.events.types import Usage, build_delta
from kedge.turns.server_fields import NATIVE_KEY
from kedge.wire import fields
from kedge.wire.decoder import StreamDecoder
from kedge.wire.fields import JsonObject, MalformedEvent, repair_surrogates
from kedge.wire.items import ToolCall, read_item

log = logging.getLogger(__name__)

REDACTED_REASONING = "redacted"
"""The value of ``NATIVE_KEY`` for redacted reasoning."""
_ITEM_TYPES = {"text": "message", "thinking": "reasoning", "redacted_thinking": "reasoning"}
_CALL_FIELDS = frozenset({"type", "id", "name", "input"})
_DELTA_BLOCKS = {"text_delta": "text", "thinking_delta": "thinking"}
"""The type of the block that starts with a delta of this type, if it was not started before."""


class ContentBlockBuilder(msgspec.Struct):
    """Collects the deltas of one content block."""

    start: JsonObject
    """The content of the block at its start."""
    block: JsonObject
    output_index: int
    item_id: str
    pieces: dict[str, list[str]] = {}
    stopped: bool = False
    is_complete: bool = False
    """Whether its ``ItemCompleted`` was emitted."""

    @property
    def type(self) -> str:
        """The block's type in this API."""
        return fields.get_text(self.block, "type")

    @property
    def identity(self) -> JsonObject:
        """The id of the output item, as a member of it."""
        if not self.item_id:
            return {}
        return {"id": self.item_id}

    def build_call(self, **arguments: str) -> JsonObject:
        """Return the output item of a call."""
        return {
            "type": "function_call",
            "call_id": self.block.get("id"),
            "name": fields.get_text(self.block, "name"),
            **arguments,
            **self.identity,
        }

    def is_repeated_by(self, block: JsonObject) -> bool:
        """Return whether a block that starts under the same index is this one, started again."""
        if not self.stopped:
            return (self.type, self.block.get("id")) == (block.get("type"), block.get("id"))
        # An empty text may be a new block; a start with content is a repetition of the same block.
        return block == self.start and any(block[name] for name in block if name != "type")

    def append(self, name: str, piece: str) -> None:
        """Append to a text of the block."""
        self.pieces.setdefault(name, []).append(piece)

    def merge(self, name: str, value: Any) -> None:
        """Append to any of the block's fields."""
        self.block[name] = fields.merge_values(self.block.get(name), value)

    def text(self, name: str) -> str:
        """Return a text of the block, from its start and its deltas."""
        return repair_surrogates(
            fields.get_text(self.block, name) + "".join(self.pieces.get(name, ()))
        )

    def build_item(self) -> JsonObject:
        """Return the output item of a finished block; a block of a type without a counterpart is its own item."""
        block = self.block
        match self.type:
            case "text":
                part = {"type": "output_text", "text": self.text("text")}
                if block.get("citations"):
                    part["citations"] = block["citations"]
                item = fields.build_message([part])
            case "thinking":
                signature = fields.get_text(block, "signature")
                item = fields.build_reasoning(self.text("thinking"), signature)
            case "redacted_thinking":
                item = fields.build_reasoning("", fields.get_text(block, "data"))
                item[NATIVE_KEY] = REDACTED_REASONING
            case _:
                return self._build_native_item()
        return {**item, **self.identity}

    def _build_native_item(self) -> JsonObject:
        """Return the block as an item, with the input that its deltas have."""
        item = dict(self.block)
        text = self.text("input") if self.pieces else ""
        if text.strip():
            try:
                item["input"] = json.loads(text)
            except ValueError:
                item["input"] = text
        return repair_surrogates(item)


STOP_REASONS: dict[str, tuple[Literal["completed", "refused", "paused", "cut"], str]] = {
    "end_turn": ("completed", ""),
    "tool_use": ("completed", ""),
    "stop_sequence": ("completed", ""),
    "refusal": ("refused", "refusal"),
    "pause_turn": ("paused", "pause_turn"),
    "max_tokens": ("cut", "max_output_tokens"),
    "model_context_window_exceeded": ("cut", "model_context_window_exceeded"),
}
"""The meaning of each ``stop_reason``; with any other, such as ``compaction``, the message is paused after it."""

DEFAULT_REFUSAL = "The model declined to answer."
"""The text of a refusal for which the provider sends no explanation."""

PIECE_TYPES = frozenset({"text_delta", "thinking_delta", "input_json_delta"})
"""The deltas with a piece of a text, which may end with half of a character."""


class AnthropicDecoder(StreamDecoder):
    """Decodes a stream of Anthropic's Messages API.

    Args:
        **bounds: ``max_line`` and ``max_message``, as for ``StreamDecoder``.
    """

    RESPONSE_FIELDS: ClassVar[frozenset[str]] = frozenset({"content"})
    NATIVE_API: ClassVar[str] = NATIVE_KEY

    def __init__(self, **bounds: int) -> None:
        super().__init__(**bounds)
        self._blocks: list[ContentBlockBuilder] = []
        self._by_index: dict[int, ContentBlockBuilder] = {}
        self._message: JsonObject = {}
        self._usage: JsonObject = {}

    def _read_whole(self, response: JsonObject) -> None:
        content: Any = response.get("content")
        if isinstance(content, str):  # the form of a request
            content = [{"type": "text", "text": content}]
        if not isinstance(content, list):
            content = []
        self._read_event("message_start", {"message": response})
        for index, block in enumerate(cast("list[Any]", content)):
            event = {"index": index, "content_block": block}
            self._read_event("content_block_start", event)
            self._read_event("content_block_stop", event)
        reason = response.get("stop_reason") or "end_turn"
        self._read_event("message_delta", {"delta": {**response, "stop_reason": reason}})
        self._read_event("message_stop", {})

    def _decode_message(self, message: JsonObject, event: str) -> None:
        if self.ended:
            return
        kind = fields.get_text(message, "type")
        if not kind:
            kind = "error" if "error" in message else event
        self._read_event(kind, message)

    def _repair_message(self, message: JsonObject, event: str) -> JsonObject:
        clean = repair_surrogates(message)
        delta = fields.get_object(message, "delta")
        if fields.get_text(delta, "type") in PIECE_TYPES:
            clean["delta"] = delta
        return clean

    def _find_block(self, message: JsonObject) -> ContentBlockBuilder:
        """Return the block that an event belongs to."""
        index = fields.get_index(message, "index")
        if index not in self._by_index:
            raise MalformedEvent("no block was started at this index")
        return self._by_index[index]

    def _next_index(self) -> int:
        """Return the output index after all blocks."""
        return max((block.output_index for block in self._blocks), default=-1) + 1

    def _make_item_id(self, index: int) -> str:
        """Return an id for an item, because this API sends none and planning needs one."""
        message_id = fields.get_text(self._message, "id")
        if not message_id:
            return ""
        return f"{message_id}.{index}"

    # Readers of events.

    def _read_message_start(self, message: JsonObject) -> None:
        started = fields.require_object(message, "message")
        if self._started:
            self._read_repeated_start(started)
            return
        self._started = True
        self._message = {name: value for name, value in started.items() if name != "content"}
        self._update_usage(self._message)
        self._events.append(types.ResponseStarted(**fields.read_facts(self._message)))

    def _read_repeated_start(self, started: JsonObject) -> None:
        """Ignore the same message; another one is not the rest of this one, which has no end then."""
        message_id = fields.get_text(started, "id")
        if not message_id or message_id == fields.get_text(self._message, "id"):
            return
        problem = "another message started before the end of this one"
        facts = fields.read_facts(self._message)
        self._end(("failed", "server_error", problem), {**facts, "usage": read_usage(self._usage)})

    def _read_block_start(self, message: JsonObject) -> None:
        block = fields.require_object(message, "content_block")
        sent_index = fields.get_index(message, "index")
        if sent_index < 0:
            sent_index = self._next_index()
        output_index = sent_index
        earlier = self._by_index.get(sent_index)
        if earlier is not None and earlier.is_repeated_by(block):
            text = "content_block_start of block %d is repeated; the repetition is ignored"
            log.warning(text, sent_index)
            return
        if earlier is not None:  # another block with an index that is in use
            output_index = self._next_index()
            earlier.stopped = True
        self._complete_blocks(only_stopped=True)
        item_id = self._make_item_id(output_index)
        builder = ContentBlockBuilder(block, dict(block), output_index, item_id)
        self._blocks.append(builder)
        self._by_index[sent_index] = builder
        self._announce_block(builder)

    def _announce_block(self, builder: ContentBlockBuilder) -> None:
        """Emit the start of a block, and the text that it starts with."""
        if builder.type == "tool_use":
            self.calls.start(read_item(builder.build_call(), builder.output_index))
            return
        kind = _ITEM_TYPES.get(builder.type, builder.type)
        self._events.append(types.ItemStarted(kind, builder.item_id, builder.output_index))
        if builder.type in ("text", "thinking"):
            text = fields.get_text(builder.block, builder.type)
            if text:
                self._emit_text(builder, builder.type, text)

    def _read_block_delta(self, message: JsonObject) -> None:
        delta = fields.require_object(message, "delta")
        index = fields.get_index(message, "index")
        kind = fields.get_text(delta, "type")
        if index >= 0 and index not in self._by_index and kind in _DELTA_BLOCKS:
            # Some servers omit the start of a block, which is needed for calls only.
            block = {"type": _DELTA_BLOCKS[kind]}
            self._read_block_start({"index": index, "content_block": block})
        builder = self._find_block(message)
        match kind:
            case "text_delta" | "thinking_delta":
                self._read_text(builder, delta, _DELTA_BLOCKS[kind])
            case "signature_delta":
                builder.block["signature"] = fields.require_text(delta, "signature")
            case "input_json_delta":
                self._read_input_json(builder, delta)
            case "citations_delta":
                builder.merge("citations", [delta.get("citation")])
            case _:
                self._events.append(types.OpaqueEvent("content_block_delta", message))
                for name, value in delta.items():
                    if name != "type":
                        builder.merge(name, value)

    def _read_text(self, builder: ContentBlockBuilder, delta: JsonObject, name: str) -> None:
        piece = fields.require_text(delta, name)
        builder.append(name, piece)
        text = self._joiner.feed((name, builder.output_index), piece)
        if text:
            self._emit_text(builder, name, text)

    def _emit_text(self, builder: ContentBlockBuilder, name: str, text: str) -> None:
        kind = "text" if name == "text" else "reasoning"
        self._events.append(build_delta(kind, text, builder.item_id, builder.output_index))

    def _read_input_json(self, builder: ContentBlockBuilder, delta: JsonObject) -> None:
        piece = fields.require_text(delta, "partial_json")
        builder.append("input", piece)
        text = self._joiner.feed(("input", builder.output_index), piece)
        if text and builder.type == "tool_use":
            self.calls.append_arguments(builder.item_id, builder.output_index, text)

    def _read_block_stop(self, message: JsonObject) -> None:
        """Read the end of a block; its completion is emitted later, see the module docstring."""
        self._find_block(message).stopped = True

    def _read_message_delta(self, message: JsonObject) -> None:
        delta: JsonObject = {}
        if message.get("delta") is not None:
            delta = fields.require_object(message, "delta")
        for name in ("stop_reason", "stop_sequence", "stop_details"):
            self._message[name] = delta.get(name) or self._message.get(name)
        self._update_usage(message)

    def _read_message_stop(self, _: JsonObject) -> None:
        reason = fields.get_text(self._message, "stop_reason")
        ending, code = STOP_REASONS.get(reason, ("paused", reason))
        if not reason:
            ending = "cut"
            code = "unknown"
        if ending == "refused" and not all(builder.stopped for builder in self._blocks):
            ending = "cut"
        if ending != "cut":
            self._complete_blocks()
        if ending == "refused":
            self._emit_refusal()
        status = "completed" if ending in ("completed", "refused") else "incomplete"
        if status == "completed":
            self.calls.resolve_open()
        facts = fields.read_facts(self._message)
        self._end((status, code, ""), {**facts, "usage": read_usage(self._usage)})

    def _read_error(self, message: JsonObject) -> None:
        error = fields.read_error(message)
        error["code"] = error["code"] or error["kind"]
        self._events.append(types.StreamFailed(**error))

    EVENT_READERS: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "message_start": (_read_message_start,),
        "content_block_start": (_read_block_start,),
        "content_block_delta": (_read_block_delta,),
        "content_block_stop": (_read_block_stop,),
        "message_delta": (_read_message_delta,),
        "message_stop": (_read_message_stop,),
        "error": (_read_error,),
    }

    # Finished blocks.

    def _complete_blocks(self, *, only_stopped: bool = False) -> None:
        """Emit the completion of the blocks so far; a block that is not stopped may still receive deltas."""
        for builder in self._blocks:
            if builder.is_complete or (only_stopped and not builder.stopped):
                continue
            builder.is_complete = True
            if builder.type == "tool_use":
                self._complete_call(builder)
            else:
                item = builder.build_item()
                self._events.append(types.ItemCompleted(item, builder.output_index))

    def _complete_call(self, builder: ContentBlockBuilder) -> None:
        block = builder.block
        arguments = builder.text("input")
        if not arguments.strip():
            tool_input = block.get("input")
            if tool_input is None:
                tool_input = {}
            arguments = json.dumps(tool_input, ensure_ascii=False)
        item = builder.build_call(arguments=arguments)
        call = self.calls.finish(read_item(item, builder.output_index))
        if not isinstance(call, ToolCall) or not call.name:
            self._events.append(types.AnomalyNoted("malformed", "the tool call has no name"))
            return
        rest = {
            name: value
            for name, value in block.items()
            if name not in _CALL_FIELDS and value is not None
        }
        if rest.get("caller") == {"type": "direct"}:
            del rest["caller"]
        item = call.complete_item(item)
        if rest:
            item = {**item, NATIVE_KEY: rest}
        self._events.append(types.ItemCompleted(item, builder.output_index))

    def _emit_refusal(self) -> None:
        """Emit a message with the refusal that stopped the model."""
        details = fields.get_object(self._message, "stop_details")
        text = fields.get_text(details, "explanation") or DEFAULT_REFUSAL
        index = self._next_index()
        item_id = self._make_item_id(index)
        item = fields.build_message([{"type": "refusal", "refusal": text}])
        if item_id:
            item["id"] = item_id
        self._events.append(types.RefusalDelta(text, item_id, index))
        self._events.append(types.ItemCompleted(item, index))

    def _update_usage(self, message: JsonObject) -> None:
        """Update the token counts, which are cumulative."""
        counts = fields.get_object(message, "usage")
        self._usage |= {name: count for name, count in counts.items() if count is not None}


# Token counts.


def read_usage(counts: JsonObject) -> Usage | None:
    """Return the token counts, if there are any; input includes cache reads and cache writes.

    A message may need several runs of a model: compactions, and the runs of an advisor, are listed only as
    ``iterations``, which then have all the tokens.
    """
    if not counts:
        return None
    iterations = fields.list_objects(counts.get("iterations"))
    runs = [_read_run(iteration) for iteration in iterations]
    total = _read_run(counts)
    context = 0
    if runs:
        total = sum(runs, Usage())
    if len(runs) > 1:
        context = _count_context(iterations, runs)
    reasoning = fields.get_count(counts.get("output_tokens_details"), "thinking_tokens")
    return structs.replace(total, reasoning_tokens=reasoning, context_tokens=context)


def _read_run(counts: Any) -> Usage:
    """Return the token counts of a run of a model."""
    cached = fields.get_count(counts, "cache_read_input_tokens")
    cache_writes = fields.get_count(counts, "cache_creation_input_tokens")
    read = fields.get_count(counts, "input_tokens") + cached + cache_writes
    written = fields.get_count(counts, "output_tokens")
    return Usage(read, cached, written, 0, read + written, cache_writes)


def _count_context(iterations: list[JsonObject], runs: list[Usage]) -> int:
    """Return the tokens of the context after the last run of the model itself."""
    own = [
        run
        for iteration, run in zip(iterations, runs, strict=True)
        if iteration.get("type") == "message"
    ]
    if own:
        return own[-1].total_tokens
    return runs[-1].output_tokens
