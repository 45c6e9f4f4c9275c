"""The canonical form of a block: only what a model can see.

Two blocks with the same canonical form are the same to a model, however they were made: by a constructor, from a
stream, from a replayed item or from JSON. Local ids, provider ids, metadata, timestamps, nulls and statuses
are not part of it, so a change of them does not invalidate an anchor. Reasoning belongs to the server and has
no canonical form.
"""

from collections.abc import Callable
from typing import Any

from kedge.json_codec import encode_plain, encode_sorted
from kedge.turns import (
    AssistantBlock,
    Block,
    FilePart,
    ImagePart,
    OpaqueBlock,
    Part,
    ReasoningBlock,
    RefusalPart,
    SystemBlock,
    TextPart,
    ToolCallBlock,
    ToolResultBlock,
    UnknownBlock,
    UserBlock,
)
from kedge.turns.frozen_json import thaw
from kedge.turns.server_fields import drop_nulls, strip_server_fields

CanonicalForm = dict[str, Any]


def canonical(block: Block) -> CanonicalForm | None:
    """Return what a model can see of a block, as plain JSON values.

    To compare two blocks, compare ``canonical_json``: in Python ``True == 1``.

    Args:
        block: The block.

    Returns:
        The canonical form, or None for reasoning.
    """
    match block:
        case UserBlock() | AssistantBlock():
            return {"kind": block.kind, "parts": [_canonical_part(part) for part in block.parts]}
        case SystemBlock():
            return {"kind": block.kind, "role": block.role, "text": block.text}
        case ToolCallBlock():
            call = {"call_id": block.call_id, "name": block.name, "arguments": block.arguments}
            return {"kind": block.kind, **call, **_custom_member(block)}
        case ToolResultBlock():
            parts = [_canonical_part(part) for part in block.parts]
            return {
                "kind": block.kind,
                "call_id": block.call_id,
                "parts": parts,
                **_custom_member(block),
            }
        case ReasoningBlock():
            return None
        case OpaqueBlock():
            return {"kind": block.kind, "item": thaw(strip_server_fields(block.item))}
        case UnknownBlock():
            return {"kind": block.kind, "form": thaw(drop_nulls(block.form))}
        case _:
            raise AssertionError(block.kind)


def canonical_json(block: Block) -> bytes | None:
    """Return the canonical form as JSON bytes with sorted keys, which is what digests hash.

    Every block of a Turn passes here once, so the common kinds have encoders of their own, which return the
    same bytes, or None for unusual parts.
    """
    write = _ENCODERS.get(type(block))
    written = write(block) if write else None
    if written is not None:
        return written
    form = canonical(block)
    return None if form is None else encode_sorted(form)


def _encode_user(block: UserBlock) -> bytes | None:
    if len(block.parts) == 1 and type(part := block.parts[0]) is TextPart:
        return b'{"kind":"user","parts":[{"text":%b,"type":"text"}]}' % encode_plain(part.text)
    return None


def _encode_assistant(block: AssistantBlock) -> bytes | None:
    if len(block.parts) == 1 and type(part := block.parts[0]) is TextPart:
        return b'{"kind":"assistant","parts":[{"text":%b,"type":"text"}]}' % encode_plain(part.text)
    return None


def _encode_tool_call(block: ToolCallBlock) -> bytes:
    return b'{"arguments":%b,"call_id":%b,%b"kind":"tool_call","name":%b}' % (
        encode_plain(block.arguments),
        encode_plain(block.call_id),
        b'"custom":true,' if block.custom else b"",
        encode_plain(block.name),
    )


def _encode_tool_result(block: ToolResultBlock) -> bytes | None:
    if len(block.parts) == 1 and type(part := block.parts[0]) is TextPart:
        form = b'{"call_id":%b,%b"kind":"tool_result","parts":[{"text":%b,"type":"text"}]}'
        custom = b'"custom":true,' if block.custom else b""
        return form % (encode_plain(block.call_id), custom, encode_plain(part.text))
    return None


_ENCODERS: dict[type[Block], Callable[[Any], bytes | None]] = {
    UserBlock: _encode_user,
    AssistantBlock: _encode_assistant,
    ToolCallBlock: _encode_tool_call,
    ToolResultBlock: _encode_tool_result,
}


def _canonical_part(part: Part) -> CanonicalForm:
    match part:
        case TextPart():
            return {"type": "text", "text": part.text}
        case RefusalPart():
            return {"type": "refusal", "text": part.text}
        case ImagePart():
            source = {"url": part.url, "file_id": part.file_id}
            return {"type": "image", "detail": part.detail, **_drop_empty(source)}
        case FilePart():
            source = {"url": part.url, "data": part.data, "file_id": part.file_id}
            return {"type": "file", "filename": part.filename, **_drop_empty(source)}
        case _:
            return {"type": "opaque", "content": thaw(drop_nulls(part.content))}


def _custom_member(block: ToolCallBlock | ToolResultBlock) -> CanonicalForm:
    return {"custom": True} if block.custom else {}


def _drop_empty(members: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in members.items() if value}
