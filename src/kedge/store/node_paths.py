"""Load the path to a node: its blocks, its anchors and the state of its Turn, and compare paths."""

from collections.abc import Mapping, Sequence
from itertools import takewhile
from operator import itemgetter

from kedge._internal.arguments import check_count
from kedge.errors import StoreDamaged
from kedge.events.request_record import RequestRecord
from kedge.planning import AnchorRecord, find_problems, get_state, set_state
from kedge.planning.anchor_changes import apply_changes
from kedge.planning.anchors import drop_replaced
from kedge.store.database.transactions import Tx
from kedge.store.node_state import (
    CHANGES_PATTERN,
    decode_changes,
    decode_node_state,
    has_changes,
)
from kedge.store.nodes import (
    NODE_COLUMNS,
    PATH_CTE,
    find_newest_below,
    get_node,
    missing_node,
    select_children,
    select_loose_ends,
    select_turn,
)
from kedge.store.records import (
    MAX_INTEGER,
    ConversationRow,
    Differences,
    LoadedPath,
    Node,
    UnansweredQuestion,
    UnansweredStatus,
    has_failed,
    is_row_number,
)
from kedge.store.responses import ANCHOR_COLUMNS, anchor_from_row, select_responses
from kedge.store.stored_blocks import decode_blocks
from kedge.turns import Block, Turn
from kedge.turns.text_format import describe_change
from kedge.turns.turn import rename_turn

_SELECT_BLOCKS = f"""{PATH_CTE}
SELECT l.place, b.body FROM path CROSS JOIN links l CROSS JOIN blocks b
WHERE l.branch = path.branch AND l.place < path.stop AND b.id = l.block AND l.place >= ? AND l.place < ?
"""
_SELECT_SEGMENTS = f"{PATH_CTE} SELECT branch, stop FROM path ORDER BY branch"
# All responses above a node, also those whose blocks an edit or a compaction has dropped since: they are no
# anchors of its Turn, and explain why a request sends everything. Nodes of one branch only append to one another, so
# those above a node have smaller ids. As above, the number of steps is the number of forks and edits.
_LINE_CTE = """
WITH RECURSIVE line (branch, node) AS (
    SELECT branch, id FROM nodes WHERE id = ?
    UNION ALL
    SELECT parent.branch, parent.id
    FROM line JOIN nodes first ON first.id = line.branch JOIN nodes parent ON parent.id = first.parent
)
"""
_SELECT_RECORDS = f"""{_LINE_CTE}
SELECT n.id, {ANCHOR_COLUMNS} FROM line CROSS JOIN nodes n CROSS JOIN responses r
WHERE n.tree = ? AND n.branch = line.branch AND n.id <= line.node AND n.id > ?
AND r.node = n.id AND r.digest IS NOT NULL
"""
_SELECT_CHANGES = f"""{_LINE_CTE}
SELECT n.id, n.memory FROM line CROSS JOIN nodes n
WHERE n.tree = ? AND n.branch = line.branch AND n.id <= line.node AND n.memory LIKE ?
"""
_SELECT_NEWEST_RESPONSE = f"""{_LINE_CTE}
SELECT MAX(r.node) FROM line CROSS JOIN nodes n CROSS JOIN responses r
WHERE n.tree = ? AND n.branch = line.branch AND n.id <= line.node AND r.node = n.id
"""
_IS_ABOVE = f"""{_LINE_CTE}
SELECT 1 FROM line JOIN nodes n ON n.branch = line.branch AND n.id <= line.node WHERE n.id = ?
"""
# For the newest edits of a tree: the first blocks that differ, of the edit and of its parent. The walk is the one of
# the path query, from the ends of both paths to the branch with the first of these blocks.
_SELECT_CHANGED = """
WITH RECURSIVE edits AS (
    SELECT id, parent, kept FROM nodes WHERE tree = ? AND kind = 'edited' ORDER BY id DESC LIMIT ?
), path (edit, kept, is_new, branch, stop) AS (
    SELECT e.id, e.kept, n.id - e.parent, n.branch, n.length
    FROM edits e JOIN nodes n ON n.id = e.id OR n.id = e.parent
    UNION ALL
    SELECT path.edit, path.kept, path.is_new, parent.branch,
        CASE WHEN first.kept < path.stop THEN first.kept ELSE path.stop END
    FROM path JOIN nodes first ON first.id = path.branch JOIN nodes parent ON parent.id = first.parent
    WHERE first.kept > path.kept
)
SELECT path.edit, path.is_new, l.place, CASE WHEN LENGTH(b.body) <= ? THEN b.body END
FROM path CROSS JOIN links l CROSS JOIN blocks b
WHERE l.branch = path.branch AND l.place < path.stop AND l.place >= path.kept AND l.place < path.kept + 2
    AND b.id = l.block
"""
MAX_DESCRIBED_EDITS = 200
"""The number of the newest edits of a tree that are described."""
MAX_DESCRIBED_LENGTH = 65_536
"""The length of an encoded block up to which its change is described."""
_SELECT_ANCESTRY = f"""
WITH RECURSIVE line AS (
    SELECT {NODE_COLUMNS} FROM nodes n WHERE n.id = ?
    UNION ALL
    SELECT {NODE_COLUMNS} FROM line JOIN nodes n ON n.id = line.parent
) SELECT * FROM line LIMIT ?
"""
"""The recursion ends at the limit."""


