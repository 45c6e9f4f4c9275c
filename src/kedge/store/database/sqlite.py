"""SQLite: one writer thread, a few readers, and a file that several processes may share.

The journal is a WAL with ``synchronous = FULL``: a finished commit survives a power failure. Writers
acquire the lock at the beginning (``BEGIN IMMEDIATE``), so a transaction never fails halfway because
of a lock. A transaction that waits longer than ``wait_seconds`` raises `StoreBusy`. Each transaction checks that
the files are those that were opened (`file_identity`), before it begins and, if it may have written,
before its result is returned.
"""

import os
import sqlite3
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

from kedge._internal.files import ensure_private_file
from kedge.errors import (
    CannotOpenStore,
    InvalidSetting,
    StoreBusy,
    StoreDamaged,
    StoreError,
    StoreFull,
    StoreReadOnly,
)
from kedge.store.database.file_identity import OpenFiles
from kedge.store.database.transactions import (
    Database,
    Dialect,
    OperationTimer,
    Tx,
    Values,
    Workers,
    closed_error,
    inherited,
    open_databases,
)

T = TypeVar("T")

MEMORY = ":memory:"
MAX_READERS = 4
INLINE_WAIT_SECONDS = 0.05
"""The maximum time a transaction in the calling thread waits for another process that writes."""
CHECKPOINT_PAGES = 4_000
"""The size at which the journal is written back. Exchanges change few pages, so writing later writes less."""
PROBE_BYTES = 256 * 1024
"""What a health check writes after a write has failed: more than most transactions."""
PROBE_CACHE_PAGES = 10
"""The size of the cache meanwhile, which is less than what is written."""
SUSPEND_SECONDS = 0.001
"""The time between two looks at whether transactions run, before this process is forked."""

SQLITE = Dialect(
    name="sqlite",
    has_concurrent_writers=False,
    now="((julianday('now') - 2440587.5) * 86400.0)",
    floor="CAST({} AS INTEGER)",
    list_tables="SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT GLOB 'sqlite_*'",
)

# The error for each primary result code of SQLite, and its message.
_ERRORS: dict[int, tuple[type[StoreError], str]] = {
    sqlite3.SQLITE_BUSY: (StoreBusy, "another process holds the database; try again"),
    sqlite3.SQLITE_LOCKED: (StoreBusy, "another connection holds the database; try again"),
    sqlite3.SQLITE_FULL: (StoreFull, "the disk is full; nothing was written"),
    sqlite3.SQLITE_IOERR: (StoreFull, "the disk failed or is full; nothing was written"),
    sqlite3.SQLITE_READONLY: (StoreReadOnly, "the database may only be read; nothing was written"),
    sqlite3.SQLITE_CORRUPT: (StoreDamaged, "the database file is damaged; restore a backup"),
    sqlite3.SQLITE_NOTADB: (CannotOpenStore, "the file is not a SQLite database"),
    sqlite3.SQLITE_CANTOPEN: (CannotOpenStore, "the file cannot be opened or created"),
}


class _SQLiteTx(Tx):
    """A transaction on one connection."""

    dialect = SQLITE

    def __init__(self, cursor: sqlite3.Cursor, *, is_retry: bool = False) -> None:
        super().__init__(is_retry=is_retry)
        self._cursor = cursor

    def run_many(self, sql: str, rows: Iterable[Values]) -> None:
        self._cursor.executemany(sql, rows)

    def insert(self, sql: str, values: Values, key: str = "id") -> int:
        cursor = self._cursor.execute(sql, values)
        if not cursor.rowcount:
            return 0
        return cursor.lastrowid or 0

    def query(self, sql: str, values: Values = ()) -> sqlite3.Cursor:
        return self._cursor.execute(sql, values)


