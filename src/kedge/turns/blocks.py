"""Blocks: the immutable elements of a conversation.

Two blocks are equal if their kind and content are equal. The other fields are identity: the local ``id``, the
``source`` (response id, provider item id and output index from the engine), the ``metadata`` of applications, the
``origin`` (``user``, ``engine`` or the name of a middleware) and ``extra`` (fields that Kedge does not interpret).

A local id consists of a nanosecond timestamp that increases with every id of a process, and 40 random bits that
identify the process. It is never sent to a provider.

Constructors take the content first; ``id``, ``metadata``, ``origin``, ``source`` and ``extra`` are keyword arguments
of all of them.
"""

import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter
from sys import intern
from typing import Annotated, Any, ClassVar, Literal, Self, TypedDict, Unpack, cast, get_args

import msgspec
from msgspec.structs import astuple, force_setattr, replace

from kedge._internal.arguments import check_type
from kedge.errors import InvalidJSON, InvalidSetting, InvalidTurn
from kedge.turns.frozen_json import EMPTY, FrozenMap, check_text, freeze, freeze_map, thaw
from kedge.turns.parts import (
    ASSISTANT_PART_TYPES,
    PART_TYPES,
    AssistantPart,
    Extra,
    ImmutableStruct,
    Part,
    RefusalPart,
    TextPart,
    check_parts,
    check_texts,
    freeze_extra,
)
from kedge.turns.server_fields import strip_server_fields

NATIVE_API = "kedge.native_api"
"""Metadata key of an opaque block: the API that its item is of, unless this is the Responses API."""

BlockKind = Literal[
    "user", "assistant", "reasoning", "tool_call", "tool_result", "system", "opaque", "unknown"
]
KNOWN_KINDS: frozenset[str] = frozenset(get_args(BlockKind)) - {"unknown"}
Role = Literal["system", "developer"]
USER = "user"
ENGINE = "engine"
"""The origins of most blocks."""
_Id = Annotated[str, msgspec.Meta(min_length=1)]


_id_lock = threading.Lock()
_last_tick = 0
_process_bits = int.from_bytes(os.urandom(5))
_SPREAD = 0x9E3779B97F4A7C15
"""An odd constant: products of consecutive ticks with it differ in all digits."""


def new_id(prefix: str) -> str:
    """Generate an id such as ``blk_18a3f0c2b4d5e6f71a2b3c4d5e``.

    Ids start with the time, so they are ordered. They end with random bits of the process, mixed with the
    time: the last digits of two ids differ also within a process, because lists show only these.

    Args:
        prefix: The part before the underscore.

    Returns:
        The id.
    """
    global _last_tick  # noqa: PLW0603 - one clock for the process
    check_type("prefix", str, prefix)
    with _id_lock:
        tick = time.time_ns()
        if tick <= _last_tick:
            tick = _last_tick + 1
        _last_tick = tick
    mixed = (_process_bits + (tick * _SPREAD >> 24)) & 0xFF_FFFF_FFFF
    return f"{prefix}_{tick:016x}{mixed:010x}"


def _reset_after_fork() -> None:
    """Set new random bits and an unlocked lock in a forked process."""
    global _id_lock, _process_bits  # noqa: PLW0603 - they belong to the process
    _id_lock = threading.Lock()
    _process_bits = int.from_bytes(os.urandom(5))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_after_fork)


