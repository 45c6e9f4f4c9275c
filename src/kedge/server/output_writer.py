"""Convert the output events of a model to output items and stream events.

Each kind of item has one entry in ``ITEM_FORMATS``: the initial item, the event of its deltas, the
events that close it. Without streaming the same writer builds the items only.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, assert_never

from msgspec import Struct

from kedge.server import models, object_forms, token_counting
from kedge.server.encrypted_content import ReasoningPayload
from kedge.server.models import ItemKind, OutputEvent

StreamEvent = dict[str, Any]
"""One event of a stream, without its sequence number."""

OutputItem = dict[str, Any]


class ItemFormat(Struct, frozen=True):
    """The format of one kind of output item, and its events.

    ``build_part`` returns the content part (or summary part) with the text, for kinds that have one;
    ``part_event`` is the beginning of the events of such a part, and ``content_key`` the member of the item that
    contains the parts. For other kinds, ``content_key`` is the member with the text itself. ``text_event`` is the
    beginning of the events of the text.
    """

    type: str
    text_event: str
    text_key: str
    content_key: str
    part_event: str = ""
    build_part: Callable[[str], OutputItem] | None = None


ITEM_FORMATS: Mapping[ItemKind, ItemFormat] = {
    "text": ItemFormat(
        type="message",
        text_event="response.output_text",
        text_key="text",
        content_key="content",
        part_event="response.content_part",
        build_part=object_forms.build_output_text,
    ),
    "refusal": ItemFormat(
        type="message",
        text_event="response.refusal",
        text_key="refusal",
        content_key="content",
        part_event="response.content_part",
        build_part=lambda text: {"type": "refusal", "refusal": text},
    ),
    "reasoning": ItemFormat(
        type="reasoning",
        text_event="response.reasoning_summary_text",
        text_key="text",
        content_key="summary",
        part_event="response.reasoning_summary_part",
        build_part=lambda text: {"type": "summary_text", "text": text},
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


@dataclass(slots=True)
class OutputWriter:
    """A writer that collects the output events of a model into items.

    Args:
        key: The key of the response, from which item ids are derived.
        number: The number of the next output item among the items of the response.
        encrypt: Encrypts reasoning.
        encrypt_reasoning: Encrypt all reasoning, not only reasoning with data of the model.
        show_summary: Whether the client requested reasoning summaries.
        call_prefix: The prefix of call ids.
    """

    key: str
    number: int
    encrypt: Callable[[Any], str] | None = None
    encrypt_reasoning: bool = False
    show_summary: bool = True
    call_prefix: str = "call"
    items: list[OutputItem] = field(default_factory=list[OutputItem], init=False)
    incomplete_reason: str | None = field(default=None, init=False)
    reasoning_texts: list[str] = field(default_factory=list[str], init=False)
    usage: models.ModelUsage | None = field(default=None, init=False)
    stop_sequence: str = field(default="", init=False)
    text_length: int = field(default=0, init=False)
    """The number of characters of all texts."""
    _format: ItemFormat = field(default=ITEM_FORMATS["text"], init=False)
    _text_chunks: list[str] | None = field(default=None, init=False)
    _is_hidden: bool = field(default=False, init=False)
    _logprobs: list[Mapping[str, Any]] = field(default_factory=list[Any], init=False)
    _item_tokens: list[int] = field(default_factory=list[int], init=False)

    def count_each(self) -> list[int]:
        """Return the tokens of each item of the complete output, which are counted once."""
        if len(self._item_tokens) != len(self.items):
            self._item_tokens = list(map(token_counting.count_item, self.items))
        return self._item_tokens

    def feed(self, event: OutputEvent) -> list[StreamEvent]:
        """Add an event to the items and return the stream events for it."""
        match event:
            case models.ItemDelta():
                assert self._text_chunks is not None, "text without an open item"  # noqa: S101
                self._text_chunks.append(event.text)
                self.text_length += len(event.text)
                self._logprobs += event.logprobs
                return self._build_text_event("delta", "delta", event.text, event.logprobs)
            case models.ItemOpened():
                return self._open_item(event)
            case models.ItemClosed():
                self.stop_sequence = event.stop_sequence
                return self._close_item("completed", event.model_data, event.annotations)
            case models.OutputTruncated():
                self.incomplete_reason = event.reason
                return self.close_open_item()
            case models.ModelUsage():
                self.usage = event
                return []
            case models.ItemAdded():
                self.text_length += token_counting.measure_texts(event.item)
                id = object_forms.make_item_id(event.item["type"], self.key, self.number)
                return self.add_item({"id": id, **event.item})
            case _:
                assert_never(event)

    def add_item(self, item: OutputItem, progress_event: str = "") -> list[StreamEvent]:
        """Add a complete item and return its stream events, with ``progress_event`` in between."""
        self.items.append(item)
        self.number += 1
        events = [self._build_item_event("added"), self._build_item_event("done")]
        if progress_event:
            index = len(self.items) - 1
            progress = {"type": progress_event, "output_index": index, "item_id": item["id"]}
            events.insert(1, progress)
        return events

    def close_open_item(self) -> list[StreamEvent]:
        """Close the item that is being written, if there is one, because the answer ends here."""
        if self._text_chunks is None:
            return []
        return self._close_item("incomplete")

    def _open_item(self, event: models.ItemOpened) -> list[StreamEvent]:
        form = ITEM_FORMATS[event.kind]
        self._format = form
        self._is_hidden = form.type == "reasoning" and not self.show_summary
        id = object_forms.make_item_id(form.type, self.key, self.number)
        item: OutputItem = {"id": id, "type": form.type}
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
        self.number += 1
        self._text_chunks = []
        self._logprobs = []
        self.items.append(item)
        events = [self._build_item_event("added")]
        if form.build_part is not None and not self._is_hidden:
            part = form.build_part("")
            events.append(self._build_event(f"{form.part_event}.added") | {"part": part})
        return events

    def _choose_call_id(self, event: models.ItemOpened) -> str:
        """Return the id that the model chose, if the API accepts it with a result, or a new one."""
        if CALL_ID_PATTERNS[self.call_prefix].fullmatch(event.call_id):
            return event.call_id
        return object_forms.make_call_id(self.key, self.number, self.call_prefix)

    def _close_item(
        self, status: str, model_data: Any = None, annotations: Sequence[Mapping[str, Any]] = ()
    ) -> list[StreamEvent]:
        text = "".join(self._text_chunks or ())
        self._text_chunks = None
        form = self._format
        item = self.items[-1]
        if form.type == "reasoning":
            self._fill_reasoning(item, ReasoningPayload(text, model_data, self.show_summary))
        else:
            item["status"] = status
            item[form.content_key] = text if form.build_part is None else [form.build_part(text)]

        events: list[StreamEvent] = []
        part: OutputItem = {}
        if form.build_part is not None and not self._is_hidden:
            part = item[form.content_key][0]
            if self._logprobs:
                part["logprobs"] = self._logprobs
            if annotations:
                part["annotations"] = list(annotations)
        for number, annotation in enumerate(annotations):
            added = self._build_event(f"{form.text_event}.annotation.added")
            events.append(added | {"annotation_index": number, "annotation": annotation})
        events += self._build_text_event("done", form.text_key, text, self._logprobs)
        if part:
            events.append(self._build_event(f"{form.part_event}.done") | {"part": part})
        return [*events, self._build_item_event("done")]

    def _fill_reasoning(self, item: OutputItem, payload: ReasoningPayload) -> None:
        self.reasoning_texts.append(payload.text)
        if self.show_summary:
            item["summary"] = [{"type": "summary_text", "text": payload.text}]
        if self.encrypt is not None and (self.encrypt_reasoning or payload.model_data is not None):
            item["encrypted_content"] = self.encrypt(payload.to_json())

    def _build_item_event(self, name: str) -> StreamEvent:
        return {
            "type": f"response.output_item.{name}",
            "output_index": len(self.items) - 1,
            "item": dict(self.items[-1]),
        }

    def _build_event(self, type: str) -> StreamEvent:
        event = {"type": type, "item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}
        if self._format.build_part is not None:
            event[f"{self._format.content_key}_index"] = 0
        return event

    def _build_text_event(
        self, name: str, member: str, text: str, logprobs: Sequence[Mapping[str, Any]]
    ) -> list[StreamEvent]:
        """Return the event of the text of the open item, unless the client must not see it."""
        form = self._format
        if self._is_hidden:
            return []
        event = self._build_event(f"{form.text_event}.{name}")
        event[member] = text
        if form.text_event == "response.output_text":
            event["logprobs"] = list(logprobs)
        return [event]


async def precount_output(writer: OutputWriter) -> None:
    """Count a long answer in a thread, before ``count_answer`` counts it on the loop."""

    def count() -> None:
        token_counting.count_items(writer.items)
        for text in writer.reasoning_texts:
            token_counting.count_text(text)

    if writer.text_length >= token_counting.MIN_THREAD_CHARS:
        await token_counting.precount(count)


def count_answer(writer: OutputWriter, input: models.ModelUsage) -> models.ModelUsage:
    """Return the usage of the input with the counted answer."""
    reasoning = sum(map(token_counting.count_text, writer.reasoning_texts))
    output = reasoning
    for item, tokens in zip(writer.items, writer.count_each(), strict=True):
        if item["type"] != "reasoning":
            output += tokens
    return models.ModelUsage(input.input, output, input.cached, reasoning, input.cache_write)
