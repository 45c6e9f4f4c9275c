"""Convert blocks to items of the Responses API and back.

This module decides only the form. Which provider ids and which reasoning may be sent is decided in
``kedge.planning.render``. Fields of a known item that Kedge does not interpret are stored in the block's
``extra["item"]``. The fields of the user's messages and of results are sent again, because a program wrote them; of the
fields of the model's output, only ``RESENT_FIELDS`` are. An item that cannot be converted without loss becomes an
``OpaqueBlock``.
"""

import hashlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import repeat
from typing import Any, cast

from msgspec.structs import replace

from kedge.errors import InvalidTurn, UnsupportedBlock
from kedge.turns import blocks
from kedge.turns.frozen_json import EMPTY, FrozenMap, freeze, thaw
from kedge.turns.parts import (
    AssistantPart,
    FilePart,
    ImagePart,
    OpaquePart,
    Part,
    RefusalPart,
    TextPart,
)
from kedge.turns.server_fields import (
    RESENT_FIELDS,
    drop_nulls,
    select_annotations,
    select_members,
    strip_server_fields,
)

Item = dict[str, Any]

CALL_FORMS = {False: ("function_call", "arguments"), True: ("custom_tool_call", "input")}
"""The type of a call and the member with its arguments, by whether the tool takes free-form input."""
IMAGE_MEMBERS = {"image_url": "url", "file_id": "file_id", "detail": "detail"}
FILE_MEMBERS = {
    "file_url": "url",
    "file_data": "data",
    "file_id": "file_id",
    "filename": "filename",
}
"""The members of images and files, and the fields of their parts."""
CHAT_PART_TYPES = frozenset({"document_url", "reference", "video_url"})
"""Types of parts that only some servers of the Chat Completions API have."""

REQUIRED_ID_PREFIXES = {
    "file_search_call": "fs",
    "code_interpreter_call": "ci",
    "image_generation_call": "ig",
    "mcp_call": "mcp",
    "mcp_list_tools": "mcpl",
}
"""Item types that a server accepts only with an id, and the prefix of such an id."""
STATUS_REQUIRED = frozenset(
    {
        "apply_patch_call",
        "code_interpreter_call",
        "file_search_call",
        "image_generation_call",
        "local_shell_call",
        "web_search_call",
    }
)
"""Item types that a server accepts only with their status."""


def item_from_block(block: blocks.Block) -> Item:
    """Convert a block to an item of the Responses API.

    Args:
        block: The block.

    Returns:
        The item, without provider id, status and nulls.

    Raises:
        UnsupportedBlock: If the API has no form for the block.
    """
    match block:
        case blocks.UserBlock():
            content = _encode_content(block.parts)
            return {**_encode_members(block), "type": "message", "role": "user", "content": content}
        case blocks.AssistantBlock():
            content = [_encode_output_part(part) for part in block.parts]
            fields = _encode_members(block, RESENT_FIELDS)
            return {"type": "message", "role": "assistant", "content": content, **fields}
        case blocks.SystemBlock():
            content = _encode_content((TextPart(block.text),))
            members = _encode_members(block)
            return {**members, "type": "message", "role": block.role, "content": content}
        case blocks.ToolCallBlock():
            kind, arguments_member = CALL_FORMS[block.custom]
            call = {"type": kind, "call_id": block.call_id, "name": block.name}
            members = _encode_members(block, RESENT_FIELDS)
            return {**call, arguments_member: block.arguments, **members}
        case blocks.ToolResultBlock():
            kind = f"{CALL_FORMS[block.custom][0]}_output"
            output = _encode_content(block.parts)
            members = _encode_members(block)
            return {**members, "type": kind, "call_id": block.call_id, "output": output}
        case blocks.ReasoningBlock():
            return _encode_reasoning(block)
        case blocks.OpaqueBlock():
            return _encode_opaque(block)
        case blocks.UnknownBlock():
            raise UnsupportedBlock(
                f"block {block.id} is of a kind that this version of Kedge does not know "
                f"({block.form.get('kind')!r}); remove it or upgrade Kedge"
            )


