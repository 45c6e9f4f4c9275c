"""Nodes: what each request added, kept once, read back as contexts.

A node's context is its parent's plus its own items, so the way up is one recursive query, and not
even that while the context cache is warm. A node that holds a compaction is a *barrier*: seen from
its children, everything before the newest compaction item is gone.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kedge.server.json_codec import Item, decode, encode
from kedge.server.storage.context import EMPTY_CONTEXT, Context, ContextCache, extend_context
from kedge.server.storage.database import ServerDatabase
from kedge.server.storage.ids import parse_item_key, parse_node_number

_SELECT_NODE = "SELECT id, parent, barrier, tokens, input, output FROM nodes WHERE id = ?"
_SELECT_CHAIN = """
WITH RECURSIVE up (id, parent, barrier, tokens, input, output) AS (
    SELECT id, parent, barrier, tokens, input, output FROM nodes WHERE id = ?
    UNION ALL
    SELECT n.id, n.parent, n.barrier, n.tokens, n.input, n.output
    FROM up JOIN nodes n ON n.id = up.parent WHERE NOT up.barrier
)
SELECT id, parent, barrier, tokens, input, output FROM up
"""
_SELECT_ALL_ITEMS = """
WITH RECURSIVE up (parent, input, output) AS (
    SELECT parent, input, output FROM nodes WHERE id = ?
    UNION ALL
    SELECT n.parent, n.input, n.output FROM up JOIN nodes n ON n.id = up.parent
)
SELECT input, output FROM up
"""
_SELECT_UNUSED = """
SELECT parent FROM nodes n WHERE id = ? AND expires_at IS NULL
AND NOT EXISTS (SELECT 1 FROM nodes WHERE parent = n.id)
AND NOT EXISTS (SELECT 1 FROM conversations WHERE node = n.id)
"""

ItemExpander = Callable[[Sequence[Item]], Sequence[Item]]
"""Shows items as a model sees them: a compaction item is replaced by what it stands for."""

ItemCounter = Callable[[Sequence[Item]], int]


@dataclass(frozen=True, slots=True)
class ContextNode:
    """The content of one node, as it is stored."""

    id: int
    parent: int | None
    input: bytes
    output: bytes

    def items(self) -> list[Item]:
        """List its items."""
        return [*decode(self.input), *decode(self.output)]


class NodeRepository:
    """All nodes of the database, and the contexts that end at them."""

    def __init__(self, database: ServerDatabase, cache: ContextCache, expand: ItemExpander) -> None:
        self._execute = database.execute
        self._cache = cache
        self._expand = expand
        (self._last_number,) = database.execute("SELECT coalesce(max(id), 0) FROM nodes").fetchone()

    def next_number(self) -> int:
        """Number a new node; a number is never given twice while the server runs."""
        self._last_number += 1
        return self._last_number

    def add(
        self,
        key: str,
        parent: int | None,
        conversation: str,
        items: Sequence[Item],
        count_tokens: ItemCounter,
    ) -> int:
        """Add items of a conversation; ``count`` counts what a model sees of them."""
        node, barrier = parse_node_number(key), has_compaction(items)
        seen = self._expand(slice_from_compaction(items)) if barrier else items
        self._execute(
            "INSERT INTO nodes (id, key, parent, barrier, tokens, conversation, input, output) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, X'5b5d')",
            (node, key, parent, barrier, count_tokens(seen), conversation, encode(items)),
        )
        return node

    def get(self, node: int) -> ContextNode:
        """Read one node's own content."""
        row = self._execute("SELECT id, parent, input, output FROM nodes WHERE id = ?", (node,))
        return ContextNode(*row.fetchone())

    def find(self, key: str, now: float) -> ContextNode | None:
        """Find the node with a key, unless its items are only kept for those who build on it."""
        row = self._execute(
            "SELECT id, parent, input, output FROM nodes WHERE id = ? AND key = ? "
            "AND (expires_at > ? OR conversation IS NOT NULL)",
            (parse_node_number(key), key, now),
        ).fetchone()
        return row and ContextNode(*row)

    def load_context(self, node: int | None) -> Context:
        """Everything up to and including a node."""
        if node is None:
            return EMPTY_CONTEXT
        return self._cache.get(node) or self._read_context(node)

    def cache_context(self, node: int, parent: int | None, context: Context) -> None:
        """Remember a context that was just made, so that the next turn need not read it."""
        self._cache.put(node, None if context.parent is EMPTY_CONTEXT else parent, context)

    def list_items(self, node: int | None) -> list[Item]:
        """List every item up to a node, also those from before a compaction."""
        rows = self._execute(_SELECT_ALL_ITEMS, (node,)).fetchall()
        return [item for row in reversed(rows) for part in row for item in decode(part)]

    def delete_unused(self, node: int | None) -> None:
        """Delete a node that nothing needs any more, and then its parents likewise."""
        while node is not None:
            row = self._execute(_SELECT_UNUSED, (node,)).fetchone()
            if row is None:
                return
            self._execute("DELETE FROM nodes WHERE id = ?", (node,))
            self._cache.discard(node)
            (node,) = row

    def drop_before_compaction(self, node: int) -> None:
        """Drop what is before a barrier: its children do not see it, and nobody lists it."""
        parent, barrier = self._execute(
            "SELECT parent, barrier FROM nodes WHERE id = ?", (node,)
        ).fetchone()
        if not barrier:
            return
        kept = slice_from_compaction(self.get(node).items())
        self._execute(
            "UPDATE nodes SET parent = NULL, input = ?, output = X'5b5d' WHERE id = ?",
            (encode(kept), node),
        )
        self.delete_unused(parent)

    def _read_context(self, node: int) -> Context:
        rows = self._execute(_SELECT_NODE, (node,)).fetchall()
        parent = rows[0][1]
        context = EMPTY_CONTEXT if parent is None else self._cache.get(parent)
        if context is None:
            rows = self._execute(_SELECT_CHAIN, (node,)).fetchall()
            context = EMPTY_CONTEXT
        for row in reversed(rows):
            context = self._cache.get(row[0]) or self._extend(context, *row)
        return context

    def _extend(
        self,
        above: Context,
        node: int,
        parent: int | None,
        barrier: int,
        tokens: int,
        *content: bytes,
    ) -> Context:
        items: list[Any] = [item for part in content for item in decode(part)]
        seen: Sequence[Item] = items
        if barrier:
            above, parent = EMPTY_CONTEXT, None
            items = slice_from_compaction(items)
            seen = self._expand(items)
        context = extend_context(above, items, seen, tokens, sum(map(len, content)))
        self._cache.put(node, parent, context)
        return context


