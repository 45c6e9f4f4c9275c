"""Named tokens: each user accesses only its own namespace, within its limits."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx2
import pytest

from kedge.errors import StoreBusy
from kedge.server.access import DEFAULT_OUTPUT_TOKENS
from kedge.server.models import (
    ItemClosed,
    ItemDelta,
    ItemOpened,
    OutputEvent,
    PracticeModel,
    Prompt,
)
from kedge.server.settings import Limits
from kedge.store import AccessToken, Store, TokenRegistry, open_store
from kedge.testing import TestServer, serve
from server.gated_model import GatedModel
from server.waiting import TIMEOUT, wait_until
from server.websocket_client import WebSocketClient, connect_client

ADMIN = "admin-secret"
LONG = "word " * 3000

WAITING: dict[str, dict[str, Any]] = {
    "/v1/responses": {"input": "wait"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "wait"}]},
    "/v1/messages": {"messages": [{"role": "user", "content": "wait"}], "max_tokens": 100},
}
"""A request of each API that the gated model does not finish."""


@dataclass
class Users:
    """A server with two users and an administrator."""

    server: TestServer
    store: Store
    registry: TokenRegistry
    now: list[float]
    secrets: dict[str, str] = field(default_factory=dict[str, str])

    def add(self, name: str, **options: Any) -> str:
        """Add a token and return its secret."""
        _, secret = asyncio.run(self.registry.add(name, **options))
        self.secrets[name] = secret
        return secret

    def call(self, name: str, method: str, path: str, **options: Any) -> httpx2.Response:
        """Send a request with the token of a user."""
        url, headers = f"{self.server.url}{path}", {"authorization": f"Bearer {self.secrets[name]}"}
        return httpx2.request(
            method, url, headers=headers, timeout=TIMEOUT, verify=False, **options
        )

    def make_headers(self, name: str) -> dict[str, str]:
        """Return the headers of a request of a user to any API."""
        return {
            "authorization": f"Bearer {self.secrets[name]}",
            "anthropic-version": "2023-06-01",
        }

    def connect(self, name: str) -> AbstractAsyncContextManager[WebSocketClient]:
        """Open a WebSocket with the token of a user."""
        return connect_client(self.server, additional_headers=self.make_headers(name))

    @contextmanager
    def read_until_revoked(self, name: str, path: str, **body: Any) -> Iterator[bytes]:
        """Revoke the token of a user after the first bytes of a stream, and yield the others."""
        url, request = f"{self.server.url}{path}", {"model": "m", "stream": True, **body}
        headers = self.make_headers(name)
        with httpx2.stream("POST", url, headers=headers, json=request, timeout=TIMEOUT) as stream:
            chunks = stream.iter_bytes()
            assert next(chunks)
            asyncio.run(self.registry.revoke(name))
            yield b"".join(chunks)

    def create(self, name: str, **body: Any) -> dict[str, Any]:
        """Create a response."""
        answer = self.call(
            name, "POST", "/v1/responses", json={"model": "m", "input": "hello", **body}
        )
        assert answer.status_code == 200, answer.text
        return answer.json()


@pytest.fixture(scope="module")
def module_users() -> Iterator[Users]:
    """Yield a server for the tests of isolation, which are independent of each other."""
    yield from make_users()


@pytest.fixture
def users() -> Iterator[Users]:
    """Yield a server that only this test uses."""
    yield from make_users()


@pytest.fixture
def gated_users(model: GatedModel) -> Iterator[Users]:
    """Yield a server with the gated model."""
    yield from make_users(model=model, limits=Limits(shutdown_seconds=0))


def make_users(**settings: Any) -> Iterator[Users]:
    """Run a server with the users alice and bob and a clock that the test sets."""
    store = open_store("sqlite://:memory:")
    now = [600.0]
    registry = TokenRegistry(store, lambda: now[0])
    with serve(callers=registry, token=ADMIN, hosts=None, **settings) as server:
        users = Users(server, store, registry, now, {"admin": ADMIN})
        users.add("alice")
        users.add("bob")
        yield users
    store.database.close()


def compare_to_unknown(
    users: Users, name: str, method: str, path: str, owned_id: str, **options: Any
) -> None:
    """Check that the id of another user gives the same response as an unknown id."""
    unknown = owned_id[:-8] + "00000000"
    answers: list[tuple[int, str]] = []
    for each in (owned_id, unknown):
        members = json.loads(json.dumps(options).replace("{id}", each))
        answer = users.call(name, method, path.replace("{id}", each), **members)
        answers.append((answer.status_code, answer.text.replace(each, "ID")))
    assert answers[0] == answers[1]
    assert answers[0][0] in (400, 404)


@pytest.mark.parametrize("other", ["bob", "admin"])
def test_a_response_of_another_user_is_unknown(module_users: Users, other: str) -> None:
    """A response of another user cannot be read, deleted, cancelled, listed, streamed or continued."""
    users = module_users
    response = users.create("alice", background=True, stream=False)
    calls: list[tuple[str, str, dict[str, Any]]] = [
        ("GET", "/v1/responses/{id}", {}),
        ("GET", "/v1/responses/{id}?stream=true", {}),
        ("DELETE", "/v1/responses/{id}", {}),
        ("POST", "/v1/responses/{id}/cancel", {}),
        ("GET", "/v1/responses/{id}/input_items", {}),
    ]
    body = {"model": "m", "input": "x", "previous_response_id": "{id}"}
    calls += [
        ("POST", f"/v1/responses{end}", {"json": body}) for end in ("", "/input_tokens", "/compact")
    ]
    for method, path, options in calls:
        compare_to_unknown(users, other, method, path, response["id"], **options)
    assert users.call("alice", "GET", f"/v1/responses/{response['id']}").status_code == 200


def test_ids_do_not_count_the_responses_of_all_users(module_users: Users) -> None:
    """No digit of the ids of responses, items and calls is the same or counts in consecutive responses."""
    tool = {"type": "function", "name": "f", "parameters": {"type": "object"}}
    forced = {"tools": [tool], "tool_choice": {"type": "function", "name": "f"}}
    responses = [module_users.create("alice", **forced) for _ in range(20)]
    items = [response["output"][-1] for response in responses]
    for ids in (responses, items):
        keys = [each["id"].partition("_")[2][:32] for each in ids]
        assert all(len(set(digits)) > 1 for digits in zip(*keys, strict=True)), keys
        assert keys != sorted(keys)
    assert len({item["call_id"] for item in items}) == 20


@pytest.mark.parametrize("other", ["bob", "admin"])
def test_a_conversation_of_another_user_is_unknown(module_users: Users, other: str) -> None:
    """A conversation of another user and its items cannot be read, changed, deleted or continued."""
    users = module_users
    items = [{"type": "message", "role": "user", "content": "My name is Ada."}]
    conversation = users.call("alice", "POST", "/v1/conversations", json={"items": items}).json()
    item = users.call("alice", "GET", f"/v1/conversations/{conversation['id']}/items").json()[
        "data"
    ][0]
    calls: list[tuple[str, str, dict[str, Any]]] = [
        ("GET", "/v1/conversations/{id}", {}),
        ("POST", "/v1/conversations/{id}", {"json": {"metadata": {"a": "b"}}}),
        ("GET", "/v1/conversations/{id}/items", {}),
        ("POST", "/v1/conversations/{id}/items", {"json": {"items": items}}),
        ("GET", f"/v1/conversations/{{id}}/items/{item['id']}", {}),
        ("DELETE", f"/v1/conversations/{{id}}/items/{item['id']}", {}),
        ("DELETE", "/v1/conversations/{id}", {}),
        ("POST", "/v1/responses", {"json": {"model": "m", "input": "x", "conversation": "{id}"}}),
    ]
    for method, path, options in calls:
        compare_to_unknown(users, other, method, path, conversation["id"], **options)
    reference = [{"type": "item_reference", "id": "{id}"}]
    body = {"model": "m", "input": reference}
    compare_to_unknown(users, other, "POST", "/v1/responses", item["id"], json=body)
    body = {"items": reference}
    compare_to_unknown(users, other, "POST", "/v1/conversations", item["id"], json=body)
    continued = users.create("alice", input="What is my name?", conversation=conversation["id"])
    assert "Ada" in json.dumps(continued["output"])


def test_caches_and_keys_are_separate(module_users: Users) -> None:
    """Cached prompts, stored reasoning and encrypted content belong to one user."""
    users = module_users
    for name in ("alice", "bob"):
        cached = [
            users.create(name, input=LONG)["usage"]["input_tokens_details"]["cached_tokens"]
            for _ in range(2)
        ]
        assert cached[0] == 0 < cached[1]
    options = {
        "reasoning": {"effort": "high"},
        "include": ["reasoning.encrypted_content"],
        "store": False,
    }
    output = users.create("alice", input="What is 2+3?", **options)["output"]
    reasoning = next(item for item in output if item["type"] == "reasoning")
    message = {"role": "user", "content": "What did you think?"}
    body = {"model": "m", "input": [*output, message], **options}
    assert users.call("alice", "POST", "/v1/responses", json=body).status_code == 200
    rejected = users.call("bob", "POST", "/v1/responses", json=body)
    assert rejected.json()["error"]["code"] == "invalid_encrypted_content"
    del reasoning["encrypted_content"]
    views = [users.server.call(lambda service: service)]
    views += [views[0].view_as(AccessToken(n, n, frozenset())) for n in ("alice", "bob")]
    texts = [
        users.server.call(lambda _, view=view: view.read_reasoning(reasoning)) for view in views
    ]
    assert [bool(text) for text in texts] == [False, True, False]


async def test_websocket_belongs_to_its_user(users: Users) -> None:
    """A WebSocket cannot continue responses of another user, and a revoked token is rejected."""
    response = users.create("alice")
    async with users.connect("bob") as ws_client:
        lost = await ws_client.create_and_read(previous_response_id=response["id"])
        assert lost["error"]["code"] == "previous_response_not_found"
        assert (await ws_client.create_and_read())["type"] == "response.completed"
        await users.registry.revoke("bob")
        revoked = await ws_client.create_and_read()
        assert (revoked["status"], revoked["error"]["code"]) == (401, "invalid_api_key")


def test_token_and_scope_are_required(users: Users) -> None:
    """A missing, wrong or revoked token is a 401 error, and a missing scope is a 403 error."""
    users.secrets["nobody"] = "kedge_wrong"
    assert users.call("nobody", "GET", "/v1/models").status_code == 401
    assert httpx2.get(f"{users.server.url}/v1/models", verify=False).status_code == 401
    users.add("page-only", scopes=["page"])
    users.add("ops", user="", scopes=["server", "metrics"])
    missing = users.call("page-only", "GET", "/v1/models")
    assert (missing.status_code, missing.json()["error"]["code"]) == (
        403,
        "insufficient_permissions",
    )
    assert users.call("alice", "GET", "/metrics").status_code == 403
    metrics = users.call("ops", "GET", "/metrics")
    assert metrics.status_code == 200
    assert "alice" not in metrics.text
    response = users.create("admin")
    assert users.call("ops", "GET", f"/v1/responses/{response['id']}").status_code == 200
    asyncio.run(users.registry.revoke("alice"))
    assert users.call("alice", "GET", "/v1/models").status_code == 401


def test_request_limit(users: Users) -> None:
    """Requests above the limit get a 429 error with the hosted API's headers until the next minute."""
    users.add("small", requests_per_minute=2)
    users.now[0] = 615.0
    first = users.call("small", "GET", "/v1/models")
    assert first.headers["x-ratelimit-limit-requests"] == "2"
    assert first.headers["x-ratelimit-remaining-requests"] == "1"
    assert first.headers["x-ratelimit-reset-requests"] == "45s"
    assert "x-ratelimit-limit-tokens" not in first.headers
    assert users.call("small", "GET", "/v1/models").status_code == 200
    rejected = users.call("small", "GET", "/v1/models")
    assert rejected.status_code == 429
    assert rejected.headers["retry-after"] == "45"
    assert rejected.json()["error"]["code"] == "rate_limit_exceeded"
    assert rejected.json()["error"]["type"] == "requests"
    assert "x-ratelimit-limit-requests" not in users.call("bob", "GET", "/v1/models").headers
    users.now[0] = 660.0
    assert users.call("small", "GET", "/v1/models").status_code == 200


