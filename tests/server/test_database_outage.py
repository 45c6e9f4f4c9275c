"""A server whose PostgreSQL does not answer: 503 within the limits, and all changes are stored afterwards."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest

from kedge.server.settings import Limits
from postgresql import PostgresServer, create_schema, freeze, freeze_server, list_client_pids
from server.test_replicas import Replica, run_replica
from server.waiting import TIMEOUT, wait_until

LIMITS = Limits(lease_seconds=1.0, shutdown_seconds=1.0, database_seconds=1.0)


@pytest.fixture
def url(own_server: PostgresServer) -> Iterator[str]:
    """Yield the address of an empty database on a server that may be frozen."""
    with create_schema(own_server.url) as schema:
        yield schema


@pytest.fixture
def replica(url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Replica]:
    """Yield a server with short limits for its database."""
    monkeypatch.setattr("server.test_replicas.LIMITS", LIMITS)
    with run_replica(url) as running:
        yield running


def read_health(replica: Replica) -> tuple[int, str]:
    """Return the status code of the health check and the status in its body."""
    answer = replica.http.get(f"{replica.server.base_url.removesuffix('/v1')}/healthz")
    return answer.status_code, answer.json()["status"]


def test_a_database_that_does_not_answer_is_reported(
    replica: Replica, own_server: PostgresServer
) -> None:
    """While the server is frozen, every route answers 503 and so does the health check; then all work again."""
    response = replica.create("hello")
    assert read_health(replica) == (200, "ok")
    with freeze_server(own_server):
        answer = replica.http.get(f"/responses/{response['id']}")
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "database_unavailable"
        posted = replica.http.post("/responses", json={"model": "m", "input": "hello"})
        assert posted.status_code == 503
        assert read_health(replica) == (503, "unavailable")
    wait_until(lambda: read_health(replica) == (200, "ok"))
    wait_until(lambda: replica.retrieve(response["id"]).get("status") == "completed")


def test_frozen_connections_are_replaced(replica: Replica, own_server: PostgresServer) -> None:
    """If only the processes of open connections are frozen, new ones serve the next requests."""
    response = replica.create("hello")
    with freeze(list_client_pids(own_server.url)):
        assert replica.http.get(f"/responses/{response['id']}").status_code in (200, 503)
        wait_until(lambda: replica.retrieve(response["id"]).get("status") == "completed")


def test_requests_do_not_wait_for_all_that_came_before(replica: Replica) -> None:
    """An operation that waited too long for its turn fails, instead of waiting for the database as well."""
    response = replica.create("hello")

    def shorten(service: Any) -> None:
        service._database.pool.wait_seconds = -1.0  # so that every turn comes too late

    replica.server.call(shorten)
    assert replica.http.get(f"/responses/{response['id']}").status_code == 503


def test_a_conversation_is_unlocked_after_an_outage(replica: Replica, url: str) -> None:
    """While another program locks tables, requests get 503; a conversation is locked no longer than they are."""
    conversation = replica.http.post("/conversations", json={}).json()["id"]
    stored = replica.create("hello")
    with ThreadPoolExecutor(1) as threads, psycopg.connect(url) as other:
        posted = threads.submit(replica.create, "wait", conversation=conversation)
        wait_until(lambda: replica.model.waiting)
        other.execute("LOCK TABLE kedge_server_nodes, kedge_server_conversations")
        assert replica.http.get(f"/responses/{stored['id']}").status_code == 503
        replica.model.open_gate()
        assert posted.result(TIMEOUT)["error"]["code"] == "database_unavailable"
    wait_until(lambda: replica.create("again", conversation=conversation).get("error") is None)
