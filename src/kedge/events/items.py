"""The item table of a response stream: it decides which output item an event belongs to.

Servers identify an item by its id, by its ``call_id`` and by its ``output_index``, and none of them is reliable.
llama.cpp sends no ``output_index`` and no ids of calls, whose argument deltas have the call id instead. Others change
ids between events, use one id or one index for two items, or omit the start of an item. So an item is looked up
by item id, then by call id, then as the only open item of its type at its index (or of all, if the event has no
index), and an event that contradicts the index of a match is not assigned to it.

Every item has an index of its own: the server's, or the next free one if there is none or another item has it. All
events of the item carry this index, so nothing after the decoder has to match items again.
"""

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from kedge.events.fields import CALL_ARGUMENTS, JsonObject

Role = Literal["start", "part", "end"]
"""What an event is for its item: its start, a part of its content, or its end."""


_CALL = "function_call"


@dataclass(slots=True, eq=False)
class OutputItem:
    """An output item of a stream.

    Attributes:
        type: The item's type.
        item_id: The provider's id of the item.
        output_index: The position of the item in the output, which no other item has.
        completed: Whether the item is complete.
    """

    type: str
    item_id: str = ""
    output_index: int = -1
    completed: bool = False


@dataclass(slots=True, eq=False)
class ToolCall(OutputItem):
    """A tool call of a stream, with the data received so far.

    Attributes:
        call_id: The id that connects the call to its result.
        name: The tool's name.
        fallback: Why ``call_id`` is not the provider's own; empty if it is.
        final_arguments: The complete arguments, once the provider has sent them.
        pieces: The argument deltas so far.
        cut: Whether the model was stopped before the call was complete.
    """

    call_id: str = ""
    name: str = ""
    fallback: str = ""
    final_arguments: str | None = None
    pieces: list[str] = field(default_factory=list[str])
    cut: bool = False

    @property
    def custom(self) -> bool:
        """Whether the tool takes free-form input instead of JSON arguments."""
        return self.type == "custom_tool_call"

    @property
    def arguments(self) -> str:
        """The complete arguments if they were sent, else the joined deltas."""
        return self.final_arguments or "".join(self.pieces)

    def to_item(self) -> JsonObject:
        """Return the finished item in the form of the Responses API."""
        member = CALL_ARGUMENTS[self.type]
        call = {"type": self.type, "call_id": self.call_id, "name": self.name}
        return {**call, member: self.arguments}


