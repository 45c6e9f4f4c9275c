"""Blocks to items of the Responses API and back, one at a time.

Only the shape is decided here. Which provider ids and which reasoning may go out at all is a matter of
proof and lives in ``kedge.planning.render``. Members of a known item that Kedge does not interpret are
kept in the block's ``extra["item"]``; of these only the ones in ``CARRIED`` are sent again.
"""

from collections.abc import Callable, Mapping
from typing import Any, cast

from kedge.errors import InvalidJSON, InvalidTurn, UnsupportedBlock
from kedge.turns.blocks import (
    ITEM_ID,
    AssistantBlock,
    Block,
    OpaqueBlock,
    ReasoningBlock,
    SystemBlock,
    ToolCallBlock,
    ToolResultBlock,
    UnknownBlock,
    UserBlock,
)
from kedge.turns.frozen import FrozenMap, thaw
from kedge.turns.parts import FilePart, ImagePart, OpaquePart, Part, RefusalPart, TextPart

Item = dict[str, Any]

CARRIED = ("phase", "namespace", "caller", "async")
"""Members of a provider's item that mean something to the model and are sent again as they came."""

ID_IS_CONTENT = frozenset(
    {"item_reference", "local_shell_call", "local_shell_call_output", "mcp_approval_request"}
)
"""Item types whose ``id`` is a reference that other items join on, not a name of their own."""


def item_from_block(block: Block) -> Item:
    """The item for this block, without provider id, status or nulls."""
    match block:
        case UserBlock():
            return {"type": "message", "role": "user", "content": _input_parts(block.parts)}
        case AssistantBlock():
            content = [_output_part(part) for part in block.parts]
            return {"type": "message", "role": "assistant", "content": content, **_carried(block)}
        case SystemBlock():
            content = [{"type": "input_text", "text": block.text}]
            return {"type": "message", "role": block.role, "content": content}
        case ToolCallBlock():
            return {**_call_item(block), **_carried(block)}
        case ToolResultBlock():
            kind = "custom_tool_call_output" if block.custom else "function_call_output"
            return {"type": kind, "call_id": block.call_id, "output": _output(block.parts)}
        case ReasoningBlock():
            return _reasoning_item(block)
        case OpaqueBlock():
            return _opaque_item(block)
        case UnknownBlock():
            raise UnsupportedBlock(
                f"block {block.id} is of a kind this Kedge does not know "
                f"({block.form.get('kind')!r}); remove it or use a newer Kedge"
            )
        case _:
            raise AssertionError(block.kind)


def block_from_item(item: Mapping[str, Any], **identity: Any) -> Block:
    """The block for an item, as a server sends, stores or streams it."""
    kind = item.get("type", "message")
    read = _READERS.get(kind)
    if item_id := item.get("id"):
        identity = {**identity, "metadata": {ITEM_ID: item_id, **identity.get("metadata", {})}}
    try:
        block = read(item, identity) if read else None
    except (KeyError, TypeError, AttributeError):
        block = None  # an item of a known type in an unknown shape is kept as it is
    return block or OpaqueBlock(FrozenMap(item), **identity)


def _call_item(block: ToolCallBlock) -> Item:
    if block.custom:
        kind, arguments = "custom_tool_call", "input"
    else:
        kind, arguments = "function_call", "arguments"
    return {
        "type": kind,
        "call_id": block.call_id,
        "name": block.name,
        arguments: block.arguments,
    }


def _reasoning_item(block: ReasoningBlock) -> Item:
    item: Item = {
        "type": "reasoning",
        "summary": [{"type": "summary_text", "text": text} for text in block.summary],
    }
    if block.texts:
        item["content"] = [{"type": "reasoning_text", "text": text} for text in block.texts]
    if block.encrypted_content:
        item["encrypted_content"] = block.encrypted_content
    return item


def _opaque_item(block: OpaqueBlock) -> Item:
    item = {k: v for k, v in thaw(block.item).items() if v is not None and k != "status"}
    if block.type not in ID_IS_CONTENT:
        item.pop("id", None)
    return item


def _carried(block: Block) -> Item:
    kept = block.extra.get("item")
    if not isinstance(kept, FrozenMap):
        return {}
    return {name: thaw(kept[name]) for name in CARRIED if kept.get(name) is not None}


def _input_parts(parts: tuple[Part, ...]) -> list[Item]:
    return [_input_part(part) for part in parts]


def _input_part(part: Part) -> Item:
    match part:
        case TextPart():
            return {"type": "input_text", "text": part.text}
        case ImagePart():
            source = {"image_url": part.url} if part.url else {"file_id": part.file_id}
            detail = {} if part.detail == "auto" else {"detail": part.detail}
            return {"type": "input_image", **source, **detail}
        case FilePart():
            members = {"file_url": part.url, "file_data": part.data, "file_id": part.file_id}
            members["filename"] = part.filename
            return {"type": "input_file", **{k: v for k, v in members.items() if v}}
        case OpaquePart():
            return thaw(part.content)
        case RefusalPart():
            raise UnsupportedBlock("only a model can refuse: a refusal is in the user's content")


