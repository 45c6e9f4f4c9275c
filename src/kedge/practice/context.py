"""The request and the answer of the practice model, and the items of its context as plain text.

Items have all the forms that clients send: messages with or without a ``type``, content as a string
or as parts. No function here raises an error for a malformed item; content without text is an empty
string, and images and files become a short marker.
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

Item = Mapping[str, Any]


def _read_nothing(_: Item) -> str:
    return ""


@dataclass(frozen=True, slots=True)
class PracticeRequest:
    """One request to the practice model.

    Args:
        items: The effective context as items of the Responses API, oldest first.
        instructions: The instructions of the request.
        tools: The offered tools.
        tool_choice: ``auto``, ``none``, ``required``, or an object that names tools.
        parallel_tool_calls: Whether several calls may be made at once.
        text_format: The ``text.format`` of the request.
        reasoning: The ``reasoning`` of the request.
        read_reasoning: Returns the text of an earlier reasoning item whose text is hidden from the client.
    """

    items: Sequence[Item]
    instructions: str | None = None
    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: str | Mapping[str, Any] = "auto"
    parallel_tool_calls: bool = True
    text_format: Mapping[str, Any] | None = None
    reasoning: Mapping[str, Any] | None = None
    read_reasoning: Callable[[Item], str] = field(default=_read_nothing, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class ReasoningOutput:
    """A reasoning item."""

    text: str


@dataclass(frozen=True, slots=True)
class MessageOutput:
    """A message with one text part."""

    text: str


@dataclass(frozen=True, slots=True)
class RefusalOutput:
    """A message with one refusal part."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallOutput:
    """A call of an offered tool; for a custom tool ``arguments`` is free text."""

    name: str
    arguments: str
    custom: bool = False


OutputPart = ReasoningOutput | MessageOutput | RefusalOutput | ToolCallOutput
"""One item of an answer of the practice model."""


@dataclass(frozen=True, slots=True)
class PracticeOutput:
    """An answer.

    Args:
        parts: Its parts, in order.
        pace: Seconds between two streamed chunks.
    """

    parts: tuple[OutputPart, ...]
    pace: float = 0.0


CALL_TYPES = ("function_call", "custom_tool_call")
CLIENT_ROLES = ("user", "system", "developer")


def is_message(item: Item, *roles: str) -> bool:
    """Return whether the item is a message, of one of these roles if any are given."""
    if item.get("type", "message") != "message":
        return False
    role = item.get("role")
    return role in roles if roles else isinstance(role, str)


def is_output(item: Item) -> bool:
    """Return whether the item is the output of a tool call."""
    return str(item.get("type", "")).endswith("_output")


def is_model_item(item: Item) -> bool:
    """Return whether the model wrote the item: an answer, a call or reasoning."""
    return not (is_output(item) or is_message(item, *CLIENT_ROLES))


def extract_text(content: object) -> str:
    """Return the plain text of a content: a string, one part, or a list of parts."""
    match content:
        case str():
            return content
        case list() | tuple():
            texts = map(extract_text, cast("Sequence[object]", content))
            return " ".join(filter(None, texts))
        case dict():
            return _part_text(cast("dict[str, Any]", content))
        case _:
            return ""


def _part_text(part: Item) -> str:
    for key in ("text", "refusal"):
        if isinstance(part.get(key), str):
            return part[key]
    match part.get("type"):
        case "input_image":
            return "[image]"
        case "input_file":
            return f"[file {part.get('filename') or part.get('file_id') or ''}".rstrip() + "]"
        case _:
            return ""


def message_texts(items: Sequence[Item], *roles: str) -> list[str]:
    """Return the texts of the messages of these roles, oldest first."""
    return [extract_text(item.get("content")) for item in items if is_message(item, *roles)]


class CountedItems(Sequence[Item]):
    """Items whose messages were counted when they were stored."""

    __slots__ = ()

    @property
    @abstractmethod
    def message_count(self) -> int:
        """The number of messages, as the function of this name counts them."""


def message_count(items: Sequence[Item]) -> int:
    """Return the number of messages."""
    if not isinstance(items, (list, tuple)) and isinstance(items, CountedItems):
        return items.message_count
    return [item.get("type", "message") for item in items].count("message")


def last_user_text(items: Sequence[Item]) -> str:
    """Return the text of the newest user message; empty if there is none."""
    for item in reversed(items):
        if is_message(item, "user"):
            return extract_text(item.get("content"))
    return ""


def items_after_last_user(items: Sequence[Item]) -> Sequence[Item]:
    """Return the items after the newest user message: the current round of tool calls."""
    newer: list[Item] = []
    for item in reversed(items):
        if is_message(item, "user"):
            return newer[::-1]
        newer.append(item)
    return items


def tool_results(items: Sequence[Item]) -> list[tuple[str, str]]:
    """Return the tool's name and the text of its output, for each result among these items."""
    names = {
        str(item.get("call_id")): str(item.get("name") or "the tool")
        for item in items
        if "call_id" in item and not is_output(item)
    }
    return [
        (names.get(str(item.get("call_id")), "the tool"), extract_text(item.get("output")))
        for item in items
        if is_output(item)
    ]


def count_answers(items: Sequence[Item]) -> int:
    """Count the model's answers, which are consecutive items of the model between items of the client."""
    from_model = [is_model_item(item) for item in items]
    return sum(
        is_model and not was_model
        for was_model, is_model in zip([False, *from_model], from_model, strict=False)
    )
