"""The server's database as a SQLite file, used by one process unless it is shared.

The file is in WAL mode and locked by this process, because conversation locks, node numbers and the
rule that an unfinished response has failed require a single owner. A commit does not wait for the
disk: a crash of the process loses nothing, a power failure may lose the newest turns.

A *shared* database may be used by several processes at once: it is not locked between statements,
node numbers are reserved in the file, and an unfinished response belongs to another process until it
is older than any response can be. Only locks of conversation objects are per process then.
"""

import sqlite3
import time
import weakref
from collections.abc import Callable, Iterable
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

from kedge.database.sqlite import (
    BEGIN_WRITE,
    MEMORY,
    create_private_file,
    empty_journal,
    open_connection,
    run_transaction,
)
from kedge.errors import CannotServe
from kedge.server.storage.database import SCHEMA, Clock, ServerDatabase

T = TypeVar("T")

SHARED_WAIT_SECONDS = 10.0
"""The maximum time that a statement waits for another process that writes to a shared database."""
NUMBERS_PER_RESERVATION = 64

_RESERVE_NUMBERS = """
INSERT INTO facts (name, value)
VALUES ('numbers', (SELECT coalesce(max(id), 0) FROM nodes) + :count)
ON CONFLICT (name) DO UPDATE SET value = value + :count RETURNING value
"""


class SQLiteServerDatabase(ServerDatabase):
    """A connection to a database with the current schema, for the thread of the server.

    Statements take microseconds, so they are run in the calling thread.

    Args:
        path: The file, or ``:memory:``.
        clock: Returns the time by which responses expire.
        shared: Whether other processes may use the file at the same time.

    Raises:
        CannotServe: If the file cannot be opened, is in use, or was written by another version.
    """

    dialect = "sqlite"

    def __init__(self, path: str, *, clock: Clock = time.time, shared: bool = False) -> None:
        self.path = path
        self.clock = clock
        self.shared = shared
        self._locked: set[str] = set()
        # Opened in the thread that creates the app, used in the thread of its loop.
        try:
            self._connection = open_connection(
                _prepare_path(path),
                wait_seconds=SHARED_WAIT_SECONDS if shared else 0.0,
                synchronous="NORMAL",
                exclusive=not shared,
            )
        except (sqlite3.Error, OSError) as error:
            raise _build_open_error(path, error) from error
        # For a server that is not closed; at the end of the program its thread may still use the connection.
        weakref.finalize(self, self._connection.close).atexit = False
        self.execute: Callable[..., Any] = self._connection.execute
        try:
            self.transact(self._prepare_schema)  # acquires the lock until the connection is closed
            self.unclean_shutdown = not shared and self.get_or_add_fact("open", b"1") is not None
        except sqlite3.Error as error:
            self._connection.close()
            raise _build_open_error(path, error) from error
        except CannotServe:
            self._connection.close()
            raise

    def _prepare_schema(self) -> None:
        run = self.execute
        (version,) = run("PRAGMA user_version").fetchone()
        self.upgrade_schema(version, f"the database {self.path}")
        run(f"PRAGMA user_version = {SCHEMA.version}")
        run("UPDATE facts SET value = value WHERE name = ''")  # fails if the file is read-only

    def transact(self, work: Callable[[], T]) -> T:
        """Run statements as one transaction."""
        return run_transaction(self._connection, BEGIN_WRITE, lambda _: work())

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
        """Return numbers for new nodes: all following ones, or a range if the database is shared."""
        if not self.shared:
            (last,) = self.execute("SELECT coalesce(max(id), 0) FROM nodes").fetchone()
            return count(last + 1)
        values = {"count": NUMBERS_PER_RESERVATION}
        (last,) = self.execute(_RESERVE_NUMBERS, values).fetchone()
        return range(last - NUMBERS_PER_RESERVATION + 1, last + 1)

    def used_bytes(self) -> int:
        """Return the size of the content, without free pages."""
        (pages,) = self.execute("PRAGMA page_count").fetchone()
        (free,) = self.execute("PRAGMA freelist_count").fetchone()
        (page_size,) = self.execute("PRAGMA page_size").fetchone()
        return (pages - free) * page_size

    def checkpoint(self) -> None:
        """Write the WAL to the file, so that deleted content is overwritten on disk."""
        empty_journal(self._connection)

    def close(self) -> None:
        """Close the file."""
        self.execute("DELETE FROM facts WHERE name = 'open'")
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
