"""The way to a server: a provider's client for authentication, retries and timeouts, bytes for the rest.

Requests go out as plain JSON through the client's low-level ``post`` and answers come back as bytes: the
typed layer of the client costs a millisecond for each item of input. Whatever the client raises becomes
an ``EngineError`` here, with the server's own words and without the key. The clients of openai and of
anthropic are two prints of one pattern, so that one transport serves both.
"""

import json
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Mapping
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from math import isfinite
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

from kedge.errors import (
    EngineError,
    NotAuthorised,
    RateLimited,
    RequestRefused,
    ServerFailed,
    StreamCut,
    Unreachable,
)
from kedge.loops import PerLoop
from kedge.planning import AnchorRecord

if TYPE_CHECKING:
    import httpx2
    from anthropic import AsyncAnthropic
    from openai import APIStatusError, AsyncOpenAI

    from kedge.engines.protocol import Tap

    Client = AsyncOpenAI | AsyncAnthropic

Sdk = Literal["openai", "anthropic"]
_ROOTS: dict[Sdk, str] = {"openai": "OpenAIError", "anthropic": "AnthropicError"}
"""The root of each client's errors."""
NO_KEY = "none"
"""What stands for a key where a server wants none: the client insists on one."""
MAX_WORD = 200
MAX_MESSAGE = 2_000
"""How much of a server's words goes into an error."""
_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode
_TELLTALES = ("Lang", "Package-Version", "OS", "Arch", "Runtime", "Runtime-Version", "Async")


class Answer(Protocol):
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
class Reply:
    """An answer whose body is still on its way; close it when done with it."""

    answer: "httpx2.Response"
    translating: "_Translating"
    sent: bytes = b""
    tap: "Tap | None" = None

    @property
    def provider(self) -> str:
        """Whose answer it is."""
        return self.translating.provider

    @property
    def request_id(self) -> str:
        """The server's name for the request."""
        return request_id(self.answer.headers)

    @property
    def is_stream(self) -> bool:
        """Whether the body is a stream of events."""
        return self.answer.headers.get("content-type", "").startswith("text/event-stream")

    async def chunks(self) -> AsyncGenerator[bytes]:
        """The body as it comes."""
        came: list[bytes] = []
        try:
            with self.translating:
                async with aclosing(self.answer.aiter_bytes()) as chunks:
                    async for chunk in chunks:
                        if self.tap:
                            came.append(chunk)
                        yield chunk
        finally:
            self._tell(b"".join(came))

    async def body(self) -> bytes:
        """The whole body."""
        with self.translating:
            body = await self.answer.aread()
        self._tell(body)
        return body

    def _tell(self, body: bytes) -> None:
        if self.tap:
            words = self.translating.clean(body.decode("utf-8", "replace"))
            self.tap(self.sent, words.encode(), self.answer.status_code)

    async def aclose(self) -> None:
        """Give the connection back."""
        await self.answer.aclose()


class Transport:
    """Sends requests to one server."""

    def __init__(
        self, make_client: "Callable[[], Client]", provider: str, sdk: Sdk = "openai"
    ) -> None:
        self._clients: PerLoop[Client] = PerLoop(make_client, lambda client: client.close())
        self.provider = provider
        self.sdk: Sdk = sdk

    async def aclose(self) -> None:
        """Close the connections of the running loop."""
        await self._clients.aclose()

    @property
    def client(self) -> Any:
        """The client of the running loop."""
        return self._clients.get()

    def packed(self, body: dict[str, Any]) -> bytes:
        """A request for a response, as it is sent."""
        return _encode(body).encode()

    def remembered(self, records: Iterable[AnchorRecord]) -> tuple[AnchorRecord, ...]:
        """The unstored records that a live connection makes good: over HTTP there are none."""
        return ()

    async def respond(
        self,
        content: bytes,
        body: dict[str, Any],
        *,
        retry: bool = True,
        tap: "Tap | None" = None,
    ) -> Answer:
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
        tap: "Tap | None" = None,
    ) -> Reply:
        """Send a request; the reply must be closed. ``tap`` is told what went over the wire."""
        import httpx2

        client: Any = self._clients.get()
        headers = {"Content-Type": "application/json", **unsaid(self.sdk)}
        if streaming:
            headers["Accept"] = "text/event-stream"
        options: Any = {"headers": headers, **({} if retry else {"max_retries": 0})}
        with tapped(tap, body), self._translating(client):
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
        return Reply(answer, self._translating(client, streaming=True), body, tap)

    async def call(self, method: str, path: str, **query: Any) -> dict[str, Any]:
        """Send a small request and return the object that comes back; ``json`` is its body."""
        import httpx2

        client: Any = self._clients.get()
        body = query.pop("json", None)
        options: Any = {"params": query} if query else {}
        with self._translating(client):
            send: Any = getattr(client, method)
            keywords = {"body": body} if body is not None else {}
            response = await send(path, cast_to=httpx2.Response, options=options, **keywords)
        found = _object(response.text)
        if not found:
            words = "the server answered with something that is not what was asked for"
            raise ServerFailed(words, provider=self.provider, retryable=True)
        return found

    def clean(self, words: str) -> str:
        """The words of a server, without the key."""
        return _without(self._clients.get().api_key, words)

    def refusal(self, status: int, text: str, headers: Mapping[str, str]) -> EngineError:
        """The error that a refusal in these words is."""
        return self._translating(self.client).refusal(status, text, headers)

    def _translating(self, client: "Client", *, streaming: bool = False) -> "_Translating":
        return _Translating(self.provider, client.api_key, streaming, self.sdk)


