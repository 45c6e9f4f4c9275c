"""HTTP transport: a provider's client for authentication, retries and timeouts, with raw bodies.

Requests are sent as JSON through the client's low-level ``post``, and responses are read as bytes: the
typed layer of the client costs a millisecond for each item of input. Exceptions of the client become
an ``EngineError`` here, with the server's message and without the API key. The clients of openai and
anthropic are generated from the same template, so that one transport serves both.
"""

import json
import re
import sys
import time
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Mapping
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from functools import cache
from importlib import import_module
from math import isfinite
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, cast
from urllib.parse import urlsplit, urlunsplit

from kedge.engines.evidence import read_identity
from kedge.engines.request_body import encode_param
from kedge.errors import (
    EngineError,
    NotAuthorised,
    RateLimited,
    RequestRefused,
    ServerFailed,
    StreamCut,
    Unreachable,
)
from kedge.event_loops import PerLoop
from kedge.json_codec import encode
from kedge.planning import AnchorRecord

if TYPE_CHECKING:
    import httpx2
    from anthropic import AsyncAnthropic
    from openai import APIStatusError, AsyncOpenAI

    from kedge.engines.base import WireTap

    Client = AsyncOpenAI | AsyncAnthropic

Sdk = Literal["openai", "anthropic"]
_ROOT_ERRORS: dict[Sdk, str] = {"openai": "OpenAIError", "anthropic": "AnthropicError"}
"""The base class of each client's errors."""
PLACEHOLDER_KEY = "none"
"""The placeholder key for a server without keys: the client requires one."""
EVENT_STREAM = "text/event-stream"

MAX_CODE_LENGTH = 200
MAX_MESSAGE_LENGTH = 2_000
"""The maximum length of a server's code and message in an error."""
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
_ITEM_LISTS = frozenset({"input", "messages"})
"""The body members that are rendered from blocks."""
_TELEMETRY_HEADERS = (
    "Lang",
    "Package-Version",
    "OS",
    "Arch",
    "Runtime",
    "Runtime-Version",
    "Async",
)


class RawResponse(Protocol):
    """A response whose body is not read yet, over any transport; it must be closed."""

    @property
    def provider(self) -> str:
        """The provider of the response."""
        ...

    @property
    def request_id(self) -> str:
        """The server's id of the request."""
        ...

    @property
    def is_stream(self) -> bool:
        """Whether the body is a stream of events."""
        ...

    def chunks(self) -> AsyncGenerator[bytes]:
        """Yield the body as it arrives."""
        ...

    async def body(self) -> bytes:
        """Return the complete body."""
        ...

    async def aclose(self) -> None:
        """Release the connection."""
        ...


@dataclass(frozen=True, slots=True)
class HttpResponse:
    """A response whose body is not read yet; it must be closed."""

    response: "httpx2.Response"
    translator: "_ErrorTranslator"
    request_body: bytes = b""
    tap: "WireTap | None" = None

    @property
    def provider(self) -> str:
        """The provider of the response."""
        return self.translator.provider

    @property
    def request_id(self) -> str:
        """The server's id of the request."""
        return get_request_id(self.response.headers)

    @property
    def is_stream(self) -> bool:
        """Whether the body is a stream of events.

        Some servers send the stream that was requested without a content type, or as plain text.
        """
        media_type = self.response.headers.get("content-type", "").partition(";")[0].strip()
        if media_type in ("", "text/plain"):
            return self.response.request.headers.get("accept") == EVENT_STREAM
        return media_type == EVENT_STREAM

    async def chunks(self) -> AsyncGenerator[bytes]:
        """Yield the body as it arrives."""
        received: list[bytes] = []
        try:
            with self.translator:
                async with aclosing(self.response.aiter_bytes()) as chunks:
                    async for chunk in chunks:
                        if self.tap:
                            received.append(chunk)
                        yield chunk
        finally:
            self._notify_tap(b"".join(received))

    async def body(self) -> bytes:
        """Return the complete body."""
        with self.translator:
            body = await self.response.aread()
        self._notify_tap(body)
        return body

    def _notify_tap(self, body: bytes) -> None:
        if self.tap:
            text = self.translator.redact(body.decode("utf-8", "replace"))
            self.tap(self.request_body, text.encode(), self.response.status_code)

    async def aclose(self) -> None:
        """Release the connection."""
        await self.response.aclose()


