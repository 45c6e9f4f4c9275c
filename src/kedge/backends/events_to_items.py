"""Convert the events of an engine to the output events of the server.

The server writes one item after another, but a provider may interleave several. Therefore only one item is
open at a time: text and reasoning end where the next item starts; a call stays open until it is complete,
and deltas of other items wait. Items that the stream did not contain are added from the finished response.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from kedge.backends.items_to_turn import pack_reasoning
from kedge.events import (
    Event,
    ItemCompleted,
    Outcome,
    PartCompleted,
    ReasoningDelta,
    RefusalDelta,
    TextDelta,
    ToolArgumentsDelta,
    ToolCallCompleted,
    ToolCallRenamed,
    ToolCallStarted,
)
from kedge.events.assembler import Assembler
from kedge.server.models import (
    ItemAdded,
    ItemClosed,
    ItemDelta,
    ItemKind,
    ItemOpened,
    ModelUsage,
    OutputEvent,
)
from kedge.turns import (
    AssistantBlock,
    Block,
    OpaqueBlock,
    Part,
    ReasoningBlock,
    RefusalPart,
    TextPart,
    ToolCallBlock,
)
from kedge.turns.frozen_json import thaw

STREAMED_TYPES = frozenset({"message", "function_call", "custom_tool_call"})
"""The types of items that are emitted by their deltas."""
ItemKey = tuple[str, object]
"""The item that a delta belongs to: its kind, and its index or call id."""


@dataclass(slots=True)
class _PendingItem:
    """An item in progress: its opening event, the emitted and the waiting text, its state."""

    opened: ItemOpened
    emitted: list[str] = field(default_factory=list[str])
    pending: str = ""
    logprobs: list[Mapping[str, Any]] = field(default_factory=list[Mapping[str, Any]])
    """Those of the waiting text."""
    is_started: bool = False
    is_complete: bool = False
    index: int = 0

    def find_rest(self, text: str) -> str:
        """Return what is missing of the complete text; empty if the text so far is not its beginning."""
        received = "".join(self.emitted) + self.pending
        return text[len(received) :] if text.startswith(received) else ""


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
            case TextDelta() | RefusalDelta():
                kind: ItemKind = "text" if isinstance(event, TextDelta) else "refusal"
                key = (kind, (event.output_index, event.content_index))
                item = self._find_or_add(key, ItemOpened(kind), event.output_index)
                item.logprobs += event.logprobs if isinstance(event, TextDelta) else ()
                yield from self._emit_text(key, item, event.delta)
            case ReasoningDelta():
                key = ("reasoning", event.output_index)
                item = self._find_or_add(key, ItemOpened("reasoning"), event.output_index)
                gap = "\n\n" if item.emitted and item.index != event.index else ""
                item.index = event.index
                yield from self._emit_text(key, item, gap + event.delta)
            case PartCompleted(kind="text" | "refusal" as kind):
                key = (kind, (event.output_index, event.index))
                item = self._find_or_add(key, ItemOpened(kind), event.output_index)
                yield from self._emit_text(key, item, item.find_rest(event.text))
            case ToolCallStarted():
                yield from self._start_call(event)
            case ToolArgumentsDelta():
                key = self._get_call_key(event.call_id)
                if key in self._items:
                    yield from self._emit_text(key, self._items[key], event.delta)
            case ToolCallRenamed():
                self._call_ids[event.call_id] = self._call_ids.get(event.was, event.was)
            case ToolCallCompleted():
                yield from self._complete_call(event)
            case ItemCompleted():
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
        if (usage := outcome.usage) is not None:
            yield ModelUsage(
                usage.input_tokens, usage.output_tokens, usage.cached_tokens, usage.reasoning_tokens
            )

    def _find_or_add(self, key: ItemKey, opened: ItemOpened, output_index: int) -> _PendingItem:
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
            logprobs, item.logprobs = tuple(map(thaw, item.logprobs)), []
            yield ItemDelta(text, logprobs)

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
        (kind, index), self._current = self._current, None
        if kind == "reasoning":
            block = self._find_block(index)
            is_known = isinstance(block, ReasoningBlock)
            yield ItemClosed(
                model_data=pack_reasoning(block, self.prefix_digest) if is_known else None
            )
        elif kind == "text":
            output_index, content_index = cast("tuple[int, int]", index)
            block = self._find_block(output_index)
            parts = block.parts if isinstance(block, AssistantBlock) else ()
            yield _close_text(parts[content_index] if content_index < len(parts) else None)
        else:
            yield ItemClosed()

    def _find_block(self, index: object) -> Block | None:
        """Return the block of an output item, as far as it has been received."""
        blocks = self.assembler.blocks()
        return next((each for each in blocks if each.output_index == index), None)

    def _start_call(self, event: ToolCallStarted | ToolCallCompleted) -> Iterator[OutputEvent]:
        key = ("call", event.call_id)
        if key not in self._items:
            kind: ItemKind = "custom_tool_call" if event.custom else "function_call"
            opened = ItemOpened(kind, event.name, event.call_id)
            item = self._find_or_add(key, opened, event.output_index)
            yield from self._emit_text(key, item, "")

    def _complete_call(self, event: ToolCallCompleted) -> Iterator[OutputEvent]:
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
            if item.pending or not item.is_started:
                text, item.pending = item.pending, ""
                yield from self._emit_text(key, item, text)
                if not item.is_complete:
                    return  # it is open now, and the others still wait
                yield from self._close_item()

    def _complete_item(self, event: ItemCompleted) -> Iterator[OutputEvent]:
        kind, current = event.item.get("type"), self._current
        if event.item.get("status") == "incomplete":
            return  # it stays open, because the server does not complete truncated items
        is_reasoning = kind == "reasoning" and current == ("reasoning", event.output_index)
        is_text = kind == "message" and current is not None and current[0] in ("text", "refusal")
        if is_reasoning or is_text:
            yield from self._close_item()
        elif kind not in STREAMED_TYPES and event.output_index not in self._seen_indices:
            yield from self._add_item(event.output_index)

    def _add_item(self, index: int) -> Iterator[OutputEvent]:
        """Emit an item without deltas, such as a search or reasoning without text, before the next one."""
        block = self._find_block(index) if self._can_open() else None
        if block is not None:  # otherwise, ``finish`` emits it
            self._seen_indices.add(index)
            yield from self._close_item()
            yield from emit_block(block, self.prefix_digest)


def emit_block(block: Block, prefix_digest: str) -> Iterator[OutputEvent]:
    """Yield the output events of a complete block."""
    match block:
        case AssistantBlock():
            for part in block.parts:
                if isinstance(part, TextPart | RefusalPart):
                    yield ItemOpened("text" if isinstance(part, TextPart) else "refusal")
                    yield ItemDelta(part.text, _read_list(part, "logprobs"))
                    yield _close_text(part)
        case ReasoningBlock():
            yield ItemOpened("reasoning")
            yield ItemDelta("\n\n".join(block.summary or block.texts))
            yield ItemClosed(model_data=pack_reasoning(block, prefix_digest))
        case ToolCallBlock():
            kind: ItemKind = "custom_tool_call" if block.custom else "function_call"
            yield ItemOpened(kind, block.name, block.call_id)
            yield ItemDelta(block.arguments)
            yield ItemClosed()
        case OpaqueBlock():
            yield ItemAdded(thaw(block.item))
        case _:
            pass


def _close_text(part: Part | None) -> ItemClosed:
    """Return the end of a text, with the annotations of the received part."""
    return ItemClosed(annotations=_read_list(part, "annotations"))


def _read_list(part: Part | None, name: str) -> tuple[Mapping[str, Any], ...]:
    """Return a list of objects that the provider attached to a text."""
    found = part.extra.get(name) if isinstance(part, TextPart) else None
    return tuple(thaw(found)) if isinstance(found, tuple) else ()
