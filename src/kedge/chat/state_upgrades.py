"""Upgrades of chat states written by older versions.

Version 1 is the plain form: a list of messages that any program may have written. They are items of the
Responses API or messages of the Chat Completions API, in any mixture. Any other message makes the state
unusable: if it were passed on, the provider would reject it at every call, and the conversation could never
continue.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

from kedge.turns import Block, OpaqueBlock, OpaquePart, SystemBlock, block_from_item, dump_block

Json = dict[str, Any]


def upgrade_members(
    members: Json, upgrades: Mapping[int, Callable[[Json], Json]] | None = None
) -> Json:
    """Return the members of a state in the form of the current version.

    Raises:
        ValueError, LookupError, TypeError, AttributeError: The members cannot be converted.
    """
    steps = UPGRADES if upgrades is None else upgrades
    while members["version"] in steps:
        version = members["version"]
        members = {**steps[version](members), "version": version + 1}
    return members


def _upgrade_from_v1(members: Json) -> Json:
    """Convert version 1 to 2: messages become blocks. Leading system messages are no longer stored."""
    messages = members["messages"]
    if not isinstance(messages, list) or not all(map(_is_message, cast("list[object]", messages))):
        raise ValueError("messages are objects with a role or a type")
    converted = [list(_convert_message(each)) for each in cast("list[Json]", messages)]
    processed = members["processed_length"]
    if type(processed) is not int or not 0 <= processed <= len(converted):
        raise ValueError("processed_length is not a number of messages")
    seen = sum(map(len, converted[:processed]))
    blocks = [block for each in converted for block in each]
    lead = 0
    while lead < len(blocks) and isinstance(blocks[lead], SystemBlock):
        lead += 1
    return {
        "provider": members["provider"],
        "processed_length": max(0, seen - lead),
        "id": "",
        "blocks": [{"as_is": dump_block(block)} for block in blocks[lead:]],
        "responses": [],
        "anchors": [],
    }


def _is_message(message: object) -> bool:
    return isinstance(message, dict) and ("role" in message or "type" in message)


def _convert_message(message: Json) -> Iterator[Block]:
    """Yield the blocks of one message."""
    for item in _to_items(message):
        block = block_from_item(item)
        if isinstance(block, OpaqueBlock) and item.get("type", "message") in _READABLE_ITEMS:
            raise ValueError("a message has a form that is not known")
        if not all(map(_is_sendable, getattr(block, "parts", ()))):
            raise ValueError("a message has content that is not known")
        yield block


def _to_items(message: Json) -> Iterator[Json]:
    """Yield the items of the Responses API for a message of either API."""
    if "role" not in message or message.get("type", "message") != "message":
        yield message
        return
    if message["role"] == "tool":
        output = _convert_content(message["content"], "input_text")
        yield {
            "type": "function_call_output",
            "call_id": message["tool_call_id"],
            "output": output,
        }
        return
    content = message.get("content")
    kind = "output_text" if message["role"] == "assistant" else "input_text"
    calls = message.get("tool_calls") or ()
    refusal = message.get("refusal")
    if refusal:
        content = [*_as_parts(content), {"type": "refusal", "refusal": refusal}]
    if content is None and not calls:
        raise ValueError("a message has no content")
    rest = {name: value for name, value in message.items() if name not in _CHAT_MEMBERS}
    if content or not calls:
        yield {**rest, "content": _convert_content(content, kind)}
    for call in calls:
        yield _convert_call(call)


def _convert_call(call: Json) -> Json:
    """Return the item of one entry in ``tool_calls``."""
    if call.get("type") == "custom":
        custom = call["custom"]
        kind, written = "custom_tool_call", {"name": custom["name"], "input": custom["input"]}
    else:
        function = call["function"]
        kind = "function_call"
        written = {"name": function["name"], "arguments": function["arguments"]}
    return {"type": kind, "call_id": call["id"], **written}


def _as_parts(content: object) -> list[Any]:
    if isinstance(content, list):
        return cast("list[Any]", content)
    return [{"type": "text", "text": content}] if content else []


def _convert_content(content: object, text_type: str) -> object:
    """Return content with the parts of the Chat Completions API converted to those of the Responses API."""
    if not isinstance(content, list):
        return content
    return [_convert_part(part, text_type) for part in cast("list[Json]", content)]


def _convert_part(part: Json, text_type: str) -> Json:
    match part.get("type"):
        case "text":
            return {"type": text_type, "text": part["text"]}
        case "image_url":
            image = part["image_url"]
            return {"type": "input_image", "image_url": image["url"], **_detail(image)}
        case "file":
            return {"type": "input_file", **part["file"]}
        case _:
            return part


def _detail(image: Json) -> Json:
    return {"detail": image["detail"]} if "detail" in image else {}


def _is_sendable(part: object) -> bool:
    """Return whether a part is of a kind that the Responses API may support."""
    if not isinstance(part, OpaquePart):
        return True
    kind = part.content.get("type")
    return isinstance(kind, str) and kind.startswith(("input_", "output_"))


_READABLE_ITEMS = frozenset(
    {
        "message",
        "function_call",
        "function_call_output",
        "custom_tool_call",
        "custom_tool_call_output",
    }
)
"""Types of items that Kedge reads; one that cannot be read has a wrong form."""
_CHAT_MEMBERS = frozenset({"content", "tool_calls", "refusal", "name", "audio", "annotations"})
"""Members of a Chat Completions message that its item does not have."""

UPGRADES: Mapping[int, Callable[[Json], Json]] = {1: _upgrade_from_v1}
"""The conversion from each older version to the next."""
