"""The item table of a response stream: the life cycle of its output items, and the ids of its tool calls.

The table decides which output item an event belongs to. Servers identify an item by its id, by its ``call_id`` and by
its ``output_index``, and none of them is reliable. llama.cpp sends no ``output_index`` and no ids of calls, whose
argument deltas have the call id instead. Others change ids between events, use one id or one index for two items, or
omit the start of an item. So an item is looked up by item id, then by call id, then as the only open item of its type
at its index (or of all, if the event has no index), and an event that contradicts the index of a match is not assigned
to it. Every item has an index of its own: the server's, or the next free one if there is none or another item has it.
All events of the item carry this index, so nothing after the decoder has to match items again.

A call has two ids. ``call_id`` connects the call to its result and is visible to the model; ``item_id`` identifies the
item within the stream, and is the only id that an argument delta has. A wrong match runs a tool with another call's
arguments, and servers omit ``call_id`` or send it only with the finished item, use one id for two calls, and send
arguments before the call that they belong to. A call without a usable ``call_id`` is identified by its ``item_id`` or
by a local id (logged with the reason and counted), which the provider's id replaces as soon as an event has it. Early
arguments wait for their call. Calls and arguments that are still unmatched at the end are ``unresolved``, and a
response with an unresolved call is never complete.

Decoders pass items in the form of the Responses API.
"""

import logging
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import repeat
from operator import attrgetter
from typing import Literal, cast

import msgspec
from msgspec.structs import replace

from kedge.events import types
from kedge.events.types import ToolArgumentsDelta
from kedge.observe import get_logger
from kedge.turns import new_id
from kedge.wire.fields import CALL_ARGUMENTS, JsonObject, get_arguments, get_text

log = get_logger(__name__)

Role = Literal["start", "part", "end"]
"""What an event is for its item: its start, a part of its content, or its end."""
NameResolver = Callable[[str, bool], str]
"""Returns the name of a call from its arguments and from whether it is free-form; empty if uncertain."""
_CALL = "function_call"


class OutputItem(msgspec.Struct, eq=False):
    """An output item of a stream.

    Attributes:
        type: The item's type.
        item_id: The provider's id of the item.
        output_index: The position of the item in the output, which no other item has.
        completed: Whether the item is complete.
        call_id: The id that connects a tool call to its result; empty for other items.
    """

    type: str
    item_id: str = ""
    output_index: int = -1
    completed: bool = False
    call_id: str = ""


class ToolCall(OutputItem, eq=False):
    """A tool call of a stream, with the data received so far.

    Attributes:
        name: The tool's name.
        fallback: Why ``call_id`` is not the provider's own; empty if it is.
        final_arguments: The complete arguments, once the provider has sent them.
        pieces: The argument deltas so far.
        cut: Whether the model was stopped before the call was complete.
    """

    name: str = ""
    fallback: str = ""
    final_arguments: str | None = None
    pieces: list[str] = []
    cut: bool = False

    @property
    def custom(self) -> bool:
        """Whether the tool takes free-form input instead of JSON arguments."""
        return self.type == "custom_tool_call"

    @property
    def arguments(self) -> str:
        """The complete arguments if they were sent, else the joined deltas."""
        return self.final_arguments or "".join(self.pieces)

    def complete_item(self, item: JsonObject) -> JsonObject:
        """Return the item of the call, in the form of the Responses API, with its id, name and arguments."""
        arguments_member = CALL_ARGUMENTS[item["type"]]
        members = {"call_id": self.call_id, "name": self.name, arguments_member: self.arguments}
        if members.items() <= item.items():
            return item
        return {**item, **members}


def read_item(item: JsonObject, output_index: int) -> OutputItem:
    """Return an item as its members describe it; of a call also whether its ``call_id`` is usable."""
    kind = "message"  # some servers omit the type of a message
    if "type" in item:
        kind = get_text(item, "type")
    item_id = get_text(item, "id")
    if kind not in CALL_ARGUMENTS:
        return OutputItem(kind, item_id, output_index)
    call_id, problem = read_call_id(item.get("call_id"))
    return ToolCall(
        kind,
        item_id,
        output_index,
        call_id=call_id,
        name=get_text(item, "name"),
        fallback=problem,
        final_arguments=get_arguments(item, CALL_ARGUMENTS[kind]),
        cut=item.get("status") == "incomplete",
    )


