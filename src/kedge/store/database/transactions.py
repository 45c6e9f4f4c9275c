"""The interface of a database: transactions that run in worker threads.

All operations are plain functions of a `Tx`, the same for both databases. The differences between them are in
`Dialect` and in the two modules that implement `Database`. SQL uses ``?`` for values.
"""

import asyncio
import logging
import os
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence, Sized
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from msgspec import Struct

from kedge.errors import StoreError
from kedge.observe import measure

A = TypeVar("A")
T = TypeVar("T")

log = logging.getLogger("kedge")
Row = tuple[Any, ...]
Values = Sequence[Any]


class Dialect(Struct, frozen=True):
    """The SQL in which one database differs from the other."""

    name: str
    has_concurrent_writers: bool
    """Whether transactions that write run at the same time, so that rows and tables must be locked."""
    now: str
    """An expression for the database's time, in seconds since 1970."""
    floor: str
    """An expression for the integer at or below a positive number."""
    list_tables: str
    """A query for the names of all tables."""
    for_update: str = ""
    """The end of a query that blocks changes of its rows until the end of the transaction."""
    for_key_share: str = ""
    """The end of a query that blocks the deletion of its rows until the end of the transaction."""


class Tx(ABC):
    """One transaction, inside a worker thread.

    Args:
        is_retry: Whether an earlier attempt conflicted with another transaction; shortcuts are not tried again.
    """

    dialect: Dialect

    def __init__(self, *, is_retry: bool = False) -> None:
        self.is_retry = is_retry
        self.namespace = ""
        """The namespace whose rows are read and written; empty for the default one."""
        self.clock: Callable[[], float] = time.time
        """Returns the time to record, in seconds since 1970."""
        self.body_bytes = 0
        """The number of bytes that are stored of each body."""
        self.scopes: dict[int, str] = {}
        """The known names of scopes."""

    def allow_long_statements(self) -> None:  # noqa: B027 - SQLite has no limit
        """Remove the limit for the duration of the statements that follow, if there is one."""

    def rows(self, sql: str, values: Values = ()) -> list[Row]:
        """Return the rows of a query."""
        return self.query(sql, values).fetchall()

    def rows_among(self, sql: str, keys: Sequence[Any], *values: Any) -> list[Row]:
        """Return the rows of a query in which ``{}`` is a list of keys, followed by other values."""
        rows: list[Row] = []
        for chunk in split_chunks(keys):
            rows += self.rows(sql.format(marks(chunk)), (*chunk, *values))
        return rows

    def delete_rows(self, table: str, column: str, keys: Sequence[Any]) -> None:
        """Delete the rows of a table that have one of these keys in a column."""
        for chunk in split_chunks(keys):
            self.run(f"DELETE FROM {table} WHERE {column} IN ({marks(chunk)})", chunk)

    def run(self, sql: str, values: Values = ()) -> int:
        """Run a statement, and return the number of rows it changed."""
        return self.query(sql, values).rowcount

    def lock(self, sql: str, values: Values = ()) -> None:
        """Run a statement that waits for other transactions, if transactions that write run at the same time."""
        if self.dialect.has_concurrent_writers:
            self.query(sql, values)

    @abstractmethod
    def run_many(self, sql: str, rows: Iterable[Values]) -> None:
        """Run a statement once for each set of values."""

    @abstractmethod
    def insert(self, sql: str, values: Values, key: str = "id") -> int:
        """Insert a row, and return the value of its ``key`` column; 0 if it conflicted."""

    @abstractmethod
    def query(self, sql: str, values: Values = ()) -> Any:
        """Run a statement of any kind.

        Returns:
            A cursor with ``fetchone``, ``fetchall`` and ``rowcount``, until the next statement.
        """


MAX_VALUES = 500
"""How many keys are named in one statement; databases limit the number of its values."""


def split_chunks(keys: Sequence[T]) -> Iterator[Sequence[T]]:
    """Yield keys in chunks for one statement each."""
    for start in range(0, len(keys), MAX_VALUES):
        yield keys[start : start + MAX_VALUES]


def marks(values: Sized) -> str:
    """Return the placeholders of some values, separated by commas."""
    return ", ".join("?" * len(values))


def join_filters(condition: str, filters: Mapping[str, Any]) -> tuple[str, list[Any]]:
    """Return a condition with those filters whose value is not None, and the values of their placeholders."""
    used = {sql: value for sql, value in filters.items() if value is not None}
    values = [value for sql, value in used.items() for _ in range(sql.count("?"))]
    return " AND ".join((condition, *used)), values


