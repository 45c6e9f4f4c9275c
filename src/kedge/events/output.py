"""The items of a response as they grow, each in its slot.

A slot is found by the item's id, a call's also by its ``call_id``; an id that nobody has heard of yet may
belong to the only open item of that type at the same place, for not every server keeps to its ids.
"""

from collections.abc import Callable
from operator import attrgetter
from typing import Any

from kedge.events.pairing import paired
from kedge.events.slots import CALL, CALLS, CUSTOM_CALL, MESSAGE, REASONING, Item, Part, Slot
from kedge.events.types import (
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


class Output:
    """The slots of one response."""

    def __init__(self) -> None:
        self._slots: list[Slot] = []
        self._by_item: dict[str, Slot] = {}
        self._by_call: dict[str, Slot] = {}
        self._by_place: dict[int, list[Slot]] = {}
        self._last = -1

    def slots(self) -> list[Slot]:
        """The slots in the order of the output."""
        return sorted(self._slots, key=attrgetter("output_index"))

    def text(self, event: TextDelta) -> None:
        """Text of a message."""
        part = self._part(MESSAGE, event, "text", event.content_index)
        if not part.whole:
            part.pieces.append(event.delta)

    def refusal(self, event: RefusalDelta) -> None:
        """Words of a refusal."""
        part = self._part(MESSAGE, event, "refusal", event.content_index)
        if not part.whole:
            part.pieces.append(event.delta)

    def reasoning(self, event: ReasoningDelta) -> None:
        """A piece of a summary or of the reasoning itself."""
        part = self._part(REASONING, event, event.kind, event.index)
        if not part.whole:
            part.pieces.append(event.delta)

    def part(self, event: PartCompleted) -> None:
        """The whole of a part."""
        kind = MESSAGE if event.kind in ("text", "refusal") else REASONING
        self._part(kind, event, event.kind, event.index).complete(event.text)

    def call_started(self, event: ToolCallStarted) -> None:
        """A call begins."""
        if event.call_id not in self._by_call:
            kind = CUSTOM_CALL if event.custom else CALL
            slot = self._new(kind, event.item_id, event.output_index)
            slot.call_id, slot.name = event.call_id, event.name
            self._by_call[event.call_id] = slot

    def arguments(self, event: ToolArgumentsDelta) -> None:
        """Some of a call's arguments."""
        slot = self._by_call.get(event.call_id)
        if slot is not None and not slot.arguments.whole:
            slot.arguments.pieces.append(event.delta)

    def call_renamed(self, event: ToolCallRenamed) -> None:
        """The provider's own id of a call."""
        slot = self._by_call.pop(event.was, None)
        if slot is not None:
            slot.call_id = event.call_id
            self._by_call[event.call_id] = slot

    def call_completed(self, event: ToolCallCompleted) -> None:
        """A call is whole."""
        self.call_started(
            ToolCallStarted(
                event.call_id, event.name, event.item_id, event.output_index, event.custom
            )
        )
        slot = self._by_call[event.call_id]
        slot.name = event.name
        slot.arguments = Part([event.arguments], whole=True)

    def item_started(self, event: ItemStarted) -> None:
        """An item begins."""
        self._slot(event.type, event.item_id, event.output_index, strangers=False)

    def item_completed(self, event: ItemCompleted) -> None:
        """An item is whole; the first to say so counts."""
        item_id, item_type, call_id = _names(event.item)
        slot = self._by_call.get(call_id)
        if slot is None:
            slot = self._slot(item_type, item_id, event.output_index)
        slot.fill(event.item)

    def listed(self, items: tuple[Item, ...]) -> None:
        """The finished response lists its items; what the stream did not bring is taken from there."""
        listed = list(enumerate(items))
        known = paired(
            listed,
            self._slots,
            (lambda at: _names(at[1])[2], lambda slot: slot.call_id),
            (lambda at: id(self._by_item.get(_names(at[1])[0])), id),
            (lambda at: (at[0], _names(at[1])[1]), lambda slot: (slot.output_index, slot.type)),
            (lambda at: _names(at[1])[1], lambda slot: slot.type),
        )
        for (at, item), slot in zip(listed, known, strict=True):
            item_id, item_type, call_id = _names(item)
            filled = slot or self._new(item_type, item_id, at)
            filled.call_id = filled.call_id or call_id
            filled.fill(item)

    # Finding the slot that an event speaks of.

    def _part(self, kind: str, event: Any, part: PartKind, index: int) -> Part:
        slot = self._by_item.get(event.item_id)
        if slot is None:
            slot = self._slot(kind, event.item_id, event.output_index)
        key = (part, index)
        found = slot.parts.get(key)
        if found is None:
            found = slot.parts[key] = Part()
        return found

    def _slot(self, kind: str, item_id: str, output_index: int, *, strangers: bool = True) -> Slot:
        """The slot of this item, or the only open one at its place, or a new one."""
        slot = self._by_item.get(item_id)
        if slot is not None and slot.item and output_index not in (-1, slot.output_index):
            slot = None  # that item is whole; this is another one under the same id
        if slot is None:
            here = [
                slot
                for slot in self._by_place.get(output_index, ())
                if slot.type == kind
                and slot.item is None
                and (strangers or not (slot.item_id and item_id))
            ]
            slot = here[0] if len(here) == 1 else self._new(kind, item_id, output_index)
        if item_id:
            slot.item_id = slot.item_id or item_id
            self._by_item[item_id] = slot
        return slot

    def _new(self, kind: str, item_id: str, output_index: int) -> Slot:
        place = output_index if output_index >= 0 else self._last + 1
        self._last = max(self._last, place)
        slot = Slot(kind, place, item_id)
        self._slots.append(slot)
        self._by_place.setdefault(output_index, []).append(slot)
        if item_id:
            self._by_item[item_id] = slot
        return slot


def _names(item: Item) -> tuple[str, str, str]:
    """The item's id, its type, and its call id if it is a call."""
    item_id, item_type, call_id = item.get("id"), item.get("type", MESSAGE), item.get("call_id")
    return (
        item_id if isinstance(item_id, str) else "",
        item_type if isinstance(item_type, str) else "",
        call_id if isinstance(call_id, str) and item_type in CALLS else "",
    )


TAKERS: dict[type[Event], Callable[[Output, Any], None]] = {
    TextDelta: Output.text,
    RefusalDelta: Output.refusal,
    ReasoningDelta: Output.reasoning,
    PartCompleted: Output.part,
    ToolCallStarted: Output.call_started,
    ToolArgumentsDelta: Output.arguments,
    ToolCallRenamed: Output.call_renamed,
    ToolCallCompleted: Output.call_completed,
    ItemStarted: Output.item_started,
    ItemCompleted: Output.item_completed,
}
"""What fills the slots, and how."""