@cache
def unsaid(sdk: Sdk) -> dict[str, Any]:
    """What the client would tell every server about this machine: nobody needs it."""
    omit = import_module(sdk).Omit
    return {f"X-Stainless-{name}": omit() for name in _TELLTALES}


class _Translating:
    """Turns what the client raises into errors of ours."""

    def __init__(self, provider: str, secret: object, streaming: bool, sdk: Sdk) -> None:
        self.provider = provider
        self.secret = secret
        self.streaming = streaming
        self.sdk: Sdk = sdk

    def __enter__(self) -> None:
        pass

    def __exit__(self, exc_type: object, exc: BaseException | None, traceback: object) -> None:
        if exc is None or not isinstance(exc, Exception) or isinstance(exc, EngineError):
            return
        error = self._translated(exc)
        if error is not None:
            # A traceback shows the cause in its own words, and those may hold the key.
            raise error from (exc if self._is_clean(exc) else None)

    def _translated(self, exc: Exception) -> EngineError | None:
        import aiohttp
        import httpx2

        sdk: Any = import_module(self.sdk)
        if isinstance(exc, sdk.APIStatusError):
            refused = cast("APIStatusError", exc)
            return self.refusal(
                refused.status_code, refused.response.text, refused.response.headers
            )
        if self.streaming and isinstance(exc, httpx2.HTTPError | aiohttp.ClientError):
            words = f"the connection broke in the middle of the answer ({type(exc).__name__})"
            return StreamCut(words, provider=self.provider, retryable=True)
        if isinstance(exc, sdk.APIConnectionError | aiohttp.ClientError):
            return self._unreachable(exc)
        if isinstance(exc, getattr(sdk, _ROOTS[self.sdk])):
            return EngineError(self.clean(str(exc)), provider=self.provider)
        return None

    def _is_clean(self, exc: BaseException | None) -> bool:
        while exc is not None:
            if self.clean(str(exc)) != str(exc):
                return False
            exc = exc.__cause__ or exc.__context__
        return True

    def _unreachable(self, exc: Exception) -> Unreachable:
        import aiohttp

        # The client takes some broken connections for timeouts; their first cause knows better.
        first = _first_cause(exc)
        late = isinstance(exc, import_module(self.sdk).APITimeoutError)
        broken = isinstance(first, OSError | aiohttp.ClientError)
        words = f"could not reach the server ({type(first).__name__})"
        if isinstance(first, TimeoutError) or (late and not broken):
            words = "the server did not answer in time"
        return Unreachable(words, provider=self.provider, retryable=True)

    def refusal(self, status: int, text: str, headers: Mapping[str, str]) -> EngineError:
        """The error that a refusal in these words is."""
        # Before it is cut to a length as well, which could leave a piece of the key.
        words = {name: self.clean(said) for name, said in told(self.clean(text)).items()}
        message = words.pop("message")
        facts: dict[str, Any] = {
            "provider": self.provider,
            "status": status,
            "request_id": request_id(headers),
            **words,
        }
        match status:
            case 401 | 403:
                return NotAuthorised(message, **facts)
            case 429:
                after = _seconds(headers)
                return RateLimited(message, **facts, retryable=True, retry_after=after)
            case status if status >= 500:
                after = _seconds(headers)
                return ServerFailed(message, **facts, retryable=True, retry_after=after)
            case status:
                return RequestRefused(message, **facts, retryable=status in (408, 409))

    def clean(self, words: str) -> str:
        """The words of a server, without the key."""
        return _without(self.secret, words)


@contextmanager
def tapped(tap: "Tap | None", sent: bytes) -> Generator[None]:
    """Tells of a request that no reply came to, in the words of the error."""
    try:
        yield
    except EngineError as error:
        if tap:
            tap(sent, error.message.encode(), error.status)
        raise


def _first_cause(exc: BaseException) -> BaseException:
    while exc.__cause__ is not None:
        exc = exc.__cause__
    return exc


def _without(secret: object, words: str) -> str:
    if isinstance(secret, str) and len(secret) > 3 and secret != NO_KEY:
        return words.replace(secret, "***")
    return words


def told(text: str) -> dict[str, str]:
    """What a server says of an error, in whichever shape it says it: message, code, param."""
    members = _object(text)
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
        "message": message[:MAX_MESSAGE] or "the server gave no reason",
        "code": _word(members.get("code")),
        "param": _word(members.get("param")),
    }


def request_id(headers: Mapping[str, str]) -> str:
    """The server's name for a request."""
    return headers.get("x-request-id") or headers.get("request-id", "")


def _object(text: str) -> dict[str, Any]:
    try:
        body = json.loads(text)
    except ValueError:
        return {}
    return cast("dict[str, Any]", body) if isinstance(body, dict) else {}


def _word(value: object) -> str:
    known = isinstance(value, str | int) and not isinstance(value, bool)
    return str(value)[:MAX_WORD] if known else ""


def _seconds(headers: Mapping[str, str]) -> float | None:
    try:
        seconds = float(headers.get("retry-after", ""))
    except (TypeError, ValueError):
        return None
    return seconds if isfinite(seconds) and seconds >= 0 else None
