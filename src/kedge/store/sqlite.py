"""SQLite: one writer thread, a few readers, and a file that several processes may share.

The journal is a WAL with ``synchronous = FULL``: a finished commit survives a power failure. Writers
acquire the lock at the beginning (``BEGIN IMMEDIATE``), so a transaction never fails halfway because
of a lock. A transaction that waits longer than ``wait_seconds`` raises `StoreBusy`.
"""

import os
import sqlite3
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

from kedge.database.workers import Workers, closed_error
from kedge.errors import (
    CannotOpenStore,
    InvalidSetting,
    StoreBusy,
    StoreDamaged,
    StoreError,
    StoreFull,
    StoreReadOnly,
)
from kedge.store.conversations import MOVE_HEAD
from kedge.store.database import Database, Dialect, OperationTimer, Row, Tx, Values
from kedge.store.responses import INSERT_RESPONSE

T = TypeVar("T")

MEMORY = ":memory:"
MAX_READERS = 4
INLINE_WAIT_MILLISECONDS = 50
"""The maximum time a transaction in the calling thread waits for another process that writes."""
CHECKPOINT_PAGES = 4_000
"""The size at which the journal is written back. Exchanges change few pages, so writing later writes less."""

SQLITE = Dialect(
    name="sqlite",
    lock_nodes="",
    shorten_lock_wait="",
    for_update="",
    for_key_share="",
    lock_names="",
    texts_per_group=2_048,
    text_table="texts_{}",
    create_text_table="CREATE VIRTUAL TABLE IF NOT EXISTS texts_{} USING fts5 ("
    "body, tokenize = \"unicode61 remove_diacritics 0 categories 'L* N* Co M* S*'\")",
    rewrite_texts="INSERT INTO texts_{0} (texts_{0}) VALUES ('optimize')",
    insert_text="INSERT OR REPLACE INTO texts_{} (rowid, body) VALUES (?, ?)",
    text_match="t.texts_{} MATCH ?",
    quote_term='"{}"',
    quote_prefix='"{}"*',
    term_separator=" AND ",
    or_separator=" OR ",
    now="((julianday('now') - 2440587.5) * 86400.0)",
    floor="CAST({} AS INTEGER)",
    list_tables="SELECT name FROM sqlite_master WHERE type = 'table'",
)

_EMPTY_JOURNAL = "PRAGMA wal_checkpoint (TRUNCATE)"

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

_DATABASE_ERRORS = (sqlite3.Error, UnicodeEncodeError)


# The node of an exchange is added without queries. A statement conflicts if the conversation or the parent was deleted,
# because the tree is NULL then, if a block is stored already, or if another node has continued the branch. The
# transaction is then run again step by step.
_INSERT_NODE = """
INSERT INTO nodes
    (tree, branch, parent, conversation, kind, kept, length, depth, memory, created_at, checksum)
VALUES (
    (SELECT n.tree FROM conversations c JOIN nodes n ON n.tree = c.tree
    WHERE c.number = ? AND c.id = ? AND c.namespace = ? AND n.id = ? AND n.length = ?),
    ?, ?, ?, ?, ?, ?, ?, ?, ?, ?
)
"""
_INSERT_BLOCK = "INSERT INTO blocks (hash, owner, body) VALUES (?, ?, ?)"
_INSERT_LINK = "INSERT INTO links (branch, place, block) VALUES (?, ?, ?)"


class _SQLiteTx:
    """A transaction on one connection."""

    dialect = SQLITE

    def __init__(self, cursor: sqlite3.Cursor, *, is_retry: bool = False) -> None:
        self.is_retry = is_retry
        self.namespace = ""
        self._cursor = cursor
        self._execute = cursor.execute

    def allow_long_statements(self) -> None:
        pass

    def rows(self, sql: str, values: Values = ()) -> list[Row]:
        return self._execute(sql, values).fetchall()

    def run(self, sql: str, values: Values = ()) -> int:
        return self._execute(sql, values).rowcount

    def run_many(self, sql: str, rows: Iterable[Values]) -> None:
        self._cursor.executemany(sql, rows)

    def insert(self, sql: str, values: Values, key: str = "id") -> int:
        cursor = self._execute(sql, values)
        return cursor.lastrowid or 0 if cursor.rowcount else 0

    def add_node(
        self,
        conversation_id: str,
        node: Row,
        blocks: Sequence[tuple[bytes, str]],
        response: Row | None,
        head: int | None,
        *,
        single_statement: bool,
    ) -> tuple[int, bool] | None:
        if self.is_retry:
            return None
        cursor, execute = self._cursor, self._execute
        _, branch, parent, number, _, kept, *_, now, _ = node
        execute(_INSERT_NODE, (number, conversation_id, self.namespace, parent, kept, *node[1:]))
        node_id = cursor.lastrowid or 0
        for place, (digest, body) in enumerate(blocks, kept):
            execute(_INSERT_BLOCK, (digest, number, body))
            execute(_INSERT_LINK, (branch, place, cursor.lastrowid))
        if response:
            execute(INSERT_RESPONSE, (node_id, number, *response))
        if head is None:
            return node_id, False
        return node_id, execute(MOVE_HEAD, (node_id, now, number, head)).rowcount > 0


