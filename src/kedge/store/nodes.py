"""The `nodes`, `links` and `blocks` tables: trees of nodes that share a prefix and add blocks.

A node that only appends shares the branch of its parent, if no other node has continued it: the links
of a branch are one range of positions, so a path has as many ranges as it has forks, however many nodes
there are. Everything else (an edit, a fork, a second answer) starts a new branch, which shares the
first positions of another. Only new blocks are written; nothing is rewritten.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import starmap
from operator import attrgetter
from typing import Any

from msgspec.structs import replace

from kedge._internal.arguments import describe_value
from kedge._internal.json_text import encode_text as encode
from kedge.errors import HeadConflict, InvalidTurn, NotInStore, StoreError
from kedge.events.request_record import RequestRecord
from kedge.store.conversations import (
    insert_conversation,
    lock_names,
    lock_tree_shared,
    require_continuable,
    require_conversation,
    resolve,
    select_conversation,
    select_head,
    select_titled,
    set_tags,
    swap_head,
    validate_members,
    write_members,
)
from kedge.store.database.postgres import PostgresTransaction
from kedge.store.database.transactions import Row, Tx, marks, split_chunks
from kedge.store.node_state import encode_first_state, encode_without_mode
from kedge.store.records import (
    MAX_INTEGER,
    ConversationRow,
    Node,
    NodeKind,
    Telemetry,
    is_row_number,
    new_row,
    validate_title,
)
from kedge.store.responses import (
    INSERT_RESPONSE,
    STORED_COLUMNS,
    hash_row,
    insert_telemetry,
    intern_scope,
    response_values,
)
from kedge.store.stored_blocks import (
    PREVIEW_CHARS,
    StoredBlock,
    decode_blocks,
    to_stored_block,
)
from kedge.turns import Block, Turn, new_id
from kedge.turns.frozen_json import EMPTY

NODE_COLUMNS = ", ".join(f"n.{name}" for name in Node.__struct_fields__)
"""The columns of the fields of a `Node`, in their order."""
COMPLETING_KINDS: tuple[NodeKind, ...] = ("answered", "results", "failed")
"""The kinds of nodes that complete a question. A conversation that is about to be deleted gets only such nodes."""
_NODE_VALUES = (*Node.__struct_fields__[1:], "checksum")
_INSERT_NODE = f"INSERT INTO nodes ({', '.join(_NODE_VALUES)}) VALUES ({marks(_NODE_VALUES)})"
_SELECT_LAST_BODIES = (
    "SELECT n.id, {} FROM nodes n JOIN links l ON l.branch = n.branch AND l.place = n.length - 1 "
    "JOIN blocks b ON b.id = l.block WHERE n.tree = ? AND n.length > n.kept"
)
# Every statement is a round trip, so on PostgreSQL the node of an exchange is added by a single one. It fails (by a
# division by zero) unless every block and its id are new; the transaction is then run again step by step.
_INSERT_AT_ONCE = f"""
WITH alive AS (
    SELECT c.number FROM conversations c JOIN nodes p ON p.tree = c.tree JOIN nodes root ON root.id = c.tree
    WHERE c.number = %(conversation)s AND c.id = %(id)s AND c.namespace = %(namespace)s
        AND p.id = %(parent)s AND p.length = %(kept)s
        AND (c.delete_at IS NULL OR %(kind)s IN ({", ".join(map(repr, COMPLETING_KINDS))}))
    FOR KEY SHARE OF root, c, p
), given AS (
    SELECT decode(block ->> 0, 'hex') AS hash, decode(block ->> 1, 'hex') AS id_hash,
        block ->> 2 AS body, place
    FROM jsonb_array_elements(%(blocks)s::jsonb) WITH ORDINALITY AS blocks (block, place)
), node AS (
    INSERT INTO nodes ({", ".join(_NODE_VALUES)})
    SELECT {", ".join(f"%({name})s" for name in _NODE_VALUES)} FROM alive
    RETURNING id, branch, conversation, kept
), made AS (
    INSERT INTO blocks (hash, id_hash, body)
    SELECT given.hash, given.id_hash, given.body FROM given, node
    ON CONFLICT (hash) DO NOTHING RETURNING id, hash
), linked AS (
    INSERT INTO links (branch, place, block)
    SELECT node.branch, node.kept + given.place - 1, made.id
    FROM node, given JOIN made ON made.hash = given.hash
), response AS (
    INSERT INTO responses SELECT (jsonb_populate_record(
        NULL::responses, %(response)s::jsonb || jsonb_build_object('node', node.id)
    )).* FROM node WHERE %(response)s::jsonb IS NOT NULL
), moved AS (
    UPDATE conversations SET head = node.id, updated_at = %(created_at)s FROM node
    WHERE number = node.conversation AND head = %(head)s RETURNING number
)
SELECT node.id, (SELECT COUNT(*) FROM moved),
    1 / (CASE WHEN (SELECT COUNT(*) FROM made) = (SELECT COUNT(*) FROM given)
        AND NOT EXISTS (SELECT 1 FROM blocks JOIN given ON given.id_hash = blocks.id_hash)
        THEN 1 ELSE 0 END)
