"""Tests of named tokens for `kedge proxy`: separate indexes, request lists and limits for each user."""

import asyncio
import gzip
import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest
from openai import OpenAI
from websockets.asyncio.client import connect as connect_socket
from websockets.exceptions import InvalidStatus

from chaining.proxy.running import open_asgi, open_store, serve_proxy
from chaining.proxy.test_app import input_sizes, send
from for_each import for_each
from kedge.chaining.proxy.access import create_policy
from kedge.chaining.proxy.token_counts import UsageReader, estimate_tokens
from kedge.errors import StoreBusy
from kedge.server.access import DEFAULT_OUTPUT_TOKENS
from kedge.server.models import PracticeModel
from kedge.server.settings import Limits
from kedge.store import Store, TokenRegistry, token_registry
from kedge.testing import TestServer, serve
from server.gated_model import GatedModel
from server.waiting import TIMEOUT, wait_until, wait_until_async


@dataclass
class Proxy:
    """A proxy with named tokens in front of a server with a gated model."""

    server: TestServer
    model: Any
    store: Store
    url: str
    http: httpx2.Client

    @property
    def registry(self) -> TokenRegistry:
        """The tokens."""
        return TokenRegistry(self.store)

    def add(self, name: str, **options: Any) -> str:
        """Add a token."""
        return asyncio.run(self.registry.add(name, **options))[1]

    def make_headers(self, token: str) -> dict[str, str]:
        """Return the headers of a request with a token."""
        key = {"authorization": "Bearer upstream-key", "anthropic-version": "2023-06-01"}
        return {"x-kedge-token": token, **key}

    def post(self, token: str, path: str = "/v1/responses", **body: Any) -> httpx2.Response:
        """Send a request with a token."""
        content = {"model": "practice", **(body or {"input": "Hi"})}
        return self.http.post(self.url + path, headers=self.make_headers(token), json=content)

    @contextmanager
    def stream(self, token: str, path: str, **body: Any) -> Iterator[Iterator[bytes]]:
        """Request a stream with a token, and yield its chunks."""
        content = {"model": "m", "stream": True, **body}
        headers = self.make_headers(token)
        with self.http.stream("POST", self.url + path, headers=headers, json=content) as stream:
            yield stream.iter_bytes()

    def connect(self, token: str) -> Any:
        """Open a WebSocket with a token."""
        url = f"{self.url.replace('http', 'ws', 1)}/v1/responses"
        return connect_socket(url, additional_headers=self.make_headers(token))

    def client(self, token: str) -> OpenAI:
        """Open a client of a user; all users have the same API key of the upstream."""
        url = f"{self.url}/v1"
        headers = {"x-kedge-token": token}
        return OpenAI(base_url=url, api_key="upstream-key", max_retries=0, default_headers=headers)

    def get_tokens(self, name: str) -> int:
        """Return the counted tokens of a user."""
        return asyncio.run(self.registry.count(name)).tokens


@contextmanager
def open_proxy(tmp_path: Path, model: Any, **options: Any) -> Iterator[Proxy]:
    """Run a proxy that requires a token."""
    with (
        open_store(tmp_path) as store,
        serve(model=model, limits=Limits(shutdown_seconds=0)) as server,
        serve_proxy(server.base_url, store=store, **{"requires_token": True, **options}) as url,
        httpx2.Client(timeout=TIMEOUT, verify=False) as http,
    ):
        yield Proxy(server, model, store, url, http)


@pytest.fixture
def proxy(tmp_path: Path) -> Iterator[Proxy]:
    """Yield a proxy in front of a server with the practice model."""
    with open_proxy(tmp_path, PracticeModel(), token="admin") as opened:
        yield opened


PATHS = ["/v1/responses", "/v1/chat/completions", "/v1/messages"]


def make_body(path: str, text: str) -> dict[str, Any]:
    """Return the body of a request of an API."""
    if path == "/v1/responses":
        return {"input": text}
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 99}


