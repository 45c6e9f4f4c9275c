"""Check the law on the server's side, with code that is independent of the planner.

``normalize_blocks`` converts the blocks of a Turn to a normal form, and ``normalize_items`` does the same for
the context that the server's model received. For every request, that context must equal the Turn without its
answer, which ``expected_context`` returns.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from kedge import turns

NormalForm = tuple[Any, ...]

MEMBERS = ("phase", "namespace", "caller", "async")
"""Further members of messages, calls and results that a model may read."""


def normalize_blocks(blocks: Iterable[turns.Block]) -> list[NormalForm]:
    """Return the normal form of each block, without leading system blocks and reasoning."""
    remaining = list(blocks)
    while remaining and isinstance(remaining[0], turns.SystemBlock):
        remaining.pop(0)
    return [
        (*_normalize_block(block), *_normalize_members(block.extra.get("item", {})))
        for block in remaining
        if not isinstance(block, turns.ReasoningBlock)
    ]


def normalize_items(items: Iterable[Mapping[str, Any]] | None) -> list[NormalForm]:
    """Return the normal form of each wire item, without reasoning."""
    assert items is not None, "no model saw anything of this request"
    return [
        (*_normalize_item(item), *_normalize_members(item))
        for item in items
        if item.get("type") != "reasoning"
    ]


def normalize_block(block: turns.Block) -> NormalForm:
    """Return the normal form of a block, whatever its position."""
    return (*_normalize_block(block), *_normalize_members(block.extra.get("item", {})))


def normalize_item(item: Mapping[str, Any]) -> NormalForm:
    """Return the normal form of a wire item."""
    return (*_normalize_item(item), *_normalize_members(item))


def expected_context(turn: turns.Turn) -> list[NormalForm]:
    """Return the context of the request for this finished Turn: all blocks before its last answer."""
    blocks = list(turn.blocks)
    last = blocks[-1].response_id
    while blocks and blocks[-1].origin == "engine" and blocks[-1].response_id == last:
        blocks.pop()
    return normalize_blocks(blocks)


def _normalize_members(item: Mapping[str, Any]) -> list[NormalForm]:
    return [(name, str(item[name])) for name in MEMBERS if item.get(name) is not None]


def _normalize_block(block: turns.Block) -> NormalForm:
    match block:
        case turns.UserBlock():
            return ("user", *map(_normalize_part, block.parts))
        case turns.AssistantBlock():
            return ("assistant", *map(_normalize_part, block.parts))
        case turns.SystemBlock():
            return (block.role, ("text", block.text))
        case turns.ToolCallBlock():
            kind = "custom" if block.custom else "function"
            return (f"{kind} call", block.call_id, block.name, block.arguments)
        case turns.ToolResultBlock():
            kind = "custom" if block.custom else "function"
            return (f"{kind} output", block.call_id, *map(_normalize_part, block.parts))
        case turns.OpaqueBlock():
            return ("opaque", block.type)
        case _:
            raise AssertionError(block)


def _normalize_part(part: turns.Part) -> NormalForm:
    match part:
        case turns.TextPart():
            return ("text", part.text)
        case turns.RefusalPart():
            return ("refusal", part.text)
        case turns.ImagePart():
            return ("image", part.url or part.file_id, part.detail)
        case turns.FilePart():
            return ("file", part.url or part.data or part.file_id, part.filename)
        case turns.OpaquePart() if part.content["type"] == "input_audio":
            return ("audio", part.content["input_audio"]["data"])
        case _:
            raise AssertionError(part)


def _normalize_item(item: Mapping[str, Any]) -> NormalForm:
    match item.get("type", "message"):
        case "message":
            return (item["role"], *_normalize_item_parts(item["content"]))
        case "function_call":
            return ("function call", item["call_id"], item["name"], item["arguments"])
        case "custom_tool_call":
            return ("custom call", item["call_id"], item["name"], item["input"])
        case "function_call_output":
            return ("function output", item["call_id"], *_normalize_item_parts(item["output"]))
        case "custom_tool_call_output":
            return ("custom output", item["call_id"], *_normalize_item_parts(item["output"]))
        case other:
            return ("opaque", other)


def _normalize_item_parts(content: str | list[dict[str, Any]]) -> list[NormalForm]:
    if isinstance(content, str):
        return [("text", content)]
    return [_normalize_item_part(part) for part in content]


def _normalize_item_part(part: Mapping[str, Any]) -> NormalForm:
    match part["type"]:
        case "input_text" | "output_text":
            return ("text", part["text"])
        case "refusal":
            return ("refusal", part["refusal"])
        case "input_image":
            source = part.get("image_url") or part.get("file_id")
            return ("image", source, part.get("detail") or "auto")
        case "input_file":
            source = part.get("file_url") or part.get("file_data") or part.get("file_id")
            return ("file", source, part.get("filename") or "")
        case "input_audio":
            return ("audio", part["input_audio"]["data"])
        case other:
            raise AssertionError(other)
