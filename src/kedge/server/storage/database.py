"""The server's database: one SQLite file, used by one process.

A *node* has what one request added to a chain: its input and output items, encoded once, and its
response. Nodes refer to their parent, so a chain is read by one recursive query and branches share
their history. A conversation refers to its newest node. Deleting a response clears its part of the
node; the items are deleted when no child and no conversation needs them.

The file is in WAL mode and locked by this process, because conversation locks, node numbers and the
rule that an unfinished response has failed require a single owner. A commit does not wait for the
disk: a crash of the process loses nothing, a power failure may lose the newest turns.
"""

import os
import sqlite3
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from kedge.errors import CannotServe

SCHEMA_VERSION = 1

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
    became BLOB                   -- the response as JSON: what became of it
);
CREATE INDEX nodes_parent ON nodes (parent) WHERE parent IS NOT NULL;
CREATE INDEX nodes_expiry ON nodes (expires_at) WHERE expires_at IS NOT NULL;

CREATE TABLE conversations (
    id TEXT PRIMARY KEY,
    created_at INTEGER NOT NULL,
    metadata BLOB NOT NULL,
    node INTEGER
) WITHOUT ROWID;
CREATE INDEX conversations_node ON conversations (node) WHERE node IS NOT NULL;

CREATE TABLE facts (name TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID;
"""

IN_MEMORY = ":memory:"


class ServerDatabase:
    """A connection to a database with the current schema, for the thread of the server.

    ``unclean_shutdown`` is set if the last process that used the file did not close it.

    Args:
        path: The file, or ``:memory:``.

    Raises:
        CannotServe: If the file cannot be opened, is in use, or was written by a newer version.
    """

    def __init__(self, path: str) -> None:
        self.path = path
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
            self.unclean_shutdown = self.get_or_add_fact("open", b"1") is not None
        except sqlite3.Error as error:
            self._connection.close()
            raise _build_open_error(path, error) from error
        except CannotServe:
            self._connection.close()
            raise

    def _prepare(self) -> None:
        run = self.execute
        run("PRAGMA busy_timeout = 0")
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
            if version == 0:
                for statement in _SCHEMA.split(";\n"):
                    run(statement)
                run(f"PRAGMA user_version = {SCHEMA_VERSION}")

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
