"""Blocks: the immutable elements of a conversation.

Two blocks are equal if their kind and content are equal. The other fields are identity: the local ``id``, the
``metadata`` (response id, provider item id and output index from the engine, and values of applications), the
``origin`` (``user``, ``engine`` or the name of a middleware) and ``extra`` (fields that Kedge does not interpret).
"""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any, ClassVar, Literal, Self, TypeVar, get_args

from kedge.errors import InvalidJSON, InvalidTurn
from kedge.turns.frozen_json import EMPTY, FrozenMap, check_text, freeze_map
from kedge.turns.immutable import check_text_field, freeze_extra, immutable, new_id, set_field
from kedge.turns.parts import (
    ASSISTANT_PART_TYPES,
    PART_TYPES,
    AssistantPart,
    Part,
    RefusalPart,
    TextPart,
    check_parts,
    unchecked_text,
)
from kedge.turns.server_fields import strip_server_fields

RESPONSE_ID = "response_id"
"""Metadata key: the response that produced this block. Only engines set it."""
ITEM_ID = "item_id"
"""Metadata key: the provider's id of this item."""
OUTPUT_INDEX = "output_index"
"""Metadata key: the position of this item in the output of its response."""
NATIVE_API = "native_api"
"""Metadata key of an opaque block: the API that its item is of, unless this is the Responses API."""

BlockKind = Literal[
    "user", "assistant", "reasoning", "tool_call", "tool_result", "system", "opaque", "unknown"
]
KNOWN_KINDS: frozenset[str] = frozenset(get_args(BlockKind)) - {"unknown"}
Role = Literal["system", "developer"]


class _CacheSlot:
    __slots__ = ("_digest",)


@immutable
@dataclass(frozen=True, slots=True, eq=False, repr=False, kw_only=True)
class Block(_CacheSlot):
    """An element of a conversation; the base class of all blocks.

    Attributes:
        kind: The kind of block.
        id: The local id; generated if it is empty.
        metadata: Values of engines and applications, which the model does not see.
        origin: What added the block: ``user``, ``engine`` or the name of a middleware.
        extra: Fields that Kedge does not interpret.
    """

    kind: ClassVar[BlockKind]
    id: str = ""
    metadata: FrozenMap = EMPTY
    origin: str = "user"
    extra: FrozenMap = EMPTY

    def __post_init__(self) -> None:
        name = self.id
        if name == "":
            set_field(self, "id", new_id("blk"))
        elif type(name) is not str or not name.isascii():
            set_field(self, "id", check_text(name, "id"))
        if self.origin not in ("user", "engine"):
            check_text_field(self, "origin", self.origin)
        if self.metadata is not EMPTY and type(self.metadata) is not FrozenMap:
            set_field(self, "metadata", freeze_map(self.metadata, "metadata"))
        if self.extra is not EMPTY:
            freeze_extra(self, "kind")
        _set_digest(self, None)
        self._check()

    def _check(self) -> None:
        """Check the content, or raise ``InvalidTurn``."""
        raise InvalidTurn("Block is an abstract class; use kedge.user, kedge.assistant and so on")

    @property
    @abstractmethod
    def content(self) -> tuple[object, ...]:
        """The content of the block, which ``==`` compares."""

    @property
    def text(self) -> str:
        """The text of a message or of a tool result; empty for other blocks."""
        return ""

    @property
    def response_id(self) -> str:
        """The response that produced this block, or an empty string."""
        value = self.metadata.get(RESPONSE_ID)
        return value if isinstance(value, str) else ""

    @property
    def item_id(self) -> str:
        """The provider's id of this item, or an empty string."""
        value = self.metadata.get(ITEM_ID)
        return value if isinstance(value, str) else ""

    def with_metadata(self, members: Mapping[str, Any] | None = None, /, **more: Any) -> Self:
        """Return this block with metadata added.

        Args:
            members: The values to add; None removes one.
            **more: Further values.

        Returns:
            A block with the same id and content.
        """
        return replace(self, metadata=self.metadata.with_members({**(members or {}), **more}))

    def with_origin(self, origin: str) -> Self:
        """Return this block with another origin.

        Args:
            origin: ``user``, ``engine`` or the name of a middleware.

        Returns:
            A block with the same id and content.
        """
        return replace(self, origin=origin)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Block):
            return NotImplemented
        return self.kind == other.kind and self.content == other.content

    def __hash__(self) -> int:
        return hash((self.kind, self.content))

    def __repr__(self) -> str:
        from kedge.turns.text_format import describe  # imports this module

        return f"<{self.kind} {describe(self)}>"


