"""The server's database: one SQLite file, used by one process unless it is shared.

A *node* has what one request added to a chain: its input and output items, encoded once, and its
response. Nodes refer to their parent, so a chain is read by one recursive query and branches share
their history. A conversation refers to its newest node. Deleting a response clears its part of the
node; the items are deleted when no child and no conversation needs them.

The file is in WAL mode and locked by this process, because conversation locks, node numbers and the
rule that an unfinished response has failed require a single owner. A commit does not wait for the
disk: a crash of the process loses nothing, a power failure may lose the newest turns.

A *shared* database may be used by several processes at once: it is not locked between statements,
node numbers are reserved in the file, and an unfinished response belongs to another process until it
is older than any response can be. Only locks of conversation objects are per process then.
"""

import os
import sqlite3
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

from kedge.errors import CannotServe

SCHEMA_VERSION = 2
SHARED_WAIT_MS = 10_000
"""How long a statement waits for another process that writes to a shared database."""
NUMBERS_PER_RESERVATION = 64

_SCHEMA = """
CREATE TABLE nodes (
    id INTEGER PRIMARY KEY,
    key TEXT NOT NULL,
    parent INTEGER,
    barrier INTEGER NOT NULL,     -- holds a compaction: children see nothing before it
    tokens INTEGER NOT NULL,      -- of this node's own items, as a model sees them
    status TEXT,                  -- of the response; NULL where there is none, or none any more
    expires_at REAL,              -- likewise
    conversation TEXT,            -- to which the items were added
    input BLOB NOT NULL,          -- JSON array of items
    output BLOB NOT NULL,         -- JSON array of items
    asked BLOB,                   -- the response as JSON: what its request decided
    became BLOB,                  -- the response as JSON: what became of it
    namespace TEXT NOT NULL DEFAULT ''  -- of the user who added it; empty for the administrator
);
CREATE INDEX nodes_parent ON nodes (parent) WHERE parent IS NOT NULL;
CREATE INDEX nodes_expiry ON nodes (expires_at) WHERE expires_at IS NOT NULL;

CREATE TABLE conversations (
    id TEXT PRIMARY KEY,
    created_at INTEGER NOT NULL,
    metadata BLOB NOT NULL,
    node INTEGER,
    namespace TEXT NOT NULL DEFAULT ''
) WITHOUT ROWID;
CREATE INDEX conversations_node ON conversations (node) WHERE node IS NOT NULL;

CREATE TABLE facts (name TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID;
"""

_UPGRADES = {
    1: (
        "ALTER TABLE nodes ADD COLUMN namespace TEXT NOT NULL DEFAULT ''",
        "ALTER TABLE conversations ADD COLUMN namespace TEXT NOT NULL DEFAULT ''",
    )
}
"""What upgrades each older schema to the next one."""

_RESERVE_NUMBERS = """
INSERT INTO facts (name, value)
VALUES ('numbers', (SELECT coalesce(max(id), 0) FROM nodes) + :count)
ON CONFLICT (name) DO UPDATE SET value = value + :count RETURNING value
"""

IN_MEMORY = ":memory:"


class ServerDatabase:
    """A connection to a database with the current schema, for the thread of the server.

    ``unclean_shutdown`` is set if the last process that used the file did not close it.

    Args:
        path: The file, or ``:memory:``.
        shared: Whether other processes may use the file at the same time.

    Raises:
        CannotServe: If the file cannot be opened, is in use, or was written by a newer version.
    """

    def __init__(self, path: str, *, shared: bool = False) -> None:
        self.path = path
        self.shared = shared
        self._numbers: Iterator[int] = iter(())
        # Opened in the thread that creates the app, used in the thread of its loop.
        try:
            self._connection = sqlite3.connect(
                _prepare_path(path), isolation_level=None, check_same_thread=False
            )
        except (sqlite3.Error, OSError) as error:
            raise _build_open_error(path, error) from error
        self.execute = self._connection.execute
        try:
            self._prepare()
            self.unclean_shutdown = not shared and self.get_or_add_fact("open", b"1") is not None
        except sqlite3.Error as error:
            self._connection.close()
            raise _build_open_error(path, error) from error
        except CannotServe:
            self._connection.close()
            raise

    def _prepare(self) -> None:
        run = self.execute
        run(f"PRAGMA busy_timeout = {SHARED_WAIT_MS if self.shared else 0}")
        if not self.shared:
            run("PRAGMA locking_mode = EXCLUSIVE")
        run("PRAGMA journal_mode = WAL")
        run("PRAGMA synchronous = NORMAL")
        run("PRAGMA secure_delete = ON")
        with self.transaction():  # acquires the lock until the connection is closed
            (version,) = run("PRAGMA user_version").fetchone()
            if version > SCHEMA_VERSION:
                raise CannotServe(
                    f"the database {self.path} was written by a newer version of Kedge (schema "
                    f"{version}, this version supports {SCHEMA_VERSION}): upgrade Kedge, or use "
                    "another --db"
                )
            statements = _SCHEMA.split(";\n") if version == 0 else _UPGRADES.get(version, ())
            for statement in statements:
                run(statement)
            run(f"PRAGMA user_version = {SCHEMA_VERSION}")
            run("UPDATE facts SET value = value WHERE name = ''")  # fails if the file is read-only

    @contextmanager
    def transaction(self) -> Generator[None]:
        """Run the statements in this block as one transaction."""
        self.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self.execute("ROLLBACK")
            raise
        self.execute("COMMIT")

    def get_or_add_fact(self, name: str, default: bytes) -> bytes | None:
        """Return the value of a fact; if there is none, store ``default`` and return None."""
        row = self.execute("SELECT value FROM facts WHERE name = ?", (name,)).fetchone()
        if row is not None:
            return row[0]
        self.execute("INSERT INTO facts (name, value) VALUES (?, ?)", (name, default))
        return None

    def next_number(self) -> int:
        """Return the number for a new node; it is unique while the server runs."""
        number = next(self._numbers, None)
        if number is None:
            self._numbers = iter(self._reserve_numbers())
            number = next(self._numbers)
        return number

    def _reserve_numbers(self) -> Iterable[int]:
        """Return numbers for new nodes: all that follow, or some if the database is shared."""
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
        self.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def close(self) -> None:
        """Close the file."""
        self.execute("DELETE FROM facts WHERE name = 'open'")
        self._connection.close()


def _prepare_path(path: str) -> str:
    if path == IN_MEMORY:
        return path
    file = Path(path).expanduser()
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    # Conversations are private, and SQLite gives its other files the mode of this one. An existing file
    # is not opened here: closing it would drop every lock that this process has on it.
    with suppress(FileExistsError):
        os.close(os.open(file, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
    return str(file)


def _build_open_error(path: str, error: Exception) -> CannotServe:
    if "locked" in str(error):
        return CannotServe(
            f"the database {path} is in use by another server: stop that server, or use another --db"
        )
    return CannotServe(f"the database {path} cannot be opened: {error}")
