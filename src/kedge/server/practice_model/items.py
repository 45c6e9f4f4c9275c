"""The items of a context as plain text.

Items have all the forms that clients send: messages with or without a ``type``, content as a string
or as parts. No function here raises an error for a malformed item; content without text is an empty
string, and images and files become a short marker.
"""

from abc import abstractmethod
from collections.abc import Sequence
from itertools import groupby, takewhile
from typing import Any, cast

from kedge.server.practice_model.request import Item

CALL_TYPES = ("function_call", "custom_tool_call")
CLIENT_ROLES = ("user", "system", "developer")


def is_message(item: Item, *roles: str) -> bool:
    """Return whether the item is a message, of one of these roles if any are given."""
    if item.get("type", "message") != "message":
        return False
    role = item.get("role")
    if roles:
        return role in roles
    return isinstance(role, str)


def is_output(item: Item) -> bool:
    """Return whether the item is the output of a tool call."""
    return str(item.get("type", "")).endswith("_output")


def is_model_item(item: Item) -> bool:
    """Return whether the model wrote the item: an answer, a call or reasoning."""
    return not (is_output(item) or is_message(item, *CLIENT_ROLES))


def extract_text(content: object) -> str:
    """Return the plain text of a content: a string, one part, or a list of parts."""
    if isinstance(content, str):
        return content
    if isinstance(content, list | tuple):
        texts = map(extract_text, cast("Sequence[object]", content))
        return " ".join(filter(None, texts))
    if isinstance(content, dict):
        return _extract_part_text(cast("dict[str, Any]", content))
    return ""


def _extract_part_text(part: dict[str, Any]) -> str:
    for member in ("text", "refusal"):
        if isinstance(part.get(member), str):
            return part[member]
    if part.get("type") == "input_image":
        return "[image]"
    if part.get("type") == "input_file":
        name = part.get("filename") or part.get("file_id") or ""
        return f"[file {name}".rstrip() + "]"
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
    newest_first = takewhile(lambda item: not is_message(item, "user"), reversed(items))
    return [*newest_first][::-1]


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
    return sum(is_model for is_model, _ in groupby(items, is_model_item))
