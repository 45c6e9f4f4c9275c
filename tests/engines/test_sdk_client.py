"""Test engines with a client of the openai or anthropic package, which the program creates."""

from base64 import b64encode

import httpx2
import pytest
from openai import AsyncOpenAI
from starlette.requests import Request
from starlette.responses import Response

from engines.fake_server import catch_error, json_response, open_engine, serve_handler
from kedge.engines import ResponsesEngine
from kedge.engines.sdk_client import SdkClient
from kedge.errors import EngineError, NotAuthorized, ServerFailed, StreamCut, Unreachable
from kedge.testing import TestServer
from kedge.turns import Turn, user

KEY = "sk-secret-key"
TURN = Turn([user("What is 2+3?")])


@pytest.mark.parametrize("api", ["sdk openai", "sdk openai over aiohttp", "sdk anthropic"])
async def test_client_of_a_package_sends_requests(kedge_server: TestServer, api: str) -> None:
    """An engine returns the same answers with the client of a package, streamed or not."""
    async with open_engine(api, kedge_server.base_url) as engine:
        turn = await engine.run(TURN)
        turn = await engine.run(turn.append(user("What is 2+4?")), streaming=True)
    assert "5" in str(turn.blocks[1])
    assert "6" in str(turn.blocks[-1])


@pytest.mark.parametrize("api", ["sdk openai", "sdk openai over aiohttp"])
async def test_cut_stream_is_reported(server: TestServer, api: str) -> None:
    """A stream that breaks off is the same error as with Kedge's own client."""
    server.faults.set("cut_after_events=5", times=1)
    async with open_engine(api, server.base_url) as engine:
        with pytest.raises(StreamCut):
            await engine.run(Turn([user("Write 30 words.")]), streaming=True)


@pytest.mark.parametrize("api", ["sdk openai", "sdk openai over aiohttp", "sdk anthropic"])
async def test_unreachable_server_is_reported(api: str) -> None:
    """The error names the address."""
    async with open_engine(api, "http://127.0.0.1:9/v1") as engine:
        with pytest.raises(Unreachable, match=r"could not reach the server at http://127\.0\.0\.1"):
            await engine.run(TURN)


@pytest.mark.parametrize("api", ["sdk openai", "sdk openai over aiohttp", "sdk anthropic"])
async def test_a_response_that_is_not_valid_http_is_reported(api: str) -> None:
    """The server was reached, and a repeated request would fail in the same way."""
    response = b"220 smtp.example.org ESMTP\r\n\r\n"
    error = await catch_error(ServerFailed, response, "not valid HTTP", api=api, max_retries=0)
    assert not error.retryable
    assert "smtp" not in str(error)


@pytest.mark.parametrize("api", ["sdk openai", "sdk anthropic"])
async def test_error_of_the_server_has_no_key(api: str) -> None:
    """A message that repeats the key is an error without it, and without a cause that shows it."""
    refusal = {"error": {"message": f"Incorrect key {KEY}", "type": "invalid_key"}}
    answer = json_response(refusal, 401)
    error = await catch_error(NotAuthorized, answer, r"Incorrect key \*\*\*", api=api, api_key=KEY)
    assert KEY not in f"{error!r} {error.__cause__!r}"


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
    async with open_engine("sdk openai", server.base_url, transport="websocket") as engine:
        turn = await engine.run(TURN)
        turn = await engine.run(turn.append(user("What is 2+4?")))
    assert "6" in str(turn.blocks[-1])
    assert [each.transport for each in server.requests] == ["websocket"] * 2
    assert server.requests[-1].body["previous_response_id"]


async def test_a_request_has_the_login_of_the_address_and_no_telemetry() -> None:
    """The login of a base URL is sent as a header, and those in which a client describes the machine are not."""
    received: list[dict[str, str]] = []

    async def refuse(request: Request) -> Response:
        received.append(dict(request.headers))
        return json_response({"error": {"message": "no"}}, 400)

    with serve_handler(refuse) as url:
        async with open_engine("sdk openai", url.replace("//", "//ada:secret@")) as engine:
            with pytest.raises(EngineError):
                await engine.run(TURN, heal=False)
    [headers] = received
    assert headers["authorization"] == f"Basic {b64encode(b'ada:secret').decode()}"
    telemetry = {"x-stainless-os", "x-stainless-arch", "x-stainless-runtime"}
    assert not telemetry.intersection(headers)
