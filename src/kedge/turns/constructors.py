"""Constructors: the short way to make a block.

Each takes the content first and, by keyword, what every block has: ``id``, ``metadata``, ``origin``.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any, TypedDict, Unpack, cast

from kedge.errors import InvalidTurn
from kedge.turns.blocks import (
    AssistantBlock,
    OpaqueBlock,
    ReasoningBlock,
    Role,
    SystemBlock,
    ToolCallBlock,
    ToolResultBlock,
    UserBlock,
)
from kedge.turns.frozen_json import freeze, freeze_map, thaw
from kedge.turns.ids import new_id
from kedge.turns.parts import PART_TYPES, AssistantPart, Part, TextPart

_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode


class Identity(TypedDict, total=False):
    """What every block has besides its content."""

    id: str
    metadata: Mapping[str, Any]
    origin: str
    extra: Mapping[str, Any]


def user(content: str | Part | Iterable[str | Part], **identity: Unpack[Identity]) -> UserBlock:
    """What the user says: text, or parts such as text and images."""
    return UserBlock(_to_parts(content), **_drop_none(identity))


def assistant(
    text: str | Part | Iterable[str | Part], **identity: Unpack[Identity]
) -> AssistantBlock:
    """What the model says: text, or parts such as a refusal."""
    parts = cast("tuple[AssistantPart, ...]", _to_parts(text))
    return AssistantBlock(parts, **_drop_none(identity))


def system(text: str, role: Role = "system", **identity: Unpack[Identity]) -> SystemBlock:
    """Instructions to the model."""
    return SystemBlock(text, role, **_drop_none(identity))


def tool_call(
    name: str,
    arguments: str | Mapping[str, Any],
    *,
    call_id: str = "",
    custom: bool = False,
    **identity: Unpack[Identity],
) -> ToolCallBlock:
    """A call of a tool; a mapping of arguments becomes JSON here, once."""
    if not isinstance(arguments, str):
        arguments = _encode_json(freeze_map(arguments, "arguments"))
    call_id = call_id or new_id("call")
    return ToolCallBlock(name, arguments, call_id, custom, **_drop_none(identity))


def tool_result(
    call_id: str,
    output: object,
    *,
    custom: bool = False,
    **identity: Unpack[Identity],
) -> ToolResultBlock:
    """The output of a call: text, parts, or any JSON value, which is written as JSON."""
    return ToolResultBlock(call_id, _output_to_parts(output), custom, **_drop_none(identity))


def reasoning(
    summary: str | Iterable[str] = (),
    *,
    text: str | Iterable[str] = (),
    encrypted_content: str = "",
    **identity: Unpack[Identity],
) -> ReasoningBlock:
    """What the model thought."""
    return ReasoningBlock(
        cast("tuple[str, ...]", _to_texts(summary)),
        cast("tuple[str, ...]", _to_texts(text)),
        encrypted_content,
        **_drop_none(identity),
    )


def opaque(item: Mapping[str, Any], **identity: Unpack[Identity]) -> OpaqueBlock:
    """A provider's item, kept as it is."""
    return OpaqueBlock(freeze_map(item, "item"), **_drop_none(identity))


def _drop_none(identity: Identity) -> Any:
    """What was given; ``None`` is like nothing given."""
    if not identity:
        return identity
    return {name: value for name, value in identity.items() if value is not None}


def _to_parts(content: object) -> tuple[Part, ...]:
    if isinstance(content, str):
        return (TextPart(content),)
    if isinstance(content, PART_TYPES):
        return (content,)
    kind = type(content).__name__
    if isinstance(content, bytes | Mapping) or not isinstance(content, Iterable):
        raise InvalidTurn(f"content is text or parts, not {kind}")
    # What is no part is refused by the block.
    members = cast("Iterable[str | Part]", content)
    return tuple(TextPart(part) if isinstance(part, str) else part for part in members)


def _output_to_parts(output: object) -> tuple[Part, ...]:
    match output:
        case str():
            return (TextPart(output),)
        case list() | tuple() if any(isinstance(part, PART_TYPES) for part in output):  # pyright: ignore[reportUnknownVariableType]
            return _to_parts(cast("list[str | Part]", output))
        case _ if isinstance(output, PART_TYPES):
            return (output,)
        case _:
            return (TextPart(_encode_json(output)),)


def _encode_json(value: object) -> str:
    return _encode(thaw(freeze(value)))


def _to_texts(texts: str | Iterable[str]) -> Iterable[str]:
    if isinstance(texts, str):
        return (texts,) if texts else ()
    return texts