B = TypeVar("B", bound=Block)
_set_id, _set_metadata, _set_origin, _set_extra, _set_digest = (
    vars(owner)[name].__set__
    for owner, name in (
        *((Block, name) for name in ("id", "metadata", "origin", "extra")),
        (_CacheSlot, "_digest"),
    )
)


def _new_block(cls: type[B], id: str, metadata: FrozenMap, origin: str, extra: FrozenMap) -> B:  # noqa: A002
    """Create a block whose fields, except those of the base class, are not set yet."""
    self = object.__new__(cls)
    _set_id(self, id)
    _set_metadata(self, metadata)
    _set_origin(self, origin)
    _set_extra(self, extra)
    return self


# The digest of a block's canonical form is derived by planning, a layer above, and cached in the block:
# a separate dictionary would cost a lookup and an entry for each block of a long conversation. The
# slot is private to this module. It is not a field, so it is not compared, copied or pickled.

get_cached_digest: Callable[[Block], bytes | None] = attrgetter("_digest")
"""Return the digest that was cached for this block, or None."""


cache_digest: Callable[[Block, bytes], None] = _set_digest
"""Cache a digest that was derived from a block's content."""


@immutable
@dataclass(frozen=True, slots=True, eq=False, repr=False)
class UserBlock(Block):
    """A message of the user.

    Attributes:
        parts: Text, images, files.
    """

    kind: ClassVar[BlockKind] = "user"
    parts: tuple[Part, ...]

    def __new__(
        cls,
        parts: tuple[Part, ...],
        *,
        id: str = "",  # noqa: A002
        metadata: FrozenMap = EMPTY,
        origin: str = "user",
        extra: FrozenMap = EMPTY,
    ) -> Self:
        """Construct the block, which is faster than the generated ``__init__``."""
        self = _new_block(cls, id, metadata, origin, extra)
        set_field(self, "parts", parts)
        self.__post_init__()
        return self

    def _check(self) -> None:
        _normalize_parts(self, PART_TYPES, "a user block")

    @property
    def content(self) -> tuple[object, ...]:
        """The parts."""
        return self.parts

    @property
    def text(self) -> str:
        """The text parts, joined."""
        return join_text(self.parts)


@immutable
@dataclass(frozen=True, slots=True, eq=False, repr=False)
class AssistantBlock(Block):
    """A message of the model.

    Attributes:
        parts: Text or a refusal.
    """

    kind: ClassVar[BlockKind] = "assistant"
    parts: tuple[AssistantPart, ...]

    def __new__(
        cls,
        parts: tuple[AssistantPart, ...],
        *,
        id: str = "",  # noqa: A002
        metadata: FrozenMap = EMPTY,
        origin: str = "user",
        extra: FrozenMap = EMPTY,
    ) -> Self:
        """Construct the block, which is faster than the generated ``__init__``."""
        self = _new_block(cls, id, metadata, origin, extra)
        set_field(self, "parts", parts)
        self.__post_init__()
        return self

    def _check(self) -> None:
        _normalize_parts(self, ASSISTANT_PART_TYPES, "an assistant block")

    @property
    def content(self) -> tuple[object, ...]:
        """The parts."""
        return self.parts

    @property
    def text(self) -> str:
        """The text parts, joined, without refusals."""
        return join_text(self.parts)

    @property
    def refusal(self) -> str:
        """The text of the refusal, if there is one."""
        return "".join(part.text for part in self.parts if isinstance(part, RefusalPart))


