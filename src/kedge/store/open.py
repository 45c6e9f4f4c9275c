"""`open_store`: open the store at an address and upgrade its schema."""

import math
import os
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from urllib.parse import parse_qs, unquote, urlsplit

from kedge.errors import CannotOpenStore, InvalidSetting, StoreReadOnly
from kedge.store.database import Database, NamespaceDatabase
from kedge.store.migrate import migrate, needs_upgrade, read_schema_version
from kedge.store.records import validate_namespace
from kedge.store.sqlite import MEMORY, SQLiteDatabase
from kedge.store.store import Store

URL_FORMATS = "sqlite:///path/to/file.db, sqlite://:memory: or postgresql://user@host/database"


async def open_store(
    url: str,
    *,
    wait_seconds: float = 10.0,
    statement_seconds: float = 10.0,
    keep_bodies: bool = False,
    body_bytes: int = 1 << 20,
    clock: Callable[[], float] = time.time,
    namespace: str = "",
) -> Store:
    """Open a store, and create or upgrade its schema.

    Example:
        store = await open_store("sqlite:///kedge.db")

    Args:
        url: ``sqlite:///path``, ``sqlite://:memory:`` or ``postgresql://user@host/database``.
        wait_seconds: The maximum time an operation waits for a lock or a connection.
        statement_seconds: The maximum time a statement of PostgreSQL may run besides that. Import, export, `gc`,
            `verify` and upgrades of the schema have no such limit.
        keep_bodies: Whether the bodies of requests and replies are stored.
        body_bytes: The maximum number of bytes stored of each of them.
        clock: A function that returns the time to record, in seconds since 1970.
        namespace: The namespace of the store's conversations, for example a user; see `Store.use_namespace`.
            The default namespace has no name.

    Returns:
        The store; close it with `aclose`, or use it as an async context manager.

    Raises:
        CannotOpenStore: The address or the password is wrong, the database is not a store, or
            another version of Kedge wrote it.
        StoreUnreachable: The database server does not answer.
        InvalidSetting: ``wait_seconds``, ``statement_seconds`` or the name of the namespace is not valid.
    """
    if namespace:
        validate_namespace(namespace)
    database = open_database(url, wait_seconds, statement_seconds)
    try:
        if await database.read(partial(needs_upgrade, name=database.name)):
            with _explain_read_only(await database.read(read_schema_version)):
                await database.write(partial(migrate, name=database.name))
    except BaseException:
        await database.aclose()
        raise
    if namespace:
        database = NamespaceDatabase(database, namespace, is_owner=True)
    return Store(database, keep_bodies=keep_bodies, body_bytes=body_bytes, clock=clock)


def open_database(
    url: str, wait_seconds: float = 10.0, statement_seconds: float = 10.0
) -> Database:
    """Return the database at an address, without upgrading it."""
    for name, seconds in {
        "wait_seconds": wait_seconds,
        "statement_seconds": statement_seconds,
    }.items():
        if not 0 <= seconds < math.inf:
            raise InvalidSetting(f"{name} must be 0 or more and finite, not {seconds}")
    scheme = url.partition(":")[0]
    if scheme not in ("sqlite", "postgresql", "postgres"):
        raise CannotOpenStore(f"unknown store address; use one of {URL_FORMATS}")
    try:
        if scheme == "sqlite":
            return _open_sqlite(url, wait_seconds)
        return _open_postgres(url, wait_seconds, statement_seconds)
    except ValueError:  # the address may contain a password, so it is not repeated
        raise CannotOpenStore(f"invalid store address; use one of {URL_FORMATS}") from None


def open_current_database(
    url: str, wait_seconds: float = 10.0, statement_seconds: float = 10.0
) -> Database:
    """Return the database at an address after upgrading it; blocks the calling thread."""
    database = open_database(url, wait_seconds, statement_seconds)
    try:
        if database.read_sync(partial(needs_upgrade, name=database.name)):
            with _explain_read_only(database.read_sync(read_schema_version)):
                database.write_sync(partial(migrate, name=database.name))
    except BaseException:
        database.close()
        raise
    return database


@contextmanager
def _explain_read_only(version: int) -> Generator[None]:
    """Report why a store that may only be read cannot be opened: its schema is older."""
    try:
        yield
    except StoreReadOnly as error:
        if not version:  # the database is empty
            raise
        path = str(error).rpartition(": ")[0]
        raise StoreReadOnly(
            f"{path}: an older version of Kedge wrote this store, so it must be upgraded before it can be read, "
            "but it may not be written; copy it to another folder"
        ) from error


def _open_sqlite(url: str, wait_seconds: float) -> Database:
    """Open ``sqlite:///relative``, ``sqlite:////absolute`` or memory; ``?mode=ro`` for reading only."""
    if url in ("sqlite://:memory:", "sqlite:///:memory:", "sqlite://"):
        return SQLiteDatabase(MEMORY, wait_seconds=wait_seconds)
    address, _, query = url.partition("?")
    path = unquote(address.removeprefix("sqlite:").removeprefix("//").removeprefix("/"))
    if "\0" in path:
        raise CannotOpenStore("the path of the store contains a NUL character; remove it")
    if not address.startswith("sqlite:///") or not path:
        raise CannotOpenStore("the path of a file follows three slashes, as in sqlite:///kedge.db")
    options = parse_qs(query, keep_blank_values=True)
    modes = options.pop("mode", ["rwc"])
    if options or modes not in (["ro"], ["rw"], ["rwc"]):
        raise CannotOpenStore(
            f"unknown option {query!r} in the address of a store; use ?mode=ro for reading only"
        )
    if os.path.isdir(path):  # noqa: PTH112 - Path.is_dir raises for a folder that may not be searched
        raise CannotOpenStore(f"{path} is a folder; use the path of a file")
    return SQLiteDatabase(path, wait_seconds=wait_seconds, read_only=modes == ["ro"])


def _open_postgres(url: str, wait_seconds: float, statement_seconds: float) -> Database:
    from kedge.store.postgres import PostgresDatabase

    if not urlsplit(url).path.strip("/") and "dbname=" not in url:
        raise CannotOpenStore("the address names no database; use postgresql://user@host/database")
    return PostgresDatabase(url, wait_seconds=wait_seconds, statement_seconds=statement_seconds)