class Workers:
    """Threads that run the work of a database: at most ``limit``, started when all others are busy.

    They end with `close`, at the end of the program, or when the database is garbage-collected.
    """

    def __init__(self, limit: int, name: str) -> None:
        self._limit = limit
        self._name = name
        self._is_closed = False
        self._executor = ThreadPoolExecutor(limit, name)

    def restart(self) -> None:
        """Begin without threads, in a forked process, which has only the thread that forked."""
        self._executor = ThreadPoolExecutor(self._limit, self._name)

    async def run(self, runner: Callable[[A], T], work: A) -> T:
        """Run work in a thread, unless the caller is cancelled before it starts."""
        return await asyncio.wrap_future(self._submit(runner, work))

    def run_sync(self, runner: Callable[[A], T], work: A) -> T:
        """Run work in a thread, and wait for it."""
        return self._submit(runner, work).result()

    def close(self) -> None:
        """Finish the work that was submitted, and stop the threads."""
        self._is_closed = True
        self._executor.shutdown()

    def _submit(self, runner: Callable[[A], T], work: A) -> Future[T]:
        if self._is_closed:
            raise closed_error()
        try:
            return self._executor.submit(runner, work)
        except RuntimeError:  # it was closed meanwhile, or the interpreter ends
            raise closed_error() from None


def closed_error() -> StoreError:
    """Return the error for work that is submitted after the threads were stopped."""
    return StoreError("the store is closed; open it again")


class HealthCheck:
    """Checks of databases; requests that arrive during a check share its result.

    So any number of requests occupies one thread for each database.

    Args:
        check: Raises a `StoreError` if the database does not answer or cannot be written.
    """

    def __init__(self, check: Callable[[], Awaitable[None]]) -> None:
        self._checks = [check]
        self._running: asyncio.Task[bool] | None = None

    def add(self, check: Callable[[], Awaitable[None]]) -> None:
        """Also run this check."""
        self._checks.append(check)

    async def run(self) -> bool:
        """Return whether every database answers; the errors of the others are logged."""
        if self._running is None or self._running.done():
            self._running = asyncio.create_task(self._run_all())
        return await asyncio.shield(self._running)

    async def _run_all(self) -> bool:
        return all(await asyncio.gather(*map(_run_check, self._checks)))


async def _run_check(check: Callable[[], Awaitable[None]]) -> bool:
    try:
        await check()
    except StoreError as error:
        log.warning("the health check failed: %s", error)
        return False
    return True


class FirstUse:
    """Work that is done before the first transaction, once for all threads.

    The thread that needs it first does it, and others wait; after a failure the next one tries again. A caller that
    is cancelled meanwhile does not interrupt it.

    Args:
        work: The work.
    """

    def __init__(self, work: Callable[[], None]) -> None:
        self._work: Callable[[], None] | None = work
        self._lock = threading.Lock()

    def restart(self) -> None:
        """Begin without a thread that does it, in a forked process."""
        self._lock = threading.Lock()

    def ensure(self) -> None:
        """Do the work, unless it is done."""
        if self._work is None:
            return
        with self._lock:
            if self._work is not None:  # another thread may have done it meanwhile
                self._work()
                self._work = None


class Database(ABC):
    """A database, which is opened by its first transaction.

    ``work`` of a transaction that writes may be run again after a conflict, so it must have no effects besides
    its statements.
    """

    dialect: Dialect
    name = "this store"
    """Its name in errors: the path of a file. An address may contain a password."""
    first_use = FirstUse(lambda: None)
    """Creates or upgrades the schema; see `open_store`."""
    readers: Workers
    """The threads that run queries."""
    writers: Workers
    """The threads that run transactions."""

    async def read(self, work: Callable[[Tx], T]) -> T:
        """Run queries against one consistent state."""
        with OperationTimer("read"):
            return await self.readers.run(self._read_current, work)

    async def write(self, work: Callable[[Tx], T]) -> T:
        """Run a transaction; it is durable once this returns."""
        with OperationTimer("write"):
            return await self.writers.run(self._write_current, work)

    def read_sync(self, work: Callable[[Tx], T]) -> T:
        """Run queries from synchronous code; the calling thread waits."""
        with OperationTimer("read"):
            return self.readers.run_sync(self._read_current, work)

    def write_sync(self, work: Callable[[Tx], T]) -> T:
        """Run a transaction from synchronous code; the calling thread waits."""
        with OperationTimer("write"):
            return self.writers.run_sync(self._write_current, work)

    # Small transactions on cached data, such as the index of known responses.

    @property
    def can_run_inline(self) -> bool:
        """Whether the next two methods return at once; otherwise an event loop must not call them."""
        return False

    def read_inline(self, work: Callable[[Tx], T]) -> T:
        """Run queries in the calling thread, if that is possible, each on the newest state."""
        return self.read_sync(work)

    def write_inline(self, work: Callable[[Tx], T]) -> T:
        """Run a transaction in the calling thread, if that is possible.

        Raises:
            StoreBusy: Another process is writing.
        """
        return self.write_sync(work)

    def _read_current(self, work: Callable[[Tx], T]) -> T:
        self.first_use.ensure()
        return self.run_read(work)

    def _write_current(self, work: Callable[[Tx], T]) -> T:
        self.first_use.ensure()
        return self.run_write(work)

    @abstractmethod
    def run_read(self, work: Callable[[Tx], T]) -> T:
        """Run queries in the calling thread, also before the schema is current."""

    @abstractmethod
    def run_write(self, work: Callable[[Tx], T]) -> T:
        """Run a transaction in the calling thread, also before the schema is current."""

    @abstractmethod
    async def check_health(self) -> None:
        """Raise a `StoreError` unless the database answers within a few seconds, and can be written."""

    async def reclaim(self, *, vacuum: bool = False) -> None:
        """Overwrite deleted data in the files.

        Args:
            vacuum: Whether to return unused space to the file system.
        """
        await self.writers.run(self.reclaim_files, vacuum)

    def reclaim_files(self, vacuum: bool) -> None:  # noqa: B027 - a database server does this itself
        """Overwrite deleted data in the files, in the calling thread."""

    def suspend(self) -> None:  # noqa: B027 - a database server does not notice that a process is forked
        """Allow no further transactions, before this process is forked."""

    def resume(self) -> None:  # noqa: B027
        """Allow transactions again, after this process was forked."""

    def restart(self) -> None:
        """Begin without threads and connections, in a forked process."""
        self.first_use.restart()
        for workers in {self.readers, self.writers}:
            workers.restart()

    @abstractmethod
    def close(self) -> None:
        """Stop the threads and close the connections."""

    async def aclose(self) -> None:
        """Stop the threads and close the connections without blocking the event loop."""
        await asyncio.get_running_loop().run_in_executor(None, self.close)