_set_user_parts, _set_assistant_parts = (
    vars(cls)["parts"].__set__ for cls in (UserBlock, AssistantBlock)
)


def unchecked_message(
    kind: str,
    id: str,  # noqa: A002
    text: str,
    metadata: FrozenMap,
    origin: str,
) -> UserBlock | AssistantBlock:
    """Return a user or assistant block with one text; the caller has checked all values."""
    block: UserBlock | AssistantBlock
    if kind == "user":
        block = _new_block(UserBlock, id, metadata, origin, EMPTY)
        _set_user_parts(block, (unchecked_text(text),))
    else:
        block = _new_block(AssistantBlock, id, metadata, origin, EMPTY)
        _set_assistant_parts(block, (unchecked_text(text),))
    _set_digest(block, None)
    return block


@immutable
@dataclass(frozen=True, slots=True, eq=False, repr=False)
class SystemBlock(Block):
    """Instructions to the model.

    Those at the start of a Turn are sent with every request; later ones are part of the history.

    Attributes:
        text: The instructions.
        role: ``system`` or ``developer``.
    """

    kind: ClassVar[BlockKind] = "system"
    # Without field() the property of the base class would be its default.
    text: str = field()  # pyright: ignore[reportIncompatibleMethodOverride] - both are read-only
    role: Role = "system"

    def _check(self) -> None:
        _check_texts(self, "text", "role")
        if self.role not in ("system", "developer"):
            raise InvalidTurn(
                f"the role of a system block must be system or developer, not {self.role!r}"
            )

    @property
    def content(self) -> tuple[object, ...]:
        """The role and the text."""
        return (self.role, self.text)


@immutable
@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ToolCallBlock(Block):
    """A tool call of the model.

    Attributes:
        name: The tool's name.
        arguments: The arguments exactly as the model wrote them.
        call_id: The id that connects the call to its result.
        custom: Whether the tool takes free-form input instead of JSON arguments.
    """

    kind: ClassVar[BlockKind] = "tool_call"
    name: str
    arguments: str
    call_id: str
    custom: bool = False

    def __new__(
        cls,
        name: str,
        arguments: str,
        call_id: str,
        custom: bool = False,
        *,
        id: str = "",  # noqa: A002
        metadata: FrozenMap = EMPTY,
        origin: str = "user",
        extra: FrozenMap = EMPTY,
    ) -> Self:
        """Construct the block, which is faster than the generated ``__init__``."""
        self = _new_block(cls, id, metadata, origin, extra)
        set_field(self, "name", name)
        set_field(self, "arguments", arguments)
        set_field(self, "call_id", call_id)
        set_field(self, "custom", custom)
        self.__post_init__()
        return self

    def _check(self) -> None:
        _check_texts(self, "name", "arguments", "call_id")
        _check_bool(self.custom)
        if not self.call_id:
            raise InvalidTurn("a tool call needs a call_id")

    @property
    def content(self) -> tuple[object, ...]:
        """The call id, the name, the arguments, and whether the tool takes free-form input."""
        return (self.call_id, self.name, self.arguments, self.custom)


@immutable
@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ToolResultBlock(Block):
    """The result of a tool call.

    Attributes:
        call_id: The ``call_id`` of the call.
        parts: The output.
        custom: Whether the call is one of a tool that takes free-form input.
    """

    kind: ClassVar[BlockKind] = "tool_result"
    call_id: str
    parts: tuple[Part, ...]
    custom: bool = False

    def __new__(
        cls,
        call_id: str,
        parts: tuple[Part, ...],
        custom: bool = False,
        *,
        id: str = "",  # noqa: A002
        metadata: FrozenMap = EMPTY,
        origin: str = "user",
        extra: FrozenMap = EMPTY,
    ) -> Self:
        """Construct the block, which is faster than the generated ``__init__``."""
        self = _new_block(cls, id, metadata, origin, extra)
        set_field(self, "call_id", call_id)
        set_field(self, "parts", parts)
        set_field(self, "custom", custom)
        self.__post_init__()
        return self

    def _check(self) -> None:
        _normalize_parts(self, PART_TYPES, "a tool result")
        _check_texts(self, "call_id")
        _check_bool(self.custom)
        if not self.call_id:
            raise InvalidTurn("a tool result needs the call_id of its call")

    @property
    def content(self) -> tuple[object, ...]:
        """The call id, the parts, and whether the tool takes free-form input."""
        return (self.call_id, self.parts, self.custom)

    @property
    def text(self) -> str:
        """The text parts, joined."""
        return join_text(self.parts)


