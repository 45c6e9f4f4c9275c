"""Reading the effective context: who said what, in plain text.

Items come off the wire in all the forms that clients send: messages with or without a ``type``,
content as a string or as parts. Nothing here raises on an odd item; what has no text reads as
the empty string, and pictures and files read as a short mark of themselves.
"""

from collections.abc import Sequence
from typing import Any, cast

from kedge.practice.values import Item

CALL_TYPES = ("function_call", "custom_tool_call")
CLIENT_ROLES = ("user", "system", "developer")


def is_message(item: Item, *roles: str) -> bool:
    """Whether the item is a message, of one of these roles where any are given."""
    if item.get("type", "message") != "message":
        return False
    role = item.get("role")
    return role in roles if roles else isinstance(role, str)


def is_output(item: Item) -> bool:
    """Whether the item is a client's answer to a tool call."""
    return str(item.get("type", "")).endswith("_output")


def is_model_item(item: Item) -> bool:
    """Whether the item is one of the model's: an answer, a call, a thought."""
    return not (is_output(item) or is_message(item, *CLIENT_ROLES))


def extract_text(content: object) -> str:
    """Read the plain text of a content: a string, one part, or a list of parts."""
    match content:
        case str():
            return content
        case list() | tuple():
            texts = (extract_text(part) for part in cast("Sequence[object]", content))
            return " ".join(text for text in texts if text)
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
    """Collect the texts of the messages of these roles, oldest first."""
    return [extract_text(item.get("content")) for item in items if is_message(item, *roles)]


def message_count(items: Sequence[Item]) -> int:
    """Count the messages, without reading them."""
    return [item.get("type", "message") for item in items].count("message")


def last_user_text(items: Sequence[Item]) -> str:
    """Read the newest user message; empty where the user has said nothing."""
    for item in reversed(items):
        if is_message(item, "user"):
            return extract_text(item.get("content"))
    return ""


def items_after_last_user(items: Sequence[Item]) -> Sequence[Item]:
    """Give the items after the newest user message: the round of tools that is going on."""
    for i in range(len(items) - 1, -1, -1):
        if is_message(items[i], "user"):
            return items[i + 1 :]
    return items


def tool_results(items: Sequence[Item]) -> list[tuple[str, str]]:
    """Name of the tool and text of its output, for each result among these items."""
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
    """How many answers the model has given: runs of its items between those of the client."""
    own = [is_model_item(item) for item in items]
    return sum(now and not before for before, now in zip([False, *own], own, strict=False))
