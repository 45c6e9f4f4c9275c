"""What the server can tell of an item by its id alone: the id says where to look."""

from collections.abc import Callable

from kedge.server.ids import key_of_item
from kedge.server.nodes import Node, Nodes
from kedge.server.wire import Item, decode


class KnownItems:
    """The stored items, by id."""

    def __init__(self, nodes: Nodes, clock: Callable[[], float]) -> None:
        self._nodes = nodes
        self._clock = clock

    def item(self, id: str) -> Item | None:
        """Find a stored item."""
        node = self._node(id)
        items = node.items() if node else ()
        return next((item for item in items if item["id"] == id), None)

    def reasoning_before(self, id: str) -> str | None:
        """Name the reasoning item that stood directly before this one when a model wrote it."""
        node = self._node(id)
        before: Item | None = None
        for item in decode(node.output) if node else ():
            if item["id"] == id:
                return before["id"] if before and before["type"] == "reasoning" else None
            before = item
        return None

    def _node(self, id: str) -> Node | None:
        key = key_of_item(id)
        return None if key is None else self._nodes.find(key, self._clock())
