"""Where a Turn stands in the tree: what is new in it becomes a node, what is there is kept."""

from dataclasses import dataclass
from operator import is_not

from kedge.planning import get_state
from kedge.planning.state import STATE_KEY
from kedge.store import ConversationRow, Node, ResponseRow, Store, Telemetry
from kedge.store.records import NodeKind
from kedge.turns import Block, Turn
from kedge.turns.frozen_json import EMPTY, FrozenMap


@dataclass(slots=True)
class Checkpoint:
    """A node, and the Turn that it holds."""

    store: Store
    row: ConversationRow
    node: Node
    turn: Turn

    async def save(
        self,
        turn: Turn,
        kind: NodeKind,
        *,
        response: ResponseRow | None = None,
        telemetry: Telemetry | None = None,
        head: int | None = None,
        question_key: str = "",
        answer_key: str = "",
    ) -> Node:
        """Add a node for what is new in the Turn, and stand there."""
        kept = common_prefix_length(self.turn.blocks, turn.blocks)
        self.node = await self.store.append(
            self.row,
            self.node,
            turn.blocks[kept:],
            kind=kind,
            kept=kept,
            response=response,
            memory=get_state(turn),
            data=extract_data(turn),
            accounts=telemetry or Telemetry(),
            head=head,
            asked_for=question_key,
            answers=answer_key,
        )
        self.turn = turn
        return self.node

    def matches(self, turn: Turn) -> bool:
        """Whether the Turn is just what is saved here."""
        return has_same_blocks(self.turn, turn)


def common_prefix_length(old: tuple[Block, ...], new: tuple[Block, ...]) -> int:
    """With how many of the same blocks both begin."""
    shorter = min(len(old), len(new))
    different = map(is_not, old, new)
    return next((place for place, apart in enumerate(different) if apart), shorter)


def has_same_blocks(one: Turn, other: Turn) -> bool:
    """Whether both are made of the very same blocks."""
    length = len(one.blocks)
    return length == len(other.blocks) and common_prefix_length(one.blocks, other.blocks) == length


def extract_data(turn: Turn) -> FrozenMap:
    """The data of a Turn, without what planning keeps in it."""
    if not turn.data or (len(turn.data) == 1 and STATE_KEY in turn.data):
        return EMPTY
    return FrozenMap({name: value for name, value in turn.data.items() if name != STATE_KEY})
