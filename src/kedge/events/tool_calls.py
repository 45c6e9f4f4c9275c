"""Assign the events of a stream to its tool calls.

A call has two ids. ``call_id`` connects the call to its result and is visible to the model; ``item_id``
identifies the item within the stream, and is the only id that an argument delta has. ``ToolCallState``
stores the calls by ``call_id``, and a map from ``item_id`` to ``call_id``.

Two dictionaries are not enough, because the ids are not reliable, and a wrong match runs a tool with
another call's arguments. Servers omit ``call_id`` or send it only with the finished item, use one id for two
calls, change the ``item_id`` between events, and send arguments before the call that they belong to. So a
call is looked up by item id, then by call id, then as the only open call at its output index, and an
event that contradicts the index of a match is not assigned to it. A call without a usable ``call_id`` is
identified by its ``item_id`` or by a local id (logged with the reason and counted), which the provider's id
replaces as soon as an event has it. Early arguments wait for their call. Calls and arguments that are still
unmatched at the end are ``unresolved``, and a response with an unresolved call is never complete.
"""

import logging
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

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


@dataclass(slots=True)
class ToolCall:
    """A tool call of a stream, with the data received so far.

    Attributes:
        call_id: The id that connects the call to its result.
        name: The tool's name.
        item_id: The provider's id of the item.
        output_index: The position of the item in the output.
        custom: Whether the tool takes free-form input instead of JSON arguments.
        fallback: Why ``call_id`` is not the provider's own; empty if it is.
        final_arguments: The complete arguments, once the provider has sent them.
        pieces: The argument deltas so far.
        completed: Whether the call is complete.
        cut: Whether the model was stopped before the call was complete.
    """

    call_id: str
    name: str
    item_id: str
    output_index: int
    custom: bool
    fallback: str = ""
    final_arguments: str | None = None
    pieces: list[str] = field(default_factory=list[str])
    completed: bool = False
    cut: bool = False

    @property
    def arguments(self) -> str:
        """The complete arguments if they were sent, else the joined deltas."""
        return self.final_arguments or "".join(self.pieces)


@dataclass(slots=True)
class PendingArguments:
    """Arguments that arrived before their call."""

    item_id: str
    output_index: int
    pieces: list[str] = field(default_factory=list[str])
    final: str | None = None


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


def call_id_problem(call_id: object) -> str:
    """Return why an id is not usable, or an empty string."""
    if valid_call_id(call_id):
        return ""
    return "missing" if call_id is None else "empty" if isinstance(call_id, str) else "malformed"


def index_matches(call: ToolCall, output_index: int) -> bool:
    """Return whether the call may be at this output index."""
    return output_index in (-1, call.output_index) or call.output_index == -1


def belongs_to(pending: PendingArguments, call: ToolCall) -> bool:
    """Return whether early arguments belong to this call."""
    if pending.item_id and call.item_id:
        return pending.item_id == call.item_id
    return pending.output_index == call.output_index != -1


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
    if not known:  # the response was not streamed
        return matches
    left_over, unclaimed = list(range(len(listed))), list(range(len(known)))
    for listed_key, known_key in keys:
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


log = get_logger("kedge.events.tool_calls")