FROM node
"""
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
_SELECT_BLOCKS_WITH_ID = "SELECT id FROM blocks WHERE id_hash IN ({})"
_SELECT_BLOCKS_ON_PATH = f"""{PATH_CTE}
SELECT b.body FROM path CROSS JOIN links l CROSS JOIN blocks b
WHERE l.branch = path.branch AND l.place < path.stop AND l.place < ? AND l.block IN ({{}}) AND b.id = l.block
"""
MAX_NUMBER_LENGTH = 100
"""How many digits of a node's number are read; Python rejects thousands of them."""
_get_columns = attrgetter(*Node.__struct_fields__)
# A child starts a branch, or has no blocks any more, or is the one that continues the branch of its parent.
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
    at = conversation.head if node is None else node
    query = f"SELECT {NODE_COLUMNS} FROM nodes n WHERE n.id = ? AND n.tree = ?"
    rows = tx.rows(query, (at, conversation.tree)) if is_row_number(at) else ()
    if not rows:
        raise missing_node(at)
    return Node(*rows[0])


def missing_node(node: object) -> NotInStore:
    """Return the error for a number that is not that of a node of the tree."""
    return NotInStore(f"there is no node {describe_value(node)} in this conversation")


def select_tree(tx: Tx, tree: int) -> list[Node]:
    """Return every node of a tree, in the order in which they were added."""
    rows = tx.rows(f"SELECT {NODE_COLUMNS} FROM nodes n WHERE n.tree = ? ORDER BY n.id", (tree,))
    return [Node(*row) for row in rows]


def list_nodes(tx: Tx, conversation: ConversationRow) -> list[Node]:
    """Return every node of the conversation's tree in order, including those of its forks."""
    return select_tree(tx, conversation.tree)


def parse_position(text: str) -> int | str:
    """Return the position that a user wrote: a node number, the id of a response, or ``head`` if it is empty."""
    if text.isascii() and text.isdecimal() and len(text) <= MAX_NUMBER_LENGTH:
        return int(text)
    return text or "head"


def find_node(tx: Tx, conversation: ConversationRow, at: int | str = "head") -> Node:
    """Return the node at a position of the conversation's tree."""
    position = conversation.head if at == "head" else at
    if isinstance(position, str):  # without an id, which some servers omit, no response is meant
        found = find_response_node(tx, conversation, position) if position else None
    else:
        found = get_node(tx, conversation, position) if is_row_number(position) else None
    if found is None:
        raise NotInStore(
            f"there is no node or response {describe_value(position)} in this conversation"
        )
    return found


