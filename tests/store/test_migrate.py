"""Schema migrations: numbered and applied once; older stores are upgraded, newer ones rejected."""

import math
import re
import sqlite3
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import pytest

from kedge.errors import BrokenInstallation, CannotOpenStore, InvalidSetting, StoreReadOnly
from kedge.store import migrate as migrate_module
from kedge.store import open_store
from kedge.store.database import Tx
from kedge.store.migrate import load_migrations, migrate, read_schema_version
from kedge.store.open import open_current_database, open_database
from postgresql import create_schema
from store.sample_conversations import create_conversation


@pytest.fixture(params=["sqlite", "postgresql"])
def empty_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Yield the address of a database without tables; that of ``lasting_url`` has those of this version."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path}/store.db"
        return
    with create_schema(request.getfixturevalue("postgres_url")) as url:
        yield url


def test_every_migration_has_a_reason() -> None:
    """Each migration file begins with a comment that gives its reason."""
    entries = list((files("kedge.store") / "migrations").iterdir())
    assert entries
    for file in entries:
        assert re.match(r"-- Why: \w.{40,}", file.read_text("utf-8")), file.name


def test_both_databases_have_the_same_migrations() -> None:
    """The migrations of SQLite and PostgreSQL have equal numbers and names."""
    steps = [
        [(each.number, each.name) for each in load_migrations(name)]
        for name in ("sqlite", "postgresql")
    ]
    assert steps[0] == steps[1]


@pytest.mark.parametrize("version", range(1, len(load_migrations("sqlite"))))
async def test_older_store_is_upgraded(empty_url: str, version: int) -> None:
    """A store of any earlier version retains its conversations and supports all current features."""
    database = open_database(empty_url)
    await database.write(lambda tx: migrate(tx, target=version))
    assert await database.read(read_schema_version) == version
    await database.write(
        lambda tx: tx.run(
            "INSERT INTO conversations (id, title, archived, tree, head, created_at, updated_at) "
            "VALUES ('conv_old', 'Old', 0, 0, 0, 1.0, 1.0)"
        )
    )
    await database.aclose()
    async with await open_store(empty_url) as store:
        assert (await store.conversation("conv_old")).title == "Old"
        await create_conversation(store, 1)
        assert len(await store.search("question")) == 1
        assert await store.database.read(read_schema_version) == len(load_migrations("sqlite"))


async def test_numbers_of_deleted_conversations_are_not_reused(empty_url: str) -> None:
    """Numbers are not reused after a table was recreated, so an old row refers to no new conversation."""
    database = open_database(empty_url)
    insert = (
        "INSERT INTO conversations (id, title, archived, tree, head, created_at, updated_at) "
        "VALUES (?, '', 0, 0, 0, 1.0, 1.0)"
    )

    def work(tx: Tx) -> int:
        migrate(tx, target=9)
        numbers = [tx.insert(insert, (str(each),), key="number") for each in range(5)]
        tx.run("DELETE FROM conversations")
        return numbers[-1]

    last = await database.write(work)
    assert await database.read(read_schema_version) == 9
    await database.aclose()
    async with await open_store(empty_url) as store:
        assert (await store.create()).number > last


async def test_newer_store_is_rejected(lasting_url: str) -> None:
    """A store with a newer schema raises an error that advises to upgrade Kedge."""
    async with await open_store(lasting_url) as store:
        await store.database.write(lambda tx: tx.run("UPDATE kedge_schema SET version = 99"))
    with pytest.raises(CannotOpenStore, match=r"newer Kedge .*99.*upgrade Kedge"):
        await open_store(lasting_url)


async def test_older_store_that_may_not_be_written_is_explained(tmp_path: Path) -> None:
    """The error says that the store must be upgraded, which reading a current one does not need."""
    url = f"sqlite:///{tmp_path}/store.db"
    database = open_database(url)
    await database.write(lambda tx: migrate(tx, target=3))
    await database.aclose()
    message = r"store\.db: an older version of Kedge wrote this store, so it must be upgraded"
    with pytest.raises(StoreReadOnly, match=message):
        await open_store(f"{url}?mode=ro")
    with pytest.raises(StoreReadOnly, match=message):
        open_current_database(f"{url}?mode=ro")
    (tmp_path / "empty.db").touch()
    with pytest.raises(StoreReadOnly, match=r"empty\.db: the database may only be read"):
        await open_store(f"sqlite:///{tmp_path}/empty.db?mode=ro")


async def test_migrating_again_changes_nothing(lasting_url: str) -> None:
    """No migration is applied to a store that is up to date."""
    async with await open_store(lasting_url) as store:

        def migrate_again(tx: Tx) -> int:
            return migrate(tx)

        assert await store.database.write(migrate_again) == 0


async def test_database_of_another_program_is_rejected(tmp_path: Path) -> None:
    """Kedge does not create its tables in a database with other tables."""
    with sqlite3.connect(tmp_path / "other.db") as connection:
        connection.execute("CREATE TABLE mine (x)")
    connection.close()
    with pytest.raises(CannotOpenStore, match="not of a Kedge store"):
        await open_store(f"sqlite:///{tmp_path}/other.db")


def test_missing_migration_is_a_broken_installation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An incomplete list of migrations raises `BrokenInstallation`."""
    (tmp_path / "migrations").mkdir()
    (tmp_path / "migrations" / "0002_second.sql").write_text("SELECT 1;")
    monkeypatch.setattr(migrate_module, "files", lambda _: tmp_path)
    load_migrations.cache_clear()
    try:
        with pytest.raises(BrokenInstallation):
            load_migrations("sqlite")
    finally:
        monkeypatch.undo()
        load_migrations.cache_clear()


@pytest.mark.parametrize(
    "url",
    [
        "mysql://x",
        "kedge.db",
        "sqlite:kedge.db",
        "sqlite:///",
        "postgresql://localhost",
        "postgresql://[broken/kedge",
        "",
    ],
)
async def test_invalid_address_is_rejected(url: str) -> None:
    """An invalid address raises an error that lists the valid formats."""
    with pytest.raises(CannotOpenStore, match=r"sqlite:///|postgresql://"):
        await open_store(url)


@pytest.mark.parametrize("url", ["sqlite://:memory:", "postgresql://localhost/kedge"])
@pytest.mark.parametrize("seconds", [-1.0, math.nan, math.inf])
async def test_invalid_wait_is_rejected(url: str, seconds: float) -> None:
    """An invalid `wait_seconds` or `statement_seconds` raises `InvalidSetting` before anything is opened."""
    with pytest.raises(InvalidSetting, match="wait_seconds must be 0 or more and finite"):
        await open_store(url, wait_seconds=seconds)
    with pytest.raises(InvalidSetting, match="statement_seconds must be 0 or more and finite"):
        await open_store(url, statement_seconds=seconds)
