"""Build the output items of a response from its events.

The builder of an item is found by item id, and that of a call also by ``call_id``. An unknown id may belong
to the only open item of that type at the same output index, because some servers change ids within a
stream.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple, cast

from kedge.errors import InvalidTurn
from kedge.events.fields import read_logprobs, read_message_parts, repair_surrogates
from kedge.events.tool_calls import match_items
from kedge.events.types import (
    PARTIAL,
    Event,
    ItemCompleted,
    ItemStarted,
    PartCompleted,
    PartKind,
    ReasoningDelta,
    RefusalDelta,
    TextDelta,
    ToolArgumentsDelta,
    ToolCallCompleted,
    ToolCallRenamed,
    ToolCallStarted,
)
from kedge.planning.tool_pairs import FALLBACK_CALL_ID
from kedge.text.json_text import copy_value
from kedge.turns import (
    NATIVE_API,
    AssistantBlock,
    Block,
    FrozenMap,
    ReasoningBlock,
    RefusalPart,
    Source,
    TextPart,
    ToolCallBlock,
    block_from_item,
    new_id,
)
from kedge.turns.responses_items import drop_ciphertext

log = logging.getLogger("kedge.events.output_items")

Item = Mapping[str, Any]

MESSAGE, REASONING, FUNCTION_CALL, CUSTOM_CALL = (
    "message",
    "reasoning",
    "function_call",
    "custom_tool_call",
)
"""The item types that can be built from deltas; others need the finished item."""
CALL_TYPES = (FUNCTION_CALL, CUSTOM_CALL)
_BUILT_TYPES = (MESSAGE, REASONING, *CALL_TYPES)
_TEXT_TYPES = frozenset({"output_text", "text", "refusal"})


@dataclass(slots=True)
class PartBuilder:
    """Collects the text of one part: its deltas, until the complete text arrives."""

    pieces: list[str] = field(default_factory=list[str])
    is_complete: bool = False
    logprobs: list[Mapping[str, Any]] = field(default_factory=list[Mapping[str, Any]])

    @property
    def text(self) -> str:
        """The text so far; surrogate pairs that were split between deltas are joined."""
        return repair_surrogates("".join(self.pieces))

    def complete(self, text: str) -> None:
        """Set the complete text; an empty one is ignored if there is another text."""
        known = self.text
        if known and (self.is_complete or not text):
            self.is_complete = True
            return
        if known and known != text:
            log.warning(
                "the complete text of a part (%d characters) differs from its deltas (%d characters); "
                "the complete text is used",
                len(text),
                len(known),
            )
        self.pieces, self.is_complete = [text], True


@dataclass(slots=True)
class ItemBuilder:
    """Collects the events of one output item."""

    type: str
    output_index: int
    item_id: str = ""
    block_id: str = field(default_factory=lambda: new_id("blk"))
    item: Item | None = None
    """The finished item."""
    parts: dict[tuple[PartKind, int], PartBuilder] = field(
        default_factory=dict[tuple[PartKind, int], PartBuilder]
    )
    call_id: str = ""
    name: str = ""
    arguments: PartBuilder = field(default_factory=PartBuilder)
    has_fallback_id: bool = False
    """Whether ``call_id`` is not the server's id of the call."""
    is_contradicted: bool = False
    """Whether the finished response lists another version of the finished item."""

    @property
    def is_finished(self) -> bool:
        """Whether the finished item, or the complete arguments of a call, were received."""
        return self.item is not None or (self.type in CALL_TYPES and self.arguments.is_complete)

    @property
    def is_cut(self) -> bool:
        """Whether the provider marks the item as incomplete."""
        return self.item is not None and self.item.get("status") in ("incomplete", "in_progress")

    @property
    def lacks_text(self) -> bool:
        """Whether the finished item is a message without the text that its events have."""
        return (
            self.item is not None
            and self.type == MESSAGE
            and _is_empty_message(self.item)
            and any(part.text for part in self.parts.values())
        )

    @property
    def has_content(self) -> bool:
        """Whether there is anything to build a block from."""
        return bool(self.item or self.parts or self.call_id)

    def set_item(self, item: Item) -> None:
        """Set the finished item; the first one with content is used, and a different second one is logged."""
        known = self.item
        if known is None:
            self.item = _copy_item(item)
        elif known == item:
            return
        elif not _items_differ(self._complete_item(known), self._complete_item(item)):
            if _count_annotations(item) > _count_annotations(known):
                self.item = _copy_item(item)  # some servers add them only at the end
        else:
            self.is_contradicted = self.type != REASONING
            if self.type == MESSAGE and _is_empty_message(known):
                self.item = _copy_item(item)
            log.warning(
                "item %r of type %r differs between the stream and the finished response; "
                "the %s version is used",
                self.item_id,
                self.type,
                "streamed" if self.item is known else "listed",
            )

    def build_block(
        self, response_id: str, origin: str, native_api: str = "", *, partial: bool = False
    ) -> Block | None:
        """Build the block as far as possible; None if there is nothing to build it from."""
        metadata = {
            NATIVE_API: "" if self.type in _BUILT_TYPES else native_api,
            PARTIAL: partial,
            FALLBACK_CALL_ID: self.has_fallback_id,
        }
        known = {name: value for name, value in metadata.items() if value}
        source = Source(response_id, self.item_id, self.output_index)
        identity = {"id": self.block_id, "origin": origin, "metadata": known, "source": source}
        if self.item is not None:
            return block_from_item(self._with_text(self._complete_item(self.item)), **identity)
        return self._build_from_deltas(identity)

    def _complete_item(self, item: Item) -> Item:
        """Return the item with the current id of its call, or with the role that a message omits."""
        if self.type in CALL_TYPES and self.call_id and item.get("call_id") != self.call_id:
            return {**item, "call_id": self.call_id}
        if self.type == MESSAGE and item.get("role") is None:
            return {**item, "role": "assistant"}
        return item

    def _with_text(self, item: Item) -> Item:
        """Return the item with the text of its events, if it is a message that lacks it."""
        if not self.lacks_text:
            return item
        content = [
            {"type": "refusal", "refusal": text}
            if kind == "refusal"
            else {"type": "output_text", "text": text}
            for kind, text, _ in self._iter_texts("text", "refusal")
        ]
        return {**item, "content": content}

    def _build_from_deltas(self, identity: Any) -> Block | None:
        if self.type == MESSAGE:
            parts = tuple(
                RefusalPart(text) if kind == "refusal" else _build_text(text, logprobs)
                for kind, text, logprobs in self._iter_texts("text", "refusal")
            )
            return AssistantBlock(parts, **identity) if parts else None
        if self.type == REASONING:
            summary = tuple(text for _, text, _ in self._iter_texts("summary"))
            texts = tuple(text for _, text, _ in self._iter_texts("reasoning"))
            return ReasoningBlock(summary, texts, **identity) if summary or texts else None
        if self.type in CALL_TYPES and self.name and self.call_id:
            custom = self.type == CUSTOM_CALL
            return ToolCallBlock(self.name, self.arguments.text, self.call_id, custom, **identity)
        return None

    def _iter_texts(self, *kinds: PartKind) -> Iterator[tuple[PartKind, str, list[Item]]]:
        for (kind, _), part in sorted(self.parts.items(), key=lambda entry: entry[0][1]):
            if kind in kinds and (text := part.text):
                yield kind, text, part.logprobs


