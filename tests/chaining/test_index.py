"""Tests of each implementation of an anchor index, and of clients that share one."""

import json
import os
import signal
import sqlite3
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from openai import AsyncOpenAI, OpenAI

from chaining.programs import ask, bodies
from chaining.proxy.running import serve_proxy
from forked import ForkedProcess
from kedge.chaining import (
    IndexedResponse,
    MemoryIndex,
    ResponseIndex,
    StoreIndex,
    chain,
    chain_report,
    unchain,
)
from kedge.planning import AnchorRecord, TokenCounts
from kedge.store import open_store, response_index
from kedge.store.database.transactions import Database
from kedge.store.open import open_current_database
from kedge.testing import serve
from postgresql import run_server

MakeIndex = Callable[..., ResponseIndex]
COUNTED = TokenCounts(10, 0, 3, 0, 0, 7)
ENTRY = IndexedResponse(
    AnchorRecord("resp_1", "scope", "sha256:1", 2, created_at=5.0, counted=COUNTED),
    frozenset({"rs_1"}),
)


@pytest.fixture(params=["memory", "sqlite_url", "empty_schema"])
def make_index(request: pytest.FixtureRequest) -> Iterator[MakeIndex]:
    """Yield a function that opens an empty index."""
    url = "" if request.param == "memory" else request.getfixturevalue(request.param)
    with ExitStack() as stack:

        def make(**options: Any) -> ResponseIndex:
            if not url:
                return MemoryIndex(**options)
            index = StoreIndex(url, **options)
            stack.callback(index.close)
            return index

        yield make


def change(**facts: Any) -> IndexedResponse:
    """Return the entry with these facts of its response."""
    return structs.replace(ENTRY, record=structs.replace(ENTRY.record, **facts))


def test_a_response_is_found_by_its_content(make_index: MakeIndex) -> None:
    """An entry is found only in its scope, with all of its fields, until it is marked as lost."""
    index = make_index()
    assert index.add("scope", ENTRY) is False
    digests = [f"sha256:{number}" for number in range(1_200)]
    assert index.find("scope", digests) == [ENTRY]
    assert index.find("other", digests) == []
    assert index.get("scope", "resp_1") == ENTRY
    assert index.get("scope", "resp_2") is None
    index.mark_lost("scope", "resp_1", "resp_2")
    assert index.find("scope", digests) == []
    assert index.get("scope", "resp_1") is None


def test_an_id_with_other_content_is_reported_and_replaced(make_index: MakeIndex) -> None:
    """Adding an id with other content is reported; adding the same entry again is not."""
    index = make_index()
    index.add("scope", ENTRY)
    assert index.add("scope", ENTRY) is False
    changed = change(digest="sha256:2")
    assert index.add("scope", changed) is True
    assert index.find("scope", ["sha256:1", "sha256:2"]) == [changed]


def test_an_id_that_never_completed_is_not_issued_again(make_index: MakeIndex) -> None:
    """A response whose older entry was not completed has no other content that could be replaced."""
    index = make_index()
    index.add("scope", change(status="in_progress"))
    assert index.add("scope", change(digest="sha256:2")) is False


@pytest.mark.parametrize("text", ["{}", '{"record": {"response_id": "resp_1"}}', "not JSON"])
def test_an_entry_of_another_form_is_not_found(store_url: str, text: str) -> None:
    """An entry that cannot be read, such as that of another version, costs one full send, and is replaced."""
    index = StoreIndex(store_url)
    with closing(index), closing(open_current_database(store_url, 30.0, 30.0)) as database:
        values = ("scope", "resp_1", "sha256:1", text, 5.0)
        database.write_sync(lambda tx: response_index.put_entry(tx, *values))
        assert index.find("scope", ["sha256:1"]) == []
        assert index.get("scope", "resp_1") is None
        assert index.add("scope", ENTRY) is False
        assert index.find("scope", ["sha256:1"]) == [ENTRY]


def test_a_dropped_response_does_not_hide_another_of_equal_content(make_index: MakeIndex) -> None:
    """After the loss of the older of two responses with the same digest, the newer one is found."""
    index = make_index()
    newer = change(response_id="resp_2", created_at=6.0)
    index.add("scope", ENTRY)
    index.add("scope", newer)
    index.mark_lost("scope", "resp_1")
    assert index.find("scope", ["sha256:1"]) == [newer]


def test_the_oldest_responses_are_dropped(make_index: MakeIndex) -> None:
    """An index has a maximum number of entries, to which a database is pruned periodically."""
    index = make_index(max_entries=20)
    for number in range(300):
        index.add("scope", make_entry(number, created_at=float(number)))
    assert index.get("scope", "resp_100") is None
    assert index.get("scope", "resp_299") is not None


def test_users_of_one_store_share_its_data(store_url: str) -> None:
    """Two indexes of one store share responses, evidence and the key that hashes credentials."""
    with closing(StoreIndex(store_url)) as first, closing(StoreIndex(store_url)) as second:
        first.add("scope", ENTRY)
        first.save_evidence("key", {"proof": "count"})
        assert second.get("scope", "resp_1") == ENTRY
        assert second.load_evidence("key") == {"proof": "count"}
        assert first.hash_key == second.hash_key


def connect(url: str, api_key: str = "k") -> OpenAI:
    """Return a client of a server."""
    return OpenAI(base_url=url, api_key=api_key, max_retries=0)