def has_compaction(items: Sequence[Item]) -> bool:
    """Whether there is a compaction among the items."""
    return any(item["type"] == "compaction" for item in items)


def slice_from_compaction(items: Sequence[Item]) -> list[Any]:
    """Cut everything before the newest compaction item."""
    for index in range(len(items) - 1, -1, -1):
        if items[index]["type"] == "compaction":
            return list(items[index:])
    return list(items)


class StoredItemLookup:
    """The stored items, by id."""

    def __init__(self, nodes: NodeRepository, clock: Callable[[], float]) -> None:
        self._nodes = nodes
        self._clock = clock

    def find_item(self, id: str) -> Item | None:
        """Find a stored item."""
        node = self._find_node(id)
        items = node.items() if node else ()
        return next((item for item in items if item["id"] == id), None)

    def find_reasoning_before(self, id: str) -> str | None:
        """Name the reasoning item that stood directly before this one when a model wrote it."""
        node = self._find_node(id)
        before: Item | None = None
        for item in decode(node.output) if node else ():
            if item["id"] == id:
                return before["id"] if before and before["type"] == "reasoning" else None
            before = item
        return None

    def _find_node(self, id: str) -> ContextNode | None:
        key = parse_item_key(id)
        return None if key is None else self._nodes.find(key, self._clock())