class Transport:
    """Sends requests to one server."""

    always_streams: ClassVar[bool] = False
    """Whether responses are always streamed."""

    def __init__(
        self, make_client: "Callable[[], Client]", provider: str, sdk: Sdk = "openai"
    ) -> None:
        self._clients: PerLoop[Client] = PerLoop(make_client, lambda client: client.close())
        self.provider = provider
        self.sdk: Sdk = sdk
        self.identity: str | None = None
        """The name by which the server identified itself; None before its first answer."""

    async def aclose(self) -> None:
        """Close the connections of the running loop."""
        await self._clients.aclose()

    @property
    def client(self) -> Any:
        """The client of the running loop."""
        return self._clients.get()

    def serialize(self, body: dict[str, Any]) -> bytes:
        """Return the bytes of a request body."""
        return encode_body(body)

    def live_anchors(self, records: Iterable[AnchorRecord]) -> tuple[AnchorRecord, ...]:
        """Return the unstored records that a live connection remembers: over HTTP there are none."""
        return ()

    async def create_response(
        self,
        content: bytes,
        body: dict[str, Any],
        *,
        retry: bool = True,
        tap: "WireTap | None" = None,
    ) -> RawResponse:
        """Send a request for a response; the reply must be closed."""
        streaming: bool = body["stream"]
        return await self.post("/responses", content, streaming=streaming, retry=retry, tap=tap)

    async def post(
        self,
        path: str,
        body: bytes,
        *,
        streaming: bool,
        retry: bool = True,
        tap: "WireTap | None" = None,
    ) -> HttpResponse:
        """Send a request; the reply must be closed. ``tap`` receives what was sent and received."""
        import httpx2

        client: Any = self._clients.get()
        headers = {"Content-Type": "application/json", **no_telemetry_headers(self.sdk)}
        if streaming:
            headers["Accept"] = EVENT_STREAM
        options: Any = {"headers": headers, **({} if retry else {"max_retries": 0})}
        with tap_request(tap, body), self._make_translator(client):
            response = await client.post(
                # The complete URL: the client is slow at joining it to its base URL.
                str(client.base_url).rstrip("/") + path,
                cast_to=httpx2.Response,
                content=body,
                options=options,
                stream=True,
                stream_cls=import_module(self.sdk).AsyncStream[object],
            )
        answer = cast("httpx2.Response", response)
        self.identity = read_identity(answer.headers)
        return HttpResponse(answer, self._make_translator(client, streaming=True), body, tap)

    async def request_json(self, method: str, path: str, **query: Any) -> dict[str, Any]:
        """Send a request and return the JSON object of the response; ``json`` is its body."""
        import httpx2

        client: Any = self._clients.get()
        body = query.pop("json", None)
        options: Any = {"params": query} if query else {}
        with self._make_translator(client):
            send: Any = getattr(client, method)
            keywords = {"body": body} if body is not None else {}
            response = await send(path, cast_to=httpx2.Response, options=options, **keywords)
        self.identity = read_identity(response.headers)
        found = _parse_object(response.text)
        if not found:
            message = "the server did not answer with a JSON object"
            raise ServerFailed(message, provider=self.provider, retryable=True)
        return found

    def redact(self, text: str) -> str:
        """Return a text of the server without the API key."""
        return _redact_secret(self._clients.get().api_key, text)

    def build_error(self, status: int, text: str, headers: Mapping[str, str]) -> EngineError:
        """Return the error for a response with an error status."""
        return self._make_translator(self.client).build_error(status, text, headers)

    def _make_translator(self, client: "Client", *, streaming: bool = False) -> "_ErrorTranslator":
        return _ErrorTranslator(self.provider, client, streaming, self.sdk)


