"""The interface of the server's database for the repositories, independent of the kind of database.

The tables are described in `kedge.database.responses`. The repositories use the same SQL for both databases,
with ``?`` for values. The differences are in this interface: how a transaction is run and in which thread, which
clock is used, and how one server prevents others from changing its unfinished responses.
"""

import sqlite3
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import unquote

from kedge.database import sqlite
from kedge.database.postgres import is_postgresql
from kedge.database.responses import (
    create_response_tables,
    has_other_tables,
    use_practice_tables,
)
from kedge.database.schema import Schema, WrongSchema
from kedge.database.transactions import Dialect, Tx
from kedge.errors import CannotServe

if TYPE_CHECKING:
    from kedge.server.settings import Settings
    from kedge.server.storage.postgres import ReplicaClaims

T = TypeVar("T")
Clock = Callable[[], float]

IN_MEMORY = ":memory:"


class ServerDatabase(ABC):
    """An open database with the current schema."""

    dialect: Dialect
    clock: Clock
    """Returns the time by which responses expire."""
    execute: Callable[..., Any]
    """Runs a statement with its values, and returns a cursor with ``fetchone``, ``fetchall`` and ``rowcount``."""
    in_store: bool = False
    """Whether the tables are those of the practice model in a store."""
    unclean_shutdown: bool = False
    """Whether the last process that used the file did not close it."""
    owner: str | None = None
    """The name of this server among several on the same database."""
    claims: "ReplicaClaims | None" = None
    """The claims of this server and others on the same database; None if the database is not shared."""
    _numbers: Iterator[int] = iter(())
    """Numbers for new nodes that this server has reserved."""

    @abstractmethod
    def transact(self, work: Callable[[], T]) -> T:
        """Run the statements of a function as one transaction. After a conflict it is run again."""

    @abstractmethod
    async def run(self, work: Callable[..., T], *args: Any) -> T:
        """Call a function that runs statements, after all functions that were submitted before."""

    @abstractmethod
    def submit(self, work: Callable[..., object], *args: Any) -> None:
        """Schedule a function that runs statements, without waiting for it."""

    @abstractmethod
    def lock_conversation(self, id: str, node: int | None) -> bool:
        """Lock a conversation that ends with this node; return False if it is locked or has changed."""

    @abstractmethod
    def unlock_conversation(self, id: str) -> None:
        """Release the lock of a conversation."""

    def check(self) -> None:  # noqa: B027 - a file always answers
        """Raise a `StoreError` unless the database answers; the calling thread waits."""

    def next_number(self) -> int:
        """Return the number for a new node, outside a transaction; no other server gets the same."""
        number = next(self._numbers, None)
        if number is None:
            (last,) = self.execute(_RESERVE_NUMBERS, (NUMBERS_PER_RESERVATION,)).fetchone()
            self._numbers = iter(range(last - NUMBERS_PER_RESERVATION + 1, last + 1))
            number = next(self._numbers)
        return number

    def used_bytes(self) -> int:
        """Return the size of the content, not that of the tables, which need not shrink with it."""
        return int(self.execute(_USED_BYTES).fetchone()[0])

    @abstractmethod
    def close(self) -> None:
        """Close the connections."""

    def run_purge(self, work: Callable[[], int]) -> int:
        """Run a deletion of expired responses, unless another server is running one."""
        return work()

    def checkpoint(self) -> None:  # noqa: B027 - a database server does this itself
        """Overwrite deleted content on disk."""

    def get_or_add_fact(self, name: str, default: bytes) -> bytes | None:
        """Return the value of a fact, or store ``default`` and return None if there is none."""
        added = self.execute(
            "INSERT INTO kedge_server_facts (name, value) VALUES (?, ?) ON CONFLICT (name) DO NOTHING",
            (name, default),
        )
        if added.rowcount > 0:
            return None
        row = self.execute(
            "SELECT value FROM kedge_server_facts WHERE name = ?", (name,)
        ).fetchone()
        return row[0]


NUMBERS_PER_RESERVATION = 64
_RESERVE_NUMBERS = "UPDATE kedge_server_numbers SET last = last + ? RETURNING last"
_USED_BYTES = """
SELECT coalesce(sum(length(input) + length(output) + coalesce(length(asked), 0) + coalesce(length(became), 0)), 0)
FROM kedge_server_nodes
"""
SCHEMA_VERSION = 6
SCHEMA = Schema(
    "kedge_server_schema",
    SCHEMA_VERSION,
    create_response_tables,
    way_out="its responses cannot be imported, so serve it with the version that wrote it until they have expired, or "
    "use another --db",
)


def read_schema_version(tx: Tx, name: str = "this database") -> int:
    """Return the number of the schema; 0 if there is none.

    Raises:
        CannotServe: A file has other tables. In PostgreSQL programs may share a database.
    """
    if not tx.dialect.has_concurrent_writers and has_other_tables(tx):
        raise CannotServe(f"{name} has tables of another program; use another database")
    return SCHEMA.read_version(tx)