def read_call_id(value: object) -> tuple[str, str]:
    """Return an id if it is usable, else an empty string and why it is not."""
    if value is None:
        return "", "missing"
    if not isinstance(value, str):
        return "", "malformed"
    if not value.strip():
        return "", "empty"
    return value, ""


class CallSummary(msgspec.Struct, frozen=True):
    """All calls of a response in output order, and how their ids were found.

    Attributes:
        completed: The ids of complete calls.
        open: The ids of calls that are not complete.
        extracted: How many calls came with a usable ``call_id``.
        fallen_back: How many calls got a fallback id.
        corrected: How many fallback ids were replaced by the provider's id later.
        failed: How many calls or arguments could not be resolved.
    """

    completed: tuple[str, ...]
    open: tuple[str, ...]
    extracted: int
    fallen_back: int
    corrected: int
    failed: int


def _log_call(level: int, text: str, call_id: str, *details: object) -> None:
    """Log a sentence about a call, with its id in the message and in a field."""
    log.log(level, "tool call %r " + text, call_id, *details, call_id=call_id)


class ItemTable:
    """The output items of one response.

    Attributes:
        events: The events to emit; a decoder adds its own, and takes them.
        items: The items by output index.
        calls: The tool calls by ``call_id``.
        extracted: How many calls came with a usable ``call_id``.
        fallen_back: How many calls got a fallback id.
        corrected: How many fallback ids were replaced by the provider's id later.
        failed: How many calls or arguments could not be resolved.
        inferred: How many calls came without a name that could be inferred.
        infer_name: A function that infers the name of a call that came without one.
    """

    infer_name: NameResolver | None = None

    def __init__(self) -> None:
        self.events: list[types.StreamEvent] = []
        self.items: dict[int, OutputItem] = {}
        self.calls: dict[str, ToolCall] = {}
        self.extracted = 0
        self.fallen_back = 0
        self.corrected = 0
        self.failed = 0
        self.inferred = 0
        self._by_id: dict[tuple[str, str], OutputItem] = {}
        """The items by family and by every id that an event of the item had."""
        self._by_sent_index: dict[int, list[OutputItem]] = {}
        """The items by the index that the server sent, which several may share."""
        self._next_index = 0
        self._owners: dict[tuple[str, int], ToolCall] = {}
        """The calls by the item id and the index of argument deltas, because most events are deltas."""
        self._pending: dict[tuple[str, int], ToolCall] = {}
        """The arguments that wait for their call, by the same."""

    def sorted_calls(self) -> list[ToolCall]:
        """Return the calls in output order."""
        return sorted(self.calls.values(), key=attrgetter("output_index"))

    def summary(self) -> CallSummary:
        """Return all call ids in output order, with the counts."""
        calls = self.sorted_calls()
        return CallSummary(
            tuple(call.call_id for call in calls if call.completed),
            tuple(call.call_id for call in calls if not call.completed),
            self.extracted,
            self.fallen_back,
            self.corrected,
            self.failed,
        )

    def log_summary(self) -> None:
        """Log the calls of the response, if there are any."""
        if (self.calls or self.failed) and log.isEnabledFor(logging.INFO):
            log.info("tool calls: %s", self.summary(), call_id=",".join(self.calls))

    # The life cycle of an item.

    def start(self, event_item: OutputItem) -> None:
        """Start an item; a repeated start changes nothing.

        Args:
            event_item: The item as the event describes it.
        """
        item = self._find("start", event_item)
        if not isinstance(event_item, ToolCall):
            item = item or self._add(event_item)
            self.events.append(
                types.ItemStarted(event_item.type, event_item.item_id, item.output_index)
            )
        elif isinstance(item, ToolCall):
            item.name = item.name or event_item.name
            self._rename(item, event_item.call_id)
        else:
            self._start_call(event_item)

    def place(self, kind: str, item_id: str, output_index: int) -> OutputItem:
        """Return the item that a part belongs to; a new one if it is not known.

        Args:
            kind: The type of the item.
            item_id: The provider's id of the item.
            output_index: The index that the server sent, or -1.
        """
        event_item = OutputItem(kind, item_id, output_index)
        return self._find("part", event_item) or self._add(event_item)

    def append_arguments(self, item_id: str, output_index: int, delta: str) -> None:
        """Add an argument delta to its call; it is emitted if the call is known already.

        Args:
            item_id: The provider's id of the item.
            output_index: The position of the item in the output, or -1.
            delta: The new text.
        """
        call = self._find_owner(item_id, output_index)
        if not call.completed:
            call.pieces.append(delta)
            if call.call_id:
                self.events.append(ToolArgumentsDelta(call.call_id, delta))

    def set_arguments(self, item_id: str, output_index: int, arguments: str) -> None:
        """Set the complete arguments of a call, which replace its deltas.

        Args:
            item_id: The provider's id of the item.
            output_index: The position of the item in the output, or -1.
            arguments: The complete arguments.
        """
        call = self._find_owner(item_id, output_index)
        if not call.completed:
            self._set_arguments(call, arguments)

    def finish(self, event_item: OutputItem) -> OutputItem:
        """Complete an item.

        Args:
            event_item: The item as the event describes it.

        Returns:
            The item.
        """
        item = self._finish(event_item, self._find("end", event_item))
        if not isinstance(item, ToolCall):
            item.completed = True
        return item

    def reconcile(self, items: Sequence[JsonObject]) -> Iterator[OutputItem]:
        """Find the items that a finished response lists, and complete the calls among them one after the other.

        Args:
            items: The items of the response.

        Returns:
            For each of them the item of the stream, or a new one.
        """
        listed = list(map(read_item, items, range(len(items))))
        if not self.items:
            return map(self._finish, listed, repeat(None))
        return map(self._finish, listed, self._match_listed(listed))

    def resolve_open(self) -> None:
        """Complete the open calls of a complete response, and report those that cannot be completed.

        Some servers never send a finished call; then it consists of its deltas.
        """
        unresolved: list[ToolCall] = []
        for call in self.sorted_calls():
            if not call.completed and (call.final_arguments is not None or call.pieces):
                self._complete(call)
            if not call.completed:
                unresolved.append(call)
        for call in (*unresolved, *self._pending.values()):
            name = f"call {call.call_id!r}" if call.call_id else f"item {call.item_id!r}"
            log.warning(
                "%s is not a complete tool call", name, call_id=call.call_id or call.item_id
            )
            self.events.append(types.AnomalyNoted("unresolved_call", name))
            self.failed += 1

    def _finish(self, event_item: OutputItem, item: OutputItem | None) -> OutputItem:
        """Complete an item, if it is a call, and add it if it is not known."""
        if not isinstance(event_item, ToolCall):
            return item or self._add(event_item)
        if isinstance(item, ToolCall):
            call = item
            self._rename(call, event_item.call_id)
        else:
            call = self._start_call(event_item)
        if not call.completed:
            call.name = event_item.name or call.name
            call.item_id = event_item.item_id or call.item_id
            call.cut = call.cut or event_item.cut
            self._set_arguments(call, event_item.final_arguments)
            self._complete(call)
        return call

    # Find the item of an event.
    #
    # The item id is tried first: it is made to identify the item, and argument deltas have no other id. The call id
    # is second, because some servers use one for two calls. If neither is known, the event belongs to the only open
    # item of its type at its index; if two could be meant, the event is not assigned, because a guess would give a
    # tool the arguments of another call. In each step a match must be at the index of the event, if it has one.
    # The exceptions, each for servers that exist:
    #
    # - An item that is found by its id may have another index than the event, as some servers number the events of one
    #   item differently. But a complete message with this id is not meant, nor a call with another usable call id:
    #   some servers use one item id for all messages or calls of a response (`_may_move`).
    # - The item id is also looked up among the call ids, and the call id among the item ids: some servers write one in
    #   the place of the other, as llama.cpp does in argument deltas.
    # - Arguments that arrive after the end of the only call at their index belong to it, and add nothing. Otherwise
    #   they would wait for a call that never starts, and the response would count as damaged.
    # - An event without an index prefers the items for which the server sent no id: if it had an id of one of the
    #   others, it would have been found by this id.

    def _find(self, role: Role, event_item: OutputItem) -> OutputItem | None:
        """Return the item that an event belongs to, or None."""
        family = _family(event_item)
        at_index = [
            item
            for item in self._by_sent_index.get(event_item.output_index, ())
            if _family(item) == family
        ]
        item = self._find_by_item_id(role, event_item, at_index)
        if item is None and family == _CALL:
            item = self._find_by_call_id(event_item, at_index)
        if item is None:
            item = self._find_open(role, event_item, at_index)
        if item is not None:
            self._add_name(item, event_item.item_id)
        return item

    def _find_by_item_id(
        self, role: Role, event_item: OutputItem, at_index: list[OutputItem]
    ) -> OutputItem | None:
        item = self._by_id.get((_family(event_item), event_item.item_id))
        if item is None or event_item.output_index < 0 or item in at_index:
            return item
        for other in at_index:
            if other.item_id == event_item.item_id:
                return other
        return item if _may_move(item, role, event_item.call_id) else None

    def _find_by_call_id(
        self, event_item: OutputItem, at_index: list[OutputItem]
    ) -> OutputItem | None:
        call = self.calls.get(event_item.call_id or event_item.item_id)
        if call is None:
            call = self._by_id.get((_CALL, event_item.call_id))
        if event_item.output_index >= 0 and call not in at_index:
            return None
        return call

    def _find_open(
        self, role: Role, event_item: OutputItem, at_index: list[OutputItem]
    ) -> OutputItem | None:
        """Return the only open item of this type, at the index of the event if it has one."""
        family = _family(event_item)
        has_index = event_item.output_index >= 0
        if has_index:
            candidates = at_index
        elif role == "start":
            return None
        else:
            candidates = [item for item in self.items.values() if _family(item) == family]

        open_items = [item for item in candidates if not item.completed]
        if role == "part" and not open_items and family == _CALL:
            open_items = candidates
        elif not has_index:
            open_items = [item for item in open_items if not _has_name(item)] or open_items
        elif role == "start":  # another id is another item
            open_items = [item for item in open_items if not (item.item_id and event_item.item_id)]
        return open_items[0] if len(open_items) == 1 else None

    def _find_owner(self, item_id: str, output_index: int) -> ToolCall:
        """Return the call that the arguments of an item belong to, or a placeholder where they wait for it."""
        place = (item_id, output_index)
        call = self._owners.get(place)
        if call is not None and not call.completed:
            return call
        item = self._find("part", ToolCall(_CALL, item_id, output_index))
        if item is None:
            text = "arguments of item %r arrived before their call"
            log.debug(text, item_id, call_id=item_id)
            return self._pending.setdefault(place, ToolCall("", item_id, output_index))
        call = cast("ToolCall", item)
        self._owners[place] = call
        return call

    def _match_listed(self, listed: Sequence[OutputItem]) -> list[OutputItem | None]:
        """Return the known item of each item that a finished response lists, at its position there.

        The keys of an item are tried in their order, and each known item is matched at most once.
        """
        named = [self._by_id.get((_family(item), item.item_id)) for item in listed]
        listed_keys = list(map(_list_keys, listed, named))
        unclaimed = {item: _list_keys(item, item) for _, item in sorted(self.items.items())}
        matches: list[OutputItem | None] = [None] * len(listed)
        for rank in range(_KEY_COUNT):
            by_key: dict[Hashable, deque[OutputItem]] = {}
            for item, keys in unclaimed.items():
                by_key.setdefault(keys[rank], deque()).append(item)
            for position, keys in enumerate(listed_keys):
                if matches[position] is not None or not keys[rank]:
                    continue
                candidates = by_key.get(keys[rank])
                if candidates:
                    item = candidates.popleft()
                    matches[position] = item
                    del unclaimed[item]
        return matches

    def _add(self, item: OutputItem) -> OutputItem:
        """Add an item, at the next free index if it has none or if another item has it."""
        sent_index = item.output_index
        if sent_index < 0 or sent_index in self.items:
            item.output_index = self._next_index
        if sent_index < 0:
            sent_index = item.output_index
        self._next_index = max(self._next_index, item.output_index + 1)
        self.items[item.output_index] = item
        self._by_sent_index.setdefault(sent_index, []).append(item)
        self._add_name(item, item.item_id)
        return item

    def _add_name(self, item: OutputItem, item_id: str) -> None:
        if item_id:
            item.item_id = item.item_id or item_id
            self._by_id[_family(item), item_id] = item

    # Start a call and assign its id.

    def _start_call(self, event_item: ToolCall) -> ToolCall:
        call = replace(event_item, final_arguments=None, cut=False)
        self._assign_id(call)
        self.calls[call.call_id] = call
        self._add(call)
        self._owners.clear()  # what was certain may be ambiguous now
        self.events.append(
            types.ToolCallStarted(
                call.call_id,
                call.name,
                call.item_id,
                call.output_index,
                call.custom,
                call.fallback,
            )
        )
        early = self._take_pending(event_item)
        if early is not None:
            self._add_name(call, early.item_id)
            call.pieces = early.pieces
            call.final_arguments = early.final_arguments
        if call.pieces:
            self.events.append(ToolArgumentsDelta(call.call_id, "".join(call.pieces)))
        return call

    def _take_pending(self, event_item: ToolCall) -> ToolCall | None:
        """Return and remove the arguments that wait for a call: by its item id or, if one has none, by its index."""
        for place, early in self._pending.items():
            if early.item_id and event_item.item_id:
                is_same = early.item_id == event_item.item_id
            else:
                is_same = early.output_index == event_item.output_index != -1
            if is_same:
                del self._pending[place]
                return early
        return None

    def _assign_id(self, call: ToolCall) -> None:
        if call.call_id in self.calls:
            call.fallback = "duplicate"
        if not call.fallback:
            self.extracted += 1
            text = "found: tool %r, item %r, output %d"
            _log_call(logging.DEBUG, text, call.call_id, call.name, call.item_id, call.output_index)
            return
        self.fallen_back += 1
        if call.item_id and call.item_id not in self.calls:
            id_kind = "item id"
            call.call_id = call.item_id
        else:
            id_kind = "local id"
            call.call_id = new_id("call")
        text = "uses its %s because its call_id is %s: tool %r, output %d"
        _log_call(
            logging.WARNING,
            text,
            call.call_id,
            id_kind,
            call.fallback,
            call.name,
            call.output_index,
        )

    def _rename(self, call: ToolCall, new: str) -> None:
        """Use the provider's id, if this event is the first to have it."""
        if not new or new in self.calls:
            return
        if call.completed and not call.fallback:
            text = "has id %r later; the first id is used"
            _log_call(logging.WARNING, text, call.call_id, new)
            return
        old = call.call_id
        call.call_id = new
        self.calls = {stored_call.call_id: stored_call for stored_call in self.calls.values()}
        level = logging.WARNING
        if call.fallback:
            level = logging.INFO
            self.corrected += 1
            call.fallback = ""
        log.log(level, "tool call %r is renamed to %r", old, new, call_id=new)
        self.events.append(types.ToolCallRenamed(new, old))

    # Complete a call.

    def _set_arguments(self, call: ToolCall, arguments: str | None) -> None:
        earlier = call.arguments
        if arguments is None or (earlier and not arguments):
            return  # empty arguments after deltas are an omission of the server
        if earlier and earlier != arguments:
            log.warning(
                "tool call %r: the complete arguments (%d characters) differ from the earlier ones "
                "(%d characters); the complete ones are used",
                call.call_id,
                len(arguments),
                len(earlier),
                call_id=call.call_id,
            )
        call.final_arguments = arguments

    def _complete(self, call: ToolCall) -> None:
        if not (call.name or call.cut):
            self._infer_name(call)
        if not call.name or call.cut:
            return
        call.completed = True
        _log_call(logging.DEBUG, "is complete: tool %r", call.call_id, call.name)
        self.events.append(
            types.ToolCallCompleted(
                call.call_id,
                call.name,
                call.arguments,
                call.item_id,
                call.output_index,
                call.custom,
            )
        )

    def _infer_name(self, call: ToolCall) -> None:
        """Set the name of a call that came without one, if its arguments fit exactly one tool.

        The server's stored call has no name, so the response must not become an anchor.
        """
        if self.infer_name is None:
            return
        name = self.infer_name(call.arguments, call.custom)
        if not name:
            return
        call.name = name
        self.inferred += 1
        text = "has no name; its arguments fit only %r"
        _log_call(logging.WARNING, text, call.call_id, name)
        detail = f"the name of call {call.call_id!r} was inferred"
        self.events.append(types.AnomalyNoted("contradiction", detail))


def _may_move(item: OutputItem, role: Role, call_id: str) -> bool:
    """Return whether an event with the item's id and another index can belong to the item."""
    if not isinstance(item, ToolCall):
        return not item.completed
    return role == "part" or call_id in ("", item.call_id) or bool(item.fallback)


def _family(item: OutputItem) -> str:
    """Return the type of an item, which is the same for all calls."""
    return _CALL if isinstance(item, ToolCall) else item.type


def _has_name(item: OutputItem) -> bool:
    """Return whether the server sent an id of the item."""
    return bool(item.item_id or (isinstance(item, ToolCall) and not item.fallback))


_KEY_COUNT = 5


def _list_keys(item: OutputItem, known: OutputItem | None) -> tuple[Hashable, ...]:
    """Return the keys by which a listed item is matched to a known one, the most reliable one first.

    Args:
        item: The item.
        known: The known item with its id.
    """
    place = (item.output_index, _family(item))
    return ((known, item.call_id), item.call_id, known, place, item.type)
