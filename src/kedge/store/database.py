"""The interface of a database: transactions that run in worker threads.

All operations of a store are plain functions of a `Tx`, the same for both databases. The differences between
them are in `Dialect` and in the two modules that implement `Database`. SQL uses ``?`` for values.
"""

import asyncio
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from kedge.observe import measure

T = TypeVar("T")
Row = tuple[Any, ...]
Values = Sequence[Any]


class Tx(Protocol):
    """One transaction, inside a worker thread."""

    dialect: "Dialect"
    namespace: str
    """The namespace whose rows are read and written; empty for the default one."""
    is_retry: bool
    """Whether an earlier attempt conflicted with another transaction; shortcuts are not tried again."""

    def allow_long_statements(self) -> None:
        """Remove the limit for the duration of the statements that follow, if there is one."""
        ...

    def rows(self, sql: str, values: Values = ()) -> list[Row]:
        """Return the rows of a query."""
        ...

    def run(self, sql: str, values: Values = ()) -> int:
        """Run a statement, and return the number of rows it changed."""
        ...

    def run_many(self, sql: str, rows: Iterable[Values]) -> None:
        """Run a statement once for each set of values."""
        ...

    def insert(self, sql: str, values: Values, key: str = "id") -> int:
        """Insert a row, and return the value of its ``key`` column; 0 if it conflicted."""
        ...

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
        """Add a node that continues its parent's branch in as few statements as possible, and move the head.

        Args:
            conversation_id: The id of the conversation that adds it, which must still exist.
            node: The values of its row, starting with the tree.
            blocks: The hashes and texts of its blocks.
            response: The values of `STORED_COLUMNS` of the node's response, if there is one.
            head: The node at which the head must be to be moved; None to leave it.
            single_statement: Whether the transaction does nothing else.

        Returns:
            The number of the node and whether the head moved, or None if that is not possible and must be
            done step by step. A number of 0 means that nothing was added, because the conversation or the
            parent was deleted.
        """
        ...


@dataclass(frozen=True, slots=True)
class Dialect:
    """The SQL in which one database differs from the other."""

    name: str
    lock_nodes: str
    """Blocks the insertion of nodes by others until the end of the transaction; empty for a single writer."""
    shorten_lock_wait: str
    """Makes the rest of a transaction fail soon if it waits for a lock; empty for a single writer."""
    for_update: str
    """Blocks changes of a selected row until the end of the transaction."""
    for_key_share: str
    """Blocks the deletion of a selected row until the end of the transaction."""
    lock_names: str
    """The statement of `lock_names`; empty if there is only one writer at a time."""
    texts_per_group: int
    """The number of consecutive blocks that share a table of the search index."""
    text_table: str
    """The name of the table of a group; ``{}`` is its number, here and in the next four members."""
    create_text_table: str
    """Creates the table of a group, unless it exists; empty if one table has all blocks."""
    rewrite_texts: str
    """Overwrites deleted data in the table of a group; empty if the server does that itself."""
    insert_text: str
    """Adds a block's number and its terms, separated by spaces, to the search index."""
    text_match: str
    """The condition that indexed text has all terms of a query."""
    quote_term: str
    """The form of one term in such a query."""
    quote_prefix: str
    """The form of the beginning of a term in such a query."""
    term_separator: str
    """The separator of the terms of such a query."""
    or_separator: str
    """The separator of the alternatives of such a query."""
    now: str
    """An expression for the database's time, in seconds since 1970."""
    floor: str
    """An expression for the integer at or below a positive number."""
    list_tables: str
    """A query for the names of all tables."""


def lock_tree(tx: Tx, tree: int) -> None:
    """Block changes of a tree by others until the end of the transaction.

    Its root is locked before its conversations and other nodes, in all transactions, which avoids deadlocks.
    """
    if tx.dialect.for_update:
        tx.rows(f"SELECT id FROM nodes WHERE id = ? {tx.dialect.for_update}", (tree,))


def lock_tree_shared(tx: Tx, tree: int) -> None:
    """Wait for a transaction that blocks changes of a tree, and block new ones."""
    if tx.dialect.for_key_share:
        tx.rows(f"SELECT id FROM nodes WHERE id = ? {tx.dialect.for_key_share}", (tree,))


def lock_names(tx: Tx) -> None:
    """Wait for other transactions with this lock, which create the tables or a row that may exist once."""
    if tx.dialect.lock_names:
        tx.run(tx.dialect.lock_names)