class SQLiteDatabase(Database):
    """A SQLite file, or a database in memory.

    Args:
        path: The file, or ``:memory:``.
        wait_seconds: The maximum time that a transaction waits for another process.
        read_only: Whether the file may only be read.
    """

    dialect = SQLITE

    def __init__(self, path: str, *, wait_seconds: float = 10.0, read_only: bool = False) -> None:
        self.path = path
        self.name = path
        self._wait_seconds = wait_seconds
        self._read_only = read_only
        self._options = "mode=ro" if read_only else "mode=rwc"
        self._files = OpenFiles("" if path == MEMORY else path)
        self._has_failed_to_write = False
        in_memory = path == MEMORY
        self._connections = _Connections(in_memory=in_memory)
        self._locks = _Locks()
        self.writers = Workers(1, "kedge-store-writer")
        self.readers = self.writers
        if not in_memory:
            self.readers = Workers(MAX_READERS, "kedge-store-reader")
        self._has_inline = not (in_memory or read_only)
        self._is_closed = False
        self._journal_is_pending = False
        open_databases.add(self)

    def suspend(self) -> None:
        """Wait until no transaction runs, and close the connections.

        SQLite has the locks of this process on the file in its memory, which a fork copies without the locks. So the
        connections of the new process would not lock the file, and the other one could delete the journal in use.
        """
        deadline = time.monotonic() + self._wait_seconds
        locks = self._locks
        locks.use.acquire()
        while locks.uses and time.monotonic() < deadline:
            locks.use.release()
            time.sleep(SUSPEND_SECONDS)
            locks.use.acquire()
        if not locks.uses and self.path != MEMORY:
            self._connections.close()
            self._files.forget_journal()
            self._connections = _Connections()

    def resume(self) -> None:
        """Allow transactions again."""
        self._locks.use.release()

    def restart(self) -> None:
        """Begin without threads and connections, in a forked process; a database in memory was copied to it."""
        if self.path != MEMORY:
            self._connections.close.detach()
            # Transactions that did not end in time have connections.
            inherited.append(self._connections.opened)
            self._files.forget_journal()
            self._connections = _Connections()
        self._locks = _Locks()
        super().restart()

    # A thread costs more than the work here: a lookup or an insertion takes 20 to 50 microseconds,
    # switching to a worker thread and back 100 to 200. So small transactions may run in the calling
    # thread, on a connection that never waits for a disk: readers of a WAL are not blocked,
    # `synchronous = NORMAL` leaves the journal to the operating system, and the writer thread writes
    # it back. A power failure may lose the last of these transactions.

    @property
    def can_run_inline(self) -> bool:
        """Whether small transactions may run in the calling thread, because this process is not writing."""
        return self._has_inline and not self._locks.write.locked()

    def read_inline(self, work: Callable[[Tx], T]) -> T:
        """Run queries in the calling thread, each on the newest state."""
        if not self._has_inline:
            return self.read_sync(work)
        with OperationTimer("read"), self._locks.inline:
            return self._run_inline(lambda connection: work(_SQLiteTx(connection.cursor())))

    def write_inline(self, work: Callable[[Tx], T]) -> T:
        """Run a transaction in the calling thread; it survives a crash of the process, not a power failure."""
        if not self._has_inline:
            return self.write_sync(work)
        with OperationTimer("write"), self._locks.write, self._locks.inline:
            return self._run_inline(lambda connection: self._run_to_write(connection, work))

    def _run_inline(self, run_on: Callable[[sqlite3.Connection], T]) -> T:
        if self._is_closed:
            raise closed_error()
        self.first_use.ensure()
        with self._use_connection(inline=True) as connection:
            return run_on(connection)

    def run_read(self, work: Callable[[Tx], T]) -> T:
        """Run queries in the calling thread, also before the schema is current."""
        with self._use_connection() as connection:
            return run_transaction(connection, work, "BEGIN")

    def run_write(self, work: Callable[[Tx], T]) -> T:
        """Run a transaction in the calling thread, also before the schema is current."""
        with self._use_connection() as connection, self._locks.write:
            try:
                return self._run_to_write(connection, work)
            except sqlite3.IntegrityError:
                return self._run_to_write(connection, work, is_retry=True)

    def _run_to_write(
        self, connection: sqlite3.Connection, work: Callable[[Tx], T], *, is_retry: bool = False
    ) -> T:
        result = run_transaction(connection, work, is_retry=is_retry)
        self._files.check()  # or a write into a removed file would be acknowledged
        return result

    async def check_health(self) -> None:
        """Raise a `StoreError` if the file was replaced, or if a write has failed and one would fail now."""
        self._files.check()
        if self._has_failed_to_write:
            await self.writers.run(self._check_writing, None)

    def _check_writing(self, _: object) -> None:
        with self._use_connection() as connection, self._locks.write:
            check_writing(connection)
        self._has_failed_to_write = False

    def reclaim_files(self, vacuum: bool) -> None:
        """Overwrite deleted data in the file and the journal."""
        with self._use_connection() as connection:
            if vacuum:
                connection.execute("VACUUM")
            self._journal_is_pending = not empty_journal(connection)

    @contextmanager
    def _use_connection(self, *, inline: bool = False) -> Generator[sqlite3.Connection]:
        """Provide the connection of this thread, or the one for the calling thread, and convert errors.

        Then the journal is emptied if a reader prevented it after a deletion.
        """
        locks = self._locks
        with locks.use:
            locks.uses += 1
        try:
            self._files.check()
            connection = self._connections.find(inline=inline)
            if connection is None:
                connection = self._connect(inline=inline)
            yield connection
            if self._journal_is_pending and not inline:
                connection.execute("PRAGMA busy_timeout = 0")
                with suppress(sqlite3.OperationalError):  # the next operation tries again
                    self._journal_is_pending = not empty_journal(connection)
                connection.execute(f"PRAGMA busy_timeout = {int(self._wait_seconds * 1000)}")
        except UnicodeEncodeError as error:
            raise InvalidSetting("a value contains a lone surrogate; remove it") from error
        except OverflowError as error:
            raise InvalidSetting("a number is too large: it has more than 64 bits") from error
        except sqlite3.Error as error:
            failure = translate_error(error, self.path)
            if isinstance(failure, WRITE_ERRORS) and not self._read_only:
                self._has_failed_to_write = True
            raise failure from error
        finally:
            with locks.use:
                locks.uses -= 1

    def close(self) -> None:
        """Stop the threads, then close their connections."""
        self.writers.close()
        self.readers.close()
        with self._locks.inline:
            self._is_closed = True
            self._connections.close()

    def _connect(self, *, inline: bool = False) -> sqlite3.Connection:
        is_new = not (self._read_only or self.path == MEMORY) and create_file(self.path)
        try:
            return self._open(inline=inline)
        except sqlite3.OperationalError as error:
            # A WAL cannot be created in a read-only folder. No other process can write there either, so the
            # file may be read as it is, unless there is a journal with newer content.
            if is_new or _primary_code(error) not in _READ_ONLY_CODES or _has_journal(self.path):
                raise
            self._read_only = True
            self._options = "mode=ro&immutable=1"
            return self._open(inline=inline)

    def _open(self, *, inline: bool) -> sqlite3.Connection:
        target = MEMORY
        if self.path != MEMORY:
            target = f"{Path(self.path).absolute().as_uri()}?{self._options}"
        if inline:
            connection = open_connection(
                target,
                wait_seconds=INLINE_WAIT_SECONDS,
                synchronous="NORMAL",
                checkpoint_pages=0,
                read_only=self._read_only,
            )
        else:
            connection = open_connection(
                target,
                wait_seconds=self._wait_seconds,
                synchronous="FULL",
                checkpoint_pages=CHECKPOINT_PAGES,
                read_only=self._read_only,
            )
        self._connections.add(connection, inline=inline)
        self._files.record(has_journal=not self._read_only)
        return connection