@cache
def no_telemetry_headers(sdk: Sdk) -> dict[str, Any]:
    """Return the headers with which the client would describe this machine, so that they are omitted."""
    omit = import_module(sdk).Omit
    return {f"X-Stainless-{name}": omit() for name in _TELEMETRY_HEADERS}


class _ErrorTranslator:
    """Converts exceptions of the client to errors of Kedge."""

    def __init__(self, provider: str, client: "Client", streaming: bool, sdk: Sdk) -> None:
        self.provider = provider
        self.secret: object = client.api_key
        self._client = client
        self.streaming = streaming
        self.sdk: Sdk = sdk

    def __enter__(self) -> None:
        pass

    def __exit__(self, exc_type: object, exc: BaseException | None, traceback: object) -> None:
        if exc is None or not isinstance(exc, Exception) or isinstance(exc, EngineError):
            return
        error = self._translate(exc)
        if error is not None:
            # A traceback shows the text of the cause, which may contain the key.
            raise error from (exc if self._is_secret_free(exc) else None)

    def _translate(self, exc: Exception) -> EngineError | None:
        import httpx2

        sdk: Any = import_module(self.sdk)
        if isinstance(exc, sdk.APIStatusError):
            failed = cast("APIStatusError", exc)
            return self.build_error(
                failed.status_code, failed.response.text, failed.response.headers
            )
        if self.streaming and isinstance(exc, (httpx2.HTTPError, *_get_aiohttp_errors())):
            message = f"the connection broke in the middle of the response ({type(exc).__name__})"
            return StreamCut(message, provider=self.provider, retryable=True)
        if isinstance(exc, (sdk.APIConnectionError, *_get_aiohttp_errors())):
            return self._build_unreachable(exc)
        if isinstance(exc, getattr(sdk, _ROOT_ERRORS[self.sdk])):
            return EngineError(self.redact(str(exc)), provider=self.provider)
        return None

    def _is_secret_free(self, exc: BaseException | None) -> bool:
        while exc is not None:
            if self.redact(str(exc)) != str(exc):
                return False
            exc = exc.__cause__ or exc.__context__
        return True

    def _build_unreachable(self, exc: Exception) -> Unreachable:
        # The client reports some broken connections as timeouts; the root cause shows which they are.
        first = _find_root_cause(exc)
        timed_out = isinstance(exc, import_module(self.sdk).APITimeoutError)
        broken = isinstance(first, (OSError, *_get_aiohttp_errors()))
        # The query and the user name may be secret; scheme, host and path are not.
        url = self._client.base_url
        address = self.redact(str(url.copy_with(query=None, fragment=None, userinfo=b"")))
        message = f"could not reach the server at {address} ({type(first).__name__})"
        if isinstance(first, TimeoutError) or (timed_out and not broken):
            message = f"the server at {address} did not answer in time"
        return Unreachable(message, provider=self.provider, retryable=True)

    def build_error(self, status: int, text: str, headers: Mapping[str, str]) -> EngineError:
        """Return the error for a response with an error status."""
        # Redacted before it is truncated, which could leave a part of the key.
        fields = {
            name: self.redact(value) for name, value in parse_error(self.redact(text)).items()
        }
        message = fields.pop("message")
        if 300 <= status < 400:
            message = self.redact(_describe_redirect(headers))
        facts: dict[str, Any] = {
            "provider": self.provider,
            "status": status,
            "request_id": get_request_id(headers),
            **fields,
        }
        match status:
            case 401 | 403:
                return NotAuthorised(message, **facts)
            case 429:
                after = _parse_retry_after(headers)
                return RateLimited(message, **facts, retryable=True, retry_after=after)
            case status if status >= 500:
                after = _parse_retry_after(headers)
                permanent = status == 501 or is_permanent_failure(fields["code"], message)
                return ServerFailed(message, **facts, retryable=not permanent, retry_after=after)
            case status:
                return RequestRefused(message, **facts, retryable=status in (408, 409))

    def redact(self, text: str) -> str:
        """Return a text of the server without the API key."""
        return _redact_secret(self.secret, text)