def _build_text(text: str, logprobs: list[Item]) -> TextPart:
    return TextPart(text, extra=FrozenMap(logprobs=logprobs)) if logprobs else TextPart(text)


def _copy_item(item: Item) -> Item:
    """Return a copy of the item of an event, so that a consumer who changes it does not change the block."""
    try:
        return copy_value(item)
    except (RecursionError, TypeError):  # too deep for a block, or not the value of a decoder
        return item


def _is_empty_message(item: Item) -> bool:
    """Return whether a message has no content, or only empty text."""
    content: Any = item.get("content")
    if not isinstance(content, list):
        return not content
    parts = cast("list[Any]", content)
    kinds = {cast("Item", part).get("type") if isinstance(part, dict) else "" for part in parts}
    return kinds <= _TEXT_TYPES and not read_message_parts(item)


def _items_differ(one: Item, other: Item) -> bool:
    """Return whether two items differ in content that a model reads, whatever was encrypted anew."""
    try:
        return drop_ciphertext(block_from_item(one)) != drop_ciphertext(block_from_item(other))
    except InvalidTurn:
        return True


def _count_annotations(item: Item) -> int:
    """Return how many annotations the texts of a message have."""
    return sum(len(part.get("annotations") or ()) for _, _, _, part in read_message_parts(item))