def find_response_node(tx: Tx, conversation: ConversationRow, response_id: str) -> Node | None:
    """Return the newest node of the response with this provider's id, if there is one."""
    rows = tx.rows(
        f"SELECT {NODE_COLUMNS} FROM nodes n JOIN responses r ON r.node = n.id "
        "WHERE n.tree = ? AND r.provider_response_id = ? ORDER BY n.id DESC LIMIT 1",
        (conversation.tree, response_id),
    )
    return Node(*rows[0]) if rows else None


def list_children(tx: Tx, conversation: ConversationRow, node: int) -> list[Node]:
    """Return the nodes that continue from a node, of all conversations on the tree, in order."""
    return select_children(tx, get_node(tx, conversation, node))


def find_newest_below(tx: Tx, conversation: ConversationRow, node: int) -> Node:
    """Return the newest node that follows from a question and did not fail: itself, tool results, or an answer."""
    first = get_node(tx, conversation, node)
    turn = select_turn(tx, first)
    return [each for each in turn if each.kind != "failed" or each == first][-1]


def select_loose_ends(tx: Tx, conversation: ConversationRow, node: int = 0) -> list[Node]:
    """Return the nodes of a conversation after which a turn may have been interrupted, oldest first.

    They are questions without an answer, and answers and tool results that are at the head of no conversation and
    that nothing but failed requests follows.

    Args:
        tx: The transaction.
        conversation: The conversation.
        node: Only this node, if it is one of them.
    """
    tree = conversation.tree
    values = (tree, conversation.number, tree, tree, tree, *((node,) if node else ()))
    only = "AND n.id = ?" if node else ""
    rows = tx.rows(f"{_SELECT_LOOSE_ENDS} {only} ORDER BY n.id", values)
    return [Node(*row) for row in rows]


def select_last_bodies(tx: Tx, tree: int) -> dict[int, str]:
    """Return the last block that each node of a tree added, encoded; nodes that added none are omitted."""
    return dict(tx.rows(_SELECT_LAST_BODIES.format("b.body"), (tree,)))


def select_question_previews(
    tx: Tx, tree: int, *, conversation: int | None = None, limit: int = MAX_INTEGER
) -> dict[int, str]:
    """Return the beginning of the last block of each question of a tree or a conversation, encoded, oldest first."""
    query = _SELECT_LAST_BODIES.format(f"SUBSTR(b.body, 1, {PREVIEW_CHARS})")
    own = "" if conversation is None else " AND n.conversation = ?"
    values = (tree, *(() if conversation is None else (conversation,)), limit)
    return dict(tx.rows(f"{query} AND n.kind = 'asked'{own} ORDER BY n.id LIMIT ?", values))


def find_used_nodes(nodes: Sequence[Node], starts: Iterable[int]) -> dict[int, int]:
    """Return the nodes on the paths to some nodes, each with the number of its blocks that the paths use.

    A child may retain fewer blocks than its parent has, so the end of the parent may be on no path. Nodes
    that are missing in a damaged store are skipped.
    """
    by_id = {node.id: node for node in nodes}
    used: dict[int, int] = {}
    todo = [(start, by_id[start].length) for start in starts if start in by_id]
    while todo:
        name, length = todo.pop()
        if used.get(name, -1) >= length:
            continue
        used[name] = length
        node = by_id[name]
        if node.parent in by_id:
            todo.append((node.parent, min(node.kept, length)))
    return used


def create_conversation(
    tx: Tx, new: ConversationRow, now: float, root_created_at: float | None = None
) -> ConversationRow:
    """Create the conversation of a new row on a new tree, which begins with an empty root node."""
    number = insert_conversation(tx, new, now)
    created_at = now if root_created_at is None else root_created_at
    columns = (0, number, "root", 0, 0, 0, None, created_at)
    root = tx.insert(_INSERT_NODE, (0, 0, *columns, hash_row(columns)))
    tx.run("UPDATE nodes SET tree = id, branch = id WHERE id = ?", (root,))
    tx.run("UPDATE conversations SET tree = ?, head = ? WHERE number = ?", (root, root, number))
    set_tags(tx, number, new.tags)
    return select_conversation(tx, new.id)


