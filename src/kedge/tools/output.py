"""Convert the return value of a tool into the parts of a tool result.

Text remains text. Images and PDFs, as bytes or as parts, are sent as such. Everything else is written as
JSON, values without a JSON form by ``str``. Text beyond the limit is truncated with a note, and an image
beyond its limit is replaced by a note.

For a failed call the model receives the type and message of the exception, without a traceback and with apparent
secrets redacted. The log receives the type and the source location but no message, because messages may quote
the conversation.
"""

import re
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import PurePath
from typing import Any, cast

from kedge import turns
from kedge.events.fields import repair_surrogates
from kedge.turns.attachments import detect_media_type, split_data_url
from kedge.turns.parts import PART_TYPES

MAX_MESSAGE_CHARS = 2_000
REDACTED = "[redacted]"

# Every repetition that may fail is bounded, so that any message takes linear time.
SECRET_PATTERNS: tuple[tuple[re.Pattern[str], str], ...] = (
    (
        re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(-----END [A-Z ]*-----|$)", re.DOTALL),
        REDACTED,
    ),
    (re.compile(r"Traceback \(most recent call last\):.*", re.DOTALL), "[traceback left out]"),
    (re.compile(r"\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*"), REDACTED),
    (
        re.compile(r"\b(?:sk|pk|rk|xai|ghp|gho|ghs|github_pat|glpat|xox[abeprs])[-_][\w-]{8,}"),
        REDACTED,
    ),
    (re.compile(r"\b(?:AKIA|ASIA)[A-Z0-9]{12,}|\bAIza[\w-]{20,}"), REDACTED),
    (re.compile(r"(?i)\b(bearer|basic) [\w.~+/=-]{16,}"), rf"\1 {REDACTED}"),
    (
        re.compile(r"(?i)(authorization[\"']?[:=] ?[\"']?(?:\w{1,20} )?)[\w.~+/=-]+"),
        rf"\1{REDACTED}",
    ),
    (
        re.compile(
            r"(?i)(\bcookie[\"']?: ?)"
            r"(?:\"(?:\\.|[^\"\\])*\"|'(?:\\.|[^'\\])*'|[^\s=;,\"']{1,200}=[^\r\n]*)"
        ),
        rf"\1{REDACTED}",
    ),
    (re.compile(r"(://)[^/\s@]{1,200}@"), rf"\1{REDACTED}@"),
    (
        re.compile(
            r"(?i)((?:api[_-]?key|token|secret|passw(?:or)?d|passphrase|credential|signature)"
            r"[\w-]{0,40}[\"']?\s{0,4}[=:]\s{0,4})(?!\[redacted)(?:\"[^\"]*\"|'[^']*'|[^\s&,;\"']+)"
        ),
        rf"\1{REDACTED}",
    ),
)


def redact_secrets(text: str) -> str:
    """Return the text with apparent keys, tokens, passwords and tracebacks replaced."""
    for pattern, replacement in SECRET_PATTERNS:
        text = pattern.sub(replacement, text)
    return text


def describe_error(error: BaseException, edit: Callable[[str], str] = str) -> str:
    """Return the types and messages of an exception (or of each one in a group), for the model.

    ``edit`` is applied to each message before it is cut to its length.
    """
    return "; ".join(dict.fromkeys(_describe_leaf(leaf, edit) for leaf in _iter_leaves(error)))


def locate_error(error: BaseException) -> str:
    """Return where an exception was raised, for the log: file, line and function."""
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return "an unknown location"
    last = frames[-1]
    return f"{PurePath(last.filename).name}:{last.lineno} in {last.name}"


def _describe_leaf(error: BaseException, edit: Callable[[str], str]) -> str:
    name = type(error).__name__
    message = redact_secrets(edit(_error_message(error))[: 5 * MAX_MESSAGE_CHARS]).strip()
    if len(message) > MAX_MESSAGE_CHARS:
        message = f"{message[:MAX_MESSAGE_CHARS]} [cut]"
    return f"{name}: {message}" if message else name


