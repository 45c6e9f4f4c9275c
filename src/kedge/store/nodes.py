"""The `nodes`, `links` and `blocks` tables: trees of nodes that share a prefix and add blocks.

A node that only appends shares the branch of its parent, if no other node has continued it: the links
of a branch are one range of positions, so a path has as many ranges as it has forks, however many nodes
there are. Everything else (an edit, a fork, a second answer) starts a new branch, which shares the
first positions of another. Only new blocks are written; nothing is rewritten.
"""

from collections.abc import Iterable, Sequence

from kedge._internal.arguments import describe_value
from kedge.errors import NotInStore, StoreError
from kedge.store.database.transactions import Tx, join_filters
from kedge.store.records import (
    MAX_INTEGER,
    ConversationRow,
    Node,
    is_row_number,
)
from kedge.store.stored_blocks import (
    PREVIEW_CHARS,
)

NODE_COLUMNS = ", ".join(f"n.{name}" for name in Node.__struct_fields__)
"""The columns of the fields of a `Node`, in their order."""
_SELECT_LAST_BODIES = (
    "SELECT n.id, {} FROM nodes n JOIN links l ON l.branch = n.branch AND l.place = n.length - 1 "
    "JOIN blocks b ON b.id = l.block WHERE n.tree = ? AND n.length > n.kept"
)
# The path query. The obvious way to load a conversation is to walk from its node to the root, one row
# per node, and to find which blocks of each node later nodes retain: ten thousand nodes are ten
# thousand steps of recursion. But consecutive appends share a branch, whose links are one range of an
# index, so this query walks over branches instead: a branch has the number of its first node, whose
# parent is on the branch before it. `stop` is where a branch ends on this path: at the node's length
# for the last branch; for each earlier one, at the length that the next branch retains (`first.kept`), or at
# an earlier `stop` if a later branch retains even less, because a branch may retain only a part of what its
# parent retains. A branch that retains nothing ends the walk. The cost is the number of forks and edits on
# the path, plus the blocks. The joins that use it are CROSS JOINs because SQLite does not reorder them: with
# a plain JOIN it may scan all links, because it has no statistics.
PATH_CTE = """
WITH RECURSIVE path (branch, stop) AS (
    SELECT branch, length FROM nodes WHERE id = ?
    UNION ALL
    SELECT parent.branch, CASE WHEN first.kept < path.stop THEN first.kept ELSE path.stop END
    FROM path JOIN nodes first ON first.id = path.branch JOIN nodes parent ON parent.id = first.parent
    WHERE first.kept > 0
)
"""
MAX_NUMBER_LENGTH = 100
"""How many digits of a node's number are read; Python rejects thousands of them."""
# A child starts a branch, has no blocks any more, or continues the branch of its parent.
_SELECT_CHILDREN = f"""
SELECT {NODE_COLUMNS} FROM nodes n
WHERE n.parent = ? AND n.parent > 0 AND (n.branch = n.id OR n.kept = n.length) AND n.tree = ?
UNION
SELECT {NODE_COLUMNS} FROM nodes n WHERE n.tree = ? AND n.branch = ? AND n.kept = ? AND n.parent = ?
"""
_SELECT_TURN = f"""
WITH RECURSIVE below (id) AS (
    SELECT id FROM nodes WHERE id = ?
    UNION ALL
    SELECT n.id FROM below JOIN nodes n ON n.parent = below.id
    WHERE n.tree = ? AND n.kind IN ('answered', 'results', 'failed')
) SELECT {NODE_COLUMNS} FROM nodes n JOIN below ON below.id = n.id ORDER BY n.id
"""
_SELECT_LOOSE_ENDS = f"""
SELECT {NODE_COLUMNS} FROM nodes n WHERE n.tree = ? AND n.conversation = ? AND (
    n.kind = 'asked' AND n.id NOT IN (
        SELECT m.parent FROM nodes m WHERE m.tree = ? AND m.kind IN ('answered', 'results')
    ) OR n.kind IN ('answered', 'results') AND n.id NOT IN (
        SELECT m.parent FROM nodes m WHERE m.tree = ? AND m.kind <> 'failed'
    ) AND n.id NOT IN (SELECT c.head FROM conversations c WHERE c.tree = ?)
)
"""


class ResponseStored(StoreError):
    """Another process has stored the answer of a response in the background; ``Conversation`` continues from it.

    Attributes:
        node: The node with the answer.
    """

    def __init__(self, node: Node) -> None:
        super().__init__(f"another process has stored this response, at node {node.id}")
        self.node = node


def get_node(tx: Tx, conversation: ConversationRow, node: int | None = None) -> Node:
    """Return a node of the conversation's tree, by default the head when the row was read."""
    number = conversation.head if node is None else node
    if is_row_number(number):
        query = f"SELECT {NODE_COLUMNS} FROM nodes n WHERE n.id = ? AND n.tree = ?"
        for row in tx.rows(query, (number, conversation.tree)):
            return Node(*row)
    raise missing_node(number)


def missing_node(node: object) -> NotInStore:
    """Return the error for a number that no node of the tree has."""
    return NotInStore(f"there is no node {describe_value(node)} in this conversation")


