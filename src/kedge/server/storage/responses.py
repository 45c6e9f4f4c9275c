"""Stored responses: create, finish, find, delete, expire.

A response whose id a client may have is stored as ``in_progress`` while its model runs, and finished in
one step afterwards. So after a crash a response is finished, or the next start marks it as failed. With
several servers on one database, a response in progress has an owner, and only the owner can finish it: a
server that was suspended until another one claimed its responses does not own them any more.
"""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from secrets import token_hex
from typing import Any, NamedTuple

from kedge._internal.json_text import decode, encode
from kedge.server import errors, object_forms
from kedge.server.object_forms import Item
from kedge.server.storage.database import ServerDatabase
from kedge.server.storage.items import NodeRepository
from kedge.store.database import responses as tables

PURGE_BATCH_SIZE = 500

_COLUMNS = (
    "id, key, parent, barrier, tokens, status, expires_at, input, output, request_fields, result_fields, "
    "namespace, conversation, owner, request, idempotency_key, background"
)
# Adds a node if its parent still exists; nodes are numbered from 1.
_INSERT = (
    f"INSERT INTO kedge_server_nodes ({_COLUMNS}) SELECT {', '.join('?' for _ in _COLUMNS.split(','))} "
    "WHERE 0 = ? OR EXISTS (SELECT 1 FROM kedge_server_nodes WHERE id = ?) "
    "ON CONFLICT (namespace, idempotency_key) WHERE idempotency_key IS NOT NULL DO NOTHING"
)
MOVE_CONVERSATION = (
    "UPDATE kedge_server_conversations SET node = ? WHERE id = ? AND coalesce(node, 0) = ?"
)
"""Moves the end of a conversation, if it was not changed since it was read; nodes are numbered from 1."""


class ResponseEntry(NamedTuple):
    """The data of a response before its model runs."""

    node: int
    key: str
    parent: int | None
    conversation: str | None
    request_json: bytes
    input: bytes
    body: bytes | None = None
    """The body of the request, if it may be needed again."""
    idempotency_key: str | None = None
    background: bool = False


class ResponseResult(NamedTuple):
    """The result of a response."""

    status: str
    result_json: bytes
    output: bytes
    barrier: bool
    tokens: int


@dataclass(frozen=True, slots=True)
class RepeatedResponse:
    """The response to an earlier request with the same idempotency key, and the body of that request."""

    node: int
    status: str
    body: bytes
    is_expired: bool


