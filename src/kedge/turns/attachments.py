"""Construct image, file and audio parts, also from local files.

Parts are pure values. A file is read here, once, when its part is constructed, so that a Turn never depends on the
file system. What only files need is imported with the first one.
"""

import base64
import re
from collections.abc import Mapping
from os import PathLike
from typing import Literal, cast

from kedge._internal.argument_types import checked_except
from kedge.errors import InvalidTurn
from kedge.turns.frozen_json import FrozenMap
from kedge.turns.parts import FilePart, ImagePart, OpaquePart, Part

MAX_FILE_BYTES = 32 << 20
"""The default maximum size of a local file: the largest request that every provider accepts."""

LocalPath = PathLike[str]
Detail = Literal["auto", "low", "high", "original"]
# The first bytes of image formats that models accept.
IMAGE_SIGNATURES: tuple[tuple[bytes, str], ...] = (
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF87a", "image/gif"),
    (b"GIF89a", "image/gif"),
)
AUDIO_FORMATS = {
    "audio/wav": "wav",
    "audio/x-wav": "wav",
    "audio/wave": "wav",
    "audio/mpeg": "mp3",
    "audio/mp3": "mp3",
}
"""The media types of audio that the APIs accept, and their names there."""
_AUDIO_TYPES = {"wav": "audio/wav", "mp3": "audio/mpeg"}
MAX_SHOWN_URL = 80
"""The number of characters of a URL in a message."""
_URL = re.compile(r"(?!file:)[a-z][a-z0-9+.-]+:", re.IGNORECASE)  # C:\ is a path


@checked_except("source")
def image(
    source: str | bytes | LocalPath,
    *,
    media_type: str = "",
    detail: Detail = "auto",
    max_bytes: int = MAX_FILE_BYTES,
) -> ImagePart:
    """Construct an image part.

    Args:
        source: The URL or data URL of the image, its bytes, or the ``Path`` of a local file.
        media_type: The media type of bytes or of a file; by default the type of its content if it is a PNG, JPEG, GIF
            or WebP image, otherwise ``image/png`` for bytes, and determined by the name of a file.
        detail: The resolution at which the model sees it.
        max_bytes: The maximum size of a local file.

    Returns:
        The part; a local file is read now.

    Raises:
        InvalidTurn: If the source is empty, a local path given as a string, or a file that cannot be
            read, is larger than ``max_bytes`` or is not an image.

    Example:
        >>> user(["What is this?", image(Path("cat.png"))])
    """
    named_type = "image/png"
    if isinstance(source, PathLike):
        named_type = media_type or _guess_media_type(source)
        if not named_type.startswith("image/"):
            raise InvalidTurn(f"{source} is of type {named_type}; use kedge.file, or media_type=")
        source = read_file(source, max_bytes)
    if isinstance(source, bytes):
        source = data_url(source, media_type or _detect_image_type(source) or named_type)
    return ImagePart(check_url(source, "image"), detail)


@checked_except("source")
def file(
    source: str | bytes | LocalPath,
    *,
    filename: str = "",
    media_type: str = "",
    max_bytes: int = MAX_FILE_BYTES,
) -> FilePart:
    """Construct a file part.

    Args:
        source: The URL or data URL of the file, its bytes, or the ``Path`` of a local file.
        filename: The name of the file; by default the name of a local file, or ``file`` with the extension of the
            type of bytes or of a data URL.
        media_type: The media type of bytes or of a file; by default ``application/pdf`` for bytes, and
            determined by the name of a file.
        max_bytes: The maximum size of a local file.

    Returns:
        The part; a local file is read now.

    Raises:
        InvalidTurn: If the source is empty, a local path given as a string, or a file that cannot be
            read or is larger than ``max_bytes``.

    Example:
        >>> user(["Summarize this.", file(Path("report.pdf"))])
    """
    if isinstance(source, PathLike):
        filename = filename or _get_name(source)
        media_type = media_type or _guess_media_type(source)
        source = read_file(source, max_bytes)
    if isinstance(source, bytes):
        source = data_url(source, media_type or "application/pdf")
    if not check_url(source, "file").startswith("data:"):
        return FilePart(url=source, filename=filename)
    # OpenAI rejects content without a name.
    return FilePart(data=source, filename=filename or _default_filename(source))


