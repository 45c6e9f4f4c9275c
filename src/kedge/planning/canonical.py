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

    Every block of a Turn passes here once, so the common kinds have forms with sorted keys of their own.
    """
    sort = _SORTED_FORMS.get(type(block))
    sorted_form = sort(block) if sort else None
    if sorted_form is not None:
        return encode_plain(sorted_form)
    form = canonical(block)
    return None if form is None else encode_sorted(form)


def _sort_user(block: UserBlock) -> CanonicalForm | None:
    parts = _sort_text(block.parts)
    return {"kind": "user", "parts": parts} if parts else None


def _sort_assistant(block: AssistantBlock) -> CanonicalForm | None:
    parts = _sort_text(block.parts)
    return {"kind": "assistant", "parts": parts} if parts else None


def _sort_tool_call(block: ToolCallBlock) -> CanonicalForm:
    custom = _custom_member(block)
    call = {"arguments": block.arguments, "call_id": block.call_id}
    return {**call, **custom, "kind": "tool_call", "name": block.name}


def _sort_tool_result(block: ToolResultBlock) -> CanonicalForm | None:
    parts = _sort_text(block.parts)
    call = {"call_id": block.call_id, **_custom_member(block)}
    return {**call, "kind": "tool_result", "parts": parts} if parts else None


def _sort_text(parts: tuple[Part, ...]) -> list[CanonicalForm] | None:
    """Return the form of a single text; None for any other parts."""
    if len(parts) == 1 and isinstance(text := parts[0], TextPart):
        return [{"text": text.text, "type": "text"}]
    return None


_SORTED_FORMS: dict[type[Block], Callable[[Any], CanonicalForm | None]] = {
    UserBlock: _sort_user,
    AssistantBlock: _sort_assistant,
    ToolCallBlock: _sort_tool_call,
    ToolResultBlock: _sort_tool_result,
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
