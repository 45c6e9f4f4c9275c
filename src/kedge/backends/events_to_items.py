"""From the events of an engine to the pieces of the server's answer.

The server writes one item after another, while a provider may write several at once. So one item is
open at a time: text and thoughts end where the next item begins; a call stays open until it is whole, and
what is written beside it waits. Whatever the stream did not tell is taken from the finished answer.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

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
    Usage,
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
    OUTPUT_INDEX,
    AssistantBlock,
    Block,
    OpaqueBlock,
    ReasoningBlock,
    RefusalPart,
    TextPart,
    ToolCallBlock,
)

ItemKey = tuple[str, object]
"""Which item a piece belongs to: what it is, and where, or under which call id."""


@dataclass(slots=True)
class _PendingItem:
    """An item on its way: how it opens, what of it was told, what waits, whether it is whole."""

    opened: ItemOpened
    output_index: int
    emitted: list[str] = field(default_factory=list[str])
    pending: str = ""
    is_started: bool = False
    is_complete: bool = False
    index: int = 0


@dataclass(slots=True)
class OutputEmitter:
    """Tells one answer; ``before`` is the digest of what was asked."""

    prefix_digest: str
    assembler: Assembler = field(default_factory=Assembler)
    _current: ItemKey | None = None
    _items: dict[ItemKey, _PendingItem] = field(default_factory=dict[ItemKey, _PendingItem])
    _call_ids: dict[str, str] = field(default_factory=dict[str, str])
    _seen_indices: set[int] = field(default_factory=set[int])

    def feed(self, event: Event) -> Iterator[OutputEvent]:
        """Tell what an event adds to the answer."""
        self.assembler.feed(event)
        match event:
            case TextDelta():
                place = ("text", (event.output_index, event.content_index))
                yield from self._append_text(place, "text", event.output_index, event.delta)
            case RefusalDelta():
                place = ("refusal", (event.output_index, event.content_index))
                yield from self._append_text(place, "refusal", event.output_index, event.delta)
            case ReasoningDelta():
                yield from self._add_reasoning(event)
            case PartCompleted(kind="text" | "refusal" as kind):
                place = (kind, (event.output_index, event.index))
                rest = self._remaining_text(place, event.text)
                yield from self._append_text(place, kind, event.output_index, rest)
            case ToolCallStarted():
                yield from self._start_call(event)
            case ToolArgumentsDelta():
                yield from self._append_arguments(event.call_id, event.delta)
            case ToolCallRenamed():
                self._call_ids[event.call_id] = self._call_ids.get(event.was, event.was)
            case ToolCallCompleted():
                yield from self._complete_call(event)
            case ItemCompleted():
                yield from self._complete_item(event)
            case _:
                pass

    def finish(self, outcome: Outcome) -> Iterator[OutputEvent]:
        """Tell the rest: what waits, and what the stream never told."""
        for item in self._items.values():
            item.is_complete = True
        yield from self._flush()
        for block in outcome.blocks:
            if block.metadata.get(OUTPUT_INDEX) not in self._seen_indices:
                yield from emit_block(block, self.prefix_digest)
        if outcome.usage is not None:
            yield convert_usage(outcome.usage)

    # Text, refusals and thoughts.

    def _add_reasoning(self, event: ReasoningDelta) -> Iterator[OutputEvent]:
        place = ("reasoning", event.output_index)
        item = self._items.get(place)
        gap = "\n\n" if item is not None and item.emitted and item.index != event.index else ""
        yield from self._append_text(place, "reasoning", event.output_index, gap + event.delta)
        self._items[place].index = event.index

    def _append_text(
        self, key: ItemKey, kind: ItemKind, output_index: int, text: str
    ) -> Iterator[OutputEvent]:
        item = self._items.get(key)
        if item is None:
            item = self._items[key] = _PendingItem(ItemOpened(kind), output_index)
            self._seen_indices.add(output_index)
        yield from self._emit_text(key, item, text)

    def _emit_text(self, key: ItemKey, item: _PendingItem, text: str) -> Iterator[OutputEvent]:
        """Tell some text of an item, now or later."""
        if key != self._current and not self._can_open():
            item.pending += text
            return
        if key != self._current:
            yield from self._open_item(key, item)
        if text:
            item.emitted.append(text)
            yield ItemDelta(text)

    def _can_open(self) -> bool:
        """Whether another item may begin: not beside a call that is still written."""
        return self._current is None or self._current[0] != "call"

    def _open_item(self, key: ItemKey, item: _PendingItem) -> Iterator[OutputEvent]:
        yield from self._close_item()
        self._current = key
        item.is_started = True
        yield item.opened

    def _close_item(self) -> Iterator[OutputEvent]:
        """End the open item."""
        if self._current is None:
            return
        kind, index = self._current
        self._current = None
        kept = self._find_reasoning_payload(index) if kind == "reasoning" else None
        yield ItemClosed(model_data=kept)

    def _find_reasoning_payload(self, index: object) -> object:
        for block in self.assembler.blocks():
            if isinstance(block, ReasoningBlock) and block.metadata.get(OUTPUT_INDEX) == index:
                return pack_reasoning(block, self.prefix_digest)
        return None

    def _remaining_text(self, key: ItemKey, text: str) -> str:
        """What of a finished part was not told yet."""
        item = self._items.get(key)
        told = "".join(item.emitted) + item.pending if item is not None else ""
        return text[len(told) :] if text.startswith(told) else ""

    # Calls.

    def _start_call(self, event: ToolCallStarted) -> Iterator[OutputEvent]:
        kind: ItemKind = "custom_tool_call" if event.custom else "function_call"
        place = ("call", event.call_id)
        if place in self._items:
            return
        item = _PendingItem(ItemOpened(kind, event.name, event.call_id), event.output_index)
        self._items[place] = item
        self._seen_indices.add(event.output_index)
        yield from self._emit_text(place, item, "")

    def _append_arguments(self, call_id: str, text: str) -> Iterator[OutputEvent]:
        place = ("call", self._call_ids.get(call_id, call_id))
        item = self._items.get(place)
        if item is not None:
            yield from self._emit_text(place, item, text)

    def _complete_call(self, event: ToolCallCompleted) -> Iterator[OutputEvent]:
        place = ("call", self._call_ids.get(event.call_id, event.call_id))
        if place not in self._items:
            yield from self._start_call(
                ToolCallStarted(
                    event.call_id, event.name, event.item_id, event.output_index, event.custom
                )
            )
        item = self._items[place]
        if item.is_complete:
            return
        yield from self._emit_text(place, item, self._remaining_text(place, event.arguments))
        item.is_complete = True
        if place == self._current:
            yield from self._flush()

    def _flush(self) -> Iterator[OutputEvent]:
        """End the open item, and tell what waited behind it as far as it goes."""
        yield from self._close_item()
        for place, item in self._items.items():
            if item.pending or not item.is_started:
                text, item.pending = item.pending, ""
                yield from self._emit_text(place, item, text)
                if not item.is_complete:
                    return  # it is open now, and the others wait on
                yield from self._close_item()

    def _complete_item(self, event: ItemCompleted) -> Iterator[OutputEvent]:
        kind, current = event.item.get("type"), self._current
        if event.item.get("status") == "incomplete":
            return  # it stays open: so does the server leave what was cut short
        thought = kind == "reasoning" and current == ("reasoning", event.output_index)
        said = kind == "message" and current is not None and current[0] in ("text", "refusal")
        if thought or said:
            yield from self._close_item()


def emit_block(block: Block, prefix_digest: str) -> Iterator[OutputEvent]:
    """Tell a whole block."""
    match block:
        case AssistantBlock():
            for part in block.parts:
                if isinstance(part, TextPart | RefusalPart):
                    yield ItemOpened("text" if isinstance(part, TextPart) else "refusal")
                    yield ItemDelta(part.text)
                    yield ItemClosed()
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
            yield ItemAdded(dict(block.item))
        case _:
            pass


def convert_usage(usage: Usage) -> ModelUsage:
    """What an answer took, as the provider counts it."""
    return ModelUsage(
        usage.input_tokens, usage.output_tokens, usage.cached_tokens, usage.reasoning_tokens
    )