@checked_except("source")
def audio(
    source: str | bytes | LocalPath, *, media_type: str = "", max_bytes: int = MAX_FILE_BYTES
) -> OpaquePart:
    """Construct an audio part, for models with audio input.

    It is sent to the Responses and Chat Completions APIs; Anthropic's API has no audio input and its
    engine raises ``UnsupportedBlock``.

    Args:
        source: The audio's bytes, its data URL, or the ``Path`` of a local file (WAV or MP3).
        media_type: The media type of bytes or of a file; by default ``audio/wav`` for bytes, and
            determined by the name of a file.
        max_bytes: The maximum size of a local file.

    Returns:
        The part; a local file is read now.

    Raises:
        InvalidTurn: If the source is neither WAV nor MP3, a path given as a string, or a file that
            cannot be read or is larger than ``max_bytes``.
    """
    if isinstance(source, PathLike):
        media_type = media_type or _guess_media_type(source)
        if media_type not in AUDIO_FORMATS:
            raise InvalidTurn(f"{source} is of type {media_type}; convert it to WAV or MP3")
        source = read_file(source, max_bytes)
    if isinstance(source, bytes):
        source = data_url(source, media_type or "audio/wav")
    media_type, content = split_data_url(check_url(source, "audio"))
    if media_type not in AUDIO_FORMATS:
        raise InvalidTurn(
            f"audio must be bytes or a base64 data URL of type {', '.join(AUDIO_FORMATS)}; "
            f"got {shorten_url(source)}"
        )
    clip = {"data": content, "format": AUDIO_FORMATS[media_type]}
    return OpaquePart(FrozenMap(type="input_audio", input_audio=clip))


def read_audio(part: Part) -> tuple[str, str] | None:
    """Return the media type and the base64 content of an audio part; None for any other part."""
    if not isinstance(part, OpaquePart) or part.content.get("type") != "input_audio":
        return None
    clip = part.content.get("input_audio")
    if not isinstance(clip, Mapping):
        return None
    members = cast("Mapping[str, object]", clip)
    data = members.get("data")
    kind = members.get("format")
    if not isinstance(kind, str) or kind not in _AUDIO_TYPES or not isinstance(data, str):
        return None
    return _AUDIO_TYPES[kind], data


def _default_filename(data: str) -> str:
    """Return a name for the content of a data URL, by its type."""
    import mimetypes

    media_type = data.removeprefix("data:").partition(",")[0].partition(";")[0]
    # The built-in table, so that the name does not depend on the machine.
    return f"file{mimetypes.MimeTypes().guess_extension(media_type) or ''}"


def _detect_image_type(content: bytes) -> str:
    """Return the type of an image by its content: Anthropic rejects an image with another type than declared."""
    media_type = detect_media_type(content)
    if not media_type.startswith("image/"):
        return ""
    return media_type


def _get_name(path: LocalPath) -> str:
    from pathlib import Path

    return Path(path).name


def _guess_media_type(path: LocalPath) -> str:
    import mimetypes

    media_type, _ = mimetypes.guess_type(_get_name(path), strict=False)
    if media_type is None:
        raise InvalidTurn(f"the name of {path} does not determine its type; pass media_type=")
    return media_type


def read_file(path: LocalPath, max_bytes: int = MAX_FILE_BYTES) -> bytes:
    """Return the content of a regular file.

    Raises:
        InvalidTurn: If there is no such file, it cannot be read, or it is larger than ``max_bytes``.
    """
    from pathlib import Path

    try:
        if not Path(path).is_file():
            raise InvalidTurn(f"there is no file {path}")
        with Path(path).open("rb") as opened:
            content = opened.read(max_bytes + 1)
    except OSError as error:
        raise InvalidTurn(f"{path} cannot be read: {error.strerror or error}") from error
    if len(content) > max_bytes:
        raise InvalidTurn(
            f"{path} has more than {max_bytes:,} bytes; upload it to the provider and use its file id, "
            "or raise max_bytes"
        )
    return content


def check_url(source: object, name: str) -> str:
    """Return a URL; reject a local path, which a server could not read."""
    if not isinstance(source, str):
        kind = type(source).__name__
        raise InvalidTurn(f"{name}: expected a URL or bytes, got {kind}; kedge.{name} reads files")
    if source and not _URL.match(source):
        raise InvalidTurn(
            f"{name}: {shorten_url(source)!r} is not a URL; "
            f"for a local file pass a path: kedge.{name}(Path({shorten_url(source)!r}))"
        )
    return source


def shorten_url(url: str) -> str:
    """Return the beginning of a URL, for messages."""
    if len(url) <= MAX_SHOWN_URL:
        return url
    return f"{url[:MAX_SHOWN_URL]}…"


def data_url(content: bytes, media_type: str) -> str:
    """Return a data URL of these bytes."""
    return f"data:{media_type};base64,{base64.b64encode(content).decode()}"


def split_data_url(url: str) -> tuple[str, str]:
    """Return the media type and the content of ``data:<type>;base64,<content>``; empty texts for another URL."""
    head, comma, content = url.partition(",")
    if not comma or not head.startswith("data:") or not head.endswith(";base64"):
        return "", ""
    return head.removeprefix("data:").partition(";")[0], content


def detect_media_type(content: bytes) -> str:
    """Return the type of an image or a PDF by its first bytes, or nothing."""
    if content[:4] == b"RIFF" and content[8:12] == b"WEBP":
        return "image/webp"
    if content.startswith(b"%PDF-"):
        return "application/pdf"
    return next((kind for start, kind in IMAGE_SIGNATURES if content.startswith(start)), "")