def block_from_item(item: Mapping[str, Any], **identity: Any) -> blocks.Block:
    """Convert an item of the Responses API to a block.

    Args:
        item: The item as a server sends, stores or streams it.
        **identity: ``id``, ``metadata``, ``origin``, ``source`` and ``extra`` of the block.

    Returns:
        The block; an ``OpaqueBlock`` for an unknown type or form.

    Raises:
        InvalidTurn: If the item is not an object with a type.
    """
    if not isinstance(item, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidTurn(f"an item must be an object, not {type(item).__name__}")
    if item.get("type") is None:
        item = _infer_type(item)
    if isinstance(item.get("id"), str):
        source = identity.get("source") or blocks.Source()
        if not source.item_id:
            identity["source"] = replace(source, item_id=item["id"])
    return _read_known(item, identity) or blocks.OpaqueBlock(freeze(item), **identity)


def _read_known(item: Mapping[str, Any], identity: dict[str, Any]) -> blocks.Block | None:
    """Return the block of an item; None if its type or its form is unknown."""
    kind = item["type"]
    if not isinstance(kind, str) or kind not in _ITEM_READERS:
        return None
    try:
        return _ITEM_READERS[kind](item, identity)
    except InvalidTurn:
        return None


def drop_ciphertext(block: blocks.Block) -> blocks.Block:
    """Return a block without what its server encrypted: it may encrypt the same content anew each time it is read.

    Args:
        block: The block.

    Returns:
        The block, to be compared with another version of itself.
    """
    if not isinstance(block, blocks.OpaqueBlock):
        return block
    return replace(block, item=_drop_encrypted(block.item))


def _drop_encrypted(value: Any) -> Any:
    if isinstance(value, FrozenMap):
        kept = {k: v for k, v in value.items() if k != "encrypted_content"}
        return FrozenMap({name: _drop_encrypted(member) for name, member in kept.items()})
    if isinstance(value, tuple):
        return tuple(map(_drop_encrypted, cast("tuple[Any, ...]", value)))
    return value


def _infer_type(item: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the item with its type, which messages and references may omit."""
    for member, kind in (("role", "message"), ("id", "item_reference")):
        if member in item:
            return {**item, "type": kind}
    raise InvalidTurn("an item needs a type")


def _encode_reasoning(block: blocks.ReasoningBlock) -> Item:
    item: Item = {
        "type": "reasoning",
        "summary": [{"type": "summary_text", "text": text} for text in block.summary],
    }
    if block.texts:
        item["content"] = [{"type": "reasoning_text", "text": text} for text in block.texts]
    if block.encrypted_content:
        item["encrypted_content"] = block.encrypted_content
    return item


def _encode_opaque(block: blocks.OpaqueBlock) -> Item:
    if api := block.metadata.get(blocks.NATIVE_API):
        raise UnsupportedBlock(
            f"block {block.id} ({block.type}) is of the {api} API, and this API has no such item; "
            "remove it or write it as text before sending"
        )
    item = thaw(strip_server_fields(block.item))
    if block.type in REQUIRED_ID_PREFIXES and "id" not in item:
        # A generated id: planning decides whether the provider's id is sent, and local ids are never sent.
        name = hashlib.sha256(f"kedge.item/1 {block.id}".encode()).hexdigest()[:32]
        item["id"] = f"{REQUIRED_ID_PREFIXES[block.type]}_{name}"
    if block.type in STATUS_REQUIRED and isinstance(block.item.get("status"), str):
        item["status"] = block.item["status"]
    return item


def _encode_members(block: blocks.Block, names: tuple[str, ...] | None = None) -> Item:
    if block.extra is EMPTY:
        return {}
    return thaw(select_members(block.extra, names))


def _encode_input_part(part: Part) -> Item:
    match part:
        case TextPart():
            return {"type": "input_text", "text": part.text}
        case ImagePart():
            return {"type": "input_image", **_encode_fields(part, IMAGE_MEMBERS)}
        case FilePart():
            return {"type": "input_file", **_encode_fields(part, FILE_MEMBERS)}
        case OpaquePart():
            return _encode_opaque_part(part)
        case RefusalPart():
            raise UnsupportedBlock(
                "a refusal is only possible in the content of the model; remove it"
            )


def _encode_fields(part: ImagePart | FilePart, names: Mapping[str, str]) -> Item:
    """Return the members of a part that are not at their default."""
    values = {member: getattr(part, field) for member, field in names.items()}
    return {member: value for member, value in values.items() if value not in ("", "auto")}


def _encode_output_part(part: AssistantPart) -> Item:
    match part:
        case TextPart():
            item: Item = {"type": "output_text", "text": part.text}
            if part.extra and (annotations := select_annotations(part.extra)):
                item["annotations"] = thaw(annotations)
            return item
        case RefusalPart():
            return {"type": "refusal", "refusal": part.text}
        case OpaquePart():
            return _encode_opaque_part(part)


def _encode_opaque_part(part: OpaquePart) -> Item:
    kind = part.content.get("type")
    if kind in CHAT_PART_TYPES:
        raise UnsupportedBlock(
            f"only the Chat Completions API has content of type {kind}; remove that part"
        )
    return thaw(drop_nulls(part.content))


def _encode_content(parts: tuple[Part, ...]) -> str | list[Item]:
    """Return a single text as a string, which is shorter, and other content as a list of parts.

    This is not used for messages of the model: llama.cpp reads their text as an ``input_text`` and rejects it.
    """
    if len(parts) == 1 and isinstance(parts[0], TextPart):
        return parts[0].text
    return [_encode_input_part(part) for part in parts]


# Readers. Blocks and parts check their fields: an item that they reject has an unknown form.


def _read_message(item: Mapping[str, Any], identity: Any) -> blocks.Block | None:
    rest = _add_unread_fields(item, identity, "content", "role")
    match item.get("role"):
        case "user":
            return blocks.UserBlock(_read_parts(item.get("content"), _INPUT_PART_READERS), **rest)
        case "assistant":
            content: object = item.get("content")
            if content is None:  # as some servers write a message without text
                content = ()
            parts = _read_parts(content, _OUTPUT_PART_READERS)
            return blocks.AssistantBlock(cast("tuple[AssistantPart, ...]", parts), **rest)
        case "system" | "developer" as role:
            return _read_system(item, role, rest)
        case _:
            return None


def _read_system(item: Mapping[str, Any], role: Any, rest: Any) -> blocks.Block | None:
    parts = _read_parts(item.get("content"), _INPUT_PART_READERS)
    if len(parts) != 1 or not isinstance(parts[0], TextPart) or parts[0].extra:
        return None
    return blocks.SystemBlock(parts[0].text, role, **rest)


def _read_call(item: Mapping[str, Any], identity: Any) -> blocks.Block:
    is_custom = item["type"] == "custom_tool_call"
    _, arguments_member = CALL_FORMS[is_custom]
    rest = _add_unread_fields(item, identity, "call_id", "name", arguments_member)
    return blocks.ToolCallBlock(
        name=cast("str", item.get("name")),
        arguments=cast("str", item.get(arguments_member)),
        call_id=cast("str", item.get("call_id")),
        custom=is_custom,
        **rest,
    )


def _read_result(item: Mapping[str, Any], identity: Any) -> blocks.Block:
    custom = item["type"] == "custom_tool_call_output"
    parts = _read_parts(item.get("output"), _INPUT_PART_READERS)
    rest = _add_unread_fields(item, identity, "call_id", "output")
    return blocks.ToolResultBlock(cast("str", item.get("call_id")), parts, custom, **rest)


def _read_reasoning(item: Mapping[str, Any], identity: Any) -> blocks.Block:
    """Convert reasoning of any form to a reasoning block, so that it is never sent as another item."""
    summary = _read_plain_texts(item.get("summary"), "summary_text")
    texts = _read_plain_texts(item.get("content"), "reasoning_text")
    encrypted: object = item.get("encrypted_content")
    read_members: list[str] = []
    if summary is not None:
        read_members.append("summary")
    if texts is not None:
        read_members.append("content")
    if isinstance(encrypted, str):
        read_members.append("encrypted_content")
    else:
        encrypted = ""
    rest = _add_unread_fields(item, identity, *read_members)
    return blocks.ReasoningBlock(summary or (), texts or (), encrypted, **rest)


def _read_plain_texts(parts: object, kind: str) -> tuple[str, ...] | None:
    """Return the texts of parts if all parts are text of this kind, else None."""
    if parts is None:
        return ()
    if not isinstance(parts, list | tuple):
        return None
    texts: list[str] = []
    for part in cast("list[Mapping[str, Any] | None]", parts):
        if not isinstance(part, Mapping):
            return None
        text = part.get("text")
        if not isinstance(text, str) or dict(part) != {"type": kind, "text": text}:
            return None
        texts.append(text)
    return tuple(texts)


def _add_unread_fields(item: Mapping[str, Any], identity: Any, *known: str) -> Any:
    """Return the identity with the fields that are not interpreted in ``extra``."""
    read = {"type", "id", "status", *known}
    rest = {name: value for name, value in item.items() if name not in read and value is not None}
    if not rest:
        return identity
    extra: Item = {**(identity.get("extra") or {}), "item": rest}
    return {**identity, "extra": extra}


_PartReader = Callable[[dict[str, Any]], Part | None]


def _read_parts(content: object, readers: Mapping[str, _PartReader]) -> tuple[Part, ...]:
    if isinstance(content, str):
        return (TextPart(content),)
    if not isinstance(content, list | tuple):
        raise InvalidTurn("content must be text or a list of parts")
    return tuple(map(_read_part, cast("list[object]", content), repeat(readers)))


def _read_part(part: object, readers: Mapping[str, _PartReader]) -> Part:
    if not isinstance(part, Mapping):
        raise InvalidTurn("a part must be an object")
    members = {k: v for k, v in cast("Mapping[str, Any]", part).items() if v is not None}
    kind = members.pop("type", None)
    known_part: Part | None = None
    if isinstance(kind, str) and kind in readers:
        with suppress(InvalidTurn):  # a known type in an unknown form
            known_part = readers[kind](members)
    return known_part or OpaquePart(drop_nulls(freeze(part)))


def _build_reader(cls: type[Part], names: Mapping[str, str]) -> _PartReader:
    """Return the reader of a part that has no other members than these."""

    def read(members: dict[str, Any]) -> Part | None:
        if not members or not members.keys() <= names.keys():
            return None
        fields: dict[str, Any] = {names[member]: value for member, value in members.items()}
        return cls(**fields)

    return read


def _read_output_text(members: dict[str, Any]) -> Part:
    text = members.pop("text", None)
    rest = {name: value for name, value in members.items() if value not in ([], ())}
    if rest:
        return TextPart(text, extra=FrozenMap(rest))
    return TextPart(cast("str", text))


_ITEM_READERS: dict[str, Callable[[Mapping[str, Any], Any], blocks.Block | None]] = {
    "message": _read_message,
    "function_call": _read_call,
    "custom_tool_call": _read_call,
    "function_call_output": _read_result,
    "custom_tool_call_output": _read_result,
    "reasoning": _read_reasoning,
}
# All names of text parts are accepted, because the name depends on the role.
_TEXT_READERS: dict[str, _PartReader] = {
    **dict.fromkeys(("input_text", "text"), _build_reader(TextPart, {"text": "text"})),
    "output_text": _read_output_text,
}
_OUTPUT_PART_READERS: dict[str, _PartReader] = {
    **_TEXT_READERS,
    "refusal": _build_reader(RefusalPart, {"refusal": "text"}),
}
_INPUT_PART_READERS: dict[str, _PartReader] = {
    **_TEXT_READERS,
    "input_image": _build_reader(ImagePart, IMAGE_MEMBERS),
    "input_file": _build_reader(FilePart, FILE_MEMBERS),
}
