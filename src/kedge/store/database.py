"""What a store needs of a database: transactions, run in worker threads.

Everything a store does is a plain function of a ``Tx``, the same for every database; what differs
between them is here and in the two modules that implement it. SQL is written with ``?`` for values.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeVar

from kedge.observe import measure

T = TypeVar("T")
Row = tuple[Any, ...]
Values = Sequence[Any]


class Tx(Protocol):
    """One transaction, inside a worker thread."""

    dialect: "Dialect"
    is_retry: bool
    """Whether an earlier attempt met another transaction, and nothing should be taken for granted."""

    def rows(self, sql: str, values: Values = ()) -> list[Row]:
        """The rows of a query."""
        ...

    def run(self, sql: str, values: Values = ()) -> int:
        """Change something; how many rows that touched."""
        ...

    def run_many(self, sql: str, rows: Iterable[Values]) -> None:
        """The same change with many sets of values."""
        ...

    def insert(self, sql: str, values: Values, key: str = "id") -> int:
        """Insert a row, and get the number that it was given as its ``key``; 0 if there was one."""
        ...

    def add_node(self, insert: "NodeInsert") -> tuple[int, bool] | None:
        """Add a node in one statement, and return its number and whether the head moved.

        Returns ``None`` if that is not possible: it is done step by step then. A number of 0 means
        that nothing was added, because the conversation or the parent was deleted.
        """
        ...


@dataclass(frozen=True, slots=True)
class NodeInsert:
    """A node that goes on in its parent's branch, with all that belongs to it."""

    conversation_id: str
    """The id of the conversation that adds it, which must still exist."""
    node: Row
    """The values of its row, from the tree on."""
    blocks: Sequence[tuple[bytes, str]]
    """Hashes and texts."""
    encode_response: Callable[[], str] | None
    """Writes the row of the response that made it, as JSON."""
    head: int | None
    """Where the head is moved from."""
    single_statement: bool
    """Whether nothing else is done in its transaction."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """The words in which one database differs from the other."""

    name: str
    types: Mapping[str, str]
    """What stands for ``{serial}``, ``{bytes}`` and the like in migrations."""
    lock_links: str
    """Keeps everyone else from adding links until the end of the transaction."""
    lock_links_shared: str
    """Waits for whoever guards the links."""
    for_update: str
    """Keeps a selected row from being changed until the end of the transaction."""
    for_key_share: str
    """Keeps a selected row from being deleted until the end of the transaction."""
    lock_schema: str
    """Keeps everyone else from changing the schema until the end of the transaction."""
    insert_text: str
    """Adds a block's number and its terms, separated by spaces, to the search index."""
    text_match: str
    """The condition that indexed text has all terms of a query."""
    quote_term: str
    """The form of one term in such a query."""
    term_separator: str
    """What joins the terms of such a query."""
    now: str
    """An expression for the database's own time, in seconds since 1970."""
    list_tables: str
    """A query for the names of the tables that there are."""


class Database(ABC):
    """A database, opened."""

    dialect: ClassVar[Dialect]

    @abstractmethod
    async def read(self, work: Callable[[Tx], T]) -> T:
        """Run queries against one consistent state."""

    @abstractmethod
    async def write(self, work: Callable[[Tx], T]) -> T:
        """Run a transaction; it is durable once this returns.

        It may be run again if others got in the way, so it does nothing but its statements.
        """

    @abstractmethod
    async def reclaim(self, *, index: bool = True, vacuum: bool = False) -> None:
        """Overwrite deleted data in the files.

        Args:
            index: Whether text was deleted from the search index, which is rewritten then.
            vacuum: Whether to return unused space to the file system.
        """

    @abstractmethod
    async def aclose(self) -> None:
        """Let go of threads and connections."""


class OperationTimer:
    """Measures how long an operation of the store takes, waiting for its turn included."""

    __slots__ = ("_operation", "_start")

    def __init__(self, operation: str) -> None:
        self._operation = operation

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        took = time.perf_counter() - self._start
        measure("store_duration_seconds", took, operation=self._operation)
