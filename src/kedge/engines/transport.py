"""HTTP transport: sends bodies as bytes through a client, and returns responses whose bodies are not read yet."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias, cast

from kedge._internal.event_loops import PerLoop
from kedge._internal.urls import parse_base_url
from kedge.engines.http_errors import ErrorBuilder, parse_object
from kedge.engines.loading import LoadingWait
from kedge.engines.raw_response import EVENT_STREAM, RawResponse, is_event_stream
from kedge.engines.request_body import encode_body
from kedge.errors import EngineError, RequestRefused, ServerFailed
from kedge.evidence.server_evidence import read_identity
from kedge.planning import AnchorRecord
from kedge.turns import Turn

if TYPE_CHECKING:
    from anthropic import AsyncAnthropic
    from openai import AsyncOpenAI

    from kedge.engines.http_client import HttpClient
    from kedge.engines.sdk_client import SdkClient

Sdk = Literal["openai", "anthropic"]
Client: TypeAlias = "HttpClient | SdkClient"
Content = bytes | None
Headers = Mapping[str, str]
Query = Mapping[str, Any] | None
AnyClient: TypeAlias = "Client | AsyncOpenAI | AsyncAnthropic"


KEEP_ALIVE = 4.0
"""Seconds for which an unused connection stays open: less than the 5 of uvicorn and Node, so that no request meets a
connection that its server is closing."""

_JSON_HEADERS = {"Content-Type": "application/json"}
_STREAM_HEADERS = {**_JSON_HEADERS, "Accept": EVENT_STREAM}


class Transport:
    """Sends requests to one server.

    Args:
        make_client: Returns the client of an event loop: Kedge's own, or one of the openai or anthropic package.
        provider: The name of the provider.
        sdk: The package of a client that is not Kedge's own.
    """

    always_streams: ClassVar[bool] = False
    """Whether responses are always streamed, so that requests do not say it."""

    def __init__(
        self, make_client: Callable[[], AnyClient], provider: str, sdk: Sdk = "openai"
    ) -> None:
        self._clients: PerLoop[Client] = PerLoop(
            lambda: _adapt_client(make_client(), provider, sdk), lambda client: client.close()
        )
        self.provider = provider
        self.identity: str | None = None
        """The name by which the server identified itself; None before its first answer."""

    async def aclose(self) -> None:
        """Close the connections of the running loop."""
        await self._clients.aclose()

    @property
    def client(self) -> Client:
        """The client of the running loop."""
        return self._clients.get()

    def live_anchors(self, turn: Turn) -> tuple[AnchorRecord, ...]:
        """Return the unstored records of a Turn that a live connection remembers: over HTTP there are none."""
        return ()

    async def send(
        self,
        path: str,
        body: bytes | None = None,
        *,
        method: str = "POST",
        streaming: bool = False,
        retry: bool = True,
        query: Query = None,
        parent_id: str | None = None,
    ) -> RawResponse:
        """Send a request; the reply must be closed.

        Args:
            path: The path below the address of the server.
            body: The body, if it has one.
            method: The HTTP method.
            streaming: Whether a stream is requested.
            retry: Whether a request that fails for a temporary reason is repeated.
            query: The parameters of the URL.
            parent_id: The response that a new response continues, or an empty string; None for all other requests.
        """
        headers = _STREAM_HEADERS if streaming else _JSON_HEADERS
        client = self._clients.get()
        url = build_url(client.errors, path)
        loading = LoadingWait()
        while True:
            try:
                reply = await client.send(method, url, body, headers, query=query, retry=retry)
                break
            except EngineError as error:
                if not (retry and client.max_retries):
                    raise
                await loading.pause(error)
        self.identity = read_identity(reply.headers)
        reply.is_stream = is_event_stream(reply.headers, requested=streaming)
        return reply

    async def request_json(self, method: str, path: str, **query: Any) -> dict[str, Any]:
        """Send a request and return the JSON object of the response; ``json`` is its body."""
        content = None
        body = query.pop("json", None)
        if body is not None:
            content = encode_body(body)
        reply = await self.send(path, content, method=method, query=query)
        members = parse_object(await reply.read())
        if not members:
            message = "the server did not answer with a JSON object"
            raise ServerFailed(message, provider=self.provider, retryable=True)
        return members


def build_url(errors: ErrorBuilder, path: str) -> str:
    """Return the URL of a path below the address of a server.

    Raises:
        RequestRefused: The path, which may contain the id of an imported object, would lead elsewhere.
    """
    try:
        return parse_base_url(errors.base_url).join(path)
    except ValueError as error:
        message = f"there is no such object: {error}"
        raise RequestRefused(message, provider=errors.provider, status=404) from None


def _adapt_client(client: AnyClient, provider: str, sdk: Sdk) -> Client:
    if hasattr(client, "read_errors"):  # one of Kedge's own, whose modules take time to import
        return cast("Client", client)
    from kedge.engines.sdk_client import SdkClient

    return SdkClient(cast("AsyncOpenAI | AsyncAnthropic", client), provider, sdk)
