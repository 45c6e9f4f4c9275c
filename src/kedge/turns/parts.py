"""Parts: the content of user, assistant and tool-result blocks.

Images and files have one normal form (a URL, a data URL or a provider's file id), so that a part made from bytes
equals the part that a server returns.

Parts and blocks are frozen Structs of a closed set. A Struct cannot be changed by an assignment, by
``object.__setattr__`` or by another call of ``__init__``; a copy of one is the value itself. Decoders, constructors,
``replace`` and pickles all call ``__post_init__``, which checks the fields and brings them into one form: an encoder
omits a field at its default only if it *is* the default, so equal values have equal JSON only if defaulted texts are
interned and all empty maps are one object.
"""

from collections.abc import Iterable, Mapping
from sys import intern
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast

import msgspec
from msgspec.structs import astuple, force_setattr

from kedge.errors import InvalidTurn
from kedge.turns.frozen_json import EMPTY, FrozenMap, check_text, freeze_map

if TYPE_CHECKING:
    Extra = FrozenMap
else:

    class Extra:
        """The type of ``extra`` for decoders, which reject it: the object around it has its members."""


class ImmutableStruct(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    eq=False,
    gc=False,
    omit_defaults=True,
    forbid_unknown_fields=True,
):
    """A frozen Struct, copies of which are the value itself."""

    def __init_subclass__(cls) -> None:
        if not cls.__module__.startswith("kedge.turns."):
            raise TypeError(
                f"{cls.__mro__[1].__name__} cannot have subclasses outside of Kedge; use kedge.turns.opaque "
                "for items that Kedge does not know"
            )

    def __ne__(self, other: object) -> bool:  # a Struct does not derive it from __eq__
        return not self == other

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:
        return self


def freeze_extra(value: Any) -> None:
    """Freeze ``extra``, which must not contain fields of the value, because they share one JSON object."""
    extra = freeze_map(value.extra, "extra")
    force_setattr(value, "extra", extra)
    own_fields = {value.__struct_config__.tag_field, *value.__struct_fields__} - {"extra"}
    if used := own_fields & extra.keys():
        raise InvalidTurn(
            f"extra holds {min(used)!r}, which is a field of its own; set that instead"
        )


def check_texts(value: Any, *names: str) -> None:
    """Check text fields, and replace instances of subclasses of ``str``."""
    for name in names:
        text = getattr(value, name)
        if type(text) is not str or not text.isascii():
            force_setattr(value, name, check_text(text, name))


class PartBase(ImmutableStruct, frozen=True, kw_only=True, tag_field="type"):
    """The base class of all parts: equal if all fields but ``extra`` are equal."""

    extra: Extra = EMPTY

    def __post_init__(self) -> None:
        check_texts(self, *self.__struct_fields__[:-1])
        if self.extra is not EMPTY:
            freeze_extra(self)

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return astuple(self)[:-1] == astuple(other)[:-1]

    def __hash__(self) -> int:
        return hash((type(self), *astuple(self)[:-1]))

    def __repr__(self) -> str:
        from kedge.turns.text_format import format_part  # imports this module

        return format_part(cast("Part", self))


class TextPart(PartBase, frozen=True, tag="text"):
    """Text.

    Attributes:
        text: The text.
        extra: Data that a provider attached to it, such as annotations.
    """

    text: str

    def __post_init__(self) -> None:
        text = self.text
        if type(text) is not str or not text.isascii():
            force_setattr(self, "text", check_text(text, "text"))
        if self.extra is not EMPTY:
            freeze_extra(self)


class RefusalPart(PartBase, frozen=True, tag="refusal"):
    """A model's refusal.

    Attributes:
        text: The text of the refusal.
        extra: Fields that Kedge does not interpret.
    """

    text: str


class ImagePart(PartBase, frozen=True, tag="image"):
    """An image; exactly one of ``url`` and ``file_id`` is set.

    Attributes:
        url: Its URL; a data URL contains the image itself.
        detail: The resolution at which the model sees it.
        file_id: A provider's id of an uploaded file.
        extra: Fields that Kedge does not interpret.
    """

    url: str = ""
    detail: str = "auto"
    file_id: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        force_setattr(self, "detail", intern(self.detail))  # defaults are omitted by identity
        _require_exactly_one("an image", url=self.url, file_id=self.file_id)


class FilePart(PartBase, frozen=True, tag="file"):
    """A file; exactly one of ``url``, ``data`` and ``file_id`` is set.

    Attributes:
        url: Its URL.
        data: Its content as a data URL.
        file_id: A provider's id of an uploaded file.
        filename: Its name.
        extra: Fields that Kedge does not interpret.
    """

    url: str = ""
    data: str = ""
    file_id: str = ""
    filename: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_exactly_one("a file", url=self.url, data=self.data, file_id=self.file_id)


class OpaquePart(PartBase, frozen=True, tag="opaque"):
    """A part of a type that Kedge does not interpret.

    Attributes:
        content: The part as the provider sent it.
        extra: Fields that Kedge does not interpret.
    """

    content: FrozenMap

    def __post_init__(self) -> None:
        force_setattr(self, "content", freeze_map(self.content, "content"))
        if self.extra is not EMPTY:
            freeze_extra(self)


Part = TextPart | RefusalPart | ImagePart | FilePart | OpaquePart
"""A part of the content of a block."""
AssistantPart = TextPart | RefusalPart | OpaquePart
PART_TYPES = (TextPart, RefusalPart, ImagePart, FilePart, OpaquePart)
ASSISTANT_PART_TYPES = (TextPart, RefusalPart, OpaquePart)
"""The types of parts that a model can write."""

P = TypeVar("P")


def check_parts(parts: Iterable[P], allowed: tuple[type[P], ...], subject: str) -> tuple[P, ...]:
    """Return the parts as a tuple; reject a value that is not a part of this kind of block."""
    if type(parts) is not tuple:
        kind = type(parts).__name__
        if isinstance(parts, str | bytes | Mapping) or not isinstance(parts, Iterable):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidTurn(f"{subject} must have parts, not {kind}")
        parts = tuple(parts)
    checked = cast("tuple[P, ...]", parts)
    for part in checked:
        if not isinstance(part, allowed):
            names = ", ".join(part_type.__name__ for part_type in allowed)
            raise InvalidTurn(f"{subject} must have {names}, not {type(part).__name__}")
    return checked


def _require_exactly_one(subject: str, **choices: str) -> None:
    present = [name for name, value in choices.items() if value]
    if len(present) != 1:
        raise InvalidTurn(
            f"{subject} needs exactly one of {', '.join(choices)}; got {', '.join(present) or 'none'}"
        )
