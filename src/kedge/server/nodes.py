"""Nodes: what each request added, kept once, read back as contexts.

A node's context is its parent's plus its own items, so the way up is one recursive query, and not
even that while the context cache is warm. A node that holds a compaction is a *barrier*: seen from
its children, everything before the newest compaction item is gone.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kedge.server.contexts import NOTHING, Context, ContextCache, grown
from kedge.server.ids import node_of
from kedge.server.sqlite import Database
from kedge.server.wire import Item, decode, encode

_ONE = "SELECT id, parent, barrier, tokens, input, output FROM nodes WHERE id = ?"
_CHAIN = """
WITH RECURSIVE up (id, parent, barrier, tokens, input, output) AS (
    SELECT id, parent, barrier, tokens, input, output FROM nodes WHERE id = ?
    UNION ALL
    SELECT n.id, n.parent, n.barrier, n.tokens, n.input, n.output
    FROM up JOIN nodes n ON n.id = up.parent WHERE NOT up.barrier
)
SELECT id, parent, barrier, tokens, input, output FROM up
"""
_ALL = """
WITH RECURSIVE up (parent, input, output) AS (
    SELECT parent, input, output FROM nodes WHERE id = ?
    UNION ALL
    SELECT n.parent, n.input, n.output FROM up JOIN nodes n ON n.id = up.parent
)
SELECT input, output FROM up
"""
_UNNEEDED = """
SELECT parent FROM nodes n WHERE id = ? AND expires_at IS NULL
AND NOT EXISTS (SELECT 1 FROM nodes WHERE parent = n.id)
AND NOT EXISTS (SELECT 1 FROM conversations WHERE node = n.id)
"""

Reader = Callable[[Sequence[Item]], Sequence[Item]]
"""Shows items as a model sees them: a compaction item is replaced by what it stands for."""

Count = Callable[[Sequence[Item]], int]


@dataclass(frozen=True, slots=True)
class Node:
    """The content of one node, as it is stored."""

    id: int
    parent: int | None
    input: bytes
    output: bytes

    def items(self) -> list[Item]:
        """List its items."""
        return [*decode(self.input), *decode(self.output)]


class Nodes:
    """All nodes of the database, and the contexts that end at them."""

    def __init__(self, database: Database, cache: ContextCache, read: Reader) -> None:
        self._run = database.run
        self._cache = cache
        self._read = read
        (self._newest,) = database.run("SELECT coalesce(max(id), 0) FROM nodes").fetchone()

    def next_number(self) -> int:
        """Number a new node; a number is never given twice while the server runs."""
        self._newest += 1
        return self._newest

    def add(
        self,
        key: str,
        parent: int | None,
        conversation: str,
        items: Sequence[Item],
        count: Count,
    ) -> int:
        """Add items of a conversation; ``count`` counts what a model sees of them."""
        node, barrier = node_of(key), is_barrier(items)
        seen = self._read(from_barrier(items)) if barrier else items
        self._run(
            "INSERT INTO nodes (id, key, parent, barrier, tokens, conversation, input, output) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, X'5b5d')",
            (node, key, parent, barrier, count(seen), conversation, encode(items)),
        )
        return node

    def get(self, node: int) -> Node:
        """Read one node's own content."""
        row = self._run("SELECT id, parent, input, output FROM nodes WHERE id = ?", (node,))
        return Node(*row.fetchone())

    def find(self, key: str, now: float) -> Node | None:
        """Find the node with a key, unless its items are only kept for those who build on it."""
        row = self._run(
            "SELECT id, parent, input, output FROM nodes WHERE id = ? AND key = ? "
            "AND (expires_at > ? OR conversation IS NOT NULL)",
            (node_of(key), key, now),
        ).fetchone()
        return row and Node(*row)

    def context(self, node: int | None) -> Context:
        """Everything up to and including a node."""
        if node is None:
            return NOTHING
        return self._cache.get(node) or self._load(node)

    def keep(self, node: int, parent: int | None, context: Context) -> None:
        """Remember a context that was just made, so that the next turn need not read it."""
        self._cache.put(node, None if context.parent is NOTHING else parent, context)

    def everything(self, node: int | None) -> list[Item]:
        """List every item up to a node, also those from before a compaction."""
        rows = self._run(_ALL, (node,)).fetchall()
        return [item for row in reversed(rows) for part in row for item in decode(part)]

    def collect(self, node: int | None) -> None:
        """Delete a node that nothing needs any more, and then its parents likewise."""
        while node is not None:
            row = self._run(_UNNEEDED, (node,)).fetchone()
            if row is None:
                return
            self._run("DELETE FROM nodes WHERE id = ?", (node,))
            self._cache.forget(node)
            (node,) = row

    def cut(self, node: int) -> None:
        """Drop what is before a barrier: its children do not see it, and nobody lists it."""
        parent, barrier = self._run(
            "SELECT parent, barrier FROM nodes WHERE id = ?", (node,)
        ).fetchone()
        if not barrier:
            return
        kept = from_barrier(self.get(node).items())
        self._run(
            "UPDATE nodes SET parent = NULL, input = ?, output = X'5b5d' WHERE id = ?",
            (encode(kept), node),
        )
        self.collect(parent)

    def _load(self, node: int) -> Context:
        rows = self._run(_ONE, (node,)).fetchall()
        parent = rows[0][1]
        context = NOTHING if parent is None else self._cache.get(parent)
        if context is None:
            rows = self._run(_CHAIN, (node,)).fetchall()
            context = NOTHING
        for row in reversed(rows):
            context = self._cache.get(row[0]) or self._grow(context, *row)
        return context

    def _grow(
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
            above, parent = NOTHING, None
            items = from_barrier(items)
            seen = self._read(items)
        context = grown(above, items, seen, tokens, sum(map(len, content)))
        self._cache.put(node, parent, context)
        return context


def is_barrier(items: Sequence[Item]) -> bool:
    """Whether there is a compaction among the items."""
    return any(item["type"] == "compaction" for item in items)


def from_barrier(items: Sequence[Item]) -> list[Any]:
    """Cut everything before the newest compaction item."""
    for index in range(len(items) - 1, -1, -1):
        if items[index]["type"] == "compaction":
            return list(items[index:])
    return list(items)