def upgrade_schema(tx: Tx, name: str) -> None:
    """Create the tables of a server, or change those of an older schema.

    Raises:
        CannotServe: If that is not possible.
    """
    try:
        SCHEMA.list_steps(read_schema_version(tx, name), name)
        SCHEMA.upgrade(tx, name)
    except WrongSchema as error:
        raise CannotServe(str(error)) from None


def open_server_database(settings: "Settings") -> ServerDatabase:
    """Open the database of a server: a PostgreSQL address or a file.

    Raises:
        CannotServe: If it cannot be opened, or is an address of another kind of database.
    """
    if is_postgresql(settings.db):
        from kedge.server.storage.postgres import PostgresServerDatabase

        return PostgresServerDatabase(settings)
    path = parse_sqlite_address(settings.db)
    return SQLiteServerDatabase(path, clock=settings.clock, in_store=settings.in_store)


def parse_sqlite_address(db: str) -> str:
    """Return the file of a database that is not PostgreSQL: a path, or ``sqlite:///`` before one.

    Raises:
        CannotServe: If it is another address; it may contain a password and is not repeated.
    """
    path = unquote(db.removeprefix("sqlite:///")) if db.startswith("sqlite:///") else db
    if not path or "://" in path:
        raise CannotServe(
            "unknown database address; use a file, :memory: or postgresql://user@host/database"
        )
    return path


STORE_WAIT_SECONDS = 10.0
"""The maximum time that a statement waits for others that write to a store."""


class SQLiteServerDatabase(ServerDatabase):
    """A connection to a database with the current schema, for the thread of the server.

    Statements take microseconds, so they are run in the calling thread.

    Args:
        path: The file, or ``:memory:``.
        clock: Returns the time by which responses expire.
        in_store: Whether the file is a store with the current schema, which others may use at the same time.

    Raises:
        CannotServe: If the file cannot be opened, is in use, or was written by another version.
    """

    dialect = sqlite.SQLITE

    def __init__(self, path: str, *, clock: Clock = time.time, in_store: bool = False) -> None:
        self.clock = clock
        self.in_store = in_store
        self._locked: set[str] = set()
        # Opened in the thread that creates the app, used in the thread of its loop.
        try:
            self._connection = sqlite.open_connection(
                _prepare_path(path),
                wait_seconds=STORE_WAIT_SECONDS if in_store else 0.0,
                synchronous="NORMAL",
                exclusive=not in_store,
            )
        except (sqlite3.Error, OSError) as error:
            raise _build_open_error(path, error) from error
        # For a server that is not closed; at the end of the program its thread may still use the connection.
        weakref.finalize(self, self._connection.close).atexit = False
        self.execute: Callable[..., Any] = (
            self._execute_in_store if in_store else self._connection.execute
        )
        try:
            if not in_store:  # acquires the lock until the connection is closed
                sqlite.run_transaction(
                    self._connection, partial(upgrade_schema, name=f"the database {path}")
                )
            # Fails if the file may only be read.
            self.execute("UPDATE kedge_server_facts SET value = value WHERE name = ''")
            self.unclean_shutdown = not in_store and self.get_or_add_fact("open", b"1") is not None
        except sqlite3.Error as error:
            self._connection.close()
            raise _build_open_error(path, error) from error
        except CannotServe:
            self._connection.close()
            raise

    def _execute_in_store(self, sql: str, values: Any = ()) -> sqlite3.Cursor:
        return self._connection.execute(use_practice_tables(sql), values)

    def transact(self, work: Callable[[], T]) -> T:
        """Run statements as one transaction."""
        return sqlite.run_transaction(self._connection, lambda _: work())

    async def run(self, work: Callable[..., T], *args: Any) -> T:
        """Call a function that runs statements."""
        return work(*args)

    def submit(self, work: Callable[..., object], *args: Any) -> None:
        """Call a function that runs statements."""
        work(*args)

    def lock_conversation(self, id: str, node: int | None) -> bool:
        """Lock a conversation within this process."""
        if id in self._locked:
            return False
        self._locked.add(id)
        return True

    def unlock_conversation(self, id: str) -> None:
        """Release the lock of a conversation."""
        self._locked.discard(id)

    def checkpoint(self) -> None:
        """Write the WAL to the file, so that deleted content is overwritten on disk."""
        sqlite.empty_journal(self._connection)

    def close(self) -> None:
        """Close the file."""
        if not self.in_store:
            self.execute("DELETE FROM kedge_server_facts WHERE name = 'open'")
        self._connection.close()


def _prepare_path(path: str) -> str:
    if path == sqlite.MEMORY:
        return path
    file = Path(path).expanduser()
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    sqlite.create_file(str(file))
    return file.absolute().as_uri()


def _build_open_error(path: str, error: sqlite3.Error | OSError) -> CannotServe:
    if "locked" in str(error):
        return CannotServe(
            f"the database {path} is in use by another server: stop that server, or use another --db"
        )
    problem = (
        sqlite.describe_error(error)[1] if isinstance(error, sqlite3.Error) else error.strerror
    )
    return CannotServe(f"the database {path} cannot be opened: {problem}; use another file")
