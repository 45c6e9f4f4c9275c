"""The way to a server: a provider's client for authentication, retries and timeouts, bytes for the rest.

Requests go out as plain JSON through the client's low-level ``post`` and answers come back as bytes: the
typed layer of the client costs a millisecond for each item of input. Whatever the client raises becomes
an ``EngineError`` here, with the server's own words and without the key. The clients of openai and of
anthropic are two prints of one pattern, so that one transport serves both.
"""

import json
import re
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Mapping
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from math import isfinite
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, cast

from kedge.engines.known_servers import read_identity
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
from kedge.planning import AnchorRecord

if TYPE_CHECKING:
    import httpx2
    from anthropic import AsyncAnthropic
    from openai import APIStatusError, AsyncOpenAI

    from kedge.engines.base import WireTap

    Client = AsyncOpenAI | AsyncAnthropic

Sdk = Literal["openai", "anthropic"]
_ROOT_ERRORS: dict[Sdk, str] = {"openai": "OpenAIError", "anthropic": "AnthropicError"}
"""The root of each client's errors."""
PLACEHOLDER_KEY = "none"
"""The placeholder key for a server without keys: the client requires one."""
EVENT_STREAM = "text/event-stream"

MAX_CODE_LENGTH = 200
MAX_MESSAGE_LENGTH = 2_000
"""How much of a server's words goes into an error."""
_PERMANENT_CODES = re.compile(
    r"^(invalid|unsupported|empty|image)_|policy|content_filter|moderation|_not_found|quota|billing"
    r"|context_length|_too_(large|small|long)|max_tokens"
)
"""Codes of failures caused by the request or the account: the same request would fail again."""
_PERMANENT_REASONS = re.compile(
    r"\b(not support(ed|s)?|unsupported|(does|do)(n't| not) support|not implemented)\b",
    re.IGNORECASE,
)
"""Texts of such failures; llama.cpp reports an image without a vision model as HTTP 500."""
_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode
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
    """An answer whose body is still on its way, however it travels; close it when done with it."""

    @property
    def provider(self) -> str:
        """Whose answer it is."""
        ...

    @property
    def request_id(self) -> str:
        """The server's name for the request."""
        ...

    @property
    def is_stream(self) -> bool:
        """Whether the body is a stream of events."""
        ...

    def chunks(self) -> AsyncGenerator[bytes]:
        """The body as it comes."""
        ...

    async def body(self) -> bytes:
        """The whole body."""
        ...

    async def aclose(self) -> None:
        """Give the connection back."""
        ...


@dataclass(frozen=True, slots=True)
class HttpResponse:
    """An answer whose body is still on its way; close it when done with it."""

    response: "httpx2.Response"
    translator: "_ErrorTranslator"
    request_body: bytes = b""
    tap: "WireTap | None" = None

    @property
    def provider(self) -> str:
        """Whose answer it is."""
        return self.translator.provider

    @property
    def request_id(self) -> str:
        """The server's name for the request."""
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
        """The body as it comes."""
        came: list[bytes] = []
        try:
            with self.translator:
                async with aclosing(self.response.aiter_bytes()) as chunks:
                    async for chunk in chunks:
                        if self.tap:
                            came.append(chunk)
                        yield chunk
        finally:
            self._notify_tap(b"".join(came))

    async def body(self) -> bytes:
        """The whole body."""
        with self.translator:
            body = await self.response.aread()
        self._notify_tap(body)
        return body

    def _notify_tap(self, body: bytes) -> None:
        if self.tap:
            words = self.translator.redact(body.decode("utf-8", "replace"))
            self.tap(self.request_body, words.encode(), self.response.status_code)

    async def aclose(self) -> None:
        """Give the connection back."""
        await self.response.aclose()


class Transport:
    """Sends requests to one server."""

    always_streams: ClassVar[bool] = False
    """Whether answers are streamed however they were asked for."""

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
        """A request for a response, as it is sent."""
        return _encode(body).encode()

    def live_anchors(self, records: Iterable[AnchorRecord]) -> tuple[AnchorRecord, ...]:
        """The unstored records that a live connection makes good: over HTTP there are none."""
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
                # The whole address: the client is slow at joining it to its own.
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
        """Send a small request and return the object that comes back; ``json`` is its body."""
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
            words = "the server answered with something that is not what was asked for"
            raise ServerFailed(words, provider=self.provider, retryable=True)
        return found

    def redact(self, text: str) -> str:
        """The words of a server, without the key."""
        return _redact_secret(self._clients.get().api_key, text)

    def build_error(self, status: int, text: str, headers: Mapping[str, str]) -> EngineError:
        """The error that a refusal in these words is."""
        return self._make_translator(self.client).build_error(status, text, headers)

    def _make_translator(self, client: "Client", *, streaming: bool = False) -> "_ErrorTranslator":
        return _ErrorTranslator(self.provider, client, streaming, self.sdk)


@cache
def no_telemetry_headers(sdk: Sdk) -> dict[str, Any]:
    """Headers with which the client would describe this machine to every server; they are removed."""
    omit = import_module(sdk).Omit
    return {f"X-Stainless-{name}": omit() for name in _TELEMETRY_HEADERS}


