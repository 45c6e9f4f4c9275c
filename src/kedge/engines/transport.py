"""HTTP transport: sends bodies as bytes through a client, and returns responses whose bodies are not read yet."""

from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Mapping
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeAlias, cast

from kedge.engines.http_errors import get_request_id, parse_object
from kedge.engines.request_body import encode_param
from kedge.engines.response_limit import SizeLimit
from kedge.engines.tool_definitions import encode_tool
from kedge.errors import EngineError, ServerFailed
from kedge.event_loops import PerLoop
from kedge.memory.evidence import read_identity
from kedge.planning import AnchorRecord
from kedge.text.json_text import encode

if TYPE_CHECKING:
    from anthropic import AsyncAnthropic
    from openai import AsyncOpenAI

    from kedge.engines.http_client import HttpClient
    from kedge.engines.request_options import WireTap
    from kedge.engines.sdk_client import Sdk, SdkClient

    Client: TypeAlias = HttpClient | SdkClient
    AnyClient: TypeAlias = Client | AsyncOpenAI | AsyncAnthropic

EVENT_STREAM = "text/event-stream"
_ITEM_LISTS = frozenset({"input", "messages"})
"""The body members that are rendered from blocks."""
_JSON_HEADERS = {"Content-Type": "application/json"}
_STREAM_HEADERS = {**_JSON_HEADERS, "Accept": EVENT_STREAM}


class ClientReply(Protocol):
    """A response whose body is not read yet; it must be closed."""

    @property
    def status_code(self) -> int:
        """The HTTP status."""
        ...

    @property
    def headers(self) -> Mapping[str, str]:
        """The headers, whose names are case-insensitive."""
        ...

    def aiter_bytes(self) -> AsyncGenerator[bytes]:
        """Yield the body as it arrives."""
        ...

    async def aclose(self) -> None:
        """Release the connection."""
        ...


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

    reply: ClientReply
    client: "Client"
    streaming: bool
    """Whether a stream was requested."""
    request_body: bytes = b""
    tap: "WireTap | None" = None

    @property
    def provider(self) -> str:
        """The provider of the response."""
        return self.client.errors.provider

    @property
    def request_id(self) -> str:
        """The server's id of the request."""
        return get_request_id(self.reply.headers)

    @property
    def is_stream(self) -> bool:
        """Whether the body is a stream of events.

        Some servers send the stream that was requested without a content type, or as plain text.
        """
        media_type = self.reply.headers.get("content-type", "").partition(";")[0].strip()
        return self.streaming if media_type in ("", "text/plain") else media_type == EVENT_STREAM

    async def chunks(self) -> AsyncGenerator[bytes]:
        """Yield the body as it arrives."""
        received: list[bytes] = []
        limit = SizeLimit(self.client.max_response_bytes)
        try:
            async with aclosing(self.reply.aiter_bytes()) as chunks:
                async for chunk in chunks:
                    limit.add(chunk)
                    if self.tap:
                        received.append(chunk)
                    yield chunk
        except self.client.read_errors as exc:
            errors = self.client.errors
            raise errors.build_cut(exc) from errors.find_cause(exc)
        finally:
            self._notify_tap(b"".join(received))

    async def body(self) -> bytes:
        """Return the complete body."""
        return b"".join([chunk async for chunk in self.chunks()])

    def _notify_tap(self, body: bytes) -> None:
        if self.tap:
            text = self.client.errors.redact(body.decode("utf-8", "replace"))
            self.tap(self.request_body, text.encode(), self.reply.status_code)

    async def aclose(self) -> None:
        """Release the connection."""
        await self.reply.aclose()


class Transport:
    """Sends requests to one server.

    Args:
        make_client: Returns the client of an event loop: Kedge's own, or one of the openai or anthropic package.
        provider: The name of the provider.
        sdk: The package of a client that is not Kedge's own.
    """

    always_streams: ClassVar[bool] = False
    """Whether responses are always streamed."""

    def __init__(
        self, make_client: "Callable[[], AnyClient]", provider: str, sdk: "Sdk" = "openai"
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
    def client(self) -> "Client":
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
        client = self.client
        headers = _STREAM_HEADERS if streaming else _JSON_HEADERS
        with tap_request(tap, body):
            reply = await client.send("POST", path, body, headers=headers, retry=retry)
        self.identity = read_identity(reply.headers)
        return HttpResponse(reply, client, streaming, body, tap)

    async def get_stream(self, path: str, **query: Any) -> HttpResponse:
        """Request a stream of events that the server has already; the reply must be closed."""
        client = self.client
        reply = await client.send("GET", path, None, headers=_STREAM_HEADERS, query=query)
        self.identity = read_identity(reply.headers)
        return HttpResponse(reply, client, streaming=True)

    async def request_json(self, method: str, path: str, **query: Any) -> dict[str, Any]:
        """Send a request and return the JSON object of the response; ``json`` is its body."""
        body = query.pop("json", None)
        content = None if body is None else encode_body(body)
        client = self.client
        reply = await client.send(method, path, content, headers=_JSON_HEADERS, query=query)
        self.identity = read_identity(reply.headers)
        response = HttpResponse(reply, client, streaming=False)
        try:
            found = parse_object(await response.body())
        finally:
            await response.aclose()
        if not found:
            message = "the server did not answer with a JSON object"
            raise ServerFailed(message, provider=self.provider, retryable=True)
        return found

    def redact(self, text: str) -> str:
        """Return a text of the server without the API key."""
        return self.client.errors.redact(text)

    def build_error(self, status: int, text: str, headers: Mapping[str, str]) -> EngineError:
        """Return the error for a response with an error status."""
        return self.client.errors.build_error(status, text, headers)


def _adapt_client(client: "AnyClient", provider: str, sdk: "Sdk") -> "Client":
    if hasattr(client, "read_errors"):  # one of Kedge's own, whose modules take time to import
        return cast("Client", client)
    from kedge.engines.sdk_client import SdkClient

    return SdkClient(cast("AsyncOpenAI | AsyncAnthropic", client), provider, sdk)


@contextmanager
def tap_request(tap: "WireTap | None", request_body: bytes) -> Generator[None]:
    """Report a request without a reply, with the message of the error."""
    try:
        yield
    except EngineError as error:
        if tap:
            tap(request_body, error.message.encode(), error.status)
        raise


def encode_body(body: Mapping[str, Any]) -> bytes:
    """Return the bytes of a request body.

    Raises:
        InvalidSetting: A parameter is not JSON.
    """
    return b"{%b}" % b",".join([_encode_member(*member) for member in body.items()])


def _encode_member(name: str, value: Any) -> bytes:
    if name in _ITEM_LISTS:
        return b'"%b":%b' % (name.encode(), encode(value))
    if name == "tools" and type(value) is list:
        return b'"tools":[%b]' % b",".join(map(encode_tool, cast("list[Any]", value)))
    return encode_param(name, value)