class ItemTable:
    """The output items of one response.

    Attributes:
        items: The items by output index.
        calls: The tool calls by ``call_id``.
    """

    def __init__(self) -> None:
        self.items: dict[int, OutputItem] = {}
        self.calls: dict[str, ToolCall] = {}
        self._by_id: dict[tuple[str, str], OutputItem] = {}
        self._by_sent_index: dict[int, list[OutputItem]] = {}
        self._next_index = 0

    def place(self, role: Role, kind: str, item_id: str, output_index: int) -> OutputItem:
        """Return the item of an event that is not about a call; a new one if it is not known.

        Args:
            role: What the event is for its item.
            kind: The type of the item.
            item_id: The provider's id of the item.
            output_index: The index that the server sent, or -1.
        """
        found = self.find(role, kind, item_id, output_index)
        return found or self.add(OutputItem(kind, item_id, output_index))

    def find(
        self, role: Role, kind: str, item_id: str, output_index: int, call_id: str = ""
    ) -> OutputItem | None:
        """Return the item that an event belongs to, or None; ``call_id`` is that of a call, if it is known."""
        family = _family(kind)
        here = [
            each
            for each in self._by_sent_index.get(output_index, ())
            if _family(each.type) == family
        ]
        item = self._by_id.get((family, item_id))
        if item is not None and output_index >= 0 and item not in here:
            same = [each for each in here if each.item_id == item_id]
            item = same[0] if same else item if _may_move(item, role, call_id) else None
        if item is None and family == _CALL:
            called = self.calls.get(call_id or item_id) or self._by_id.get((family, call_id))
            item = called if called and (output_index < 0 or called in here) else None
        if item is None:
            item = self._find_open(role, item_id, family, here if output_index >= 0 else None)
        return self._add_name(item, item_id) if item is not None else None

    def add(self, item: OutputItem) -> OutputItem:
        """Add an item, at the next free index if it has none or if another item has it."""
        sent = item.output_index
        if sent < 0 or sent in self.items:
            item.output_index = self._next_index
        self._next_index = max(self._next_index, item.output_index + 1)
        self.items[item.output_index] = item
        self._by_sent_index.setdefault(sent if sent >= 0 else item.output_index, []).append(item)
        return self._add_name(item, item.item_id)

    def match_listed(self, listed: Sequence[OutputItem]) -> list[OutputItem | None]:
        """Return the known item of each item that a finished response lists, at its position there."""

        def find_named(item: OutputItem) -> OutputItem | None:
            return self._by_id.get((_family(item.type), item.item_id))

        def get_place(item: OutputItem) -> Hashable:
            return item.output_index, _family(item.type)

        return match_items(
            listed,
            [self.items[index] for index in sorted(self.items)],
            (lambda each: (find_named(each), _call_id(each)), lambda item: (item, _call_id(item))),
            (_call_id, _call_id),
            (find_named, lambda item: item),
            (get_place, get_place),
            (lambda each: each.type, lambda item: item.type),
        )

    def _find_open(
        self, role: Role, item_id: str, family: str, here: list[OutputItem] | None
    ) -> OutputItem | None:
        """Return the only open item of this type, of those at the index of the event if it has one."""
        if here is None and role == "start":
            return None
        known = self.items.values() if here is None else here
        same = [each for each in known if _family(each.type) == family]
        found = [each for each in same if not each.completed]
        if role == "part" and not found and family == _CALL:
            found = same  # late arguments of a complete call add nothing
        elif here is None:
            found = [each for each in found if not _has_name(each)] or found
        elif role == "start":
            found = [each for each in found if not (each.item_id and item_id)]
        return found[0] if len(found) == 1 else None

    def _add_name(self, item: OutputItem, item_id: str) -> OutputItem:
        if item_id:
            item.item_id = item.item_id or item_id
            self._by_id[_family(item.type), item_id] = item
        return item


def _may_move(item: OutputItem, role: Role, call_id: str) -> bool:
    """Return whether an event with the item's id and another index can belong to the item."""
    if not isinstance(item, ToolCall):
        return not item.completed
    return role == "part" or call_id in ("", item.call_id) or bool(item.fallback)


def _family(kind: str) -> str:
    """Return the type of an item, which is the same for all calls."""
    return _CALL if kind in CALL_ARGUMENTS else kind


def _has_name(item: OutputItem) -> bool:
    """Return whether the server sent an id of the item."""
    return bool(item.item_id or (isinstance(item, ToolCall) and not item.fallback))


def _call_id(item: OutputItem) -> str:
    return item.call_id if isinstance(item, ToolCall) else ""


Listed = TypeVar("Listed")
Known = TypeVar("Known")
MatchKey = tuple[Callable[[Listed], Hashable], Callable[[Known], Hashable]]


def match_items(
    listed: Sequence[Listed], known: Sequence[Known], *keys: "MatchKey[Listed, Known]"
) -> list[Known | None]:
    """Match two lists by several keys, the most reliable one first.

    Args:
        listed: The entries to find.
        known: The entries to choose from; each is matched at most once.
        *keys: Pairs of functions that return the key of a listed and of a known entry; None and an empty
            string match nothing.

    Returns:
        For each entry of ``listed`` the matching entry of ``known``, or None.
    """
    matches: list[Known | None] = [None] * len(listed)
    left_over, unclaimed = list(range(len(listed))), list(range(len(known)))
    for listed_key, known_key in keys:
        if not left_over or not unclaimed:
            break
        waiting: dict[Hashable, deque[int]] = {}
        for at in unclaimed:
            waiting.setdefault(known_key(known[at]), deque()).append(at)
        claimed: set[int] = set()
        for at in left_over:
            key = listed_key(listed[at])
            if key not in (None, "") and (found := waiting.get(key)):
                claimed.add(found[0])
                matches[at] = known[found.popleft()]
        left_over = [at for at in left_over if matches[at] is None]
        unclaimed = [at for at in unclaimed if at not in claimed]
    return matches
