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
from contextlib import suppress
from functools import partial
from operator import attrgetter
from typing import Any, cast

import msgspec

from kedge._internal.json_text import copy_value
from kedge.errors import InvalidTurn
from kedge.events import types
from kedge.events.types import PARTIAL, Outcome, PartKind, TextDelta
from kedge.planning.digests import FALLBACK_CALL_ID
from kedge.turns import NATIVE_API, Block, Source, block_from_item, new_id
from kedge.turns.blocks import ENGINE
from kedge.turns.frozen_json import EMPTY, get_wrapped
from kedge.turns.responses_items import drop_ciphertext
from kedge.wire import fields
from kedge.wire.fields import CALL_ARGUMENTS, PART_FORMS, JsonObject, get_text, read_message_parts
from kedge.wire.items import OutputItem

log = logging.getLogger(__name__)

Item = Mapping[str, Any]

DAMAGED_STREAM = "damaged_stream"
"""The code of an outcome that failed because its stream is inconsistent."""
_FACTS = (set(types.ResponseFacts.__struct_fields__) & set(Outcome.__struct_fields__)) - {"status"}
"""The members of an outcome that the server sends with the response when it starts and again when it ends."""
_NO_FACTS = types.ResponseFacts()
_get_index = attrgetter("output_index")


MESSAGE = "message"
REASONING = "reasoning"
_BUILT_TYPES = (MESSAGE, REASONING, *CALL_ARGUMENTS)
"""The item types that can be built from deltas; others need the finished item."""
_TEXT_TYPES = ("output_text", "text", "refusal")


class PartBuilder(msgspec.Struct):
    """Collects the text of one part: its deltas, until the complete text arrives."""

    pieces: list[str] = []
    is_complete: bool = False
    logprobs: list[Mapping[str, Any]] = []

    @property
    def text(self) -> str:
        """The text so far; surrogate pairs that were split between deltas are joined."""
        return fields.repair_surrogates("".join(self.pieces))

    def append(self, delta: str) -> None:
        """Add a delta; further deltas of a complete text are ignored."""
        if not self.is_complete:
            self.pieces.append(delta)

    def complete(self, text: str) -> None:
        """Set the complete text; an empty text is ignored if there is another."""
        earlier = self.text
        if earlier and (self.is_complete or not text):
            self.is_complete = True
            return
        if earlier and earlier != text:
            log.warning(
                "the complete text of a part (%d characters) differs from its deltas (%d characters); "
                "the complete text is used",
                len(text),
                len(earlier),
            )
        self.pieces = [text]
        self.is_complete = True


