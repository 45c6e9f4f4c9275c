"""Access to PostgreSQL: a pool of connections, and short transactions in worker threads.

Many processes can use one database. No connection is occupied while a model runs: each transaction gets one
from the pool and returns it. A transaction that conflicts with another is run again; one whose connection
broke before the commit is run again on a new connection.

Every wait is limited. A transaction waits ``wait_seconds`` for a connection and for locks, and each of its
statements may run for ``statement_seconds``. The limits are set for each transaction and not for the
connection, because a connection to PgBouncer is another session in each transaction.

The store of conversations and the server both use this module and define their own tables. It is therefore
in a lower layer than both, and imports neither blocks nor plans.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager, suppress
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from kedge.errors import (
    CannotOpenStore,
    InvalidSetting,
    StoreBusy,
    StoreDamaged,
    StoreError,
    StoreFull,
    StoreReadOnly,
    StoreUnreachable,
    describe_extra,
)
from kedge.store.database.transactions import Database, Dialect, Tx, Values, Workers, open_databases

if TYPE_CHECKING:
    import psycopg

    from kedge.store.database.connections import PostgresConnection

T = TypeVar("T")

MAX_CONNECTIONS = 4
MAX_THREADS = 64
"""The maximum number of transactions that wait for a connection at the same time."""
MAX_ATTEMPTS = {"conflict": 8, "disconnect": 3, "other": 1}
"""How often a transaction is run, by the cause of its failures."""
WAIT_SECONDS = 10.0
STATEMENT_SECONDS = 10.0
CHECK_SECONDS = 3.0
"""The time in which a server must answer to count as available."""
MARGIN_SECONDS = 1.0
"""The time after which the client gives up waiting for a server that should have cancelled the statement."""

NOW = "EXTRACT(EPOCH FROM clock_timestamp())::double precision"
"""An SQL expression for the time of the database server, in seconds since 1970."""
POSTGRESQL = Dialect(
    name="postgresql",
    has_concurrent_writers=True,
    now=NOW,
    floor="FLOOR({})::bigint",
    list_tables="SELECT tablename FROM pg_tables WHERE schemaname = current_schema()",
    for_update="FOR UPDATE",
    for_key_share="FOR KEY SHARE",
)


def is_postgresql(address: str) -> bool:
    """Return whether an address names a PostgreSQL database."""
    return address.startswith(("postgresql://", "postgres://"))


# The error for each beginning of an SQLSTATE, and its message.
_ERRORS: dict[str, tuple[type[StoreError], str]] = {
    "25006": (StoreReadOnly, "the database may only be read; nothing was written"),
    "28": (CannotOpenStore, "the user or the password is wrong; check the address"),
    "3D": (CannotOpenStore, "there is no such database; create it, or check the address"),
    "42501": (StoreReadOnly, "this user has no permission to write; nothing was written"),
    "53100": (StoreFull, "the server's disk is full; nothing was written"),
    "53300": (StoreBusy, "the server has no free connection; try again"),
    "55P03": (StoreBusy, "another transaction held a lock for too long; try again"),
    "57014": (StoreBusy, "the server cancelled the statement, which took too long; try again"),
    "57P": (StoreUnreachable, "the server is shutting down; try again"),
    "08": (StoreUnreachable, "the connection to the server broke; try again"),
    "XX": (StoreDamaged, "the server reports damaged data; restore a backup"),
}
_RETRYABLE_STATES = ("40001", "40P01", "23503", "23505")
"""Conflicts of transactions: a serialization failure, a deadlock, a row that one deleted and the other
refers to, or a unique key that both inserted."""


class PostgresTransaction(Tx):
    """A transaction on one connection, which begins with its first statement.

    Args:
        connection: The connection, which is in autocommit mode.
        is_retry: Whether an earlier attempt conflicted with another transaction.
    """

    dialect = POSTGRESQL

    def __init__(self, connection: "PostgresConnection", *, is_retry: bool = False) -> None:
        super().__init__(is_retry=is_retry)
        self._connection = connection
        self._cursor = connection.cursor()
        self.in_transaction = False
        self.single_statement = False
        """Whether a statement that writes was run without a transaction around it."""

    def run_many(self, sql: str, rows: Iterable[Values]) -> None:
        """Run a statement once for each set of values."""
        self.begin()
        self._cursor.executemany(convert_placeholders(sql), rows)

    def insert(self, sql: str, values: Values, key: str = "id") -> int:
        """Insert a row, and return the number it got as its ``key``; 0 if it conflicted."""
        row = self.query(f"{sql} RETURNING {key}", values).fetchone()
        return row[0] if row else 0

    def query(
        self, sql: str, values: Values | dict[str, Any] = (), *, alone: bool = False
    ) -> "psycopg.Cursor[Any]":
        """Run a statement of any kind; ``alone`` saves two round trips for the only one of a transaction.

        Returns:
            A cursor with the result, until the next statement of the transaction.
        """
        if alone and not self.in_transaction:
            self.single_statement = not sql.lstrip().startswith(("SELECT", "WITH RECURSIVE"))
            return self.run_alone(convert_placeholders(sql), values)
        self.begin()
        return self._cursor.execute(convert_placeholders(sql), values or None, binary=True)

    def begin(self, statement: bytes = b"BEGIN") -> None:
        """Begin a transaction with its limits unless one was begun; a single statement needs none."""
        if not self.in_transaction:
            self.in_transaction = True
            self._cursor.execute(statement + b"; " + self._connection.build_limits())

    def run_alone(self, sql: bytes, values: Any) -> "psycopg.Cursor[Any]":
        """Run the only statement of a transaction in one round trip, together with its limits.

        Statements of one message are one transaction. The values must be inserted by the driver then.
        """
        cursor = self._connection.open_client_cursor()
        cursor.execute(self._connection.build_limits() + b"; " + sql, values or None)
        while cursor.nextset():
            pass
        return cursor

    def allow_long_statements(self) -> None:
        """Remove the limit for the duration of the statements that follow; locks are still limited."""
        self._connection.allow_long_statements()
        self.begin()
        self._cursor.execute(self._connection.build_limits())


@cache
def convert_placeholders(sql: str) -> Any:
    """Return a statement with the placeholders of this driver instead of ``?``."""
    return sql.replace("?", "%s").encode()


class PostgresDatabase(Database):
    """The connections to a PostgreSQL database, and the threads that run its transactions.

    Args:
        url: The address: ``postgresql://user@host/database``.
        connections: The maximum number of connections.
        wait_seconds: The maximum time that a transaction waits for a connection and for locks.
        statement_seconds: The maximum time that a statement may run besides that.

    Raises:
        CannotOpenStore: The driver is not installed.
    """

    dialect = POSTGRESQL

    def __init__(
        self,
        url: str,
        *,
        connections: int = MAX_CONNECTIONS,
        wait_seconds: float = WAIT_SECONDS,
        statement_seconds: float = STATEMENT_SECONDS,
    ) -> None:
        self._url = url
        self.wait_seconds = wait_seconds
        """The maximum time that a transaction waits for a connection and for locks; may be changed."""
        self.statement_seconds = statement_seconds
        """The maximum time that a statement may run besides that; may be changed."""
        self._driver, self._connections = _import_driver()
        self._pool = self._connections.PostgresConnections(url, connections)
        self.readers = self.writers = Workers(MAX_THREADS, "kedge-store")
        open_databases.add(self)

    def restart(self) -> None:
        """Begin without threads and connections, in a forked process."""
        self._pool.restart()
        super().restart()

    def close(self) -> None:
        """Stop the threads, then close the connections."""
        self.writers.close()
        self._pool.close()

    def run_read(self, work: Callable[[Tx], T]) -> T:
        """Run queries against one consistent state, in the calling thread."""

        def read(tx: PostgresTransaction) -> T:
            tx.begin(b"BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
            return work(tx)

        return self._retry(read, self.wait_seconds, self.statement_seconds)

    def run_write(self, work: Callable[[PostgresTransaction], T]) -> T:
        """Run a transaction in the calling thread; it may be run again after a conflict."""
        return self._retry(work, self.wait_seconds, self.statement_seconds)

    async def check_health(self) -> None:
        """Raise a `StoreError` unless the server answers within `CHECK_SECONDS`."""
        await asyncio.to_thread(self._request_answer)

    def _request_answer(self) -> None:
        self._retry(lambda tx: tx.run_alone(b"SELECT 1", None), CHECK_SECONDS - MARGIN_SECONDS, 0.0)

    def _retry(
        self,
        work: Callable[[PostgresTransaction], T],
        wait_seconds: float,
        statement_seconds: float,
    ) -> T:
        """Run a transaction again after a conflict or a lost connection, each up to its own number of times."""
        wait_until = time.monotonic() + wait_seconds
        failures: Counter[str] = Counter()
        with self._translate_errors():
            while True:
                connection = self._pool.acquire(wait_until)
                connection.limit(wait_until, statement_seconds)
                try:
                    # The context managers of the driver would commit and reset in several steps.
                    tx = PostgresTransaction(connection, is_retry=failures["conflict"] > 0)
                    return self._run_transaction(work, connection, tx)
                except self._driver.Error as error:
                    cause = self._find_cause(error)
                    failures[cause] += 1
                    if failures[cause] >= MAX_ATTEMPTS[cause]:
                        raise
                finally:
                    self._pool.release(connection)

    def _run_transaction(
        self,
        work: Callable[[PostgresTransaction], T],
        connection: "PostgresConnection",
        tx: PostgresTransaction,
    ) -> T:
        try:
            result = work(tx)
        except BaseException as error:
            if tx.single_statement and self._is_disconnect(error) and not _get_state(error):
                raise _CommitUnknown from error
            if tx.in_transaction:
                with suppress(self._driver.Error):
                    connection.rollback()
            raise
        try:
            if tx.in_transaction:
                connection.commit()
        except self._driver.OperationalError as error:
            # It may have been committed, so running it again could write it twice.
            raise _CommitUnknown from error
        return result

    @contextmanager
    def _translate_errors(self) -> Generator[None]:
        try:
            yield
        except _CommitUnknown as unknown:
            failure = StoreUnreachable(
                "the connection broke while a transaction was committed; check whether it was written before "
                "trying again",
                self._safe_url(),
            )
            failure.retryable = False  # running it again without a check could write it twice
            raise failure from unknown
        except self._driver.Error as error:
            raise self._to_store_error(error) from None
        except UnicodeEncodeError as error:
            raise InvalidSetting("a value contains a lone surrogate; remove it") from error

    def _to_store_error(self, error: "psycopg.Error") -> StoreError | InvalidSetting:
        """Return our error for an error of the driver, whose message may contain the password."""
        state = error.sqlstate or ""
        where = self._safe_url()
        if isinstance(error, self._driver.DataError) and "NUL" in str(error):
            return InvalidSetting("a value contains a NUL character; remove it")
        for length in (5, 3, 2):
            if state[:length] in _ERRORS:
                kind, message = _ERRORS[state[:length]]
                return kind(message, where)
        if isinstance(error, self._connections.ConnectionsBusy):
            problem = f"every connection was busy for {self.wait_seconds:g} s; try again"
            return StoreBusy(problem, where)
        if isinstance(error, self._connections.NoAnswer):
            problem = "the server did not answer in time, and the connection was closed; try again"
            return StoreUnreachable(problem, where)
        if not state and isinstance(error, self._driver.OperationalError):
            if self._connections.is_permanent(error):
                return CannotOpenStore("the user, the password or the database is wrong", where)
            return StoreUnreachable("no answer from the server; is it running?", where)
        message = error.diag.message_primary or type(error).__name__
        return StoreError(f"PostgreSQL reports: {message}", where)

    def _is_disconnect(self, error: BaseException) -> bool:
        """Return whether the connection broke, rather than a statement or the wait for one."""
        broken = (self._driver.OperationalError, self._driver.InterfaceError)
        state = _get_state(error)
        return isinstance(error, broken) and (not state or state.startswith(("08", "57P")))

    def _find_cause(self, error: "psycopg.Error") -> str:
        """Return why a transaction failed; after a wait without an answer there is no time for another one."""
        if error.sqlstate in _RETRYABLE_STATES:
            return "conflict"
        is_slow = isinstance(error, self._connections.NoAnswer)
        return "disconnect" if self._is_disconnect(error) and not is_slow else "other"

    def _safe_url(self) -> str:
        """Return the address without user, password and options."""
        parts = urlsplit(self._url)
        # After a password with /, ? or # that is not escaped.
        if "@" in parts.path + parts.query + parts.fragment:
            return "postgresql://…"
        return f"postgresql://{parts.netloc.rpartition('@')[2]}{parts.path}"


class _CommitUnknown(Exception):
    """The connection broke while a transaction was being committed."""


def _get_state(error: BaseException) -> str:
    """Return the SQLSTATE of an error that the server reported; empty for any other."""
    return getattr(error, "sqlstate", None) or ""


def _import_driver() -> tuple[Any, Any]:
    try:
        import psycopg
    except ImportError:
        raise CannotOpenStore(describe_extra("postgres")) from None
    from kedge.store.database import connections

    return psycopg, connections
