"""Test the sender that replaces the HTTP layers of the openai client."""

import gzip
import json
import socket
import threading
from typing import Any

import httpx2
import pytest
from openai import AsyncOpenAI
from starlette.requests import Request
from starlette.responses import Response

from engines.fake_server import json_response, serve_bytes, serve_handler
from kedge.engines import ResponsesEngine
from kedge.engines.direct_sender import get_retry_delay
from kedge.errors import RateLimited, RequestRefused, Unreachable
from kedge.providers import connect
from kedge.turns import Turn, user

TURN = Turn([user("What is 2+3?")])
ITEM = {"type": "message", "role": "assistant", "content": "5", "id": "m"}
ANSWER = {"id": "resp_1", "status": "completed", "output": [ITEM]}
CONNECTION_HEADERS = {"accept-encoding", "connection", "content-length", "host"}


class RecordingServer:
    """A server that records the headers of every request."""

    def __init__(self, *failures: Response) -> None:
        self.failures = list(failures)
        self.headers: list[dict[str, str]] = []

    async def handle(self, request: Request) -> Response:
        """Return the next failure, or an answer if none is left."""
        self.headers.append(dict(request.headers))
        await request.body()
        return self.failures.pop(0) if self.failures else json_response(ANSWER)


async def test_headers_are_those_of_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the client or the sender sends a request, its headers are the same."""
    settings: dict[str, Any] = {
        "api_key": "sk-test-1",
        "default_headers": {"X-Team": "harbour", "accept": "text/plain"},
        "organization": "org_1",
        "timeout": 33,
    }
    server = RecordingServer()
    with serve_handler(server.handle) as url:
        async with connect(f"responses:{url}#m", **settings) as engine:
            await engine.run(TURN)
        # With a proxy in the environment, the client sends the request itself.
        monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
        async with connect(f"responses:{url}#m", **settings) as engine:
            await engine.run(TURN)
    ours, theirs = (
        {name: value for name, value in headers.items() if name not in CONNECTION_HEADERS}
        for headers in server.headers
    )
    assert ours == theirs
    assert (ours["authorization"], ours["x-team"]) == ("Bearer sk-test-1", "harbour")
    assert "x-stainless-os" not in ours


async def test_proxy_of_the_environment_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request goes to the proxy that the environment names, which answers for the host."""
    body = json.dumps(ANSWER).encode()
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    with serve_bytes(head % len(body) + body) as url:
        monkeypatch.setenv("HTTP_PROXY", url.removesuffix("/v1"))
        monkeypatch.setenv("NO_PROXY", "")
        async with connect("responses:http://model.invalid/v1#m", max_retries=0) as engine:
            turn = await engine.run(TURN)
    assert [block.kind for block in turn.blocks] == ["user", "assistant"]


async def test_client_of_the_caller_sends_its_requests_itself() -> None:
    """The hooks of a client that the caller created are called."""
    seen: list[str] = []

    async def record(request: httpx2.Request) -> None:
        seen.append(request.url.path)

    def make_client() -> AsyncOpenAI:
        http_client = httpx2.AsyncClient(event_hooks={"request": [record]})
        return AsyncOpenAI(base_url=url, api_key="any", http_client=http_client)

    with serve_handler(RecordingServer().handle) as url:
        async with ResponsesEngine("m", make_client=make_client, scope="s") as engine:
            await engine.run(TURN)
    assert seen == ["/v1/responses"]


async def test_retries_are_counted_in_a_header() -> None:
    """Each retry of a request tells the server its number."""
    busy = {"retry-after-ms": "1"}
    server = RecordingServer(Response("", 503, busy), Response("", 409, busy))
    with serve_handler(server.handle) as url:
        async with connect(f"responses:{url}#m") as engine:
            await engine.run(TURN)
    counts = [headers["x-stainless-retry-count"] for headers in server.headers]
    assert counts == ["0", "1", "2"]


async def test_long_wait_is_left_to_the_caller() -> None:
    """A server that demands a wait of hours gets no retry; the error has the number of seconds."""
    server = RecordingServer(Response("", 429, {"retry-after": "7200"}))
    with serve_handler(server.handle) as url:
        async with connect(f"responses:{url}#m") as engine:
            with pytest.raises(RateLimited) as exc_info:
                await engine.run(TURN)
    assert exc_info.value.retry_after == 7200
    assert len(server.headers) == 1


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


async def test_compressed_error_is_read() -> None:
    """The message of an error is read from a compressed body too."""
    body = gzip.compress(b'{"error": {"message": "no such model", "code": "model_not_found"}}')
    server = RecordingServer(Response(body, 404, {"content-encoding": "gzip"}))
    with serve_handler(server.handle) as url:
        async with connect(f"responses:{url}#m") as engine:
            with pytest.raises(RequestRefused, match="no such model") as exc_info:
                await engine.run(TURN)
    assert exc_info.value.code == "model_not_found"


@pytest.mark.parametrize(
    ("status", "headers", "expected"),
    [
        (500, {}, 0),
        (408, {"retry-after": "3"}, 3),
        (400, {}, None),
        (501, {"x-should-retry": "false"}, None),
        (400, {"x-should-retry": "true"}, 0),
        (429, {"retry-after": "121"}, None),
        (429, {"retry-after": "120"}, 120),
    ],
)
def test_retry_delay(status: int, headers: dict[str, str], expected: float | None) -> None:
    """Temporary failures are retried, unless the server objects or demands a long wait."""
    assert get_retry_delay(status, headers) == expected
