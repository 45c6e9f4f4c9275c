"""Convert the items of a prompt to a Turn, and the events of an engine to the output events of the server.

The server's context is authoritative, so every item becomes a block. There are two special cases. Ids that the
server assigned to its items are unknown upstream and are removed. Reasoning of the model is returned by
clients encrypted, together with the digest of the conversation before it: if it still follows that
conversation, it is inserted with a record that lets the engine send it again; otherwise it is omitted.

The server writes one item after another, but a provider may interleave several. Therefore only one item is
open at a time: text and reasoning end where the next item starts; a call stays open until it is complete,
and deltas of other items wait. Items that the stream did not contain are added from the finished response.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from kedge import events, turns
from kedge.errors import InvalidTurn
from kedge.events import Event, Outcome
from kedge.planning import AnchorRecord, ConversationState, set_state
from kedge.planning.digests import derived_digests, get_prefix_index
from kedge.server import models
from kedge.server.coherence import is_model_output
from kedge.server.models import ItemKind, OutputEvent
from kedge.server.practice_model import PracticeRequest
from kedge.turns import Block, Turn
from kedge.turns.frozen_json import thaw
from kedge.wire.assembler import Assembler

Item = Mapping[str, Any]
DecryptReasoning = Callable[[str], Any]

ID_PAIRED_TYPES = frozenset({"local_shell_call", "local_shell_call_output", "mcp_approval_request"})
"""Types of items that refer to each other by their ids, which are therefore retained."""

RESULT_FOLLOWS = "The result follows as a message."


def pack_reasoning(block: turns.ReasoningBlock, prefix_digest: str) -> Any:
    """Return the payload to encrypt with a reasoning item; None if it cannot be sent again."""
    if not block.encrypted_content:
        return None
    return {"block": turns.dump_block(block), "before": prefix_digest}


@dataclass(slots=True)
class _ResponseSpan:
    """The output of one upstream response, according to its reasoning items."""

    response_id: str
    prefix_digest: str
    start: int
    stop: int
    output_index: int


@dataclass(slots=True)
class _TurnBuilder:
    """The blocks so far, and the spans among them that start with a reasoning block."""

    decrypt_reasoning: DecryptReasoning
    open_calls: dict[str, Block] = field(default_factory=dict[str, Block])
    """Tool calls without a result so far, by their ids."""
    blocks: list[Block] = field(default_factory=list[Block])
    spans: list[_ResponseSpan] = field(default_factory=list[_ResponseSpan])
    current: _ResponseSpan | None = None

    def add(self, item: Item) -> None:
        """Convert the next item."""
        if item.get("type") == "reasoning":
            self._add_reasoning(item)
            return
        keeps_id = item.get("type") in ID_PAIRED_TYPES
        block = turns.block_from_item(
            {name: item[name] for name in item if name != "id" or keeps_id}
        )
        if isinstance(block, turns.ToolCallBlock):
            # Some clients chain on a response and send its call again before the result; APIs reject that.
            if block == self.open_calls.get(block.call_id):
                return
            self.open_calls[block.call_id] = block
        elif isinstance(block, turns.ToolResultBlock):
            self.open_calls.pop(block.call_id, None)
        if self.current is not None and is_model_output(item):
            self.current.output_index += 1
            self.current.stop += 1
            source = turns.Source(
                self.current.response_id, block.item_id, self.current.output_index
            )
            block = block.with_source(source).with_origin("engine")
        else:
            self.current = None
        self.blocks.append(block)

    def _add_reasoning(self, item: Item) -> None:
        encrypted = item.get("encrypted_content")
        unpacked = _unpack_reasoning(self.decrypt_reasoning(encrypted)) if encrypted else None
        if unpacked is None:
            return  # from another model, or only in plain text
        block, before = unpacked
        index = block.output_index
        if self.current is None or self.current.response_id != block.response_id:
            at = len(self.blocks)
            self.current = _ResponseSpan(block.response_id, before, at, at, -1)
            self.spans.append(self.current)
        self.current.output_index = self.current.output_index + 1 if index is None else index
        self.current.stop += 1
        self.blocks.append(block)


def _unpack_reasoning(payload: Any) -> tuple[turns.ReasoningBlock, str] | None:
    try:
        block = turns.load_block(payload["block"])
        before = payload["before"]
    except (InvalidTurn, KeyError, TypeError):
        return None
    if not isinstance(block, turns.ReasoningBlock) or not isinstance(before, str):
        return None
    return (block, before) if block.response_id else None


def _split_item(item: Item, *, text_results: bool) -> list[Item]:
    """Return equivalent items in forms that every API supports."""
    if item.get("role") in ("system", "developer"):
        parts = _get_parts(item, "content")
        if parts and all(part.get("type") == "input_text" for part in parts):
            return [{**item, "content": [part]} for part in parts]
    elif text_results and str(item.get("type")).endswith("_call_output"):
        parts = _get_parts(item, "output")
        texts = [part for part in parts if part.get("type") == "input_text"]
        rest = [part for part in parts if part.get("type") != "input_text"]
        if rest:
            output = texts or RESULT_FOLLOWS
            message = {"type": "message", "role": "user", "content": rest}
            return [{**item, "output": output}, message]
    return [item]


def _get_parts(item: Item, member: str) -> list[Item]:
    parts = item.get(member)
    return cast("list[Item]", parts) if isinstance(parts, list) else []


def build_turn(
    ask: PracticeRequest,
    decrypt_reasoning: DecryptReasoning,
    scope: str,
    *,
    text_results: bool = False,
) -> Turn:
    """Build the Turn of a request.

    Args:
        ask: The request.
        decrypt_reasoning: A function that decrypts the reasoning of earlier answers.
        scope: The engine's scope.
        text_results: Whether results of tools can only be text; images and files in them then
            become a user message after the results.

    Returns:
        The Turn.
    """
    builder = _TurnBuilder(decrypt_reasoning)
    for item in ask.items:
        for part in _split_item(item, text_results=text_results):
            builder.add(part)
    lead = [turns.system(ask.instructions)] if ask.instructions else []
    turn = Turn([*lead, *builder.blocks])
    records = tuple(_build_records(turn, builder.spans, scope, len(lead)))
    return set_state(turn, ConversationState(anchors=records)) if records else turn


def _build_records(
    turn: Turn, spans: list[_ResponseSpan], scope: str, offset: int
) -> Iterator[AnchorRecord]:
    """Yield a record for each span that still follows the conversation it was generated from."""
    prefixes = get_prefix_index(turn)
    for span in spans:
        start, stop = span.start + offset - turn.lead, span.stop + offset - turn.lead
        if start < 0 or prefixes.digest(prefixes.count(start)) != span.prefix_digest:
            continue
        covered = prefixes.count(stop)
        yield AnchorRecord(
            response_id=span.response_id,
            scope=scope,
            digest=prefixes.digest(covered),
            block_count=covered,
            stored=False,
            derived=derived_digests(turn.blocks[turn.lead + start : turn.lead + stop]),
        )


STREAMED_TYPES = frozenset({"message", "function_call", "custom_tool_call"})
"""The types of items that are emitted by their deltas."""
ItemKey = tuple[str, object]
"""The item that a delta belongs to: its kind, and its index or call id."""


@dataclass(slots=True)
class _PendingItem:
    """An item in progress: its opening event, the emitted and the waiting text, its state."""

    opened: models.ItemOpened
    emitted: list[str] = field(default_factory=list[str])
    pending: str = ""
    logprobs: list[Mapping[str, Any]] = field(default_factory=list[Mapping[str, Any]])
    """Those of the waiting text."""
    is_started: bool = False
    is_complete: bool = False
    index: int = 0

    def find_rest(self, text: str) -> str:
        """Return what is missing of the complete text; empty if the text so far is not its beginning."""
        received = "".join(self.emitted) + self.pending
        return text[len(received) :] if text.startswith(received) else ""


@dataclass(slots=True)
class OutputEmitter:
    """Emits the output events of one response; ``prefix_digest`` is the digest of its request."""

    prefix_digest: str
    assembler: Assembler = field(default_factory=Assembler)
    _current: ItemKey | None = None
    _items: dict[ItemKey, _PendingItem] = field(default_factory=dict[ItemKey, _PendingItem])
    _call_ids: dict[str, str] = field(default_factory=dict[str, str])
    _seen_indices: set[int] = field(default_factory=set[int])

    def feed(self, event: Event) -> Iterator[OutputEvent]:
        """Yield the output events that follow from an event."""
        self.assembler.feed(event)
        match event:
            case events.TextDelta() | events.RefusalDelta():
                kind: ItemKind = "text" if isinstance(event, events.TextDelta) else "refusal"
                key = (kind, (event.output_index, event.content_index))
                item = self._find_or_add(key, models.ItemOpened(kind), event.output_index)
                item.logprobs += event.logprobs if isinstance(event, events.TextDelta) else ()
                yield from self._emit_text(key, item, event.delta)
            case events.ReasoningDelta():
                key = ("reasoning", event.output_index)
                item = self._find_or_add(key, models.ItemOpened("reasoning"), event.output_index)
                gap = "\n\n" if item.emitted and item.index != event.index else ""
                item.index = event.index
                yield from self._emit_text(key, item, gap + event.delta)
            case events.PartCompleted(kind="text" | "refusal" as kind):
                key = (kind, (event.output_index, event.index))
                item = self._find_or_add(key, models.ItemOpened(kind), event.output_index)
                yield from self._emit_text(key, item, item.find_rest(event.text))
            case events.ToolCallStarted():
                yield from self._start_call(event)
            case events.ToolArgumentsDelta():
                key = self._get_call_key(event.call_id)
                if key in self._items:
                    yield from self._emit_text(key, self._items[key], event.delta)
            case events.ToolCallRenamed():
                self._call_ids[event.call_id] = self._call_ids.get(event.was, event.was)
            case events.ToolCallCompleted():
                yield from self._complete_call(event)
            case events.ItemCompleted():
                yield from self._complete_item(event)
            case _:
                pass

    def finish(self, outcome: Outcome) -> Iterator[OutputEvent]:
        """Yield the rest: waiting text, and items that the stream did not contain."""
        for item in self._items.values():
            item.is_complete = True
        yield from self._flush()
        for block in outcome.blocks:
            if block.output_index not in self._seen_indices:
                yield from emit_block(block, self.prefix_digest)
        if (usage := outcome.usage) is not None:
            yield models.ModelUsage(
                usage.input_tokens, usage.output_tokens, usage.cached_tokens, usage.reasoning_tokens
            )

    def _find_or_add(
        self, key: ItemKey, opened: models.ItemOpened, output_index: int
    ) -> _PendingItem:
        if key not in self._items:
            self._items[key] = _PendingItem(opened)
            self._seen_indices.add(output_index)
        return self._items[key]

    def _get_call_key(self, call_id: str) -> ItemKey:
        return "call", self._call_ids.get(call_id, call_id)

    def _emit_text(self, key: ItemKey, item: _PendingItem, text: str) -> Iterator[OutputEvent]:
        """Emit text of an item, or buffer it while another item is open."""
        if key != self._current and not self._can_open():
            item.pending += text
            return
        if key != self._current:
            yield from self._open_item(key, item)
        if text:
            item.emitted.append(text)
            logprobs, item.logprobs = tuple(map(thaw, item.logprobs)), []
            yield models.ItemDelta(text, logprobs)

    def _can_open(self) -> bool:
        """Whether another item may start: not while a call is incomplete."""
        return self._current is None or self._current[0] != "call"

    def _open_item(self, key: ItemKey, item: _PendingItem) -> Iterator[OutputEvent]:
        yield from self._close_item()
        self._current = key
        item.is_started = True
        yield item.opened

    def _close_item(self) -> Iterator[OutputEvent]:
        """Close the open item."""
        if self._current is None:
            return
        (kind, index), self._current = self._current, None
        if kind == "reasoning":
            block = self._find_block(index)
            is_known = isinstance(block, turns.ReasoningBlock)
            yield models.ItemClosed(
                model_data=pack_reasoning(block, self.prefix_digest) if is_known else None
            )
        elif kind == "text":
            output_index, content_index = cast("tuple[int, int]", index)
            block = self._find_block(output_index)
            parts = block.parts if isinstance(block, turns.AssistantBlock) else ()
            yield _close_text(parts[content_index] if content_index < len(parts) else None)
        else:
            yield models.ItemClosed()

    def _find_block(self, index: object) -> Block | None:
        """Return the block of an output item, as far as it has been received."""
        blocks = self.assembler.blocks()
        return next((each for each in blocks if each.output_index == index), None)

    def _start_call(
        self, event: events.ToolCallStarted | events.ToolCallCompleted
    ) -> Iterator[OutputEvent]:
        key = ("call", event.call_id)
        if key not in self._items:
            kind: ItemKind = "custom_tool_call" if event.custom else "function_call"
            opened = models.ItemOpened(kind, event.name, event.call_id)
            item = self._find_or_add(key, opened, event.output_index)
            yield from self._emit_text(key, item, "")

    def _complete_call(self, event: events.ToolCallCompleted) -> Iterator[OutputEvent]:
        key = self._get_call_key(event.call_id)
        if key not in self._items:
            yield from self._start_call(event)
        item = self._items[key]
        if item.is_complete:
            return
        yield from self._emit_text(key, item, item.find_rest(event.arguments))
        item.is_complete = True
        if key == self._current:
            yield from self._flush()

    def _flush(self) -> Iterator[OutputEvent]:
        """Close the open item and emit the waiting items, up to the next incomplete one."""
        yield from self._close_item()
        for key, item in self._items.items():
            if item.pending or not item.is_started:
                text, item.pending = item.pending, ""
                yield from self._emit_text(key, item, text)
                if not item.is_complete:
                    return  # it is open now, and the others still wait
                yield from self._close_item()

    def _complete_item(self, event: events.ItemCompleted) -> Iterator[OutputEvent]:
        kind, current = event.item.get("type"), self._current
        if event.item.get("status") == "incomplete":
            return  # it stays open, because the server does not complete truncated items
        is_reasoning = kind == "reasoning" and current == ("reasoning", event.output_index)
        is_text = kind == "message" and current is not None and current[0] in ("text", "refusal")
        if is_reasoning or is_text:
            yield from self._close_item()
        elif kind not in STREAMED_TYPES and event.output_index not in self._seen_indices:
            # An item without deltas, such as a search, comes before the next one, or else ``finish`` emits it.
            block = self._find_block(event.output_index) if self._can_open() else None
            if block is not None:
                self._seen_indices.add(event.output_index)
                yield from self._close_item()
                yield from emit_block(block, self.prefix_digest)


def emit_block(block: Block, prefix_digest: str) -> Iterator[OutputEvent]:
    """Yield the output events of a complete block."""
    match block:
        case turns.AssistantBlock():
            for part in block.parts:
                if isinstance(part, turns.TextPart | turns.RefusalPart):
                    yield models.ItemOpened(
                        "text" if isinstance(part, turns.TextPart) else "refusal"
                    )
                    yield models.ItemDelta(part.text, _read_list(part, "logprobs"))
                    yield _close_text(part)
        case turns.ReasoningBlock():
            yield models.ItemOpened("reasoning")
            yield models.ItemDelta("\n\n".join(block.summary or block.texts))
            yield models.ItemClosed(model_data=pack_reasoning(block, prefix_digest))
        case turns.ToolCallBlock():
            kind: ItemKind = "custom_tool_call" if block.custom else "function_call"
            yield models.ItemOpened(kind, block.name, block.call_id)
            yield models.ItemDelta(block.arguments)
            yield models.ItemClosed()
        case turns.OpaqueBlock():
            yield models.ItemAdded(thaw(block.item))
        case _:
            pass


def _close_text(part: turns.Part | None) -> models.ItemClosed:
    """Return the end of a text, with the annotations of the received part."""
    return models.ItemClosed(annotations=_read_list(part, "annotations"))


def _read_list(part: turns.Part | None, name: str) -> tuple[Mapping[str, Any], ...]:
    """Return a list of objects that the provider attached to a text."""
    found = part.extra.get(name) if isinstance(part, turns.TextPart) else None
    return tuple(thaw(found)) if isinstance(found, tuple) else ()