class ToolCallState:
    """The tool calls of one response.

    Attributes:
        calls: The calls by ``call_id``.
        call_ids: The ``call_id`` of each ``item_id``.
        extracted: How many calls came with a usable ``call_id``.
        fallen_back: How many calls got a fallback id.
        corrected: How many fallback ids were replaced by the provider's id later.
        failed: How many calls or arguments could not be resolved.
        inferred: How many calls came without a name that could be inferred.
        infer_name: A function that infers the name of a call that came without one.
    """

    infer_name: NameResolver | None = None

    def __init__(self) -> None:
        self.calls: dict[str, ToolCall] = {}
        self.call_ids: dict[str, str] = {}
        self.extracted = 0
        self.fallen_back = 0
        self.corrected = 0
        self.failed = 0
        self.inferred = 0
        self._pending: list[PendingArguments] = []
        self._by_index: dict[int, list[ToolCall]] = {}

    def start(self, update: ToolCallUpdate) -> list[StreamEvent]:
        """Start a call; a repeated start changes nothing.

        Args:
            update: The data of the event about the call.

        Returns:
            The events to emit.
        """
        call = self._find(update) or self._find_open_at(update.output_index, update.item_id)
        if call is None:
            return self._open_call(update)
        self._add_alias(call, update.item_id)
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
        if call is None:
            self._get_pending(item_id, output_index).pieces.append(delta)
            return []
        if call.completed:
            return []
        call.pieces.append(delta)
        return [ToolArgumentsDelta(call.call_id, delta)]

    def set_arguments(self, item_id: str, output_index: int, arguments: str) -> None:
        """Set the complete arguments of a call, which replace its deltas.

        Args:
            item_id: The provider's id of the item.
            output_index: The position of the item in the output, or -1.
            arguments: The complete arguments.
        """
        call = self._find_owner(item_id, output_index)
        if call is None:
            self._get_pending(item_id, output_index).final = arguments
        elif not call.completed:
            self._set_arguments(call, arguments)

    def finish(self, update: ToolCallUpdate) -> tuple[ToolCall, list[StreamEvent]]:
        """Complete a call.

        Args:
            update: The data of the event about the call.

        Returns:
            The call, and the events to emit.
        """
        return self._finish_call(
            self._find(update) or self._find_open_at(update.output_index), update
        )

    def reconcile(
        self, calls: Sequence[ToolCallUpdate]
    ) -> list[tuple[ToolCall, list[StreamEvent]]]:
        """Complete the calls that a finished response lists.

        Args:
            calls: The data of the response about each call.

        Returns:
            For each of them the call and the events to emit.
        """
        known = match_items(
            calls,
            self.sorted_calls(),
            (
                lambda seen: (self.call_ids.get(seen.item_id), valid_call_id(seen.call_id)),
                lambda call: (call.call_id, call.call_id),
            ),
            (lambda seen: valid_call_id(seen.call_id), lambda call: call.call_id),
            (lambda seen: self.call_ids.get(seen.item_id), lambda call: call.call_id),
            (lambda seen: seen.output_index, lambda call: call.output_index),
            (lambda seen: seen.custom, lambda call: call.custom),
        )
        return [self._finish_call(call, seen) for call, seen in zip(known, calls, strict=True)]

    def _finish_call(
        self, call: ToolCall | None, update: ToolCallUpdate
    ) -> tuple[ToolCall, list[StreamEvent]]:
        events: list[StreamEvent] = []
        if call is None:
            events += self._open_call(update)
            call = self._by_index[update.output_index][-1]
        self._add_alias(call, update.item_id)
        events += self._rename(call, update)
        if not call.completed:
            call.name = update.name or call.name
            call.item_id = update.item_id or call.item_id
            call.cut = call.cut or update.cut
            self._set_arguments(call, update.arguments)
            events += self._complete(call)
        return call, events

    def resolve_open(self) -> tuple[list[StreamEvent], list[str]]:
        """Complete the open calls of a complete response.

        Some servers never send a finished call; then it consists of its deltas.

        Returns:
            The events to emit, and a description of each call that cannot be completed.
        """
        events: list[StreamEvent] = []
        for call in self._open_calls():
            if call.final_arguments is not None or call.pieces:
                events += self._complete(call)
        unresolved: list[str] = []
        for call in self._open_calls():
            unresolved.append(f"call {call.call_id!r}")
            log.warning("%s is not a complete tool call", unresolved[-1], call_id=call.call_id)
        for early in self._pending:
            unresolved.append(f"item {early.item_id!r}")
            log.warning("%s is not a complete tool call", unresolved[-1], call_id=early.item_id)
        self.failed += len(unresolved)
        return events, unresolved

    def summary(self) -> CallSummary:
        """Return all call ids in output order, with the counts."""
        return CallSummary(
            tuple(call.call_id for call in self.sorted_calls() if call.completed),
            tuple(call.call_id for call in self.sorted_calls() if not call.completed),
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

    def get_at(self, output_index: int) -> ToolCall:
        """Return the newest call at an output index that has one."""
        return self._by_index[output_index][-1]

    def _open_calls(self) -> list[ToolCall]:
        return [call for call in self.sorted_calls() if not call.completed]

    # Find the call that an event belongs to.

    def _find(self, update: ToolCallUpdate) -> ToolCall | None:
        call_id = valid_call_id(update.call_id)
        call = self._find_by_item(update.item_id, update.output_index)
        if call and (index_matches(call, update.output_index) or call_id in ("", call.call_id)):
            return call
        if call and call.fallback:  # the event may have its real id
            return call
        call = self.calls.get(call_id)
        return call if call and index_matches(call, update.output_index) else None

    def _find_by_item(self, item_id: str, output_index: int) -> ToolCall | None:
        """Return the call of this item; of two with the same id, the one at this index."""
        call = self.calls.get(self.call_ids.get(item_id, ""))
        if call is None or index_matches(call, output_index):
            return call
        candidates = [c for c in self._by_index.get(output_index, ()) if c.item_id == item_id]
        return candidates[0] if candidates else call

    def _find_open_at(self, output_index: int, item_id: str = "") -> ToolCall | None:
        """Return the only open call at this index, unless it is known to be another item."""
        candidates = [
            call
            for call in self._by_index.get(output_index, ())
            if not call.completed and not (call.item_id and item_id)
        ]
        return candidates[0] if len(candidates) == 1 else None

    def _find_owner(self, item_id: str, output_index: int) -> ToolCall | None:
        """Return the call that the arguments of this item belong to."""
        call = self._find_by_item(item_id, output_index)
        if call is not None:
            return call
        call = self._find_open_at(output_index)
        if call is None and len(candidates := self._by_index.get(output_index, [])) == 1:
            call = candidates[0]  # it is complete; late arguments add nothing
        if call is not None:
            self._add_alias(call, item_id)
        return call

    def _add_alias(self, call: ToolCall, item_id: str) -> None:
        if not item_id or item_id in self.call_ids:
            return
        if call.item_id:
            log.debug(
                "tool call %r is item %r and %r",
                call.call_id,
                call.item_id,
                item_id,
                call_id=call.call_id,
            )
        call.item_id = call.item_id or item_id
        self.call_ids[item_id] = call.call_id

    # Open a call and assign its id.

    def _open_call(self, update: ToolCallUpdate) -> list[StreamEvent]:
        call_id, fallback = self._assign_id(update)
        call = ToolCall(
            call_id, update.name, update.item_id, update.output_index, update.custom, fallback
        )
        self.calls[call_id] = call
        self._by_index.setdefault(update.output_index, []).append(call)
        if update.item_id:
            self.call_ids[update.item_id] = call_id
        started = ToolCallStarted(
            call_id, update.name, update.item_id, update.output_index, update.custom, fallback
        )
        return [started, *self._apply_pending(call)]

    def _assign_id(self, update: ToolCallUpdate) -> tuple[str, str]:
        call_id = valid_call_id(update.call_id)
        problem = "duplicate" if call_id in self.calls else call_id_problem(update.call_id)
        if not problem:
            self.extracted += 1
            log.debug(
                "tool call %r found: tool %r, item %r, output %d",
                call_id,
                update.name,
                update.item_id,
                update.output_index,
                call_id=call_id,
            )
            return call_id, ""
        self.fallen_back += 1
        by_item = update.item_id and update.item_id not in self.calls
        call_id = update.item_id if by_item else new_id("call")
        log.warning(
            "tool call %r uses its %s because its call_id is %s: tool %r, output %d",
            call_id,
            "item id" if by_item else "local id",
            problem,
            update.name,
            update.output_index,
            call_id=call_id,
        )
        return call_id, problem

    def _rename(self, call: ToolCall, update: ToolCallUpdate) -> list[StreamEvent]:
        """Use the provider's id, if this event is the first to have it."""
        new = valid_call_id(update.call_id)
        if not new or new in self.calls:
            return []
        if call.completed and not call.fallback:
            log.warning(
                "tool call %r has id %r later; the first id is used",
                call.call_id,
                new,
                call_id=call.call_id,
            )
            return []
        was, call.call_id = call.call_id, new
        self.calls = {each.call_id: each for each in self.calls.values()}
        for item_id, call_id in self.call_ids.items():
            if call_id == was:
                self.call_ids[item_id] = new
        log.log(
            logging.INFO if call.fallback else logging.WARNING,
            "tool call %r is renamed to %r",
            was,
            new,
            call_id=new,
        )
        if call.fallback:
            self.corrected += 1
            call.fallback = ""
        return [ToolCallRenamed(new, was)]

    # Arguments.

    def _get_pending(self, item_id: str, output_index: int) -> PendingArguments:
        for early in self._pending:
            if (early.item_id, early.output_index) == (item_id, output_index):
                return early
        log.debug("arguments of item %r arrived before their call", item_id, call_id=item_id)
        self._pending.append(PendingArguments(item_id, output_index))
        return self._pending[-1]

    def _apply_pending(self, call: ToolCall) -> list[StreamEvent]:
        found = [early for early in self._pending if belongs_to(early, call)][:1]
        for early in found:
            self._pending.remove(early)
            self._add_alias(call, early.item_id)
            call.pieces, call.final_arguments = early.pieces, early.final
        return [ToolArgumentsDelta(call.call_id, "".join(call.pieces))] if call.pieces else []

    def _set_arguments(self, call: ToolCall, arguments: str | None) -> None:
        known = call.arguments
        if arguments is None or (known and not arguments):
            return  # empty arguments after deltas are an omission of the server
        if known and known != arguments:
            log.warning(
                "tool call %r: the complete arguments (%d characters) differ from the earlier ones "
                "(%d characters); the complete ones are used",
                call.call_id,
                len(arguments),
                len(known),
                call_id=call.call_id,
            )
        call.final_arguments = arguments

    def _complete(self, call: ToolCall) -> list[StreamEvent]:
        anomalies = [] if call.name or call.cut else self._infer_name(call)
        if not call.name or call.cut:
            return []
        call.completed = True
        log.debug(
            "tool call %r is complete: tool %r", call.call_id, call.name, call_id=call.call_id
        )
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
        log.warning(
            "tool call %r has no name; its arguments fit only %r",
            call.call_id,
            name,
            call_id=call.call_id,
        )
        return [AnomalyNoted("contradiction", f"the name of call {call.call_id!r} was inferred")]