class SQLiteDatabase(Database):
    """A SQLite file, or a database in memory."""

    dialect = SQLITE

    def __init__(self, path: str, *, wait_seconds: float = 10.0, read_only: bool = False) -> None:
        self.path = self.name = path
        self._wait_seconds = wait_seconds
        self._read_only = read_only
        self._options = "mode=ro" if read_only else "mode=rwc"
        self._connections: list[sqlite3.Connection] = []
        # For a store that is not closed. At the end of the program, later finalizers run first: the threads stop.
        self._close_connections = weakref.finalize(self, _close_all, self._connections)
        self._writer = Workers(1, "kedge-store-writer")
        alone = path == MEMORY
        self._readers = self._writer if alone else Workers(MAX_READERS, "kedge-store-reader")
        self._local = threading.local()
        self._write_lock = threading.Lock()
        self._inline_lock = threading.Lock()
        self._inline: sqlite3.Connection | None = None
        self._is_closed = False
        self._journal_is_pending = False

    async def read(self, work: Callable[[Tx], T]) -> T:
        """Run queries in a reader thread."""
        with OperationTimer("read"):
            result = await self._readers.run(self._read_current, work)
        if self._journal_is_pending:
            await self._retry_empty_journal()
        return result

    async def write(self, work: Callable[[Tx], T]) -> T:
        """Run a transaction in the writer thread."""
        with OperationTimer("write"):
            result = await self._writer.run(self._write_current, work)
        if self._journal_is_pending:
            await self._retry_empty_journal()
        return result

    def read_sync(self, work: Callable[[Tx], T]) -> T:
        """Run queries in a reader thread, and wait for it."""
        with OperationTimer("read"):
            return self._readers.run_sync(self._read_current, work)

    def write_sync(self, work: Callable[[Tx], T]) -> T:
        """Run a transaction in the writer thread, and wait for it."""
        with OperationTimer("write"):
            return self._writer.run_sync(self._write_current, work)

    # A thread costs more than the work here: a lookup or an insertion takes 20 to 50 microseconds,
    # switching to a worker thread and back 100 to 200. So small transactions may run in the calling
    # thread, on a connection that never waits for a disk: readers of a WAL are not blocked,
    # `synchronous = NORMAL` leaves the journal to the operating system, and the writer thread writes
    # it back. A power failure may lose the last of these transactions.

    @property
    def can_run_inline(self) -> bool:
        """Whether small transactions may run in the calling thread, because this process is not writing."""
        return not (self.path == MEMORY or self._read_only or self._write_lock.locked())

    def read_inline(self, work: Callable[[Tx], T]) -> T:
        """Run queries in the calling thread, each on the newest state."""
        if self.path == MEMORY:
            return self.read_sync(work)
        with OperationTimer("read"), self._inline_lock:
            return self._run_inline(lambda connection: work(_SQLiteTx(connection.cursor())))

    def write_inline(self, work: Callable[[Tx], T]) -> T:
        """Run a transaction in the calling thread; it survives a crash of the process, not a power failure."""
        if self.path == MEMORY:
            return self.write_sync(work)
        with OperationTimer("write"), self._write_lock, self._inline_lock:
            return self._run_inline(partial(_run_transaction, begin="BEGIN IMMEDIATE", work=work))

    def _run_inline(self, run_on: Callable[[sqlite3.Connection], T]) -> T:
        if self._is_closed:
            raise closed_error()
        self.first_use.ensure()

        def run() -> T:
            if self._inline is None:
                connection = self._connect()
                connection.execute(f"PRAGMA busy_timeout = {INLINE_WAIT_MILLISECONDS}")
                connection.execute("PRAGMA synchronous = NORMAL")
                connection.execute("PRAGMA wal_autocheckpoint = 0")
                self._connections.append(connection)
                self._inline = connection
            return run_on(self._inline)

        return self._translate_errors(run)

    async def reclaim(self, *, vacuum: bool = False) -> None:
        """Overwrite deleted data in the file and the journal."""

        def work() -> None:
            connection = self._get_connection()
            if vacuum:
                connection.execute("VACUUM")
            self._empty_journal()

        await self._writer.run(self._translate_errors, work)

    def _empty_journal(self) -> None:
        """Move the journal into the file and empty it, or record that a reader prevented that."""
        is_busy, *_ = self._get_connection().execute(_EMPTY_JOURNAL).fetchone()
        self._journal_is_pending = bool(is_busy)

    async def _retry_empty_journal(self) -> None:
        """Empty the journal if a reader prevented it after a deletion and may be done now."""

        def work() -> None:
            connection = self._get_connection()
            connection.execute("PRAGMA busy_timeout = 0")
            try:
                self._empty_journal()
            finally:
                connection.execute(f"PRAGMA busy_timeout = {int(self._wait_seconds * 1000)}")

        with suppress(StoreBusy):  # the next operation tries again
            await self._writer.run(self._translate_errors, work)

    def close(self) -> None:
        """Stop the threads, then close their connections."""
        self._writer.close()
        self._readers.close()
        with self._inline_lock:
            self._is_closed = True
            self._close_connections()

    def _read_current(self, work: Callable[[Tx], T]) -> T:
        self.first_use.ensure()
        return self.run_read(work)

    def _write_current(self, work: Callable[[Tx], T]) -> T:
        self.first_use.ensure()
        return self.run_write(work)

    def run_read(self, work: Callable[[Tx], T]) -> T:
        """Run queries in the calling thread, also before the schema is current."""
        return self._translate_errors(
            lambda: _run_transaction(self._get_connection(), "BEGIN", work)
        )

    def run_write(self, work: Callable[[Tx], T]) -> T:
        """Run a transaction in the calling thread, also before the schema is current."""
        begin = "BEGIN IMMEDIATE"
        try:
            connection = self._get_connection()
            with self._write_lock:
                try:
                    return _run_transaction(connection, begin, work)
                except sqlite3.IntegrityError:
                    return _run_transaction(connection, begin, work, is_retry=True)
        except _DATABASE_ERRORS as error:
            raise _to_store_error(error, self.path) from error

    def _translate_errors(self, work: Callable[[], T]) -> T:
        try:
            return work()
        except _DATABASE_ERRORS as error:
            raise _to_store_error(error, self.path) from error

    def _get_connection(self) -> sqlite3.Connection:
        connection = getattr(self._local, "connection", None)
        if connection is None:
            connection = self._local.connection = self._connect()
            self._connections.append(connection)
        return connection

    def _connect(self) -> sqlite3.Connection:
        if self.path == MEMORY:
            return self._open(MEMORY)
        uri = Path(self.path).absolute().as_uri()
        is_new = not self._read_only and _create_private_file(self.path)
        try:
            return self._open(f"{uri}?{self._options}")
        except sqlite3.OperationalError as error:
            # A WAL cannot be created in a read-only folder. No other process can write there either, so the
            # file may be read as it is, unless there is a journal with newer content.
            if is_new or _primary_code(error) not in _READ_ONLY_CODES or _has_journal(self.path):
                raise
            self._read_only, self._options = True, "mode=ro&immutable=1"
            return self._open(f"{uri}?{self._options}")

    def _open(self, target: str) -> sqlite3.Connection:
        connection = sqlite3.connect(
            target,
            uri=True,
            timeout=self._wait_seconds,
            isolation_level=None,
            check_same_thread=False,
            cached_statements=256,
        )
        try:
            if not self._read_only:
                connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA user_version").fetchone()  # opens the journal
            connection.execute("PRAGMA synchronous = FULL")
            connection.execute("PRAGMA secure_delete = ON")
            connection.execute(f"PRAGMA wal_autocheckpoint = {CHECKPOINT_PAGES}")
        except BaseException:
            connection.close()
            raise
        return connection