class ResponseRepository:
    """The responses of one namespace. Expired responses are not found.

    Deletion by age and the handling of unfinished responses apply to all namespaces.
    """

    def __init__(self, database: ServerDatabase, nodes: NodeRepository, retention: float) -> None:
        self._database = database
        self._execute = database.execute
        self._nodes = nodes
        self._clock = database.clock
        self._retention = retention

    def find(self, id: str) -> tuple[int, str, bool] | None:
        """Return the node and the status of a response, and whether it is in the background, or None."""
        parsed = self._nodes.keys.parse_id(object_forms.RESPONSE_ID, id)
        if parsed is None:
            return None
        return self._execute(
            "SELECT id, status, background FROM kedge_server_nodes "
            "WHERE id = ? AND key = ? AND expires_at > ? AND namespace = ?",
            (*parsed, self._clock(), self._nodes.namespace),
        ).fetchone()

    def read(self, node: int) -> bytes:
        """Return a response as JSON.

        Raises:
            LookupError: Another server has deleted it since its node was found.
        """
        row = self._execute(
            "SELECT request_fields, result_fields, output FROM kedge_server_nodes WHERE id = ?",
            (node,),
        ).fetchone()
        if row is None:
            raise LookupError(node)
        request_json, result_json, output = row
        if request_json is None:  # of items that were added to a conversation
            raise LookupError(node)
        return object_forms.join_response(request_json, result_json, output)

    def begin(self, entry: ResponseEntry, *, barrier: bool, queued: bool = False) -> None:
        """Store a response as in progress or as queued."""
        status = "in_progress"
        result_json = _IN_PROGRESS_JSON
        if queued:
            status = "queued"
            result_json = _QUEUED_JSON
        self._insert(entry, ResponseResult(status, result_json, b"[]", barrier, tokens=0))

    def find_repeated(self, idempotency_key: str) -> RepeatedResponse | None:
        """Return the response to an earlier request with this idempotency key, or None."""
        row = self._execute(
            "SELECT id, status, request, expires_at <= ? FROM kedge_server_nodes "
            "WHERE namespace = ? AND idempotency_key = ?",
            (self._clock(), self._nodes.namespace, idempotency_key),
        ).fetchone()
        if row is None:
            return None
        return RepeatedResponse(*row)

    def drop_idempotency_key(self, node: int) -> None:
        """Remove the idempotency key of a response that failed or expired, so that it can be used again."""
        self._execute("UPDATE kedge_server_nodes SET idempotency_key = NULL WHERE id = ?", (node,))

    def mark_in_progress(self, node: int) -> None:
        """Mark a queued response as in progress."""
        self._execute(
            "UPDATE kedge_server_nodes SET status = 'in_progress', result_fields = ? "
            f"WHERE id = ? AND status = 'queued' AND {_IS_OWN}",
            (_IN_PROGRESS_JSON, node, self._database.owner),
        )

    def settle(self, entry: ResponseEntry, result: ResponseResult, *, is_new: bool) -> bool:
        """Store the result of a response, and advance and unlock its conversation, in one step.

        Args:
            entry: The response.
            result: Its result.
            is_new: Whether it was not stored as in progress before.

        Returns:
            Whether the response still existed; it may have been deleted in the meantime.
        """
        store = self._insert if is_new else self._update
        conversation = entry.conversation
        if conversation is None:
            return store(entry, result)

        def settle() -> bool:
            is_stored = store(entry, result)
            if is_stored:
                self._advance_conversation(entry)
            self._database.unlock_conversation(conversation)
            return is_stored

        return self._database.transact(settle)

    def _insert(self, entry: ResponseEntry, result: ResponseResult) -> bool:
        is_unfinished = result.status in object_forms.UNFINISHED_STATUSES
        values = (
            entry.node,
            entry.key,
            entry.parent,
            result.barrier,
            result.tokens,
            result.status,
            self._clock() + self._retention,
            entry.input,
            result.output,
            entry.request_json,
            result.result_json,
            self._nodes.namespace,
            entry.conversation,
            self._database.owner if is_unfinished else None,
            entry.body,
            entry.idempotency_key,
            entry.background,
        )
        parent = entry.parent or 0
        inserted = self._execute(_INSERT, (*values, parent, parent))
        if inserted.rowcount:
            return True
        if entry.idempotency_key and self.find_repeated(entry.idempotency_key):
            raise errors.IDEMPOTENCY_KEY_IN_USE()
        raise errors.HISTORY_DELETED()

    def _update(self, entry: ResponseEntry, result: ResponseResult) -> bool:
        updated = self._execute(
            "UPDATE kedge_server_nodes SET status = ?, result_fields = ?, output = ?, barrier = ?, tokens = ? "
            f"WHERE id = ? AND status = 'in_progress' AND {_IS_OWN}",
            (
                result.status,
                result.result_json,
                result.output,
                result.barrier,
                result.tokens,
                entry.node,
                self._database.owner,
            ),
        )
        return updated.rowcount > 0

    def _advance_conversation(self, entry: ResponseEntry) -> None:
        values = (entry.node, entry.conversation, entry.parent or 0)
        if self._execute(MOVE_CONVERSATION, values).rowcount:
            return
        # It is not an error if the conversation was deleted meanwhile, but it is if it was changed.
        existing = "SELECT 1 FROM kedge_server_conversations WHERE id = ?"
        if self._execute(existing, (entry.conversation,)).fetchone() is not None:
            raise errors.CONVERSATION_LOCKED()

    def fail(self, node: int, status: str, cause: errors.ApiError | str | None = None) -> None:
        """Mark an unfinished response of this server as ``failed`` or ``cancelled``."""
        self._end_unfinished(status, cause, f"id = ? AND {_IS_OWN}", node, self._database.owner)

    def cancel(self, node: int) -> None:
        """Mark an unfinished response of any server as ``cancelled``."""
        self._end_unfinished("cancelled", None, "id = ?", node)

    def fail_unfinished(self, min_age: float = -inf) -> None:
        """Mark responses that another process left unfinished as failed.

        Args:
            min_age: Seconds for which another process may still be working on a response.
        """
        oldest = self._clock() + self._retention - min_age
        self._end_unfinished("failed", object_forms.RESTARTED_MESSAGE, "expires_at <= ?", oldest)

    def _end_unfinished(
        self, status: str, cause: errors.ApiError | str | None, condition: str, *values: object
    ) -> None:
        self._execute(
            "UPDATE kedge_server_nodes SET status = ?, result_fields = ? "
            f"WHERE status IN ('in_progress', 'queued') AND {condition}",
            (status, encode(object_forms.build_failed_fields(status, cause)), *values),
        )

    def delete(self, node: int) -> None:
        """Delete a response; its items are retained while a child or a conversation needs them."""
        self._delete_nodes([node])

    def delete_all(self) -> None:
        """Delete every response."""
        self._delete_selected("expires_at IS NOT NULL")

    def delete_oldest(self) -> int:
        """Delete one batch of the oldest responses, and return their number."""
        return self._delete_selected(
            "expires_at IS NOT NULL ORDER BY expires_at LIMIT ?", PURGE_BATCH_SIZE
        )

    def purge(self) -> int:
        """Delete one batch of expired responses, and return their number."""
        return self._delete_selected("expires_at <= ? LIMIT ?", self._clock(), PURGE_BATCH_SIZE)

    def _delete_selected(self, condition: str, *values: float) -> int:
        """Delete the responses that match a condition, and return their number."""
        rows = self._execute(
            f"SELECT id FROM kedge_server_nodes WHERE {condition}", values
        ).fetchall()
        self._delete_nodes([node for (node,) in rows])
        return len(rows)

    def _delete_nodes(self, nodes: list[int]) -> None:
        if nodes:
            self._nodes.delete(lambda: tables.delete_responses(self._execute, nodes))


