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
from collections.abc import Sequence

from kedge.events.call import (
    CallSeen,
    CallSummary,
    EarlyWords,
    ToolCall,
    belongs,
    flaw_of,
    same_place,
    usable,
)
from kedge.events.pairing import paired
from kedge.events.types import (
    StreamEvent,
    ToolArgumentsDelta,
    ToolCallCompleted,
    ToolCallRenamed,
    ToolCallStarted,
)
from kedge.turns import new_id

log = logging.getLogger(__name__)


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
        self._early: list[EarlyWords] = []
        self._places: dict[int, list[ToolCall]] = {}

    def started(self, seen: CallSeen) -> list[StreamEvent]:
        """A call was begun; an event that says so again changes nothing."""
        call = self._find(seen) or self._at(seen.output_index, seen.item_id)
        if call is None:
            return self._open(seen)
        self._alias(call, seen.item_id)
        call.name = call.name or seen.name
        return self._rename(call, seen)

    def wrote(self, item_id: str, output_index: int, delta: str) -> list[StreamEvent]:
        """Some of a call's arguments arrived."""
        call = self._owner(item_id, output_index)
        if call is None:
            self._waiting(item_id, output_index).pieces.append(delta)
            return []
        if call.completed:
            return []
        call.pieces.append(delta)
        return [ToolArgumentsDelta(call.call_id, delta)]

    def wrote_all(self, item_id: str, output_index: int, arguments: str) -> None:
        """A call's arguments are whole; they win over the deltas."""
        call = self._owner(item_id, output_index)
        if call is None:
            self._waiting(item_id, output_index).written = arguments
        elif not call.completed:
            self._settle_arguments(call, arguments)

    def finished(self, seen: CallSeen) -> tuple[ToolCall, list[StreamEvent]]:
        """A call is whole: give it as it now stands, and what that changed."""
        return self._finish(self._find(seen) or self._at(seen.output_index), seen)

    def listed(self, calls: Sequence[CallSeen]) -> list[tuple[ToolCall, list[StreamEvent]]]:
        """The finished response lists its calls: each is one that we know, or a new one."""
        known = paired(
            calls,
            self.in_order(),
            (
                lambda seen: (self.call_ids.get(seen.item_id), usable(seen.call_id)),
                lambda call: (call.call_id, call.call_id),
            ),
            (lambda seen: usable(seen.call_id), lambda call: call.call_id),
            (lambda seen: self.call_ids.get(seen.item_id), lambda call: call.call_id),
            (lambda seen: seen.output_index, lambda call: call.output_index),
            (lambda seen: seen.custom, lambda call: call.custom),
        )
        return [self._finish(call, seen) for call, seen in zip(known, calls, strict=True)]

    def _finish(self, call: ToolCall | None, seen: CallSeen) -> tuple[ToolCall, list[StreamEvent]]:
        events: list[StreamEvent] = []
        if call is None:
            events += self._open(seen)
            call = self._places[seen.output_index][-1]
        self._alias(call, seen.item_id)
        events += self._rename(call, seen)
        if not call.completed:
            call.name = seen.name or call.name
            call.item_id = seen.item_id or call.item_id
            call.cut = call.cut or seen.cut
            self._settle_arguments(call, seen.arguments)
            events += self._complete(call)
        return call, events

    def settle(self) -> tuple[list[StreamEvent], list[str]]:
        """The response is finished: complete what can be, and name what cannot.

        Some servers never say that a call is whole; then its deltas are all there is.
        """
        events: list[StreamEvent] = []
        for call in self._open_calls():
            if call.written is not None or call.pieces:
                events += self._complete(call)
        unresolved = [f"call {call.call_id!r}" for call in self._open_calls()]
        unresolved += [f"item {early.item_id!r}" for early in self._early]
        self.failed += len(unresolved)
        for name in unresolved:
            log.warning("%s never became a whole tool call", name)
        return events, unresolved

    def summary(self) -> CallSummary:
        """All call ids at the end, in the order of the output."""
        return CallSummary(
            tuple(call.call_id for call in self.in_order() if call.completed),
            tuple(call.call_id for call in self.in_order() if not call.completed),
            self.extracted,
            self.fallen_back,
            self.corrected,
            self.failed,
        )

    @property
    def renamed(self) -> bool:
        """Whether a call goes by an id that the provider does not know it by."""
        return any(call.fallback for call in self.calls.values())

    def log_summary(self) -> None:
        """Say at the end which calls there were; a response without calls says nothing."""
        if self.calls or self.failed:
            log.info("tool calls: %s", self.summary())

    def in_order(self) -> list[ToolCall]:
        """The calls in the order of the output."""
        return sorted(self.calls.values(), key=lambda call: call.output_index)

    def _open_calls(self) -> list[ToolCall]:
        return [call for call in self.in_order() if not call.completed]

    # Finding the call that an event speaks of.

    def _find(self, seen: CallSeen) -> ToolCall | None:
        call_id = usable(seen.call_id)
        call = self._item(seen.item_id, seen.output_index)
        if call and (same_place(call, seen.output_index) or call_id in ("", call.call_id)):
            return call
        if call and call.fallback:  # its real id is still to come; this may be it
            return call
        call = self.calls.get(call_id)
        return call if call and same_place(call, seen.output_index) else None

    def _item(self, item_id: str, output_index: int) -> ToolCall | None:
        """The call of this item; if two share the id, the one at this place."""
        call = self.calls.get(self.call_ids.get(item_id, ""))
        if call is None or same_place(call, output_index):
            return call
        here = [c for c in self._places.get(output_index, ()) if c.item_id == item_id]
        return here[0] if here else call

    def _at(self, output_index: int, item_id: str = "") -> ToolCall | None:
        """The only open call at this place, unless it is known as another item than this."""
        here = [
            call
            for call in self._places.get(output_index, ())
            if not call.completed and not (call.item_id and item_id)
        ]
        return here[0] if len(here) == 1 else None

    def _owner(self, item_id: str, output_index: int) -> ToolCall | None:
        """The call that words of this item belong to."""
        call = self._item(item_id, output_index) or self._at(output_index)
        if call is None and len(here := self._places.get(output_index, [])) == 1:
            call = here[0]  # it is whole already; late words of it say nothing new
        if call is not None:
            self._alias(call, item_id)
        return call

    def _alias(self, call: ToolCall, item_id: str) -> None:
        if not item_id or item_id in self.call_ids:
            return
        if call.item_id:
            log.debug("tool call %r is item %r and %r", call.call_id, call.item_id, item_id)
        call.item_id = call.item_id or item_id
        self.call_ids[item_id] = call.call_id

    # Opening a call, and the ids it goes by.

    def _open(self, seen: CallSeen) -> list[StreamEvent]:
        call_id, fallback = self._identify(seen)
        call = ToolCall(call_id, seen.name, seen.item_id, seen.output_index, seen.custom, fallback)
        self.calls[call_id] = call
        self._places.setdefault(seen.output_index, []).append(call)
        if seen.item_id:
            self.call_ids[seen.item_id] = call_id
        started = ToolCallStarted(
            call_id, seen.name, seen.item_id, seen.output_index, seen.custom, fallback
        )
        return [started, *self._join_early(call)]

    def _identify(self, seen: CallSeen) -> tuple[str, str]:
        call_id = usable(seen.call_id)
        flaw = "duplicate" if call_id in self.calls else flaw_of(seen.call_id)
        if not flaw:
            self.extracted += 1
            log.debug(
                "tool call %r found: tool %r, item %r, output %d",
                call_id,
                seen.name,
                seen.item_id,
                seen.output_index,
            )
            return call_id, ""
        self.fallen_back += 1
        by_item = seen.item_id and seen.item_id not in self.calls
        call_id = seen.item_id if by_item else new_id("call")
        log.warning(
            "tool call %r goes by its %s because its call_id is %s: tool %r, output %d",
            call_id,
            "item id" if by_item else "local id",
            flaw,
            seen.name,
            seen.output_index,
        )
        return call_id, flaw

    def _rename(self, call: ToolCall, seen: CallSeen) -> list[StreamEvent]:
        """Take the provider's own id, if this event is the first to bring it."""
        new = usable(seen.call_id)
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

    def _waiting(self, item_id: str, output_index: int) -> EarlyWords:
        for early in self._early:
            if (early.item_id, early.output_index) == (item_id, output_index):
                return early
        log.debug("arguments of item %r came before their call and wait for it", item_id)
        self._early.append(EarlyWords(item_id, output_index))
        return self._early[-1]

    def _join_early(self, call: ToolCall) -> list[StreamEvent]:
        mine = [early for early in self._early if belongs(early, call)][:1]
        for early in mine:
            self._early.remove(early)
            self._alias(call, early.item_id)
            call.pieces, call.written = early.pieces, early.written
        return [ToolArgumentsDelta(call.call_id, "".join(call.pieces))] if call.pieces else []

    def _settle_arguments(self, call: ToolCall, arguments: str | None) -> None:
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
        call.written = arguments

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
