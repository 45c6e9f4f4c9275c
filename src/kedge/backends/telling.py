"""From the events of an engine to the pieces of the server's answer.

The server writes one item after another, while a provider may write several at once. So one item is
open at a time: text and thoughts end where the next item begins; a call stays open until it is whole, and
what is written beside it waits. Whatever the stream did not tell is taken from the finished answer.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from kedge.backends.asking import kept_with
from kedge.events import (
    Event,
    ItemCompleted,
    Outcome,
    PartCompleted,
    ReasoningDelta,
    RefusalDelta,
    TextDelta,
    ToolArgumentsDelta,
    ToolCallCompleted,
    ToolCallRenamed,
    ToolCallStarted,
    Usage,
)
from kedge.events.assembler import Assembler
from kedge.server.models import Added, Closed, Counted, Grown, Kind, Opened, Piece
from kedge.turns import (
    OUTPUT_INDEX,
    AssistantBlock,
    Block,
    OpaqueBlock,
    ReasoningBlock,
    RefusalPart,
    TextPart,
    ToolCallBlock,
)

Place = tuple[str, object]
"""Which item a piece belongs to: what it is, and where, or under which call id."""


@dataclass(slots=True)
class _Item:
    """An item on its way: how it opens, what of it was told, what waits, whether it is whole."""

    opened: Opened
    output_index: int
    told: list[str] = field(default_factory=list[str])
    waiting: str = ""
    begun: bool = False
    whole: bool = False
    index: int = 0


@dataclass(slots=True)
class Telling:
    """Tells one answer; ``before`` is the digest of what was asked."""

    before: str
    assembler: Assembler = field(default_factory=Assembler)
    _current: Place | None = None
    _items: dict[Place, _Item] = field(default_factory=dict[Place, _Item])
    _names: dict[str, str] = field(default_factory=dict[str, str])
    _indices: set[int] = field(default_factory=set[int])

    def feed(self, event: Event) -> Iterator[Piece]:
        """Tell what an event adds to the answer."""
        self.assembler.feed(event)
        match event:
            case TextDelta():
                place = ("text", (event.output_index, event.content_index))
                yield from self._grow(place, "text", event.output_index, event.delta)
            case RefusalDelta():
                place = ("refusal", (event.output_index, event.content_index))
                yield from self._grow(place, "refusal", event.output_index, event.delta)
            case ReasoningDelta():
                yield from self._think(event)
            case PartCompleted(kind="text" | "refusal" as kind):
                place = (kind, (event.output_index, event.index))
                rest = self._rest(place, event.text)
                yield from self._grow(place, kind, event.output_index, rest)
            case ToolCallStarted():
                yield from self._call(event)
            case ToolArgumentsDelta():
                yield from self._grow_call(event.call_id, event.delta)
            case ToolCallRenamed():
                self._names[event.call_id] = self._names.get(event.was, event.was)
            case ToolCallCompleted():
                yield from self._complete(event)
            case ItemCompleted():
                yield from self._end_item(event)
            case _:
                pass

    def finish(self, outcome: Outcome) -> Iterator[Piece]:
        """Tell the rest: what waits, and what the stream never told."""
        for item in self._items.values():
            item.whole = True
        yield from self._close()
        for block in outcome.blocks:
            if block.metadata.get(OUTPUT_INDEX) not in self._indices:
                yield from pieces_of(block, self.before)
        if outcome.usage is not None:
            yield counted(outcome.usage)

    # Text, refusals and thoughts.

    def _think(self, event: ReasoningDelta) -> Iterator[Piece]:
        place = ("reasoning", event.output_index)
        item = self._items.get(place)
        gap = "\n\n" if item is not None and item.told and item.index != event.index else ""
        yield from self._grow(place, "reasoning", event.output_index, gap + event.delta)
        self._items[place].index = event.index

    def _grow(self, place: Place, kind: Kind, output_index: int, text: str) -> Iterator[Piece]:
        item = self._items.get(place)
        if item is None:
            item = self._items[place] = _Item(Opened(kind), output_index)
            self._indices.add(output_index)
        yield from self._add(place, item, text)

    def _add(self, place: Place, item: _Item, text: str) -> Iterator[Piece]:
        """Tell some text of an item, now or later."""
        if place != self._current and not self._may_open():
            item.waiting += text
            return
        if place != self._current:
            yield from self._open(place, item)
        if text:
            item.told.append(text)
            yield Grown(text)

    def _may_open(self) -> bool:
        """Whether another item may begin: not beside a call that is still written."""
        return self._current is None or self._current[0] != "call"

    def _open(self, place: Place, item: _Item) -> Iterator[Piece]:
        yield from self._end()
        self._current = place
        item.begun = True
        yield item.opened

    def _end(self) -> Iterator[Piece]:
        """End the open item."""
        if self._current is None:
            return
        kind, index = self._current
        self._current = None
        kept = self._kept(index) if kind == "reasoning" else None
        yield Closed(kept=kept)

    def _kept(self, index: object) -> object:
        for block in self.assembler.blocks():
            if isinstance(block, ReasoningBlock) and block.metadata.get(OUTPUT_INDEX) == index:
                return kept_with(block, self.before)
        return None

    def _rest(self, place: Place, text: str) -> str:
        """What of a finished part was not told yet."""
        item = self._items.get(place)
        told = "".join(item.told) + item.waiting if item is not None else ""
        return text[len(told) :] if text.startswith(told) else ""

    # Calls.

    def _call(self, event: ToolCallStarted) -> Iterator[Piece]:
        kind: Kind = "custom_tool_call" if event.custom else "function_call"
        place = ("call", event.call_id)
        if place in self._items:
            return
        item = _Item(Opened(kind, event.name, event.call_id), event.output_index)
        self._items[place] = item
        self._indices.add(event.output_index)
        yield from self._add(place, item, "")

    def _grow_call(self, call_id: str, text: str) -> Iterator[Piece]:
        place = ("call", self._names.get(call_id, call_id))
        item = self._items.get(place)
        if item is not None:
            yield from self._add(place, item, text)

    def _complete(self, event: ToolCallCompleted) -> Iterator[Piece]:
        place = ("call", self._names.get(event.call_id, event.call_id))
        if place not in self._items:
            yield from self._call(
                ToolCallStarted(
                    event.call_id, event.name, event.item_id, event.output_index, event.custom
                )
            )
        item = self._items[place]
        if item.whole:
            return
        yield from self._add(place, item, self._rest(place, event.arguments))
        item.whole = True
        if place == self._current:
            yield from self._close()

    def _close(self) -> Iterator[Piece]:
        """End the open item, and tell what waited behind it as far as it goes."""
        yield from self._end()
        for place, item in self._items.items():
            if item.waiting or not item.begun:
                text, item.waiting = item.waiting, ""
                yield from self._add(place, item, text)
                if not item.whole:
                    return  # it is open now, and the others wait on
                yield from self._end()

    def _end_item(self, event: ItemCompleted) -> Iterator[Piece]:
        kind, current = event.item.get("type"), self._current
        if event.item.get("status") == "incomplete":
            return  # it stays open: so does the server leave what was cut short
        thought = kind == "reasoning" and current == ("reasoning", event.output_index)
        said = kind == "message" and current is not None and current[0] in ("text", "refusal")
        if thought or said:
            yield from self._end()


def pieces_of(block: Block, before: str) -> Iterator[Piece]:
    """Tell a whole block."""
    match block:
        case AssistantBlock():
            for part in block.parts:
                if isinstance(part, TextPart | RefusalPart):
                    yield Opened("text" if isinstance(part, TextPart) else "refusal")
                    yield Grown(part.text)
                    yield Closed()
        case ReasoningBlock():
            yield Opened("reasoning")
            yield Grown("\n\n".join(block.summary or block.texts))
            yield Closed(kept=kept_with(block, before))
        case ToolCallBlock():
            kind: Kind = "custom_tool_call" if block.custom else "function_call"
            yield Opened(kind, block.name, block.call_id)
            yield Grown(block.arguments)
            yield Closed()
        case OpaqueBlock():
            yield Added(dict(block.item))
        case _:
            pass


def counted(usage: Usage) -> Counted:
    """What an answer took, as the provider counts it."""
    return Counted(
        usage.input_tokens, usage.output_tokens, usage.cached_tokens, usage.reasoning_tokens
    )