def load_path(tx: Tx, conversation: ConversationRow, node: int | None = None) -> LoadedPath:
    """Return the blocks and the anchors on the path to a node."""
    return _load_path(tx, conversation, get_node(tx, conversation, node))


def load_short_path(tx: Tx, conversation: ConversationRow, max_blocks: int) -> LoadedPath | Node:
    """Return the path to the head when the row was read, or only its node if the path is long."""
    head = get_node(tx, conversation)
    if head.length > max_blocks:
        return head
    return _load_path(tx, conversation, head)


def _load_path(tx: Tx, conversation: ConversationRow, node: Node) -> LoadedPath:
    blocks = tuple(decode_blocks(load_bodies(tx, node, 0, node.length)))
    anchors = _load_anchors(tx, node, conversation.retention)
    return LoadedPath(node, blocks, *decode_node_state(node.memory, anchors, conversation.mode))


def _load_anchors(tx: Tx, node: Node, retention: float | None) -> Sequence[AnchorRecord]:
    """Return the records of the responses on the path to a node, with the changes that were made to them."""
    records = _load_records(tx, node, 0, retention)
    if not has_changes(node.memory):
        return drop_replaced(record for _, record in records)
    rows = tx.rows(_SELECT_CHANGES, (node.id, node.tree, CHANGES_PATTERN))
    changes = [(number, decode_changes(memory, retention)) for number, memory in rows]
    return apply_changes(records, changes)


def _load_records(
    tx: Tx, node: Node, known: int, retention: float | None
) -> list[tuple[int, AnchorRecord]]:
    """Return the records of the responses between a known node above this one, or 0 for none, and this one.

    Each has the number of its node.
    """
    rows = tx.rows(_SELECT_RECORDS, (node.id, node.tree, known))
    if any(scope not in tx.scopes for _, _, scope, *_ in rows):
        tx.scopes.update(tx.rows("SELECT number, name FROM scopes"))
    records: list[tuple[int, AnchorRecord]] = []
    for number, *columns in rows:
        scope = tx.scopes.get(columns[1], "")
        records.append((number, anchor_from_row(tuple(columns), scope, retention)))
    return records


def find_newest_response(
    tx: Tx, conversation: ConversationRow, node: int | None = None
) -> RequestRecord | None:
    """Return the newest response on the path to a node, or None if there is none."""
    end = get_node(tx, conversation, node)
    ((newest,),) = tx.rows(_SELECT_NEWEST_RESPONSE, (end.id, end.tree))
    if newest is None:
        return None
    (response,) = select_responses(tx, "WHERE r.node = ?", (newest,))
    return response


def load_turn(
    tx: Tx,
    conversation: ConversationRow,
    node: int,
    *,
    known: Node,
    turn: Turn,
) -> tuple[Node, Turn]:
    """Return a node and its Turn, reading only the blocks that the Turn of a known node does not have."""
    end = get_node(tx, conversation, node)
    shared = _count_shared(tx, end, known)
    new_blocks = decode_blocks(load_bodies(tx, end, shared, end.length))
    anchors = _load_anchors_after(tx, end, conversation.retention, known=known, turn=turn)
    state, data = decode_node_state(end.memory, anchors, conversation.mode)
    removed_data = dict.fromkeys(turn.data)
    turn = rename_turn(turn, conversation.id).take(shared).append(*new_blocks)
    return end, set_state(turn.with_data({**removed_data, **data}), state)