def test_clients_that_share_a_store_chain_on_each_other(store_url: str) -> None:
    """Clients chain only with the same API key, and the store contains neither the key nor content."""
    with serve() as server:
        history: list[Any] = []
        chained: list[int] = []
        for key in ("secret-one", "secret-one", "secret-two"):
            with connect(server.base_url, key) as client:
                chain(client, store=store_url, trust="always")
                ask(client, history, "My name is Ada.")
                chained.append(chain_report(client).chained)
                unchain(client)
        assert chained == [0, 1, 0]
    if store_url.startswith("sqlite"):
        data = Path(store_url.removeprefix("sqlite:///")).read_bytes()
        assert b"secret" not in data
        assert b"Ada" not in data


async def test_an_open_store_and_an_asynchronous_client(store_url: str) -> None:
    """An open store can be used by an asynchronous client and is not closed with it."""
    with serve() as server:
        async with open_store(store_url) as store:
            for _ in range(2):
                async with AsyncOpenAI(base_url=server.base_url, api_key="k") as client:
                    chain(client, store=store, trust="always")
                    text: Any = {"role": "user", "content": "Hello"}
                    body: Any = {"model": "practice", "input": [text]}
                    for _ in range(2):
                        async with client.responses.stream(**body) as events:
                            response = await events.get_final_response()
                        body["input"] += [*response.output, text]
                    assert chain_report(client).chained == 1
                    unchain(client)
            assert await store.load_evidence("missing") is None


def test_a_store_and_an_index_exclude_each_other() -> None:
    """Passing both a store and an index raises a ``TypeError``."""
    with OpenAI(api_key="k") as client, pytest.raises(TypeError, match="a store or an index"):
        chain(client, store=":memory:", index=MemoryIndex())


def test_a_lost_database_only_disables_chaining() -> None:
    """Without the database requests are sent as written, and no error is raised."""
    with (
        serve() as server,
        run_server() as database,
        closing(StoreIndex(database.url)) as index,
        connect(server.base_url) as client,
    ):
        chain(client, index=index, trust="always")
        history: list[Any] = []
        ask(client, history, "My name is Ada.")
        database.stop()
        for _ in range(2):
            answer = ask(client, history, "What is my name?")
            assert answer.output_text == "Your name is Ada."
        assert chain_report(client).chained == 0


def make_entry(number: int, **facts: Any) -> IndexedResponse:
    """Return an entry with this number in its id and digest."""
    names = {"response_id": f"resp_{number}", "digest": f"sha256:{number}"}
    return IndexedResponse(structs.replace(ENTRY.record, **names, **facts))


def test_a_sqlite_index_needs_no_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the first addition, which prunes the database, needs a worker thread."""
    index = StoreIndex(f"{tmp_path}/index.db")
    assert index.is_blocking
    index.add("scope", make_entry(1))
    assert not index.is_blocking
    with monkeypatch.context() as patch:
        patch.delattr(Database, "read_sync")
        patch.delattr(Database, "write_sync")
        index.add("scope", make_entry(2))
        assert index.find("scope", ["sha256:1", "sha256:2"]) == [make_entry(1), make_entry(2)]
        index.mark_lost("scope", "resp_1")
        assert index.get("scope", "resp_1") is None
    index.close()
    assert index.get("scope", "resp_2") is None  # it is closed, which only disables chaining


def test_a_sqlite_index_does_not_wait_for_another_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The entry is discarded, and later ones are added in threads, which may wait."""
    monkeypatch.setattr("kedge.chaining.index.RETRY_SECONDS", 3_600.0)
    index = StoreIndex(f"{tmp_path}/index.db")
    index.add("scope", make_entry(1))
    with closing(sqlite3.connect(tmp_path / "index.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        index.add("scope", make_entry(2))
        assert index.is_blocking
        assert index.find("scope", ["sha256:1"]) == [make_entry(1)]
        other.execute("COMMIT")
    index.add("scope", make_entry(3))
    entries = index.find("scope", ["sha256:1", "sha256:2", "sha256:3"])
    assert entries == [make_entry(1), make_entry(3)]
    index.close()


def test_an_index_in_an_in_memory_store_uses_its_thread() -> None:
    """An in-memory database has a single connection, so the index is blocking."""
    with closing(StoreIndex("sqlite://:memory:")) as index:
        index.add("scope", make_entry(1))
        index.add("scope", make_entry(2))
        assert index.is_blocking
        assert index.get("scope", "resp_2") == make_entry(2)


def test_replicas_of_the_proxy_share_responses(store_url: str, tmp_path: Path) -> None:
    """After one proxy was killed, another chains to the responses that it recorded."""
    with serve() as server:
        history: list[Any] = []
        environment = {**os.environ, "HOME": str(tmp_path), "KEDGE_PROXY_DB": store_url}
        command = ["-m", "kedge", "proxy", "--upstream", server.base_url]
        command += ["--port", "0", "--trust", "always", "--json"]
        process = ForkedProcess(command, env=environment, stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            base_url = json.loads(process.stdout.readline())["base_url"]
            with connect(base_url) as client:
                ask(client, history, "Say 0")
        finally:
            process.send_signal(signal.SIGKILL)
            process.communicate()
        with (
            closing(StoreIndex(store_url)) as index,
            serve_proxy(server.base_url, index=index) as url,
            connect(f"{url}/v1") as client,
        ):
            ask(client, history, "Say 1")
        assert [len(body["input"]) for body in bodies(server)] == [1, 1]
