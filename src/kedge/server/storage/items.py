"""Nodes: the items that each request added, stored once and read back as contexts.

The context of a node is its parent's context plus its own items, which one recursive query reads; a cached context
needs none. A node with a compaction is a *barrier*: its context, and those of its children, start at the newest
compaction item.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from operator import itemgetter
from typing import Any

from kedge._internal.json_text import decode, encode
from kedge.server.object_forms import ITEM_ID, RESPONSE_ID, Item, NodeKeys
from kedge.server.storage.context import EMPTY_CONTEXT, Context, ContextCache, extend_context
from kedge.server.storage.database import ServerDatabase
from kedge.server.token_counting import count_items
from kedge.store.database.responses import NO_ITEMS, lock_deletions, slice_from_compaction

_SELECT_NODE = (
    "SELECT id, parent, barrier, tokens, input, output FROM kedge_server_nodes WHERE id = ?"
)
_SELECT_CHAIN = f"""
WITH RECURSIVE up (id, parent, barrier, tokens, input, output) AS (
    {_SELECT_NODE}
    UNION ALL
    SELECT n.id, n.parent, n.barrier, n.tokens, n.input, n.output
    FROM up JOIN kedge_server_nodes n ON n.id = up.parent {{condition}}
) SELECT * FROM up
"""
_SELECT_CONTEXT = _SELECT_CHAIN.format(condition="WHERE NOT up.barrier")
_SELECT_ALL_ITEMS = _SELECT_CHAIN.format(condition="")

ItemExpander = Callable[[Sequence[Item]], Sequence[Item]]
"""Returns items as a model sees them, with a compaction item replaced by the items in it."""

_get_type = itemgetter("type")


class NodeRepository:
    """The nodes of one namespace, and the contexts that end at them.

    Objects that are found by an id belong to the namespace. A node number is not an id: callers read it
    from a row of the namespace.

    Args:
        database: The database.
        cache: The cached contexts, of all namespaces.
        expand: Returns items as a model sees them: the items that were compacted in place of a compaction.
        keys: The keys of the database's nodes.
        namespace: The namespace; empty for the administrator.
    """

    def __init__(
        self,
        database: ServerDatabase,
        cache: ContextCache,
        expand: ItemExpander,
        keys: NodeKeys,
        namespace: str = "",
    ) -> None:
        self.namespace = namespace
        self._database = database
        self._execute = database.execute
        self._clock = database.clock
        self.cache = cache
        self._expand = expand
        self.keys = keys

    def new_key(self) -> str:
        """Return the key of a new node."""
        return self.keys.new(self._database.next_number())

    def add(self, key: str, parent: int | None, conversation: str, items: Sequence[Item]) -> int:
        """Add a node with items, as its input, to a conversation, and return its number."""
        node = self.keys.parse_node(key)
        is_barrier = has_compaction(items)
        model_items = items
        if is_barrier:
            model_items = self._expand(slice_from_compaction(items))
        self._execute(
            "INSERT INTO kedge_server_nodes (id, key, parent, barrier, tokens, conversation, input, output, "
            "namespace) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                node,
                key,
                parent,
                is_barrier,
                count_items(model_items),
                conversation,
                encode(items),
                NO_ITEMS,
                self.namespace,
            ),
        )
        return node

    def list_input(self, node: int) -> list[Item]:
        """Return every item that the model saw before it wrote the output of a node.

        Raises:
            LookupError: Another server has deleted it since it was found.
        """
        row = self._execute(
            "SELECT parent, input FROM kedge_server_nodes WHERE id = ?", (node,)
        ).fetchone()
        if row is None:
            raise LookupError(node)
        parent, input_json = row
        return self.load_context(parent).list_items() + decode(input_json)

    def read_items(self, item_id: str) -> tuple[bytes, bytes]:
        """Return the encoded input and output of the node of an item.

        Both are empty lists if there is no such node, or if it is only retained as a parent: its response was deleted
        or has expired, and it is in no conversation.
        """
        parsed = self.keys.parse_id(ITEM_ID, item_id)
        if parsed is None:
            return NO_ITEMS, NO_ITEMS
        row = self._execute(
            "SELECT input, output FROM kedge_server_nodes n WHERE id = ? AND key = ? "
            "AND namespace = ? AND (expires_at > ? OR EXISTS "
            "(SELECT 1 FROM kedge_server_conversations WHERE id = n.conversation))",
            (*parsed, self.namespace, self._clock()),
        ).fetchone()
        return row or (NO_ITEMS, NO_ITEMS)

    def load_context(self, node: int | None) -> Context:
        """Return the context that ends with a node."""
        if node is None:
            return EMPTY_CONTEXT
        return self.cache.get(node) or self._read_context(node)

    def is_cached(self, response_id: str) -> bool:
        """Return whether the context that ends with a response is in memory."""
        parsed = self.keys.parse_id(RESPONSE_ID, response_id)
        return parsed is not None and self.cache.get(parsed[0]) is not None

    def list_items(self, node: int | None) -> list[Item]:
        """Return every item up to a node, including those before a compaction."""
        rows = self._execute(_SELECT_ALL_ITEMS, (node,)).fetchall()
        items: list[Item] = []
        for *_, input_json, output_json in reversed(rows):
            items += decode(input_json)
            items += decode(output_json)
        return items

    def delete(self, work: Callable[[], Iterable[int]]) -> None:
        """Run a function that deletes nodes and returns their numbers, as one transaction.

        Deletions of several servers are run one at a time.
        """

        def delete() -> Iterable[int]:
            lock_deletions(self._execute, self._database.dialect)
            return work()

        for node in self._database.transact(delete):
            self.cache.discard(node)
        self._database.checkpoint()

    def _read_context(self, node: int) -> Context:
        # In most cases the context of the parent is cached, so the node itself is enough.
        rows = self._execute(_SELECT_NODE, (node,)).fetchall()
        parent = rows[0][1]
        context: Context | None = EMPTY_CONTEXT
        if parent is not None:
            context = self.cache.get(parent)
        if context is None:
            rows = self._execute(_SELECT_CONTEXT, (node,)).fetchall()
            context = EMPTY_CONTEXT
        for row in reversed(rows):
            context = self.cache.get(row[0]) or self._extend(context, *row)
        return context

    def _extend(
        self,
        parent_context: Context,
        node: int,
        parent: int | None,
        is_barrier: int,
        tokens: int,
        input_json: bytes,
        output_json: bytes,
    ) -> Context:
        """Return the context of a node, whose columns are the other arguments, and cache it."""
        items: list[Any] = decode(input_json) + decode(output_json)
        model_items: Sequence[Item] = items
        if is_barrier:
            parent_context = EMPTY_CONTEXT
            items = slice_from_compaction(items)
            model_items = self._expand(items)
        byte_count = len(input_json) + len(output_json)
        context = extend_context(parent_context, items, model_items, tokens, byte_count)
        self.cache.put(node, parent, context)
        return context


class StoredItems:
    """The stored items that the items of one request name by their ids. Each node is read and decoded once.

    Args:
        nodes: The nodes.
    """

    def __init__(self, nodes: NodeRepository) -> None:
        self._nodes = nodes
        self._by_node: dict[str, _NodeItems] = {}

    def find_item(self, id: str) -> Item | None:
        """Return a stored item, or None."""
        node = self._read_node(id)
        return node.input.get(id) or node.output.get(id)

    def find_reasoning_before(self, id: str) -> str | None:
        """Return the id of the reasoning item directly before this item in its model's output."""
        return self._read_node(id).reasoning.get(id)

    def _read_node(self, item_id: str) -> "_NodeItems":
        match = ITEM_ID.fullmatch(item_id)
        if match is None:
            return _NodeItems(NO_ITEMS, NO_ITEMS)
        node_key = match[1]
        node = self._by_node.get(node_key)
        if node is None:
            node = _NodeItems(*self._nodes.read_items(item_id))
            self._by_node[node_key] = node
        return node


class _NodeItems:
    """The items of one node by their ids, decoded when they are needed."""

    def __init__(self, input: bytes, output: bytes) -> None:
        self._input = input
        self._output = output

    @cached_property
    def input(self) -> Mapping[str, Item]:
        return {item["id"]: item for item in decode(self._input)}

    @cached_property
    def output(self) -> Mapping[str, Item]:
        return {item["id"]: item for item in decode(self._output)}

    @cached_property
    def reasoning(self) -> Mapping[str, str]:
        """The ids of the reasoning items directly before other items of the output."""
        neighbors = pairwise(self.output.values())
        return {
            item["id"]: before["id"] for before, item in neighbors if before["type"] == "reasoning"
        }


def has_compaction(items: Sequence[Item]) -> bool:
    """Return whether there is a compaction among the items."""
    return "compaction" in map(_get_type, items)
