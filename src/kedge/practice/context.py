"""Reading the effective context: who said what, in plain text.

Items come off the wire in all the forms that clients send: messages with or without a ``type``,
content as a string or as parts. Nothing here raises on an odd item; what has no text reads as
the empty string, and pictures and files read as a short mark of themselves.
"""

from collections.abc import Iterator, Sequence
from typing import Any, cast

from kedge.practice.values import Item

CLIENT_OUTPUTS = "_output"


def is_message(item: Item, *roles: str) -> bool:
    """Whether the item is a message, of one of these roles where any are given."""
    if item.get("type", "message") != "message" or not isinstance(item.get("role"), str):
        return False
    return not roles or item["role"] in roles


def is_output(item: Item) -> bool:
    """Whether the item is a client's answer to a tool call."""
    return str(item.get("type", "")).endswith(CLIENT_OUTPUTS)


def text_of(content: object) -> str:
    """Read the plain text of a content: a string, one part, or a list of parts."""
    match content:
        case str():
            return content
        case list() | tuple():
            texts = (text_of(part) for part in cast("Sequence[object]", content))
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


def messages(items: Sequence[Item], *roles: str) -> list[str]:
    """Collect the texts of the messages of these roles, oldest first."""
    return [text_of(item.get("content")) for item in items if is_message(item, *roles)]


def last_said(items: Sequence[Item]) -> str:
    """Read the newest user message; empty where the user has said nothing."""
    for item in reversed(items):
        if is_message(item, "user"):
            return text_of(item.get("content"))
    return ""


def call_names(items: Sequence[Item]) -> dict[str, str]:
    """Map each call id to the name of the tool that was called."""
    return {
        str(item["call_id"]): str(item["name"])
        for item in items
        if "call_id" in item and "name" in item and not is_output(item)
    }


def fresh_outputs(items: Sequence[Item]) -> list[tuple[str, str]]:
    """Tool name and output text of the results at the end of the context, in order.

    Only those after the newest message count: they are what the answer has to use.
    """
    names = call_names(items)
    fresh = list(_outputs_at_end(items))
    return [
        (names.get(str(item.get("call_id")), "the tool"), text_of(item.get("output")))
        for item in reversed(fresh)
    ]


def _outputs_at_end(items: Sequence[Item]) -> Iterator[Item]:
    for item in reversed(items):
        if not is_output(item):
            return
        yield item


def answers_so_far(items: Sequence[Item]) -> int:
    """How many answers the model has given: runs of its items between those of the client."""
    own = [
        not (is_output(item) or is_message(item, "user", "system", "developer")) for item in items
    ]
    return sum(now and not before for before, now in zip([False, *own], own, strict=False))
