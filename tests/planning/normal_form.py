"""The normal form in which the laws compare a server's context with the content of a Turn.

Independent of ``kedge.planning.digests`` and ``kedge.turns.responses_items``: an item and a block
have the same tuple if a model sees no difference. Reasoning and leading system text have no normal form.
A compaction item created by a server is replaced by the items it was made from.
"""

import json
from collections.abc import Iterable, Sequence
from typing import Any, TypeGuard

from kedge import turns
from kedge.turns import AssistantBlock, Block, FilePart, OpaqueBlock, ReasoningBlock, TextPart, Turn
from planning import reference_server
from planning.reference_server import ID_IS_CONTENT, STATUS_IS_CONTENT, Item, ReferenceServer

NormalForm = tuple[Any, ...]


def normalize_items(items: list[Item], server: ReferenceServer) -> list[NormalForm]:
    """Return the normal forms of the items a server uses, with compactions expanded."""
    forms: list[NormalForm] = []
    for item in reference_server.effective_items(items):
        replaced = server.compacted.get(item.get("encrypted_content", ""))
        if item["type"] == "compaction" and replaced is not None:
            forms += normalize_items(replaced, server)
        elif item["type"] != "reasoning":
            forms.append(normalize_item(item))
    return forms


def normalize_turn(turn: Turn, servers: Iterable[ReferenceServer]) -> list[NormalForm]:
    """Return the normal forms of a Turn, starting at the last compaction added by the caller."""
    contents = {content for memory in servers for content in memory.compacted}
    reported: list[NormalForm] = []
    for block in turn.body:
        if is_compaction(block):
            if block.item["encrypted_content"] not in contents:
                reported = [normalize_block(block)]
        elif not isinstance(block, ReasoningBlock):
            reported.append(normalize_block(block))
    return reported


def normalize_visible(turn: Turn) -> list[NormalForm]:
    """Return the normal forms of all body blocks except reasoning, without expanding compactions."""
    return [normalize_block(block) for block in turn.body if not isinstance(block, ReasoningBlock)]


def is_compaction(block: Block) -> TypeGuard[OpaqueBlock]:
    """Return whether a block is a compaction item."""
    return isinstance(block, OpaqueBlock) and block.item["type"] == "compaction"


def normalize_item(item: Item) -> NormalForm:
    match item["type"]:
        case "message":
            return ("message", item["role"], _normalize_content(item["content"]))
        case "function_call":
            return ("call", item["call_id"], item["name"], item["arguments"])
        case "custom_tool_call":
            return ("custom call", item["call_id"], item["name"], item["input"])
        case "function_call_output":
            return ("result", item["call_id"], _normalize_content(item["output"]))
        case "custom_tool_call_output":
            return ("custom result", item["call_id"], _normalize_content(item["output"]))
        case kind:
            return (kind, _normalize_opaque(item))


def normalize_block(block: Block) -> NormalForm:
    match block:
        case turns.UserBlock() | AssistantBlock():
            return ("message", block.kind, tuple(map(_normalize_part, block.parts)))
        case turns.SystemBlock():
            return ("message", block.role, (("text", block.text),))
        case turns.ToolCallBlock():
            name = "custom call" if block.custom else "call"
            return (name, block.call_id, block.name, block.arguments)
        case turns.ToolResultBlock():
            name = "custom result" if block.custom else "result"
            return (name, block.call_id, tuple(map(_normalize_part, block.parts)))
        case OpaqueBlock():
            return (block.type, _normalize_opaque(_thaw(block.item)))
        case _:
            raise AssertionError(block)


def _normalize_content(content: str | Sequence[Item]) -> tuple[NormalForm, ...]:
    if isinstance(content, str):
        return (("text", content),)
    return tuple(map(_normalize_item_part, content))


def _normalize_item_part(part: Item) -> NormalForm:
    match part["type"]:
        case "input_text" | "output_text":
            return ("text", part["text"])
        case "refusal":
            return ("refusal", part["refusal"])
        case "input_image":
            return ("image", part["image_url"], part.get("detail", "auto"))
        case "input_file":
            return ("file", part["file_data"], part.get("filename", ""))
        case kind:
            return (kind, json.dumps(part, sort_keys=True))


def _normalize_part(part: object) -> NormalForm:
    match part:
        case TextPart():
            return ("text", part.text)
        case turns.RefusalPart():
            return ("refusal", part.text)
        case turns.ImagePart():
            return ("image", part.url, part.detail)
        case FilePart():
            return ("file", part.data, part.filename)
        case _:
            raise AssertionError(part)


def _normalize_opaque(item: Item) -> str:
    hidden = {
        *(() if item["type"] in ID_IS_CONTENT else ("id",)),
        *(() if item["type"] in STATUS_IS_CONTENT else ("status",)),
    }
    visible = {name: value for name, value in item.items() if name not in hidden}
    return json.dumps(_without_nulls(visible), sort_keys=True)


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            name: _without_nulls(member) for name, member in value.items() if member is not None
        }
    return value


def _thaw(value: Any) -> Any:
    if hasattr(value, "items"):
        return {name: _thaw(member) for name, member in value.items()}
    return [_thaw(member) for member in value] if isinstance(value, tuple) else value
