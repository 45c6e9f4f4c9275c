"""Test engines with a client of the openai or anthropic package, which the program creates."""

from base64 import b64encode

import httpx2
import pytest
from openai import AsyncOpenAI, DefaultAioHttpClient
from starlette.requests import Request
from starlette.responses import Response

from engines.fake_server import json_response, make_handler, serve_handler
from for_each import for_each
from kedge.engines import AnthropicEngine, Engine, ResponsesEngine
from kedge.engines.sdk_client import SdkClient
from kedge.errors import EngineError, NotAuthorized, StreamCut, Unreachable
from kedge.testing import TestServer
from kedge.turns import Turn, user

KEY = "sk-secret-key"
TURN = Turn([user("What is 2+3?")])


def open_engine(base_url: str, api: str = "openai", **settings: object) -> Engine:
    """Return an engine with a client of a package, which sends no retries."""
    if api == "anthropic":
        from anthropic import AsyncAnthropic

        address = base_url.removesuffix("/v1")
        return AnthropicEngine(
            "practice",
            make_client=lambda: AsyncAnthropic(
                base_url=address, api_key=KEY, max_retries=0, timeout=300.0
            ),
            scope="test",
        )
    http_client = None if api == "openai" else DefaultAioHttpClient()
    return ResponsesEngine(
        "practice",
        make_client=lambda: AsyncOpenAI(
            base_url=base_url, api_key=KEY, max_retries=0, http_client=http_client
        ),
        scope="test",
        **settings,  # pyright: ignore[reportArgumentType]
    )


@pytest.mark.parametrize("api", ["openai", "openai over aiohttp", "anthropic"])
async def test_client_of_a_package_sends_requests(kedge_server: TestServer, api: str) -> None:
    """An engine returns the same answers with the client of a package, streamed or not."""
    async with open_engine(kedge_server.base_url, api) as engine:
        turn = await engine.run(TURN)
        turn = await engine.run(turn.append(user("What is 2+4?")), streaming=True)
    assert "5" in str(turn.blocks[1])
    assert "6" in str(turn.blocks[-1])


@pytest.mark.parametrize("api", ["openai", "openai over aiohttp"])
async def test_cut_stream_is_reported(server: TestServer, api: str) -> None:
    """A stream that breaks off is the same error as with Kedge's own client."""
    server.faults.set("cut_after_events=5", times=1)
    async with open_engine(server.base_url, api) as engine:
        with pytest.raises(StreamCut):
            await engine.run(Turn([user("Write 30 words.")]), streaming=True)


@pytest.mark.parametrize("api", ["openai", "openai over aiohttp", "anthropic"])
async def test_unreachable_server_is_reported(api: str) -> None:
    """The error names the address."""
    async with open_engine("http://127.0.0.1:9/v1", api) as engine:
        with pytest.raises(Unreachable, match=r"could not reach the server at http://127\.0\.0\.1"):
            await engine.run(TURN)


@pytest.mark.parametrize("api", ["openai", "anthropic"])
async def test_error_of_the_server_has_no_key(api: str) -> None:
    """A message that repeats the key is an error without it, and without a cause that shows it."""
    refusal = {"error": {"message": f"Incorrect key {KEY}", "type": "invalid_key"}}
    handler = make_handler(lambda: json_response(refusal, 401))
    with serve_handler(handler) as url:
        async with open_engine(url, api) as engine:
            with pytest.raises(NotAuthorized, match=r"Incorrect key \*\*\*") as exc_info:
                await engine.run(TURN)
    assert KEY not in f"{exc_info.value!r} {exc_info.value.__cause__!r}"


async def test_errors_have_no_credentials_of_headers() -> None:
    """The credentials in the headers of the program's client are redacted as its key is."""
    headers = {"Helicone-Auth": "Bearer secret-77", "X-Tag": "harbor"}
    async with AsyncOpenAI(api_key="sk-abcdef", default_headers=headers) as client:
        errors = SdkClient(client, "openai", "openai").errors
        assert errors.redact("secret-77 sk-abcdef harbor") == "*** *** harbor"


async def test_hooks_of_the_client_are_called(kedge_server: TestServer) -> None:
    """The client of the program sends the requests itself, with its own HTTP client."""
    seen: list[str] = []

    async def record(request: httpx2.Request) -> None:
        seen.append(request.url.path)

    def make_client() -> AsyncOpenAI:
        http_client = httpx2.AsyncClient(event_hooks={"request": [record]})
        return AsyncOpenAI(base_url=kedge_server.base_url, api_key="any", http_client=http_client)

    async with ResponsesEngine("practice", make_client=make_client, scope="s") as engine:
        await engine.run(TURN)
    assert seen[-1] == "/v1/responses"


async def test_client_of_the_openai_package_opens_websockets(server: TestServer) -> None:
    """Responses are sent over WebSocket with the key of the client, without telemetry."""
    async with open_engine(server.base_url, transport="websocket") as engine:
        turn = await engine.run(TURN)
        turn = await engine.run(turn.append(user("What is 2+4?")))
    assert "6" in str(turn.blocks[-1])
    assert [each.transport for each in server.requests] == ["websocket"] * 2
    assert server.requests[-1].body["previous_response_id"]


@for_each("api", ["openai", "openai over aiohttp", "anthropic"])
@for_each("status", [302, 307])
async def test_redirect_is_not_followed(api: str, status: int) -> None:
    """A client that follows redirects would send the conversation, and the key of Anthropic's API, elsewhere."""
    received: list[str] = []

    async def record(request: Request) -> Response:
        received.append(request.url.path)
        return json_response({})

    with serve_handler(record) as other:
        headers = {"location": f"{other}/responses"}
        moved = make_handler(lambda: Response(status_code=status, headers=headers))
        with serve_handler(moved) as base_url:
            async with open_engine(base_url, api) as engine:
                with pytest.raises(EngineError, match="redirects are not followed") as exc_info:
                    await engine.run(TURN)
    assert (received, exc_info.value.status) == ([], status)


async def test_a_request_has_the_login_of_the_address_and_no_telemetry() -> None:
    """The login of a base URL is sent as a header, and those in which a client describes the machine are not."""
    received: list[dict[str, str]] = []

    async def refuse(request: Request) -> Response:
        received.append(dict(request.headers))
        return json_response({"error": {"message": "no"}}, 400)

    with serve_handler(refuse) as url:
        async with open_engine(url.replace("//", "//ada:secret@")) as engine:
            with pytest.raises(EngineError):
                await engine.run(TURN)
    [headers] = received
    assert headers["authorization"] == f"Basic {b64encode(b'ada:secret').decode()}"
    telemetry = {"x-stainless-os", "x-stainless-arch", "x-stainless-runtime"}
    assert not telemetry.intersection(headers)