def _load_anchors_after(
    tx: Tx, end: Node, retention: float | None, *, known: Node, turn: Turn
) -> Sequence[AnchorRecord]:
    """Return the anchors at a node, reading only later records if the Turn of a known node has the earlier ones."""
    is_above = bool(tx.rows(_IS_ABOVE, (end.id, known.id)))
    if not is_above or has_changes(end.memory):
        return _load_anchors(tx, end, retention)
    state = get_state(turn)
    for _, record in _load_records(tx, end, known.id, retention):
        state = state.with_anchor(record)
    return state.anchors


def _count_shared(tx: Tx, left: Node, right: Node) -> int:
    """Return the number of blocks at the start of two paths that are at the same positions of the same branches.

    The paths are ranges of positions on branches, so no block is read.
    """
    shared = 0
    segments = tx.rows(_SELECT_SEGMENTS, (left.id,))
    other_segments = tx.rows(_SELECT_SEGMENTS, (right.id,))
    for (branch, stop), (other_branch, other_stop) in zip(segments, other_segments, strict=False):
        if branch != other_branch:
            break
        shared = min(stop, other_stop)
        if stop != other_stop:
            break
    return shared


def load_last_blocks(
    tx: Tx, conversation: ConversationRow, count: int, node: int | None = None
) -> tuple[Block, ...]:
    """Return the last blocks on the path to a node, without reading the others."""
    end = get_node(tx, conversation, node)
    start = max(end.length - check_count("count", count), 0)
    return tuple(decode_blocks(load_bodies(tx, end, start, end.length)))


def load_bodies(tx: Tx, node: Node, start: int, stop: int, max_length: int = 0) -> list[str]:
    """Return the encoded blocks at some positions of the path to a node, or the beginning of each."""
    query = _SELECT_BLOCKS
    if max_length:
        query = query.replace("b.body", f"SUBSTR(b.body, 1, {max_length})")
    return [body for _, body in sorted(tx.rows(query, (node.id, start, stop)))]


def describe_edits(tx: Tx, tree: int, nodes: Mapping[int, Node]) -> dict[int, str]:
    """Return one line about what each of the newest edits of a tree changed, by node; long blocks are left out.

    Args:
        tx: The transaction.
        tree: The tree.
        nodes: Its nodes by number.
    """
    if not any(node.kind == "edited" for node in nodes.values()):
        return {}
    before: dict[int, list[str | None]] = {}
    after: dict[int, list[str | None]] = {}
    values = (tree, MAX_DESCRIBED_EDITS, MAX_DESCRIBED_LENGTH)
    for edit, is_new, _, body in sorted(tx.rows(_SELECT_CHANGED, values), key=itemgetter(0, 1, 2)):
        side = after if is_new else before
        side.setdefault(edit, []).append(body)
    return {
        edit: _describe_edit(nodes, edit, before.get(edit, []), after.get(edit, []))
        for edit in sorted(before.keys() | after.keys())
    }


def _describe_edit(
    nodes: Mapping[int, Node], edit: int, before: Sequence[str | None], after: Sequence[str | None]
) -> str:
    """Return one line about an edit from the first encoded blocks that differ; None stands for a long one."""
    old_bodies = [body for body in before if body is not None]
    new_bodies = [body for body in after if body is not None]
    if len(old_bodies) < len(before) or len(new_bodies) < len(after):
        return ""
    try:
        old_blocks = decode_blocks(old_bodies)
        new_blocks = decode_blocks(new_bodies)
    except StoreDamaged:  # ``verify`` reports it
        return ""
    parent = nodes.get(nodes[edit].parent)
    removed = len(old_blocks)
    if parent is not None:
        removed = parent.length - nodes[edit].kept
    return describe_change(old_blocks, new_blocks, removed)


def list_pending(tx: Tx, conversation: ConversationRow) -> list[Node]:
    """Return the questions of a conversation that have no answer, oldest first.

    They are in progress, or were interrupted while the model answered or a tool ran.
    """
    return [unanswered.question for unanswered in find_unanswered(tx, conversation)]


def find_unanswered_after(
    tx: Tx, conversation: ConversationRow, node: int
) -> list[UnansweredQuestion]:
    """Return the pending questions that follow directly after a node, and the node itself if it is one."""
    return find_unanswered(tx, conversation, get_node(tx, conversation, node))


