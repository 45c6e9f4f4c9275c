"""``open_store``: from an address to a store, upgraded to the present schema."""

from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from kedge.errors import CannotOpenStore
from kedge.store.database import Database, Tx
from kedge.store.migrate import load_migrations, migrate, read_schema_version
from kedge.store.sqlite import MEMORY, SQLiteDatabase
from kedge.store.store import Store

URL_FORMATS = "sqlite:///path/to/file.db, sqlite://:memory: or postgresql://user@host/database"


async def open_store(url: str, *, wait_seconds: float = 10.0, **settings: Any) -> Store:
    """Open a store: ``sqlite:///path``, ``sqlite://:memory:`` or ``postgresql://…``.

    A new database is set up, an older one is brought up to date, a newer one is refused. An operation
    waits for ``wait_seconds`` at most for a lock or a connection. Further settings are those of
    ``Store`` (``keep_bodies``, ``body_bytes``, ``clock``).
    """
    database = open_database(url, wait_seconds)
    try:
        await _upgrade_schema(database)
    except BaseException:
        await database.aclose()
        raise
    return Store(database, **settings)


def open_database(url: str, wait_seconds: float = 10.0) -> Database:
    """The database at an address, as it is."""
    scheme = url.partition(":")[0]
    if scheme not in _OPENERS:
        raise CannotOpenStore(f"a store's address is one of {URL_FORMATS}")
    try:
        return _OPENERS[scheme](url, wait_seconds)
    except ValueError:  # what does not parse may hold a password: it is not repeated
        raise CannotOpenStore(f"the address cannot be read; it is one of {URL_FORMATS}") from None


async def _upgrade_schema(database: Database) -> None:
    """Bring the schema up to date; whoever may only read finds it so, or is told."""
    newest = len(load_migrations(database.dialect.name))

    def look(tx: Tx) -> int:
        return read_schema_version(tx)

    if await database.read(look) != newest:
        await database.write(migrate)


def _open_sqlite(url: str, wait_seconds: float) -> Database:
    """``sqlite:///relative``, ``sqlite:////absolute`` or ``sqlite://:memory:``; ``?mode=ro`` to read."""
    if url in ("sqlite://:memory:", "sqlite:///:memory:", "sqlite://"):
        return SQLiteDatabase(MEMORY, wait_seconds=wait_seconds)
    address, _, query = url.partition("?")
    path = unquote(address.removeprefix("sqlite:").removeprefix("//").removeprefix("/"))
    if not address.startswith("sqlite:///") or not path:
        raise CannotOpenStore("a file is named after three slashes, as in sqlite:///kedge.db")
    read_only = parse_qs(query).get("mode") == ["ro"]
    return SQLiteDatabase(path, wait_seconds=wait_seconds, read_only=read_only)


def _open_postgres(url: str, wait_seconds: float) -> Database:
    from kedge.store.postgres import PostgresDatabase

    if not urlsplit(url).path.strip("/") and "dbname=" not in url:
        raise CannotOpenStore("which database? Write postgresql://user@host/database")
    return PostgresDatabase(url, wait_seconds=wait_seconds)


_OPENERS: dict[str, Callable[[str, float], Database]] = {
    "sqlite": _open_sqlite,
    "postgresql": _open_postgres,
    "postgres": _open_postgres,
}