class OutputBuilder:
    """Builds the output items of one response."""

    def __init__(self) -> None:
        self._items: list[ItemBuilder] = []
        self._by_item: dict[str, ItemBuilder] = {}
        self._by_call: dict[str, ItemBuilder] = {}
        self._by_index: dict[int, list[ItemBuilder]] = {}
        self._last_index = -1
        self._is_listed_otherwise = False

    @property
    def anchor_problem(self) -> str:
        """Why these items may differ from those that the server stored; empty if there is no such sign.

        A finished response lists its items once more. If the list and the stream differ, it is unknown
        which version the server stored, so the response proves nothing about the server's memory.
        """
        for slot in self._items:
            if slot.is_contradicted or slot.lacks_text:
                return (
                    f"item {slot.item_id!r} of type {slot.type!r} differs in the finished response"
                )
            if slot.has_fallback_id:
                return f"the server sent no usable call_id for its call of {slot.name!r}"
        if self._is_listed_otherwise:
            return "the finished response lists other items than the stream"
        return ""

    def sorted_items(self) -> list[ItemBuilder]:
        """Return the items in output order."""
        return sorted(self._items, key=attrgetter("output_index"))

    def unstreamed_text(self) -> Iterator[TextDelta | RefusalDelta]:
        """Yield deltas with the text of messages that only finished items contain."""
        for slot in self.sorted_items():
            streamed = any(part.text for part in slot.parts.values())
            if slot.type == MESSAGE and slot.item is not None and not streamed:
                for kind, at, text, part in read_message_parts(slot.item):
                    place = slot.item_id, slot.output_index, at
                    if kind == "text":
                        yield TextDelta(text, *place, read_logprobs(part))
                    else:
                        yield RefusalDelta(text, *place)

    def add_text(self, event: TextDelta) -> None:
        """Add text to a message."""
        part = self._find_part(MESSAGE, event, "text", event.content_index)
        if not part.is_complete:
            part.pieces.append(event.delta)
            if event.logprobs:
                part.logprobs += event.logprobs

    def add_refusal(self, event: RefusalDelta) -> None:
        """Add text to a refusal."""
        part = self._find_part(MESSAGE, event, "refusal", event.content_index)
        if not part.is_complete:
            part.pieces.append(event.delta)

    def add_reasoning(self, event: ReasoningDelta) -> None:
        """Add text to a reasoning summary or to the reasoning itself."""
        part = self._find_part(REASONING, event, event.kind, event.index)
        if not part.is_complete:
            part.pieces.append(event.delta)

    def complete_part(self, event: PartCompleted) -> None:
        """Set the complete text of a part."""
        kind = MESSAGE if event.kind in ("text", "refusal") else REASONING
        self._find_part(kind, event, event.kind, event.index).complete(event.text)

    def start_call(self, event: ToolCallStarted) -> None:
        """Start a tool call."""
        if event.call_id not in self._by_call:
            kind = CUSTOM_CALL if event.custom else FUNCTION_CALL
            slot = self._add_item(kind, event.item_id, event.output_index)
            slot.call_id, slot.name = event.call_id, event.name
            slot.has_fallback_id = bool(event.fallback)
            self._by_call[event.call_id] = slot

    def add_arguments(self, event: ToolArgumentsDelta) -> None:
        """Add to the arguments of a call."""
        slot = self._by_call.get(event.call_id)
        if slot is not None and not slot.arguments.is_complete:
            slot.arguments.pieces.append(event.delta)

    def rename_call(self, event: ToolCallRenamed) -> None:
        """Change the id of a call to the provider's id."""
        slot = self._by_call.pop(event.was, None)
        if slot is not None:
            slot.call_id = event.call_id
            slot.has_fallback_id = False
            self._by_call[event.call_id] = slot

    def complete_call(self, event: ToolCallCompleted) -> None:
        """Complete a tool call."""
        self.start_call(
            ToolCallStarted(
                event.call_id, event.name, event.item_id, event.output_index, event.custom
            )
        )
        slot = self._by_call[event.call_id]
        slot.name = event.name
        slot.arguments = PartBuilder([event.arguments], is_complete=True)

    def start_item(self, event: ItemStarted) -> None:
        """Start an item."""
        self._find_item(event.type, event.item_id, event.output_index, match_other_ids=False)

    def complete_item(self, event: ItemCompleted) -> None:
        """Complete an item; the first finished version is used."""
        item_id, item_type, call_id = _item_keys(event.item)
        slot = self._by_call.get(call_id)
        if slot is None:
            slot = self._find_item(item_type, item_id, event.output_index)
        slot.set_item(event.item)

    def merge_listed(self, items: tuple[Item, ...]) -> None:
        """Add the items that the finished response lists and the stream did not contain."""
        listed = [_ListedItem(index, *_item_keys(item)) for index, item in enumerate(items)]
        known = match_items(
            listed,
            self._items,
            (attrgetter("call_id"), attrgetter("call_id")),
            (lambda each: id(self._by_item.get(each.item_id)), id),
            (lambda each: (each.position, each.type), lambda slot: (slot.output_index, slot.type)),
            (attrgetter("type"), attrgetter("type")),
        )
        order: list[ItemBuilder] = []
        for each, item, slot in zip(listed, items, known, strict=True):
            filled = slot or self._add_item(each.type, each.item_id, each.position)
            filled.call_id = filled.call_id or each.call_id
            filled.set_item(item)
            order.append(filled)
        # An empty list is from a server that does not list its items.
        visible = [slot for slot in self.sorted_items() if slot.has_content]
        self._is_listed_otherwise = bool(items) and (
            [id(slot) for slot in visible if slot.type != REASONING]
            != [id(slot) for slot in order if slot.type != REASONING]
        )

    # Find the item that an event belongs to.

    def _find_part(self, kind: str, event: Any, part: PartKind, index: int) -> PartBuilder:
        slot = self._by_item.get(event.item_id)
        if slot is None:
            slot = self._find_item(kind, event.item_id, event.output_index)
        key = (part, index)
        found = slot.parts.get(key)
        if found is None:
            found = slot.parts[key] = PartBuilder()
        return found

    def _find_item(
        self, kind: str, item_id: str, output_index: int, *, match_other_ids: bool = True
    ) -> ItemBuilder:
        """Return this item, else the only open one at its index, else a new one."""
        slot = self._by_item.get(item_id)
        if slot is not None and slot.item and output_index not in (-1, slot.output_index):
            slot = None  # that item is finished; this is another one with the same id
        if slot is None:
            slots = [
                slot
                for slot in self._by_index.get(output_index, ())
                if slot.type == kind
                and slot.item is None
                and (match_other_ids or not (slot.item_id and item_id))
            ]
            slot = slots[0] if len(slots) == 1 else self._add_item(kind, item_id, output_index)
        if item_id:
            slot.item_id = slot.item_id or item_id
            self._by_item[item_id] = slot
        return slot

    def _add_item(self, kind: str, item_id: str, output_index: int) -> ItemBuilder:
        index = output_index if output_index >= 0 else self._last_index + 1
        self._last_index = max(self._last_index, index)
        slot = ItemBuilder(kind, index, item_id)
        self._items.append(slot)
        self._by_index.setdefault(output_index, []).append(slot)
        if item_id:
            self._by_item[item_id] = slot
        return slot


