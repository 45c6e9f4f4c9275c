"""The server's database as a SQLite file, used by one process unless it is a store.

The file is in WAL mode and locked by this process, because conversation locks, node numbers and the
rule that an unfinished response has failed require a single owner. A commit does not wait for the
disk: a crash of the process loses nothing, a power failure may lose the newest turns.

A store may be used by several processes at once: it is not locked between statements, node numbers
are reserved in the file, and an unfinished response belongs to another process until it is older than
any response can be. Only locks of conversation objects are per process then.
"""

import sqlite3
import time
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

from kedge.database.responses import use_practice_tables
from kedge.database.sqlite import (
    MEMORY,
    SQLITE,
    create_private_file,
    empty_journal,
    open_connection,
    run_writing,
)
from kedge.errors import CannotServe
from kedge.server.storage.database import Clock, ServerDatabase, upgrade_schema

T = TypeVar("T")

STORE_WAIT_SECONDS = 10.0
"""The maximum time that a statement waits for others that write to a store."""
NUMBERS_PER_RESERVATION = 64

_RESERVE_NUMBERS = """
INSERT INTO kedge_server_facts (name, value)
VALUES ('numbers', (SELECT coalesce(max(id), 0) FROM kedge_server_nodes) + :count)
ON CONFLICT (name) DO UPDATE SET value = value + :count RETURNING value
"""


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

    dialect = SQLITE

    def __init__(self, path: str, *, clock: Clock = time.time, in_store: bool = False) -> None:
        self.clock = clock
        self.in_store = in_store
        self._locked: set[str] = set()
        # Opened in the thread that creates the app, used in the thread of its loop.
        try:
            self._connection = open_connection(
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
                run_writing(self._connection, partial(upgrade_schema, name=f"the database {path}"))
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
        return run_writing(self._connection, lambda _: work())

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

    def _reserve_numbers(self) -> Iterable[int]:
        """Return numbers for new nodes: all following ones, or a range if others may use the file."""
        if not self.in_store:
            (last,) = self.execute("SELECT coalesce(max(id), 0) FROM kedge_server_nodes").fetchone()
            return count(last + 1)
        values = {"count": NUMBERS_PER_RESERVATION}
        (last,) = self.execute(_RESERVE_NUMBERS, values).fetchone()
        return range(last - NUMBERS_PER_RESERVATION + 1, last + 1)

    def checkpoint(self) -> None:
        """Write the WAL to the file, so that deleted content is overwritten on disk."""
        empty_journal(self._connection)

    def close(self) -> None:
        """Close the file."""
        if not self.in_store:
            self.execute("DELETE FROM kedge_server_facts WHERE name = 'open'")
        self._connection.close()


def _prepare_path(path: str) -> str:
    if path == MEMORY:
        return path
    file = Path(path).expanduser()
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    create_private_file(str(file))
    return str(file)


def _build_open_error(path: str, error: Exception) -> CannotServe:
    if "locked" in str(error):
        return CannotServe(
            f"the database {path} is in use by another server: stop that server, or use another --db"
        )
    return CannotServe(f"the database {path} cannot be opened: {error}")