MAX_VALUES = 500
"""How many keys are named in one statement; databases limit the number of its values."""


def split_chunks(keys: Sequence[T]) -> Iterator[Sequence[T]]:
    """Yield keys in chunks for one statement each."""
    for start in range(0, len(keys), MAX_VALUES):
        yield keys[start : start + MAX_VALUES]


def marks(values: Sized) -> str:
    """Return the placeholders of some values, separated by commas."""
    return ", ".join("?" * len(values))


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

    def ensure(self) -> None:
        """Do the work, unless it is done."""
        if self._work is not None:
            with self._lock:
                if self._work is not None:
                    self._work()
                    self._work = None


class Database(ABC):
    """A database, which is opened by its first transaction."""

    dialect: Dialect
    name = "this store"
    """Its name in errors: the path of a file. An address may contain a password."""
    first_use = FirstUse(lambda: None)
    """Creates or upgrades the schema; see `open_store`."""

    @abstractmethod
    async def read(self, work: Callable[[Tx], T]) -> T:
        """Run queries against one consistent state."""

    @abstractmethod
    async def write(self, work: Callable[[Tx], T]) -> T:
        """Run a transaction; it is durable once this returns.

        ``work`` may be run again after a conflict, so it must have no effects besides its statements.
        """

    @abstractmethod
    def read_sync(self, work: Callable[[Tx], T]) -> T:
        """Run queries from synchronous code; the calling thread waits."""

    @abstractmethod
    def write_sync(self, work: Callable[[Tx], T]) -> T:
        """Run a transaction from synchronous code; the calling thread waits."""

    def check(self) -> None:  # noqa: B027 - a file always answers
        """Raise a `StoreError` unless the database answers within a few seconds; the calling thread waits."""

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

    @abstractmethod
    async def reclaim(self, *, vacuum: bool = False) -> None:
        """Overwrite deleted data in the files.

        Args:
            vacuum: Whether to return unused space to the file system.
        """

    @abstractmethod
    def close(self) -> None:
        """Stop the threads and close the connections."""

    async def aclose(self) -> None:
        """Stop the threads and close the connections without blocking the event loop."""
        await asyncio.get_running_loop().run_in_executor(None, self.close)


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
        self.dialect = database.dialect
        self.namespace = namespace
        self._database = database
        self._is_owner = is_owner

    async def read(self, work: Callable[[Tx], T]) -> T:
        """Run queries against one consistent state."""
        return await self._database.read(self._bind(work))

    async def write(self, work: Callable[[Tx], T]) -> T:
        """Run a transaction."""
        return await self._database.write(self._bind(work))

    def read_sync(self, work: Callable[[Tx], T]) -> T:
        """Run queries from synchronous code."""
        return self._database.read_sync(self._bind(work))

    def write_sync(self, work: Callable[[Tx], T]) -> T:
        """Run a transaction from synchronous code."""
        return self._database.write_sync(self._bind(work))

    @property
    def can_run_inline(self) -> bool:
        """Whether small transactions run in the calling thread."""
        return self._database.can_run_inline

    def read_inline(self, work: Callable[[Tx], T]) -> T:
        """Run queries in the calling thread."""
        return self._database.read_inline(self._bind(work))

    def write_inline(self, work: Callable[[Tx], T]) -> T:
        """Run a transaction in the calling thread."""
        return self._database.write_inline(self._bind(work))

    def check(self) -> None:
        """Raise a `StoreError` unless the database answers."""
        self._database.check()

    async def reclaim(self, *, vacuum: bool = False) -> None:
        """Overwrite deleted data in the files."""
        await self._database.reclaim(vacuum=vacuum)

    def close(self) -> None:
        """Close the database if it was opened for this namespace only."""
        if self._is_owner:
            self._database.close()

    def _bind(self, work: Callable[[Tx], T]) -> Callable[[Tx], T]:
        def run(tx: Tx) -> T:
            tx.namespace = self.namespace
            return work(tx)

        return run


class OperationTimer:
    """Measures the duration of a store operation, including the wait for a thread or connection."""

    __slots__ = ("_operation", "_start")

    def __init__(self, operation: str) -> None:
        self._operation = operation

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        took = time.perf_counter() - self._start
        measure("store_duration_seconds", took, operation=self._operation)
