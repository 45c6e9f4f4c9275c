"""The interface of the server's database for the repositories, independent of the kind of database.

The tables are described in `kedge.store.database.responses`. The repositories use the same SQL for both databases,
with ``?`` for values. The differences are in this interface: how a transaction is run and in which thread, which
clock is used, and how one server prevents others from changing its unfinished responses.
"""

import logging
import sqlite3
import time
import weakref
from abc import ABC, abstractmethod
from asyncio import Future, get_running_loop, shield
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import unquote

from kedge.errors import CannotServe, StoreBusy, StoreError, StoreFull
from kedge.store.database import sqlite
from kedge.store.database.file_identity import OpenFiles
from kedge.store.database.postgres import is_postgresql
from kedge.store.database.responses import (
    create_response_tables,
    has_other_tables,
    use_practice_tables,
)
from kedge.store.database.schema import Schema, WrongSchema
from kedge.store.database.transactions import Dialect, Tx

if TYPE_CHECKING:
    from kedge.server.settings import Settings
    from kedge.server.storage.postgres import ReplicaClaims

T = TypeVar("T")

log = logging.getLogger("kedge.server")
Clock = Callable[[], float]

IN_MEMORY = ":memory:"


class ServerDatabase(ABC):
    """An open database with the current schema."""

    dialect: Dialect
    clock: Clock
    """Returns the time by which responses expire."""
    in_store: bool = False
    """Whether the database is a store, which has separate tables for the practice model."""
    unclean_shutdown: bool = False
    """Whether the last process that used the file did not close it."""
    owner: str | None = None
    """The name of this server among several on the same database."""
    claims: "ReplicaClaims | None" = None
    """The claims of this server and others on the same database; None if the database is not shared."""
    _numbers: Iterator[int] = iter(())
    """Numbers for new nodes that this server has reserved."""

    @abstractmethod
    def execute(self, sql: str, values: Any = ()) -> Any:
        """Run a statement with its values.

        Returns:
            A cursor with ``fetchone``, ``fetchall`` and ``rowcount``.
        """

    @abstractmethod
    def transact(self, work: Callable[[], T]) -> T:
        """Run the statements of a function as one transaction. After a conflict it is run again."""

    @property
    @abstractmethod
    def is_free(self) -> bool:
        """Whether statements can be run in the thread of the loop, now and without a round trip."""

    @abstractmethod
    async def run(self, work: Callable[..., T], *args: Any, is_long: bool = False) -> T:
        """Call a function that runs statements, after all functions that were submitted before.

        Args:
            work: The function.
            *args: Its arguments.
            is_long: Whether it may read or write megabytes, for which the loop must not wait.
        """

    @abstractmethod
    def submit(self, work: Callable[..., object], *args: Any, is_long: bool = False) -> None:
        """Schedule a function that runs statements, without waiting for it.

        If it fails because of an outage or a full disk, it is called again when the database can be used.
        """

    @abstractmethod
    def lock_conversation(self, id: str, node: int | None) -> bool:
        """Lock a conversation that ends with this node; return False if it is locked or has changed."""

    @abstractmethod
    def unlock_conversation(self, id: str) -> None:
        """Release the lock of a conversation."""

    @abstractmethod
    async def check_health(self) -> None:
        """Raise a `StoreError` unless the database answers within a few seconds, and can be written."""

    def next_number(self) -> int:
        """Return the number for a new node, outside a transaction; no other server gets the same."""
        number = next(self._numbers, None)
        if number is None:
            (last,) = self.execute(_RESERVE_NUMBERS, (NUMBERS_PER_RESERVATION,)).fetchone()
            self._numbers = iter(range(last - NUMBERS_PER_RESERVATION + 1, last + 1))
            number = next(self._numbers)
        return number

    def used_bytes(self) -> int:
        """Return the size of the content. The size of the tables need not shrink with it."""
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
SELECT coalesce(sum(
    length(input) + length(output) + coalesce(length(request_fields), 0) + coalesce(length(result_fields), 0)
), 0)
FROM kedge_server_nodes
"""
SCHEMA_VERSION = 7
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
    """Create the tables of a server, or change the tables of an older schema.

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
    path = db
    if db.startswith("sqlite:///"):
        path = unquote(db.removeprefix("sqlite:///"))
    if not path or "://" in path:
        raise CannotServe(
            "unknown database address; use a file, :memory: or postgresql://user@host/database"
        )
    return path


STORE_WAIT_SECONDS = 10.0
"""The maximum time that a statement waits for others that write to a store."""
MAX_FAILED = 10_000
"""The number of submitted functions that are called again after a failure."""


def may_succeed_later(error: StoreError) -> bool:
    """Return whether a submitted function that failed is called again."""
    return error.retryable or isinstance(error, StoreFull)


