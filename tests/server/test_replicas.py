"""Several servers on one PostgreSQL database share responses, locks, cancellations and failures."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx2
import psycopg
import pytest

from kedge.errors import CannotServe, StoreUnreachable
from kedge.server import background
from kedge.server.background import read_stored_events
from kedge.server.prepare import ResponseDraft, prepare_claimed
from kedge.server.response_run import ResponseRun
from kedge.server.settings import Limits
from kedge.server.sse import EventsDropped
from kedge.server.storage.postgres import (
    MAX_ATTEMPTS,
    PURGE_LOCK,
    ClaimedResponse,
    PostgresServerDatabase,
)
from kedge.testing import serve
from postgresql import PASSWORD
from server.conftest import parse_events, prepare_draft
from server.gated_model import GatedModel
from server.waiting import TIMEOUT, wait_until

LIMITS = Limits(lease_seconds=600.0, shutdown_seconds=1.0)
"""Leases long enough to expire only when a test makes them expire."""


@pytest.fixture
def url(empty_schema: str) -> str:
    """Return the address of an empty schema."""
    return empty_schema


MESSAGE = {"type": "message", "role": "user", "content": "secret"}


class Replica:
    """One of the servers, with its model and a client."""

    def __init__(self, stack: ExitStack, url: str) -> None:
        self.url = url
        self.model = GatedModel()
        self.server = stack.enter_context(serve(db=url, limits=LIMITS, model=self.model))
        client = httpx2.Client(base_url=self.server.base_url, verify=False, timeout=TIMEOUT)
        self.http = stack.enter_context(client)

    def create(self, prompt: Any, key: str = "", **body: Any) -> Any:
        """Create a response and return the body."""
        headers = {"Idempotency-Key": key} if key else {}
        request = {"model": "m", "input": prompt, **body}
        return self.http.post("/responses", json=request, headers=headers).json()

    def create_conversation(self, *items: Any) -> str:
        """Create a conversation and return its id."""
        return self.http.post("/conversations", json={"items": items}).json()["id"]

    def stream(self, prompt: str, key: str = "", **body: Any) -> list[dict[str, Any]]:
        """Create a response, and return its events."""
        with self.open_stream(prompt, key, **body) as events:
            return list(events)

    @contextmanager
    def open_stream(
        self, prompt: str, key: str = "", **body: Any
    ) -> Iterator[Iterator[dict[str, Any]]]:
        """Create a response, and yield its events as they arrive."""
        headers = {"Idempotency-Key": key} if key else {}
        request = {"model": "m", "input": prompt, "stream": True, **body}
        with self.http.stream("POST", "/responses", json=request, headers=headers) as answer:
            yield parse_events(answer.iter_lines())

    def retrieve(self, id_: str) -> Any:
        """Return a response."""
        return self.http.get(f"/responses/{id_}").json()

    def wait_for(self, response: Any, status: str) -> None:
        """Wait until a response has a status."""
        wait_until(lambda: self.retrieve(response["id"])["status"] == status)

    def wait_started(self, count: int = 1) -> None:
        """Wait until the model has begun to answer."""
        wait_until(lambda: len(self.model.started) >= count)

    def read_events(self, id_: str, **query: Any) -> list[dict[str, Any]]:
        """Return the events of a background response up to its end."""
        answer = self.http.get(f"/responses/{id_}", params={"stream": "true", **query})
        return list(parse_events(answer.text.splitlines()))

    def lose_lease(self) -> None:
        """Expire the lease of this server while it is still running."""

        def stop_renewing(service: Any) -> str:
            service.claims.renew = lambda: None
            return service._database.owner

        owner = self.server.call(stop_renewing)
        execute(self.url, "UPDATE kedge_server_replicas SET alive_until = 0 WHERE id = %s", owner)


@contextmanager
def run_replica(url: str) -> Iterator[Replica]:
    """Run one server inside the block."""
    with ExitStack() as stack:
        yield Replica(stack, url)


Replicas = tuple[Replica, Replica]


@pytest.fixture
def replicas(url: str) -> Iterator[Replicas]:
    """Yield two servers on one database."""
    with ExitStack() as stack:
        yield Replica(stack, url), Replica(stack, url)


def execute(url: str, statement: str, *values: Any) -> list[Any]:
    with psycopg.connect(url, autocommit=True) as connection:
        cursor = connection.execute(statement.encode(), values)
        return cursor.fetchall() if cursor.description else []


def test_a_conversation_is_locked_for_every_server(replicas: Replicas) -> None:
    """While one server generates, another server cannot change the conversation."""
    one, other = replicas
    id_ = one.create_conversation()
    response = one.create("wait", conversation=id_, background=True)
    for answer in (
        other.create("hello", conversation=id_),
        other.http.post(f"/conversations/{id_}/items", json={"items": [MESSAGE]}).json(),
        other.http.delete(f"/conversations/{id_}").json(),
    ):
        assert answer["error"]["code"] == "conversation_locked"
    one.wait_started()
    one.model.open_gate()
    other.wait_for(response, "completed")
    assert other.create("hello", conversation=id_)["status"] == "completed"
    assert len(other.server.requests[-1].context or ()) == 3
    assert other.http.delete(f"/conversations/{id_}").json()["deleted"]


@pytest.mark.parametrize("status", ["completed", "cancelled"])
def test_no_server_sees_the_end_of_a_response_in_a_locked_conversation(
    replicas: Replicas, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once a response has ended, its conversation can be continued on every server."""
    one, other = replicas
    id_ = one.create_conversation()
    response = one.create("wait", conversation=id_, background=True)
    unlock = PostgresServerDatabase.unlock_conversation
    seen = list[str]()

    def unlock_later(database: PostgresServerDatabase, name: str) -> None:
        seen.append(other.retrieve(response["id"])["status"])
        unlock(database, name)

    monkeypatch.setattr(PostgresServerDatabase, "unlock_conversation", unlock_later)
    one.wait_started()
    if status == "completed":
        one.model.open_gate()
    else:
        one.http.post(f"/responses/{response['id']}/cancel")
    other.wait_for(response, status)
    wait_until(lambda: seen)
    assert seen == ["in_progress"]