@immutable
@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ReasoningBlock(Block):
    """Reasoning of the model, as far as the provider returns it.

    Attributes:
        summary: The summaries.
        texts: The reasoning texts.
        encrypted_content: The reasoning as the provider encrypted it.
    """

    kind: ClassVar[BlockKind] = "reasoning"
    summary: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()
    encrypted_content: str = ""

    def _check(self) -> None:
        set_field(self, "summary", _to_text_tuple(self.summary, "summary"))
        set_field(self, "texts", _to_text_tuple(self.texts, "texts"))
        _check_texts(self, "encrypted_content")

    @property
    def content(self) -> tuple[object, ...]:
        """Summaries, texts and encrypted content."""
        return (self.summary, self.texts, self.encrypted_content)


@immutable
@dataclass(frozen=True, slots=True, eq=False, repr=False)
class OpaqueBlock(Block):
    """A provider's item of a type that Kedge does not interpret, stored without loss.

    Like every block it is compared by the content that a model reads: see ``kedge.turns.server_fields``.

    Attributes:
        item: The item as the provider sent it.
    """

    kind: ClassVar[BlockKind] = "opaque"
    item: FrozenMap

    def _check(self) -> None:
        set_field(self, "item", freeze_map(self.item, "item"))
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


@immutable
@dataclass(frozen=True, slots=True, eq=False, repr=False)
class UnknownBlock(Block):
    """A block of a kind that a newer version of Kedge wrote.

    Attributes:
        form: Its JSON form.
    """

    kind: ClassVar[BlockKind] = "unknown"
    form: FrozenMap

    def _check(self) -> None:
        set_field(self, "form", freeze_map(self.form, "form"))
        kind = self.form.get("kind")
        if not isinstance(kind, str) or kind in KNOWN_KINDS:
            raise InvalidTurn("the form of an unknown block needs a kind that Kedge does not know")
        if self.extra or not self.form.keys().isdisjoint(("id", "metadata", "origin")):
            raise InvalidTurn(
                "the form of an unknown block must not have id, metadata, origin or extra"
            )

    @property
    def content(self) -> tuple[object, ...]:
        """The JSON form."""
        return (self.form,)


def join_text(parts: tuple[Part, ...]) -> str:
    """Return the text parts, joined."""
    if len(parts) == 1 and type(part := parts[0]) is TextPart:
        return part.text
    return "".join(part.text for part in parts if isinstance(part, TextPart))


def _check_texts(block: Block, *names: str) -> None:
    for name in names:
        check_text_field(block, name, getattr(block, name))


def _normalize_parts(
    block: "UserBlock | AssistantBlock | ToolResultBlock",
    allowed: tuple[type[Any], ...],
    subject: str,
) -> None:
    parts = block.parts
    if type(parts) is tuple and len(parts) == 1 and type(parts[0]) is TextPart:
        return  # one text, the most common case
    set_field(block, "parts", check_parts(parts, allowed, subject))


def _check_bool(custom: object) -> None:
    if not isinstance(custom, bool):
        raise InvalidJSON("custom", f"expected a bool, got {type(custom).__name__}")


def _to_text_tuple(texts: Iterable[str], name: str) -> tuple[str, ...]:
    if texts == ():
        return ()
    if isinstance(texts, str) or not isinstance(texts, Iterable):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidJSON(name, f"expected several strings, got {type(texts).__name__}")
    return tuple(check_text(text, f"{name}[{index}]") for index, text in enumerate(texts))
