"""`open_store`: the store at an address, opened by its first use."""

import os
import sys
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar
from urllib.parse import parse_qs, unquote, urlsplit
from weakref import WeakValueDictionary

from kedge._internal.argument_types import checked
from kedge._internal.arguments import describe_value
from kedge._internal.event_loops import SharedResource
from kedge.config import URL_FORMATS, store_file, store_url
from kedge.errors import CannotOpenStore, InvalidSetting, StoreReadOnly
from kedge.store.database.postgres import PostgresDatabase
from kedge.store.database.responses import (
    STORE_TABLE,
    create_response_tables,
    has_other_tables,
    use_practice_tables,
)
from kedge.store.database.schema import Schema, WrongSchema, read_statements
from kedge.store.database.sqlite import MEMORY, SQLiteDatabase
from kedge.store.database.transactions import Database, FirstUse, NamespaceDatabase, Tx
from kedge.store.records import validate_namespace
from kedge.store.store import Store

StoreAddress = str | os.PathLike[str]
"""The address of a store, or the path of its file."""
P = ParamSpec("P")
T = TypeVar("T")
MEMORY_URLS = frozenset({"sqlite://:memory:", "sqlite:///:memory:", "sqlite://"})


@checked
def open_store(
    address: StoreAddress,
    *,
    wait_seconds: float = 10.0,
    statement_seconds: float = 10.0,
    keep_bodies: bool = False,
    body_bytes: int = 1 << 20,
    clock: Callable[[], float] = time.time,
    namespace: str = "",
) -> Store:
    """Return the store at an address; its first use opens it, and creates or upgrades its schema.

    Example:
        async with open_store("kedge.db") as store:
            print(await store.conversations())

    Args:
        address: The path of a file, ``sqlite:///path``, ``sqlite://:memory:`` or ``postgresql://user@host/database``.
        wait_seconds: The maximum time an operation waits for a lock or a connection.
        statement_seconds: The maximum time a statement of PostgreSQL may run besides that. Import, export, `gc`,
            `verify` and upgrades of the schema have no such limit.
        keep_bodies: Whether the bodies of requests and replies are stored.
        body_bytes: The maximum number of bytes stored of each of them.
        clock: A function that returns the time to record, in seconds since 1970.
        namespace: The namespace of the store's conversations, for example a user; see `Store.use_namespace`.
            The default namespace has no name.

    Returns:
        The store. ``await store``, ``async with store`` and ``with store.sync`` open it at once, and raise the errors
        of the database; ``async with``, ``with`` and `aclose` close it.

    Raises:
        CannotOpenStore: The address is wrong. When it is opened also: the password is wrong, the database is not a
            store, or another version of Kedge wrote it.
        StoreUnreachable: The database server does not answer when it is opened.
        InvalidSetting: ``wait_seconds``, ``statement_seconds`` or the name of the namespace is not valid.
    """
    if namespace:
        validate_namespace(namespace)
    url = resolve_address(address)
    database = _open_when_used(open_database(url, wait_seconds, statement_seconds))
    if namespace:
        database = NamespaceDatabase(database, namespace, is_owner=True)
    return Store(database, keep_bodies=keep_bodies, body_bytes=body_bytes, clock=clock)


_shared_stores: WeakValueDictionary[str, SharedResource[Store]] = WeakValueDictionary()
_shared_stores_lock = threading.Lock()


class _BorrowedStore(SharedResource[Store]):
    """A store of the caller, which its other users do not close."""

    async def aclose(self) -> None:
        """Leave the store open."""


def share_store(store: Store | StoreAddress) -> SharedResource[Store]:
    """Return a store, or the one at an address, which is shared in this process: its last user closes it."""
    if isinstance(store, Store):
        return _BorrowedStore(store)
    url = resolve_address(store)
    with _shared_stores_lock:
        shared = _shared_stores.get(url)
        if url in MEMORY_URLS or shared is None or not shared.add_user():
            shared = SharedResource(open_store(url))
            _shared_stores[url] = shared
    return shared


@asynccontextmanager
async def use_store(store: Store | StoreAddress) -> AsyncGenerator[Store]:
    """Yield a store, or the one at an address, which is closed at the end unless it has other users."""
    shared = share_store(store)
    try:
        yield shared.resource
    finally:
        await shared.aclose()


def accept_address(
    function: "Callable[Concatenate[Store, P], Awaitable[T]]",
) -> "Callable[Concatenate[Store | StoreAddress, P], Coroutine[Any, Any, T]]":
    """Return an async function of a store that also accepts the address of one, or the path of its file."""

    @wraps(function)
    async def run(store: Store | StoreAddress, *args: P.args, **kwargs: P.kwargs) -> T:
        async with use_store(store) as opened:
            return await function(opened, *args, **kwargs)

    return run