def test_a_deleted_response_is_deleted_for_every_server(replicas: Replicas) -> None:
    """A cached context is used only after its response was found in the database."""
    one, other = replicas
    first = one.create("one")
    second = one.create("two", previous_response_id=first["id"])
    assert other.http.delete(f"/responses/{second['id']}").status_code == 200
    rejected = one.create("three", previous_response_id=second["id"])
    assert rejected["error"]["code"] == "previous_response_not_found"
    assert one.http.get(f"/responses/{second['id']}/input_items").status_code == 404
    assert one.create("three", previous_response_id=first["id"])["status"] == "completed"


def test_a_deleted_conversation_is_deleted_for_every_server(replicas: Replicas) -> None:
    """An item is found by its id, on every server, until its conversation is deleted."""
    one, other = replicas
    id_ = one.create_conversation(MESSAGE)
    (item,) = one.http.get(f"/conversations/{id_}/items").json()["data"]
    assert one.create("one", conversation=id_)["status"] == "completed"
    reference: Any = [{"type": "item_reference", "id": item["id"]}, MESSAGE]
    assert other.create(reference)["status"] == "completed"
    assert one.http.delete(f"/conversations/{id_}").json()["deleted"]
    assert "not found" in other.create(reference)["error"]["message"]


def test_response_with_deleted_parent_is_not_stored(replicas: Replicas, url: str) -> None:
    """A response whose parent was deleted is an error, because it could not be continued."""
    one, other = replicas
    first = one.create("one")
    body = {"model": "m", "input": "two", "previous_response_id": first["id"]}
    run = one.server.call(lambda service: ResponseRun(service, prepare_draft(service, body)))
    assert other.http.delete(f"/responses/{first['id']}").status_code == 200
    with pytest.raises(Exception, match="was deleted while this response was generated"):
        one.server.call(lambda _: run.begin())
    one.server.call(lambda _: run.end())
    assert execute(url, "SELECT count(*) FROM kedge_server_nodes") == [(0,)]


