"""Assemble the events of a response into blocks, for every provider.

The assembler collects the events of each output item in an ``ItemBuilder``: a dictionary by output index, and of
calls by ``call_id``, because the decoder has decided which item each event belongs to. A response is ``completed``
only if its terminal event is ``completed`` *and* every item is known to be complete. A stream with a problem (an
event that could not be parsed, a gap, a late delta) is still complete if finished items cover all of it; otherwise
it has failed, and the outcome has the reason.
"""

import logging
from bisect import insort
from collections.abc import Iterator, Mapping
from operator import attrgetter
from typing import Any

from kedge.errors import InvalidTurn
from kedge.events.fields import (
    CALL_ARGUMENTS,
    PART_FORMS,
    get_text,
    read_logprobs,
    read_message_parts,
)
from kedge.events.output_items import MESSAGE, REASONING, ItemBuilder, PartBuilder
from kedge.events.types import (
    AnomalyNoted,
    DeltaEvent,
    Event,
    ItemCompleted,
    ItemStarted,
    Outcome,
    OutcomeStatus,
    PartCompleted,
    PartKind,
    ReasoningDelta,
    RefusalDelta,
    ResponseCompleted,
    ResponseFacts,
    ResponseFailed,
    ResponseIncomplete,
    ResponseStarted,
    StreamFailed,
    TerminalEvent,
    TextDelta,
    ToolArgumentsDelta,
    ToolCallCompleted,
    ToolCallRenamed,
    ToolCallStarted,
    build_delta,
)
from kedge.turns import Block
from kedge.turns.frozen_json import get_wrapped

log = logging.getLogger(__name__)

DAMAGED_STREAM = "damaged_stream"
"""The code of an outcome that failed because its stream is inconsistent."""
_FACTS = (set(ResponseFacts.__struct_fields__) & set(Outcome.__struct_fields__)) - {"status"}
"""The members of an outcome that the server sends with the response when it starts and again when it ends."""
_NO_FACTS = ResponseFacts()
_get_index = attrgetter("output_index")