def test_users_share_neither_anchors_nor_lists(proxy: Proxy) -> None:
    """Users are separate although they use the same API key, and the token is not forwarded."""
    alice = proxy.add("alice")
    bob = proxy.add("bob")
    history: list[Any] = []
    for token in (alice, alice, bob, "admin"):
        with proxy.client(token) as client:
            send(client, history, "Say it")
    assert input_sizes(proxy.server) == [1, 1, 5, 7]
    with proxy.client(alice) as client:
        send(client, history[:4], "Say it again")
    assert input_sizes(proxy.server)[4:] == [1]
    for request in proxy.server.requests:
        assert "x-kedge-token" not in request.headers
        assert request.headers["authorization"] == "Bearer upstream-key"

    async def count(name: str) -> int:
        store = proxy.store.use_namespace(name) if name else proxy.store
        return (await store.sum_proxied()).requests

    async def read() -> list[int]:
        return [await count(name) for name in ("alice", "bob", "")]

    wait_until(lambda: asyncio.run(read()) == [3, 1, 1])  # recorded beside the requests


def test_scopes_and_revocation(proxy: Proxy) -> None:
    """Requests need the scope `server`, and the metrics of all users need `metrics`."""
    alice = proxy.add("alice")
    ops = proxy.add("ops", user="", scopes=["metrics"])
    for token, *expected in (
        (alice, 200, 403, 403, 200),
        (ops, 403, 200, 200, 200),
        ("admin", 200, 200, 200, 200),
        ("kedge_wrong", 401, 401, 401, 200),
        ("", 401, 401, 401, 200),
    ):
        paths = ("/v1/models", "/metrics", "/report", "/healthz")
        headers = {"x-kedge-token": token}
        answers = [proxy.http.get(proxy.url + path, headers=headers) for path in paths]
        assert [answer.status_code for answer in answers] == expected
    asyncio.run(proxy.registry.revoke("alice"))
    assert proxy.post(alice).status_code == 401


