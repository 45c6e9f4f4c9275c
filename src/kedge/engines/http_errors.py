"""The errors of HTTP requests: with the message of the server, and without the API key."""

import json
import re
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from math import isfinite
from typing import Any, cast
from urllib.parse import urlsplit, urlunsplit

import msgspec

from kedge import errors
from kedge._internal.urls import find_doubled_part
from kedge.evidence.server_evidence import read_identity
from kedge.wire.fields import repair_surrogates

PLACEHOLDER_KEY = "none"
"""The key that is sent to a server without keys."""
CREDENTIAL_HEADERS = ("authorization", "api-key", "x-api-key", "cookie", "proxy-authorization")
GATEWAY_HEADERS = (
    "ocp-apim-subscription-key",
    "x-goog-api-key",
    "x-litellm-api-key",
    "cf-aig-authorization",
    "x-portkey-api-key",
    "helicone-auth",
)
"""Headers of gateways that identify an account; like other credentials, their values are stored as a hash only."""
MAX_CODE_LENGTH = 200
MAX_MESSAGE_LENGTH = 2_000
"""The maximum length of a server's code and message in an error."""
MAX_TITLE_LENGTH = 100
_PAGE = re.compile(r"\s*<(!doctype html|html)\b|\s*<[?!].*?<html\b", re.IGNORECASE | re.DOTALL)
_TITLE = re.compile(r"<title>([^<]*)", re.IGNORECASE)
_SCHEME = re.compile(r"^\s*[\w-]+\s+")
_PERMANENT_CODES = re.compile(
    r"^(invalid|unsupported|empty|image)_|policy|content_filter|moderation|_not_found|quota|billing"
    r"|context_length|_too_(large|small|long)|max_tokens"
    r"|^4(?!08|09|25|29)[0-9]{2}$"
)
"""Codes of failures caused by the request or the account: the same request would fail again.

Some servers use the HTTP status as the code.
"""
_PERMANENT_REASONS = re.compile(
    r"\b(not support(ed|s)?|unsupported|(does|do)(n't| not) support|not implemented)\b",
    re.IGNORECASE,
)
"""Texts of such failures; llama.cpp reports an image without a vision model as HTTP 500."""
_STATUS_ERRORS = {401: errors.NotAuthorized, 403: errors.NotAuthorized, 429: errors.RateLimited}


class ErrorBuilder(msgspec.Struct, frozen=True):
    """Builds the errors of requests to one server.

    Args:
        provider: The name of the provider.
        base_url: The address of the server.
        api_key: The key, which errors must not contain.
        secrets: Other credentials of the requests, which errors must not contain either.
    """

    provider: str
    base_url: str
    api_key: object
    secrets: tuple[str, ...] = ()

    @property
    def _address(self) -> str:
        """The address of the server without query and user name, which may be secret."""
        return self.redact(_strip_url(self.base_url))

    def redact(self, text: str) -> str:
        """Return a text of the server without the API key and other credentials."""
        keys = [key for key in (self.api_key, *self.secrets) if isinstance(key, str)]
        return hide_credentials(text, keys)

    def find_cause(self, exc: Exception) -> Exception | None:
        """Return the exception if no text that a traceback would show contains the key."""
        shown: BaseException | None = exc
        while shown is not None:
            if self.redact(str(shown)) != str(shown):
                return None
            shown = shown.__cause__ or shown.__context__
        return exc

    def build_cut(self, exc: Exception) -> errors.StreamCut:
        """Return the error for a response that broke off."""
        message = f"the connection broke in the middle of the response ({type(exc).__name__})"
        return errors.StreamCut(message, provider=self.provider, retryable=True)

    def build_invalid_response(self, cause: Exception) -> errors.ServerFailed:
        """Return the error for a response that is not valid HTTP.

        The server has generated an answer, so the request must not be repeated: it would be paid for again.

        Args:
            cause: The error of the HTTP parser, whose message may quote the response after a colon.
        """
        reason = str(getattr(cause, "message", cause)).partition(":")[0]
        message = f"the server at {self._address} sent a response that is not valid HTTP ({reason})"
        if "status line" in reason:
            message += "; is the base URL correct?"
        return errors.ServerFailed(message, provider=self.provider)

    def build_unreachable(self, exc: Exception, *, timed_out: bool = False) -> errors.Unreachable:
        """Return the error for a request without a response.

        Args:
            exc: The failure.
            timed_out: Whether it is a timeout, if its root cause does not say otherwise.
        """
        first = find_root_cause(exc)
        message = f"could not reach the server at {self._address} ({type(first).__name__})"
        if isinstance(first, TimeoutError) or timed_out:
            message = f"the server at {self._address} did not answer in time"
        return errors.Unreachable(message, provider=self.provider, retryable=True)

    def build_error(
        self, status: int, text: str, headers: Mapping[str, str], *, url: str = ""
    ) -> errors.EngineError:
        """Return the error for a response with an error status.

        Args:
            status: The HTTP status.
            text: The body of the response.
            headers: The headers of the response.
            url: The address of the request, if it is known.
        """
        # Redacted before it is truncated, which could leave a part of the key.
        parsed = parse_error(self.redact(text))
        message = self.redact(parsed["message"])
        code = self.redact(parsed["code"])
        if 300 <= status < 400:
            message = self.redact(_describe_redirect(headers))
        elif status == 404 and "base URL" not in message:
            message += self._describe_doubled_part(url)

        kind = _STATUS_ERRORS.get(status, errors.RequestRefused)
        retryable = status in (408, 409, 429)
        if status >= 500:
            kind = errors.ServerFailed
            retryable = status != 501 and not is_permanent_failure(code, message)
        decision = headers.get("x-should-retry")
        if decision in ("true", "false"):
            retryable = decision == "true"
        error = kind(
            message,
            provider=self.provider,
            status=status,
            code=code,
            param=self.redact(parsed["param"]),
            request_id=get_request_id(headers),
            retryable=retryable,
            retry_after=parse_retry_after(headers) if retryable else None,
        )
        error.server = read_identity(headers)
        return error

    def _describe_doubled_part(self, url: str) -> str:
        """Return what to add to the error of a request whose address repeats a part, such as ``/v1/v1``."""
        part = find_doubled_part(url)
        if not part:
            return ""
        address = self.redact(_strip_url(url))
        return f" (the address {address} has {part} twice; is the base URL correct?)"


