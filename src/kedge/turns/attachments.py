"""Construct image, file and audio parts, also from local files.

Parts are pure values (``kedge.turns``). A file is read here, once, when its part is constructed, so that
a Turn never depends on the file system.
"""

import mimetypes
from os import PathLike
from pathlib import Path

from msgspec.structs import replace

from kedge import turns
from kedge.errors import InvalidTurn
from kedge.turns import FilePart, ImagePart, OpaquePart
from kedge.turns.parts import AUDIO_FORMATS, Detail, detect_media_type

MAX_FILE_BYTES = 32 << 20
"""The default maximum size of a local file: the largest request that every provider accepts."""

LocalPath = PathLike[str]
__all__ = ["MAX_FILE_BYTES", "audio", "file", "image"]


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
        media_type: The media type of bytes or of a file; by default that of its content if it is a PNG, JPEG, GIF
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
    if isinstance(source, PathLike):
        named_type = media_type or _guess_media_type(source)
        if not named_type.startswith("image/"):
            raise InvalidTurn(f"{source} is of type {named_type}; use kedge.file, or media_type=")
        content = read_file(source, max_bytes)
        media_type = media_type or _detect_image_type(content) or named_type
        source = content
    elif isinstance(source, bytes):
        media_type = media_type or _detect_image_type(source)
    return turns.image(source, media_type=media_type or "image/png", detail=detail)


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
        filename = filename or Path(source).name
        media_type = media_type or _guess_media_type(source)
        source = read_file(source, max_bytes)
    part = turns.file(source, filename=filename, media_type=media_type or "application/pdf")
    return replace(part, filename=_default_filename(part.data)) if _needs_name(part) else part


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
    return turns.audio(source, media_type=media_type or "audio/wav")


def _needs_name(part: FilePart) -> bool:
    """Return whether OpenAI would reject the part: content needs a name, a URL does not."""
    return bool(part.data) and not part.filename


def _default_filename(data: str) -> str:
    """Return a name for the content of a data URL, by its type."""
    media_type = data.removeprefix("data:").partition(",")[0].partition(";")[0]
    # The built-in table, so that the name does not depend on the machine.
    return f"file{mimetypes.MimeTypes().guess_extension(media_type) or ''}"


def _detect_image_type(content: bytes) -> str:
    """Return the type of an image by its content: Anthropic rejects an image with another type than declared."""
    media_type = detect_media_type(content)
    return media_type if media_type.startswith("image/") else ""


def _guess_media_type(path: LocalPath) -> str:
    media_type, _ = mimetypes.guess_type(Path(path).name, strict=False)
    if media_type is None:
        raise InvalidTurn(f"the name of {path} does not determine its type; pass media_type=")
    return media_type


def read_file(path: LocalPath, max_bytes: int = MAX_FILE_BYTES) -> bytes:
    """Return the content of a regular file.

    Raises:
        InvalidTurn: If there is no such file, it cannot be read, or it is larger than ``max_bytes``.
    """
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
