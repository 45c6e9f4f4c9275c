"""Convert messages of the Chat Completions API to blocks.

A message may contain text, a refusal and several calls, which are separate blocks. An unknown or incomplete form is an
error: if it were passed on, the provider would reject every request with it. Further members of a message, such as the
time at which an application received it, are left out.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

from msgspec.structs import replace

from kedge.errors import InvalidTurn
from kedge.turns.blocks import Block, OpaqueBlock, SystemBlock, ToolResultBlock, UserBlock
from kedge.turns.frozen_json import EMPTY
from kedge.turns.parts import OpaquePart
from kedge.turns.responses_items import CALL_FORMS, CHAT_PART_TYPES, Item, block_from_item

Message = Mapping[str, Any]


def blocks_from_messages(messages: Iterable[Message]) -> list[Block]:
    """Convert messages of the Chat Completions API to blocks, for example of an export.

    Items of the Responses API are converted too, so a list may contain both.

    Args:
        messages: The messages, with ``tool_calls``, ``role: "tool"``, images and files, or with the older
            ``function_call`` and ``role: "function"``.

    Returns:
        The blocks, in order.

    Raises:
        InvalidTurn: A message has an unknown form; the error names its position.
    """
    kind = type(messages).__name__
    if isinstance(messages, str | Mapping) or not isinstance(messages, Iterable):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidTurn(f"messages must be a list, not {kind}")
    blocks: list[Block] = []
    functions: dict[str, str] = {}
    for index, message in enumerate(messages):
        try:
            blocks += blocks_from_message(_replace_function_call(message, index, functions))
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            problem = str(error)
            if isinstance(error, KeyError):
                problem += " is missing"
            raise InvalidTurn(f"messages[{index}]: {problem}") from error
    return blocks


def blocks_from_message(message: Message) -> list[Block]:
    """Convert one message.

    Raises:
        ValueError, LookupError, TypeError, AttributeError: It cannot be converted.
    """
    if not isinstance(message, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"a message must be an object, not {type(message).__name__}")
    return list(_convert_message(message))


def _replace_function_call(message: Message, index: int, functions: dict[str, str]) -> Message:
    """Return a message with a call of the older form in the present one, which has ids.

    Args:
        message: The message.
        index: Its position, which becomes part of the id.
        functions: The ids of the last calls, by the name of the function; a call is added.
    """
    if not isinstance(message, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        return message
    rest = {name: value for name, value in message.items() if name != "function_call"}
    if message.get("role") == "function":
        call_id = functions.pop(message["name"], None)
        if call_id is None:
            raise ValueError(
                f"there is no call of the function {message['name']!r} before its result"
            )
        return {**rest, "role": "tool", "tool_call_id": call_id}
    if message.get("role") == "assistant" and message.get("function_call"):
        call_id = f"call_function_{index}"
        functions[message["function_call"]["name"]] = call_id
        call = {"id": call_id, "type": "function", "function": message["function_call"]}
        return {**rest, "tool_calls": [call]}
    return message


def _convert_message(message: Message) -> Iterator[Block]:
    for item in _to_items(message):
        block = block_from_item(item)
        if isinstance(block, OpaqueBlock):
            _check_item(block)
        if not all(map(_is_sendable, getattr(block, "parts", ()))):
            raise ValueError("a message has content that is not known")
        if isinstance(block, UserBlock | SystemBlock | ToolResultBlock) and block.extra:
            block = replace(block, extra=EMPTY)
        yield block


def _check_item(block: OpaqueBlock) -> None:
    """Reject an item that no server accepts."""
    required = ITEM_MEMBERS.get(block.type)
    if required is None:
        raise ValueError("a message has a form that is not known")
    missing = [name for name in required if block.item.get(name) is None]
    if missing:
        raise ValueError(f"an item of type {block.type} needs the member {missing[0]!r}")


def _to_items(message: Message) -> Iterator[Item]:
    """Yield the items of the Responses API for a message of either API."""
    if "role" not in message or message.get("type", "message") != "message":
        yield dict(message)
        return
    if message["role"] == "tool":
        output = _convert_content(message["content"], "input_text")
        yield {"type": "function_call_output", "call_id": message["tool_call_id"], "output": output}
        return
    content: Any = message.get("content")
    text_type = "input_text"
    if message["role"] == "assistant":
        text_type = "output_text"
        thinking, content = _split_thinking(content)
        if thinking:
            yield _convert_thinking(thinking)
    calls = message.get("tool_calls") or ()
    refusal = message.get("refusal")
    if refusal:
        content = [*_as_parts(content), {"type": "refusal", "refusal": refusal}]
    if content is None and not calls:
        raise ValueError("a message has no content")
    rest = {name: value for name, value in message.items() if name not in _CHAT_MEMBERS}
    if content or not calls:
        yield {**rest, "content": _convert_content(content, text_type)}
    for call in calls:
        yield _convert_call(call)


def _split_thinking(content: Any) -> tuple[list[Item], Any]:
    """Return the parts with reasoning of an assistant message, and the rest of its content."""
    if not isinstance(content, list):
        return [], content
    parts = cast("list[Item]", content)
    thinking = [part for part in parts if part.get("type") == "thinking"]
    return thinking, [part for part in parts if part.get("type") != "thinking"]


def _convert_thinking(parts: list[Item]) -> Item:
    """Return the reasoning item of the parts in which Mistral sends reasoning."""
    texts: list[Item] = []
    for part in parts:
        thinking: Any = part["thinking"]
        if not isinstance(thinking, list):
            thinking = [thinking]
        for piece in cast("list[Any]", thinking):
            text = piece if isinstance(piece, str) else piece["text"]
            texts.append({"type": "reasoning_text", "text": text})
    return {"type": "reasoning", "summary": [], "content": texts}


def _convert_call(call: Item) -> Item:
    """Return the item of one entry in ``tool_calls``."""
    is_custom = call.get("type") == "custom"
    kind, arguments_member = CALL_FORMS[is_custom]
    function = call["custom" if is_custom else "function"]
    return {
        "type": kind,
        "call_id": call["id"],
        "name": function["name"],
        arguments_member: function[arguments_member],
    }


def _as_parts(content: object) -> list[Any]:
    if isinstance(content, list):
        return cast("list[Any]", content)
    if not content:
        return []
    return [{"type": "text", "text": content}]


def _convert_content(content: object, text_type: str) -> object:
    """Return content with the parts of the Chat Completions API converted to parts of the Responses API."""
    if not isinstance(content, list):
        return content
    return [_convert_part(part, text_type) for part in cast("list[Item]", content)]


def _convert_part(part: Item, text_type: str) -> Item:
    match part.get("type"):
        case "text":
            return {"type": text_type, "text": part["text"]}
        case "image_url":
            return _convert_image(part["image_url"])
        case "file":
            return {"type": "input_file", **part["file"]}
        case _:
            return part


def _convert_image(image: str | Item) -> Item:
    if isinstance(image, str):
        return {"type": "input_image", "image_url": image}
    part = {"type": "input_image", "image_url": image["url"]}
    if "detail" in image:
        part["detail"] = image["detail"]
    return part


def _is_sendable(part: object) -> bool:
    """Return whether a part is of a kind that an API may support."""
    if not isinstance(part, OpaquePart):
        return True
    kind = part.content.get("type")
    if not isinstance(kind, str):
        return False
    choices = PART_MEMBERS.get(kind, ())
    return kind in CHAT_PART_TYPES or any(part.content.get(name) is not None for name in choices)


ITEM_MEMBERS: Mapping[str, tuple[str, ...]] = {
    "additional_tools": ("role", "tools"),
    "agent_message": ("author", "recipient", "content"),
    "apply_patch_call": ("call_id", "operation", "status"),
    "apply_patch_call_output": ("call_id", "status"),
    "code_interpreter_call": ("container_id", "status"),
    "compaction": ("encrypted_content",),
    "computer_call": ("call_id", "pending_safety_checks"),
    "computer_call_output": ("call_id", "output"),
    "configuration_update": (),
    "file_search_call": ("queries", "status"),
    "image_generation_call": (),
    "local_shell_call": ("call_id", "action"),
    "local_shell_call_output": ("id", "output"),
    "mcp_approval_request": ("server_label", "name", "arguments"),
    "mcp_approval_response": ("approval_request_id", "approve"),
    "mcp_call": ("server_label", "name", "arguments"),
    "mcp_list_tools": ("server_label", "tools"),
    "multi_agent_call": ("call_id", "action", "arguments"),
    "multi_agent_call_output": ("call_id", "action", "output"),
    "program": ("call_id", "code", "fingerprint"),
    "program_output": ("call_id", "result", "status"),
    "shell_call": ("call_id", "action"),
    "shell_call_output": ("call_id", "output"),
    "tool_search_call": ("arguments",),
    "tool_search_output": ("tools",),
    "web_search_call": (),
}
"""The types of items that Kedge does not interpret but servers accept, and the members that they require.

References and compaction triggers are not part of a history: they refer to items of one server, or request an action.
"""
PART_MEMBERS: Mapping[str, tuple[str, ...]] = {
    "input_text": ("text",),
    "input_image": ("image_url", "file_id"),
    "input_file": ("file_data", "file_id", "file_url"),
    "input_audio": ("input_audio",),
    "output_text": ("text",),
}
"""The types of parts that a message may have, and the members of which each needs one."""
_CHAT_MEMBERS = frozenset(
    {"content", "tool_calls", "refusal", "name", "audio", "annotations", "function_call"}
)
"""Members of a Chat Completions message that its item does not have."""