def open_connection(
    target: str,
    *,
    wait_seconds: float,
    synchronous: str,
    checkpoint_pages: int = CHECKPOINT_PAGES,
    read_only: bool = False,
    exclusive: bool = False,
) -> sqlite3.Connection:
    """Open a connection to a database with a WAL, whose transactions are begun explicitly.

    Args:
        target: The URI of a file, or ``:memory:``.
        wait_seconds: The maximum time that a statement waits for another process.
        synchronous: ``FULL`` if a commit must survive a power failure, ``NORMAL`` otherwise.
        checkpoint_pages: The size at which the journal is written back; 0 for never.
        read_only: Whether the file may only be read.
        exclusive: Whether other processes may not use the file; it is locked by the first transaction.

    Returns:
        The connection, which any thread may use.
    """
    connection = sqlite3.connect(
        target,
        uri=True,
        timeout=wait_seconds,
        isolation_level=None,
        check_same_thread=False,
        cached_statements=256,
    )
    try:
        if exclusive:
            connection.execute("PRAGMA locking_mode = EXCLUSIVE")
        if not read_only:
            connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA user_version").fetchone()  # opens the journal
        connection.execute(f"PRAGMA synchronous = {synchronous}")
        connection.execute("PRAGMA secure_delete = ON")
        connection.execute(f"PRAGMA wal_autocheckpoint = {checkpoint_pages}")
    except BaseException:
        connection.close()
        raise
    return connection