def _error_message(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - str() of an exception may raise
        return ""


def _iter_leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in cast("BaseExceptionGroup[BaseException]", error).exceptions:
            yield from _iter_leaves(inner)
    else:
        yield error


MAX_OUTPUT = 100_000
"""Default maximum of characters of text in one result."""
MAX_ATTACHMENT = 20_000_000
"""Maximum characters of an image or a file in its data URL."""


def to_parts(value: object) -> tuple[turns.Part, ...]:
    """Return the parts for a returned value."""
    match value:
        case turns.ToolResultBlock():
            return tuple(map(_to_part, value.parts)) or (turns.TextPart(""),)
        case list() | tuple() if _has_attachments(cast("list[object]", value)):
            return tuple(map(_to_part, cast("list[object]", value)))
        case _:
            return (_to_part(value),)


def truncate_parts(parts: Iterable[turns.Part], limit: int) -> tuple[turns.Part, ...]:
    """Return the parts with at most ``limit`` characters of text, and a note where text was truncated."""
    remaining = max(limit, 0)
    shown: list[turns.Part] = []
    for part in parts:
        match part:
            case turns.TextPart() if len(part.text) > remaining:
                mark = f"\n[truncated: {remaining:,} of {len(part.text):,} characters are shown]"
                shown.append(turns.TextPart(repair_surrogates(part.text[:remaining]) + mark))
                remaining = 0
            case turns.ImagePart() | turns.FilePart() if (
                size := _attachment_size(part)
            ) > MAX_ATTACHMENT:
                shown.append(turns.TextPart(f"[omitted: an attachment of {size:,} characters]"))
            case _:
                remaining -= len(part.text) if isinstance(part, turns.TextPart) else 0
                shown.append(part)
    return tuple(shown)


def describe_attachments(parts: Iterable[turns.Part]) -> tuple[turns.Part, ...]:
    """Return the parts with a text instead of each image and file, for an API that accepts text only."""
    return tuple(
        turns.TextPart(f"[omitted: {_describe_attachment(part)}; this model's API takes text only]")
        if isinstance(part, turns.ImagePart | turns.FilePart)
        else part
        for part in parts
    )


def _describe_attachment(part: turns.ImagePart | turns.FilePart) -> str:
    kind = "an image" if isinstance(part, turns.ImagePart) else "a file"
    content = part.url if isinstance(part, turns.ImagePart) else part.data
    media_type, data = split_data_url(content)
    return f"{kind} of type {media_type}, {len(data) * 3 // 4:,} bytes" if data else kind


def _has_attachments(members: Iterable[object]) -> bool:
    return any(
        isinstance(member, PART_TYPES) or (isinstance(member, bytes) and detect_media_type(member))
        for member in members
    )


def _to_part(value: object) -> turns.Part:
    match value:
        case str():
            text = str.__str__(value)  # the value of a string enum, not its name
            return turns.TextPart(repair_surrogates(text))
        case turns.RefusalPart():
            return turns.TextPart(
                value.text
            )  # a refusal part is valid only in a message of a model
        case turns.TextPart() | turns.ImagePart() | turns.FilePart() | turns.OpaquePart():
            return value
        case bytes() | bytearray() | memoryview():
            return _bytes_to_part(bytes(value))  # pyright: ignore[reportUnknownArgumentType]
        case _:
            return turns.TextPart(_to_json(value))


def _bytes_to_part(content: bytes) -> turns.Part:
    media_type = detect_media_type(content)
    if media_type == "application/pdf":
        return turns.file(content, filename="result.pdf", media_type=media_type)
    if media_type:
        return turns.image(content, media_type=media_type)
    try:
        return turns.TextPart(content.decode())
    except UnicodeDecodeError:
        return turns.TextPart(f"[{len(content):,} bytes, neither text nor an image]")


def _to_json(value: Any) -> str:
    from pydantic_core import PydanticSerializationError, to_json, to_jsonable_python

    options: dict[str, Any] = {"fallback": str, "bytes_mode": "base64"}
    errors = (PydanticSerializationError, ValueError, RecursionError)
    with suppress(*errors):
        return to_json(value, inf_nan_mode="strings", **options).decode()
    # It contains itself, or text that UTF-8 cannot encode, also in dataclasses and models, such as the name of a file.
    with suppress(*errors):
        plain = repair_surrogates(to_jsonable_python(repair_surrogates(value), **options))
        return to_json(plain, inf_nan_mode="strings", **options).decode()
    return repair_surrogates(str(value))


def _attachment_size(part: turns.ImagePart | turns.FilePart) -> int:
    return len(part.url) + (len(part.data) if isinstance(part, turns.FilePart) else 0)
