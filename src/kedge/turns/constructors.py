"""Functions that construct blocks.

The first argument is the content; the keyword arguments ``id``, ``metadata``, ``origin`` and ``source`` are common
to all blocks.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any, TypedDict, Unpack, cast

from kedge.errors import InvalidSetting, InvalidTurn
from kedge.turns.blocks import (
    AssistantBlock,
    Block,
    OpaqueBlock,
    ReasoningBlock,
    Role,
    Source,
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
    """The keyword arguments of every constructor.

    Attributes:
        id: The local id; generated if it is empty.
        metadata: Values of the application, which the model does not see.
        origin: What added the block: ``user``, ``engine`` or the name of a middleware.
        source: What an engine knows about the block, if it is of a response.
        extra: Fields that Kedge does not interpret.
    """

    id: str
    metadata: Mapping[str, Any]
    origin: str
    source: Source | None
    extra: Mapping[str, Any]


def user(content: str | Part | Iterable[str | Part], **identity: Unpack[Identity]) -> UserBlock:
    """Construct a block of the user.

    Args:
        content: Text, a part, or a list of texts and parts such as ``image(...)`` and ``file(...)``.
        **identity: ``id``, ``metadata``, ``origin``, ``source`` and ``extra`` of the block; see ``Block``.

    Returns:
        The block.

    Raises:
        InvalidTurn: If the content is neither text nor parts.

    Example:
        >>> user(["What is this?", image("https://example.com/cat.png")])
    """
    return UserBlock(_to_parts(content), **_drop_none(identity))


def assistant(
    text: str | Part | Iterable[str | Part], **identity: Unpack[Identity]
) -> AssistantBlock:
    """Construct a block of the model.

    Args:
        text: Text, a part such as ``RefusalPart``, or a list of texts and parts.
        **identity: ``id``, ``metadata``, ``origin``, ``source`` and ``extra`` of the block; see ``Block``.

    Returns:
        The block.

    Raises:
        InvalidTurn: If the content is not text or parts that a model can write.
    """
    parts = cast("tuple[AssistantPart, ...]", _to_parts(text))
    return AssistantBlock(parts, **_drop_none(identity))


def system(text: str, role: Role = "system", **identity: Unpack[Identity]) -> SystemBlock:
    """Construct a block of instructions to the model.

    Args:
        text: The instructions.
        role: ``system`` or ``developer``.
        **identity: ``id``, ``metadata``, ``origin``, ``source`` and ``extra`` of the block; see ``Block``.

    Returns:
        The block. At the start of a Turn its text is sent with every request.

    Raises:
        InvalidTurn: If the text or the role is invalid.
    """
    return SystemBlock(text, role, **_drop_none(identity))


def tool_call(
    name: str,
    arguments: str | Mapping[str, Any],
    *,
    call_id: str = "",
    custom: bool = False,
    **identity: Unpack[Identity],
) -> ToolCallBlock:
    """Construct a tool call.

    Args:
        name: The tool's name.
        arguments: The arguments exactly as the model wrote them, or a mapping, which is encoded as JSON.
        call_id: The id that connects the call to its result; generated if it is empty.
        custom: Whether the tool takes free-form input instead of JSON arguments.
        **identity: ``id``, ``metadata``, ``origin``, ``source`` and ``extra`` of the block; see ``Block``.

    Returns:
        The block.

    Raises:
        InvalidTurn: If the arguments are neither text nor a JSON object.
    """
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
    """Construct the result of a tool call.

    Args:
        call_id: The ``call_id`` of the call.
        output: Text, a part, a list with parts, or any JSON value, which is encoded as JSON.
        custom: Whether the call is one of a tool that takes free-form input.
        **identity: ``id``, ``metadata``, ``origin``, ``source`` and ``extra`` of the block; see ``Block``.

    Returns:
        The block.

    Raises:
        InvalidTurn: If the output is not a JSON value.
    """
    return ToolResultBlock(call_id, _output_to_parts(output), custom, **_drop_none(identity))


def reasoning(
    summary: str | Iterable[str] = (),
    *,
    text: str | Iterable[str] = (),
    encrypted_content: str = "",
    **identity: Unpack[Identity],
) -> ReasoningBlock:
    """Construct a reasoning block.

    Args:
        summary: The summary, or several.
        text: The reasoning text, or several.
        encrypted_content: The reasoning as the provider encrypted it.
        **identity: ``id``, ``metadata``, ``origin``, ``source`` and ``extra`` of the block; see ``Block``.

    Returns:
        The block.
    """
    return ReasoningBlock(
        cast("tuple[str, ...]", _to_texts(summary)),
        cast("tuple[str, ...]", _to_texts(text)),
        encrypted_content,
        **_drop_none(identity),
    )


def opaque(item: Mapping[str, Any], **identity: Unpack[Identity]) -> OpaqueBlock:
    """Construct a block from a provider's item that Kedge does not interpret.

    Args:
        item: The item; it needs a ``type``.
        **identity: ``id``, ``metadata``, ``origin``, ``source`` and ``extra`` of the block; see ``Block``.

    Returns:
        The block, which is sent to the same API unchanged.

    Raises:
        InvalidTurn: If the item is not a JSON object with a type.
    """
    return OpaqueBlock(freeze_map(item, "item"), **_drop_none(identity))


def build_replacement(old: Block, new: Block | str) -> Block:
    """Return the block that replaces another one; a text replaces a user block.

    Raises:
        InvalidSetting: If ``new`` is a text and ``old`` is not a user block.
    """
    if not isinstance(new, str):
        return new
    if old.kind != "user":
        raise InvalidSetting(
            f"a text can only replace a user block; give a block of kind {old.kind!r}"
        )
    return user(new)


def _drop_none(identity: Identity) -> Any:
    """Return the keywords without those that are None."""
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
        raise InvalidTurn(f"content must be text or parts, not {kind}")
    # The block rejects anything that is not a part.
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
