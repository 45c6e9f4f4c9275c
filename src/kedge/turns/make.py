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
from kedge.turns.frozen import FrozenMap, freeze, thaw
from kedge.turns.ids import new_id
from kedge.turns.parts import FilePart, ImagePart, OpaquePart, Part, RefusalPart, TextPart

PARTS = (TextPart, RefusalPart, ImagePart, FilePart, OpaquePart)


class Identity(TypedDict, total=False):
    """What every block has besides its content."""

    id: str
    metadata: Mapping[str, Any]
    origin: str
    extra: Mapping[str, Any]


def user(content: str | Part | Iterable[str | Part], **identity: Unpack[Identity]) -> UserBlock:
    """What the user says: text, or parts such as text and images."""
    return UserBlock(_parts(content), **_identity(identity))


def assistant(text: str | Iterable[str | Part], **identity: Unpack[Identity]) -> AssistantBlock:
    """What the model says."""
    parts = _parts(text)
    kept = tuple(p for p in parts if isinstance(p, TextPart | RefusalPart | OpaquePart))
    if len(kept) != len(parts):
        raise InvalidTurn("an assistant block holds text and refusals, not images or files")
    return AssistantBlock(kept, **_identity(identity))


def system(text: str, role: Role = "system", **identity: Unpack[Identity]) -> SystemBlock:
    """Instructions to the model."""
    return SystemBlock(text, role, **_identity(identity))


def tool_call(
    name: str,
    arguments: str | Mapping[str, Any],
    *,
    call_id: str = "",
    custom: bool = False,
    **identity: Unpack[Identity],
) -> ToolCallBlock:
    """A call of a tool; a mapping of arguments becomes JSON here, once."""
    written = arguments if isinstance(arguments, str) else _written(arguments)
    call_id = call_id or new_id("call")
    return ToolCallBlock(name, written, call_id, custom, **_identity(identity))


def tool_result(
    call_id: str,
    output: object,
    *,
    custom: bool = False,
    **identity: Unpack[Identity],
) -> ToolResultBlock:
    """The output of a call: text, parts, or any JSON value, which is written as JSON."""
    return ToolResultBlock(call_id, _output_parts(output), custom, **_identity(identity))


def reasoning(
    summary: str | Iterable[str] = (),
    *,
    text: str | Iterable[str] = (),
    encrypted_content: str = "",
    **identity: Unpack[Identity],
) -> ReasoningBlock:
    """What the model thought."""
    return ReasoningBlock(_texts(summary), _texts(text), encrypted_content, **_identity(identity))


def opaque(item: Mapping[str, Any], **identity: Unpack[Identity]) -> OpaqueBlock:
    """A provider's item, kept as it is."""
    return OpaqueBlock(FrozenMap(item), **_identity(identity))


def _identity(identity: Identity) -> Any:
    return {name: value for name, value in identity.items() if value is not None}


def _parts(content: str | Part | Iterable[str | Part]) -> tuple[Part, ...]:
    if isinstance(content, str):
        return (TextPart(content),)
    if isinstance(content, PARTS):
        return (content,)
    if not isinstance(content, Iterable):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidTurn(f"content is text or parts, not {type(content).__name__}")
    return tuple(TextPart(part) if isinstance(part, str) else _checked(part) for part in content)


def _checked(part: Part) -> Part:
    if not isinstance(part, PARTS):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidTurn(f"content is text or parts, not {type(part).__name__}")
    return part


def _output_parts(output: object) -> tuple[Part, ...]:
    match output:
        case str():
            return (TextPart(output),)
        case TextPart() | RefusalPart() | ImagePart() | FilePart() | OpaquePart():
            return (output,)
        case list() | tuple() if output and all(isinstance(part, PARTS) for part in output):  # pyright: ignore[reportUnknownVariableType]
            return tuple(cast("list[Part]", output))
        case _:
            return (TextPart(_written(output)),)


def _written(value: object) -> str:
    return json.dumps(thaw(freeze(value)), ensure_ascii=False, allow_nan=False)


def _texts(texts: str | Iterable[str]) -> tuple[str, ...]:
    if isinstance(texts, str):
        return (texts,) if texts else ()
    return tuple(texts)