def insert_row(
    tx: Tx, new: ConversationRow, blocks: Turn | Sequence[Block] = ()
) -> ConversationRow:
    """Create the conversation of a new row, with its first node and the blocks that it begins with."""
    turn = blocks if isinstance(blocks, Turn) else Turn(blocks)  # which checks them
    stored = [to_stored_block(block) for block in turn]
    state = encode_first_state(turn, new.mode)
    now = tx.clock()
    row = create_conversation(tx, new, now)
    if not (stored or state):
        return row
    root = get_node(tx, row)
    insert_node(
        tx, root, stored, conversation=row, kind="added", now=now, memory=state, head=root.id
    )
    return select_conversation(tx, row.id)


def create_titled(
    tx: Tx, title: str, *, data: Mapping[str, Any] = EMPTY
) -> tuple[ConversationRow, bool]:
    """Create a conversation with a title, unless there is one: several callers all get the same."""
    new = new_row(title, data=data)
    lock_names(tx)
    row = select_titled(tx, title)
    return (row, False) if row else (create_conversation(tx, new, tx.clock()), True)


def create_all(tx: Tx, chats: Sequence[Sequence[Block]]) -> list[ConversationRow]:
    """Create a conversation for each list of blocks, all or none of them."""
    return [insert_row(tx, new_row(), blocks) for blocks in chats]


def update_with(
    tx: Tx,
    name: str | ConversationRow,
    compute: Callable[[ConversationRow], Mapping[str, Any]],
) -> ConversationRow:
    """Change members of a conversation that depend on their present values, in one transaction."""
    found = resolve(tx, name)
    lock_tree_shared(tx, found.tree)
    row = resolve(tx, found, tx.dialect.for_update)
    changes = validate_members(compute(row))
    write_members(tx, row.number, changes)
    if "mode" in changes:
        _drop_own_mode(tx, row)
    return select_conversation(tx, row.id)


def _drop_own_mode(tx: Tx, row: ConversationRow) -> None:
    """Add a node without a mode of its own, which precedes that of the conversation, if the head has one."""
    head = get_node(tx, row)
    state = encode_without_mode(head.memory)
    if state != head.memory:
        insert_node(
            tx,
            head,
            (),
            conversation=row,
            kind="edited",
            now=tx.clock(),
            memory=state,
            head=head.id,
        )


def fork_conversation(
    tx: Tx, conversation: ConversationRow, at: int, title: str = ""
) -> ConversationRow:
    """Create a conversation that continues from a node of another, and shares the blocks up to it."""
    require_continuable(tx, conversation)
    get_node(tx, conversation, at)
    new = replace(conversation, id=new_id("conv"), title=validate_title(title))
    number = insert_conversation(tx, new, tx.clock())
    tx.run(
        "UPDATE conversations SET tree = ?, head = ?, forked_from = ?, forked_at = ? WHERE number = ?",
        (conversation.tree, at, conversation.id, at, number),
    )
    set_tags(tx, number, conversation.tags)
    return select_conversation(tx, new.id)


def move_head(tx: Tx, conversation: ConversationRow, node: Node, *, head: int) -> None:
    """Move the head to a node."""
    require_continuable(tx, conversation)
    get_node(tx, conversation, node.id)
    if not swap_head(tx, conversation.number, head, node.id, tx.clock()):
        raise HeadConflict(conversation.id, node.id, select_head(tx, conversation.number))


def note_telemetry(tx: Tx, conversation: ConversationRow, node: int, telemetry: Telemetry) -> None:
    """Record incidents, tool runs and exchanges of a node."""
    get_node(tx, conversation, node)
    insert_telemetry(tx, telemetry, conversation.number, node)