class _ListedItem(NamedTuple):
    """The keys of an item that the finished response lists."""

    position: int
    item_id: str
    type: str
    call_id: str


def _item_keys(item: Item) -> tuple[str, str, str]:
    """Return the item's id, its type and, of a call, its call id."""
    item_id, item_type, call_id = item.get("id"), item.get("type", MESSAGE), item.get("call_id")
    return (
        item_id if isinstance(item_id, str) else "",
        item_type if isinstance(item_type, str) else "",
        call_id if isinstance(call_id, str) and item_type in CALL_TYPES else "",
    )


EVENT_HANDLERS: dict[type[Event], Callable[[OutputBuilder, Any], None]] = {
    TextDelta: OutputBuilder.add_text,
    RefusalDelta: OutputBuilder.add_refusal,
    ReasoningDelta: OutputBuilder.add_reasoning,
    PartCompleted: OutputBuilder.complete_part,
    ToolCallStarted: OutputBuilder.start_call,
    ToolArgumentsDelta: OutputBuilder.add_arguments,
    ToolCallRenamed: OutputBuilder.rename_call,
    ToolCallCompleted: OutputBuilder.complete_call,
    ItemStarted: OutputBuilder.start_item,
    ItemCompleted: OutputBuilder.complete_item,
}
"""The method that applies each type of event."""