class Source(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """What an engine knows about the item of a block; in JSON an array.

    Attributes:
        response_id: The response that produced it, or an empty string.
        item_id: The provider's id of the item, or an empty string.
        output_index: The position of the item in the output of its response.
    """

    response_id: str = ""
    item_id: str = ""
    output_index: int | None = None

    def __post_init__(self) -> None:
        response_id = self.response_id
        item_id = self.item_id
        index = self.output_index
        if type(response_id) is not str or not response_id.isascii():
            force_setattr(self, "response_id", check_text(response_id, "response_id"))
        if type(item_id) is not str or not item_id.isascii():
            force_setattr(self, "item_id", check_text(item_id, "item_id"))
        if index is not None and type(index) is not int:
            raise InvalidJSON("output_index", f"expected an integer, got {type(index).__name__}")


_SOURCE_FIELDS = frozenset(Source.__struct_fields__)


class _CacheSlot:
    __slots__ = ("_digest",)


class BlockBase(ImmutableStruct, _CacheSlot, frozen=True, kw_only=True, tag_field="kind"):
    """The base class of all blocks.

    Attributes:
        kind: The kind of block.
        id: The local id; generated if it is empty.
        metadata: Values of the application, which the model does not see; the names of Kedge's own
            start with ``kedge.``.
        source: What an engine knows about the block, if it is of a response.
        origin: What added the block: ``user``, ``engine`` or the name of a middleware.
        extra: Fields that Kedge does not interpret.
    """

    kind: ClassVar[Any]
    id: _Id = ""
    metadata: FrozenMap = EMPTY
    origin: str = USER
    source: Source | None = None
    extra: Extra = EMPTY

    def __post_init__(self) -> None:
        name = self.id
        origin = self.origin
        if name == "":
            force_setattr(self, "id", new_id("blk"))
        elif type(name) is not str or not name.isascii():
            force_setattr(self, "id", check_text(name, "id"))
        if origin is not USER and origin is not ENGINE:
            force_setattr(self, "origin", intern(check_text(origin, "origin")))
        if self.metadata is not EMPTY:
            force_setattr(self, "metadata", _check_metadata(self.metadata))
        if self.source is not None and type(self.source) is not Source:
            raise InvalidJSON("source", f"expected a Source, got {type(self.source).__name__}")
        if self.extra is not EMPTY:
            freeze_extra(self)
        cache_digest(self, None)
        self._check()

    def _check(self) -> None:
        """Check the content, or raise ``InvalidTurn``."""
        raise InvalidTurn("this class is abstract; use kedge.user, kedge.assistant and so on")

    @property
    def content(self) -> tuple[object, ...]:
        """The content of the block, which ``==`` compares: the fields that not all blocks have."""
        return astuple(self)[: -len(BlockBase.__struct_fields__)]

    @property
    def text(self) -> str:
        """The text of a message or of a tool result, its text parts joined; empty for other blocks."""
        parts: tuple[Part, ...] = getattr(self, "parts", ())
        if len(parts) == 1 and type(part := parts[0]) is TextPart:
            return part.text
        return "".join(part.text for part in parts if isinstance(part, TextPart))

    @property
    def response_id(self) -> str:
        """The response that produced this block, or an empty string."""
        return "" if self.source is None else self.source.response_id

    @property
    def item_id(self) -> str:
        """The provider's id of this item, or an empty string."""
        return "" if self.source is None else self.source.item_id

    @property
    def output_index(self) -> int | None:
        """The position of this item in the output of its response, if it is known."""
        return None if self.source is None else self.source.output_index

    def with_metadata(self, members: Mapping[str, Any] | None = None, /, **more: Any) -> Self:
        """Return this block with metadata added.

        Args:
            members: The values to add; None removes one.
            **more: Further values.

        Returns:
            A block with the same id and content.
        """
        return replace(self, metadata=self.metadata.with_members({**(members or {}), **more}))

    def with_source(self, source: Source | None) -> Self:
        """Return this block with another source.

        Args:
            source: The source, or None.

        Returns:
            A block with the same id and content.
        """
        return replace(self, source=source)

    def with_origin(self, origin: str) -> Self:
        """Return this block with another origin.

        Args:
            origin: ``user``, ``engine`` or the name of a middleware.

        Returns:
            A block with the same id and content.
        """
        return replace(self, origin=origin)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, BlockBase):
            return NotImplemented
        return self.kind == other.kind and self.content == other.content

    def __hash__(self) -> int:
        return hash((self.kind, self.content))

    def __repr__(self) -> str:
        from kedge.turns.text_format import describe  # imports this module

        return f"<{self.kind} {describe(cast('Block', self))}>"


IDENTITY_FIELDS = frozenset(BlockBase.__struct_fields__) - {"extra"}


# The digest of a block's canonical form is derived by planning, a layer above, and cached in the block:
# a separate dictionary would cost a lookup and an entry for each block of a long conversation. The
# slot is private to this module. It is not a field, so it is not compared, copied, encoded or pickled.


