"""Test the maximum size of responses, which applies to their decompressed bytes."""

import gzip
import json
import zlib
from typing import Any

import pytest
from openai import AsyncOpenAI
from starlette.responses import Response
from websockets.asyncio.server import ServerConnection
from websockets.asyncio.server import serve as serve_socket

from engines.fake_server import make_handler, serve_handler
from for_each import for_each
from kedge.engines import AnthropicEngine, Engine, ResponsesEngine, transport
from kedge.engines.sdk_client import SdkClient
from kedge.engines.transport import (
    LIMIT_VARIABLE,
    MAX_ERROR_BYTES,
    PIECE_BYTES,
    SizeLimit,
    make_inflater,
    resolve_limit,
)
from kedge.errors import InvalidSetting, RequestRefused, StreamTooLarge
from kedge.providers import connect
from kedge.turns import Turn, user

TURN = Turn([user("Hi")])
LIMIT = 1_000_000
EVENT = b'data: {"type":"response.in_progress","padding":"%b"}\n\n' % (b"x" * 100_000)


def compress(body: bytes, encoding: str) -> bytes:
    """Return the body in a content encoding."""
    return {"gzip": gzip.compress, "deflate": zlib.compress, "identity": bytes}[encoding](body)


def open_engine(kind: str, url: str, max_bytes: int) -> Engine:
    """Return an engine with Kedge's own client, or with one of a package."""
    if kind == "anthropic":
        address = url.removesuffix("/v1")
        return connect("anthropic:m", base_url=address, api_key="k", max_response_bytes=max_bytes)
    if kind in ("responses", "chat"):
        return connect(f"{kind}:{url}#m", max_response_bytes=max_bytes)
    if kind == "sdk anthropic":
        from anthropic import AsyncAnthropic

        client: Any = AsyncAnthropic(base_url=url.removesuffix("/v1"), api_key="k", max_retries=0)
        make_client: Any = lambda: SdkClient(client, "anthropic", "anthropic", max_bytes)  # noqa: E731
        return AnthropicEngine("m", make_client=make_client, scope="test")
    client = AsyncOpenAI(base_url=url, api_key="k", max_retries=0)
    make_client = lambda: SdkClient(client, "openai", "openai", max_bytes)  # noqa: E731
    return ResponsesEngine("m", make_client=make_client, scope="test")


KINDS = ["responses", "chat", "anthropic", "sdk openai", "sdk anthropic"]


@for_each("kind", KINDS)
@for_each("encoding", ["gzip", "deflate", "identity"])
@for_each("streaming", [False, True])
async def test_a_response_is_limited(kind: str, encoding: str, streaming: bool) -> None:
    """A body or a stream that is larger after decompression is an error, which names the setting."""
    body = EVENT * 50 if streaming else json.dumps({"id": "resp_1", "x": "x" * 5_000_000}).encode()
    content_type = "text/event-stream" if streaming else "application/json"
    headers = {"content-encoding": encoding, "content-type": content_type}
    handler = make_handler(lambda: Response(compress(body, encoding), headers=headers))
    with serve_handler(handler) as url:
        async with open_engine(kind, url, LIMIT) as engine:
            with pytest.raises(StreamTooLarge, match="max_response_bytes") as exc_info:
                await engine.run(TURN, streaming=streaming)
    assert (exc_info.value.limit, exc_info.value.retryable) == (LIMIT, False)
    assert exc_info.value.turn is TURN


@pytest.mark.parametrize("kind", ["sdk openai", "sdk anthropic"])
async def test_the_body_of_an_error_is_read_in_part(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client of a package, which reads errors completely, gets only the start of a large one."""
    monkeypatch.setattr(transport, "MAX_ERROR_BYTES", 100)
    body = gzip.compress(b"x" * MAX_ERROR_BYTES)
    handler = make_handler(lambda: Response(body, 400, {"content-encoding": "gzip"}))
    with serve_handler(handler) as url:
        async with open_engine(kind, url, LIMIT) as engine:
            with pytest.raises(RequestRefused, match=r"x{100}") as exc_info:
                await engine.run(TURN)
    assert "x" * 101 not in str(exc_info.value)


@pytest.mark.parametrize("kind", KINDS)
async def test_the_body_of_an_error_is_decompressed(kind: str) -> None:
    """The message in a compressed error is reported."""
    body = gzip.compress(b'{"error":{"message":"no such model"}}')
    handler = make_handler(lambda: Response(body, 400, {"content-encoding": "gzip"}))
    with serve_handler(handler) as url:
        async with open_engine(kind, url, LIMIT) as engine:
            with pytest.raises(RequestRefused, match="no such model"):
                await engine.run(TURN)


async def test_messages_of_a_websocket_are_limited() -> None:
    """A response of many messages is limited as a stream is."""

    async def answer(connection: ServerConnection) -> None:
        await connection.recv()
        created = {"type": "response.created", "response": {"id": "resp_1"}}
        await connection.send(json.dumps(created))
        while True:
            await connection.send(json.dumps({"type": "response.in_progress", "x": "x" * 100_000}))

    async with serve_socket(answer, "127.0.0.1", 0) as server:
        port = next(iter(server.sockets)).getsockname()[1]
        model = f"responses:http://127.0.0.1:{port}/v1#m"
        settings: Any = {"transport": "websocket", "max_retries": 0}
        async with connect(model, max_response_bytes=LIMIT, **settings) as engine:
            with pytest.raises(StreamTooLarge, match="max_response_bytes"):
                await engine.run(TURN)


def test_the_environment_sets_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """A given limit takes precedence, and an invalid one is an error."""
    monkeypatch.setenv(LIMIT_VARIABLE, " 5000 ")
    assert (resolve_limit(), resolve_limit(7)) == (5000, 7)
    for text in ("0", "-1", "many", "1.5"):
        monkeypatch.setenv(LIMIT_VARIABLE, text)
        with pytest.raises(InvalidSetting, match=LIMIT_VARIABLE):
            resolve_limit()
    with pytest.raises(InvalidSetting, match="max_response_bytes"):
        connect("responses:http://127.0.0.1:1/v1#m", max_response_bytes=0)


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "identity"])
def test_bodies_are_decompressed_in_pieces(encoding: str) -> None:
    """A small chunk does not become a large piece, and all pieces together are the body."""
    body = b"x" * (3 * PIECE_BYTES + 1)
    compressed = compress(body, encoding)
    inflate = make_inflater(encoding)
    assert inflate is not None
    halves = compressed[: len(compressed) // 2], compressed[len(compressed) // 2 :]
    pieces = [piece for half in halves for piece in inflate(half)]
    assert b"".join(pieces) == body
    assert encoding == "identity" or max(map(len, pieces)) <= PIECE_BYTES


def test_the_limit_itself_is_allowed() -> None:
    """Only a byte more than the limit is an error."""
    limit = SizeLimit(10)
    limit.add(b"x" * 10)
    with pytest.raises(StreamTooLarge):
        limit.add(b"x")