def _close_all(connections: list[sqlite3.Connection]) -> None:
    while connections:
        connections.pop().close()


def _run_transaction(
    connection: sqlite3.Connection, begin: str, work: Callable[[Tx], T], *, is_retry: bool = False
) -> T:
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


def _create_private_file(path: str) -> bool:
    """Create the file so that only its owner can read it; SQLite's other files get the same mode.

    An existing file is not opened, because closing it would release every lock of this process on it.

    Returns:
        Whether the file did not exist.
    """
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
    except FileExistsError:
        return False
    except OSError:  # SQLite reports it with more detail
        return not os.access(path, os.F_OK)
    return True


def _has_journal(path: str) -> bool:
    try:
        return Path(f"{path}-wal").stat().st_size > 0
    except OSError:
        return False


_READ_ONLY_CODES = frozenset({sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY})


def _primary_code(error: sqlite3.Error) -> int:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


def _to_store_error(
    error: sqlite3.Error | UnicodeEncodeError, path: str
) -> StoreError | InvalidSetting:
    """Return our error for an error of SQLite, or of the conversion of a value."""
    if isinstance(error, UnicodeEncodeError):
        return InvalidSetting("a value contains a lone surrogate; remove it")
    kind, message = _ERRORS.get(_primary_code(error), (StoreError, f"SQLite reports: {error}"))
    return kind(f"{path}: {message}")
