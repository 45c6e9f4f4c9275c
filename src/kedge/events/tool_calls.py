"""Assign ids, names and arguments to the tool calls of a stream.

A call has two ids. ``call_id`` connects the call to its result and is visible to the model; ``item_id``
identifies the item within the stream, and is the only id that an argument delta has. ``ToolCallState``
is the item table of a response, which stores the calls by ``call_id``, and finds them by ``item_id``.

A wrong match runs a tool with another call's arguments, and servers omit ``call_id`` or send it only with the finished
item, use one id for two calls, and send arguments before the call that they belong to. A call without a usable
``call_id`` is identified by its ``item_id`` or by a local id (logged with the reason and counted), which the provider's
id replaces as soon as an event has it. Early arguments wait for their call. Calls and arguments that are still
unmatched at the end are ``unresolved``, and a response with an unresolved call is never complete.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

from kedge.events.fields import CALL_ARGUMENTS, JsonObject, get_arguments, get_text
from kedge.events.items import ItemTable, OutputItem, Role, ToolCall
from kedge.events.types import (
    AnomalyNoted,
    StreamEvent,
    ToolArgumentsDelta,
    ToolCallCompleted,
    ToolCallRenamed,
    ToolCallStarted,
)
from kedge.observe import get_logger
from kedge.turns import new_id

NameResolver = Callable[[str, bool], str]
"""Returns the name of a call from its arguments and from whether it is free-form; empty if uncertain."""


@dataclass(frozen=True, slots=True)
class ToolCallUpdate:
    """The data of one event of a stream about a call.

    Attributes:
        call_id: The call id as the server sent it: of any type, or None.
        name: The tool's name.
        item_id: The provider's id of the item.
        output_index: The position of the item in the output.
        custom: Whether the tool takes free-form input instead of JSON arguments.
        arguments: The complete arguments, if the event has them.
        cut: Whether the model was stopped before the call was complete.
    """

    call_id: object = None
    name: str = ""
    item_id: str = ""
    output_index: int = -1
    custom: bool = False
    arguments: str | None = None
    cut: bool = False

    @property
    def type(self) -> str:
        """The type of the item."""
        return "custom_tool_call" if self.custom else "function_call"


@dataclass(frozen=True, slots=True)
class CallSummary:
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


def valid_call_id(call_id: object) -> str:
    """Return the id if it is usable, else an empty string."""
    return call_id if isinstance(call_id, str) and call_id.strip() else ""


def read_type(item: JsonObject) -> str:
    """Return the type of an item; some servers omit that of a message."""
    return get_text(item, "type") if "type" in item else "message"


def read_call(item: JsonObject, output_index: int) -> ToolCallUpdate:
    """Return the fields of a tool call in an item."""
    kind = item["type"]
    return ToolCallUpdate(
        item.get("call_id"),
        get_text(item, "name"),
        get_text(item, "id"),
        output_index,
        kind == "custom_tool_call",
        get_arguments(item, CALL_ARGUMENTS[kind]),
        item.get("status") == "incomplete",
    )


def read_item(item: JsonObject, output_index: int) -> OutputItem:
    """Return what identifies an item."""
    place = read_type(item), get_text(item, "id"), output_index
    if place[0] not in CALL_ARGUMENTS:
        return OutputItem(*place)
    return ToolCall(*place, call_id=valid_call_id(item.get("call_id")))


def call_id_problem(call_id: object) -> str:
    """Return why an id is not usable, or an empty string."""
    if valid_call_id(call_id):
        return ""
    return "missing" if call_id is None else "empty" if isinstance(call_id, str) else "malformed"


log = get_logger("kedge.events.tool_calls")


def _log_call(level: int, text: str, call_id: str, *details: object) -> None:
    """Log a sentence about a call, with its id in the message and in a field."""
    log.log(level, "tool call %r " + text, call_id, *details, call_id=call_id)


class ToolCallState(ItemTable):
    """The tool calls of one response, in the table of its items.

    Attributes:
        calls: The calls by ``call_id``.
        extracted: How many calls came with a usable ``call_id``.
        fallen_back: How many calls got a fallback id.
        corrected: How many fallback ids were replaced by the provider's id later.
        failed: How many calls or arguments could not be resolved.
        inferred: How many calls came without a name that could be inferred.
        infer_name: A function that infers the name of a call that came without one.
    """

    infer_name: NameResolver | None = None

    def __init__(self) -> None:
        super().__init__()
        self.extracted = 0
        self.fallen_back = 0
        self.corrected = 0
        self.failed = 0
        self.inferred = 0
        self._owners: dict[tuple[str, int], ToolCall] = {}
        self._pending: dict[tuple[str, int], ToolCall] = {}

    @property
    def call_ids(self) -> dict[str, str]:
        """The ``call_id`` of each ``item_id``."""
        return {
            item_id: item.call_id
            for (_, item_id), item in self._by_id.items()
            if isinstance(item, ToolCall)
        }

    def start(self, update: ToolCallUpdate) -> list[StreamEvent]:
        """Start a call; a repeated start changes nothing.

        Args:
            update: The data of the event about the call.

        Returns:
            The events to emit.
        """
        call = self._find_call("start", update)
        if call is None:
            return self._open_call(update)[1]
        call.name = call.name or update.name
        return self._rename(call, update)

    def append_arguments(self, item_id: str, output_index: int, delta: str) -> list[StreamEvent]:
        """Add an argument delta to its call.

        Args:
            item_id: The provider's id of the item.
            output_index: The position of the item in the output, or -1.
            delta: The new text.

        Returns:
            The events to emit; none if the call is not known yet.
        """
        call = self._find_owner(item_id, output_index)
        if call.completed:
            return []
        call.pieces.append(delta)
        return [ToolArgumentsDelta(call.call_id, delta)] if call.call_id else []

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

    def finish(self, update: ToolCallUpdate) -> tuple[ToolCall, list[StreamEvent]]:
        """Complete a call.

        Args:
            update: The data of the event about the call.

        Returns:
            The call, and the events to emit.
        """
        return self._finish_call(self._find_call("end", update), update)

    def reconcile(self, items: Sequence[JsonObject]) -> list[tuple[OutputItem, list[StreamEvent]]]:
        """Find the items that a finished response lists, and complete the calls among them.

        Args:
            items: The items of the response.

        Returns:
            For each of them the item of the stream, or a new one, and the events to emit.
        """
        listed = [read_item(item, at) for at, item in enumerate(items)]
        found: list[tuple[OutputItem, list[StreamEvent]]] = []
        for each, known, item in zip(listed, self.match_listed(listed), items, strict=True):
            if isinstance(each, ToolCall):
                update = read_call(item, each.output_index)
                found.append(self._finish_call(cast("ToolCall | None", known), update))
            else:
                found.append((known or self.add(each), []))
        return found

    def _finish_call(
        self, call: ToolCall | None, update: ToolCallUpdate
    ) -> tuple[ToolCall, list[StreamEvent]]:
        events: list[StreamEvent] = []
        if call is None:
            call, events = self._open_call(update)
        events += self._rename(call, update)
        if not call.completed:
            call.name = update.name or call.name
            call.item_id = update.item_id or call.item_id
            call.cut = call.cut or update.cut
            self._set_arguments(call, update.arguments)
            events += self._complete(call)
        return call, events

    def resolve_open(self) -> list[StreamEvent]:
        """Complete the open calls of a complete response.

        Some servers never send a finished call; then it consists of its deltas.

        Returns:
            The events to emit, with one for each call that cannot be completed.
        """
        events: list[StreamEvent] = []
        unresolved: list[ToolCall] = []
        for call in self.sorted_calls():
            if call.final_arguments is not None or call.pieces:
                events += [] if call.completed else self._complete(call)
            if not call.completed:
                unresolved.append(call)
        for call in (*unresolved, *self._pending.values()):
            name = f"call {call.call_id!r}" if call.call_id else f"item {call.item_id!r}"
            log.warning(
                "%s is not a complete tool call", name, call_id=call.call_id or call.item_id
            )
            events.append(AnomalyNoted("unresolved_call", name))
            self.failed += 1
        return events

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

    @property
    def has_fallback_ids(self) -> bool:
        """Whether a call has an id that the provider does not know."""
        return any(call.fallback for call in self.calls.values())

    def log_summary(self) -> None:
        """Log the calls of the response, if there are any."""
        if self.calls or self.failed:
            log.info("tool calls: %s", self.summary(), call_id=",".join(self.calls))

    def sorted_calls(self) -> list[ToolCall]:
        """Return the calls in output order."""
        return sorted(self.calls.values(), key=lambda call: call.output_index)

    def _find_call(self, role: Role, update: ToolCallUpdate) -> ToolCall | None:
        call_id = valid_call_id(update.call_id)
        found = self.find(role, update.type, update.item_id, update.output_index, call_id)
        return cast("ToolCall | None", found)

    def _find_owner(self, item_id: str, output_index: int) -> ToolCall:
        """Return the call that the arguments of an item belong to, or the one where they wait for it."""
        place = item_id, output_index
        call = self._owners.get(place)
        if call is None or call.completed:
            found = self.find("part", "function_call", item_id, output_index)
            if found is None:
                text = "arguments of item %r arrived before their call"
                log.debug(text, item_id, call_id=item_id)
                return self._pending.setdefault(place, ToolCall("", item_id, output_index))
            call = self._owners[place] = cast("ToolCall", found)
        return call

    # Open a call and assign its id.

    def _open_call(self, update: ToolCallUpdate) -> tuple[ToolCall, list[StreamEvent]]:
        call_id, fallback = self._assign_id(update)
        item_id, output_index = update.item_id, update.output_index
        call = ToolCall(update.type, item_id, output_index, False, call_id, update.name, fallback)
        self.calls[call_id] = call
        self.add(call)
        self._owners.clear()  # what was certain may be ambiguous now
        events: list[StreamEvent] = [
            ToolCallStarted(call_id, call.name, item_id, call.output_index, call.custom, fallback)
        ]
        for place, early in self._pending.items():
            same_item = (
                place[0] == item_id if place[0] and item_id else place[1] == output_index != -1
            )
            if same_item:
                del self._pending[place]
                self._add_name(call, early.item_id)
                call.pieces, call.final_arguments = early.pieces, early.final_arguments
                break
        if call.pieces:
            events.append(ToolArgumentsDelta(call_id, "".join(call.pieces)))
        return call, events

    def _assign_id(self, update: ToolCallUpdate) -> tuple[str, str]:
        call_id = valid_call_id(update.call_id)
        problem = "duplicate" if call_id in self.calls else call_id_problem(update.call_id)
        if not problem:
            self.extracted += 1
            details = update.name, update.item_id, update.output_index
            _log_call(logging.DEBUG, "found: tool %r, item %r, output %d", call_id, *details)
            return call_id, ""
        self.fallen_back += 1
        by_item = update.item_id and update.item_id not in self.calls
        call_id = update.item_id if by_item else new_id("call")
        kind = "item id" if by_item else "local id"
        text = "uses its %s because its call_id is %s: tool %r, output %d"
        details = kind, problem, update.name, update.output_index
        _log_call(logging.WARNING, text, call_id, *details)
        return call_id, problem

    def _rename(self, call: ToolCall, update: ToolCallUpdate) -> list[StreamEvent]:
        """Use the provider's id, if this event is the first to have it."""
        new = valid_call_id(update.call_id)
        if not new or new in self.calls:
            return []
        if call.completed and not call.fallback:
            text = "has id %r later; the first id is used"
            _log_call(logging.WARNING, text, call.call_id, new)
            return []
        was, call.call_id = call.call_id, new
        self.calls = {each.call_id: each for each in self.calls.values()}
        level = logging.INFO if call.fallback else logging.WARNING
        log.log(level, "tool call %r is renamed to %r", was, new, call_id=new)
        if call.fallback:
            self.corrected += 1
            call.fallback = ""
        return [ToolCallRenamed(new, was)]

    # Arguments.

    def _set_arguments(self, call: ToolCall, arguments: str | None) -> None:
        known = call.arguments
        if arguments is None or (known and not arguments):
            return  # empty arguments after deltas are an omission of the server
        if known and known != arguments:
            log.warning(
                "tool call %r: the complete arguments (%d characters) differ from the earlier ones "
                "(%d characters); the complete ones are used",
                *(call.call_id, len(arguments), len(known)),
                call_id=call.call_id,
            )
        call.final_arguments = arguments

    def _complete(self, call: ToolCall) -> list[StreamEvent]:
        anomalies = [] if call.name or call.cut else self._infer_name(call)
        if not call.name or call.cut:
            return []
        call.completed = True
        _log_call(logging.DEBUG, "is complete: tool %r", call.call_id, call.name)
        return [
            *anomalies,
            ToolCallCompleted(
                call.call_id,
                call.name,
                call.arguments,
                call.item_id,
                call.output_index,
                call.custom,
            ),
        ]

    def _infer_name(self, call: ToolCall) -> list[StreamEvent]:
        """Set the name of a call that came without one, if its arguments fit exactly one tool.

        The server's stored call has no name, so the response must not become an anchor.
        """
        name = self.infer_name(call.arguments, call.custom) if self.infer_name else ""
        if not name:
            return []
        call.name = name
        self.inferred += 1
        text = "has no name; its arguments fit only %r"
        _log_call(logging.WARNING, text, call.call_id, name)
        return [AnomalyNoted("contradiction", f"the name of call {call.call_id!r} was inferred")]
