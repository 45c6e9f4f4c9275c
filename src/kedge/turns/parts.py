"""Parts: what the content of a user, assistant or tool-result block is made of.

Images and files are kept in one normal form (a URL, a data URL or a provider's file id), so that a
part made from bytes equals the part that comes back from a wire.
"""

import base64
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from kedge.errors import InvalidTurn
from kedge.turns.frozen import EMPTY, FrozenMap, check_text

Detail = Literal["auto", "low", "high", "original"]


@dataclass(frozen=True, slots=True)
class TextPart:
    """Text. ``extra`` keeps what a provider attached to it, such as annotations."""

    text: str
    extra: FrozenMap = field(default=EMPTY, compare=False, kw_only=True)

    def __post_init__(self) -> None:
        check_text(self.text, "text")
        _freeze_extra(self)


@dataclass(frozen=True, slots=True)
class RefusalPart:
    """The words with which a model refused."""

    text: str
    extra: FrozenMap = field(default=EMPTY, compare=False, kw_only=True)

    def __post_init__(self) -> None:
        check_text(self.text, "text")
        _freeze_extra(self)


@dataclass(frozen=True, slots=True)
class ImagePart:
    """An image, by URL (a data URL holds the bytes themselves) or by a provider's file id."""

    url: str = ""
    detail: str = "auto"
    file_id: str = ""
    extra: FrozenMap = field(default=EMPTY, compare=False, kw_only=True)

    def __post_init__(self) -> None:
        _exactly_one("an image", url=self.url, file_id=self.file_id)
        check_text(self.detail, "detail")
        _freeze_extra(self)


@dataclass(frozen=True, slots=True)
class FilePart:
    """A file, by URL, by content (a data URL) or by a provider's file id."""

    url: str = ""
    data: str = ""
    file_id: str = ""
    filename: str = ""
    extra: FrozenMap = field(default=EMPTY, compare=False, kw_only=True)

    def __post_init__(self) -> None:
        _exactly_one("a file", url=self.url, data=self.data, file_id=self.file_id)
        check_text(self.filename, "filename")
        _freeze_extra(self)


@dataclass(frozen=True, slots=True)
class OpaquePart:
    """A part of a kind that Kedge does not know, kept as it came."""

    content: FrozenMap

    def __post_init__(self) -> None:
        object.__setattr__(self, "content", _as_frozen(self.content))


Part = TextPart | RefusalPart | ImagePart | FilePart | OpaquePart


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


def _exactly_one(what: str, **choices: str) -> None:
    given = [name for name, value in choices.items() if value]
    if len(given) != 1:
        raise InvalidTurn(
            f"{what} needs exactly one of {', '.join(choices)}; got {', '.join(given) or 'none'}"
        )
    check_text(choices[given[0]], given[0])


def _as_frozen(members: Mapping[str, Any]) -> FrozenMap:
    return members if isinstance(members, FrozenMap) else FrozenMap(members)


def _freeze_extra(part: TextPart | RefusalPart | ImagePart | FilePart) -> None:
    if part.extra is not EMPTY:
        object.__setattr__(part, "extra", _as_frozen(part.extra))
