"""The server's database: one SQLite file, written by one process.

Two ideas make it small. A *node* is what one request added to a chain (its input and its output
items, encoded once); nodes point to their parent, so a whole chain is read by one recursive query
and forks share their past. Responses and conversations merely point at nodes: deleting one removes
the pointer, and the content goes when no pointer and no child needs it any more.

The file is in WAL mode and locked for this process, because conversation locks and "unfinished
means failed" are only true with a single owner. A commit does not wait for the disk: after a
crash of the process nothing is lost, after a loss of power the newest turns may be.
"""

import contextlib
import sqlite3
from collections.abc import Generator
from pathlib import Path

from kedge.errors import CannotServe

SCHEMA_VERSION = 1

_SCHEMA = """
CREATE TABLE nodes (
    id INTEGER PRIMARY KEY AUTOINCREMENT,  -- never reused: caches and running requests hold it
    key TEXT NOT NULL UNIQUE,
    parent INTEGER REFERENCES nodes (id),
    barrier INTEGER NOT NULL DEFAULT 0,    -- a compaction: nothing before it is seen from here on
    tokens INTEGER NOT NULL DEFAULT 0,     -- of this node's own items, as a model sees them
    input BLOB NOT NULL,                   -- JSON arrays of items
    output BLOB NOT NULL
);
CREATE INDEX nodes_parent ON nodes (parent) WHERE parent IS NOT NULL;

CREATE TABLE responses (
    node INTEGER PRIMARY KEY REFERENCES nodes (id),
    status TEXT NOT NULL,
    expires_at REAL NOT NULL,
    conversation TEXT,
    head BLOB NOT NULL                     -- the resource as JSON, without its output
);
CREATE INDEX responses_expiry ON responses (expires_at);
CREATE INDEX responses_unfinished ON responses (status) WHERE status = 'in_progress';

CREATE TABLE conversations (
    id TEXT PRIMARY KEY,
    created_at INTEGER NOT NULL,
    metadata BLOB NOT NULL,
    node INTEGER REFERENCES nodes (id)
) WITHOUT ROWID;
CREATE INDEX conversations_node ON conversations (node) WHERE node IS NOT NULL;

CREATE TABLE secrets (name TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID;
"""

IN_MEMORY = ":memory:"


class Database:
    """A connection with the schema in place; every method runs in the thread of the server."""

    def __init__(self, path: str) -> None:
        self.path = path
        if path != IN_MEMORY:
            Path(path).expanduser().parent.mkdir(parents=True, exist_ok=True)
            path = str(Path(path).expanduser())
        # Opened by the thread that makes the app, used by the one that runs its loop.
        self._connection = sqlite3.connect(
            path, isolation_level=None, check_same_thread=False, cached_statements=64
        )
        try:
            self._prepare()
        except sqlite3.Error as error:
            self._connection.close()
            raise _refusal(self.path, error) from error
        except BaseException:
            self._connection.close()
            raise
        self.run = self._connection.execute

    def _prepare(self) -> None:
        run = self._connection.execute
        run("PRAGMA busy_timeout = 0")
        run("PRAGMA locking_mode = EXCLUSIVE")
        run("PRAGMA journal_mode = WAL")
        run("PRAGMA synchronous = NORMAL")
        run("PRAGMA secure_delete = ON")
        run("BEGIN IMMEDIATE")  # takes the lock that is then kept
        (version,) = run("PRAGMA user_version").fetchone()
        if version > SCHEMA_VERSION:
            run("ROLLBACK")
            raise CannotServe(
                f"the database {self.path} was written by a newer Kedge (its version is {version}, "
                f"this Kedge knows {SCHEMA_VERSION}): upgrade Kedge or use another --db"
            )
        if version == 0:
            for statement in _SCHEMA.split(";\n"):
                run(statement)
            run(f"PRAGMA user_version = {SCHEMA_VERSION}")
        run("COMMIT")

    @contextlib.contextmanager
    def transaction(self) -> Generator[None]:
        """All of what is run inside, or none of it."""
        self.run("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self.run("ROLLBACK")
            raise
        self.run("COMMIT")

    def scrub(self) -> None:
        """Write deletions through to the file, so that deleted content is on the disk no more."""
        self.run("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def close(self) -> None:
        """Close the file; everything committed is in it."""
        self._connection.close()


def _refusal(path: str, error: sqlite3.Error) -> CannotServe:
    if "locked" in str(error):
        return CannotServe(
            f"the database {path} is in use by another server: stop it, or use another --db"
        )
    return CannotServe(f"the database {path} cannot be opened: {error}")
