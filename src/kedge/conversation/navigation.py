"""Find nodes in the tree of a conversation: by id, before a question, after a crash."""

from collections.abc import Sequence
from dataclasses import dataclass

from kedge.errors import NotInStore
from kedge.planning import find_problems
from kedge.store import ConversationRow, Node, Store
from kedge.turns import Turn, UserBlock

_FOLLOW_UP_KINDS = frozenset({"answered", "results", "failed", "compacted"})
"""Kinds of nodes that follow from a question, and are undone with it."""


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """The newest node below a question, and whether it is the final answer."""

    node: Node
    done: bool


async def find_node(
    store: Store, row: ConversationRow, current: Node, turn: Turn, at: int | str | None
) -> tuple[Node, int]:
    """Return the node for a node number, response id or block id, and how many of its blocks."""
    if at is None:
        return current, current.length
    if isinstance(at, int):
        node = await store.node(row, at)
        return node, node.length
    by_response = await store.node_of_response(row, at)
    if by_response:
        return by_response, by_response.length
    indexes = [index for index, block in enumerate(turn.blocks) if block.id == at]
    if not indexes:
        raise NotInStore(f"there is no response and no block {at!r} in this conversation")
    path = await store.path(row, current.id)
    kept = indexes[0] + 1
    return next(
        node for node in path if node.length >= kept and _retains_prefix(path, node, kept)
    ), kept


def _retains_prefix(path: Sequence[Node], node: Node, kept: int) -> bool:
    """Return whether no later node of the path removes the first ``kept`` blocks."""
    return all(later.kept >= kept for later in path if later.depth > node.depth)


def find_last_question(path: Sequence[Node]) -> Node | None:
    """Return the last question of a path, if only what follows from it comes after it."""
    for node in reversed(path):
        if node.kind == "asked":
            return node
        if node.kind not in _FOLLOW_UP_KINDS:
            return None
    return None


def truncate_to_question(turn: Turn) -> Turn:
    """Return the Turn up to the last user block."""
    for length in range(len(turn), 0, -1):
        if isinstance(turn.blocks[length - 1], UserBlock):
            return turn.take(length)
    raise NotInStore("this conversation has no question yet; send one first")


def find_undo_target(path: Sequence[Node]) -> Node:
    """Return the node before the last question or change."""
    index = len(path) - 1
    while index and path[index].kind in _FOLLOW_UP_KINDS:
        index -= 1
    if not index:
        raise NotInStore("there is nothing to undo")
    return path[index - 1]


async def find_resume_point(
    store: Store, row: ConversationRow, question: int | None
) -> ResumePoint:
    """Return where to continue with a question; by default the newest unanswered one at the head."""
    if question is None:
        question = _find_pending_question(await store.pending(row), row.head)
    newest = await store.newest_below(row, question)
    if newest.kind != "answered":
        return ResumePoint(newest, done=False)
    loaded = await store.load(row, newest.id)
    return ResumePoint(newest, done=not find_problems(loaded.turn()))


def _find_pending_question(pending: Sequence[Node], head: int) -> int:
    """Return the newest question at the head that has no answer."""
    here = [node.id for node in pending if head in (node.id, node.parent)]
    if here:
        return here[-1]
    elsewhere = ", ".join(str(node.id) for node in pending)
    further = f"; unanswered elsewhere in its tree: nodes {elsewhere}" if elsewhere else ""
    raise NotInStore(f"there is no unanswered question at the head of this conversation{further}")