class SQLiteServerDatabase(ServerDatabase):
    """A connection to a database with the current schema, for the thread of the server.

    Statements take microseconds, so they are run in the calling thread. Functions that may read or write megabytes are
    called in another thread, in order, and so are all others until it has nothing left to do: only one thread at a time
    uses the connection. Before each function it is checked that the files are still the opened files, and again after
    each commit: see `kedge.store.database.file_identity`.

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
        self._path = path
        self._locked: set[str] = set()
        self._failed: deque[Callable[[], object]] = deque(maxlen=MAX_FAILED)
        self._has_failed_to_write = False
        self._convert = use_practice_tables if in_store else str
        self._thread = ThreadPoolExecutor(1, "kedge-responses")
        self._queued = 0
        try:
            # Opened in the thread that creates the app, used in the thread of its loop and in the thread above.
            self._connection, file = _open_connection(path, in_store=in_store)
        except (sqlite3.Error, OSError) as error:
            raise _build_open_error(path, error) from error
        self._files = OpenFiles(file)
        # For a server that is not closed; at the end of the program its thread may still use the connection.
        weakref.finalize(self, self._connection.close).atexit = False
        try:
            if not in_store:  # acquires the lock until the connection is closed
                sqlite.run_transaction(
                    self._connection, partial(upgrade_schema, name=f"the database {path}")
                )
            self._files.record(has_journal=True)
            # Fails if the file may only be read.
            self.execute("UPDATE kedge_server_facts SET value = value WHERE name = ''")
            self.unclean_shutdown = not in_store and self.get_or_add_fact("open", b"1") is not None
        except (sqlite3.Error, StoreError) as error:
            self._connection.close()
            raise _build_open_error(path, error) from error
        except CannotServe:
            self._connection.close()
            raise

    def execute(self, sql: str, values: Any = ()) -> sqlite3.Cursor:
        """Run a statement, in the current transaction if there is one."""
        changes = self._connection.total_changes
        try:
            cursor = self._connection.execute(self._convert(sql), values)
        except sqlite3.Error as error:
            raise self._translate(error) from error
        has_committed = not self._connection.in_transaction
        if has_committed and self._connection.total_changes != changes:
            self._files.check()  # or a write into a removed file would be acknowledged
        return cursor

    def transact(self, work: Callable[[], T]) -> T:
        """Run statements as one transaction."""
        try:
            result = sqlite.run_transaction(self._connection, lambda _: work())
        except sqlite3.Error as error:
            raise self._translate(error) from error
        self._files.check()
        return result

    @property
    def is_free(self) -> bool:
        """Whether the other thread has nothing to do."""
        return not self._queued

    async def run(self, work: Callable[..., T], *args: Any, is_long: bool = False) -> T:
        """Call a function that runs statements, to its end also if the caller is cancelled."""
        call = partial(self._call_and_retry, work, *args)
        if is_long or self._queued:
            return await shield(self._queue(call))
        return call()

    def submit(self, work: Callable[..., object], *args: Any, is_long: bool = False) -> None:
        """Call a function that runs statements; after a failure it is called again."""
        call = partial(self._attempt_or_retain, partial(work, *args))
        if is_long or self._queued:
            self._queue(call)
        else:
            call()

    def _queue(self, call: Callable[[], T]) -> Future[T]:
        """Call a function in the other thread."""
        self._queued += 1
        called = get_running_loop().run_in_executor(self._thread, copy_context().run, call)
        called.add_done_callback(self._count_called)
        return called

    def _count_called(self, _: object) -> None:
        self._queued -= 1

    def _call_and_retry(self, work: Callable[..., T], *args: Any) -> T:
        """Call a function, and then the functions that failed before."""
        result = self._call(work, *args)
        self.call_failed()
        return result

    def _attempt_or_retain(self, call: Callable[[], object]) -> None:
        """Call a submitted function, and retain it if it has failed and may succeed later."""
        if not self._attempt(call):
            self._failed.append(call)

    def _call(self, work: Callable[..., T], *args: Any) -> T:
        self._files.check()
        try:
            return work(*args)
        except sqlite3.Error as error:  # of rows that were read after their statement
            raise self._translate(error) from error

    def _attempt(self, work: Callable[[], object]) -> bool:
        """Call a submitted function; return False if it has failed and may succeed later."""
        try:
            self._call(work)
        except StoreError as error:
            log.warning("a change could not be stored: %s", error)
            return not may_succeed_later(error)
        return True

    def call_failed(self) -> None:
        """Call the functions that failed before, until one fails again."""
        while self._failed and self._attempt(self._failed[0]):
            self._failed.popleft()

    def _translate(self, error: sqlite3.Error) -> StoreError:
        failure = sqlite.translate_error(error, self._path)
        if isinstance(failure, sqlite.WRITE_ERRORS):
            self._has_failed_to_write = True
        return failure

    async def check_health(self) -> None:
        """Raise a `StoreError` if the file was replaced, or if a write has failed and one would fail now."""
        self._files.check()
        if self._has_failed_to_write:
            await self.run(sqlite.check_writing, self._connection)
            self._has_failed_to_write = False

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
        self._call(sqlite.empty_journal, self._connection)

    def close(self) -> None:
        """Close the file after all functions that were submitted."""
        self._thread.shutdown()
        try:
            if not self.in_store:
                self.execute("DELETE FROM kedge_server_facts WHERE name = 'open'")
        except StoreError as error:
            log.warning("the database was not closed completely: %s", error)
        finally:
            self._connection.close()


def _open_connection(path: str, *, in_store: bool) -> tuple[sqlite3.Connection, str]:
    """Open a connection to a database; return it with the path of the file, which is empty for one in memory."""
    file = ""
    address = sqlite.MEMORY
    if path != sqlite.MEMORY:
        prepared = _prepare_file(path)
        file = str(prepared)
        address = prepared.as_uri()
    connection = sqlite.open_connection(
        address,
        wait_seconds=STORE_WAIT_SECONDS if in_store else 0.0,
        synchronous="NORMAL",
        exclusive=not in_store,
    )
    return connection, file


def _prepare_file(path: str) -> Path:
    """Create the file of a database, if it does not exist."""
    file = Path(path).expanduser().absolute()
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    sqlite.create_file(str(file))
    return file


def _build_open_error(path: str, error: sqlite3.Error | StoreError | OSError) -> CannotServe:
    if isinstance(error, sqlite3.Error):
        error = sqlite.translate_error(error, path)
    if isinstance(error, StoreBusy):
        return CannotServe(
            f"the database {path} is in use by another server: stop that server, or use another --db"
        )
    problem = error.problem if isinstance(error, StoreError) else error.strerror
    return CannotServe(f"the database {path} cannot be opened: {problem}; use another file")