def test_a_background_response_is_continued_by_another_server(replicas: Replicas) -> None:
    """It has the same context, id and event numbers; late output of the first server is dropped."""
    one, other = replicas
    first = other.create("one")
    with one.open_stream("wait two", previous_response_id=first["id"], background=True) as stream:
        created = next(stream)["response"]
        one.wait_started()
        other.server.clock.advance(seconds=60)
        one.lose_lease()
        wait_until(lambda: other.model.started == ["one", "wait two"])
        other.model.open_gate()
        events = other.read_events(created["id"])
        one.model.open_gate()
    wait_until(lambda: one.server.running == 0)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.queued"]
    stored = events[-1]["response"]
    assert stored["created_at"] == created["created_at"]
    assert one.retrieve(created["id"]) == other.retrieve(created["id"]) == stored
    for count in (2, 0):
        after = events[-1 - count]["sequence_number"]
        assert (
            other.read_events(created["id"], starting_after=after) == events[len(events) - count :]
        )
    assert one.create("three", previous_response_id=created["id"])["status"] == "completed"
    texts = [item["content"][0]["text"] for item in one.server.requests[-1].context or ()]
    assert texts == ["one", "answer to one", "wait two", "answer to wait two", "three"]


def test_a_stream_can_be_read_from_every_server(replicas: Replicas) -> None:
    """Any server returns the stream from any event until its events are deleted; the response remains."""
    one, other = replicas
    events = one.stream("hello", background=True)
    id_ = events[0]["response"]["id"]
    assert other.read_events(id_) == one.read_events(id_) == events
    assert other.read_events(id_, starting_after=3) == events[4:]
    plain = one.create("hello", background=True)["id"]  # without streaming

    def delete_old(service: Any) -> None:
        service.claims.delete_old(-1.0)

    other.server.call(delete_old)
    for each in (plain, id_):
        rejected = other.http.get(f"/responses/{each}", params={"stream": "true"}).json()
        assert rejected["error"]["code"] == "stream_not_kept"
    assert one.retrieve(id_)["status"] == "completed"


