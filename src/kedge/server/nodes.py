"""Nodes: what each request added, kept once, read back as contexts.

A node's context is its parent's plus its own items, so the way up is one recursive query, and not
even that while the context cache is warm. A node that holds a compaction is a *barrier*: seen from
its children, everything before the newest compaction item is gone.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kedge.server.contexts import NOTHING, Context, ContextCache, grown
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
SELECT parent FROM nodes n WHERE id = ?
AND NOT EXISTS (SELECT 1 FROM nodes WHERE parent = n.id)
AND NOT EXISTS (SELECT 1 FROM responses WHERE node = n.id)
AND NOT EXISTS (SELECT 1 FROM conversations WHERE node = n.id)
"""

Reader = Callable[[Sequence[Item]], Sequence[Item]]
"""Shows items as a model sees them: a compaction item is replaced by what it stands for."""


@dataclass(frozen=True, slots=True)
class Node:
    """The content of one node, as it is stored."""

    id: int
    parent: int | None
    input: bytes
    output: bytes


class Nodes:
    """All nodes of the database, and the contexts that end at them."""

    def __init__(self, database: Database, cache: ContextCache, read: Reader) -> None:
        self._run = database.run
        self._cache = cache
        self._read = read

    def add(
        self,
        key: str,
        parent: int | None,
        input: bytes,
        *,
        barrier: bool,
        tokens: int = 0,
    ) -> int:
        """Insert what a request brings; its output follows with ``complete``."""
        cursor = self._run(
            "INSERT INTO nodes (key, parent, barrier, tokens, input, output) "
            "VALUES (?, ?, ?, ?, ?, '[]')",
            (key, parent, barrier, tokens, input),
        )
        assert cursor.lastrowid is not None  # noqa: S101 - an INSERT has one
        return cursor.lastrowid

    def complete(self, node: int, output: bytes, *, barrier: bool, tokens: int) -> None:
        """Add the output to a node."""
        self._run(
            "UPDATE nodes SET output = ?, barrier = ?, tokens = ? WHERE id = ?",
            (output, barrier, tokens, node),
        )

    def get(self, node: int) -> Node:
        """Read one node's own content."""
        row = self._run("SELECT id, parent, input, output FROM nodes WHERE id = ?", (node,))
        return Node(*row.fetchone())

    def find(self, key: str) -> Node | None:
        """Find a node by the key that its items' ids carry."""
        row = self._run("SELECT id, parent, input, output FROM nodes WHERE key = ?", (key,))
        found = row.fetchone()
        return found and Node(*found)

    def context(self, node: int | None) -> Context:
        """Everything up to and including a node."""
        if node is None:
            return NOTHING
        return self._cache.get(node) or self._load(node)

    def keep(self, node: int, parent: int | None, context: Context) -> None:
        """Remember a context that was just made, so that the next turn need not read it."""
        self._cache.put(node, parent if context.parent is not NOTHING else None, context)

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

    def release(self, node: int, *, cut: bool) -> None:
        """Let go of a node whose response is gone: keep no more of it than its children need.

        ``cut`` says that nobody lists what came before a barrier, as a conversation does.
        """
        parent, barrier, *content = self._run(
            "SELECT parent, barrier, input, output FROM nodes WHERE id = ?", (node,)
        ).fetchone()
        if barrier and cut:
            kept = encode(from_barrier([item for part in content for item in decode(part)]))
            self._run(
                "UPDATE nodes SET parent = NULL, input = ?, output = '[]' WHERE id = ?",
                (kept, node),
            )
            self.collect(parent)
        self.collect(node)

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
        if barrier:
            above, parent = NOTHING, None
            items = from_barrier(items)
        size = sum(map(len, content))
        context = grown(above, items, self._read(items) if barrier else items, tokens, size)
        self._cache.put(node, parent, context)
        return context


def from_barrier(items: list[Any]) -> list[Any]:
    """Cut everything before the newest compaction item."""
    for index in range(len(items) - 1, -1, -1):
        if items[index].get("type") == "compaction":
            return items[index:]
    return items
