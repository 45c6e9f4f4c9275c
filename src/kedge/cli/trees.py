"""The tree of a conversation with what people want to know of each node, read in few queries."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kedge.cli.words import printable
from kedge.store import ConversationRow, Node, ResponseRow, Store
from kedge.store.overview import endings, standing_on, tree_of
from kedge.turns import Block
from kedge.turns.show import describe

EXCERPT = 60


@dataclass(slots=True)
class Tree:
    """A tree: its nodes, the conversations that stand on it, and the responses that made nodes."""

    row: ConversationRow
    nodes: dict[int, Node]
    conversations: list[ConversationRow]
    responses: Mapping[int, ResponseRow]
    blocks: Mapping[int, Block] = field(default_factory=dict[int, Block])
    """The last block that each node added."""

    def heads(self, number: int) -> list[str]:
        """Which conversations have their head here; the one that was asked for says just that."""
        names = [
            "head" if row.id == self.row.id else f"head of {printable(row.title or row.id)}"
            for row in self.conversations
            if row.head == number
        ]
        return sorted(names)

    def marks(self, number: int, now: float) -> list[str]:
        """What became of the response that made this node, and whether history was changed here."""
        node, response = self.nodes[number], self.responses.get(number)
        marks: list[str] = []
        if node.kind == "compacted":
            marks.append("compacted")
        if node.kind in ("edited", "merged"):
            marks.append(node.kind)
        if response is None:
            return marks
        if response.status == "lost":
            marks.append(f"lost: {response.lost_reason}" if response.lost_reason else "lost")
        elif response.status != "completed":
            marks.append(f"failed: {response.status}")
        elif not response.stored:
            marks.append("unstored")
        elif response.expires_at is not None and response.expires_at <= now:
            marks.append("expired")
        if response.healed:
            marks.append(f"healed: {response.healed}")
        elif response.reason not in ("", "new", "stateless", "conversation"):
            marks.append(f"sent in full: {response.reason}")
        return marks

    def excerpt(self, number: int) -> str:
        """The first words of the last that this node added."""
        last = self.blocks.get(number)
        return describe(last, EXCERPT) if last else ""

    def report(self, now: float) -> dict[str, Any]:
        """The tree as JSON, the oldest node first."""
        return {
            "conversation": self.row.id,
            "head": self.row.head,
            "conversations": {row.id: row.head for row in self.conversations},
            "nodes": [self._report(number, now) for number in sorted(self.nodes)],
        }

    def _report(self, number: int, now: float) -> dict[str, Any]:
        node, response = self.nodes[number], self.responses.get(number)
        return {
            "id": number,
            "parent": node.parent or None,
            "kind": node.kind,
            "kept": node.kept,
            "length": node.length,
            "created_at": node.created_at,
            "response": response.provider_response_id if response else None,
            "status": response.status if response else None,
            "anchor": (response.anchor or None) if response else None,
            "marks": self.marks(number, now),
            "heads": [row.id for row in self.conversations if row.head == number],
            "excerpt": self.excerpt(number),
        }


async def load_tree(store: Store, row: ConversationRow) -> Tree:
    """Read a tree in three queries, however large it is."""
    tree = await tree_of(store, row)
    nodes = {node.id: node for node in tree.nodes}
    blocks = await endings(store, row)
    return Tree(row, nodes, await standing_on(store, row), tree.responses, blocks)
