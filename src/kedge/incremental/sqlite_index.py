"""An index of stored responses in a SQLite file, shared by the processes of one machine.

The file holds digests and response ids, no content and no keys. It is a cache: losing it costs one full
send per conversation, so commits do not wait for the disk.
"""

import json
import secrets
import sqlite3
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kedge.incremental.index import MAX_ENTRIES, IndexedResponse, is_reissued
from kedge.planning.state import dump_record, load_record

_SCHEMA = """
CREATE TABLE IF NOT EXISTS responses (
    scope TEXT NOT NULL,
    response_id TEXT NOT NULL,
    digest TEXT NOT NULL,
    entry TEXT NOT NULL,
    PRIMARY KEY (scope, response_id)
);
CREATE INDEX IF NOT EXISTS responses_by_digest ON responses (scope, digest);
CREATE TABLE IF NOT EXISTS secrets (name TEXT PRIMARY KEY, value BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS evidence (name TEXT PRIMARY KEY, form TEXT NOT NULL);
"""
_BUSY_SECONDS = 5.0
_CHUNK = 500
_PRUNE_EVERY = 256


class SqliteIndex:
    """An index in a SQLite file.

    Args:
        path: The file; it is created if it does not exist, readable by its owner only.
        max_entries: How many responses to retain; the oldest are dropped first.

    Raises:
        sqlite3.Error: The file cannot be opened or is not a SQLite database.
    """

    is_blocking = True

    def __init__(self, path: str | Path, max_entries: int = MAX_ENTRIES) -> None:
        self._max_entries = max_entries
        self._lock = threading.Lock()
        self._added = 0
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).touch(mode=0o600)
        self._db = sqlite3.connect(
            str(path), timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False
        )
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = NORMAL")
        self._db.executescript(_SCHEMA)

    @property
    def hash_key(self) -> bytes:
        """The key under which credentials are hashed into scopes, the same for every process."""
        with self._lock:
            self._db.execute(
                "INSERT OR IGNORE INTO secrets VALUES ('scope', ?)", (secrets.token_bytes(32),)
            )
            return self._db.execute("SELECT value FROM secrets WHERE name = 'scope'").fetchone()[0]

    def find(self, scope: str, digests: Sequence[str]) -> list[IndexedResponse]:
        """Return the responses of this scope whose content has one of these digests."""
        found: list[IndexedResponse] = []
        with self._lock:
            for start in range(0, len(digests), _CHUNK):
                some = digests[start : start + _CHUNK]
                marks = ",".join("?" * len(some))
                rows = self._db.execute(
                    f"SELECT entry FROM responses WHERE scope = ? AND digest IN ({marks})",  # noqa: S608
                    (scope, *some),
                )
                found += [entry for (text,) in rows if (entry := _decode(text)) is not None]
        return found

    def get(self, scope: str, response_id: str) -> IndexedResponse | None:
        """Return the response with this id."""
        with self._lock:
            row = self._db.execute(
                "SELECT entry FROM responses WHERE scope = ? AND response_id = ?",
                (scope, response_id),
            ).fetchone()
        return _decode(row[0]) if row else None

    def add(self, entry: IndexedResponse) -> bool:
        """Add a response; return whether its id was there with other content, which is replaced."""
        record = entry.record
        older = self.get(record.scope, record.response_id)
        with self._lock:
            self._db.execute(
                "INSERT OR REPLACE INTO responses VALUES (?, ?, ?, ?)",
                (record.scope, record.response_id, record.digest, _encode(entry)),
            )
            self._added += 1
            if self._added % _PRUNE_EVERY == 1:
                self._db.execute(
                    "DELETE FROM responses WHERE rowid <= (SELECT MAX(rowid) FROM responses) - ?",
                    (self._max_entries,),
                )
        return is_reissued(older, entry)

    def mark_lost(self, scope: str, *response_ids: str) -> None:
        """Do not use these responses again: the server no longer has them."""
        with self._lock:
            self._db.executemany(
                "DELETE FROM responses WHERE scope = ? AND response_id = ?",
                [(scope, response_id) for response_id in response_ids],
            )

    def load_evidence(self, key: str) -> Mapping[str, Any] | None:
        """Return what is known about the memory of a server."""
        with self._lock:
            row = self._db.execute("SELECT form FROM evidence WHERE name = ?", (key,)).fetchone()
        return json.loads(row[0]) if row else None

    def save_evidence(self, key: str, form: Mapping[str, Any]) -> None:
        """Store what is known about the memory of a server, in the place of what was there."""
        with self._lock:
            self._db.execute(
                "INSERT OR REPLACE INTO evidence VALUES (?, ?)", (key, json.dumps(dict(form)))
            )

    def close(self) -> None:
        """Close the file."""
        self._db.close()


def _encode(entry: IndexedResponse) -> str:
    form = {"record": dump_record(entry.record), "reasoning_ids": sorted(entry.reasoning_ids)}
    return json.dumps(form)


def _decode(text: str) -> IndexedResponse | None:
    form = json.loads(text)
    record = load_record(form["record"])
    return IndexedResponse(record, frozenset(form["reasoning_ids"])) if record else None