def insert_node(
    tx: Tx,
    parent: Node,
    blocks: Sequence[StoredBlock],
    *,
    conversation: ConversationRow,
    kind: NodeKind,
    now: float,
    kept: int | None = None,
    memory: str | None = None,
    response: RequestRecord | None = None,
    scope: int = 0,
    head: int | None = None,
    single_statement: bool = False,
) -> tuple[Node, bool]:
    """Add a node below ``parent`` that retains ``kept`` blocks (all by default) and adds ``blocks``.

    Args:
        tx: The transaction.
        parent: The parent node, as it was read; it must still exist, with the same length.
        blocks: The blocks to add.
        conversation: The conversation that adds the node; it must still exist.
        kind: The kind of the node.
        now: The time to record.
        kept: The number of blocks of the parent's path that the node retains.
        memory: The encoded state of the node, if any.
        response: The response of the node, if any.
        scope: The number of the response's scope, if it is known already.
        head: The node at which the head must be; it is moved from there to the new node.
        single_statement: Whether the transaction does nothing else.

    Returns:
        The new node, and whether the head was moved to it.

    Raises:
        InvalidTurn: The path would have two blocks with one id.
        NotInStore: The conversation or the parent was deleted, or the conversation is about to be deleted and the node
            does not complete a question.
    """
    _check_ids_differ(blocks)
    length = parent.length
    branch = parent.branch if blocks and kept in (None, length) else 0
    kept = length if kept is None else kept
    number = conversation.number
    columns = (parent.id, number, kind, kept, kept + len(blocks), parent.depth + 1, memory, now)
    values = (parent.tree, branch, *columns, hash_row(columns))
    if response and not scope:
        scope = intern_scope(tx, response.scope)
    row = response_values(response, scope) if response else None
    if branch and isinstance(tx, PostgresTransaction) and not tx.is_retry:
        added, moved = _insert_at_once(
            tx, conversation, values, blocks, row, head, single_statement=single_statement
        )
        if added:
            return Node(added, parent.tree, branch, *columns), moved
    lock_tree_shared(tx, parent.tree)
    _lock_parent(tx, conversation, parent)
    if kind not in COMPLETING_KINDS:
        require_continuable(tx, conversation)
    _check_ids_are_new(tx, parent, kept, blocks)
    # If another node has continued the branch, a link conflicts, and the transaction is run again.
    query = "SELECT 1 FROM links WHERE branch = ? AND place = ?"
    continues = branch and not (tx.is_retry and tx.rows(query, (branch, kept)))
    node_id = tx.insert(_INSERT_NODE, values)
    if not continues:
        branch = node_id
        tx.run("UPDATE nodes SET branch = id WHERE id = ?", (node_id,))
    for place, block in enumerate(blocks, kept):
        link = (branch, place, insert_block(tx, block))
        tx.run("INSERT INTO links (branch, place, block) VALUES (?, ?, ?)", link)
    if row:
        tx.run(INSERT_RESPONSE, (node_id, number, *row))
    moved = head is not None and swap_head(tx, number, head, node_id, now)
    return Node(node_id, parent.tree, branch, *columns), moved


def _check_ids_differ(blocks: Sequence[StoredBlock]) -> None:
    seen = set[str]()
    for block in blocks:
        if block.id in seen:
            raise InvalidTurn(f"two of the new blocks have the id {block.id!r}")
        seen.add(block.id)


def _check_ids_are_new(tx: Tx, parent: Node, kept: int, blocks: Sequence[StoredBlock]) -> None:
    """Check that the retained part of the path to a parent has no block with the id of a new one."""
    hashes = [block.id_hash for block in blocks]
    # Usually there is none in the store, and the path is not read.
    numbers = [number for (number,) in tx.rows_among(_SELECT_BLOCKS_WITH_ID, hashes)]
    bodies: list[str] = []
    for chunk in split_chunks(numbers):
        query = _SELECT_BLOCKS_ON_PATH.format(marks(chunk))
        bodies += (body for (body,) in tx.rows(query, (parent.id, kept, *chunk)))
    new_ids = {block.id for block in blocks}
    for existing in decode_blocks(bodies):
        if existing.id in new_ids:
            raise InvalidTurn(
                f"the path to node {parent.id} has a block with the id {existing.id!r} already; add the block with "
                "another id"
            )


