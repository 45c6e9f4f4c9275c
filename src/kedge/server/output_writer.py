"""Convert the output events of a model to output items and stream events.

Each kind of item has one entry in ``ITEM_FORMATS``: the initial item, the event of its deltas, the
events that close it. Without streaming the same writer builds the items only.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, assert_never

from kedge.server.encrypted_content import ReasoningPayload
from kedge.server.item_forms import (
    build_output_text,
    count_item,
    count_items,
    count_text,
    make_call_id,
    make_item_id,
    measure_texts,
    precount,
)
from kedge.server.models import (
    ItemAdded,
    ItemClosed,
    ItemDelta,
    ItemKind,
    ItemOpened,
    ModelUsage,
    OutputEvent,
    OutputTruncated,
)

StreamEvent = dict[str, Any]
"""One event of a stream, without its sequence number."""

OutputItem = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ItemFormat:
    """The format of one kind of output item, and its events.

    ``build_part`` returns the content part (or summary part) with the text, for kinds that have one;
    ``part_event`` is the beginning of the events of such a part, and ``content_key`` the member of the item that
    contains the parts. For other kinds, ``content_key`` is the member with the text itself. ``text_event`` is the
    beginning of the events of the text, ``index_key`` the member of events with the index of a part.
    """

    type: str
    text_event: str
    text_key: str
    content_key: str
    part_event: str = ""
    build_part: Callable[[str], OutputItem] | None = None
    index_key: str = ""


ITEM_FORMATS: Mapping[ItemKind, ItemFormat] = {
    "text": ItemFormat(
        type="message",
        text_event="response.output_text",
        text_key="text",
        content_key="content",
        part_event="response.content_part",
        build_part=build_output_text,
        index_key="content_index",
    ),
    "refusal": ItemFormat(
        type="message",
        text_event="response.refusal",
        text_key="refusal",
        content_key="content",
        part_event="response.content_part",
        build_part=lambda text: {"type": "refusal", "refusal": text},
        index_key="content_index",
    ),
    "reasoning": ItemFormat(
        type="reasoning",
        text_event="response.reasoning_summary_text",
        text_key="text",
        content_key="summary",
        part_event="response.reasoning_summary_part",
        build_part=lambda text: {"type": "summary_text", "text": text},
        index_key="summary_index",
    ),
    "function_call": ItemFormat(
        "function_call", "response.function_call_arguments", "arguments", "arguments"
    ),
    "custom_tool_call": ItemFormat(
        "custom_tool_call", "response.custom_tool_call_input", "input", "input"
    ),
}


CALL_ID_PATTERNS = {
    "call": re.compile(r"(?s:.{1,64})"),
    "toolu": re.compile(r"[a-zA-Z0-9_-]{1,64}"),
}
"""The patterns of call ids that each API accepts with a result, by the prefix of its ids."""


class OutputWriter:
    """A writer that collects the output events of a model into items.

    Args:
        key: The key of the response, from which item ids are derived.
        first_number: The number of the first output item among the items of the response.
        encrypt: Encrypts reasoning.
        encrypt_reasoning: Encrypt all reasoning, not only reasoning with data of the model.
        show_summary: Whether the client requested reasoning summaries.
        call_prefix: The prefix of call ids.
    """

    def __init__(
        self,
        key: str,
        first_number: int,
        *,
        encrypt: Callable[[Any], str] | None = None,
        encrypt_reasoning: bool = False,
        show_summary: bool = True,
        call_prefix: str = "call",
    ) -> None:
        self.items: list[OutputItem] = []
        self.incomplete_reason: str | None = None
        self.reasoning_texts: list[str] = []
        self.usage: ModelUsage | None = None
        self.stop_sequence = ""
        self.text_length = 0
        """The number of characters of all texts."""
        self._key = key
        self._number = first_number
        self._encrypt = encrypt
        self._encrypt_reasoning = encrypt_reasoning
        self._show_summary = show_summary
        self._call_prefix = call_prefix
        self._format = ITEM_FORMATS["text"]
        self._text_chunks: list[str] | None = None
        self._logprobs: list[Mapping[str, Any]] = []
        self._item_tokens: list[int] = []

    def count_each(self) -> list[int]:
        """Return the tokens of each item of the complete output, which are counted once."""
        if len(self._item_tokens) != len(self.items):
            self._item_tokens = list(map(count_item, self.items))
        return self._item_tokens

    def consume(self, event: OutputEvent) -> None:
        """Add an event to the items."""
        match event:
            case ItemOpened():
                self._open_item(event)
            case ItemDelta():
                self._append_text(event.text)
                self._logprobs += event.logprobs
            case ItemClosed():
                self.stop_sequence = event.stop_sequence
                self._close_item("completed", event.model_data)
                if event.annotations:
                    self.items[-1]["content"][0]["annotations"] = list(event.annotations)
            case OutputTruncated():
                self._truncate(event)
            case ModelUsage():
                self.usage = event
            case ItemAdded():
                self.text_length += measure_texts(event.item)
                type = event.item["type"]
                self.items.append({"id": self.next_id(type), **event.item})
                self._number += 1
            case _:
                assert_never(event)

    def feed(self, event: OutputEvent) -> Iterator[StreamEvent]:
        """Add an event to the items and yield the stream events for it."""
        was_open = self._text_chunks is not None
        self.consume(event)
        match event:
            case ItemOpened():
                yield from self._iter_open_events()
            case ItemDelta():
                yield from self._iter_delta_events(event)
            case ItemClosed():
                yield from self._iter_close_events()
            case OutputTruncated():
                if was_open:
                    yield from self._iter_close_events()
            case ModelUsage():
                pass
            case ItemAdded():
                yield self._build_item_event("added", self.items[-1])
                yield self._build_item_event("done", self.items[-1])
            case _:
                assert_never(event)

    def add_item(self, item: OutputItem, progress_event: str) -> Iterator[StreamEvent]:
        """Add a complete item and yield its stream events, with ``progress_event`` in between."""
        self.items.append(item)
        self._number += 1
        yield self._build_item_event("added", item)
        index = len(self.items) - 1
        yield {"type": progress_event, "output_index": index, "item_id": item["id"]}
        yield self._build_item_event("done", item)

    def close_open_item(self) -> None:
        """Close the item that is being written, because the answer ends here."""
        if self._text_chunks is not None:
            self._close_item("incomplete")

    def next_id(self, type: str) -> str:
        """Return the id of the next item."""
        return make_item_id(type, self._key, self._number)

    # Items.

    def _open_item(self, event: ItemOpened) -> None:
        self._format = form = ITEM_FORMATS[event.kind]
        self._delta_event = f"{form.text_event}.delta"
        item: OutputItem = {"id": self.next_id(form.type), "type": form.type}
        if form.type == "message":
            item |= {"role": "assistant", "content": []}
        elif form.type == "reasoning":
            item |= {"summary": []}
        else:
            item |= {
                "call_id": self._choose_call_id(event),
                "name": event.name,
                form.content_key: "",
            }
        if form.type != "reasoning":
            item["status"] = "in_progress"
        self._number += 1
        self._text_chunks = []
        self._logprobs = []
        self.items.append(item)

    def _choose_call_id(self, event: ItemOpened) -> str:
        """Return the id that the model chose, if the API accepts it with a result, or a new one."""
        if CALL_ID_PATTERNS[self._call_prefix].fullmatch(event.call_id):
            return event.call_id
        return make_call_id(self._key, self._number, self._call_prefix)

    def _append_text(self, text: str) -> None:
        assert self._text_chunks is not None, "text without an open item"  # noqa: S101
        self._text_chunks.append(text)
        self.text_length += len(text)

    def _close_item(self, status: str, model_data: Any = None) -> None:
        text = "".join(self._text_chunks or ())
        self._text_chunks = None
        form, item = self._format, self.items[-1]
        if form.type == "reasoning":
            self._fill_reasoning(item, ReasoningPayload(text, model_data, self._show_summary))
        elif form.build_part is not None:
            item[form.content_key] = [form.build_part(text)]
            if self._logprobs:
                item[form.content_key][0]["logprobs"] = self._logprobs
        else:
            item[form.content_key] = text
        if form.type != "reasoning":
            item["status"] = status

    def _fill_reasoning(self, item: OutputItem, payload: ReasoningPayload) -> None:
        self.reasoning_texts.append(payload.text)
        if self._show_summary:
            item["summary"] = [{"type": "summary_text", "text": payload.text}]
        if self._encrypt is not None and (
            self._encrypt_reasoning or payload.model_data is not None
        ):
            item["encrypted_content"] = self._encrypt(payload.to_json())

    def _truncate(self, event: OutputTruncated) -> None:
        self.incomplete_reason = event.reason
        self.close_open_item()

    # Events.

    def _build_item_event(self, name: str, item: OutputItem) -> StreamEvent:
        index = len(self.items) - 1
        return {"type": f"response.output_item.{name}", "output_index": index, "item": item}

    def _build_part_event(self, type: str) -> StreamEvent:
        event = {"type": type, "item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}
        if self._format.build_part is not None:
            event[self._format.index_key] = 0
        return event

    def _is_hidden(self) -> bool:
        return self._format.type == "reasoning" and not self._show_summary

    def _iter_open_events(self) -> Iterator[StreamEvent]:
        yield self._build_item_event("added", dict(self.items[-1]))
        if self._format.build_part is not None and not self._is_hidden():
            part = self._format.build_part("")
            yield self._build_part_event(f"{self._format.part_event}.added") | {"part": part}

    def _iter_delta_events(self, delta: ItemDelta) -> Iterator[StreamEvent]:
        if not self._is_hidden():
            yield self._build_text_event(self._delta_event, "delta", delta.text, delta.logprobs)

    def _iter_close_events(self) -> Iterator[StreamEvent]:
        form, item = self._format, self.items[-1]
        done_event = f"{form.text_event}.done"
        if form.build_part is None:
            yield self._build_text_event(done_event, form.text_key, item[form.content_key])
        elif not self._is_hidden():
            part = item[form.content_key][0]
            for number, annotation in enumerate(part.get("annotations", ())):
                added = self._build_part_event(f"{form.text_event}.annotation.added")
                yield added | {"annotation_index": number, "annotation": annotation}
            logprobs = part.get("logprobs", ())
            yield self._build_text_event(done_event, form.text_key, part[form.text_key], logprobs)
            yield self._build_part_event(f"{form.part_event}.done") | {"part": part}
        yield self._build_item_event("done", dict(item))

    def _build_text_event(
        self, type: str, member: str, text: str, logprobs: Sequence[Mapping[str, Any]] = ()
    ) -> StreamEvent:
        event = self._build_part_event(type)
        event[member] = text
        if self._format.text_event == "response.output_text":
            event["logprobs"] = list(logprobs)
        return event


async def precount_output(writer: OutputWriter) -> None:
    """Count a long answer in a thread, before ``count_usage`` counts it on the loop."""

    def count() -> None:
        count_items(writer.items)
        for text in writer.reasoning_texts:
            count_text(text)

    await precount(writer.text_length, count)


def count_usage(writer: OutputWriter, input: ModelUsage) -> ModelUsage:
    """Return the usage that the model reported, or the usage of its input with the counted answer."""
    return writer.usage or count_answer(writer, input)


def count_answer(writer: OutputWriter, input: ModelUsage) -> ModelUsage:
    """Return the usage of the input with the counted answer."""
    reasoning = sum(map(count_text, writer.reasoning_texts))
    counted = zip(writer.items, writer.count_each(), strict=True)
    output = sum(tokens for item, tokens in counted if item["type"] != "reasoning")
    return ModelUsage(input.input, reasoning + output, input.cached, reasoning, input.cache_write)
