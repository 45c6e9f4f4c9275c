"""Output items while they are written: from a model's pieces to items and to stream events.

Each kind of item has one row in ``FORMS``: how it looks when it opens, which event carries its
deltas, which events close it. The same writer serves a response that nobody watches; then the
events are simply not made.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, assert_never

from kedge.server.ids import call_id, item_id
from kedge.server.items import output_text
from kedge.server.models import Added, Closed, Counted, Grown, Kind, Opened, Piece, Stopped
from kedge.server.thoughts import Thought
from kedge.tokens import count_items, count_text

Event = dict[str, Any]
"""One event of a stream, still without its sequence number."""

Made = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Form:
    """How one kind of output item looks and which events tell of it.

    ``part`` makes the content part (or summary part) that holds the text, for kinds that have one;
    ``index`` names the member that counts such parts, and ``within`` the member of the item that
    holds them. Otherwise the text itself is the item's member ``within``.
    """

    type: str
    delta: str
    done: str
    text: str
    within: str
    index: str = ""
    part: Callable[[str], Made] | None = None
    part_added: str = ""
    part_done: str = ""


FORMS: Mapping[Kind, Form] = {
    "text": Form(
        type="message",
        delta="response.output_text.delta",
        done="response.output_text.done",
        text="text",
        within="content",
        index="content_index",
        part=output_text,
        part_added="response.content_part.added",
        part_done="response.content_part.done",
    ),
    "refusal": Form(
        type="message",
        delta="response.refusal.delta",
        done="response.refusal.done",
        text="refusal",
        within="content",
        index="content_index",
        part=lambda text: {"type": "refusal", "refusal": text},
        part_added="response.content_part.added",
        part_done="response.content_part.done",
    ),
    "reasoning": Form(
        type="reasoning",
        delta="response.reasoning_summary_text.delta",
        done="response.reasoning_summary_text.done",
        text="text",
        within="summary",
        index="summary_index",
        part=lambda text: {"type": "summary_text", "text": text},
        part_added="response.reasoning_summary_part.added",
        part_done="response.reasoning_summary_part.done",
    ),
    "function_call": Form(
        type="function_call",
        delta="response.function_call_arguments.delta",
        done="response.function_call_arguments.done",
        text="arguments",
        within="arguments",
    ),
    "custom_tool_call": Form(
        type="custom_tool_call",
        delta="response.custom_tool_call_input.delta",
        done="response.custom_tool_call_input.done",
        text="input",
        within="input",
    ),
}

LOGPROBS = frozenset({"response.output_text.delta", "response.output_text.done"})


CALL_IDS = {"call": re.compile(r"(?s:.{1,64})"), "toolu": re.compile(r"[a-zA-Z0-9_-]{1,64}")}
"""The ids of calls that each API takes back with their results, by how its own begin."""


class Writer:
    """Collects a model's pieces into output items; ``feed`` tells the events of each piece.

    ``seal`` encrypts a thought, always where the model wants something kept with it and otherwise
    where the client asked for that (``sealed``); ``shown`` says whether it asked for summaries.
    ``calls`` is how the ids of calls begin. ``counted`` and ``stop`` are what the model said of
    the whole answer.
    """

    def __init__(
        self,
        key: str,
        first_number: int,
        *,
        seal: Callable[[Any], str] | None = None,
        sealed: bool = False,
        shown: bool = True,
        calls: str = "call",
    ) -> None:
        self.items: list[Made] = []
        self.reason: str | None = None
        self.thoughts: list[str] = []
        self.counted: Counted | None = None
        self.stop = ""
        self._key = key
        self._number = first_number
        self._seal = seal
        self._sealed = sealed
        self._shown = shown
        self._calls = calls
        self._form = FORMS["text"]
        self._texts: list[str] | None = None

    def take(self, piece: Piece) -> None:
        """Take a piece without telling of it."""
        match piece:
            case Opened():
                self._open(piece)
            case Grown():
                self._grow(piece.text)
            case Closed():
                self.stop = piece.stop
                self._close("completed", piece.kept)
            case Stopped():
                self._stop(piece)
            case Counted():
                self.counted = piece
            case Added():
                type = piece.item["type"]
                self.items.append({"id": self.next_id(type), **piece.item})
                self._number += 1
            case _:
                assert_never(piece)

    def feed(self, piece: Piece) -> Iterator[Event]:
        """Take a piece and tell the events that it makes."""
        was_open = self._texts is not None
        self.take(piece)
        match piece:
            case Opened():
                yield from self._opening()
            case Grown():
                yield from self._delta(piece.text)
            case Closed():
                yield from self._closing()
            case Stopped():
                if was_open:
                    yield from self._closing()
            case Counted():
                pass
            case Added():
                item = self.items[-1]
                yield {**self._at(), "type": "response.output_item.added", "item": item}
                yield {**self._at(), "type": "response.output_item.done", "item": item}
            case _:
                assert_never(piece)

    def add(self, item: Made, during: str) -> Iterator[Event]:
        """Add an item that is whole from the start; ``during`` is the event in between."""
        self.items.append(item)
        self._number += 1
        yield {**self._at(), "type": "response.output_item.added", "item": item}
        yield {**self._at(), "type": during, "item_id": item["id"]}
        yield {**self._at(), "type": "response.output_item.done", "item": item}

    def next_id(self, type: str) -> str:
        """Name the next item."""
        return item_id(type, self._key, self._number)

    # Items.

    def _open(self, piece: Opened) -> None:
        self._form = form = FORMS[piece.kind]
        item: Made = {"id": self.next_id(form.type), "type": form.type}
        if form.type == "message":
            item |= {"role": "assistant", "content": []}
        elif form.type == "reasoning":
            item |= {"summary": []}
        else:
            item |= {"call_id": self._call_id(piece), "name": piece.name, form.within: ""}
        if form.type != "reasoning":
            item["status"] = "in_progress"
        self._number += 1
        self._texts = []
        self.items.append(item)

    def _call_id(self, piece: Opened) -> str:
        """The id that the model chose, unless this API would not take it back."""
        if CALL_IDS[self._calls].fullmatch(piece.call_id):
            return piece.call_id
        return call_id(self._key, self._number, self._calls)

    def _grow(self, text: str) -> None:
        assert self._texts is not None, "a model's text belongs to an open item"  # noqa: S101
        self._texts.append(text)

    def _close(self, status: str, kept: Any = None) -> None:
        text = "".join(self._texts or ())
        self._texts = None
        form, item = self._form, self.items[-1]
        if form.type == "reasoning":
            self._think(item, Thought(text, kept, self._shown))
        elif form.part is not None:
            item[form.within] = [form.part(text)]
        else:
            item[form.within] = text
        if form.type != "reasoning":
            item["status"] = status

    def _think(self, item: Made, thought: Thought) -> None:
        self.thoughts.append(thought.text)
        if self._shown:
            item["summary"] = [{"type": "summary_text", "text": thought.text}]
        if self._seal is not None and (self._sealed or thought.kept is not None):
            item["encrypted_content"] = self._seal(thought.as_value())

    def _stop(self, piece: Stopped) -> None:
        self.reason = piece.reason
        if self._texts is not None:
            self._close("incomplete")

    # Events.

    def _at(self) -> Event:
        return {"type": "", "output_index": len(self.items) - 1}

    def _inside(self) -> Event:
        where = {"type": "", "item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}
        return where | {self._form.index: 0} if self._form.index else where

    def _hidden(self) -> bool:
        return self._form.type == "reasoning" and not self._shown

    def _opening(self) -> Iterator[Event]:
        item = dict(self.items[-1])
        yield {**self._at(), "type": "response.output_item.added", "item": item}
        if self._form.part is not None and not self._hidden():
            yield {**self._inside(), "type": self._form.part_added, "part": self._form.part("")}

    def _delta(self, text: str) -> Iterator[Event]:
        if not self._hidden():
            yield self._told(self._form.delta, "delta", text)

    def _closing(self) -> Iterator[Event]:
        form, item = self._form, self.items[-1]
        if form.part is None:
            yield self._told(form.done, form.text, item[form.within])
        elif not self._hidden():
            part = item[form.within][0]
            yield self._told(form.done, form.text, part[form.text])
            yield {**self._inside(), "type": form.part_done, "part": part}
        yield {**self._at(), "type": "response.output_item.done", "item": dict(item)}

    def _told(self, type: str, member: str, text: str) -> Event:
        event = self._inside()
        event["type"] = type
        event[member] = text
        if type in LOGPROBS:
            event["logprobs"] = []
        return event


def count_answer(writer: Writer, input: int, cached: int = 0) -> Counted:
    """Count an answer: as its model did, or by what was written and what went in."""
    if writer.counted is not None:
        return writer.counted
    thought = sum(map(count_text, writer.thoughts))
    said = count_items(item for item in writer.items if item["type"] != "reasoning")
    return Counted(input, thought + said, cached, thought)