@contextmanager
def tap_request(tap: "WireTap | None", request_body: bytes) -> Generator[None]:
    """Report a request without a reply, with the message of the error."""
    try:
        yield
    except EngineError as error:
        if tap:
            tap(request_body, error.message.encode(), error.status)
        raise


def _get_aiohttp_errors() -> tuple[type[Exception], ...]:
    """Return the base class of the errors of aiohttp, if a client uses it."""
    aiohttp: Any = sys.modules.get("aiohttp")
    return () if aiohttp is None else (aiohttp.ClientError,)


def _find_root_cause(exc: BaseException) -> BaseException:
    while exc.__cause__ is not None:
        exc = exc.__cause__
    return exc


def _redact_secret(secret: object, text: str) -> str:
    if isinstance(secret, str) and len(secret) > 3 and secret != PLACEHOLDER_KEY:
        return text.replace(secret, "***")
    return text


def is_permanent_failure(code: str, message: str) -> bool:
    """Return whether a failure is caused by the request, so that the same request would fail again."""
    return bool(_PERMANENT_CODES.search(code) or _PERMANENT_REASONS.search(message))


def parse_error(text: str) -> dict[str, str]:
    """Return the message, code and param of an error body of any form."""
    members = _parse_object(text)
    inner = members.get("error")
    if isinstance(inner, dict):
        error = cast("dict[str, Any]", inner)
        # Anthropic names its errors by type where others have a code.
        members = {"code": error.get("type"), **error} if members.get("type") == "error" else error
    elif isinstance(inner, str):
        members = {**members, "message": inner}
    message = members.get("message") or members.get("detail") or text
    if not isinstance(message, str):
        message = json.dumps(message)
    return {
        "message": message[:MAX_MESSAGE_LENGTH] or "the server returned no error message",
        "code": _truncate_code(members.get("code")),
        "param": _truncate_code(members.get("param")),
    }


def encode_body(body: Mapping[str, Any]) -> bytes:
    """Return the bytes of a request body.

    The standard library encodes the parameters: they are arbitrary objects of the caller, and it rejects those
    that are not JSON.

    Raises:
        InvalidSetting: A parameter is not JSON.
    """
    members = [
        encode({name: value}) if name in _ITEM_LISTS else encode_param(name, value)
        for name, value in body.items()
    ]
    return b"{%b}" % b",".join(member[1:-1] for member in members)


def get_request_id(headers: Mapping[str, str]) -> str:
    """Return the server's id of a request."""
    return headers.get("x-request-id") or headers.get("request-id", "")


def _parse_object(text: str) -> dict[str, Any]:
    try:
        body = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    if isinstance(body, list) and body:  # the form of errors of Google's servers
        body = cast("list[Any]", body)[0]
    return cast("dict[str, Any]", body) if isinstance(body, dict) else {}


def _describe_redirect(headers: Mapping[str, str]) -> str:
    """Describe a redirect by its target, without user and query, which may be secret."""
    try:
        target = urlsplit(headers.get("location", ""))
    except ValueError:
        target = urlsplit("")
    host = target.netloc.rpartition("@")[2]
    address = urlunsplit((target.scheme, host, target.path, "", ""))
    where = f" to {address}" if address else ""
    return f"the server redirects{where}; redirects are not followed, so use the right address"


def _truncate_code(value: object) -> str:
    known = isinstance(value, str | int) and not isinstance(value, bool)
    return str(value)[:MAX_CODE_LENGTH] if known else ""


def _parse_retry_after(headers: Mapping[str, str]) -> float | None:
    """Return the seconds to wait: a server may send milliseconds, seconds or a date."""
    for name, unit in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        try:
            seconds = float(headers.get(name, "")) * unit
        except (TypeError, ValueError):
            continue
        if isfinite(seconds) and seconds >= 0:
            return seconds
    try:
        date = parsedate_to_datetime(headers.get("retry-after", ""))
    except (TypeError, ValueError):
        return None
    return max(date.timestamp() - time.time(), 0.0)