class _ErrorTranslator:
    """Turns what the client raises into errors of ours."""

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
            # A traceback shows the cause in its own words, and those may hold the key.
            raise error from (exc if self._is_secret_free(exc) else None)

    def _translate(self, exc: Exception) -> EngineError | None:
        import aiohttp
        import httpx2

        sdk: Any = import_module(self.sdk)
        if isinstance(exc, sdk.APIStatusError):
            refused = cast("APIStatusError", exc)
            return self.build_error(
                refused.status_code, refused.response.text, refused.response.headers
            )
        if self.streaming and isinstance(exc, httpx2.HTTPError | aiohttp.ClientError):
            words = f"the connection broke in the middle of the answer ({type(exc).__name__})"
            return StreamCut(words, provider=self.provider, retryable=True)
        if isinstance(exc, sdk.APIConnectionError | aiohttp.ClientError):
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
        import aiohttp

        # The client takes some broken connections for timeouts; their first cause knows better.
        first = _find_root_cause(exc)
        late = isinstance(exc, import_module(self.sdk).APITimeoutError)
        broken = isinstance(first, OSError | aiohttp.ClientError)
        # The query and the user name may be secret; scheme, host and path are not.
        url = self._client.base_url
        address = self.redact(str(url.copy_with(query=None, fragment=None, userinfo=b"")))
        message = f"could not reach the server at {address} ({type(first).__name__})"
        if isinstance(first, TimeoutError) or (late and not broken):
            message = f"the server at {address} did not answer in time"
        return Unreachable(message, provider=self.provider, retryable=True)

    def build_error(self, status: int, text: str, headers: Mapping[str, str]) -> EngineError:
        """The error that a refusal in these words is."""
        # Before it is cut to a length as well, which could leave a piece of the key.
        words = {name: self.redact(said) for name, said in parse_error(self.redact(text)).items()}
        message = words.pop("message")
        facts: dict[str, Any] = {
            "provider": self.provider,
            "status": status,
            "request_id": get_request_id(headers),
            **words,
        }
        match status:
            case 401 | 403:
                return NotAuthorised(message, **facts)
            case 429:
                after = _parse_retry_after(headers)
                return RateLimited(message, **facts, retryable=True, retry_after=after)
            case status if status >= 500:
                after = _parse_retry_after(headers)
                permanent = status == 501 or is_permanent_failure(words["code"], message)
                return ServerFailed(message, **facts, retryable=not permanent, retry_after=after)
            case status:
                return RequestRefused(message, **facts, retryable=status in (408, 409))

    def redact(self, text: str) -> str:
        """The words of a server, without the key."""
        return _redact_secret(self.secret, text)


@contextmanager
def tap_request(tap: "WireTap | None", request_body: bytes) -> Generator[None]:
    """Reports a request without a reply, with the message of the error."""
    try:
        yield
    except EngineError as error:
        if tap:
            tap(request_body, error.message.encode(), error.status)
        raise


def _find_root_cause(exc: BaseException) -> BaseException:
    while exc.__cause__ is not None:
        exc = exc.__cause__
    return exc


def _redact_secret(secret: object, text: str) -> str:
    if isinstance(secret, str) and len(secret) > 3 and secret != PLACEHOLDER_KEY:
        return text.replace(secret, "***")
    return text


def is_permanent_failure(code: str, message: str) -> bool:
    """Whether a reported failure is caused by the request, so that the same request fails again."""
    return bool(_PERMANENT_CODES.search(code) or _PERMANENT_REASONS.search(message))


def parse_error(text: str) -> dict[str, str]:
    """What a server says of an error, in whichever shape it says it: message, code, param."""
    members = _parse_object(text)
    inner = members.get("error")
    if isinstance(inner, dict):
        given = cast("dict[str, Any]", inner)
        # Anthropic names its errors by type where others have a code.
        members = {"code": given.get("type"), **given} if members.get("type") == "error" else given
    elif isinstance(inner, str):
        members = {**members, "message": inner}
    message = members.get("message") or members.get("detail") or text
    if not isinstance(message, str):
        message = json.dumps(message)
    return {
        "message": message[:MAX_MESSAGE_LENGTH] or "the server gave no reason",
        "code": _truncate_code(members.get("code")),
        "param": _truncate_code(members.get("param")),
    }


def get_request_id(headers: Mapping[str, str]) -> str:
    """The server's name for a request."""
    return headers.get("x-request-id") or headers.get("request-id", "")


def _parse_object(text: str) -> dict[str, Any]:
    try:
        body = json.loads(text)
    except ValueError:
        return {}
    return cast("dict[str, Any]", body) if isinstance(body, dict) else {}


def _truncate_code(value: object) -> str:
    known = isinstance(value, str | int) and not isinstance(value, bool)
    return str(value)[:MAX_CODE_LENGTH] if known else ""


def _parse_retry_after(headers: Mapping[str, str]) -> float | None:
    try:
        seconds = float(headers.get("retry-after", ""))
    except (TypeError, ValueError):
        return None
    return seconds if isfinite(seconds) and seconds >= 0 else None
