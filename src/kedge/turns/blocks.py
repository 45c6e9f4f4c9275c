"""Blocks: the pieces of a conversation, as immutable values.

Two blocks are equal when their kind and content are equal. Everything else about a block is identity:
its local ``id``, its ``metadata`` (what the engine noted: response id, provider item id, output index,
and whatever anyone else adds), its ``origin`` (who put it there: ``user``, ``engine`` or the name of a
middleware) and ``extra`` (members that Kedge does not interpret and carries along untouched).
"""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, Self

from kedge.errors import InvalidTurn
from kedge.turns.frozen import EMPTY, FrozenMap, check_text
from kedge.turns.ids import new_id
from kedge.turns.parts import OpaquePart, Part, RefusalPart, TextPart

RESPONSE_ID = "response_id"
"""Metadata key: the response that made this block. Only engines write it."""
ITEM_ID = "item_id"
"""Metadata key: the provider's own id of this item."""
OUTPUT_INDEX = "output_index"
"""Metadata key: the place of this item in its response's output."""

Kind = Literal[
    "user", "assistant", "reasoning", "tool_call", "tool_result", "system", "opaque", "unknown"
]
Role = Literal["system", "developer"]


@dataclass(frozen=True, slots=True, eq=False, repr=False, kw_only=True)
class Block:
    """One piece of a conversation; see the subclasses."""

    kind: ClassVar[Kind]
    id: str = ""
    metadata: FrozenMap = EMPTY
    origin: str = "user"
    extra: FrozenMap = EMPTY
    # What planning derived from the content, kept here so that it is derived once.
    leaf: bytes | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        if self.id:
            check_text(self.id, "id")
        else:
            object.__setattr__(self, "id", new_id("blk"))
        check_text(self.origin, "origin")
        for name in ("metadata", "extra"):
            value: Mapping[str, Any] = getattr(self, name)
            if not isinstance(value, FrozenMap):
                object.__setattr__(self, name, FrozenMap(value))
        self._check()

    def _check(self) -> None:
        """Refuse content that cannot be."""

    @property
    @abstractmethod
    def content(self) -> tuple[object, ...]:
        """What this block says: the part of it that ``==`` compares."""

    @property
    def response_id(self) -> str:
        """The response that made this block, or an empty string."""
        value = self.metadata.get(RESPONSE_ID)
        return value if isinstance(value, str) else ""

    @property
    def item_id(self) -> str:
        """The provider's id of this item, or an empty string."""
        value = self.metadata.get(ITEM_ID)
        return value if isinstance(value, str) else ""

    def with_metadata(self, members: Mapping[str, Any] | None = None, /, **more: Any) -> Self:
        """Return this block with further metadata; a member set to ``None`` is removed."""
        merged = {**self.metadata, **(members or {}), **more}
        return replace(self, metadata=FrozenMap({k: v for k, v in merged.items() if v is not None}))

    def with_origin(self, origin: str) -> Self:
        """Return this block as put there by ``origin``."""
        return replace(self, origin=origin)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Block):
            return NotImplemented
        return self.kind == other.kind and self.content == other.content

    def __hash__(self) -> int:
        return hash((self.kind, self.content))

    def __repr__(self) -> str:
        from kedge.turns.show import describe  # show knows every kind of block

        return f"<{self.kind} {describe(self)}>"


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class UserBlock(Block):
    """What the user said."""

    kind: ClassVar[Kind] = "user"
    parts: tuple[Part, ...]

    def _check(self) -> None:
        object.__setattr__(self, "parts", tuple(self.parts))

    @property
    def content(self) -> tuple[object, ...]:
        """The parts."""
        return self.parts

    @property
    def text(self) -> str:
        """The text parts, joined."""
        return joined_text(self.parts)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class AssistantBlock(Block):
    """What the model said: text, or a refusal."""

    kind: ClassVar[Kind] = "assistant"
    parts: tuple[TextPart | RefusalPart | OpaquePart, ...]

    def _check(self) -> None:
        object.__setattr__(self, "parts", tuple(self.parts))

    @property
    def content(self) -> tuple[object, ...]:
        """The parts."""
        return self.parts

    @property
    def text(self) -> str:
        """The text parts, joined; a refusal is not text."""
        return joined_text(self.parts)

    @property
    def refusal(self) -> str:
        """The words of the refusal, if the model refused."""
        return "".join(part.text for part in self.parts if isinstance(part, RefusalPart))


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class SystemBlock(Block):
    """Instructions. Leading ones are sent afresh with every request; later ones stay in place."""

    kind: ClassVar[Kind] = "system"
    text: str
    role: Role = "system"

    def _check(self) -> None:
        check_text(self.text, "text")
        if self.role not in ("system", "developer"):
            raise InvalidTurn(f"a system block's role is system or developer, not {self.role!r}")

    @property
    def content(self) -> tuple[object, ...]:
        """The role and the text."""
        return (self.role, self.text)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ToolCallBlock(Block):
    """The model asks for a tool. ``arguments`` is the exact string that the model wrote."""

    kind: ClassVar[Kind] = "tool_call"
    name: str
    arguments: str
    call_id: str
    custom: bool = False

    def _check(self) -> None:
        for name in ("name", "arguments", "call_id"):
            check_text(getattr(self, name), name)
        if not self.call_id:
            raise InvalidTurn("a tool call needs a call_id")

    @property
    def content(self) -> tuple[object, ...]:
        """The call id, the name, the arguments, and whether the tool takes free-form input."""
        return (self.call_id, self.name, self.arguments, self.custom)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ToolResultBlock(Block):
    """What a tool answered to the call with this ``call_id``."""

    kind: ClassVar[Kind] = "tool_result"
    call_id: str
    parts: tuple[Part, ...]
    custom: bool = False

    def _check(self) -> None:
        object.__setattr__(self, "parts", tuple(self.parts))
        check_text(self.call_id, "call_id")
        if not self.call_id:
            raise InvalidTurn("a tool result needs the call_id of its call")

    @property
    def content(self) -> tuple[object, ...]:
        """The call id, the parts, and whether the tool takes free-form input."""
        return (self.call_id, self.parts, self.custom)

    @property
    def text(self) -> str:
        """The text parts, joined."""
        return joined_text(self.parts)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ReasoningBlock(Block):
    """What the model thought, as far as the provider tells: summaries, text, encrypted content."""

    kind: ClassVar[Kind] = "reasoning"
    summary: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()
    encrypted_content: str = ""

    def _check(self) -> None:
        object.__setattr__(self, "summary", tuple(self.summary))
        object.__setattr__(self, "texts", tuple(self.texts))
        for text in (*self.summary, *self.texts, self.encrypted_content):
            check_text(text, "reasoning")

    @property
    def content(self) -> tuple[object, ...]:
        """Summaries, texts and encrypted content."""
        return (self.summary, self.texts, self.encrypted_content)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class OpaqueBlock(Block):
    """A provider's item of a type that Kedge does not interpret, kept losslessly."""

    kind: ClassVar[Kind] = "opaque"
    item: FrozenMap

    def _check(self) -> None:
        if not isinstance(self.item, FrozenMap):  # pyright: ignore[reportUnnecessaryIsInstance]
            object.__setattr__(self, "item", FrozenMap(self.item))
        if not isinstance(self.item.get("type"), str):
            raise InvalidTurn("an opaque block's item needs a type")

    @property
    def type(self) -> str:
        """The provider's name for this kind of item."""
        return self.item["type"]

    @property
    def content(self) -> tuple[object, ...]:
        """The item."""
        return (self.item,)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class UnknownBlock(Block):
    """A block of a kind that a newer Kedge wrote; ``form`` keeps its JSON form."""

    kind: ClassVar[Kind] = "unknown"
    form: FrozenMap

    def _check(self) -> None:
        if not isinstance(self.form, FrozenMap):  # pyright: ignore[reportUnnecessaryIsInstance]
            object.__setattr__(self, "form", FrozenMap(self.form))

    @property
    def content(self) -> tuple[object, ...]:
        """The JSON form."""
        return (self.form,)


def joined_text(parts: tuple[Part, ...]) -> str:
    """The text parts, joined."""
    return "".join(part.text for part in parts if isinstance(part, TextPart))
