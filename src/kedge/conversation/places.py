"""Places in the tree of a conversation: by node, response or block, before a question, after a crash."""

from collections.abc import Sequence
from dataclasses import dataclass

from kedge.errors import NotInStore
from kedge.planning import find_problems
from kedge.store import ConversationRow, Node, Store
from kedge.turns import Turn, UserBlock

_LED_TO = frozenset({"answered", "results", "failed", "compacted"})
"""What follows from a question, and is undone with it."""


@dataclass(frozen=True, slots=True)
class Resumable:
    """Where to go on with a question: the newest node below it, and whether that is the answer."""

    node: Node
    done: bool


async def find_node(
    store: Store, row: ConversationRow, here: Node, turn: Turn, at: int | str | None
) -> tuple[Node, int]:
    """The node that is meant, and how many of its blocks."""
    if at is None:
        return here, here.length
    if isinstance(at, int):
        node = await store.node(row, at)
        return node, node.length
    by_response = await store.node_of_response(row, at)
    if by_response:
        return by_response, by_response.length
    places = [index for index, block in enumerate(turn.blocks) if block.id == at]
    if not places:
        raise NotInStore(f"there is no response and no block {at!r} in this conversation")
    line = await store.path(row, here.id)
    kept = places[0] + 1
    return next(node for node in line if node.length >= kept and _reaches(line, node, kept)), kept


def _reaches(line: Sequence[Node], node: Node, kept: int) -> bool:
    """Whether nothing later on the path cuts off the first ``kept`` blocks of this node's path."""
    return all(later.kept >= kept for later in line if later.depth > node.depth)


def last_asked(line: Sequence[Node]) -> Node | None:
    """The last question on a path, if nothing but what it led to comes after it."""
    for node in reversed(line):
        if node.kind == "asked":
            return node
        if node.kind not in _LED_TO:
            return None
    return None


def up_to_question(turn: Turn) -> Turn:
    """The Turn up to what a user said last."""
    for place in range(len(turn), 0, -1):
        if isinstance(turn.blocks[place - 1], UserBlock):
            return turn.take(place)
    raise NotInStore("nothing was asked in this conversation yet")


def step_back(line: Sequence[Node]) -> Node:
    """The node before the last question, or before the last change."""
    place = len(line) - 1
    while place and line[place].kind in _LED_TO:
        place -= 1
    if not place:
        raise NotInStore("there is nothing to undo")
    return line[place - 1]


async def resumable(store: Store, row: ConversationRow, asked: int | None) -> Resumable:
    """Where to go on with a question that was never answered; the newest one here by default."""
    if asked is None:
        asked = _waiting_here(await store.pending(row), row.head)
    newest = await store.newest_below(row, asked)
    if newest.kind != "answered":
        return Resumable(newest, done=False)
    loaded = await store.load(row, newest.id)
    return Resumable(newest, done=not find_problems(loaded.turn()))


def _waiting_here(pending: Sequence[Node], head: int) -> int:
    """The newest question that was asked at the head and has no answer."""
    here = [node.id for node in pending if head in (node.id, node.parent)]
    if here:
        return here[-1]
    elsewhere = ", ".join(str(node.id) for node in pending)
    further = f"; elsewhere in its tree wait the nodes {elsewhere}" if elsewhere else ""
    raise NotInStore(f"no question waits for its answer where this conversation stands{further}")
