"""Named tokens: each user accesses only its own namespace, within its limits."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx2
import pytest

from for_each import for_each
from kedge.errors import StoreBusy
from kedge.server.access import DEFAULT_OUTPUT_TOKENS
from kedge.server.models import ModelUsage
from kedge.server.settings import Limits
from kedge.store import AccessToken, TokenRegistry, open_store
from kedge.testing import TestServer, serve
from server.conftest import open_client
from server.gated_model import GatedModel
from server.waiting import TIMEOUT, wait_until, wait_until_async
from server.websocket_client import WebSocketClient, connect_client

ADMIN = "admin-secret"
LONG = "word " * 3000

WAIT = [{"role": "user", "content": "wait"}]
WAITING: dict[str, dict[str, Any]] = {
    "/v1/responses": {"model": "m", "input": "wait"},
    "/v1/chat/completions": {"model": "m", "messages": WAIT},
    "/v1/messages": {"model": "m", "messages": WAIT, "max_tokens": 100},
}
"""A request of each API that the gated model does not finish."""


@dataclass
class Users:
    """A server with two users and an administrator."""

    server: TestServer
    registry: TokenRegistry
    now: list[float]
    secrets: dict[str, str] = field(default_factory=dict[str, str])

    def add(self, name: str, **options: Any) -> None:
        """Add a token."""
        _, self.secrets[name] = asyncio.run(self.registry.add(name, **options))

    def make_headers(self, name: str, path: str = "") -> dict[str, str]:
        """Return the headers of a request of a user."""
        version = {"anthropic-version": "2023-06-01"} if path == "/v1/messages" else {}
        return {"authorization": f"Bearer {self.secrets[name]}", **version}

    def call(self, name: str, method: str, path: str, **options: Any) -> httpx2.Response:
        """Send a request with the token of a user."""
        with open_client(self.server, **self.make_headers(name, path)) as http:
            return http.request(method, path, **options)

    def post(self, name: str, path: str, **body: Any) -> httpx2.Response:
        """Send a body with the token of a user."""
        return self.call(name, "POST", path, json={"model": "m", **body})

    def create(self, name: str, **body: Any) -> dict[str, Any]:
        """Create a response."""
        answer = self.post(name, "/v1/responses", **{"input": "hello", **body})
        assert answer.status_code == 200, answer.text
        return answer.json()

    def connect(self, name: str) -> AbstractAsyncContextManager[WebSocketClient]:
        """Open a WebSocket with the token of a user."""
        return connect_client(self.server, additional_headers=self.make_headers(name))

    def count_tokens(self, name: str = "small") -> int:
        """Return the counted tokens of a user."""
        return asyncio.run(self.registry.count(name)).tokens

    @contextmanager
    def read_until_revoked(self, name: str, path: str, **body: Any) -> Iterator[bytes]:
        """Revoke the token of a user after the first bytes of a stream, and yield the others."""
        request = {"model": "m", "stream": True, **body}
        with (
            open_client(self.server, **self.make_headers(name, path)) as http,
            http.stream("POST", path, json=request) as stream,
        ):
            chunks = stream.iter_bytes()
            assert next(chunks)
            asyncio.run(self.registry.revoke(name))
            yield b"".join(chunks)


@contextmanager
def make_users(**settings: Any) -> Iterator[Users]:
    """Run a server with the users alice and bob and a clock that the test sets."""
    store = open_store("sqlite://:memory:")
    now = [600.0]
    registry = TokenRegistry(store, lambda: now[0])
    settings = {"limits": Limits(shutdown_seconds=0), **settings}
    with serve(callers=registry, token=ADMIN, **settings) as server:
        users = Users(server, registry, now, {"admin": ADMIN})
        users.add("alice")
        users.add("bob")
        yield users
    store.database.close()


@pytest.fixture(scope="module")
def module_users() -> Iterator[Users]:
    """Yield a server for the tests of isolation, which are independent of each other."""
    with make_users() as users:
        yield users


@pytest.fixture
def model() -> GatedModel:
    """Return a model that writes 200 words before it waits."""
    return GatedModel(words=200)


@pytest.fixture
def users(model: GatedModel) -> Iterator[Users]:
    """Yield a server that only this test uses, and a user with a limit."""
    with make_users(model=model) as users:
        users.add("small", tokens_per_minute=100_000)
        yield users


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


@for_each("other", ["bob", "admin"])
def test_a_response_of_another_user_is_unknown(module_users: Users, other: str) -> None:
    """A response of another user cannot be read, deleted, cancelled, listed, streamed or continued."""
    users = module_users
    id_ = users.create("alice", background=True)["id"]
    for method, path in (
        ("GET", "/v1/responses/{id}"),
        ("GET", "/v1/responses/{id}?stream=true"),
        ("DELETE", "/v1/responses/{id}"),
        ("POST", "/v1/responses/{id}/cancel"),
        ("GET", "/v1/responses/{id}/input_items"),
    ):
        compare_to_unknown(users, other, method, path, id_)
    body = {"model": "m", "input": "x", "previous_response_id": "{id}"}
    for end in ("", "/input_tokens", "/compact"):
        compare_to_unknown(users, other, "POST", f"/v1/responses{end}", id_, json=body)
    assert users.call("alice", "GET", f"/v1/responses/{id_}").status_code == 200


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


@for_each("other", ["bob", "admin"])
def test_a_conversation_of_another_user_is_unknown(module_users: Users, other: str) -> None:
    """A conversation of another user and its items cannot be read, changed, deleted or continued."""
    users = module_users
    items = [{"type": "message", "role": "user", "content": "My name is Ada."}]
    id_ = users.call("alice", "POST", "/v1/conversations", json={"items": items}).json()["id"]
    (item,) = users.call("alice", "GET", f"/v1/conversations/{id_}/items").json()["data"]
    for method, path, body in (
        ("GET", "", None),
        ("POST", "", {"metadata": {"a": "b"}}),
        ("GET", "/items", None),
        ("POST", "/items", {"items": items}),
        ("GET", f"/items/{item['id']}", None),
        ("DELETE", f"/items/{item['id']}", None),
        ("DELETE", "", None),
    ):
        compare_to_unknown(users, other, method, f"/v1/conversations/{{id}}{path}", id_, json=body)
    body = {"model": "m", "input": "x", "conversation": "{id}"}
    compare_to_unknown(users, other, "POST", "/v1/responses", id_, json=body)
    reference = [{"type": "item_reference", "id": "{id}"}]
    for path, body in (
        ("/v1/responses", {"model": "m", "input": reference}),
        ("/v1/conversations", {"items": reference}),
    ):
        compare_to_unknown(users, other, "POST", path, item["id"], json=body)
    continued = users.create("alice", input="What is my name?", conversation=id_)
    assert "Ada" in json.dumps(continued["output"])


def test_caches_and_keys_are_separate(module_users: Users) -> None:
    """Cached prompts, stored reasoning and encrypted content belong to one user."""
    users = module_users
    for name in ("alice", "bob"):
        usages = [users.create(name, input=LONG)["usage"] for _ in range(2)]
        cached = [usage["input_tokens_details"]["cached_tokens"] for usage in usages]
        assert cached[0] == 0 < cached[1]
    options: dict[str, Any] = {"reasoning": {"effort": "high"}, "store": False}
    options["include"] = ["reasoning.encrypted_content"]
    output = users.create("alice", input="What is 2+3?", **options)["output"]
    reasoning = next(item for item in output if item["type"] == "reasoning")
    replay = {"input": [*output, {"role": "user", "content": "What did you think?"}], **options}
    assert users.post("alice", "/v1/responses", **replay).status_code == 200
    rejected = users.post("bob", "/v1/responses", **replay)
    assert rejected.json()["error"]["code"] == "invalid_encrypted_content"
    request = {"json": {"model": "m", "input": "x"}, "headers": {"idempotency-key": "a"}}
    answers = [users.call(n, "POST", "/v1/responses", **request) for n in ("alice", "bob") * 2]
    assert len({answer.json()["id"] for answer in answers}) == 2
    del reasoning["encrypted_content"]
    views = [users.server.call(lambda service: service)]
    views += [views[0].view_as(AccessToken(n, n, frozenset())) for n in ("alice", "bob")]
    texts = [
        users.server.call(lambda _, view=view: view.read_reasoning(reasoning)) for view in views
    ]
    assert [bool(text) for text in texts] == [False, True, False]


async def test_websocket_belongs_to_its_user(users: Users) -> None:
    """A WebSocket cannot continue responses of another user, and is closed when its token is revoked."""
    response = users.create("alice")
    async with users.connect("bob") as ws_client:
        lost = await ws_client.create_and_read(previous_response_id=response["id"])
        assert lost["error"]["code"] == "previous_response_not_found"
        assert (await ws_client.create_and_read())["type"] == "response.completed"
        await users.registry.revoke("bob")
        event = await ws_client.next_event()  # although nothing is sent
        assert (event["status"], event["error"]["code"]) == (401, "invalid_api_key")
        assert await ws_client.wait_closed() == 1008


def test_token_and_scope_are_required(users: Users) -> None:
    """A missing, wrong or revoked token is a 401 error, and a missing scope is a 403 error."""

    def status(name: str, path: str = "/v1/models") -> int:
        return users.call(name, "GET", path).status_code

    users.secrets["nobody"] = "kedge_wrong"
    assert status("nobody") == 401
    with open_client(users.server) as http:
        assert http.get("/v1/models").status_code == 401
    users.add("page-only", scopes=["page"])
    users.add("ops", user="", scopes=["server", "metrics"])
    error = users.call("page-only", "GET", "/v1/models").json()["error"]
    assert error["code"] == "insufficient_permissions"
    assert status("alice", "/metrics") == 403
    assert "alice" not in users.call("ops", "GET", "/metrics").raise_for_status().text
    assert status("ops", f"/v1/responses/{users.create('admin')['id']}") == 200
    asyncio.run(users.registry.revoke("alice"))
    assert status("alice") == 401


def list_limit_headers(answer: httpx2.Response) -> dict[str, str]:
    """Return the headers of a response that are about limits."""
    headers = answer.headers.items()
    return {name: value for name, value in headers if name.startswith("x-ratelimit")}


def test_responses_say_how_many_requests_are_left(users: Users) -> None:
    """The headers are those of the hosted API; without a limit there are none."""
    users.add("two", requests_per_minute=2)
    users.now[0] = 615.0
    assert list_limit_headers(users.call("two", "GET", "/v1/models")) == {
        "x-ratelimit-limit-requests": "2",
        "x-ratelimit-remaining-requests": "1",
        "x-ratelimit-reset-requests": "45s",
    }
    assert list_limit_headers(users.call("bob", "GET", "/v1/models")) == {}


def test_requests_above_the_limit_are_rejected(users: Users) -> None:
    """Until the next minute they get a 429 error, which says when that is."""
    users.add("one", requests_per_minute=1)
    users.now[0] = 615.0
    assert users.call("one", "GET", "/v1/models").status_code == 200
    answer = users.call("one", "GET", "/v1/models")
    error = answer.json()["error"]
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "45")
    assert (error["code"], error["type"]) == ("rate_limit_exceeded", "requests")
    users.now[0] = 660.0
    assert users.call("one", "GET", "/v1/models").status_code == 200


async def test_messages_of_a_websocket_count_as_requests(users: Users) -> None:
    """A connection does not count. A message above the limit gets the error of a request."""
    _, users.secrets["one"] = await users.registry.add("one", requests_per_minute=1)
    users.now[0] = 615.0
    async with users.connect("one") as ws_client:
        assert (await ws_client.create_and_read())["type"] == "response.completed"
        rejected = await ws_client.create_and_read()
    assert (rejected["status"], rejected["error"]["code"]) == (429, "rate_limit_exceeded")
    assert rejected["error"]["headers"]["retry-after"] == "45"


@pytest.mark.parametrize("stream", [False, True])
def test_responses_say_how_many_tokens_are_left(users: Users, stream: bool) -> None:
    """The header of a response has the tokens before it, without its own."""
    users.add("tiny", tokens_per_minute=300)
    first = users.post("tiny", "/v1/responses", input="hello " * 20, stream=stream)
    assert first.headers["x-ratelimit-remaining-tokens"] == "300"
    left = users.call("tiny", "GET", "/v1/models").headers["x-ratelimit-remaining-tokens"]
    assert 0 < int(left) < 280


@pytest.mark.parametrize("stream", [False, True])
def test_the_tokens_of_all_apis_count(users: Users, stream: bool) -> None:
    """After a request that exceeds the limit, every API rejects the next one with its own error."""
    users.add("tiny", tokens_per_minute=300)
    chat = [{"role": "user", "content": "hello " * 300}]
    answer = users.post("tiny", "/v1/chat/completions", messages=chat, stream=stream)
    assert answer.status_code == 200
    rejected = users.post("tiny", "/v1/responses", input="hello", stream=stream)
    assert (rejected.status_code, rejected.json()["error"]["type"]) == (429, "tokens")
    headers = {"x-api-key": users.secrets["tiny"], "anthropic-version": "2023-06-01"}
    with open_client(users.server, **headers) as http:
        message = http.post("/v1/messages", json={"model": "m", "messages": chat})
    assert message.json()["error"]["type"] == "rate_limit_error"


def test_the_tokens_of_a_minute_do_not_count_in_the_next(users: Users) -> None:
    """Used tokens count, and not the tokens that were reserved for the output."""
    users.add("tiny", tokens_per_minute=300)
    users.post("tiny", "/v1/responses", input="hello " * 400)
    assert users.post("tiny", "/v1/responses/compact", input="hello").status_code == 429
    users.now[0] += 60
    assert users.post("tiny", "/v1/responses/compact", input="hello").status_code == 200
    counts = asyncio.run(users.registry.count("tiny"))
    assert counts.requests == 1
    assert 0 < counts.tokens < DEFAULT_OUTPUT_TOKENS


def test_reserved_tokens_are_those_that_may_be_used(
    users: Users, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No output is reserved for a response without a model, and nothing remains reserved for a rejected request."""
    reserve = users.registry.reserve
    reserved = list[int]()

    async def record(token: AccessToken, tokens: int) -> Any:
        reserved.append(tokens)
        return await reserve(token, tokens)

    monkeypatch.setattr(users.registry, "reserve", record)
    users.create("small", input=[*WAIT, {"type": "compaction_trigger"}])
    assert reserved[0] < DEFAULT_OUTPUT_TOKENS
    locked = users.call("small", "POST", "/v1/conversations", json={}).json()["id"]
    users.create("small", input="wait", conversation=locked, background=True)
    before = users.count_tokens()
    rejected = users.post("small", "/v1/responses", input="x", conversation=locked)
    assert rejected.json()["error"]["code"] == "conversation_locked"
    assert users.count_tokens() == before