_IS_OWN = "(owner IS NULL OR owner = ?)"
_IN_PROGRESS_JSON = encode(object_forms.IN_PROGRESS_FIELDS)
_QUEUED_JSON = encode(object_forms.QUEUED_FIELDS)


@dataclass(frozen=True, slots=True)
class StoredConversation:
    """One conversation object."""

    id: str
    created_at: int
    metadata: Any
    node: int | None

    def to_json(self) -> dict[str, Any]:
        """Return the conversation object of the API."""
        return {
            "id": self.id,
            "object": "conversation",
            "created_at": self.created_at,
            "metadata": self.metadata,
        }


class ConversationRepository:
    """The conversation objects of one namespace."""

    def __init__(self, database: ServerDatabase, nodes: NodeRepository) -> None:
        self._database = database
        self._execute = database.execute
        self._nodes = nodes
        self._clock = database.clock

    @contextmanager
    def lock(self, conversation: StoredConversation) -> Generator[None]:
        """Lock a conversation while it changes; raise an ``ApiError`` if it is locked."""
        self.acquire(conversation.id, conversation.node)
        try:
            yield
        finally:
            self.release(conversation.id)

    def acquire(self, id: str, node: int | None) -> None:
        """Lock a conversation that ends with this node.

        Raises:
            ApiError: It is locked, or has been changed since it was read.
        """
        if not self._database.lock_conversation(id, node):
            raise errors.CONVERSATION_LOCKED()

    def release(self, id: str) -> None:
        """Release the lock of a conversation."""
        self._database.unlock_conversation(id)

    def create(self, metadata: object, key: str, items: Sequence[Item]) -> StoredConversation:
        """Create a conversation, with its first items if there are any."""
        id = f"conv_{token_hex(16)}"
        now = int(self._clock())

        def insert() -> int | None:
            node = None
            if items:
                node = self._nodes.add(key, None, id, items)
            self._execute(
                "INSERT INTO kedge_server_conversations (id, created_at, metadata, node, namespace) "
                "VALUES (?, ?, ?, ?, ?)",
                (id, now, encode(metadata), node, self._nodes.namespace),
            )
            return node

        return StoredConversation(id, now, metadata, self._database.transact(insert))

    def find(self, id: str) -> StoredConversation | None:
        """Return a conversation, or None."""
        if "\0" in id:  # which PostgreSQL rejects
            return None
        row = self._execute(
            "SELECT id, created_at, metadata, node FROM kedge_server_conversations "
            "WHERE id = ? AND namespace = ?",
            (id, self._nodes.namespace),
        ).fetchone()
        if row is None:
            return None
        conversation_id, created_at, metadata, node = row
        return StoredConversation(conversation_id, created_at, decode(metadata), node)

    def set_metadata(self, id: str, metadata: object) -> None:
        """Replace the metadata."""
        self._execute(
            "UPDATE kedge_server_conversations SET metadata = ? WHERE id = ?",
            (encode(metadata), id),
        )

    def delete(self, conversation: StoredConversation) -> None:
        """Delete a conversation; items that a response shares with it are retained."""
        self._nodes.delete(
            lambda: tables.delete_conversation(self._execute, conversation.id, conversation.node)
        )

    def delete_unused(self) -> int:
        """Delete one batch of conversations, in any namespace, without a stored response.

        Returns:
            The number of deleted conversations.
        """
        rows = tables.find_empty_conversations(self._execute, PURGE_BATCH_SIZE)
        for row in rows:
            self._nodes.delete(lambda row=row: tables.delete_conversation(self._execute, *row))
        return len(rows)

    def items(self, conversation: StoredConversation) -> list[Item]:
        """List every item, oldest first."""
        return self._nodes.list_items(conversation.node)

    def add(self, conversation: StoredConversation, key: str, items: Sequence[Item]) -> None:
        """Add items at the end."""

        def insert() -> None:
            node = self._nodes.add(key, conversation.node, conversation.id, items)
            self._set_node(conversation, node)

        self._database.transact(insert)

    def remove(self, conversation: StoredConversation, item_id: str) -> bool:
        """Delete one item; return whether it existed."""
        items = self.items(conversation)
        others = [item for item in items if item["id"] != item_id]
        if len(others) == len(items):
            return False
        key = self._nodes.new_key()

        def replace() -> list[int]:
            node = None
            if others:
                node = self._nodes.add(key, None, conversation.id, others)
            self._set_node(conversation, node)
            return tables.detach_nodes(self._execute, conversation.node)

        self._nodes.delete(replace)
        return True

    def _set_node(self, conversation: StoredConversation, node: int | None) -> None:
        moved = self._execute(MOVE_CONVERSATION, (node, conversation.id, conversation.node or 0))
        if not moved.rowcount:
            raise errors.CONVERSATION_LOCKED()
