"""Send requests through a client of the openai or anthropic package, which a program passes to an engine.

Requests are sent as JSON through the client's low-level ``post``, and responses are read as bytes: the
typed layer of the client costs a millisecond for each item of input. The two clients are generated from
the same template, so that one class serves both.
"""

import sys
from contextlib import aclosing
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

import h11
import httpx2

from kedge._internal.urls import parse_base_url
from kedge.engines.http_errors import ErrorBuilder, find_root_cause, find_secrets
from kedge.engines.raw_response import RawResponse
from kedge.engines.response_bytes import read_start, resolve_limit
from kedge.engines.transport import Content, Headers, Query, Sdk
from kedge.errors import EngineError

if TYPE_CHECKING:
    from anthropic import AsyncAnthropic
    from openai import APIStatusError, AsyncOpenAI
    from websockets.asyncio.client import ClientConnection

    from kedge.engines.http_client import Timeouts

_ROOT_ERRORS: dict[Sdk, str] = {"openai": "OpenAIError", "anthropic": "AnthropicError"}
"""The base class of each client's errors."""
_TELEMETRY_HEADERS = (
    "Lang", "Package-Version", "OS", "Arch", "Runtime", "Runtime-Version", "Async",
)  # fmt: skip


class SdkClient:
    """Sends requests through a client of the openai or anthropic package.

    Args:
        client: The client.
        provider: The name of the provider, for errors.
        sdk: The package of the client.
        max_response_bytes: The maximum size of a response; None for the default.
    """

    def __init__(
        self,
        client: "AsyncOpenAI | AsyncAnthropic",
        provider: str,
        sdk: Sdk,
        max_response_bytes: int | None = None,
    ) -> None:
        self.client: Any = client
        self.max_response_bytes = resolve_limit(max_response_bytes)
        _limit_errors(self.client)
        self._provider = provider
        self._sdk: Sdk = sdk
        self.read_errors: tuple[type[Exception], ...] = (httpx2.HTTPError, *_get_aiohttp_errors())

    @property
    def errors(self) -> ErrorBuilder:
        """Builds the errors of requests; a client can change its key."""
        secrets = find_secrets(getattr(self.client, "_custom_headers", {}))
        return ErrorBuilder(self._provider, str(self.client.base_url), self.client.api_key, secrets)

    async def send(
        self,
        method: str,
        url: str,
        content: Content,
        headers: Headers,
        *,
        query: Query,
        retry: bool,
    ) -> RawResponse:
        """Send a request and return the response, which has a status of success.

        Raises:
            EngineError: The server cannot be reached, or answered with an error.
        """
        errors = self.errors
        members: dict[str, Any] = {
            "cast_to": httpx2.Response,
            "options": self._build_options(errors.base_url, headers, query=query, retry=retry),
        }
        if method != "delete":
            members["stream"] = True
            members["stream_cls"] = import_module(self._sdk).AsyncStream[object]
        if content is not None:
            members["content"] = content
        send = getattr(self.client, method.lower())
        try:
            # The URL is complete: the client is slow at joining a path to its base URL.
            response = await send(url, **members)
        except Exception as exc:
            error = self._translate(exc)
            if error is None:
                raise
            raise error from errors.find_cause(exc)
        source = response.aiter_bytes()

        async def release() -> None:
            await source.aclose()
            await response.aclose()

        return RawResponse(
            self, errors, source, release, response.headers, status=response.status_code
        )

    def _build_options(
        self, base_url: str, headers: Headers, *, query: Query, retry: bool
    ) -> dict[str, Any]:
        all_headers = {**headers, **no_telemetry_headers(self._sdk)}
        login = parse_base_url(base_url).authorization
        if login:
            all_headers["Authorization"] = login
        options: dict[str, Any] = {
            "headers": all_headers,
            # A redirect would send the conversation, and keys in other headers, to another server.
            "follow_redirects": False,
        }
        if query:
            options["params"] = query
        if not retry:
            options["max_retries"] = 0
        return options

    @property
    def max_retries(self) -> int:
        """How many times a request is repeated."""
        return self.client.max_retries

    @property
    def timeouts(self) -> "Timeouts":
        """How long to wait."""
        from kedge.engines.http_client import Timeouts

        return Timeouts.of(self.client.timeout)

    async def open_socket(self, url: str, **options: Any) -> "ClientConnection":
        """Open a WebSocket with the key of the client, which it may renew; the client knows the URL."""
        manager = self.client.responses.connect(
            extra_headers=no_telemetry_headers("openai"), websocket_connection_options=options
        )
        return (await manager.enter())._connection  # noqa: SLF001 - the layer above would parse every message

    async def close(self) -> None:
        """Close the connections."""
        await self.client.close()

    def _translate(self, exc: Exception) -> EngineError | None:
        sdk: Any = import_module(self._sdk)
        if isinstance(exc, sdk.APIStatusError):
            response = cast("APIStatusError", exc).response
            url = str(response.request.url)
            return self.errors.build_error(
                response.status_code, response.text, response.headers, url=url
            )
        if isinstance(exc, (sdk.APIConnectionError, *_get_aiohttp_errors())):
            parser_error = _find_parser_error(exc)
            if parser_error is not None:
                return self.errors.build_invalid_response(parser_error)
            # The client reports some broken connections as timeouts; the root cause shows which they are.
            broken = isinstance(find_root_cause(exc), (OSError, *_get_aiohttp_errors()))
            timed_out = isinstance(exc, sdk.APITimeoutError) and not broken
            return self.errors.build_unreachable(exc, timed_out=timed_out)
        if isinstance(exc, getattr(sdk, _ROOT_ERRORS[self._sdk])):
            return EngineError(self.errors.redact(str(exc)), provider=self._provider)
        return None


@cache
def no_telemetry_headers(sdk: Sdk) -> dict[str, Any]:
    """Return the headers with which the client would describe this machine, so that they are omitted."""
    omit = import_module(sdk).Omit
    return {f"X-Stainless-{name}": omit() for name in _TELEMETRY_HEADERS}


def _limit_errors(client: Any) -> None:
    """Limit the bodies of errors, which the client reads completely, by an event hook of its HTTP client."""
    http_client = client._client  # noqa: SLF001
    hooks: dict[str, list[Any]] = http_client.event_hooks
    if _limit_error not in hooks["response"]:
        http_client.event_hooks = {**hooks, "response": [*hooks["response"], _limit_error]}


async def _limit_error(response: httpx2.Response) -> None:
    if response.is_error:
        async with aclosing(
            httpx2.Response(response.status_code, headers=response.headers, stream=response.stream)
        ) as received:
            body = await read_start(received.aiter_bytes(), (httpx2.HTTPError,))
        response.headers.pop("content-encoding", None)
        response.stream = httpx2.ByteStream(body)


def _find_parser_error(exc: Exception) -> Exception | None:
    """Return the error of the parser of h11 or aiohttp that has led to another one, if any."""
    aiohttp_errors: Any = sys.modules.get("aiohttp.http_exceptions")
    kinds: tuple[type[Exception], ...] = (h11.RemoteProtocolError,)
    if aiohttp_errors is not None:
        kinds = (*kinds, aiohttp_errors.HttpProcessingError)
    error: BaseException | None = exc
    while error is not None:
        if isinstance(error, kinds):
            return cast("Exception", error)
        error = error.__cause__ or error.__context__
    return None


def _get_aiohttp_errors() -> tuple[type[Exception], ...]:
    """Return the base class of the errors of aiohttp, if a client uses it."""
    aiohttp: Any = sys.modules.get("aiohttp")
    if aiohttp is None:
        return ()
    return (aiohttp.ClientError,)