def test_a_failed_count_does_not_break_the_response(
    users: Users, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If counting fails, the response is complete, and its reservation is not replaced."""

    async def fail(*_: object) -> None:
        raise StoreBusy("busy")

    monkeypatch.setattr(users.registry, "settle", fail)
    assert users.create("small", max_output_tokens=100)["status"] == "completed"
    assert 100 < users.count_tokens() < 350


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", WAITING)
async def test_an_abandoned_answer_counts(
    users: Users, model: GatedModel, path: str, stream: bool
) -> None:
    """What a model wrote counts if the client leaves before the end, also after the model reported less."""
    model.reported = ModelUsage(1, 1)
    body = {"stream": stream, **WAITING[path]}
    options: Any = {"headers": users.make_headers("small", path), "timeout": TIMEOUT}
    async with httpx2.AsyncClient(base_url=users.server.url, **options) as client:
        sending = asyncio.create_task(client.post(path, json=body))
        await wait_until_async(lambda: model.waiting)
        sending.cancel()
        await asyncio.wait([sending])
    await asyncio.to_thread(wait_until, lambda: users.server.running == 0)
    await asyncio.to_thread(wait_until, lambda: 200 <= users.count_tokens() <= 250)


def test_a_cancelled_background_response_counts(model: GatedModel) -> None:
    """What was written before counts, and nothing of a response that was still queued."""
    limits = Limits(background_running=1, shutdown_seconds=0)
    with make_users(model=model, limits=limits) as users:
        for name in ("small", "late"):
            users.add(name, tokens_per_minute=100_000)
        created = [users.create(n, input="wait", background=True)["id"] for n in ("small", "late")]
        wait_until(lambda: model.waiting)
        for name, id_, least, most in (("late", created[1], 0, 0), ("small", created[0], 200, 250)):
            assert users.count_tokens(name) > DEFAULT_OUTPUT_TOKENS
            users.post(name, f"/v1/responses/{id_}/cancel")
            wait_until(
                lambda name=name, least=least, most=most: least <= users.count_tokens(name) <= most
            )
        assert model.started == ["wait"]


async def test_an_abandoned_answer_on_a_websocket_counts(users: Users) -> None:
    """The same applies to the answers of a WebSocket that is closed."""
    async with users.connect("small") as ws_client:
        await ws_client.create("wait")
        texts = [""]
        while len(texts) <= 200:  # otherwise the close would wait behind unread messages
            texts += filter(None, [(await ws_client.next_event()).get("delta")])
    await asyncio.to_thread(wait_until, lambda: 200 <= users.count_tokens() <= 250)


@pytest.mark.parametrize("path", WAITING)
async def test_parallel_requests_do_not_exceed_a_limit(
    users: Users, model: GatedModel, path: str
) -> None:
    """The estimates of running requests count: of many at once, those beyond the limit are rejected."""
    _, users.secrets["tiny"] = await users.registry.add("tiny", tokens_per_minute=300)
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    body = {**WAITING[path], limit: 250}
    asked = [
        asyncio.create_task(asyncio.to_thread(users.post, "tiny", path, **body)) for _ in range(12)
    ]
    finished = iter(asyncio.as_completed(asked))
    rejected = [await next(finished) for _ in range(10)]
    assert {(each.status_code, each.headers["retry-after"]) for each in rejected} == {(429, "60")}
    model.open_gate()
    assert [(await each).status_code for each in finished] == [200, 200]
    assert len(model.started) == 2
    assert 300 < (await users.registry.count("tiny")).tokens < 550


@pytest.mark.parametrize("operation", ["find", "count"])
def test_a_store_that_does_not_answer_is_an_outage(
    users: Users, monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    """While tokens cannot be checked, requests are rejected with 503, not with 500."""

    async def fail(*_: object, **__: object) -> None:
        raise StoreBusy("busy")

    with monkeypatch.context() as patch:
        patch.setattr(users.registry, operation, fail)
        rejected = users.call("small", "GET", "/v1/models")
        assert rejected.status_code == 503
        assert rejected.json()["error"]["code"] == "database_unavailable"
        assert users.call("admin", "GET", "/v1/models").status_code == 200
    assert users.call("small", "GET", "/v1/models").status_code == 200


@pytest.mark.parametrize(
    ("path", "more"),
    [*((path, {}) for path in WAITING), ("/v1/responses", {"background": True})],
)
def test_streams_of_a_revoked_token_end(
    users: Users, model: GatedModel, path: str, more: dict[str, Any]
) -> None:
    """A stream ends although its model sends nothing, and a model in the foreground is stopped."""
    with users.read_until_revoked("bob", path, **WAITING[path], **more) as received:
        assert b"[DONE]" not in received
        assert b"response.completed" not in received
    if more:
        model.open_gate()
    else:
        wait_until(lambda: model.cancelled == ["wait"])


async def test_a_response_to_a_revoked_token_is_rejected(users: Users, model: GatedModel) -> None:
    """A request that waits for its response is rejected when its token is revoked."""
    waiting = asyncio.to_thread(users.post, "bob", "/v1/responses", input="wait")
    task = asyncio.create_task(waiting)
    await wait_until_async(lambda: model.started)
    await users.registry.revoke("bob")
    answer = await task
    assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
