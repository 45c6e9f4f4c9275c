"""Stored responses: create, finish, find, delete, expire.

A response that a client may know of is stored as ``in_progress`` while its model runs, and finished
in one step afterwards. So a crash leaves a finished response, or one that the next start marks as
failed.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from math import inf

from kedge.server.errors import ApiError
from kedge.server.json_codec import encode, join_response
from kedge.server.response_object import (
    IN_PROGRESS_FIELDS,
    QUEUED_FIELDS,
    RESTARTED_MESSAGE,
    build_failed_fields,
)
from kedge.server.storage.database import ServerDatabase
from kedge.server.storage.ids import make_response_id, parse_node_number, parse_response_key
from kedge.server.storage.items import NodeRepository

Clock = Callable[[], float]

PURGE_BATCH_SIZE = 500

_INSERT = """
INSERT INTO nodes (id, key, parent, barrier, tokens, status, expires_at, conversation, input, output,
asked, became, namespace) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
"""
_CLEAR_RESPONSE = """
UPDATE nodes SET status = NULL, expires_at = NULL, asked = NULL, became = NULL WHERE id = ?
RETURNING conversation
"""


@dataclass(frozen=True, slots=True)
class ResponseEntry:
    """What is known of a response before its model runs."""

    key: str
    parent: int | None
    conversation: str | None
    request_json: bytes
    input: bytes


@dataclass(frozen=True, slots=True)
class ResponseResult:
    """The result of a response."""

    status: str
    result_json: bytes
    output: bytes
    barrier: bool
    tokens: int


class ResponseRepository:
    """The responses of one namespace. Expired responses are not found.

    Deletion by age, and what concerns unfinished responses, is for all namespaces.
    """

    def __init__(
        self, database: ServerDatabase, nodes: NodeRepository, clock: Clock, retention: float
    ) -> None:
        self._database = database
        self._execute = database.execute
        self._nodes = nodes
        self._clock = clock
        self._retention = retention

    def find(self, id: str) -> tuple[int, str] | None:
        """Return the node and the status of a response, or None."""
        key = parse_response_key(id)
        if key is None:
            return None
        return self._execute(
            "SELECT id, status FROM nodes WHERE id = ? AND key = ? AND expires_at > ? "
            "AND namespace = ?",
            (parse_node_number(key), key, self._clock(), self._nodes.namespace),
        ).fetchone()

    def read(self, node: int) -> bytes:
        """Return a response as JSON."""
        row = self._execute("SELECT asked, became, output FROM nodes WHERE id = ?", (node,))
        return join_response(*row.fetchone())

    def begin(self, entry: ResponseEntry, *, barrier: bool, queued: bool = False) -> None:
        """Store a response as in progress or as queued."""
        status, result = ("queued", _QUEUED_JSON) if queued else ("in_progress", _IN_PROGRESS_JSON)
        self._insert(entry, ResponseResult(status, result, b"[]", barrier, tokens=0))

    def mark_in_progress(self, node: int) -> None:
        """Mark a queued response as in progress."""
        self._execute(
            "UPDATE nodes SET status = 'in_progress', became = ? WHERE id = ? AND status = 'queued'",
            (_IN_PROGRESS_JSON, node),
        )

    def finish(self, entry: ResponseEntry, result: ResponseResult) -> bool:
        """Store the result of a response in progress, and advance its conversation, in one step.

        Returns:
            Whether the response was still there; it may have been deleted in the meantime.
        """
        if entry.conversation is None:
            return self._update(entry, result)
        with self._database.transaction():
            is_stored = self._update(entry, result)
            if is_stored:
                self._advance_conversation(entry)
        return is_stored

    def record(self, entry: ResponseEntry, result: ResponseResult) -> bool:
        """Store a finished response that was not stored as in progress."""
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
                self._nodes.namespace,
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
        """Mark an unfinished response as ``failed`` or ``cancelled``."""
        self._execute(
            "UPDATE nodes SET status = ?, became = ? WHERE id = ? "
            "AND status IN ('in_progress', 'queued')",
            (status, encode(build_failed_fields(status, cause)), node),
        )

    def fail_unfinished(self, min_age: float = -inf) -> None:
        """Mark responses that another process left unfinished as failed.

        Args:
            min_age: Seconds for which another process may still be working on a response.
        """
        self._execute(
            "UPDATE nodes SET status = 'failed', became = ? "
            "WHERE status IN ('in_progress', 'queued') AND expires_at <= ?",
            (
                encode(build_failed_fields("failed", RESTARTED_MESSAGE)),
                self._clock() + self._retention - min_age,
            ),
        )

    def delete(self, node: int) -> None:
        """Delete a response; its items are retained while a child or a conversation needs them."""
        self._delete_nodes([node])

    def delete_all(self) -> None:
        """Delete every response."""
        rows = self._execute("SELECT id FROM nodes WHERE expires_at IS NOT NULL").fetchall()
        self._delete_nodes([node for (node,) in rows])

    def delete_others(self, retained: Collection[str]) -> None:
        """Delete every finished response, except those with these ids."""
        rows = self._execute(
            "SELECT id, key FROM nodes WHERE status NOT IN ('in_progress', 'queued')"
        ).fetchall()
        self._delete_nodes([node for node, key in rows if make_response_id(key) not in retained])

    def delete_oldest(self) -> int:
        """Delete one batch of the oldest responses; return how many."""
        rows = self._execute(
            "SELECT id FROM nodes WHERE expires_at IS NOT NULL ORDER BY expires_at LIMIT ?",
            (PURGE_BATCH_SIZE,),
        ).fetchall()
        self._delete_nodes([node for (node,) in rows])
        return len(rows)

    def purge(self) -> int:
        """Delete one batch of expired responses; return how many."""
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
                row = self._execute(_CLEAR_RESPONSE, (node,)).fetchone()
                if row is None:  # another process of a shared database deleted it
                    continue
                if row[0] is None:
                    self._nodes.drop_before_compaction(node)
                self._nodes.delete_unused(node)
        self._database.checkpoint()


_IN_PROGRESS_JSON = encode(IN_PROGRESS_FIELDS)
_QUEUED_JSON = encode(QUEUED_FIELDS)