def test_a_replaced_store_is_noticed(
    tmp_path: Path, server: TestServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens of a file that was removed are not accepted, nor is a request without one, and the health check fails."""
    monkeypatch.setattr(token_registry, "RECHECK_SECONDS", 0.0)
    with (
        serve_proxy(server.base_url, store=tmp_path / "store.db") as proxy_url,
        httpx2.Client() as http,
    ):
        assert http.get(f"{proxy_url}/healthz").json() == {"status": "ok"}
        assert http.get(f"{proxy_url}/v1/models").status_code == 200
        for file in tmp_path.glob("store.db*"):
            file.unlink()
        answer = http.get(f"{proxy_url}/healthz")
        assert (answer.status_code, answer.json()["status"]) == (503, "unavailable")
        for headers in ({}, {"x-kedge-token": "kedge_unknown"}):
            rejected = http.get(f"{proxy_url}/v1/models", headers=headers)
            assert rejected.status_code == 503
            assert "was removed or replaced" in rejected.text
            assert str(tmp_path) not in rejected.text


@for_each("stream", [False, True])
@for_each("path", PATHS)
def test_tokens_of_every_api_are_counted(proxy: Proxy, path: str, stream: bool) -> None:
    """Tokens are counted from the body or events of the response, if the token has a limit."""
    body: dict[str, Any] = {**make_body(path, "Hi"), "stream": stream}
    name = f"limited-{stream}{path.replace('/', '-')}"
    limited = proxy.add(name, tokens_per_minute=1_000_000)

    def is_counted() -> bool:
        """Send a request; it is counted in the minute of its last byte."""
        assert proxy.post(limited, path, **body).status_code == 200
        return proxy.get_tokens(name) > 0

    wait_until(is_counted)
    free = proxy.add(f"free-{name}")
    assert proxy.post(free, path, **body).status_code == 200
    assert proxy.get_tokens(f"free-{name}") == 0


async def test_messages_of_a_websocket_are_counted(proxy: Proxy) -> None:
    """Each message is a request: rejected above the limit, and after the token was revoked."""
    options: Any = {"requests_per_minute": 1, "tokens_per_minute": 1_000_000}
    _, secret = await proxy.registry.add("alice", **options)

    async def ask(socket: Any) -> dict[str, Any]:
        await socket.send(json.dumps({"type": "response.create", "model": "m", "input": "Hi"}))
        while True:
            event = json.loads(await socket.recv())
            if event["type"] in ("response.completed", "error"):
                return event

    with pytest.raises(InvalidStatus):
        await proxy.connect("")
    async with proxy.connect(secret) as socket:
        events = [await ask(socket) for _ in range(3)]
        assert events[0]["type"] == "response.completed"
        rejected = next(event for event in events if event["type"] == "error")
        assert rejected["status"] == 429
        assert int(rejected["error"]["headers"]["retry-after"]) > 0
        await proxy.registry.revoke("alice")
        assert (await ask(socket))["status"] == 401
    async with proxy.connect("admin") as socket:
        assert (await ask(socket))["type"] == "response.completed"


@for_each(
    "event",
    [
        {"type": "response.output_text.delta", "delta": "word " * 100, "item_id": "msg_1"},
        {"choices": [{"delta": {"role": "assistant", "content": "word " * 100}}]},
        {"choices": [{"delta": {"tool_calls": [{"function": {"arguments": "word " * 100}}]}}]},
        {"delta": {"type": "text_delta", "text": "word " * 100}},
        {"delta": {"type": "input_json_delta", "partial_json": "word " * 100}},
    ],
)
def test_what_passed_of_a_stream_counts(event: dict[str, Any]) -> None:
    """The deltas of a stream that ends without its usage count, with the estimate of its input."""
    frame = f"data: {json.dumps(event)}\n\n".encode()
    cut, complete, early = [UsageReader("text/event-stream", 70) for _ in range(3)]
    for reader in (cut, complete, early):
        if reader is early:
            reader.feed(
                b'data: {"message": {"usage": {"input_tokens": 3, "output_tokens": 1}}}\n\n'
            )
        reader.feed(frame * 2)
        if reader is complete:
            reader.feed(b'data: {"usage": {"input_tokens": 3, "output_tokens": 5}}\n\n')
    assert 270 <= cut.finish() <= 278
    assert complete.finish() == 8
    assert 204 <= early.finish() <= 212


def test_what_passed_of_a_body_counts() -> None:
    """Of a body that is cut off, its size is estimated."""
    reader = UsageReader("application/json", 7)
    reader.feed(b'{"output": "' + b"word " * 80)
    assert reader.finish() == 7 + 412 // 4


@pytest.mark.parametrize("media_type", ["text/event-stream", "application/json"])
async def test_tokens_of_a_compressed_response_are_counted(
    tmp_path: Path, media_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some upstreams compress although `identity` was requested; of an unknown compression, the size counts."""
    monkeypatch.setattr("kedge.store.token_registry.MINUTE", 10**10)
    form = "data: %s\n\n" if media_type == "text/event-stream" else "%s"
    text = (form % '{"usage": {"input_tokens": 3, "output_tokens": 5}}').encode()
    bodies = {"gzip": gzip.compress(text), "deflate": zlib.compress(text), "br": b"x" * 400}

    def respond(request: httpx2.Request) -> httpx2.Response:
        coding = request.headers["x-coding"]
        stream = httpx2.ByteStream(bodies[coding])
        headers = {"content-type": media_type, "content-encoding": coding}
        return httpx2.Response(200, stream=stream, headers=headers)

    with open_store(tmp_path) as store:
        registry = TokenRegistry(store)
        async with open_asgi(respond, store=store) as client:
            for coding, body in bodies.items():
                _, secret = await registry.add(coding, tokens_per_minute=10**9)
                headers = {"x-kedge-token": secret, "x-coding": coding}
                path = "/v1/chat/completions"
                content = {"content": "word " * 80}
                async with client.stream("POST", path, headers=headers, json=content) as answer:
                    assert b"".join([chunk async for chunk in answer.aiter_raw()]) == body
        counts = {coding: (await registry.count(coding)).tokens for coding in bodies}
    assert counts == {"gzip": 8, "deflate": 8, "br": 103 + 100}


def test_the_estimate_of_a_request_is_its_text_and_its_largest_output() -> None:
    """Encoded files are no text, and a request without a limit has the default one."""
    image = "A" * 100_000
    body = {"input": "word " * 80, "image": image, "max_output_tokens": 50}
    assert 100 < estimate_tokens(json.dumps(body)).input < 130
    assert estimate_tokens(json.dumps(body)).output == 50
    assert estimate_tokens(b'{"max_tokens": 50, "n": 3}').output == 150
    assert estimate_tokens(b"", 400) == (100, DEFAULT_OUTPUT_TOKENS)


@pytest.fixture
def waiting_proxy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """Yield a proxy in front of a server with a gated model; all counts are in the same minute."""
    monkeypatch.setattr("kedge.store.token_registry.MINUTE", 10**10)
    with open_proxy(tmp_path, GatedModel()) as opened:
        yield opened


async def test_a_request_that_was_not_sent_does_not_count(tmp_path: Path) -> None:
    """The estimate of a request is released if the upstream cannot be reached."""

    def respond(_: httpx2.Request) -> httpx2.Response:
        raise httpx2.ConnectError("refused")

    with open_store(tmp_path) as store:
        registry = TokenRegistry(store)
        _, secret = await registry.add("alice", tokens_per_minute=100_000)
        async with open_asgi(respond, store=store) as client:
            answer = await client.post(
                "/v1/responses", json={"input": "Hi"}, headers={"x-kedge-token": secret}
            )
        assert (answer.status_code, (await registry.count("alice")).tokens) == (502, 0)


@for_each("path", PATHS)
def test_an_abandoned_stream_counts(waiting_proxy: Proxy, path: str) -> None:
    """The input and what passed of the answer count if the client leaves."""
    name = f"small{path.replace('/', '-')}"
    secret = waiting_proxy.add(name, tokens_per_minute=100_000)
    with waiting_proxy.stream(secret, path, **make_body(path, "wait " * 80)) as chunks:
        received = b""
        while b"answer" not in received:
            received += next(chunks)
    wait_until(lambda: 80 <= waiting_proxy.get_tokens(name) <= 190)


async def test_an_abandoned_response_on_a_websocket_counts(waiting_proxy: Proxy) -> None:
    """The same applies to a WebSocket that is closed."""
    registry = waiting_proxy.registry
    _, secret = await registry.add("small", tokens_per_minute=100_000)
    message = {"type": "response.create", "model": "m", "input": "wait " * 80, "stream_id": "a"}
    async with waiting_proxy.connect(secret) as socket:
        await socket.send(json.dumps(message))
        while "answer" not in str(await asyncio.wait_for(socket.recv(), TIMEOUT)):
            pass
        assert (await registry.count("small")).tokens > DEFAULT_OUTPUT_TOKENS
    await asyncio.to_thread(wait_until, lambda: 80 <= waiting_proxy.get_tokens("small") <= 190)


async def test_parallel_requests_do_not_exceed_a_limit(waiting_proxy: Proxy) -> None:
    """The estimates of running requests count: of many at once, those beyond the limit are rejected."""
    proxy = waiting_proxy
    _, secret = await proxy.registry.add("tiny", tokens_per_minute=300)
    url = f"{proxy.url}/v1/chat/completions"
    body = {"model": "m", "messages": [{"role": "user", "content": "wait"}], "max_tokens": 250}
    async with httpx2.AsyncClient(timeout=TIMEOUT, headers={"x-kedge-token": secret}) as client:
        sent = [asyncio.create_task(client.post(url, json=body)) for _ in range(12)]
        finished = iter(asyncio.as_completed(sent))
        rejected = [await next(finished) for _ in range(10)]
        await wait_until_async(lambda: len(proxy.model.started) == 2)
        proxy.model.open_gate()
        accepted = [await each for each in finished]
    assert {each.status_code for each in rejected} == {429}
    assert all(int(each.headers["retry-after"]) > 0 for each in rejected)
    assert [each.status_code for each in accepted] == [200, 200]


def test_streams_of_a_revoked_token_end(waiting_proxy: Proxy) -> None:
    """A stream that is passed on ends although its upstream sends nothing, which is closed as well."""
    proxy = waiting_proxy
    with proxy.stream(proxy.add("alice"), "/v1/responses", input="wait") as chunks:
        assert next(chunks)
        asyncio.run(proxy.registry.revoke("alice"))
        assert b"[DONE]" not in b"".join(chunks)
    wait_until(lambda: proxy.model.cancelled == ["wait"])


async def test_an_idle_websocket_of_a_revoked_token_is_closed(proxy: Proxy) -> None:
    """The connection is closed with an error although nothing is sent."""
    _, secret = await proxy.registry.add("alice")
    async with proxy.connect(secret) as socket:
        await proxy.registry.revoke("alice")
        assert json.loads(await asyncio.wait_for(socket.recv(), TIMEOUT))["status"] == 401
        await asyncio.wait_for(socket.wait_closed(), TIMEOUT)
        assert socket.close_code == 1008


def test_the_first_token_takes_effect_in_a_running_proxy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A proxy on loopback requires a token once one exists, and then accepts any host name."""
    monkeypatch.setattr("kedge.store.token_registry.RECHECK_SECONDS", 0.0)
    with open_proxy(tmp_path, PracticeModel(), requires_token=False) as proxy:
        models = f"{proxy.url}/v1/models"
        assert proxy.http.get(models).status_code == 200
        secret = proxy.add("alice")
        assert proxy.http.get(models).status_code == 401
        headers = {"x-kedge-token": secret, "host": "proxy.example"}
        assert proxy.http.get(models, headers=headers).status_code == 200


def test_a_failing_store_rejects_tokens(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A token that cannot be checked is rejected, and usage that cannot be counted is logged."""
    alice = proxy.add("alice", tokens_per_minute=1_000)

    async def fail(*_: object, **__: object) -> Any:
        raise StoreBusy("the store is busy")

    monkeypatch.setattr(TokenRegistry, "settle", fail)
    assert proxy.post(alice).status_code == 200
    wait_until(lambda: "could not be counted" in caplog.text)
    monkeypatch.setattr(TokenRegistry, "find", fail)
    assert proxy.post(alice).status_code == 503
    assert proxy.post("admin").status_code == 200
    monkeypatch.setattr(TokenRegistry, "is_valid", fail)
    registry = proxy.registry
    (token,) = asyncio.run(registry.list())
    rejected = asyncio.run(create_policy("", registry).check_message(token))
    assert rejected is not None
    assert rejected.status == 503


@for_each(
    ("data", "expected"),
    [
        ('{"usage": {"input_tokens": 3, "output_tokens": 4}}', 7),
        ('{"response": {"usage": {"input_tokens": 3, "output_tokens": 4}}}', 7),
        ('{"usage": {"prompt_tokens": 3, "completion_tokens": 4}}', 7),
        ('{"message": {"usage": {"input_tokens": 3, "cache_read_input_tokens": 2}}}', 5),
        ('{"usage": {"input_tokens": "3", "output_tokens": -4}}', 0),
        ('{"usage": null}', 0),
        ('["usage"]', 0),
        ('{"usage"', 0),
        ("[DONE]", 0),
    ],
)
@for_each("content_type", ["text/event-stream", "", "text/plain", "application/json"])
def test_usage_is_parsed_from_every_form(data: str, expected: int, content_type: str) -> None:
    """Data without usage or JSON counts as zero; some servers send streams without their type, or without an end."""
    for end in (b"\n\n", b"\n", b""):
        reader = UsageReader(content_type)
        for chunk in (b": comment\n\ndata: 1\n", b"\ndata: ", data.encode(), end):
            reader.feed(chunk)
        assert reader.finish() == expected
    for start in (b"\xef\xbb\xbf", b"\n "):
        whole = UsageReader(content_type)
        for chunk in (start, data.encode()):
            whole.feed(chunk)
        assert not expected or whole.finish() == expected  # an object that is cut off is estimated


def test_a_too_large_event_is_skipped(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The usage of the other events is still counted."""
    reader = UsageReader("text/event-stream")
    monkeypatch.setattr(reader._events, "_max_line", 10)
    reader.feed(b"data: " + b"x" * 100)
    assert "too large" in caplog.text
    reader.feed(b'data: {"usage": {"input_tokens": 3}}\n\n')
    assert reader.finish() == 3
