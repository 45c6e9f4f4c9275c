"""The schema of the server's database: created, upgraded by steps, or rejected. The tests make up a step."""

import sqlite3
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import psycopg
import pytest

from kedge.errors import CannotServe
from kedge.server.storage import database as database_module
from kedge.server.storage.database import SCHEMA, SCHEMA_VERSION
from kedge.store import open_store
from kedge.store.database.schema import Schema
from kedge.store.database.transactions import Tx
from kedge.testing import serve
from postgresql import create_schema as create_postgres_schema


@pytest.fixture(params=["sqlite", "postgresql"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Yield the ``db`` setting of a server whose database was created."""
    with ExitStack() as stack:
        url = str(tmp_path / "server.db")
        if request.param == "postgresql":
            server_url = request.getfixturevalue("postgres_url")
            url = stack.enter_context(create_postgres_schema(server_url))
        with serve(db=url):
            pass
        yield url


def execute(address: str, statement: str) -> list[tuple[object, ...]]:
    """Run a statement on a database, and return its rows."""
    if address.startswith("postgresql"):
        with psycopg.connect(address) as postgres:
            cursor = postgres.execute(statement.encode())
            return cursor.fetchall() if cursor.description else []
    with sqlite3.connect(address) as file:
        rows = file.execute(statement).fetchall()
    file.close()
    return rows


def set_version(address: str, version: int) -> None:
    """Give the schema of a database another number."""
    execute(address, f"UPDATE kedge_server_schema SET version = {version}")  # noqa: S608 - a number


def test_database_of_another_version_is_rejected(address: str) -> None:
    """The error for an older database names the file and an option, that for a newer one says to upgrade."""
    name = "the database" if address.startswith("postgresql") else rf"the database {address}"
    older = rf"{name} was written by an older version of Kedge \(schema 1,.*another --db"
    newer = r"newer version of Kedge.*upgrade"
    for version, message in ((1, older), (SCHEMA_VERSION + 1, newer)):
        set_version(address, version)
        with pytest.raises(CannotServe, match=message) as error, serve(db=address):
            pass
        assert "\n" not in str(error.value)


def test_file_of_another_program_is_rejected(tmp_path: Path) -> None:
    """A server does not create its tables in a file with other tables; the error names the file."""
    file = tmp_path / "mine.db"
    execute(str(file), "CREATE TABLE nodes (id INTEGER PRIMARY KEY)")
    message = r"mine\.db has tables of another program; use another database"
    with pytest.raises(CannotServe, match=message), serve(db=str(file)):
        pass
    assert execute(str(file), "SELECT name FROM sqlite_master") == [("nodes",)]


async def test_file_may_be_the_one_of_a_store(tmp_path: Path) -> None:
    """A store and a server have separate tables in one file."""
    file = tmp_path / "both.db"
    async with open_store(file) as store:
        row = await store.create(title="harbor")
    with serve(db=str(file)):
        pass
    async with open_store(file) as store:
        assert await store.conversation(row.id) == row


def test_cut_off_upgrade_is_repeated_once(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that fails in the middle changes nothing; it is repeated by the next server, and by no later one."""
    runs: list[int] = []

    def step(tx: Tx) -> None:
        tx.run("ALTER TABLE kedge_server_nodes ADD COLUMN color TEXT")
        runs.append(len(runs))
        if len(runs) == 1:
            raise CannotServe("cut off")

    newer = Schema(SCHEMA.table, SCHEMA_VERSION + 1, SCHEMA.create, {SCHEMA_VERSION: step})
    monkeypatch.setattr(database_module, "SCHEMA", newer)
    with pytest.raises(CannotServe, match="cut off"), serve(db=address):
        pass
    for _ in range(2):
        with serve(db=address):
            pass
    assert runs == [0, 1]
    assert execute(address, "SELECT color FROM kedge_server_nodes") == []
