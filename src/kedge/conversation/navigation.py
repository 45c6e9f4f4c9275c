"""Places in the tree of a conversation: by node, response or block, before a question, after a crash."""

from collections.abc import Sequence
from dataclasses import dataclass

from kedge.errors import NotInStore
from kedge.planning import find_problems
from kedge.store import ConversationRow, Node, Store
from kedge.turns import Turn, UserBlock

_FOLLOW_UP_KINDS = frozenset({"answered", "results", "failed", "compacted"})
"""What follows from a question, and is undone with it."""


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """Where to go on with a question: the newest node below it, and whether that is the answer."""

    node: Node
    done: bool


async def find_node(
    store: Store, row: ConversationRow, current: Node, turn: Turn, at: int | str | None
) -> tuple[Node, int]:
    """The node that is meant, and how many of its blocks."""
    if at is None:
        return current, current.length
    if isinstance(at, int):
        node = await store.node(row, at)
        return node, node.length
    by_response = await store.node_of_response(row, at)
    if by_response:
        return by_response, by_response.length
    places = [index for index, block in enumerate(turn.blocks) if block.id == at]
    if not places:
        raise NotInStore(f"there is no response and no block {at!r} in this conversation")
    line = await store.path(row, current.id)
    kept = places[0] + 1
    return next(
        node for node in line if node.length >= kept and _retains_prefix(line, node, kept)
    ), kept


def _retains_prefix(path: Sequence[Node], node: Node, kept: int) -> bool:
    """Whether nothing later on the path cuts off the first ``kept`` blocks of this node's path."""
    return all(later.kept >= kept for later in path if later.depth > node.depth)


def find_last_question(path: Sequence[Node]) -> Node | None:
    """The last question on a path, if nothing but what it led to comes after it."""
    for node in reversed(path):
        if node.kind == "asked":
            return node
        if node.kind not in _FOLLOW_UP_KINDS:
            return None
    return None


def truncate_to_question(turn: Turn) -> Turn:
    """The Turn up to what a user said last."""
    for place in range(len(turn), 0, -1):
        if isinstance(turn.blocks[place - 1], UserBlock):
            return turn.take(place)
    raise NotInStore("nothing was asked in this conversation yet")


def find_undo_target(path: Sequence[Node]) -> Node:
    """The node before the last question, or before the last change."""
    place = len(path) - 1
    while place and path[place].kind in _FOLLOW_UP_KINDS:
        place -= 1
    if not place:
        raise NotInStore("there is nothing to undo")
    return path[place - 1]


async def find_resume_point(
    store: Store, row: ConversationRow, question: int | None
) -> ResumePoint:
    """Where to go on with a question that was never answered; the newest one here by default."""
    if question is None:
        question = _find_pending_question(await store.pending(row), row.head)
    newest = await store.newest_below(row, question)
    if newest.kind != "answered":
        return ResumePoint(newest, done=False)
    loaded = await store.load(row, newest.id)
    return ResumePoint(newest, done=not find_problems(loaded.turn()))


def _find_pending_question(pending: Sequence[Node], head: int) -> int:
    """The newest question that was asked at the head and has no answer."""
    here = [node.id for node in pending if head in (node.id, node.parent)]
    if here:
        return here[-1]
    elsewhere = ", ".join(str(node.id) for node in pending)
    further = f"; elsewhere in its tree wait the nodes {elsewhere}" if elsewhere else ""
    raise NotInStore(f"no question waits for its answer where this conversation stands{further}")