def test_events_are_stored_before_the_end_of_a_response(
    replicas: Replicas, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cancelled response has all events that its first reader got."""
    monkeypatch.setattr(background, "STORE_SECONDS", 3600.0)
    one, other = replicas
    with one.open_stream("wait", background=True) as stream:
        events = [next(stream) for _ in range(6)]
        id_ = events[0]["response"]["id"]
        one.http.post(f"/responses/{id_}/cancel")
        events += stream
    assert other.read_events(id_) == events


def test_a_response_can_be_cancelled_through_every_server(replicas: Replicas) -> None:
    """Its model is then stopped; an answer that is complete before does not replace the cancellation."""
    one, other = replicas
    response = one.create("wait", background=True)
    one.wait_started()
    assert other.http.delete(f"/responses/{response['id']}").status_code == 400
    cancelled = other.http.post(f"/responses/{response['id']}/cancel").json()
    assert cancelled["status"] == "cancelled"
    wait_until(lambda: one.model.cancelled == ["wait"])
    assert one.retrieve(response["id"])["status"] == "cancelled"

    def ignore_cancellation(service: Any) -> None:
        service.claims.find_lost = lambda nodes: []

    one.server.call(ignore_cancellation)
    response = one.create("wait", background=True)
    one.wait_started(2)
    assert other.http.post(f"/responses/{response['id']}/cancel").json()["status"] == "cancelled"
    one.model.open_gate()
    wait_until(lambda: one.model.finished)
    finished = one.create("hello", background=True)
    one.wait_for(finished, "completed")
    assert other.http.post(f"/responses/{finished['id']}/cancel").status_code == 400
    stored = other.retrieve(response["id"])
    assert (stored["status"], stored["output"]) == ("cancelled", [])


def test_streams_of_a_lost_server_are_failed(replicas: Replicas) -> None:
    """A response whose server is lost is failed, and its conversation is unlocked."""
    one, other = replicas
    conversation = one.create_conversation()
    with one.open_stream("wait", conversation=conversation) as stream:
        response = next(stream)["response"]
        one.lose_lease()
        other.wait_for(response, "failed")
        assert other.create("hello", conversation=conversation)["status"] == "completed"
        one.model.open_gate()
    assert other.retrieve(response["id"])["status"] == "failed"
    assert len(other.http.get(f"/conversations/{conversation}/items").json()["data"]) == 2


def test_response_is_failed_after_repeated_attempts(url: str) -> None:
    """A response with too many attempts, or with an invalid request, is failed, and its conversation is unlocked."""
    with run_replica(url) as one:
        ids = [one.create_conversation() for _ in range(3)]
        responses = [one.create("wait", background=True, conversation=id_) for id_ in ids]
        one.wait_started(3)
    invalid = json.dumps({"model": "m", "input": "wait", "tool_choice": "required"}).encode()
    changes = [("attempts", MAX_ATTEMPTS), ("request", b"true"), ("request", invalid)]
    for response, (column, value) in zip(responses, changes, strict=True):
        statement = f"UPDATE kedge_server_nodes SET {column} = %s WHERE key = %s"  # noqa: S608
        execute(url, statement, value, response["id"].removeprefix("resp_"))
    with run_replica(url) as other:
        for each in responses:
            other.wait_for(each, "failed")
        assert other.model.started == []
        for id_ in ids:
            assert other.create("x", conversation=id_)["status"] == "completed"


def test_claimed_response_is_continued_after_an_outage(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a stopped server, in the next round after a failure; the conversation stays locked until its end."""
    with run_replica(url) as one:
        id_ = one.create_conversation()
        response = one.create("wait", background=True, conversation=id_)
        one.wait_started()
    attempts: list[str] = []

    def fail_once(service: Any, claimed: ClaimedResponse) -> ResponseDraft:
        attempts.append(f"resp_{claimed.key}")
        if len(attempts) == 1:
            raise StoreUnreachable("no answer")
        return prepare_claimed(service, claimed)

    monkeypatch.setattr(background, "prepare_claimed", fail_once)
    with run_replica(url) as other:
        assert other.create("x", conversation=id_)["error"]["code"] == "conversation_locked"
        other.wait_started()
        other.model.open_gate()
        other.wait_for(response, "completed")
        assert other.create("x", conversation=id_)["status"] == "completed"
    assert attempts == [response["id"]] * 2


def test_one_server_purges_at_a_time(replicas: Replicas, url: str) -> None:
    """A second server skips the purge instead of waiting."""
    one, other = replicas
    response = one.create("hello")
    for replica in replicas:
        replica.server.clock.advance(days=31)
    with psycopg.connect(url) as connection:
        connection.execute(
            b"SELECT pg_advisory_xact_lock(%s, hashtext(current_schema()))", (PURGE_LOCK,)
        )
        assert one.server.call(lambda service: service.purge()) == 0
    assert other.server.call(lambda service: service.purge()) == 1
    assert other.http.get(f"/responses/{response['id']}").status_code == 404


def test_a_stream_of_a_deleted_response_ends(replicas: Replicas) -> None:
    """Reading the stored events of a deleted response raises ``EventsDropped``."""
    one, other = replicas
    id_ = one.stream("hello", background=True)[0]["response"]["id"]
    read: list[bytes] = []

    async def read_all(service: Any) -> None:
        node = service.responses.find(id_)[0]
        other.http.delete(f"/responses/{id_}")
        async for frames in read_stored_events(service, service.claims, node, -1):
            read.append(frames)  # noqa: PERF401 - not all of them arrive

    loop = one.server._server.loop
    assert loop is not None
    future = asyncio.run_coroutine_threadsafe(read_all(one.server._service), loop)
    with pytest.raises(EventsDropped):
        future.result(TIMEOUT)
    assert read == []


@pytest.fixture(params=["sqlite", "postgresql"])
def repeating(request: pytest.FixtureRequest) -> Iterator[Replicas]:
    """Yield the servers that get a request and its repetition: the same one, or two on one database."""
    with ExitStack() as stack:
        if request.param == "sqlite":
            one = Replica(stack, ":memory:")
            yield one, one
        else:
            url: str = request.getfixturevalue("url")
            yield Replica(stack, url), Replica(stack, url)


def test_a_repeated_request_gets_the_same_response(repeating: Replicas) -> None:
    """A response with an idempotency key is generated once, and added once to its conversation."""
    one, other = repeating
    conversation = one.create_conversation()
    first = one.create("hello", "a", conversation=conversation)
    assert first["status"] == "completed"
    assert other.create("hello", "a", conversation=conversation) == first
    assert len(one.http.get(f"/conversations/{conversation}/items").json()["data"]) == 2


def test_an_idempotency_key_belongs_to_one_request(repeating: Replicas) -> None:
    """Another request with the key is rejected."""
    one, other = repeating
    one.create("hello", "a")
    assert other.create("other", "a")["error"]["code"] == "idempotency_key_reused"


def test_an_idempotency_key_has_at_most_255_characters() -> None:
    """A longer key is rejected."""
    with run_replica(":memory:") as replica:
        assert replica.create("x", "k" * 255)["status"] == "completed"
        assert replica.create("x", "k" * 256)["error"]["code"] == "idempotency_key_too_long"


def test_a_repeated_stream_has_complete_items(repeating: Replicas) -> None:
    """It starts and ends with the same response, and has no deltas."""
    one, other = repeating
    streamed = one.stream("hello", "a")
    repeated = other.stream("hello", "a")
    names = ["created", "in_progress", "output_item.added", "output_item.done", "completed"]
    assert [event["type"] for event in repeated] == [f"response.{name}" for name in names]
    assert repeated[0]["response"] == repeated[1]["response"] == streamed[1]["response"]
    assert repeated[-1]["response"] == streamed[-1]["response"]


def test_a_repeated_background_request_gets_the_running_response(repeating: Replicas) -> None:
    """The response that a key is used for may be unfinished; a cancelled one is generated again."""
    one, other = repeating
    queued = one.create("wait", "a", background=True)
    assert other.create("wait", "a", background=True)["id"] == queued["id"]
    one.http.post(f"/responses/{queued['id']}/cancel")
    assert other.create("wait", "a", background=True)["id"] != queued["id"]


def test_a_repeated_background_stream_has_the_same_events(repeating: Replicas) -> None:
    """The events of a background response are stored, so they are replayed."""
    one, other = repeating
    streamed = one.stream("hello", "a", background=True)
    assert other.stream("hello", "a", background=True) == streamed


def test_an_unstored_response_is_generated_again(repeating: Replicas) -> None:
    """Without a stored response an idempotency key has no effect."""
    one, other = repeating
    unstored = one.create("hello", "a", store=False)
    assert other.create("hello", "a", store=False)["id"] != unstored["id"]


def test_an_idempotency_key_expires_with_its_response(repeating: Replicas) -> None:
    """After thirty days another request may use the key."""
    one, other = repeating
    one.create("hello", "a")
    for replica in {one, other}:
        replica.server.clock.advance(days=31)
    assert other.create("other", "a")["status"] == "completed"


def test_idempotency_key_is_in_use_until_the_response_ends(replicas: Replicas) -> None:
    """A key in use is a conflict; a failed response, or one of a lost server, is generated again."""
    one, other = replicas
    body = {"model": "m", "input": "wait", "stream": True}
    with one.open_stream("wait", "a") as stream:
        lost = next(stream)["response"]["id"]
        busy = other.http.post("/responses", json=body, headers={"Idempotency-Key": "a"})
        assert busy.status_code == 409
        assert busy.json()["error"]["code"] == "idempotency_key_in_use"
        one.lose_lease()
        with other.open_stream("wait", "a") as repeated:
            new = next(repeated)["response"]["id"]
            assert new != lost
            other.model.open_gate()
            list(repeated)
        one.model.open_gate()
    assert other.retrieve(lost)["status"] == "failed"
    assert one.retrieve(new)["status"] == "completed"


def test_a_wrong_password_is_not_in_the_error(url: str) -> None:
    """The error for a database that cannot be opened does not contain the password."""
    with pytest.raises(CannotServe, match="cannot be opened") as wrong:
        serve(db=url.replace(PASSWORD, "letmein")).__enter__()
    assert "letmein" not in str(wrong.value)


def test_a_path_with_nul_is_not_found(url: str) -> None:
    """PostgreSQL rejects texts with NUL; an id with one does not exist, as on SQLite."""
    with run_replica(url) as one:
        for path in ("/conversations/%00", "/conversations/%00/items", "/responses/%00"):
            assert one.http.get(path).status_code == 404
