"""Test the HTTP client: its headers, proxies, retries and the bodies of errors."""

import asyncio
import json
import socket
import threading

import aiohttp
import pytest
from starlette.requests import Request
from starlette.responses import Response

from engines.fake_server import (
    TURN,
    RecordingServer,
    catch_error,
    json_response,
    serve_bytes,
    serve_handler,
)
from for_each import for_each
from kedge.engines.http_client import (
    MAX_RETRY_AFTER,
    HttpClient,
    Timeouts,
    find_proxy,
)
from kedge.engines.http_errors import ErrorBuilder
from kedge.engines.transport import MAX_ERROR_BYTES
from kedge.errors import CannotConnect, EngineError, RequestRefused, StreamCut, Unreachable
from kedge.events import ResponseStarted
from kedge.providers import connect


@for_each(
    ("status", "headers", "expected"),
    [
        (400, {}, 1),
        (503, {"retry-after-ms": "1"}, 2),
        (409, {"retry-after-ms": "1"}, 2),
        (422, {"retry-after-ms": "1"}, 1),
        (422, {"retry-after-ms": "1", "x-should-retry": "true"}, 2),
        (503, {"retry-after-ms": "1", "x-should-retry": "false"}, 1),
        (503, {"retry-after": str(MAX_RETRY_AFTER + 1)}, 1),
    ],
)
async def test_server_decides_about_retries(
    status: int, headers: dict[str, str], expected: int
) -> None:
    """A temporary error is repeated, unless the server says otherwise or requests a long delay."""
    server = RecordingServer(Response("busy", status, headers))
    await catch_error(EngineError, server.handle, max_retries=1)
    assert len(server.bodies) == expected


@pytest.mark.parametrize("length", [3 * MAX_ERROR_BYTES, 10])
async def test_error_with_an_unusual_body_has_its_status(length: int) -> None:
    """A long body is read in part, and one that breaks off as far as it arrived."""
    body = b"x" * min(length, 2 * MAX_ERROR_BYTES)
    head = f"HTTP/1.1 400 Bad\r\nContent-Length: {length + 1}\r\n\r\n".encode()
    assert (await catch_error(RequestRefused, head + body, r"x{10}")).status == 400


@pytest.mark.parametrize(
    "url", ["http://", "ftp://host/v1", "http://host/v1?a=b", "http://a\\b/v1"]
)
def test_invalid_address_is_reported_at_once(url: str) -> None:
    """An address that is not a base URL is rejected before anything is sent."""
    with pytest.raises(CannotConnect, match="the address is invalid: it must"):
        connect(f"responses:{url}#m")


async def test_headers_of_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """The headers of settings replace those of the environment, in any case; None removes one."""
    received: dict[str, str] = {}

    async def refuse(request: Request) -> Response:
        assert len(request.headers.getlist("user-agent")) == 1
        received.update(request.headers)
        return json_response({"error": {"message": "no"}}, 400)

    monkeypatch.setenv("OPENAI_CUSTOM_HEADERS", "X-Team: red\nX-Gone: yes\nnonsense")
    monkeypatch.setenv("OPENAI_ORG_ID", "org-1")
    headers = {"x-team": "blue", "X-Gone": None, "user-agent": "mine/1"}
    with serve_handler(refuse) as url:
        settings = {"base_url": url, "api_key": "sk-1", "default_headers": headers}
        async with connect("openai:gpt-5.1", **settings) as engine:
            with pytest.raises(RequestRefused):
                await engine.run(TURN)
    assert received["authorization"] == "Bearer sk-1"
    assert received["openai-organization"] == "org-1"
    assert received["x-team"] == "blue"
    assert received["user-agent"] == "mine/1"
    assert "x-gone" not in received


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("https://api.openai.com/v1", "http://proxy:3128"),
        ("http://localhost:8484/v1", None),
        ("https://models.internal:8443/v1", None),
    ],
)
def test_proxies_of_the_environment(
    monkeypatch: pytest.MonkeyPatch, url: str, expected: str | None
) -> None:
    """``HTTPS_PROXY`` and ``NO_PROXY`` have their usual meaning."""
    for name in ("http_proxy", "HTTP_PROXY", "no_proxy", "https_proxy", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy:3128")
    monkeypatch.setenv("NO_PROXY", "localhost,.internal")
    assert find_proxy(url) == expected


async def test_request_is_sent_through_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request goes to the proxy that the environment names, which answers for the host."""
    item = {"type": "message", "role": "assistant", "content": "5", "id": "m"}
    body = json.dumps({"id": "resp_1", "status": "completed", "output": [item]}).encode()
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    with serve_bytes(head % len(body) + body) as url:
        monkeypatch.setenv("HTTP_PROXY", url.removesuffix("/v1"))
        monkeypatch.setenv("NO_PROXY", "")
        async with connect("responses:http://model.invalid/v1#m", max_retries=0) as engine:
            turn = await engine.run(TURN)
    assert [block.kind for block in turn.blocks] == ["user", "assistant"]


@pytest.mark.parametrize("retries", [0, 1])
async def test_broken_connection_is_retried(retries: int) -> None:
    """A connection that breaks before an answer is retried as often as ``max_retries`` allows."""
    accepted: list[None] = []

    def close_each() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:  # closed: the test has ended
                return
            accepted.append(None)
            connection.close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=close_each, daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        async with connect(f"responses:{url}#m", max_retries=retries) as engine:
            with pytest.raises(Unreachable):
                await engine.run(TURN)
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(300)
    assert len(accepted) == retries + 1


def test_timeouts_are_read_in_every_form() -> None:
    """A timeout is a number of seconds, None for no limit, or an object of httpx."""
    from httpx2 import Timeout

    assert Timeouts.of(3) == Timeouts(3, 3)
    assert Timeouts.of(None) == Timeouts(None, None)
    assert Timeouts.of(Timeout(30, connect=2)) == Timeouts(2, 30)


async def test_engine_that_is_closed_during_an_answer_reports_a_broken_connection() -> None:
    """Closing an engine in another task ends its streams with an error of the engine."""
    event = {"type": "response.created", "response": {"id": "resp_1", "status": "in_progress"}}
    head = (
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    data = b"data: %s\n\n" % json.dumps(event).encode()
    with serve_bytes(head + b"%x\r\n%s\r\n" % (len(data), data), keep_open=True) as url:
        engine = connect(f"responses:{url}#m")
        async with engine.stream(TURN) as stream:
            async for each in stream:
                if isinstance(each, ResponseStarted):
                    break
            await engine.aclose()
            with pytest.raises(StreamCut, match="the connection broke"):
                await stream.finish()


async def test_closed_client_cannot_reach_its_server() -> None:
    """A request that is repeated after its engine was closed fails with an error of the engine."""
    client = HttpClient(ErrorBuilder("test", "http://127.0.0.1:1", ""), {})
    await client.close()
    with pytest.raises(Unreachable):
        await client.send("GET", "/models", headers={})


async def test_timeout_of_a_connection_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that times out is reported as such, although its root cause is a cancellation."""

    async def time_out(*_: object, **__: object) -> None:
        raise aiohttp.ConnectionTimeoutError("timeout") from asyncio.CancelledError()

    monkeypatch.setattr(aiohttp.ClientSession, "request", time_out)
    client = HttpClient(ErrorBuilder("test", "http://127.0.0.1:1", ""), {}, max_retries=0)
    with pytest.raises(Unreachable, match="did not answer in time"):
        await client.send("GET", "/models", headers={})
    await client.close()
