"""Build the block of an output item from its events."""

import logging
from collections.abc import Mapping
from functools import partial
from typing import Any, cast

import msgspec

from kedge.errors import InvalidTurn
from kedge.events.fields import (
    CALL_ARGUMENTS,
    PART_FORMS,
    JsonObject,
    build_message,
    list_objects,
    read_message_parts,
    repair_surrogates,
)
from kedge.events.items import OutputItem
from kedge.events.types import PARTIAL, PartKind
from kedge.planning.digests import FALLBACK_CALL_ID
from kedge.text.json_text import copy_value
from kedge.turns import NATIVE_API, Block, Source, block_from_item, new_id
from kedge.turns.blocks import ENGINE
from kedge.turns.frozen_json import EMPTY
from kedge.turns.responses_items import drop_ciphertext

log = logging.getLogger("kedge.events.output_items")

Item = Mapping[str, Any]

MESSAGE, REASONING = "message", "reasoning"
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
        return repair_surrogates("".join(self.pieces))

    def append(self, delta: str) -> None:
        """Add a delta; further ones of a complete text are ignored."""
        if not self.is_complete:
            self.pieces.append(delta)

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
        """Set the finished item; the first one with content is used, and a different second one is logged."""
        known = self.item
        if known == item:
            return
        if known is None:
            is_used = True
        elif not _items_differ(self._complete_item(known), self._complete_item(item)):
            # Some servers add annotations only at the end.
            is_used = _count_annotations(item) > _count_annotations(known)
        else:
            self.is_contradicted = self.type != REASONING
            is_used = self.type == MESSAGE and _is_empty_message(known)
            text = "item %r of type %r differs between the stream and the finished response; the %s version is used"
            log.warning(text, self.item_id, self.type, "listed" if is_used else "streamed")
        if is_used:
            try:  # so that an owner who changes the item of an event does not change the block
                self.item = copy_value(item)
            except (
                RecursionError,
                TypeError,
            ):  # too deep for a block, or not the value of a decoder
                self.item = item

    def build_block(
        self, response_id: str, native_api: str = "", *, is_partial: bool = False
    ) -> Block | None:
        """Build the block as far as possible; None if there is nothing to build it from."""
        item = self._build_item() if self.item is None else self._complete_item(self.item)
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
            return build_message(content) if content else None
        if self.type == REASONING:
            summary, content = self._list_parts("summary"), self._list_parts("reasoning")
            members = {"summary": summary, "content": content}
            return {"type": REASONING, **members} if summary or content else None
        if self.type in CALL_ARGUMENTS and self.name and self.call_id:
            call = {"type": self.type, "call_id": self.call_id, "name": self.name}
            return {**call, CALL_ARGUMENTS[self.type]: self.arguments.text}
        return None

    def _list_parts(self, *kinds: PartKind) -> list[JsonObject]:
        """Return the parts of these kinds that have a text, in their order."""
        listed: list[JsonObject] = []
        for (kind, _), part in sorted(self.parts.items(), key=lambda entry: entry[0][1]):
            if kind in kinds and (text := part.text):
                form, member, _ = PART_FORMS[kind]
                logprobs = {"logprobs": part.logprobs} if part.logprobs else {}
                listed.append({"type": form, member: text, **logprobs})
        return listed


def _is_empty_message(item: Item) -> bool:
    """Return whether a message has no content, or only empty text."""
    content: Any = item.get("content")
    if not isinstance(content, list):
        return not content
    parts = cast("list[Any]", content)
    kinds = [cast("Item", part).get("type") if isinstance(part, dict) else "" for part in parts]
    return all(kind in _TEXT_TYPES for kind in kinds) and not read_message_parts(item)


def _items_differ(one: Item, other: Item) -> bool:
    """Return whether two items differ in content that a model reads, whatever was encrypted anew."""
    try:
        return drop_ciphertext(block_from_item(one)) != drop_ciphertext(block_from_item(other))
    except InvalidTurn:
        return True


def _count_annotations(item: Item) -> int:
    """Return how many annotations the texts of a message have."""
    parts = (part for _, _, _, part in read_message_parts(item))
    return sum(len(list_objects(part.get("annotations"))) for part in parts)
