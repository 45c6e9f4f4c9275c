"""HTTP transport: sends bodies as bytes through a client, and returns responses whose bodies are not read yet."""

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias, cast

from kedge.engines.http_errors import parse_object
from kedge.engines.request_options import encode_params, encode_tool
from kedge.engines.response import EVENT_STREAM, RawResponse
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

_ITEM_LISTS = frozenset({"input", "messages"})
"""The body members that are rendered from blocks."""
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

    async def create_response(self, content: bytes, parent_id: str, **options: Any) -> RawResponse:
        """Send a request that continues a response; ``options`` are those of ``send``."""
        return await self.send("/responses", content, **options)

    async def send(
        self,
        path: str,
        body: bytes | None = None,
        *,
        method: str = "POST",
        streaming: bool = False,
        retry: bool = True,
        tap: "WireTap | None" = None,
        query: Mapping[str, Any] | None = None,
    ) -> RawResponse:
        """Send a request; the reply must be closed. ``tap`` receives what was sent and received."""
        headers = _STREAM_HEADERS if streaming else _JSON_HEADERS
        try:
            reply = await self.client.send(
                method, path, body, headers=headers, query=query, retry=retry
            )
        except EngineError as error:
            report_failure(tap, body or b"", error)
            raise
        self.identity = read_identity(reply.headers)
        reply.streaming, reply.tap, reply.request_body = streaming, tap, body or b""
        return reply

    async def request_json(self, method: str, path: str, **query: Any) -> dict[str, Any]:
        """Send a request and return the JSON object of the response; ``json`` is its body."""
        body = query.pop("json", None)
        content = None if body is None else encode_body(body)
        found = parse_object(
            await (await self.send(path, content, method=method, query=query)).read()
        )
        if not found:
            message = "the server did not answer with a JSON object"
            raise ServerFailed(message, provider=self.provider, retryable=True)
        return found

    def build_error(self, status: int, text: str, headers: Mapping[str, str]) -> EngineError:
        """Return the error for a response with an error status."""
        return self.client.errors.build_error(status, text, headers)


def _adapt_client(client: "AnyClient", provider: str, sdk: "Sdk") -> "Client":
    if hasattr(client, "read_errors"):  # one of Kedge's own, whose modules take time to import
        return cast("Client", client)
    from kedge.engines.sdk_client import SdkClient

    return SdkClient(cast("AsyncOpenAI | AsyncAnthropic", client), provider, sdk)


def report_failure(tap: "WireTap | None", request_body: bytes, error: EngineError) -> None:
    """Report a request without a reply, with the message of the error."""
    if tap:
        tap(request_body, error.message.encode(), error.status)


def encode_body(body: Mapping[str, Any]) -> bytes:
    """Return the bytes of a request body.

    Raises:
        InvalidSetting: A parameter is not JSON.
    """
    members: list[bytes] = []
    params: dict[str, Any] = {}
    for name, value in body.items():
        if name in _ITEM_LISTS:
            members.append(b'"%b":%b' % (name.encode(), encode(value)))
        elif name == "tools" and type(value) is list:
            listed = map(encode_tool, cast("list[Any]", value))
            members.append(b'"tools":[%b]' % b",".join(listed))
        else:
            params[name] = value
    # The items, which are the longest part, come last.
    return b"{%b}" % b",".join([encode_params(params), *members] if params else members)
