"""The schema of the store: created, upgraded by steps, or rejected. There is no step yet, so the tests make one up."""

import math
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from for_each import for_each
from forked import run_forked_async
from kedge.errors import CannotOpenStore, InvalidSetting, StoreReadOnly
from kedge.store import open as open_module
from kedge.store import open_store
from kedge.store.database.schema import Schema
from kedge.store.database.transactions import Tx
from kedge.store.open import (
    SCHEMA,
    SCHEMA_VERSION,
    create_schema,
    open_current_database,
    read_schema_version,
)
from postgresql import create_schema as create_postgres_schema
from store.sample_conversations import create_conversation

KILLED = """
import os, sys
from kedge import run_sync
from kedge.store.database.schema import Schema
from kedge.store import open as opening, open_store

def step(tx):
    tx.run("ALTER TABLE conversations ADD COLUMN color TEXT")
    tx.run("UPDATE conversations SET color = 'red'")
    os._exit(9)

version = opening.SCHEMA_VERSION
opening.SCHEMA = Schema("kedge_schema", version + 1, opening.create_schema, {version: step})
run_sync(open_store(sys.argv[1]))
"""
"""A process that ends in the middle of an upgrade."""


@pytest.fixture(params=["sqlite", "postgresql"])
def empty_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Yield the address of a database without tables; that of ``lasting_url`` has those of this version."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path}/store.db"
        return
    with create_postgres_schema(request.getfixturevalue("postgres_url")) as url:
        yield url


@pytest.fixture
def add_step(monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[int]]:
    """Return a function that adds a step to the schema, and returns the list of its runs."""

    def add() -> list[int]:
        runs: list[int] = []

        def step(tx: Tx) -> None:
            tx.run("ALTER TABLE conversations ADD COLUMN color TEXT")
            tx.run("UPDATE conversations SET color = 'blue'")
            runs.append(read_schema_version(tx))

        newer = Schema(SCHEMA.table, SCHEMA_VERSION + 1, create_schema, {SCHEMA_VERSION: step})
        monkeypatch.setattr(open_module, "SCHEMA", newer)
        return runs

    return add


async def set_version(url: str, version: int) -> None:
    """Create a store, and give its schema another number."""
    async with open_store(url) as store:
        change = "UPDATE kedge_schema SET version = ?"
        await store.database.write(lambda tx: tx.run(change, (version,)))


async def test_older_store_is_upgraded_once(
    empty_url: str, add_step: Callable[[], list[int]]
) -> None:
    """A step changes an older store, which retains its conversations; opening it again runs no step."""
    async with open_store(empty_url) as store:
        row, _ = await create_conversation(store, 1)
    runs = add_step()
    for _ in range(2):
        async with open_store(empty_url) as store:
            found = await store.database.read(
                lambda tx: tx.rows("SELECT id, color FROM conversations")
            )
            assert found == [(row.id, "blue")]
            assert await store.database.read(read_schema_version) == SCHEMA_VERSION + 1
            assert len(await store.search("question")) == 1
            assert await store.verify() == []
    assert runs == [SCHEMA_VERSION]


async def test_killed_upgrade_is_repeated(
    empty_url: str, add_step: Callable[[], list[int]]
) -> None:
    """A process that is killed in the middle of a step changes nothing, and the next one completes it."""
    async with open_store(empty_url) as store:
        row = await store.create()
    killed = await run_forked_async("-c", KILLED, empty_url)
    assert killed.returncode == 9, killed.stderr
    async with open_store(empty_url) as store:
        assert await store.database.read(read_schema_version) == SCHEMA_VERSION
        with pytest.raises(Exception, match="color"):
            await store.database.read(lambda tx: tx.rows("SELECT color FROM conversations"))
    runs = add_step()
    async with open_store(empty_url) as store:
        found = await store.database.read(lambda tx: tx.rows("SELECT id, color FROM conversations"))
    assert found == [(row.id, "blue")]
    assert runs == [SCHEMA_VERSION]


NEWER = r"{name} was written by a newer version of Kedge \(schema {version}, .*upgrade Kedge"
OLDER = (
    r"{name} was written by an older version of Kedge \(schema {version}, .*open it with the version that wrote it, "
    r"or use a new store"
)


@pytest.mark.parametrize(
    ("version", "expected"),
    [(99, NEWER), (SCHEMA_VERSION + 1, NEWER), (1, OLDER), (SCHEMA_VERSION - 1, OLDER)],
)
async def test_other_version_is_rejected(lasting_url: str, version: int, expected: str) -> None:
    """The error names the file and says to upgrade Kedge, or to use the version that wrote it."""
    await set_version(lasting_url, version)
    is_file = lasting_url.startswith("sqlite")
    message = expected.format(name="store.db" if is_file else "this store", version=version)
    for url in [lasting_url] + [f"{lasting_url}?mode=ro"] * is_file:
        with pytest.raises(CannotOpenStore, match=message) as error:
            await open_store(url)
        assert "\n" not in str(error.value)
        with pytest.raises(CannotOpenStore, match=message):
            open_current_database(url)


async def test_older_store_that_may_not_be_written_is_explained(
    tmp_path: Path, add_step: Callable[[], list[int]]
) -> None:
    """The error says that the store must be upgraded, which reading a current one does not need."""
    url = f"sqlite:///{tmp_path}/store.db"
    async with open_store(url):
        pass
    add_step()
    message = r"store\.db: an older version of Kedge wrote this store, so it must be upgraded"
    with pytest.raises(StoreReadOnly, match=message):
        await open_store(f"{url}?mode=ro")
    with pytest.raises(StoreReadOnly, match=message):
        open_current_database(f"{url}?mode=ro")
    (tmp_path / "empty.db").touch()
    with pytest.raises(StoreReadOnly, match=r"empty\.db: the database may only be read"):
        await open_store(f"sqlite:///{tmp_path}/empty.db?mode=ro")


async def test_database_of_another_program_is_rejected(tmp_path: Path) -> None:
    """Kedge does not create its tables in a database with other tables."""
    with sqlite3.connect(tmp_path / "other.db") as connection:
        connection.execute("CREATE TABLE mine (x)")
    connection.close()
    with pytest.raises(CannotOpenStore, match=r"other\.db has tables of another program"):
        await open_store(f"sqlite:///{tmp_path}/other.db")


@for_each(
    "url", ["sqlite:kedge.db", "sqlite:///", "postgresql://localhost", "postgresql://[broken/kedge"]
)
async def test_invalid_address_is_rejected(url: str) -> None:
    """An invalid address raises an error that lists the valid formats."""
    with pytest.raises(CannotOpenStore, match=r"sqlite:///|postgresql://"):
        await open_store(url)


@for_each("url", ["sqlite://:memory:", "postgresql://localhost/kedge"])
@for_each("seconds", [-1.0, math.nan, math.inf])
async def test_invalid_wait_is_rejected(url: str, seconds: float) -> None:
    """An invalid `wait_seconds` or `statement_seconds` raises `InvalidSetting` before anything is opened."""
    with pytest.raises(InvalidSetting, match="wait_seconds must be 0 or more and finite"):
        await open_store(url, wait_seconds=seconds)
    with pytest.raises(InvalidSetting, match="statement_seconds must be 0 or more and finite"):
        await open_store(url, statement_seconds=seconds)
