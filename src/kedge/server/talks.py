"""Conversation objects: a name, metadata, and a place in the tree of nodes that moves forward.

Items are added as a node after the last one, so a response made in a conversation and the
conversation itself share their items. Taking an item out rewrites the conversation as one new
node; responses made earlier keep what they were made with.
"""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from secrets import token_hex
from typing import Any

from kedge.server.errors import CONVERSATION_LOCKED
from kedge.server.ids import new_key
from kedge.server.nodes import Count, Nodes
from kedge.server.sqlite import Database
from kedge.server.stored import Clock
from kedge.server.wire import Item, decode, encode


@dataclass(frozen=True, slots=True)
class Conversation:
    """One conversation object as it stands."""

    id: str
    created_at: int
    metadata: Any
    node: int | None

    def resource(self) -> dict[str, Any]:
        """Show it as the API does."""
        return {
            "id": self.id,
            "object": "conversation",
            "created_at": self.created_at,
            "metadata": self.metadata,
        }


class Conversations:
    """The conversation objects of the database; ``count`` counts the tokens of items."""

    def __init__(self, database: Database, nodes: Nodes, clock: Clock, count: Count) -> None:
        self._database = database
        self._run = database.run
        self._nodes = nodes
        self._clock = clock
        self._count = count
        self._locked: set[str] = set()

    @contextmanager
    def lock(self, id: str) -> Generator[None]:
        """Hold a conversation while it changes; a second holder is refused."""
        if id in self._locked:
            raise CONVERSATION_LOCKED()
        self._locked.add(id)
        try:
            yield
        finally:
            self._locked.discard(id)

    def create(self, metadata: object, key: str, items: Sequence[Item]) -> Conversation:
        """Make a conversation, perhaps with its first items."""
        id, now = f"conv_{token_hex(16)}", int(self._clock())
        with self._database.transaction():
            node = self._nodes.add(key, None, id, items, self._count) if items else None
            self._run(
                "INSERT INTO conversations (id, created_at, metadata, node) VALUES (?, ?, ?, ?)",
                (id, now, encode(metadata), node),
            )
        return Conversation(id, now, metadata, node)

    def find(self, id: str) -> Conversation | None:
        """Find a conversation by its id."""
        row = self._run(
            "SELECT id, created_at, metadata, node FROM conversations WHERE id = ?", (id,)
        ).fetchone()
        return row and Conversation(row[0], row[1], decode(row[2]), row[3])

    def set_metadata(self, id: str, metadata: object) -> None:
        """Replace the metadata."""
        self._run("UPDATE conversations SET metadata = ? WHERE id = ?", (encode(metadata), id))

    def delete(self, conversation: Conversation) -> None:
        """Delete a conversation; items that a response also holds stay with the response."""
        with self._database.transaction():
            self._run("DELETE FROM conversations WHERE id = ?", (conversation.id,))
            self._nodes.collect(conversation.node)
        self._database.scrub()

    def items(self, conversation: Conversation) -> list[Item]:
        """List every item, oldest first."""
        return self._nodes.everything(conversation.node)

    def add(self, conversation: Conversation, key: str, items: Sequence[Item]) -> None:
        """Add items at the end."""
        with self._database.transaction():
            node = self._nodes.add(key, conversation.node, conversation.id, items, self._count)
            self._move(conversation.id, node)

    def remove(self, conversation: Conversation, item_id: str) -> bool:
        """Take one item out; say whether it was there."""
        items = self.items(conversation)
        kept = [item for item in items if item["id"] != item_id]
        if len(kept) == len(items):
            return False
        with self._database.transaction():
            node = None
            if kept:
                key = new_key(self._nodes.next_number())
                node = self._nodes.add(key, None, conversation.id, kept, self._count)
            self._move(conversation.id, node)
            self._nodes.collect(conversation.node)
        self._database.scrub()
        return True

    def _move(self, id: str, node: int | None) -> None:
        self._run("UPDATE conversations SET node = ? WHERE id = ?", (node, id))