def hide_credentials(text: str, credentials: Iterable[str]) -> str:
    """Return a text of a server without the credentials of the request, which some servers repeat."""
    # A shorter one may be part of a longer one.
    for credential in sorted(credentials, key=len, reverse=True):
        if len(credential) > 3 and credential != PLACEHOLDER_KEY:
            text = text.replace(credential, "***")
    return text


def find_secrets(headers: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the credentials in the headers of a request, without their schemes, such as ``Bearer``.

    Of a list of pairs, such as several cookies, each pair and each value is returned.
    """
    names = (*CREDENTIAL_HEADERS, *GATEWAY_HEADERS)
    secrets: list[str] = []
    for name, value in headers.items():
        if name.lower() in names and isinstance(value, str):
            if name.lower() == "cookie":
                pairs = value.split(";")
            else:
                pairs = _SCHEME.sub("", value).split(",")
            secrets += [pair.strip() for pair in pairs]
            secrets += [pair.partition("=")[2].strip(' "') for pair in pairs]
    return tuple(secrets)


def is_permanent_failure(code: str, message: str) -> bool:
    """Return whether a failure is caused by the request, so that the same request would fail again."""
    return bool(_PERMANENT_CODES.search(code) or _PERMANENT_REASONS.search(message))


def describe_page(text: str) -> str:
    """Return one line about a body that is a web page, or else the body."""
    if not _PAGE.match(text):
        return text
    from html import unescape  # which takes time to import

    description = "the server returned a web page"
    title = _TITLE.search(text)
    if title:
        line = " ".join(unescape(title[1]).split())
        description += f", {line[:MAX_TITLE_LENGTH]!r},"
    return f"{description} instead of JSON; is the base URL correct?"


def parse_error(text: str) -> dict[str, str]:
    """Return the message, code and param of an error body of any form."""
    members = parse_object(text)
    inner = members.get("error")
    if isinstance(inner, dict):
        error = cast("dict[str, Any]", inner)
        if (
            members.get("type") == "error"
        ):  # Anthropic names its errors by type where others have a code
            error = {"code": error.get("type"), **error}
        members = error
    elif isinstance(inner, str):
        members = {**members, "message": inner}
    message = members.get("message") or members.get("detail") or describe_page(text)
    if not isinstance(message, str):
        message = json.dumps(message)
    return {
        "message": message[:MAX_MESSAGE_LENGTH] or "the server returned no error message",
        "code": _truncate_code(members.get("code")),
        "param": _truncate_code(members.get("param")),
    }


def parse_object(text: str | bytes) -> dict[str, Any]:
    """Return the JSON object of a body, without lone surrogates, or an empty one."""
    try:
        body = repair_surrogates(json.loads(text))
    except (ValueError, RecursionError):
        return {}
    if isinstance(body, list) and body:  # the form of errors of Google's servers
        body = cast("list[Any]", body)[0]
    if not isinstance(body, dict):
        return {}
    return cast("dict[str, Any]", body)


def get_request_id(headers: Mapping[str, str]) -> str:
    """Return the server's id of a request."""
    return _truncate_code(headers.get("x-request-id") or headers.get("request-id"))


def parse_retry_after(headers: Mapping[str, str]) -> float | None:
    """Return the seconds to wait: a server may send milliseconds, seconds or a date."""
    for name, unit in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        with suppress(TypeError, ValueError):
            seconds = float(headers.get(name, "")) * unit
            if isfinite(seconds) and seconds >= 0:
                return seconds
    text = headers.get("retry-after")
    if text:
        from email.utils import parsedate_to_datetime  # takes longer to import than this module

        with suppress(TypeError, ValueError):
            return max(parsedate_to_datetime(text).timestamp() - time.time(), 0.0)
    return None


def find_root_cause(exc: BaseException) -> BaseException:
    """Return the first exception of a chain of causes."""
    while exc.__cause__ is not None:
        exc = exc.__cause__
    return exc


def _describe_redirect(headers: Mapping[str, str]) -> str:
    """Describe a redirect by its target, without user and query, which may be secret."""
    address = repair_surrogates(_strip_url(headers.get("location", "")))
    where = f" to {address}" if address else ""
    return f"the server redirects{where}; redirects are not followed, so use the right address"


def _strip_url(url: str) -> str:
    """Return an address without user, query and fragment, which may be secret."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return ""
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def _truncate_code(value: object) -> str:
    if not isinstance(value, str | int) or isinstance(value, bool):
        return ""
    return repair_surrogates(str(value)[:MAX_CODE_LENGTH])