get_cached_digest: Callable[[BlockBase], bytes | None] = attrgetter("_digest")
"""Return the digest that was cached for this block, or None."""
cache_digest: Callable[[BlockBase, bytes | None], None] = vars(_CacheSlot)["_digest"].__set__
"""Cache a digest that was derived from a block's content."""


class UserBlock(BlockBase, frozen=True, tag="user"):
    """A message of the user.

    Attributes:
        parts: Text, images, files.
    """

    kind: ClassVar[Literal["user"]] = "user"
    parts: tuple[Part, ...]

    def _check(self) -> None:
        parts = self.parts
        if type(parts) is not tuple or len(parts) != 1 or type(parts[0]) is not TextPart:
            force_setattr(self, "parts", check_parts(parts, PART_TYPES, "a user block"))

    @property
    def content(self) -> tuple[object, ...]:
        """The parts."""
        return self.parts


class AssistantBlock(BlockBase, frozen=True, tag="assistant"):
    """A message of the model.

    Attributes:
        parts: Text or a refusal.
    """

    kind: ClassVar[Literal["assistant"]] = "assistant"
    parts: tuple[AssistantPart, ...]

    def _check(self) -> None:
        parts = self.parts
        if type(parts) is not tuple or len(parts) != 1 or type(parts[0]) is not TextPart:
            force_setattr(
                self, "parts", check_parts(parts, ASSISTANT_PART_TYPES, "an assistant block")
            )

    @property
    def content(self) -> tuple[object, ...]:
        """The parts."""
        return self.parts

    @property
    def refusal(self) -> str:
        """The text of the refusal, if there is one."""
        return "".join(part.text for part in self.parts if isinstance(part, RefusalPart))


class SystemBlock(BlockBase, frozen=True, tag="system"):
    """Instructions to the model.

    System blocks at the start of a Turn are sent with every request; later ones are part of the history.

    Attributes:
        text: The instructions.
        role: ``system`` or ``developer``.
    """

    kind: ClassVar[Literal["system"]] = "system"
    text: str  # pyright: ignore[reportIncompatibleMethodOverride] - both are read-only
    role: Role = "system"

    def _check(self) -> None:
        check_texts(self, "text", "role")
        if self.role not in ("system", "developer"):
            raise InvalidTurn(
                f"the role of a system block must be system or developer, not {self.role!r}"
            )
        force_setattr(self, "role", intern(self.role))

    @property
    def content(self) -> tuple[object, ...]:
        """The role and the text."""
        return (self.role, self.text)


class ToolCallBlock(BlockBase, frozen=True, tag="tool_call"):
    """A tool call of the model.

    Attributes:
        name: The tool's name.
        arguments: The arguments exactly as the model wrote them.
        call_id: The id that connects the call to its result.
        custom: Whether the tool takes free-form input instead of JSON arguments.
    """

    kind: ClassVar[Literal["tool_call"]] = "tool_call"
    name: str
    arguments: str
    call_id: _Id
    custom: bool = False

    def _check(self) -> None:
        name = self.name
        arguments = self.arguments
        call_id = self.call_id
        is_text = type(name) is type(arguments) is type(call_id) is str
        if not (is_text and name.isascii() and arguments.isascii() and call_id.isascii()):
            check_texts(self, "name", "arguments", "call_id")
        if self.custom is not True and self.custom is not False:
            raise InvalidJSON("custom", f"expected a bool, got {type(self.custom).__name__}")
        if not call_id:
            raise InvalidTurn("a tool call needs a call_id")


class ToolResultBlock(BlockBase, frozen=True, tag="tool_result"):
    """The result of a tool call.

    Attributes:
        call_id: The ``call_id`` of the call.
        parts: The output.
        custom: Whether the call is one of a tool that takes free-form input.
    """

    kind: ClassVar[Literal["tool_result"]] = "tool_result"
    call_id: _Id
    parts: tuple[Part, ...]
    custom: bool = False

    def _check(self) -> None:
        parts = self.parts
        call_id = self.call_id
        if type(parts) is not tuple or len(parts) != 1 or type(parts[0]) is not TextPart:
            force_setattr(self, "parts", check_parts(parts, PART_TYPES, "a tool result"))
        if type(call_id) is not str or not call_id.isascii():
            force_setattr(self, "call_id", check_text(call_id, "call_id"))
        if self.custom is not True and self.custom is not False:
            raise InvalidJSON("custom", f"expected a bool, got {type(self.custom).__name__}")
        if not call_id:
            raise InvalidTurn("a tool result needs the call_id of its call")


