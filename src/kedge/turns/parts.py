"""Parts: what the content of a user, assistant or tool-result block is made of.

Images and files are kept in one normal form (a URL, a data URL or a provider's file id), so that a
part made from bytes equals the part that comes back from a wire.
"""

import base64
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, Self, TypeVar, cast

from kedge.errors import InvalidTurn
from kedge.turns.frozen_json import EMPTY, FrozenMap, check_text, freeze_map
from kedge.turns.immutable import check_text_field, freeze_extra, immutable, set_field

Detail = Literal["auto", "low", "high", "original"]


def _format_part(part: "Part") -> str:
    from kedge.turns.formatting import format_part  # show knows every type of part

    return format_part(part)


@immutable
@dataclass(frozen=True, slots=True)
class TextPart:
    """Text. ``extra`` holds what a provider attached to it, such as annotations."""

    text: str
    extra: FrozenMap = field(default=EMPTY, compare=False, kw_only=True)

    def __new__(cls, text: str, *, extra: FrozenMap = EMPTY) -> Self:
        """Construct the part, which is faster than the generated ``__init__``."""
        self = object.__new__(cls)
        set_field(self, "text", text)
        set_field(self, "extra", extra)
        self.__post_init__()
        return self

    def __repr__(self) -> str:
        return _format_part(self)

    def __post_init__(self) -> None:
        text = self.text
        if type(text) is not str or not text.isascii():
            set_field(self, "text", check_text(text, "text"))
        if self.extra is not EMPTY:
            freeze_extra(self, "type")


@immutable
@dataclass(frozen=True, slots=True)
class RefusalPart:
    """The words with which a model refused."""

    text: str
    extra: FrozenMap = field(default=EMPTY, compare=False, kw_only=True)

    def __repr__(self) -> str:
        return _format_part(self)

    def __post_init__(self) -> None:
        check_text_field(self, "text", self.text)
        if self.extra is not EMPTY:
            freeze_extra(self, "type")


@immutable
@dataclass(frozen=True, slots=True)
class ImagePart:
    """An image, by URL (a data URL holds the bytes themselves) or by a provider's file id."""

    url: str = ""
    detail: str = "auto"
    file_id: str = ""
    extra: FrozenMap = field(default=EMPTY, compare=False, kw_only=True)

    def __repr__(self) -> str:
        return _format_part(self)

    def __post_init__(self) -> None:
        _check_texts(self, "url", "detail", "file_id")
        _require_exactly_one("an image", url=self.url, file_id=self.file_id)


@immutable
@dataclass(frozen=True, slots=True)
class FilePart:
    """A file, by URL, by content (a data URL) or by a provider's file id."""

    url: str = ""
    data: str = ""
    file_id: str = ""
    filename: str = ""
    extra: FrozenMap = field(default=EMPTY, compare=False, kw_only=True)

    def __repr__(self) -> str:
        return _format_part(self)

    def __post_init__(self) -> None:
        _check_texts(self, "url", "data", "file_id", "filename")
        _require_exactly_one("a file", url=self.url, data=self.data, file_id=self.file_id)


@immutable
@dataclass(frozen=True, slots=True)
class OpaquePart:
    """A part of a kind that Kedge does not know, kept as it came."""

    content: FrozenMap
    extra: FrozenMap = field(default=EMPTY, compare=False, kw_only=True)

    def __repr__(self) -> str:
        return _format_part(self)

    def __post_init__(self) -> None:
        set_field(self, "content", freeze_map(self.content, "content"))
        if self.extra is not EMPTY:
            freeze_extra(self, "type")


Part = TextPart | RefusalPart | ImagePart | FilePart | OpaquePart
AssistantPart = TextPart | RefusalPart | OpaquePart
PART_TYPES = (TextPart, RefusalPart, ImagePart, FilePart, OpaquePart)
ASSISTANT_PART_TYPES = (TextPart, RefusalPart, OpaquePart)
"""What a model says is made of."""

P = TypeVar("P")


def image(
    source: str | bytes, *, media_type: str = "image/png", detail: Detail = "auto"
) -> ImagePart:
    """Make an image part from a URL or from the bytes of the image."""
    url = source if isinstance(source, str) else data_url(source, media_type)
    return ImagePart(url, detail)


def file(
    source: str | bytes, *, filename: str = "", media_type: str = "application/pdf"
) -> FilePart:
    """Make a file part from a URL or from the bytes of the file."""
    if isinstance(source, bytes):
        return FilePart(data=data_url(source, media_type), filename=filename)
    return FilePart(url=source, filename=filename)


def data_url(content: bytes, media_type: str) -> str:
    """Put bytes into a URL."""
    return f"data:{media_type};base64,{base64.b64encode(content).decode()}"


def check_parts(parts: Iterable[P], allowed: tuple[type[P], ...], what: str) -> tuple[P, ...]:
    """Return the parts as a tuple; refuse what is no part, or no part of this kind of block."""
    if type(parts) is not tuple:
        kind = type(parts).__name__
        if isinstance(parts, str | bytes | Mapping) or not isinstance(parts, Iterable):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidTurn(f"{what} is made of parts, not {kind}")
        parts = tuple(parts)
    kept = cast("tuple[P, ...]", parts)
    for part in kept:
        if not isinstance(part, allowed):
            names = ", ".join(each.__name__ for each in allowed)
            raise InvalidTurn(f"{what} is made of {names}, not {type(part).__name__}")
    return kept


def _check_texts(part: ImagePart | FilePart, *names: str) -> None:
    for name in names:
        check_text_field(part, name, getattr(part, name))
    if part.extra is not EMPTY:
        freeze_extra(part, "type")


def _require_exactly_one(what: str, **choices: str) -> None:
    given = [name for name, value in choices.items() if value]
    if len(given) != 1:
        raise InvalidTurn(
            f"{what} needs exactly one of {', '.join(choices)}; got {', '.join(given) or 'none'}"
        )
