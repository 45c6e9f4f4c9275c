"""Which words belong to which tool call.

A provider names a call twice: ``call_id`` joins the call to its result and is what a model reads;
``item_id`` names the item in the stream, and is all that an argument delta bears. ``ToolCallState`` keeps
the calls by ``call_id`` and a map from ``item_id`` to it, so that every word finds its call.

Servers are not always that tidy. A call without a usable ``call_id`` goes by its ``item_id``, or by an id
made here, which is said in the log with the reason and counted; the provider's own id replaces it as
soon as any later event brings it. Words that come before their call wait for it. An ``item_id`` that
changes on the way is followed by the call's place in the output. What nobody could make sense of by the
end is ``unresolved``, and a response with an unresolved call is never taken for whole.
"""

import logging
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from kedge.events.types import (
    StreamEvent,
    ToolArgumentsDelta,
    ToolCallCompleted,
    ToolCallRenamed,
    ToolCallStarted,
)
from kedge.turns import new_id


@dataclass(frozen=True, slots=True)
class ToolCallUpdate:
    """What one event of a stream says about a call; ``call_id`` may be anything, also nothing."""

    call_id: object = None
    name: str = ""
    item_id: str = ""
    output_index: int = -1
    custom: bool = False
    arguments: str | None = None
    cut: bool = False
    """Whether the model was stopped before it had written all of it."""


@dataclass(slots=True)
class ToolCall:
    """One call as it grows."""

    call_id: str
    name: str
    item_id: str
    output_index: int
    custom: bool
    fallback: str = ""
    """Why ``call_id`` is not the provider's own; empty when it is."""
    final_arguments: str | None = None
    """The arguments as a whole, once the provider has said them."""
    pieces: list[str] = field(default_factory=list[str])
    completed: bool = False
    cut: bool = False

    @property
    def arguments(self) -> str:
        """The arguments as far as they are known: the whole ones win over the joined pieces."""
        return self.final_arguments or "".join(self.pieces)


@dataclass(slots=True)
class PendingArguments:
    """Words that came before their call."""

    item_id: str
    output_index: int
    pieces: list[str] = field(default_factory=list[str])
    final: str | None = None


@dataclass(frozen=True, slots=True)
class CallSummary:
    """All calls of a response in the order of its output, and how their ids were come by."""

    completed: tuple[str, ...]
    open: tuple[str, ...]
    extracted: int
    fallen_back: int
    corrected: int
    failed: int


def valid_call_id(call_id: object) -> str:
    """The id, if it is one; else an empty string."""
    return call_id if isinstance(call_id, str) and call_id.strip() else ""


def call_id_problem(call_id: object) -> str:
    """What is wrong with an id, in one word; an empty string if nothing is."""
    if valid_call_id(call_id):
        return ""
    return "missing" if call_id is None else "empty" if isinstance(call_id, str) else "malformed"


def index_matches(call: ToolCall, output_index: int) -> bool:
    """Whether nothing speaks against the call being at this place."""
    return output_index in (-1, call.output_index) or call.output_index == -1


def belongs_to(pending: PendingArguments, call: ToolCall) -> bool:
    """Whether early words are this call's."""
    if pending.item_id and call.item_id:
        return pending.item_id == call.item_id
    return pending.output_index == call.output_index != -1


Listed = TypeVar("Listed")
Known = TypeVar("Known")
MatchKey = tuple[Callable[[Listed], Hashable], Callable[[Known], Hashable]]


def match_items(
    listed: Sequence[Listed], known: Sequence[Known], *keys: "MatchKey[Listed, Known]"
) -> list[Known | None]:
    """For each of ``listed`` the one of ``known`` that it is, or ``None``; an empty key is no key."""
    answer: list[Known | None] = [None] * len(listed)
    if not known:  # as in every response that came whole
        return answer
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
                answer[at] = known[found.popleft()]
        left_over = [at for at in left_over if answer[at] is None]
        unclaimed = [at for at in unclaimed if at not in claimed]
    return answer


log = logging.getLogger("kedge.events.tool_calls")