class ItemBuilder(OutputItem, eq=False):
    """Collects the events of one output item."""

    block_id: str = msgspec.field(default_factory=partial(new_id, "blk"))
    item: Item | None = None
    """The finished item."""
    parts: dict[tuple[PartKind, int], PartBuilder] = msgspec.field(
        default_factory=dict[tuple[PartKind, int], PartBuilder]
    )
    name: str = ""
    arguments: PartBuilder = msgspec.field(default_factory=PartBuilder)
    has_fallback_id: bool = False
    """Whether ``call_id`` is not the server's id of the call."""
    is_contradicted: bool = False
    """Whether the finished response lists another version of the finished item."""

    @property
    def is_finished(self) -> bool:
        """Whether the finished item, or the complete arguments of a call, were received."""
        return self.item is not None or (self.type in CALL_ARGUMENTS and self.arguments.is_complete)

    @property
    def is_cut(self) -> bool:
        """Whether the provider marks the item as incomplete."""
        return self.item is not None and self.item.get("status") in ("incomplete", "in_progress")

    @property
    def lacks_text(self) -> bool:
        """Whether the finished item is a message without the text that its events have."""
        if self.item is None or self.type != MESSAGE or not self.parts:
            return False
        return _is_empty_message(self.item) and any(part.text for part in self.parts.values())

    @property
    def has_content(self) -> bool:
        """Whether there is anything to build a block from."""
        return bool(self.item or self.parts or self.call_id)

    def set_item(self, item: Item) -> None:
        """Set the finished item; the first version with content is used, and a different second version is logged."""
        earlier = self.item
        if earlier == item:
            return
        if earlier is None:
            is_used = True
        elif not _items_differ(self._complete_item(earlier), self._complete_item(item)):
            # Some servers add annotations only at the end.
            is_used = _count_annotations(item) > _count_annotations(earlier)
        else:
            self.is_contradicted = self.type != REASONING
            is_used = self.type == MESSAGE and _is_empty_message(earlier)
            log.warning(
                "item %r of type %r differs between the stream and the finished response; the %s version is used",
                self.item_id,
                self.type,
                "listed" if is_used else "streamed",
            )
        if is_used:
            self.item = item
            # So that an owner who changes the item of an event does not change the block; unless it is too deep
            # for a block, or not the value of a decoder.
            with suppress(RecursionError, TypeError):
                self.item = copy_value(item)

    def build_block(
        self, response_id: str, native_api: str = "", *, is_partial: bool = False
    ) -> Block | None:
        """Build the block as far as possible; None if there is nothing to build it from."""
        if self.item is None:
            item = self._build_item()
        else:
            item = self._complete_item(self.item)
        if item is None:
            return None
        if self.lacks_text:
            item = {**item, "content": self._list_parts("text", "refusal")}
        metadata: JsonObject = {}
        if native_api and self.type not in _BUILT_TYPES:
            metadata[NATIVE_API] = native_api
        if is_partial:
            metadata[PARTIAL] = True
        if self.has_fallback_id:
            metadata[FALLBACK_CALL_ID] = True
        source = Source(response_id, self.item_id, self.output_index)
        return block_from_item(
            item, id=self.block_id, origin=ENGINE, metadata=metadata or EMPTY, source=source
        )

    def _complete_item(self, item: Item) -> Item:
        """Return the item with the current id of its call, or with the role that a message omits."""
        if self.type in CALL_ARGUMENTS and self.call_id and item.get("call_id") != self.call_id:
            return {**item, "call_id": self.call_id}
        if self.type == MESSAGE and item.get("role") is None:
            return {**item, "role": "assistant"}
        return item

    def _build_item(self) -> JsonObject | None:
        """Return the item as far as its events have it; None if they have nothing of it."""
        if self.type == MESSAGE:
            content = self._list_parts("text", "refusal")
            if content:
                return fields.build_message(content)
        elif self.type == REASONING:
            summary = self._list_parts("summary")
            content = self._list_parts("reasoning")
            if summary or content:
                return {"type": REASONING, "summary": summary, "content": content}
        elif self.type in CALL_ARGUMENTS and self.name and self.call_id:
            return {
                "type": self.type,
                "call_id": self.call_id,
                "name": self.name,
                CALL_ARGUMENTS[self.type]: self.arguments.text,
            }
        return None

    def _list_parts(self, *kinds: PartKind) -> list[JsonObject]:
        """Return the parts of these kinds that have a text, in their order."""
        parts: list[JsonObject] = []
        for (kind, _), builder in sorted(self.parts.items(), key=lambda entry: entry[0][1]):
            text = builder.text
            if kind not in kinds or not text:
                continue
            form, member, _ = PART_FORMS[kind]
            part: JsonObject = {"type": form, member: text}
            if builder.logprobs:
                part["logprobs"] = builder.logprobs
            parts.append(part)
        return parts


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
        self._is_listed_otherwise = False
        """Whether the finished response lists other items than the stream."""
        self._is_background = False
        self._terminal: types.TerminalEvent | None = None
        self._error: types.StreamFailed | None = None
        self._anomalies: dict[str, str] = {}
        self._anchor_problem = ""

    def feed(self, event: types.Event) -> None:
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
            case types.ToolArgumentsDelta():
                builder = self._items.get(event.call_id)
                if builder is not None:
                    builder.arguments.append(event.delta)
            case types.ReasoningDelta():
                self._find_part(event.kind, event, event.index).append(event.delta)
            case types.RefusalDelta():
                self._find_part("refusal", event, event.content_index).append(event.delta)
            case types.PartCompleted():
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

    def unstreamed_text(self) -> Iterator[types.DeltaEvent]:
        """Yield deltas with the text of messages that arrived without any.

        They are for the end of the response: until then it may turn out that the server lost the context, and
        an answer that was not shown can be requested again.
        """
        for builder in self._ordered:
            if builder.type != MESSAGE or builder.item is None:
                continue
            if any(part.text for part in builder.parts.values()):
                continue
            for part in read_message_parts(builder.item):
                yield types.build_delta(
                    part.kind,
                    part.text,
                    builder.item_id,
                    builder.output_index,
                    part.position,
                    fields.read_logprobs(part.content),
                )

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
        reason = ""
        if isinstance(self._terminal, types.ResponseIncomplete):
            reason = self._terminal.reason
        return Outcome(
            status,
            blocks,
            usage=self._find_usage(),
            reason=reason,
            code=code,
            message=message,
            anchor_problem=self._anchor_problem or self._find_anchor_problem(),
            **self._facts,
        )

    def _find_usage(self) -> types.Usage | None:
        """Return the token counts of the response or, if it has none, of its error."""
        if self._terminal is not None and self._terminal.usage:
            return self._terminal.usage
        if self._error is not None:
            return self._error.usage
        return None

    def _update(self, event: types.Event) -> None:
        """Apply an event that is not a part of the text of an item."""
        match event:
            case types.ItemStarted():
                self._find_item(event.type, event.item_id, event.output_index)
            case types.ItemCompleted():
                self._add_finished(event.item, event.output_index)
            case types.ToolCallStarted():
                self._start_call(event).has_fallback_id = bool(event.fallback)
            case types.ToolCallCompleted():
                call = self._start_call(event)
                call.name = event.name
                call.arguments = PartBuilder([event.arguments], is_complete=True)
            case types.ToolCallRenamed():
                self._rename_call(event)
            case types.ResponseStarted():
                self._facts = {}
                self._is_background = event.background
                self._set_facts(event)
            case types.ResponseFailed():
                self._terminal = event
                self._set_facts(event)
            case types.ResponseCompleted() | types.ResponseIncomplete():
                self._terminal = event
                self._set_facts(event)
                self._merge_listed(event.output or (), event.indexes)
            case types.StreamFailed():  # a terminal event may still follow
                self._error = self._error or event
            case types.AnomalyNoted(kind="contradiction" | "replaced_text"):
                self._anchor_problem = self._anchor_problem or event.detail
            case types.AnomalyNoted():
                self._anomalies.setdefault(event.kind, event.detail)
            case _:
                pass

    def _set_facts(self, event: types.ResponseFacts) -> None:
        for name in _FACTS:
            value = getattr(event, name)
            if value != getattr(_NO_FACTS, name):
                self._facts[name] = value
        if event.echoed:  # also as null
            self._facts["previous_response_id"] = event.previous_response_id

    def _start_call(self, event: types.ToolCallStarted | types.ToolCallCompleted) -> ItemBuilder:
        kind = "custom_tool_call" if event.custom else "function_call"
        call = self._find_item(kind, event.item_id, event.output_index, event.call_id)
        call.name = call.name or event.name
        return call

    def _rename_call(self, event: types.ToolCallRenamed) -> None:
        call = self._items.pop(event.was, None)
        if call is not None:
            call.call_id = event.call_id
            call.has_fallback_id = False
            self._items[event.call_id] = call

    def _merge_listed(self, items: tuple[Item, ...], indexes: tuple[int, ...]) -> None:
        """Add the items that the finished response lists; an empty list is from a server that lists none."""
        builders = map(self._add_finished, items, indexes or range(len(items)))
        listed = [builder for builder in builders if builder.type != REASONING]
        streamed = [
            builder
            for builder in self._ordered
            if builder.type != REASONING and builder.has_content
        ]
        self._is_listed_otherwise = bool(items) and listed != streamed

    def _find_part(self, kind: PartKind, event: Any, index: int) -> PartBuilder:
        builder = self._find_item(PART_FORMS[kind][2], event.item_id, event.output_index)
        part = builder.parts.setdefault((kind, index), PartBuilder())
        if event.output_index >= 0:
            self._parts[kind, event.output_index, index] = part
        return part

    def _find_item(
        self, kind: str, item_id: str, output_index: int, call_id: str = ""
    ) -> ItemBuilder:
        """Return the item with this call id or at this index; without an index, with this id and type."""
        key: object = (item_id, kind)
        if call_id:
            key = call_id
        elif output_index >= 0:
            key = output_index
        builder = self._items.get(key)
        if builder is None:
            builder = self._add_item(ItemBuilder(kind, item_id, output_index, call_id=call_id))
            self._items[key] = builder
        builder.type = builder.type or kind
        if not call_id:
            builder.item_id = builder.item_id or item_id
        return builder

    def _add_item(self, builder: ItemBuilder) -> ItemBuilder:
        """Add an item at its place in the output; an item without an index is the last so far."""
        if builder.output_index < 0:
            builder.output_index = 0
            if self._ordered:
                builder.output_index = self._ordered[-1].output_index + 1
        insort(self._ordered, builder, key=_get_index)
        return builder

    def _add_finished(self, item: Item, output_index: int) -> ItemBuilder:
        """Add a finished item, of which the first version is used."""
        item = get_wrapped(item)
        kind = MESSAGE  # some servers omit the type of a message
        if "type" in item:
            kind = get_text(item, "type")
        call_id = ""
        if kind in CALL_ARGUMENTS:
            call_id = get_text(item, "call_id")
        builder = self._find_item(kind, get_text(item, "id"), output_index, call_id)
        builder.set_item(item)
        return builder

    def _find_anchor_problem(self) -> str:
        """Return why these items may differ from those that the server stored; empty if there is no such sign.

        A finished response lists its items once more. If the list and the stream differ, it is unknown
        which version the server stored, so the response proves nothing about the server's memory.
        """
        for builder in self._ordered:
            if builder.is_contradicted or builder.lacks_text:
                item = f"item {builder.item_id!r} of type {builder.type!r}"
                return f"{item} differs in the finished response"
            if builder.has_fallback_id:
                return f"the server sent no usable call_id for its call of {builder.name!r}"
        if self._is_listed_otherwise:
            return "the finished response lists other items than the stream"
        return ""

    def _build_blocks(self, *, completed: bool) -> Iterator[Block]:
        for builder in self._ordered:
            is_partial = not completed and (builder.is_cut or not builder.is_finished)
            try:
                block = builder.build_block(
                    self.response_id, self._native_api, is_partial=is_partial
                )
            except InvalidTurn as problem:
                log.warning("an item of type %r is invalid: %s", builder.type, problem)
                self._anomalies["unreadable"] = str(problem)
                continue
            if block is not None:
                yield block

    def _resolve_status(self) -> tuple[types.OutcomeStatus, str, str]:
        """Return the status, and the code and message of a failure."""
        terminal = self._terminal
        code = ""
        message = ""
        if self._error is not None:
            code = self._error.code or self._error.kind
            message = self._error.message
        if isinstance(terminal, types.ResponseFailed):
            return "failed", terminal.code or code, terminal.message or message
        if self._error is not None:
            return "failed", code or "error", message
        if terminal is None and self.response_id and self._is_background:
            return "running", "", ""
        if terminal is None:
            return "cut", "", "the stream ended before the response was complete"
        if isinstance(terminal, types.ResponseIncomplete):
            return "incomplete", "", ""
        problem = self._find_damage(terminal)
        if problem:
            return "failed", DAMAGED_STREAM, problem
        return "completed", "", ""

    def _find_damage(self, terminal: types.ResponseCompleted) -> str:
        """Return why a response with a ``completed`` event is not complete, or an empty string."""
        anomalies = self._anomalies
        unfinished = [
            builder for builder in self._ordered if builder.item is None or builder.lacks_text
        ]
        if "unresolved_call" in anomalies:
            return f"{anomalies['unresolved_call']} is not a complete tool call"
        if "unreadable" in anomalies:
            return f"an item is invalid: {anomalies['unreadable']}"
        if "malformed" in anomalies and not terminal.output:
            return f"an event could not be parsed ({anomalies['malformed']})"
        if anomalies:
            first = next(iter(anomalies.values()))
            if any(builder.has_content for builder in unfinished):
                return f"an item may lack text: {first}"
            is_gapless = set(map(_get_index, self._ordered)) == set(range(len(self._ordered)))
            if not terminal.output and not is_gapless:
                return f"an output item is missing: {first}"
        for builder in unfinished:
            if builder.type not in (MESSAGE, REASONING) and not builder.is_finished:
                return f"an item of type {builder.type!r} was started and never finished"
        return ""


def _is_empty_message(item: Item) -> bool:
    """Return whether a message has no content, or only empty text."""
    content: Any = item.get("content")
    if not isinstance(content, list):
        return not content
    return all(map(_is_text_part, cast("list[Any]", content))) and not read_message_parts(item)


def _is_text_part(part: object) -> bool:
    return isinstance(part, dict) and cast("Item", part).get("type") in _TEXT_TYPES


def _items_differ(one: Item, other: Item) -> bool:
    """Return whether two items differ in content that a model reads, whatever was encrypted anew."""
    try:
        return drop_ciphertext(block_from_item(one)) != drop_ciphertext(block_from_item(other))
    except InvalidTurn:
        return True


def _count_annotations(item: Item) -> int:
    """Return how many annotations the texts of a message have."""
    parts = read_message_parts(item)
    return sum(len(fields.list_objects(part.content.get("annotations"))) for part in parts)
