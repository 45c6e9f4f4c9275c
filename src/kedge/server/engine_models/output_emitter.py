"""Convert the events of an engine to the output events of the server.

The server writes one item after another, but a provider may interleave several. Therefore only one item is
open at a time: text and reasoning end where the next item starts; a call stays open until it is complete,
and deltas of other items wait. Items that the stream did not contain are added from the finished response.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from kedge import events, turns
from kedge.events import Event, Outcome
from kedge.server import models
from kedge.server.engine_models.turn_builder import pack_reasoning
from kedge.server.models import ItemKind, OutputEvent
from kedge.turns import Block
from kedge.turns.frozen_json import thaw
from kedge.wire.assembler import Assembler

STREAMED_TYPES = frozenset({"message", "function_call", "custom_tool_call"})
"""The types of items that are emitted by their deltas."""
ItemKey = tuple[str, object]
"""The item that a delta belongs to: its kind, and its index or call id."""


@dataclass(slots=True)
class _PendingItem:
    """An item in progress: its opening event, the emitted and the waiting text, its state."""

    opened: models.ItemOpened
    emitted: list[str] = field(default_factory=list[str])
    pending: str = ""
    logprobs: list[Mapping[str, Any]] = field(default_factory=list[Mapping[str, Any]])
    """The log probabilities of the waiting text."""
    is_started: bool = False
    is_complete: bool = False
    index: int = 0

    def find_rest(self, text: str) -> str:
        """Return what is missing of the complete text; empty if the text so far is not its beginning."""
        received = "".join(self.emitted) + self.pending
        if not text.startswith(received):
            return ""
        return text[len(received) :]

    def take_pending(self) -> str:
        """Return the waiting text, which no longer waits."""
        text = self.pending
        self.pending = ""
        return text

    def take_logprobs(self) -> tuple[Mapping[str, Any], ...]:
        """Return the log probabilities of the waiting text, which no longer wait."""
        logprobs = tuple(thaw(token) for token in self.logprobs)
        self.logprobs = []
        return logprobs


@dataclass(slots=True)
class OutputEmitter:
    """Emits the output events of one response; ``prefix_digest`` is the digest of its request."""

    prefix_digest: str
    assembler: Assembler = field(default_factory=Assembler)
    _current: ItemKey | None = None
    _items: dict[ItemKey, _PendingItem] = field(default_factory=dict[ItemKey, _PendingItem])
    _call_ids: dict[str, str] = field(default_factory=dict[str, str])
    _seen_indices: set[int] = field(default_factory=set[int])

    def feed(self, event: Event) -> Iterator[OutputEvent]:
        """Yield the output events that follow from an event."""
        self.assembler.feed(event)
        match event:
            case events.TextDelta():
                key = ("text", (event.output_index, event.content_index))
                item = self._find_or_add(key, models.ItemOpened("text"), event.output_index)
                item.logprobs += event.logprobs
                yield from self._emit_text(key, item, event.delta)
            case events.RefusalDelta():
                key = ("refusal", (event.output_index, event.content_index))
                item = self._find_or_add(key, models.ItemOpened("refusal"), event.output_index)
                yield from self._emit_text(key, item, event.delta)
            case events.ReasoningDelta():
                yield from self._add_reasoning(event)
            case events.PartCompleted(kind="text" | "refusal" as kind):
                key = (kind, (event.output_index, event.index))
                item = self._find_or_add(key, models.ItemOpened(kind), event.output_index)
                yield from self._emit_text(key, item, item.find_rest(event.text))
            case events.ToolCallStarted():
                yield from self._start_call(event)
            case events.ToolArgumentsDelta():
                key = self._get_call_key(event.call_id)
                if key in self._items:
                    yield from self._emit_text(key, self._items[key], event.delta)
            case events.ToolCallRenamed():
                self._call_ids[event.call_id] = self._call_ids.get(event.was, event.was)
            case events.ToolCallCompleted():
                yield from self._complete_call(event)
            case events.ItemCompleted():
                yield from self._complete_item(event)
            case _:
                pass

    def finish(self, outcome: Outcome) -> Iterator[OutputEvent]:
        """Yield the rest: waiting text, and items that the stream did not contain."""
        for item in self._items.values():
            item.is_complete = True
        yield from self._flush()
        for block in outcome.blocks:
            if block.output_index not in self._seen_indices:
                yield from emit_block(block, self.prefix_digest)
        usage = outcome.usage
        if usage is not None:
            yield models.ModelUsage(
                usage.input_tokens, usage.output_tokens, usage.cached_tokens, usage.reasoning_tokens
            )

    def _add_reasoning(self, event: events.ReasoningDelta) -> Iterator[OutputEvent]:
        key = ("reasoning", event.output_index)
        item = self._find_or_add(key, models.ItemOpened("reasoning"), event.output_index)
        text = event.delta
        if item.emitted and item.index != event.index:
            text = f"\n\n{text}"
        item.index = event.index
        yield from self._emit_text(key, item, text)

    def _find_or_add(
        self, key: ItemKey, opened: models.ItemOpened, output_index: int
    ) -> _PendingItem:
        if key not in self._items:
            self._items[key] = _PendingItem(opened)
            self._seen_indices.add(output_index)
        return self._items[key]

    def _get_call_key(self, call_id: str) -> ItemKey:
        return "call", self._call_ids.get(call_id, call_id)

    def _emit_text(self, key: ItemKey, item: _PendingItem, text: str) -> Iterator[OutputEvent]:
        """Emit text of an item, or buffer it while another item is open."""
        if key != self._current and not self._can_open():
            item.pending += text
            return
        if key != self._current:
            yield from self._open_item(key, item)
        if text:
            item.emitted.append(text)
            yield models.ItemDelta(text, item.take_logprobs())

    def _can_open(self) -> bool:
        """Whether another item may start: not while a call is incomplete."""
        return self._current is None or self._current[0] != "call"

    def _open_item(self, key: ItemKey, item: _PendingItem) -> Iterator[OutputEvent]:
        yield from self._close_item()
        self._current = key
        item.is_started = True
        yield item.opened

    def _close_item(self) -> Iterator[OutputEvent]:
        """Close the open item."""
        if self._current is None:
            return
        kind, index = self._current
        self._current = None
        match kind:
            case "reasoning":
                yield self._end_reasoning(index)
            case "text":
                output_index, content_index = cast("tuple[int, int]", index)
                yield self._end_text(output_index, content_index)
            case _:
                yield models.ItemClosed()

    def _end_reasoning(self, output_index: object) -> models.ItemClosed:
        """Return the end of reasoning, with what the model needs to get it again."""
        block = self._find_block(output_index)
        if not isinstance(block, turns.ReasoningBlock):
            return models.ItemClosed()
        return models.ItemClosed(model_data=pack_reasoning(block, self.prefix_digest))

    def _end_text(self, output_index: int, content_index: int) -> models.ItemClosed:
        """Return the end of a text, with the annotations that have been received."""
        block = self._find_block(output_index)
        if not isinstance(block, turns.AssistantBlock) or content_index >= len(block.parts):
            return models.ItemClosed()
        return _close_text(block.parts[content_index])

    def _find_block(self, index: object) -> Block | None:
        """Return the block of an output item, as far as it has been received."""
        for block in self.assembler.blocks():
            if block.output_index == index:
                return block
        return None

    def _start_call(
        self, event: events.ToolCallStarted | events.ToolCallCompleted
    ) -> Iterator[OutputEvent]:
        key = ("call", event.call_id)
        if key in self._items:
            return
        opened = models.ItemOpened(_name_call(event.custom), event.name, event.call_id)
        item = self._find_or_add(key, opened, event.output_index)
        yield from self._emit_text(key, item, "")

    def _complete_call(self, event: events.ToolCallCompleted) -> Iterator[OutputEvent]:
        key = self._get_call_key(event.call_id)
        if key not in self._items:
            yield from self._start_call(event)
        item = self._items[key]
        if item.is_complete:
            return
        yield from self._emit_text(key, item, item.find_rest(event.arguments))
        item.is_complete = True
        if key == self._current:
            yield from self._flush()

    def _flush(self) -> Iterator[OutputEvent]:
        """Close the open item and emit the waiting items, up to the next incomplete one."""
        yield from self._close_item()
        for key, item in self._items.items():
            if item.is_started and not item.pending:
                continue
            yield from self._emit_text(key, item, item.take_pending())
            if not item.is_complete:
                return  # it is open now, and the others still wait
            yield from self._close_item()

    def _complete_item(self, event: events.ItemCompleted) -> Iterator[OutputEvent]:
        if event.item.get("status") == "incomplete":
            return  # it stays open, because the server does not complete truncated items
        kind = event.item.get("type")
        if self._is_open(kind, event.output_index):
            yield from self._close_item()
        elif kind not in STREAMED_TYPES and event.output_index not in self._seen_indices:
            yield from self._emit_complete_item(event.output_index)

    def _is_open(self, item_type: object, output_index: int) -> bool:
        """Return whether a completed message or reasoning item is the open one."""
        if self._current is None:
            return False
        kind, _ = self._current
        if item_type == "reasoning":
            return self._current == ("reasoning", output_index)
        return item_type == "message" and kind in ("text", "refusal")

    def _emit_complete_item(self, output_index: int) -> Iterator[OutputEvent]:
        """Emit an item without deltas, such as a search, before the next one; else ``finish`` emits it."""
        if not self._can_open():
            return
        block = self._find_block(output_index)
        if block is None:
            return
        self._seen_indices.add(output_index)
        yield from self._close_item()
        yield from emit_block(block, self.prefix_digest)


def _name_call(is_custom: bool) -> ItemKind:
    if is_custom:
        return "custom_tool_call"
    return "function_call"


def emit_block(block: Block, prefix_digest: str) -> Iterator[OutputEvent]:
    """Yield the output events of a complete block."""
    match block:
        case turns.AssistantBlock():
            for part in block.parts:
                yield from _emit_part(part)
        case turns.ReasoningBlock():
            yield models.ItemOpened("reasoning")
            yield models.ItemDelta("\n\n".join(block.summary or block.texts))
            yield models.ItemClosed(model_data=pack_reasoning(block, prefix_digest))
        case turns.ToolCallBlock():
            yield models.ItemOpened(_name_call(block.custom), block.name, block.call_id)
            yield models.ItemDelta(block.arguments)
            yield models.ItemClosed()
        case turns.OpaqueBlock():
            yield models.ItemAdded(thaw(block.item))
        case _:
            pass


def _emit_part(part: turns.Part) -> Iterator[OutputEvent]:
    """Yield the output events of a text or a refusal; other parts are no output."""
    match part:
        case turns.TextPart():
            yield models.ItemOpened("text")
        case turns.RefusalPart():
            yield models.ItemOpened("refusal")
        case _:
            return
    yield models.ItemDelta(part.text, _read_list(part, "logprobs"))
    yield _close_text(part)


def _close_text(part: turns.Part) -> models.ItemClosed:
    """Return the end of a text, with the annotations of the received part."""
    return models.ItemClosed(annotations=_read_list(part, "annotations"))


def _read_list(part: turns.Part, name: str) -> tuple[Mapping[str, Any], ...]:
    """Return a list of objects that the provider attached to a text."""
    if not isinstance(part, turns.TextPart):
        return ()
    attached = part.extra.get(name)
    if not isinstance(attached, tuple):
        return ()
    return tuple(thaw(attached))