async def test_request_limit_on_a_websocket(users: Users) -> None:
    """Each message counts, but not the connection; a rejected message has ``retry-after``."""
    _, users.secrets["small"] = await users.registry.add("small", requests_per_minute=1)
    async with users.connect("small") as ws_client:
        assert (await ws_client.create_and_read())["type"] == "response.completed"
        rejected = await ws_client.create_and_read()
        assert (rejected["status"], rejected["error"]["code"]) == (429, "rate_limit_exceeded")
        assert rejected["error"]["headers"]["retry-after"] == "60"


@pytest.mark.parametrize("stream", [False, True])
def test_token_limit(users: Users, stream: bool) -> None:
    """The tokens of all APIs count, and requests above the limit are rejected."""
    users.add("small", tokens_per_minute=300)
    body: dict[str, Any] = {"model": "m", "input": "hello " * 20, "stream": stream}
    first = users.call("small", "POST", "/v1/responses", json=body)
    assert first.headers["x-ratelimit-remaining-tokens"] == "300"
    left = users.call("small", "GET", "/v1/models").headers["x-ratelimit-remaining-tokens"]
    assert 0 < int(left) < 280
    chat = {"model": "m", "messages": [{"role": "user", "content": "hello " * 300}]}
    answer = users.call("small", "POST", "/v1/chat/completions", json={**chat, "stream": stream})
    assert answer.status_code == 200
    rejected = users.call("small", "POST", "/v1/responses", json=body)
    assert (rejected.status_code, rejected.json()["error"]["type"]) == (429, "tokens")
    headers = {"x-api-key": users.secrets["small"], "anthropic-version": "2023-06-01"}
    url = f"{users.server.url}/v1/messages"
    message = httpx2.post(url, json=chat, headers=headers, verify=False, timeout=TIMEOUT)
    assert message.json()["error"]["type"] == "rate_limit_error"
    users.now[0] += 60
    short = {"model": "m", "input": "hello"}
    assert users.call("small", "POST", "/v1/responses/compact", json=short).status_code == 200
    counts = asyncio.run(users.registry.count("small"))
    assert counts.requests == 1
    assert counts.tokens > 0


