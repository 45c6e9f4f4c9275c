"""Conversation objects: an id, metadata, and the node at the end of the conversation.

Items are added as a node after the last one, so a response in a conversation and the conversation
share their items. Deleting an item rewrites the conversation as one new node; earlier responses
retain their context.
"""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from secrets import token_hex
from typing import Any

from kedge.database.responses import (
    delete_conversation,
    detach_nodes,
    find_empty_conversations,
)
from kedge.server.errors import CONVERSATION_LOCKED
from kedge.server.item_forms import Item
from kedge.server.storage.database import ServerDatabase
from kedge.server.storage.items import NodeRepository
from kedge.server.storage.responses import MOVE_CONVERSATION, PURGE_BATCH_SIZE
from kedge.text.json_text import decode, encode


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
            raise CONVERSATION_LOCKED()

    def release(self, id: str) -> None:
        """Release the lock of a conversation."""
        self._database.unlock_conversation(id)

    def create(self, metadata: object, key: str, items: Sequence[Item]) -> StoredConversation:
        """Create a conversation, with its first items if there are any."""
        id, now = f"conv_{token_hex(16)}", int(self._clock())

        def insert() -> int | None:
            node = self._nodes.add(key, None, id, items) if items else None
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
        return row and StoredConversation(row[0], row[1], decode(row[2]), row[3])

    def set_metadata(self, id: str, metadata: object) -> None:
        """Replace the metadata."""
        self._execute(
            "UPDATE kedge_server_conversations SET metadata = ? WHERE id = ?",
            (encode(metadata), id),
        )

    def delete(self, conversation: StoredConversation) -> None:
        """Delete a conversation; items that a response shares with it are retained."""
        self._nodes.delete(
            lambda: delete_conversation(self._execute, conversation.id, conversation.node)
        )

    def delete_unused(self) -> int:
        """Delete one batch of conversations, in any namespace, without a stored response.

        Returns:
            The number of deleted conversations.
        """
        rows = find_empty_conversations(self._execute, PURGE_BATCH_SIZE)
        for row in rows:
            self._nodes.delete(lambda row=row: delete_conversation(self._execute, *row))
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
            node = self._nodes.add(key, None, conversation.id, others) if others else None
            self._set_node(conversation, node)
            return detach_nodes(self._execute, conversation.node)

        self._nodes.delete(replace)
        return True

    def _set_node(self, conversation: StoredConversation, node: int | None) -> None:
        moved = self._execute(MOVE_CONVERSATION, (node, conversation.id, conversation.node or 0))
        if not moved.rowcount:
            raise CONVERSATION_LOCKED()
