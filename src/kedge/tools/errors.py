"""Describe the exception of a failed call, for the model and for the log.

The model receives the type and message of the exception, without a traceback and with apparent secrets redacted. The
log receives the type and the source location but no message, because messages may quote the conversation.
"""

import re
import traceback
from collections.abc import Callable, Iterator
from pathlib import PurePath
from typing import cast

from kedge.errors import describe_for_client

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
    if not message:
        return name
    return f"{name}: {message}"


def _error_message(error: BaseException) -> str:
    try:
        return describe_for_client(error)
    except Exception:  # noqa: BLE001 - str() of an exception may raise
        return ""


def _iter_leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in cast("BaseExceptionGroup[BaseException]", error).exceptions:
            yield from _iter_leaves(inner)
    else:
        yield error