def test_a_failed_count_does_not_break_the_response(
    users: Users, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If counting fails, the response is complete, and its reservation is not replaced."""
    users.add("small", tokens_per_minute=10_000)

    async def fail(*_: object) -> None:
        raise StoreBusy("busy")

    monkeypatch.setattr(users.registry, "settle", fail)
    assert users.create("small", max_output_tokens=100)["status"] == "completed"
    assert 100 < asyncio.run(users.registry.count("small")).tokens < 150


class SlowModel(PracticeModel):
    """A model that writes 200 words, and then waits until the test lets it end."""

    def __init__(self) -> None:
        super().__init__()
        self.started = self.written = 0
        self._gate = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    def open_gate(self) -> None:
        """Let the answers end, from the thread of the test."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._gate.set)

    async def answer(self, prompt: Prompt) -> AsyncIterator[OutputEvent]:
        """Yield the words, and wait."""
        self._loop = asyncio.get_running_loop()
        self.started += 1
        yield ItemOpened("text")
        for _ in range(200):
            yield ItemDelta("word ")
        self.written += 1
        await self._gate.wait()
        yield ItemClosed()


@pytest.fixture
def slow_model() -> SlowModel:
    """Return a model whose answers end when the test allows it."""
    return SlowModel()


@pytest.fixture
def slow_users(slow_model: SlowModel) -> Iterator[Users]:
    """Yield a server with the slow model, and a user with a limit."""
    for users in make_users(model=slow_model, limits=Limits(shutdown_seconds=0)):
        users.add("small", tokens_per_minute=100_000)
        yield users


def count_tokens(users: Users, name: str = "small") -> int:
    """Return the counted tokens of a user."""
    return asyncio.run(users.registry.count(name)).tokens


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", WAITING)
def test_an_abandoned_answer_counts(
    slow_users: Users, slow_model: SlowModel, path: str, stream: bool
) -> None:
    """What a model wrote counts if the client leaves before the end."""
    users, headers = slow_users, slow_users.make_headers("small")
    body = {"model": "m", "stream": stream, **WAITING[path]}
    url = f"{users.server.url}{path}"

    async def leave() -> None:
        async with httpx2.AsyncClient(timeout=TIMEOUT) as client:
            sending = asyncio.create_task(client.post(url, headers=headers, json=body))
            await asyncio.to_thread(wait_until, lambda: slow_model.written == 1)
            sending.cancel()
            await asyncio.wait([sending])

    asyncio.run(leave())
    wait_until(lambda: users.server.running == 0)
    wait_until(lambda: 200 <= count_tokens(users) <= 250)


def test_a_cancelled_background_response_counts(slow_users: Users, slow_model: SlowModel) -> None:
    """What was written before counts, and nothing of a response that was still queued."""
    created = slow_users.create("small", background=True)
    wait_until(lambda: slow_model.written == 1)
    assert count_tokens(slow_users) > DEFAULT_OUTPUT_TOKENS
    slow_users.call("small", "POST", f"/v1/responses/{created['id']}/cancel")
    wait_until(lambda: 200 <= count_tokens(slow_users) <= 250)


def test_a_queued_response_that_is_cancelled_does_not_count(slow_model: SlowModel) -> None:
    """The reservation of a response that never ran is released."""
    limits = Limits(background_running=1, shutdown_seconds=0)
    for users in make_users(model=slow_model, limits=limits):
        users.create("alice", background=True)
        wait_until(lambda: slow_model.written == 1)
        users.add("small", tokens_per_minute=100_000)
        queued = users.create("small", background=True)
        assert count_tokens(users) > DEFAULT_OUTPUT_TOKENS
        users.call("small", "POST", f"/v1/responses/{queued['id']}/cancel")
        wait_until(lambda users=users: count_tokens(users) == 0)


async def test_an_abandoned_answer_on_a_websocket_counts(slow_users: Users) -> None:
    """The same applies to the answers of a WebSocket that is closed."""
    async with slow_users.connect("small") as ws_client:
        await ws_client.create()
        texts = [""]
        while len(texts) <= 200:  # otherwise the close would wait behind unread messages
            texts += filter(None, [(await ws_client.next_event()).get("delta")])
    await asyncio.to_thread(wait_until, lambda: 200 <= count_tokens(slow_users) <= 250)


@pytest.mark.parametrize("path", WAITING)
def test_parallel_requests_do_not_exceed_a_limit(
    slow_users: Users, slow_model: SlowModel, path: str
) -> None:
    """The estimates of running requests count: of many at once, those beyond the limit are rejected."""
    users = slow_users
    users.add("tiny", tokens_per_minute=300)

    def ask() -> httpx2.Response:
        headers = users.make_headers("tiny")
        limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
        body = {"model": "m", **WAITING[path], limit: 250}
        return httpx2.post(users.server.url + path, headers=headers, json=body, timeout=TIMEOUT)

    async def ask_together() -> list[int]:
        asked = [asyncio.create_task(asyncio.to_thread(ask)) for _ in range(12)]
        finished = iter(asyncio.as_completed(asked))
        rejected = [await next(finished) for _ in range(10)]
        assert {each.headers["retry-after"] for each in rejected} == {"60"}
        slow_model.open_gate()
        return [each.status_code for each in (*rejected, *[await each for each in finished])]

    assert sorted(asyncio.run(ask_together())) == [200] * 2 + [429] * 10
    assert slow_model.started == 2
    assert 300 < count_tokens(users, "tiny") < 550


@pytest.mark.parametrize("operation", ["find", "count"])
def test_a_store_that_does_not_answer_is_an_outage(
    users: Users, monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    """While tokens cannot be checked, requests are rejected with 503, not with 500."""
    users.add("small", requests_per_minute=10)

    async def fail(*_: object, **__: object) -> None:
        raise StoreBusy("busy")

    with monkeypatch.context() as patch:
        patch.setattr(users.registry, operation, fail)
        rejected = users.call("small", "GET", "/v1/models")
        assert rejected.status_code == 503
        assert rejected.json()["error"]["code"] == "database_unavailable"
        assert users.call("admin", "GET", "/v1/models").status_code == 200
    assert users.call("small", "GET", "/v1/models").status_code == 200


@pytest.mark.parametrize("path", WAITING)
def test_streams_of_a_revoked_token_end(gated_users: Users, model: GatedModel, path: str) -> None:
    """A stream ends although its model sends nothing, and the model is stopped."""
    with gated_users.read_until_revoked("bob", path, **WAITING[path]) as received:
        assert b"[DONE]" not in received
    wait_until(lambda: model.cancelled == ["wait"])


def test_a_response_to_a_revoked_token_is_rejected(gated_users: Users, model: GatedModel) -> None:
    """A request that waits for its response is rejected when its token is revoked."""
    users = gated_users

    async def revoke_when_started() -> httpx2.Response:
        body = {"model": "m", "input": "wait"}
        waiting = asyncio.to_thread(users.call, "bob", "POST", "/v1/responses", json=body)
        task = asyncio.create_task(waiting)
        await asyncio.to_thread(wait_until, lambda: bool(model.started))
        await users.registry.revoke("bob")
        return await task

    answer = asyncio.run(revoke_when_started())
    assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")


def test_replays_of_a_revoked_token_end(gated_users: Users, model: GatedModel) -> None:
    """The replay of a background stream ends as well."""
    created = gated_users.create("bob", input="wait", background=True)
    assert created["status"] in ("queued", "in_progress")
    body = {"input": "wait too", "background": True}
    with gated_users.read_until_revoked("bob", "/v1/responses", **body) as received:
        assert b"response.completed" not in received
    model.open_gate()


async def test_an_idle_websocket_of_a_revoked_token_is_closed(users: Users) -> None:
    """The connection is closed with an error although nothing is sent."""
    async with users.connect("bob") as ws_client:
        assert (await ws_client.create_and_read())["type"] == "response.completed"
        await users.registry.revoke("bob")
        event = await ws_client.next_event()
        assert (event["status"], event["error"]["code"]) == (401, "invalid_api_key")
        assert await ws_client.wait_closed() == 1008