class ReasoningBlock(BlockBase, frozen=True, tag="reasoning"):
    """Reasoning of the model, as far as the provider returns it.

    Attributes:
        summary: The summaries.
        texts: The reasoning texts.
        encrypted_content: The reasoning as the provider encrypted it.
    """

    kind: ClassVar[Literal["reasoning"]] = "reasoning"
    summary: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()
    encrypted_content: str = ""

    def _check(self) -> None:
        force_setattr(self, "summary", _to_text_tuple(self.summary, "summary"))
        force_setattr(self, "texts", _to_text_tuple(self.texts, "texts"))
        check_texts(self, "encrypted_content")


class OpaqueBlock(BlockBase, frozen=True, tag="opaque"):
    """A provider's item of a type that Kedge does not interpret, stored without loss.

    Like every block it is compared by the content that a model reads: see ``kedge.turns.server_fields``.

    Attributes:
        item: The item as the provider sent it.
    """

    kind: ClassVar[Literal["opaque"]] = "opaque"
    item: FrozenMap

    def _check(self) -> None:
        force_setattr(self, "item", freeze_map(self.item, "item"))
        if not isinstance(self.item.get("type"), str):
            raise InvalidTurn("an opaque block's item needs a type")

    @property
    def type(self) -> str:
        """The provider's type of the item."""
        return self.item["type"]

    @property
    def content(self) -> tuple[object, ...]:
        """The item, without provider id, status and nulls."""
        return (strip_server_fields(self.item),)


class UnknownBlock(BlockBase, frozen=True, tag="unknown"):
    """A block of a kind that a newer version of Kedge wrote.

    Attributes:
        form: Its JSON form.
    """

    kind: ClassVar[Literal["unknown"]] = "unknown"
    form: FrozenMap

    def _check(self) -> None:
        force_setattr(self, "form", freeze_map(self.form, "form"))
        kind = self.form.get("kind")
        if not isinstance(kind, str) or kind in KNOWN_KINDS:
            raise InvalidTurn("the form of an unknown block needs a kind that Kedge does not know")
        if self.extra or not self.form.keys().isdisjoint(IDENTITY_FIELDS):
            raise InvalidTurn(
                "the form of an unknown block must not have id, metadata, origin, source or extra"
            )


KnownBlock = (
    UserBlock
    | AssistantBlock
    | SystemBlock
    | ToolCallBlock
    | ToolResultBlock
    | ReasoningBlock
    | OpaqueBlock
)
"""A block of a kind that Kedge knows."""
Block = KnownBlock | UnknownBlock
"""An element of a conversation; its ``kind`` identifies the type."""


def _check_metadata(members: Mapping[str, Any]) -> FrozenMap:
    metadata = freeze_map(members, "metadata")
    if used := _SOURCE_FIELDS & metadata.keys():
        name = min(used)
        raise InvalidTurn(
            f"metadata holds {name!r}, which belongs to the source; use source=Source({name}=…)"
        )
    return metadata


def _to_text_tuple(texts: Iterable[str], name: str) -> tuple[str, ...]:
    if texts == ():
        return ()
    if isinstance(texts, str) or not isinstance(texts, Iterable):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidJSON(name, f"expected several strings, got {type(texts).__name__}")
    return tuple(check_text(text, f"{name}[{index}]") for index, text in enumerate(texts))


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
    call_id: str, output: object, *, custom: bool = False, **identity: Unpack[Identity]
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
    """Return the keywords that are not None."""
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
    if isinstance(output, str):
        return (TextPart(output),)
    members = [output]
    if isinstance(cast("Any", output), list | tuple):
        members = list(cast("Iterable[object]", output))
    if any(isinstance(part, PART_TYPES) for part in members):
        return _to_parts(output)
    return (TextPart(_encode_json(output)),)


def _encode_json(value: object) -> str:
    return _encode(thaw(freeze(value)))


def _to_texts(texts: str | Iterable[str]) -> Iterable[str]:
    if texts == "":
        return ()
    if isinstance(texts, str):
        return (texts,)
    return texts
