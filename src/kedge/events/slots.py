"""One item of output as it grows, and the block it becomes.

A slot is filled from two sides: by deltas, which it collects in lists and joins once, and by the
finished item, which wins as soon as it is there. A slot without its finished item is built from what it
has; kinds of item that have no deltas of ours cannot be built that way.
"""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from kedge.errors import InvalidTurn
from kedge.events.outcome import PARTIAL
from kedge.events.surrogates import mended
from kedge.events.types import PartKind
from kedge.turns import (
    ITEM_ID,
    OUTPUT_INDEX,
    RESPONSE_ID,
    AssistantBlock,
    Block,
    ReasoningBlock,
    RefusalPart,
    TextPart,
    ToolCallBlock,
    block_from_item,
    new_id,
)

log = logging.getLogger(__name__)

Item = Mapping[str, Any]

MESSAGE, REASONING, CALL, CUSTOM_CALL = "message", "reasoning", "function_call", "custom_tool_call"
"""The types of item that can be built from deltas; every other type needs its finished item."""
CALLS = (CALL, CUSTOM_CALL)


@dataclass(slots=True)
class Part:
    """The text of one part: pieces, until somebody says the whole of it."""

    pieces: list[str] = field(default_factory=list[str])
    whole: bool = False

    @property
    def text(self) -> str:
        """All of it so far; halves of characters that meet here become one."""
        return mended("".join(self.pieces))

    def complete(self, text: str) -> None:
        """Take the whole text; an empty one after words is a server's omission."""
        if self.whole or (self.pieces and not text):
            self.whole = True
            return
        if self.pieces and (known := self.text) != text:
            log.warning(
                "a part's whole text (%d characters) differs from its deltas (%d characters); "
                "the whole text counts",
                len(text),
                len(known),
            )
        self.pieces, self.whole = [text], True


@dataclass(slots=True)
class Slot:
    """One item of output as it grows."""

    type: str
    output_index: int
    item_id: str = ""
    block_id: str = field(default_factory=lambda: new_id("blk"))
    item: Item | None = None
    """The finished item."""
    parts: dict[tuple[PartKind, int], Part] = field(
        default_factory=dict[tuple[PartKind, int], Part]
    )
    call_id: str = ""
    name: str = ""
    arguments: Part = field(default_factory=Part)

    @property
    def finished(self) -> bool:
        """Whether the whole item is known, from the item itself or, of a call, from its words."""
        return self.item is not None or (self.type in CALLS and self.arguments.whole)

    @property
    def cut(self) -> bool:
        """Whether the provider itself calls the item unfinished."""
        return self.item is not None and self.item.get("status") in ("incomplete", "in_progress")

    @property
    def started(self) -> bool:
        """Whether there is anything that a block could be built from."""
        return bool(self.item or self.parts or self.call_id)

    def fill(self, item: Item) -> None:
        """Take the finished item; the first one counts, and a different second one is logged."""
        if self.item is None:
            self.item = item
        elif self.item != item and _differ(self._named_item(self.item), self._named_item(item)):
            log.warning(
                "item %r of type %r is not the same in the finished response as in the stream; "
                "the stream's counts",
                self.item_id,
                self.type,
            )

    def block(self, response_id: str, origin: str, *, partial: bool = False) -> Block | None:
        """The block, as far as it can be built; ``None`` if there is nothing to build it from."""
        metadata = {
            RESPONSE_ID: response_id,
            ITEM_ID: self.item_id,
            OUTPUT_INDEX: self.output_index,
            PARTIAL: partial or None,
        }
        kept = {name: value for name, value in metadata.items() if value not in ("", None)}
        identity = {"id": self.block_id, "origin": origin, "metadata": kept}
        if self.item is not None:
            return block_from_item(self._named_item(self.item), **identity)
        return self._from_deltas(identity)

    def _named_item(self, item: Item) -> Item:
        """The item under the id that its call goes by now."""
        if self.type in CALLS and self.call_id and item.get("call_id") != self.call_id:
            return {**item, "call_id": self.call_id}
        return item

    def _from_deltas(self, identity: Any) -> Block | None:
        if self.type == MESSAGE:
            parts = tuple(
                RefusalPart(text) if kind == "refusal" else TextPart(text)
                for kind, text in self._texts("text", "refusal")
            )
            return AssistantBlock(parts, **identity) if parts else None
        if self.type == REASONING:
            summary = tuple(text for _, text in self._texts("summary"))
            texts = tuple(text for _, text in self._texts("reasoning"))
            return ReasoningBlock(summary, texts, **identity) if summary or texts else None
        if self.type in CALLS and self.name and self.call_id:
            custom = self.type == CUSTOM_CALL
            return ToolCallBlock(self.name, self.arguments.text, self.call_id, custom, **identity)
        return None

    def _texts(self, *kinds: PartKind) -> Iterator[tuple[PartKind, str]]:
        for (kind, _), part in sorted(self.parts.items(), key=lambda entry: entry[0][1]):
            if kind in kinds and (text := part.text):
                yield kind, text


def _differ(one: Item, other: Item) -> bool:
    """Whether two items say different things to a model."""
    try:
        return block_from_item(one) != block_from_item(other)
    except InvalidTurn:
        return True