class ToolCallState:
    """The calls of one response, by ``call_id``."""

    def __init__(self) -> None:
        self.calls: dict[str, ToolCall] = {}
        self.call_ids: dict[str, str] = {}
        """``item_id`` to ``call_id``."""
        self.extracted = 0
        self.fallen_back = 0
        self.corrected = 0
        self.failed = 0
        self._pending: list[PendingArguments] = []
        self._by_index: dict[int, list[ToolCall]] = {}

    def start(self, update: ToolCallUpdate) -> list[StreamEvent]:
        """A call was begun; an event that says so again changes nothing."""
        call = self._find(update) or self._find_open_at(update.output_index, update.item_id)
        if call is None:
            return self._open_call(update)
        self._add_alias(call, update.item_id)
        call.name = call.name or update.name
        return self._rename(call, update)

    def append_arguments(self, item_id: str, output_index: int, delta: str) -> list[StreamEvent]:
        """Some of a call's arguments arrived."""
        call = self._find_owner(item_id, output_index)
        if call is None:
            self._get_pending(item_id, output_index).pieces.append(delta)
            return []
        if call.completed:
            return []
        call.pieces.append(delta)
        return [ToolArgumentsDelta(call.call_id, delta)]

    def set_arguments(self, item_id: str, output_index: int, arguments: str) -> None:
        """A call's arguments are whole; they win over the deltas."""
        call = self._find_owner(item_id, output_index)
        if call is None:
            self._get_pending(item_id, output_index).final = arguments
        elif not call.completed:
            self._set_arguments(call, arguments)

    def finish(self, update: ToolCallUpdate) -> tuple[ToolCall, list[StreamEvent]]:
        """A call is whole: give it as it now stands, and what that changed."""
        return self._finish_call(
            self._find(update) or self._find_open_at(update.output_index), update
        )

    def reconcile(
        self, calls: Sequence[ToolCallUpdate]
    ) -> list[tuple[ToolCall, list[StreamEvent]]]:
        """The finished response lists its calls: each is one that we know, or a new one."""
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
        """The response is finished: complete what can be, and name what cannot.

        Some servers never say that a call is whole; then its deltas are all there is.
        """
        events: list[StreamEvent] = []
        for call in self._open_calls():
            if call.final_arguments is not None or call.pieces:
                events += self._complete(call)
        unresolved = [f"call {call.call_id!r}" for call in self._open_calls()]
        unresolved += [f"item {early.item_id!r}" for early in self._pending]
        self.failed += len(unresolved)
        for name in unresolved:
            log.warning("%s never became a whole tool call", name)
        return events, unresolved

    def summary(self) -> CallSummary:
        """All call ids at the end, in the order of the output."""
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
        """Whether a call goes by an id that the provider does not know it by."""
        return any(call.fallback for call in self.calls.values())

    def log_summary(self) -> None:
        """Say at the end which calls there were; a response without calls says nothing."""
        if self.calls or self.failed:
            log.info("tool calls: %s", self.summary())

    def sorted_calls(self) -> list[ToolCall]:
        """The calls in the order of the output."""
        return sorted(self.calls.values(), key=lambda call: call.output_index)

    def _open_calls(self) -> list[ToolCall]:
        return [call for call in self.sorted_calls() if not call.completed]

    # Finding the call that an event speaks of.

    def _find(self, update: ToolCallUpdate) -> ToolCall | None:
        call_id = valid_call_id(update.call_id)
        call = self._find_by_item(update.item_id, update.output_index)
        if call and (index_matches(call, update.output_index) or call_id in ("", call.call_id)):
            return call
        if call and call.fallback:  # its real id is still to come; this may be it
            return call
        call = self.calls.get(call_id)
        return call if call and index_matches(call, update.output_index) else None

    def _find_by_item(self, item_id: str, output_index: int) -> ToolCall | None:
        """The call of this item; if two share the id, the one at this place."""
        call = self.calls.get(self.call_ids.get(item_id, ""))
        if call is None or index_matches(call, output_index):
            return call
        here = [c for c in self._by_index.get(output_index, ()) if c.item_id == item_id]
        return here[0] if here else call

    def _find_open_at(self, output_index: int, item_id: str = "") -> ToolCall | None:
        """The only open call at this place, unless it is known as another item than this."""
        here = [
            call
            for call in self._by_index.get(output_index, ())
            if not call.completed and not (call.item_id and item_id)
        ]
        return here[0] if len(here) == 1 else None

    def _find_owner(self, item_id: str, output_index: int) -> ToolCall | None:
        """The call that words of this item belong to."""
        call = self._find_by_item(item_id, output_index) or self._find_open_at(output_index)
        if call is None and len(here := self._by_index.get(output_index, [])) == 1:
            call = here[0]  # it is whole already; late words of it say nothing new
        if call is not None:
            self._add_alias(call, item_id)
        return call

    def _add_alias(self, call: ToolCall, item_id: str) -> None:
        if not item_id or item_id in self.call_ids:
            return
        if call.item_id:
            log.debug("tool call %r is item %r and %r", call.call_id, call.item_id, item_id)
        call.item_id = call.item_id or item_id
        self.call_ids[item_id] = call.call_id

    # Opening a call, and the ids it goes by.

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
        flaw = "duplicate" if call_id in self.calls else call_id_problem(update.call_id)
        if not flaw:
            self.extracted += 1
            log.debug(
                "tool call %r found: tool %r, item %r, output %d",
                call_id,
                update.name,
                update.item_id,
                update.output_index,
            )
            return call_id, ""
        self.fallen_back += 1
        by_item = update.item_id and update.item_id not in self.calls
        call_id = update.item_id if by_item else new_id("call")
        log.warning(
            "tool call %r goes by its %s because its call_id is %s: tool %r, output %d",
            call_id,
            "item id" if by_item else "local id",
            flaw,
            update.name,
            update.output_index,
        )
        return call_id, flaw

    def _rename(self, call: ToolCall, update: ToolCallUpdate) -> list[StreamEvent]:
        """Take the provider's own id, if this event is the first to bring it."""
        new = valid_call_id(update.call_id)
        if not new or new in self.calls:
            return []
        if call.completed and not call.fallback:
            log.warning("tool call %r is called %r later on; the first id stays", call.call_id, new)
            return []
        was, call.call_id = call.call_id, new
        self.calls = {each.call_id: each for each in self.calls.values()}
        for item_id, call_id in self.call_ids.items():
            if call_id == was:
                self.call_ids[item_id] = new
        log.log(
            logging.INFO if call.fallback else logging.WARNING,
            "tool call %r turns out to be %r",
            was,
            new,
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
        log.debug("arguments of item %r came before their call and wait for it", item_id)
        self._pending.append(PendingArguments(item_id, output_index))
        return self._pending[-1]

    def _apply_pending(self, call: ToolCall) -> list[StreamEvent]:
        mine = [early for early in self._pending if belongs_to(early, call)][:1]
        for early in mine:
            self._pending.remove(early)
            self._add_alias(call, early.item_id)
            call.pieces, call.final_arguments = early.pieces, early.final
        return [ToolArgumentsDelta(call.call_id, "".join(call.pieces))] if call.pieces else []

    def _set_arguments(self, call: ToolCall, arguments: str | None) -> None:
        known = call.arguments
        if arguments is None or (known and not arguments):
            return  # nothing after words is a server's omission
        if known and known != arguments:
            log.warning(
                "tool call %r: the whole arguments (%d characters) differ from what came before "
                "(%d characters); the whole ones count",
                call.call_id,
                len(arguments),
                len(known),
            )
        call.final_arguments = arguments

    def _complete(self, call: ToolCall) -> list[StreamEvent]:
        if not call.name or call.cut:
            return []
        call.completed = True
        log.debug("tool call %r is whole: tool %r", call.call_id, call.name)
        return [
            ToolCallCompleted(
                call.call_id,
                call.name,
                call.arguments,
                call.item_id,
                call.output_index,
                call.custom,
            )
        ]
