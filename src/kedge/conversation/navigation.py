"""Find nodes in the tree of a conversation: by id, before a question, after a crash."""

from collections.abc import Sequence
from dataclasses import dataclass

from kedge.errors import NotInStore
from kedge.planning import find_problems
from kedge.store import ConversationRow, Node, Store
from kedge.turns import Block, Turn, UserBlock

UNDO_STEP = 16
"""The number of nodes before the head that are read first to find the target of an undo."""
_FOLLOW_UP_KINDS = frozenset({"answered", "results", "failed", "compacted"})
"""Kinds of nodes that follow from a question, and are undone with it."""


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """The newest node below a question, and whether it is the final answer."""

    node: Node
    done: bool


async def find_position(
    store: Store, row: ConversationRow, blocks: Sequence[Block], at: int | str
) -> tuple[Node, int]:
    """Return the node for a node number, response id or block id, and the number of its blocks to use.

    A block id refers to one of ``blocks``, the blocks at the head.
    """
    index = next((i for i, block in enumerate(blocks) if block.id == at), None)
    if index is None:
        node = await store.find_node(row, at)
        return node, node.length
    path = await store.path(row)
    length = index + 1
    return next(
        node for node in path if node.length >= length and _retains_prefix(path, node, length)
    ), length


def _retains_prefix(path: Sequence[Node], node: Node, length: int) -> bool:
    """Return whether no later node of the path removes the first ``length`` blocks."""
    return all(later.kept >= length for later in path if later.depth > node.depth)


def find_last_question(path: Sequence[Node]) -> Node | None:
    """Return the last question of a path, if only its answers and tool results come after it."""
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


async def find_undo_target(store: Store, row: ConversationRow, head: int) -> Node:
    """Return the node before the last question or change."""
    limit = UNDO_STEP
    while True:
        path = await store.path(row, head, limit=limit)
        index = len(path) - 1
        while index and path[index].kind in _FOLLOW_UP_KINDS:
            index -= 1
        if index:
            return path[index - 1]
        if not path[0].parent:
            raise NotInStore("there is nothing to undo")
        limit *= UNDO_STEP


async def find_redo_target(store: Store, row: ConversationRow, head: int) -> Node:
    """Return the end of the newest step below the head: a question with its answer, or a change."""
    for step in reversed(await _find_continuations(store, row, head)):
        end = step
        while following := [
            node
            for node in await _find_continuations(store, row, end.id)
            if node.kind in _FOLLOW_UP_KINDS
        ]:
            end = following[-1]
        if end.kind != "asked":  # a question without an answer is continued by resume
            return end
    raise NotInStore("there is nothing to redo")


async def _find_continuations(store: Store, row: ConversationRow, node: int) -> list[Node]:
    """Return the nodes that the conversation itself added after a node, except failed ones."""
    return [
        each
        for each in await store.children(row, node)
        if each.conversation == row.number and each.kind != "failed"
    ]


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
