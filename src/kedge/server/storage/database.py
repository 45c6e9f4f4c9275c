"""The server's database: one SQLite file, written by one process.

A *node* is what one request added to a chain: its input and output items, encoded once, and the
response made of them. Nodes point to their parent, so a whole chain is read by one recursive query
and forks share their past. A conversation points at its newest node. Deleting a response empties
its part of the node; the items go when no child and no conversation needs them any more.

The file is in WAL mode and locked for this process, because conversation locks, node numbers and
"unfinished means failed" are only right with a single owner. A commit does not wait for the disk:
after a crash of the process nothing is lost, after a loss of power the newest turns may be.
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
    """A connection with the schema in place; every method runs in the thread of the server.

    ``crashed`` says that the last owner of the file did not close it.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        # Opened by the thread that makes the app, used by the one that runs its loop.
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
        with self.transaction():  # takes the lock, which is then kept
            (version,) = run("PRAGMA user_version").fetchone()
            if version > SCHEMA_VERSION:
                raise CannotServe(
                    f"the database {self.path} was written by a newer Kedge (its version is "
                    f"{version}, this Kedge knows {SCHEMA_VERSION}): upgrade Kedge, or use "
                    "another --db"
                )
            if version == 0:
                for statement in _SCHEMA.split(";\n"):
                    run(statement)
                run(f"PRAGMA user_version = {SCHEMA_VERSION}")

    @contextmanager
    def transaction(self) -> Generator[None]:
        """All of what is run inside, or none of it."""
        self.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self.execute("ROLLBACK")
            raise
        self.execute("COMMIT")

    def get_or_add_fact(self, name: str, default: bytes) -> bytes | None:
        """Return what is known under a name; if nothing is, keep ``otherwise`` for next time."""
        row = self.execute("SELECT value FROM facts WHERE name = ?", (name,)).fetchone()
        if row is not None:
            return row[0]
        self.execute("INSERT INTO facts (name, value) VALUES (?, ?)", (name, default))
        return None

    def checkpoint(self) -> None:
        """Write deletions through to the file, so that deleted content is on the disk no more."""
        self.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def close(self) -> None:
        """Close the file; everything committed is in it."""
        self.execute("DELETE FROM facts WHERE name = 'open'")
        self._connection.close()


def _prepare_path(path: str) -> str:
    if path == IN_MEMORY:
        return path
    place = Path(path).expanduser()
    place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    # Conversations are private: SQLite gives its other files the mode of this one. Only where there is
    # none: to close a file drops every lock that this process has on it.
    with suppress(FileExistsError):
        os.close(os.open(place, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
    return str(place)


def _build_open_error(path: str, error: Exception) -> CannotServe:
    if "locked" in str(error):
        return CannotServe(
            f"the database {path} is in use by another server: stop that one, or use another --db"
        )
    return CannotServe(f"the database {path} cannot be opened: {error}")