def find_unanswered(
    tx: Tx, conversation: ConversationRow, node: Node | None = None
) -> list[UnansweredQuestion]:
    """Return the questions of a conversation without a complete answer, oldest first.

    Args:
        tx: The transaction.
        conversation: The conversation.
        node: Only questions directly after this node, and this node itself; all by default.
    """
    if node is None:
        ends = select_loose_ends(tx, conversation)
    else:
        ends = _select_loose_ends_after(tx, conversation, node)
    questions: list[UnansweredQuestion] = []
    for end in ends:
        unanswered = _check_end(tx, conversation, end)
        if unanswered:
            questions.append(unanswered)
    return sorted(questions, key=lambda unanswered: unanswered.question.id)


def _select_loose_ends_after(tx: Tx, conversation: ConversationRow, node: Node) -> list[Node]:
    """Return the loose ends of the questions directly after a node, and of the node itself."""
    ends: list[Node] = []
    for question in (node, *select_children(tx, node)):
        if question.kind == "asked":
            newest = find_newest_below(tx, conversation, question.id)
            ends += select_loose_ends(tx, conversation, newest.id)
    return ends


def _check_end(tx: Tx, conversation: ConversationRow, end: Node) -> UnansweredQuestion | None:
    """Return the question whose run was interrupted after a node, if it was."""
    if end.kind == "answered" and not _has_open_calls(tx, end):
        return None
    question = end
    while question.kind in ("answered", "results"):
        question = get_node(tx, conversation, question.parent)
    if question.kind != "asked":
        return None
    turn = select_turn(tx, question)
    if end != [node for node in turn if node.kind != "failed"][-1]:
        return None
    last = turn[-1]
    return UnansweredQuestion(question, last, _find_status(tx, last))


def _find_status(tx: Tx, last: Node) -> UnansweredStatus:
    """Return the status of a question by the last node of its turn."""
    if last.kind != "failed":
        return "pending"
    rows = tx.rows("SELECT status, is_resent FROM responses WHERE node = ?", (last.id,))
    if not rows:  # without a request, a tool was stopped
        return "cancelled"
    ((status, is_resent),) = rows
    if has_failed(status, is_resent=bool(is_resent)):
        return "failed"
    if is_resent:  # a request that was to be sent again, and was not, was interrupted
        return "pending"
    return "cancelled"


def _has_open_calls(tx: Tx, node: Node) -> bool:
    """Return whether the blocks that a node added contain a call without a result."""
    bodies = load_bodies(tx, node, node.kept, node.length)
    return bool(find_problems(Turn(decode_blocks(bodies))))


def load_ancestry(
    tx: Tx, conversation: ConversationRow, node: int | None = None, *, limit: int | None = None
) -> list[Node]:
    """Return the nodes from the root to a node (by default the head when the row was read)."""
    end = conversation.head if node is None else node
    max_nodes = MAX_INTEGER
    if limit is not None:
        max_nodes = min(check_count("limit", limit), MAX_INTEGER)
    if not is_row_number(end):
        raise missing_node(end)
    path = [Node(*row) for row in tx.rows(_SELECT_ANCESTRY, (end, max_nodes))]
    if not path or path[0].tree != conversation.tree:
        raise missing_node(end)
    return sorted(path, key=lambda node: node.depth)


def find_common_ancestor(tx: Tx, conversation: ConversationRow, left: int, right: int) -> Node:
    """Return the newest node that is on the paths to both nodes."""
    paths = [load_ancestry(tx, conversation, node) for node in (left, right)]
    return [node for node, other in zip(*paths, strict=False) if node == other][-1]


def diff_paths(tx: Tx, conversation: ConversationRow, left: int, right: int) -> Differences:
    """Return the blocks of each of two paths after their common prefix."""
    left_end = get_node(tx, conversation, left)
    right_end = get_node(tx, conversation, right)
    shared = _count_shared(tx, left_end, right_end)
    left_bodies = load_bodies(tx, left_end, shared, left_end.length)
    right_bodies = load_bodies(tx, right_end, shared, right_end.length)
    # Blocks with the same text on different branches are the same, too.
    pairs = zip(left_bodies, right_bodies, strict=False)
    equal = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    return Differences(
        shared + equal,
        tuple(decode_blocks(left_bodies[equal:])),
        tuple(decode_blocks(right_bodies[equal:])),
    )