class Assembler:
    """Builds the blocks and the outcome of one response from its events.

    Args:
        native_api: The API that items of unknown types are of; empty for the Responses API.
    """

    def __init__(self, *, native_api: str = "") -> None:
        self._native_api = native_api
        self._items: dict[object, ItemBuilder] = {}
        self._ordered: list[ItemBuilder] = []
        """The items in output order."""
        self._parts: dict[tuple[PartKind, int, int], PartBuilder] = {}
        self._facts: dict[str, Any] = {}
        """What the response says about itself at its end or, if it says nothing there, at its start."""
        self._is_listed_otherwise = self._is_background = False
        self._terminal: TerminalEvent | None = None
        self._error: StreamFailed | None = None
        self._anomalies: dict[str, str] = {}
        self._anchor_problem = ""

    def feed(self, event: Event) -> None:
        """Add one event of the response; events that do not concern its blocks are ignored.

        Args:
            event: An event, in the order in which the decoder emitted it.
        """
        if self._terminal is not None:
            return
        if type(event) is TextDelta:  # most events
            part = self._parts.get(("text", event.output_index, event.content_index))
            if part is None:
                part = self._find_part("text", event, event.content_index)
            if not part.is_complete:
                part.pieces.append(event.delta)
                if event.logprobs:
                    part.logprobs += event.logprobs
            return
        match event:
            case ToolArgumentsDelta():
                if (slot := self._items.get(event.call_id)) is not None:
                    slot.arguments.append(event.delta)
            case ReasoningDelta():
                self._find_part(event.kind, event, event.index).append(event.delta)
            case RefusalDelta():
                self._find_part("refusal", event, event.content_index).append(event.delta)
            case PartCompleted():
                self._find_part(event.kind, event, event.index).complete(event.text)
            case _:
                self._update(event)

    @property
    def response_id(self) -> str:
        """The id of the response; empty until it is known."""
        return self._facts.get("response_id", "")

    def blocks(self) -> tuple[Block, ...]:
        """Return the blocks so far, in output order, incomplete ones included."""
        return tuple(self._build_blocks(completed=self._resolve_status()[0] == "completed"))

    def unstreamed_text(self) -> Iterator[DeltaEvent]:
        """Yield deltas with the text of messages that arrived without any.

        They are for the end of the response: until then it may turn out that the server lost the context, and
        an answer that was not shown can be requested again.
        """
        for slot in self._ordered:
            streamed = any(part.text for part in slot.parts.values())
            if slot.type == MESSAGE and slot.item is not None and not streamed:
                for kind, at, text, part in read_message_parts(slot.item):
                    place = slot.item_id, slot.output_index, at
                    yield build_delta(kind, text, *place, read_logprobs(part))

    def finish(self) -> Outcome:
        """End the response.

        Returns:
            Its status, its blocks and the fields of the response.
        """
        status, code, message = self._resolve_status()
        blocks = tuple(self._build_blocks(completed=status == "completed"))
        if "unreadable" in self._anomalies and status == "completed":
            status, code, message = self._resolve_status()
            blocks = tuple(self._build_blocks(completed=False))
        if status in ("failed", "cut"):
            text = "the stream of response %r ended as %s (%s)"
            log.warning(text, self.response_id, status, code)
        ended, error = self._terminal, self._error
        return Outcome(
            status,
            blocks,
            usage=(ended and ended.usage) or (error and error.usage),
            reason=ended.reason if isinstance(ended, ResponseIncomplete) else "",
            code=code,
            message=message,
            anchor_problem=self._anchor_problem or self._find_anchor_problem(),
            **self._facts,
        )

    def _update(self, event: Event) -> None:
        """Apply an event that is not a part of the text of an item."""
        match event:
            case ItemStarted():
                self._find_item(event.type, event.item_id, event.output_index)
            case ItemCompleted():
                self._add_finished(event.item, event.output_index)
            case ToolCallStarted():
                self._start_call(event).has_fallback_id = bool(event.fallback)
            case ToolCallCompleted():
                slot = self._start_call(event)
                slot.name = event.name
                slot.arguments = PartBuilder([event.arguments], is_complete=True)
            case ToolCallRenamed():
                self._rename_call(event)
            case ResponseStarted():
                self._facts, self._is_background = {}, event.background
                self._set_facts(event)
            case ResponseFailed():
                self._terminal = event
                self._set_facts(event)
            case ResponseCompleted() | ResponseIncomplete():
                self._terminal = event
                self._set_facts(event)
                self._merge_listed(event.output or (), event.indexes)
            case StreamFailed():  # a terminal event may still follow
                self._error = self._error or event
            case AnomalyNoted(kind="contradiction" | "replaced_text"):
                self._anchor_problem = self._anchor_problem or event.detail
            case AnomalyNoted():
                self._anomalies.setdefault(event.kind, event.detail)
            case _:
                pass

    def _set_facts(self, event: ResponseFacts) -> None:
        for name in _FACTS:
            if (value := getattr(event, name)) != getattr(_NO_FACTS, name):
                self._facts[name] = value
        if event.echoed:  # also as null
            self._facts["previous_response_id"] = event.previous_response_id

    def _start_call(self, event: ToolCallStarted | ToolCallCompleted) -> ItemBuilder:
        kind = "custom_tool_call" if event.custom else "function_call"
        slot = self._find_item(kind, event.item_id, event.output_index, event.call_id)
        slot.name = slot.name or event.name
        return slot

    def _rename_call(self, event: ToolCallRenamed) -> None:
        if (slot := self._items.pop(event.was, None)) is not None:
            slot.call_id, slot.has_fallback_id = event.call_id, False
            self._items[event.call_id] = slot

    def _merge_listed(self, items: tuple[Mapping[str, Any], ...], indexes: tuple[int, ...]) -> None:
        """Add the items that the finished response lists; an empty list is from a server that lists none."""
        slots = map(self._add_finished, items, indexes or range(len(items)))
        listed = [slot for slot in slots if slot.type != REASONING]
        known = [slot for slot in self._ordered if slot.type != REASONING and slot.has_content]
        self._is_listed_otherwise = bool(items) and listed != known

    def _find_part(self, kind: PartKind, event: Any, index: int) -> PartBuilder:
        slot = self._find_item(PART_FORMS[kind][2], event.item_id, event.output_index)
        part = slot.parts.setdefault((kind, index), PartBuilder())
        if event.output_index >= 0:
            self._parts[kind, event.output_index, index] = part
        return part

    def _find_item(
        self, kind: str, item_id: str, output_index: int, call_id: str = ""
    ) -> ItemBuilder:
        """Return the item with this call id or at this index; without an index, with this id and type."""
        key = call_id or (output_index if output_index >= 0 else (item_id, kind))
        slot = self._items.get(key)
        if slot is None:
            if output_index < 0:
                output_index = self._ordered[-1].output_index + 1 if self._ordered else 0
            slot = self._items[key] = ItemBuilder(kind, item_id, output_index, call_id=call_id)
            insort(self._ordered, slot, key=_get_index)
        slot.type = slot.type or kind
        slot.item_id = slot.item_id or ("" if call_id else item_id)
        return slot

    def _add_finished(self, item: Mapping[str, Any], output_index: int) -> ItemBuilder:
        """Add a finished item, of which the first version is used."""
        item = get_wrapped(item)
        kind = get_text(item, "type") if "type" in item else MESSAGE
        call_id = get_text(item, "call_id") if kind in CALL_ARGUMENTS else ""
        slot = self._find_item(kind, get_text(item, "id"), output_index, call_id)
        slot.set_item(item)
        return slot

    def _find_anchor_problem(self) -> str:
        """Return why these items may differ from those that the server stored; empty if there is no such sign.

        A finished response lists its items once more. If the list and the stream differ, it is unknown
        which version the server stored, so the response proves nothing about the server's memory.
        """
        for slot in self._ordered:
            if slot.is_contradicted or slot.lacks_text:
                return (
                    f"item {slot.item_id!r} of type {slot.type!r} differs in the finished response"
                )
            if slot.has_fallback_id:
                return f"the server sent no usable call_id for its call of {slot.name!r}"
        if self._is_listed_otherwise:
            return "the finished response lists other items than the stream"
        return ""

    def _build_blocks(self, *, completed: bool) -> Iterator[Block]:
        for slot in self._ordered:
            cut = not completed and (slot.is_cut or not slot.is_finished)
            try:
                block = slot.build_block(self.response_id, self._native_api, is_partial=cut)
            except InvalidTurn as problem:
                log.warning("an item of type %r is invalid: %s", slot.type, problem)
                self._anomalies["unreadable"] = str(problem)
                continue
            if block is not None:
                yield block

    def _resolve_status(self) -> tuple[OutcomeStatus, str, str]:
        """Return the status, and the code and message of a failure."""
        ended, error = self._terminal, self._error
        code, message = (error.code or error.kind, error.message) if error else ("", "")
        if isinstance(ended, ResponseFailed):
            return "failed", ended.code or code, ended.message or message
        if error is not None:
            return "failed", code or "error", message
        if ended is None and self.response_id and self._is_background:
            return "running", "", ""
        if ended is None:
            return "cut", "", "the stream ended before the response was complete"
        if isinstance(ended, ResponseIncomplete):
            return "incomplete", "", ""
        problem = self._find_damage(ended)
        return ("failed", DAMAGED_STREAM, problem) if problem else ("completed", "", "")

    def _find_damage(self, ended: ResponseCompleted) -> str:
        """Return why a response with a ``completed`` event is not complete, or an empty string."""
        anomalies, slots = self._anomalies, self._ordered
        loose = [slot for slot in slots if slot.item is None or slot.lacks_text]
        if "unresolved_call" in anomalies:
            return f"{anomalies['unresolved_call']} is not a complete tool call"
        if "unreadable" in anomalies:
            return f"an item is invalid: {anomalies['unreadable']}"
        if "malformed" in anomalies and not ended.output:
            return f"an event could not be parsed ({anomalies['malformed']})"
        if anomalies:
            first = next(iter(anomalies.values()))
            if any(slot.has_content for slot in loose):
                return f"an item may lack text: {first}"
            is_gapless = set(map(_get_index, slots)) == set(range(len(slots)))
            if not ended.output and not is_gapless:
                return f"an output item is missing: {first}"
        for slot in loose:
            if slot.type not in (MESSAGE, REASONING) and not slot.is_finished:
                return f"an item of type {slot.type!r} was started and never finished"
        return ""