def select_tree(tx: Tx, tree: int) -> list[Node]:
    """Return every node of a tree, in the order in which they were added."""
    rows = tx.rows(f"SELECT {NODE_COLUMNS} FROM nodes n WHERE n.tree = ? ORDER BY n.id", (tree,))
    return [Node(*row) for row in rows]


def list_nodes(tx: Tx, conversation: ConversationRow) -> list[Node]:
    """Return every node of the conversation's tree in order, including the nodes of its forks."""
    return select_tree(tx, conversation.tree)


def parse_position(text: str) -> int | str:
    """Return the position that a user wrote: a node number, the id of a response, or ``head`` if it is empty."""
    if text.isascii() and text.isdecimal() and len(text) <= MAX_NUMBER_LENGTH:
        return int(text)
    return text or "head"


def find_node(tx: Tx, conversation: ConversationRow, at: int | str = "head") -> Node:
    """Return the node at a position of the conversation's tree."""
    if at == "head":
        return get_node(tx, conversation)
    node: Node | None = None
    if isinstance(at, int) and is_row_number(at):
        node = get_node(tx, conversation, at)
    elif isinstance(at, str) and at:  # some servers omit the id of a response
        node = find_response_node(tx, conversation, at)
    if node is None:
        raise NotInStore(f"there is no node or response {describe_value(at)} in this conversation")
    return node


def find_response_node(tx: Tx, conversation: ConversationRow, response_id: str) -> Node | None:
    """Return the newest node of the response with this provider's id, if there is one."""
    rows = tx.rows(
        f"SELECT {NODE_COLUMNS} FROM nodes n JOIN responses r ON r.node = n.id "
        "WHERE n.tree = ? AND r.provider_response_id = ? ORDER BY n.id DESC LIMIT 1",
        (conversation.tree, response_id),
    )
    for row in rows:
        return Node(*row)
    return None


def list_children(tx: Tx, conversation: ConversationRow, node: int) -> list[Node]:
    """Return the nodes that continue from a node, of all conversations on the tree, in order."""
    return select_children(tx, get_node(tx, conversation, node))


def find_newest_below(tx: Tx, conversation: ConversationRow, node: int) -> Node:
    """Return the newest node that follows from a question and did not fail: itself, tool results, or an answer."""
    first = get_node(tx, conversation, node)
    turn = select_turn(tx, first)
    return [node for node in turn if node.kind != "failed" or node == first][-1]


def select_loose_ends(tx: Tx, conversation: ConversationRow, node: int = 0) -> list[Node]:
    """Return the nodes of a conversation after which a run may have been interrupted, oldest first.

    They are questions without an answer, and answers and tool results that are at the head of no conversation and
    that nothing but failed requests follows.

    Args:
        tx: The transaction.
        conversation: The conversation.
        node: Only this node, if it is one of them.
    """
    tree = conversation.tree
    query = _SELECT_LOOSE_ENDS
    values = [tree, conversation.number, tree, tree, tree]
    if node:
        query += " AND n.id = ?"
        values.append(node)
    return [Node(*row) for row in tx.rows(f"{query} ORDER BY n.id", values)]


def select_last_bodies(tx: Tx, tree: int) -> dict[int, str]:
    """Return the last block that each node of a tree added, encoded; nodes that added none are omitted."""
    return dict(tx.rows(_SELECT_LAST_BODIES.format("b.body"), (tree,)))


def select_question_previews(
    tx: Tx, tree: int, *, conversation: int | None = None, limit: int = MAX_INTEGER
) -> dict[int, str]:
    """Return the beginning of the last block of each question of a tree or a conversation, encoded, oldest first."""
    query = _SELECT_LAST_BODIES.format(f"SUBSTR(b.body, 1, {PREVIEW_CHARS})")
    where, values = join_filters("n.kind = 'asked'", {"n.conversation = ?": conversation})
    rows = tx.rows(f"{query} AND {where} ORDER BY n.id LIMIT ?", (tree, *values, limit))
    return dict(rows)


def find_used_nodes(nodes: Sequence[Node], starts: Iterable[int]) -> dict[int, int]:
    """Return the nodes on the paths to some nodes, each with the number of its blocks that the paths use.

    A child may retain fewer blocks than its parent has, so the end of the parent may be on no path. Nodes
    that are missing in a damaged store are skipped.
    """
    by_id = {node.id: node for node in nodes}
    used: dict[int, int] = {}
    waiting = [(start, by_id[start].length) for start in starts if start in by_id]
    while waiting:
        number, length = waiting.pop()
        if used.get(number, -1) >= length:
            continue
        used[number] = length
        node = by_id[number]
        if node.parent in by_id:
            waiting.append((node.parent, min(node.kept, length)))
    return used


def select_children(tx: Tx, node: Node) -> list[Node]:
    """Return the nodes that continue from a node, in the order in which they were added."""
    values = (node.id, node.tree, node.tree, node.branch, node.length, node.id)
    children = [Node(*row) for row in tx.rows(_SELECT_CHILDREN, values)]
    return sorted(children, key=lambda child: child.id)


def select_turn(tx: Tx, question: Node) -> list[Node]:
    """Return a question and the answers, tool results and failed requests that follow from it, oldest first."""
    return [Node(*row) for row in tx.rows(_SELECT_TURN, (question.id, question.tree))]