def _insert_at_once(
    tx: PostgresTransaction,
    conversation: ConversationRow,
    node: Row,
    blocks: Sequence[StoredBlock],
    response: Row | None,
    head: int | None,
    *,
    single_statement: bool,
) -> tuple[int, bool]:
    """Add a node that continues its parent's branch, and move the head.

    Args:
        tx: The transaction; it is run again, without this shortcut, if a block is stored already.
        conversation: The conversation that adds it, which must still exist.
        node: The values of its row, starting with the tree.
        blocks: Its blocks.
        response: The values of `STORED_COLUMNS` of the node's response, if there is one.
        head: The node at which the head must be to be moved; None to leave it.
        single_statement: Whether the transaction does nothing else.

    Returns:
        The number of the node and whether the head moved. A number of 0 means that nothing was added, because
        the conversation or the parent was deleted.
    """
    stored: Row = response or ()
    columns = zip(STORED_COLUMNS, stored, strict=False)
    form = {key: f"\\x{each.hex()}" if isinstance(each, bytes) else each for key, each in columns}
    values: dict[str, Any] = {
        **dict(zip(_NODE_VALUES, node, strict=True)),
        "id": conversation.id,
        "namespace": tx.namespace,
        "blocks": encode([[each.hash.hex(), each.id_hash.hex(), each.body] for each in blocks]),
        "response": encode(form | {"conversation": conversation.number}) if form else None,
        "head": head,
    }
    found = tx.query(_INSERT_AT_ONCE, values, alone=single_statement).fetchall()
    return (found[0][0], bool(found[0][1])) if found else (0, False)


def _lock_parent(tx: Tx, conversation: ConversationRow, parent: Node) -> None:
    """Check that conversation and parent still exist, and prevent their deletion."""
    found = tx.rows(
        "SELECT n.length FROM conversations c JOIN nodes n ON n.tree = c.tree "
        "WHERE c.number = ? AND c.id = ? AND c.namespace = ? AND n.id = ? "
        f"{tx.dialect.for_key_share}",
        (conversation.number, conversation.id, tx.namespace, parent.id),
    )
    if found == [(parent.length,)]:
        return
    require_conversation(tx, conversation)
    if found:
        raise NotInStore(f"blocks of node {parent.id} were deleted; load the conversation again")
    raise missing_node(parent.id)


def hash_node(node: Node) -> bytes:
    """Return the checksum of a node's columns, except its id, tree and branch.

    `verify` checks those three by the structure of the tree. Ids are not known before the row is written.
    """
    return hash_row(_get_columns(node)[3:])


def insert_block(tx: Tx, block: StoredBlock) -> int:
    """Store a block that is not stored yet, and return its number."""
    insert = (
        "INSERT INTO blocks (hash, id_hash, body) VALUES (?, ?, ?) ON CONFLICT (hash) DO NOTHING"
    )
    if number := tx.insert(insert, (block.hash, block.id_hash, block.body)):
        return number
    # Without a lock it could be deleted before our link to it is visible.
    query = f"SELECT id FROM blocks WHERE hash = ? {tx.dialect.for_key_share}"
    found = tx.rows(query, (block.hash,))
    return found[0][0] if found else insert_block(tx, block)


def select_children(tx: Tx, node: Node) -> list[Node]:
    """Return the nodes that continue from a node, in the order in which they were added."""
    values = (node.id, node.tree, node.tree, node.branch, node.length, node.id)
    return sorted(starmap(Node, tx.rows(_SELECT_CHILDREN, values)), key=lambda each: each.id)


def select_turn(tx: Tx, question: Node) -> list[Node]:
    """Return a question and the answers, tool results and failed requests that follow from it, oldest first."""
    return [Node(*row) for row in tx.rows(_SELECT_TURN, (question.id, question.tree))]