def _output_part(part: TextPart | RefusalPart | OpaquePart) -> Item:
    match part:
        case TextPart():
            return {"type": "output_text", "text": part.text}
        case RefusalPart():
            return {"type": "refusal", "refusal": part.text}
        case OpaquePart():
            return thaw(part.content)


def _output(parts: tuple[Part, ...]) -> str | list[Item]:
    if len(parts) == 1 and isinstance(parts[0], TextPart):
        return parts[0].text
    return _input_parts(parts)


def _read_message(item: Mapping[str, Any], identity: Any) -> Block | None:
    role = item["role"]
    parts = _read_parts(item["content"])
    match role:
        case "user":
            return UserBlock(parts, **_keeping(item, identity, "content", "role"))
        case "assistant":
            spoken = tuple(p for p in parts if isinstance(p, TextPart | RefusalPart | OpaquePart))
            if len(spoken) != len(parts):
                return None
            return AssistantBlock(spoken, **_keeping(item, identity, "content", "role"))
        case "system" | "developer":
            if len(parts) != 1 or not isinstance(parts[0], TextPart):
                return None
            rest = _keeping(item, identity, "content", "role")
            return SystemBlock(parts[0].text, role, **rest)
        case _:
            return None


def _read_call(item: Mapping[str, Any], identity: Any) -> Block | None:
    custom = item["type"] == "custom_tool_call"
    written = item["input" if custom else "arguments"]
    if not item["call_id"]:
        return None
    rest = _keeping(item, identity, "call_id", "name", "arguments", "input")
    return ToolCallBlock(item["name"], written, item["call_id"], custom, **rest)


def _read_result(item: Mapping[str, Any], identity: Any) -> Block | None:
    if not item["call_id"]:
        return None
    custom = item["type"] == "custom_tool_call_output"
    rest = _keeping(item, identity, "call_id", "output")
    return ToolResultBlock(item["call_id"], _read_parts(item["output"]), custom, **rest)


def _read_reasoning(item: Mapping[str, Any], identity: Any) -> Block:
    return ReasoningBlock(
        tuple(part["text"] for part in item.get("summary") or ()),
        tuple(part["text"] for part in item.get("content") or ()),
        item.get("encrypted_content") or "",
        **_keeping(item, identity, "summary", "content", "encrypted_content"),
    )


def _keeping(item: Mapping[str, Any], identity: Any, *known: str) -> Any:
    """The identity, with the members that nobody reads kept in ``extra``."""
    read = {"type", "id", "status", *known}
    rest = {name: value for name, value in item.items() if name not in read and value is not None}
    return {**identity, "extra": {"item": rest}} if rest else identity


def _read_parts(content: object) -> tuple[Part, ...]:
    if isinstance(content, str):
        return (TextPart(content),)
    return tuple(map(_read_part, cast("list[Mapping[str, Any]]", content)))


def _read_part(part: Mapping[str, Any]) -> Part:
    given = {name: value for name, value in part.items() if value is not None}
    read = _PART_READERS.get(given.pop("type", ""))
    try:
        return (read(given) if read else None) or OpaquePart(FrozenMap(part))
    except InvalidJSON:
        raise
    except (KeyError, InvalidTurn):
        return OpaquePart(FrozenMap(part))


def _read_input_text(given: dict[str, Any]) -> Part | None:
    return TextPart(given["text"]) if given.keys() == {"text"} else None


def _read_output_text(given: dict[str, Any]) -> Part:
    text = given.pop("text")
    return TextPart(text, extra=FrozenMap({k: v for k, v in given.items() if v not in ([], ())}))


def _read_refusal(given: dict[str, Any]) -> Part | None:
    return RefusalPart(given["refusal"]) if given.keys() == {"refusal"} else None


def _read_image(given: dict[str, Any]) -> Part | None:
    if not given.keys() <= {"image_url", "file_id", "detail"}:
        return None
    return ImagePart(
        given.get("image_url", ""), given.get("detail", "auto"), given.get("file_id", "")
    )


def _read_file(given: dict[str, Any]) -> Part | None:
    if not given.keys() <= {"file_url", "file_data", "file_id", "filename"}:
        return None
    return FilePart(
        given.get("file_url", ""),
        given.get("file_data", ""),
        given.get("file_id", ""),
        given.get("filename", ""),
    )


_READERS: dict[str, Callable[[Mapping[str, Any], Any], Block | None]] = {
    "message": _read_message,
    "function_call": _read_call,
    "custom_tool_call": _read_call,
    "function_call_output": _read_result,
    "custom_tool_call_output": _read_result,
    "reasoning": _read_reasoning,
}
_PART_READERS: dict[str, Callable[[dict[str, Any]], Part | None]] = {
    "input_text": _read_input_text,
    "output_text": _read_output_text,
    "text": _read_input_text,
    "refusal": _read_refusal,
    "input_image": _read_image,
    "input_file": _read_file,
}
