"""Stored responses: begun, settled, found, deleted, expired.

A response that somebody may know of is written down as ``in_progress`` while its model runs, and
settled in one step afterwards, so a crash leaves a finished response or one that the next start
marks failed.
"""

from collections.abc import Callable
from dataclasses import dataclass

from kedge.server.errors import ApiError
from kedge.server.json_codec import encode, join_response
from kedge.server.response_object import (
    IN_PROGRESS_FIELDS,
    QUEUED_FIELDS,
    RESTARTED_MESSAGE,
    build_failed_fields,
)
from kedge.server.storage.database import ServerDatabase
from kedge.server.storage.ids import parse_node_number, parse_response_key
from kedge.server.storage.items import NodeRepository

Clock = Callable[[], float]

PURGE_BATCH_SIZE = 500

_INSERT = """
INSERT INTO nodes (id, key, parent, barrier, tokens, status, expires_at, conversation, input, output,
asked, became) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
"""
_CLEAR_RESPONSE = """
UPDATE nodes SET status = NULL, expires_at = NULL, asked = NULL, became = NULL WHERE id = ?
RETURNING conversation
"""


@dataclass(frozen=True, slots=True)
class ResponseEntry:
    """A response as it is begun: everything that is known before its model runs."""

    key: str
    parent: int | None
    conversation: str | None
    request_json: bytes
    input: bytes


@dataclass(frozen=True, slots=True)
class ResponseResult:
    """What became of a response."""

    status: str
    result_json: bytes
    output: bytes
    barrier: bool
    tokens: int


class ResponseRepository:
    """The responses of the database; one past its retention is as good as deleted."""

    def __init__(
        self, database: ServerDatabase, nodes: NodeRepository, clock: Clock, retention: float
    ) -> None:
        self._database = database
        self._execute = database.execute
        self._nodes = nodes
        self._clock = clock
        self._retention = retention

    def find(self, id: str) -> tuple[int, str] | None:
        """Find a response by its id, unless it has expired: its node and its status."""
        key = parse_response_key(id)
        if key is None:
            return None
        return self._execute(
            "SELECT id, status FROM nodes WHERE id = ? AND key = ? AND expires_at > ?",
            (parse_node_number(key), key, self._clock()),
        ).fetchone()

    def read(self, node: int) -> bytes:
        """Read a response as JSON."""
        row = self._execute("SELECT asked, became, output FROM nodes WHERE id = ?", (node,))
        return join_response(*row.fetchone())

    def begin(self, entry: ResponseEntry, *, barrier: bool, queued: bool = False) -> None:
        """Write a response down as in progress, or as one that waits for its turn."""
        status, became = ("queued", _QUEUED_JSON) if queued else ("in_progress", _IN_PROGRESS_JSON)
        self._insert(entry, ResponseResult(status, became, b"[]", barrier, tokens=0))

    def mark_in_progress(self, node: int) -> None:
        """Say that a response whose turn has come is in progress."""
        self._execute(
            "UPDATE nodes SET status = 'in_progress', became = ? WHERE id = ? AND status = 'queued'",
            (_IN_PROGRESS_JSON, node),
        )

    def finish(self, entry: ResponseEntry, result: ResponseResult) -> bool:
        """Finish a response: its output, and its items' place in the conversation, at once.

        Says whether there was anything to finish: it may have been deleted in the meantime.
        """
        if entry.conversation is None:
            return self._update(entry, result)
        with self._database.transaction():
            kept = self._update(entry, result)
            if kept:
                self._advance_conversation(entry)
        return kept

    def record(self, entry: ResponseEntry, result: ResponseResult) -> bool:
        """Write down a response that was finished before anybody could know of it."""
        if entry.conversation is None:
            self._insert(entry, result)
        else:
            with self._database.transaction():
                self._insert(entry, result)
                self._advance_conversation(entry)
        return True

    def _insert(self, entry: ResponseEntry, result: ResponseResult) -> None:
        self._execute(
            _INSERT,
            (
                parse_node_number(entry.key),
                entry.key,
                entry.parent,
                result.barrier,
                result.tokens,
                result.status,
                self._clock() + self._retention,
                entry.conversation,
                entry.input,
                result.output,
                entry.request_json,
                result.result_json,
            ),
        )

    def _update(self, entry: ResponseEntry, result: ResponseResult) -> bool:
        found = self._execute(
            "UPDATE nodes SET status = ?, became = ?, output = ?, barrier = ?, tokens = ? "
            "WHERE id = ? AND status = 'in_progress'",
            (
                result.status,
                result.result_json,
                result.output,
                result.barrier,
                result.tokens,
                parse_node_number(entry.key),
            ),
        )
        return found.rowcount > 0

    def _advance_conversation(self, entry: ResponseEntry) -> None:
        self._execute(
            "UPDATE conversations SET node = ? WHERE id = ?",
            (parse_node_number(entry.key), entry.conversation),
        )

    def fail(self, node: int, status: str, cause: ApiError | str | None = None) -> None:
        """Settle a response that came to nothing, as ``failed`` or ``cancelled``."""
        self._execute(
            "UPDATE nodes SET status = ?, became = ? WHERE id = ? "
            "AND status IN ('in_progress', 'queued')",
            (status, encode(build_failed_fields(status, cause)), node),
        )

    def fail_unfinished(self) -> None:
        """Mark as failed what an earlier process left in progress."""
        self._execute(
            "UPDATE nodes SET status = 'failed', became = ? "
            "WHERE status IN ('in_progress', 'queued')",
            (encode(build_failed_fields("failed", RESTARTED_MESSAGE)),),
        )

    def delete(self, node: int) -> None:
        """Delete a response; its items stay for as long as a child or a conversation has them."""
        self._delete_nodes([node])

    def delete_all(self) -> None:
        """Delete every response at once."""
        rows = self._execute("SELECT id FROM nodes WHERE expires_at IS NOT NULL").fetchall()
        self._delete_nodes([node for (node,) in rows])

    def purge(self) -> int:
        """Delete one batch of expired responses; say how many there were."""
        rows = self._execute(
            "SELECT id FROM nodes WHERE expires_at <= ? LIMIT ?", (self._clock(), PURGE_BATCH_SIZE)
        ).fetchall()
        self._delete_nodes([node for (node,) in rows])
        return len(rows)

    def _delete_nodes(self, nodes: list[int]) -> None:
        if not nodes:
            return
        with self._database.transaction():
            for node in nodes:
                (conversation,) = self._execute(_CLEAR_RESPONSE, (node,)).fetchone()
                if conversation is None:
                    self._nodes.drop_before_compaction(node)
                self._nodes.delete_unused(node)
        self._database.checkpoint()


_IN_PROGRESS_JSON = encode(IN_PROGRESS_FIELDS)
_QUEUED_JSON = encode(QUEUED_FIELDS)