class _Connections:
    """The open connections to a database: one of each thread, and one for small transactions in calling threads.

    Args:
        in_memory: Whether the database is in memory, which has a single thread and connection.
    """

    def __init__(self, *, in_memory: bool = False) -> None:
        self.opened: list[sqlite3.Connection] = []
        self._of_thread: Any = SimpleNamespace() if in_memory else threading.local()
        self._inline: sqlite3.Connection | None = None
        # Also for a store that is not closed. At the end of the program, threads end before finalizers run.
        self.close = weakref.finalize(self, _close_all, self.opened)

    def find(self, *, inline: bool) -> sqlite3.Connection | None:
        """Return the connection for small transactions, or the connection of this thread, if it is open."""
        return self._inline if inline else getattr(self._of_thread, "connection", None)

    def add(self, connection: sqlite3.Connection, *, inline: bool) -> None:
        """Add the connection for small transactions, or the connection of this thread."""
        self.opened.append(connection)
        if inline:
            self._inline = connection
        else:
            self._of_thread.connection = connection


class _Locks:
    """The locks of a database in this process."""

    def __init__(self) -> None:
        self.write = threading.Lock()
        """Held by the transaction that writes."""
        self.inline = threading.Lock()
        """Held by whoever uses the connection for small transactions."""
        self.use = threading.Lock()
        """Held while `uses` changes, and while this process is forked."""
        self.uses = 0
        """The number of transactions that use a connection."""


def _close_all(connections: list[sqlite3.Connection]) -> None:
    while connections:
        connections.pop().close()


def run_transaction(
    connection: sqlite3.Connection,
    work: Callable[[Tx], T],
    begin: str = "BEGIN IMMEDIATE",
    *,
    is_retry: bool = False,
) -> T:
    """Run a function as one transaction, which may write by default."""
    cursor = connection.cursor()
    cursor.execute(begin)
    try:
        result = work(_SQLiteTx(cursor, is_retry=is_retry))
        cursor.execute("COMMIT")
    except BaseException:
        with suppress(sqlite3.Error):  # with a full disk, SQLite has rolled back already
            cursor.execute("ROLLBACK")
        raise
    return result


def check_writing(connection: sqlite3.Connection) -> None:
    """Write some pages into the journal, without changing anything.

    Dirty pages that do not fit into the cache are written before the end of their transaction, which is undone.

    Raises:
        sqlite3.Error: They cannot be written.
    """
    ((cache_size,),) = connection.execute("PRAGMA cache_size")
    connection.execute(f"PRAGMA cache_size = {PROBE_CACHE_PAGES}")
    try:
        connection.execute("BEGIN IMMEDIATE")
        try:
            connection.execute("CREATE TABLE kedge_probe (content BLOB)")
            connection.execute(f"INSERT INTO kedge_probe VALUES (zeroblob({PROBE_BYTES}))")
        finally:
            with suppress(sqlite3.Error):  # with a full disk, SQLite has rolled back already
                connection.execute("ROLLBACK")
    finally:
        connection.execute(f"PRAGMA cache_size = {cache_size}")


def empty_journal(connection: sqlite3.Connection) -> bool:
    """Move the journal into the file and overwrite it; return False if a reader prevents that."""
    is_busy, *_ = connection.execute("PRAGMA wal_checkpoint (TRUNCATE)").fetchone()
    return not is_busy


def create_file(path: str) -> bool:
    """Create the file of a database; SQLite's other files get the same mode.

    Returns:
        Whether the file did not exist.
    """
    try:
        return ensure_private_file(path)
    except OSError:  # SQLite reports it with more detail
        return not os.access(path, os.F_OK)


def _has_journal(path: str) -> bool:
    try:
        return Path(f"{path}-wal").stat().st_size > 0
    except OSError:
        return False


_READ_ONLY_CODES = frozenset({sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY})


WRITE_ERRORS = (StoreFull, StoreReadOnly)
"""The errors after which writes are expected to fail, until something else is changed."""


def translate_error(error: sqlite3.Error, path: str) -> StoreError:
    """Return the error of the store for an error of SQLite: the same for every database in a file."""
    kind, problem = _ERRORS.get(_primary_code(error), (StoreError, f"SQLite reports: {error}"))
    return kind(problem, path)


def _primary_code(error: sqlite3.Error) -> int:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF
