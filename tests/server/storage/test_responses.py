"""Retention, expiry and deletion of stored responses."""

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from openai import BadRequestError, NotFoundError, OpenAI

from kedge.errors import CannotServe
from kedge.server.errors import ApiError
from kedge.server.settings import DAY, Settings
from kedge.server.state import ServerState
from kedge.server.storage import responses as repositories
from kedge.server.storage.responses import ResponseEntry, ResponseRepository, ResponseResult
from kedge.store.open import open_current_database, resolve_address
from kedge.testing import TestServer, serve
from postgresql import create_schema
from server.conftest import Connect, ask, count_nodes, rejects, user_message
from server.waiting import wait_until

SECRET = "the-unmistakable-words-of-a-user"


RunServer = Callable[..., AbstractContextManager[tuple[TestServer, OpenAI]]]


@pytest.fixture(params=["sqlite", "postgresql"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Yield the ``db`` setting of a server: an empty database of each kind."""
    if request.param == "sqlite":
        yield str(tmp_path / "server.db")
        return
    with create_schema(request.getfixturevalue("postgres_url")) as url:
        yield url


@pytest.fixture
def running(connect: Connect) -> RunServer:
    """Return a context manager that runs a server with given settings and a client for it."""

    @contextmanager
    def run(**settings: Any) -> Iterator[tuple[TestServer, OpenAI]]:
        with serve(**settings) as server:
            yield server, connect(server)

    return run


def read_files(db: Path) -> bytes:
    return b"".join(path.read_bytes() for path in db.parent.glob(f"{db.name}*"))


def test_long_chain_is_loaded_in_one_query(tmp_path: Path, running: RunServer) -> None:
    """A server with an empty cache loads a chain of any length in one query."""
    db = str(tmp_path / "server.db")
    previous: str | None = None
    with running(db=db) as (_, client):
        for number in range(30):
            response = ask(client, str(number), previous)
            previous = response.id
    with running(db=db) as (server, client):
        statements: list[str] = []

        def trace(service: Any) -> None:
            service._database._connection.set_trace_callback(statements.append)

        server.call(trace)
        ask(client, "last", previous)
        assert len(server.requests[-1].context or ()) == 61
        assert len(statements) < 10
        assert sum("RECURSIVE" in statement for statement in statements) == 1


def test_deleted_content_is_removed_from_disk(tmp_path: Path, running: RunServer) -> None:
    """The text of a response is in the files until its last descendant is deleted."""
    db = tmp_path / "server.db"
    with running(db=str(db)) as (server, client):
        first = ask(client, SECRET)
        second = ask(client, "two", first.id)
        client.responses.delete(first.id)
        assert SECRET.encode() in read_files(db)
        client.responses.delete(second.id)
        assert SECRET.encode() not in read_files(db)
        assert server.call(count_nodes) == 0


def test_expired_content_is_removed_from_disk(tmp_path: Path, running: RunServer) -> None:
    """A response that has expired cannot be read, and its text is in the files until it is purged."""
    db = tmp_path / "server.db"
    with running(db=str(db)) as (server, client):
        response = ask(client, SECRET)
        server.clock.advance(days=29)
        assert client.responses.retrieve(response.id)
        server.clock.advance(days=1, seconds=1)
        with pytest.raises(NotFoundError):
            client.responses.retrieve(response.id)
        assert SECRET.encode() in read_files(db)
        assert server.purge() == 1
        assert SECRET.encode() not in read_files(db)


def test_the_purge_runs_at_the_start(tmp_path: Path, running: RunServer) -> None:
    """A server deletes expired responses when it starts."""
    db = tmp_path / "folder" / "server.db"
    with running(db=str(db)) as (_, client):
        ask(client, SECRET)
        assert all(path.stat().st_mode & 0o077 == 0 for path in db.parent.iterdir())  # private
    with running(db=str(db), retention=30 * DAY) as (server, _):
        assert SECRET.encode() in read_files(db)
    with sqlite3.connect(db) as direct:
        direct.execute("UPDATE kedge_server_nodes SET expires_at = 1")
    direct.close()
    with running(db=str(db)) as (server, client):
        client.models.list()  # one iteration of the event loop
        assert server.call(count_nodes) == 0
    assert SECRET.encode() not in read_files(db)


def test_the_file_behind_a_link_is_private(tmp_path: Path, running: RunServer) -> None:
    """The database behind a link to a file that does not exist is as private as any other."""
    folder = tmp_path / "disk"
    folder.mkdir()
    (tmp_path / "link.db").symlink_to(folder / "server.db")
    with running(db=str(tmp_path / "link.db")) as (_, client):
        ask(client, SECRET)
        modes = {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()}
    assert modes["server.db"] == 0o600
    assert set(modes.values()) == {0o600}


def test_a_file_whose_name_is_like_a_uri_is_that_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite would open another file, which everyone could read."""
    monkeypatch.chdir(tmp_path)
    with serve(db="file:x.db"):
        files = {each.name.partition("-")[0] for each in tmp_path.iterdir()}
    assert files == {"file:x.db"}
    assert all(each.stat().st_mode & 0o077 == 0 for each in tmp_path.iterdir())


def test_the_purge_continues_after_a_failure(
    running: RunServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk, for example, ends one round; the next ones run as before."""
    rounds: list[int] = []

    def purge(_: ServerState) -> int:
        rounds.append(1)
        if len(rounds) == 1:
            raise sqlite3.OperationalError("database or disk is full")
        return 0

    monkeypatch.setattr(ServerState, "purge", purge)
    with running(purge_every=0.001):
        wait_until(lambda: len(rounds) > 2)


def test_zero_data_retention_stores_nothing(tmp_path: Path, running: RunServer) -> None:
    """Chaining is rejected with the hosted API's message, and no content is written to disk."""
    db = tmp_path / "server.db"
    with running(db=str(db), zero_data_retention=True) as (_, client):
        response = ask(client, SECRET, store=True)
        assert response.model_extra is not None
        assert response.model_extra["store"] is False
        with rejects("unsupported_parameter", "due to Zero Data Retention"):
            ask(client, "x", response.id)
        for use in (client.conversations.create, lambda: ask(client, "x", conversation="conv_x")):
            with pytest.raises(BadRequestError, match="Zero Data Retention"):
                use()
        assert SECRET.encode() not in read_files(db)


def test_a_database_has_one_server_at_a_time(tmp_path: Path, running: RunServer) -> None:
    """A second server on a file that is not a store is rejected."""
    db = str(tmp_path / "server.db")
    with running(db=db), pytest.raises(CannotServe, match="in use by another server"):
        serve(db=db).__enter__()


def create_store(address: str) -> None:
    """Create the store whose tables a server uses."""
    open_current_database(resolve_address(address)).close()


def test_several_servers_can_use_a_store(
    address: str, running: RunServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each server continues the responses of the other, and a deletion is visible to both."""
    create_store(address)
    shared: dict[str, Any] = {"db": address, "in_store": True}
    with running(**shared) as (_, one), running(**shared) as (_, other):
        responses = [ask(one, "My name is Ada.") for _ in range(3)]
        clients = [(response.id, client) for response in responses for client in (one, other)]
        second = [ask(client, "What is my name?", id_) for id_, client in clients]
        assert len({response.id for response in (*responses, *second)}) == 9
        assert all("Ada" in response.output_text for response in second)
        one.responses.delete(responses[0].id)
        with pytest.raises(NotFoundError):
            other.responses.retrieve(responses[0].id)
        # Between finding a response and reading its context another process may delete it.
        monkeypatch.setattr(ResponseRepository, "find", lambda *_: (999, "completed", False))
        with pytest.raises(BadRequestError, match="not found"):
            ask(one, "Hi", responses[1].id)


def test_unfinished_responses_of_other_processes_are_failed_later(tmp_path: Path) -> None:
    """A server in a store does not fail responses that another process may still be writing."""
    settings = Settings(db=str(tmp_path / "store.db"), in_store=True)
    create_store(settings.db)

    def read_statuses(now: float) -> list[str]:
        state = ServerState.open(replace(settings, clock=lambda: now))
        rows = state.nodes._execute("SELECT status FROM kedge_server_nodes").fetchall()
        state.close()
        return [status for (status,) in rows]

    state = ServerState.open(replace(settings, clock=lambda: 1000.0))
    key = state.nodes.new_key()
    entry = ResponseEntry(state.nodes.keys.parse_node(key), key, None, None, b"{}", b"[]")
    state.responses.begin(entry, barrier=False)
    state.close()
    assert read_statuses(1000.0 + settings.limits.answer_seconds - 1) == ["in_progress"]
    assert read_statuses(1000.0 + settings.limits.answer_seconds) == ["failed"]


def test_a_response_in_a_changed_conversation_is_not_stored() -> None:
    """A response whose conversation has other items than those it was generated from is an error."""
    state = ServerState.open(Settings())
    message = {"id": "msg_1", "type": "message", "role": "user", "content": []}
    changed = state.conversations.create({}, state.nodes.new_key(), [message])
    key = state.nodes.new_key()
    entry = ResponseEntry(state.nodes.keys.parse_node(key), key, None, changed.id, b"{}", b"[]")
    with pytest.raises(ApiError) as error:
        state.responses.settle(
            entry, ResponseResult("completed", b"{}", b"[]", False, 0), is_new=True
        )
    assert error.value.code == "conversation_locked"
    assert count_nodes(state) == 1
    state.close()


def test_the_oldest_responses_of_a_large_database_are_deleted(
    address: str, running: RunServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit applies to all content: conversation objects without responses are deleted as well."""
    monkeypatch.setattr(repositories, "PURGE_BATCH_SIZE", 1)
    with running(db=address, max_db_bytes=100_000) as (server, client):
        conversation = client.conversations.create(items=[user_message("x" * 50_000)])
        old = ask(client, "x" * 50_000)
        new = ask(client, "new")
        assert server.call(lambda service: service.purge()) == 1
        with pytest.raises(NotFoundError):
            client.responses.retrieve(old.id)
        assert server.call(lambda service: service.purge()) == 0
        assert client.conversations.retrieve(conversation.id).id == conversation.id
        client.responses.delete(new.id)
        more: Any = [user_message("y" * 90_000)]
        client.conversations.items.create(conversation.id, items=more)
        assert server.call(lambda service: service.purge()) == 1
        with pytest.raises(NotFoundError):
            client.conversations.retrieve(conversation.id)
        assert server.call(count_nodes) == 0


def test_an_address_that_is_no_database_is_rejected(tmp_path: Path) -> None:
    """A folder or a file of another kind is not changed; an error contains no password."""
    with serve(db=f"sqlite:///{tmp_path}/my%20server.db"):
        assert (tmp_path / "my server.db").exists()
    text = tmp_path / "notes.txt"
    text.write_text("not a database, " * 100)
    for address, problem in (
        (str(text), f"{text}.*: the file is not a SQLite database"),
        (str(tmp_path), f"{tmp_path}.*: the file cannot be opened or created"),
        ("mysql://user:planted@host/x", "unknown database address"),
    ):
        with pytest.raises(CannotServe, match=problem) as error:
            serve(db=address).__enter__()
        assert "planted" not in str(error.value)
    assert text.read_text().startswith("not a database")
