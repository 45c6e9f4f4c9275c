"""Stored responses: begun, settled, found, deleted, expired.

A response that somebody may know of is written down as ``in_progress`` while its model runs, and
settled in one step afterwards, so a crash leaves a finished response or one that the next start
marks failed.
"""

from collections.abc import Callable
from dataclasses import dataclass

from kedge.server.errors import ApiError
from kedge.server.ids import key_of_response, node_of
from kedge.server.nodes import Nodes
from kedge.server.resource import BEGUN, QUEUED, RESTARTED, failed
from kedge.server.sqlite import Database
from kedge.server.wire import encode, joined

Clock = Callable[[], float]

PURGE_BATCH = 500

_INSERT = """
INSERT INTO nodes (id, key, parent, barrier, tokens, status, expires_at, conversation, input, output,
asked, became) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
"""
_GONE = """
UPDATE nodes SET status = NULL, expires_at = NULL, asked = NULL, became = NULL WHERE id = ?
RETURNING conversation
"""


@dataclass(frozen=True, slots=True)
class Entry:
    """A response as it is begun: everything that is known before its model runs."""

    key: str
    parent: int | None
    conversation: str | None
    asked: bytes
    input: bytes


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a response."""

    status: str
    became: bytes
    output: bytes
    barrier: bool
    tokens: int


class Responses:
    """The responses of the database; one past its retention is as good as deleted."""

    def __init__(self, database: Database, nodes: Nodes, clock: Clock, retention: float) -> None:
        self._database = database
        self._run = database.run
        self._nodes = nodes
        self._clock = clock
        self._retention = retention

    def find(self, id: str) -> tuple[int, str] | None:
        """Find a response by its id, unless it has expired: its node and its status."""
        key = key_of_response(id)
        if key is None:
            return None
        return self._run(
            "SELECT id, status FROM nodes WHERE id = ? AND key = ? AND expires_at > ?",
            (node_of(key), key, self._clock()),
        ).fetchone()

    def read(self, node: int) -> bytes:
        """Read a response as JSON."""
        row = self._run("SELECT asked, became, output FROM nodes WHERE id = ?", (node,))
        return joined(*row.fetchone())

    def begin(self, entry: Entry, *, barrier: bool, queued: bool = False) -> None:
        """Write a response down as in progress, or as one that waits for its turn."""
        status, became = ("queued", _QUEUED) if queued else ("in_progress", _BEGUN)
        self._insert(entry, Outcome(status, became, b"[]", barrier, tokens=0))

    def take_up(self, node: int) -> None:
        """Say that a response whose turn has come is in progress."""
        self._run(
            "UPDATE nodes SET status = 'in_progress', became = ? WHERE id = ? AND status = 'queued'",
            (_BEGUN, node),
        )

    def settle(self, entry: Entry, outcome: Outcome) -> bool:
        """Finish a response: its output, and its items' place in the conversation, at once.

        Says whether there was anything to finish: it may have been deleted in the meantime.
        """
        if entry.conversation is None:
            return self._finish(entry, outcome)
        with self._database.transaction():
            kept = self._finish(entry, outcome)
            if kept:
                self._move(entry)
        return kept

    def record(self, entry: Entry, outcome: Outcome) -> bool:
        """Write down a response that was finished before anybody could know of it."""
        if entry.conversation is None:
            self._insert(entry, outcome)
        else:
            with self._database.transaction():
                self._insert(entry, outcome)
                self._move(entry)
        return True

    def _insert(self, entry: Entry, outcome: Outcome) -> None:
        self._run(
            _INSERT,
            (
                node_of(entry.key),
                entry.key,
                entry.parent,
                outcome.barrier,
                outcome.tokens,
                outcome.status,
                self._clock() + self._retention,
                entry.conversation,
                entry.input,
                outcome.output,
                entry.asked,
                outcome.became,
            ),
        )

    def _finish(self, entry: Entry, outcome: Outcome) -> bool:
        found = self._run(
            "UPDATE nodes SET status = ?, became = ?, output = ?, barrier = ?, tokens = ? "
            "WHERE id = ? AND status = 'in_progress'",
            (
                outcome.status,
                outcome.became,
                outcome.output,
                outcome.barrier,
                outcome.tokens,
                node_of(entry.key),
            ),
        )
        return found.rowcount > 0

    def _move(self, entry: Entry) -> None:
        self._run(
            "UPDATE conversations SET node = ? WHERE id = ?",
            (node_of(entry.key), entry.conversation),
        )

    def fail(self, node: int, status: str, why: ApiError | str | None = None) -> None:
        """Settle a response that came to nothing, as ``failed`` or ``cancelled``."""
        self._run(
            "UPDATE nodes SET status = ?, became = ? WHERE id = ? "
            "AND status IN ('in_progress', 'queued')",
            (status, encode(failed(status, why)), node),
        )

    def fail_unfinished(self) -> None:
        """Mark as failed what an earlier process left in progress."""
        self._run(
            "UPDATE nodes SET status = 'failed', became = ? "
            "WHERE status IN ('in_progress', 'queued')",
            (encode(failed("failed", RESTARTED)),),
        )

    def delete(self, node: int) -> None:
        """Delete a response; its items stay for as long as a child or a conversation has them."""
        self._remove([node])

    def forget(self) -> None:
        """Delete every response at once."""
        rows = self._run("SELECT id FROM nodes WHERE expires_at IS NOT NULL").fetchall()
        self._remove([node for (node,) in rows])

    def purge(self) -> int:
        """Delete one batch of expired responses; say how many there were."""
        rows = self._run(
            "SELECT id FROM nodes WHERE expires_at <= ? LIMIT ?", (self._clock(), PURGE_BATCH)
        ).fetchall()
        self._remove([node for (node,) in rows])
        return len(rows)

    def _remove(self, nodes: list[int]) -> None:
        if not nodes:
            return
        with self._database.transaction():
            for node in nodes:
                (conversation,) = self._run(_GONE, (node,)).fetchone()
                if conversation is None:
                    self._nodes.cut(node)
                self._nodes.collect(node)
        self._database.scrub()


_BEGUN = encode(BEGUN)
_QUEUED = encode(QUEUED)