open_databases: weakref.WeakSet[Database] = weakref.WeakSet()
"""The databases that forks concern."""
inherited: list[object] = []
"""The connections of the process that this one was forked from; closing them would end its sessions."""
_suspended: list[Database] = []
_fork_lock = threading.Lock()


def _suspend_databases() -> None:
    _fork_lock.acquire()
    for database in list(open_databases):
        database.suspend()
        _suspended.append(database)


def _resume_databases() -> None:
    while _suspended:
        _suspended.pop().resume()
    _fork_lock.release()


def _restart_databases() -> None:
    _suspended.clear()
    _fork_lock.release()
    for database in list(open_databases):
        database.restart()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(
        before=_suspend_databases,
        after_in_parent=_resume_databases,
        after_in_child=_restart_databases,
    )


class NamespaceDatabase(Database):
    """A database whose transactions are all bound to one namespace.

    Every statement about conversations names the namespace of its transaction, so code with this database
    cannot access the rows of another namespace by mistake.

    Args:
        database: The open database.
        namespace: The name of the namespace.
        is_owner: Whether to close the database with this object.
    """

    def __init__(self, database: Database, namespace: str, *, is_owner: bool = False) -> None:
        self.namespace = namespace
        self.dialect = database.dialect
        self.first_use = database.first_use
        self.readers = database.readers
        self.writers = database.writers
        self.reclaim_files = database.reclaim_files
        self._database = database
        self._is_owner = is_owner

    @property
    def can_run_inline(self) -> bool:
        """Whether small transactions run in the calling thread."""
        return self._database.can_run_inline

    def read_inline(self, work: Callable[[Tx], T]) -> T:
        """Run queries in the calling thread."""
        return self._database.read_inline(partial(self._run, work))

    def write_inline(self, work: Callable[[Tx], T]) -> T:
        """Run a transaction in the calling thread."""
        return self._database.write_inline(partial(self._run, work))

    def run_read(self, work: Callable[[Tx], T]) -> T:
        """Run queries in the calling thread."""
        return self._database.run_read(partial(self._run, work))

    def run_write(self, work: Callable[[Tx], T]) -> T:
        """Run a transaction in the calling thread."""
        return self._database.run_write(partial(self._run, work))

    async def check_health(self) -> None:
        """Raise a `StoreError` unless the database answers within a few seconds, and can be written."""
        await self._database.check_health()

    def close(self) -> None:
        """Close the database if it was opened for this namespace only."""
        if self._is_owner:
            self._database.close()

    def _run(self, work: Callable[[Tx], T], tx: Tx) -> T:
        tx.namespace = self.namespace
        return work(tx)


class OperationTimer:
    """Measures the duration of a store operation, including the wait for a thread or connection."""

    __slots__ = ("_operation", "_start")

    def __init__(self, operation: str) -> None:
        self._operation = operation
        self._start = 0.0

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        duration = time.perf_counter() - self._start
        measure("store_duration_seconds", duration, operation=self._operation)