def resolve_address(address: StoreAddress) -> str:
    """Return the URL of a store that is given as a URL or as the path of a file, which is resolved now.

    Raises:
        CannotOpenStore: It is empty or the name of a database.
        InvalidSetting: It is not a text or a path.
    """
    path = os.fspath(address) if isinstance(address, os.PathLike) else address
    if not isinstance(path, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidSetting(
            f"store must be a Store, an address or the path of a file, not {describe_value(address)}; without store= a "
            "conversation is in memory"
        )
    if not path:
        raise CannotOpenStore(f"the address of the store is empty; use one of {URL_FORMATS}")
    url = store_url(path)
    file = store_file(url)
    if "://" in path or file is None:
        return url
    return store_url(str(file.absolute()))


def open_database(
    url: str, wait_seconds: float = 10.0, statement_seconds: float = 10.0
) -> SQLiteDatabase | PostgresDatabase:
    """Return the database at an address, without upgrading it."""
    durations = {"wait_seconds": wait_seconds, "statement_seconds": statement_seconds}
    for name, seconds in durations.items():
        if not 0 <= seconds <= sys.float_info.max:
            shown = describe_value(seconds)
            raise InvalidSetting(f"{name} must be 0 or more and finite, not {shown}")
    scheme = url.partition(":")[0]
    if scheme not in ("sqlite", "postgresql", "postgres"):
        raise CannotOpenStore(f"unknown store address; use one of {URL_FORMATS}")
    try:
        if scheme == "sqlite":
            return _open_sqlite(url, wait_seconds)
        if not urlsplit(url).path.strip("/") and "dbname=" not in url:
            raise CannotOpenStore(
                "the address names no database; use postgresql://user@host/database"
            )
        return PostgresDatabase(url, wait_seconds=wait_seconds, statement_seconds=statement_seconds)
    except ValueError:  # the address may contain a password, so it is not repeated
        raise CannotOpenStore(f"invalid store address; use one of {URL_FORMATS}") from None


def open_current_database(
    url: str, wait_seconds: float = 10.0, statement_seconds: float = 10.0
) -> Database:
    """Return the database at an address after upgrading it; blocks the calling thread."""
    database = _open_when_used(open_database(url, wait_seconds, statement_seconds))
    try:
        database.read_sync(lambda _: None)
    except BaseException:
        database.close()
        raise
    return database


def _open_when_used(database: SQLiteDatabase | PostgresDatabase) -> Database:
    """Return the database, whose first transaction creates or upgrades its schema."""

    def upgrade() -> None:
        version = database.run_read(partial(read_schema_version, name=database.name))
        try:
            if SCHEMA.list_steps(version, database.name):  # else opening it writes nothing
                database.run_write(partial(migrate, name=database.name))
        except WrongSchema as error:
            raise CannotOpenStore(str(error)) from None
        except StoreReadOnly as error:
            if not version:  # the database is empty
                raise
            raise StoreReadOnly(
                "an older version of Kedge wrote this store, so it must be upgraded before it can be read, "
                "but it may not be written; copy it to another folder",
                error.location,
            ) from error

    database.first_use = FirstUse(upgrade)
    return database


def _open_sqlite(url: str, wait_seconds: float) -> SQLiteDatabase:
    """Open ``sqlite:///relative``, ``sqlite:////absolute`` or memory; ``?mode=ro`` for reading only."""
    if url in MEMORY_URLS:
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
    path = os.path.abspath(path)  # noqa: PTH100 - the working folder may change before the first use
    if not os.path.isdir(os.path.dirname(path)):  # noqa: PTH112, PTH120
        raise CannotOpenStore(
            f"{path}: the file cannot be opened or created: its folder does not exist; create it"
        )
    return SQLiteDatabase(path, wait_seconds=wait_seconds, read_only=modes == ["ro"])


SCHEMA_VERSION = 35


def create_schema(tx: Tx) -> None:
    """Create the tables of the current version in an empty database."""
    for statement in read_statements("kedge.store", f"schema.{tx.dialect.name}.sql"):
        tx.run(statement)
    create_response_tables(tx, use_practice_tables)


SCHEMA = Schema(
    STORE_TABLE,
    SCHEMA_VERSION,
    create_schema,
    way_out="development versions do not convert each other's stores; open it with the version that wrote it, or use "
    "a new store",
)


def read_schema_version(tx: Tx, name: str = "this database") -> int:
    """Return the version of the schema; 0 for a database without tables, except for tables of a server.

    Raises:
        CannotOpenStore: There are other tables.
    """
    if has_other_tables(tx):
        raise CannotOpenStore(f"{name} has tables of another program; use another database")
    return SCHEMA.read_version(tx)


def migrate(tx: Tx, name: str) -> int:
    """Create or upgrade the schema in one transaction, and return the number of steps."""
    tx.allow_long_statements()
    return SCHEMA.upgrade(tx, name)
