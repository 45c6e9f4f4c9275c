"""Add a node with its blocks and its response below another one.

The steps are the same for both databases. On PostgreSQL each of them would be a round trip, so there the usual case
is a single statement: a node that continues the branch of its parent, with blocks that are all new.
"""

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

from msgspec.structs import replace

from kedge._internal.json_text import encode_text as encode
from kedge.errors import InvalidTurn, NotInStore
from kedge.events.request_record import RequestRecord
from kedge.store.conversations import (
    lock_tree_shared,
    require_continuable,
    require_conversation,
    swap_head,
)
from kedge.store.database.postgres import PostgresTransaction
from kedge.store.database.transactions import Row, Tx, marks, split_chunks
from kedge.store.nodes import PATH_CTE, missing_node
from kedge.store.records import ConversationRow, Node, NodeKind
from kedge.store.responses import (
    INSERT_RESPONSE,
    STORED_COLUMNS,
    hash_row,
    intern_scope,
    response_values,
)
from kedge.store.stored_blocks import StoredBlock, decode_blocks

COMPLETING_KINDS: tuple[NodeKind, ...] = ("answered", "results", "failed")
"""The kinds of nodes that complete a question. A conversation that is about to be deleted gets only such nodes."""
_NODE_VALUES = (*Node.__struct_fields__[1:], "checksum")
_INSERT_NODE = f"INSERT INTO nodes ({', '.join(_NODE_VALUES)}) VALUES ({marks(_NODE_VALUES)})"
# It adds nothing, and returns no row, if the conversation or the parent is gone, or if a block or its id is stored
# already. If another transaction stores one of them meanwhile, or continues the branch, a unique key is violated.
_INSERT_IN_ONE_STATEMENT = f"""
WITH new_blocks AS (
    SELECT decode(block ->> 0, 'hex') AS hash, decode(block ->> 1, 'hex') AS id_hash,
        block ->> 2 AS body, place
    FROM jsonb_array_elements(%(blocks)s::jsonb) WITH ORDINALITY AS blocks (block, place)
), alive AS (
    SELECT c.number FROM conversations c JOIN nodes p ON p.tree = c.tree JOIN nodes root ON root.id = c.tree
    WHERE c.number = %(conversation)s AND c.id = %(id)s AND c.namespace = %(namespace)s
        AND p.id = %(parent)s AND p.length = %(kept)s
        AND (c.delete_at IS NULL OR %(kind)s IN ({", ".join(map(repr, COMPLETING_KINDS))}))
        AND NOT EXISTS (SELECT 1 FROM blocks b JOIN new_blocks n ON b.hash = n.hash)
        AND NOT EXISTS (SELECT 1 FROM blocks b JOIN new_blocks n ON b.id_hash = n.id_hash)
    FOR KEY SHARE OF root, c, p
), node AS (
    INSERT INTO nodes ({", ".join(_NODE_VALUES)})
    SELECT {", ".join(f"%({name})s" for name in _NODE_VALUES)} FROM alive
    RETURNING id, branch, conversation, kept
), inserted AS (
    INSERT INTO blocks (hash, id_hash, body)
    SELECT new_blocks.hash, new_blocks.id_hash, new_blocks.body FROM new_blocks, node
    RETURNING id, hash
), linked AS (
    INSERT INTO links (branch, place, block)
    SELECT node.branch, node.kept + new_blocks.place - 1, inserted.id
    FROM node, new_blocks JOIN inserted ON inserted.hash = new_blocks.hash
), response AS (
    INSERT INTO responses SELECT (jsonb_populate_record(
        NULL::responses, %(response)s::jsonb || jsonb_build_object('node', node.id)
    )).* FROM node WHERE %(response)s::jsonb IS NOT NULL
), moved AS (
    UPDATE conversations SET head = node.id, updated_at = %(created_at)s FROM node
    WHERE number = node.conversation AND head = %(head)s RETURNING number
)
SELECT node.id, (SELECT COUNT(*) FROM moved) FROM node
"""
_SELECT_BLOCKS_WITH_ID = "SELECT id FROM blocks WHERE id_hash IN ({})"
_SELECT_BLOCKS_ON_PATH = f"""{PATH_CTE}
SELECT b.body FROM path CROSS JOIN links l CROSS JOIN blocks b
WHERE l.branch = path.branch AND l.place < path.stop AND l.place < ? AND l.block IN ({{}}) AND b.id = l.block
"""
_get_columns = attrgetter(*Node.__struct_fields__)


def insert_root(tx: Tx, conversation: int, created_at: float) -> int:
    """Add the empty root of a new tree, and return its number."""
    root = Node(0, 0, 0, 0, conversation, "root", 0, 0, 0, created_at=created_at)
    number = tx.insert(_INSERT_NODE, _node_values(root))
    tx.run("UPDATE nodes SET tree = id, branch = id WHERE id = ?", (number,))
    return number


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
    retained = parent.length if kept is None else kept
    continues_branch = bool(blocks) and retained == parent.length
    node = Node(
        id=0,
        tree=parent.tree,
        branch=parent.branch if continues_branch else 0,
        parent=parent.id,
        conversation=conversation.number,
        kind=kind,
        kept=retained,
        length=retained + len(blocks),
        depth=parent.depth + 1,
        memory=memory,
        created_at=now,
    )
    response_row = None
    if response:
        response_row = response_values(response, scope or intern_scope(tx, response.scope))

    if continues_branch and isinstance(tx, PostgresTransaction) and not tx.is_retry:
        values = _statement_values(tx, conversation, node, blocks, response_row, head)
        rows = tx.query(_INSERT_IN_ONE_STATEMENT, values, alone=single_statement).fetchall()
        for node_id, moved in rows:
            return replace(node, id=node_id), bool(moved)
        tx.single_statement = False  # it changed nothing
    return _insert_in_steps(tx, conversation, parent, node, blocks, response_row, head)


def _statement_values(
    tx: Tx,
    conversation: ConversationRow,
    node: Node,
    blocks: Sequence[StoredBlock],
    response_row: Row | None,
    head: int | None,
) -> dict[str, Any]:
    """Return the values of the single statement by name; blocks and response are JSON."""
    response: str | None = None
    if response_row is not None:
        columns: dict[str, Any] = {"conversation": node.conversation}
        for name, value in zip(STORED_COLUMNS, response_row, strict=True):
            columns[name] = value
            if isinstance(value, bytes):
                columns[name] = f"\\x{value.hex()}"  # the text form of a bytea
        response = encode(columns)
    return {
        **dict(zip(_NODE_VALUES, _node_values(node), strict=True)),
        "id": conversation.id,
        "namespace": tx.namespace,
        "blocks": encode([[block.hash.hex(), block.id_hash.hex(), block.body] for block in blocks]),
        "response": response,
        "head": head,
    }


def _insert_in_steps(
    tx: Tx,
    conversation: ConversationRow,
    parent: Node,
    node: Node,
    blocks: Sequence[StoredBlock],
    response_row: Row | None,
    head: int | None,
) -> tuple[Node, bool]:
    """Add a node whose number is not known yet; its branch is 0 if it starts one."""
    lock_tree_shared(tx, parent.tree)
    _lock_parent(tx, conversation, parent)
    if node.kind not in COMPLETING_KINDS:
        require_continuable(tx, conversation)
    _check_ids_are_new(tx, parent, node.kept, blocks)

    # If another node has continued the branch, a link conflicts, and the transaction is run again.
    continued = "SELECT 1 FROM links WHERE branch = ? AND place = ?"
    if tx.is_retry and node.branch and tx.rows(continued, (node.branch, node.kept)):
        node = replace(node, branch=0)
    node = replace(node, id=tx.insert(_INSERT_NODE, _node_values(node)))
    if not node.branch:
        node = replace(node, branch=node.id)
        tx.run("UPDATE nodes SET branch = id WHERE id = ?", (node.id,))

    for place, block in enumerate(blocks, node.kept):
        link = (node.branch, place, insert_block(tx, block))
        tx.run("INSERT INTO links (branch, place, block) VALUES (?, ?, ?)", link)
    if response_row:
        tx.run(INSERT_RESPONSE, (node.id, node.conversation, *response_row))
    moved = head is not None and swap_head(tx, node.conversation, head, node.id, node.created_at)
    return node, moved


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


def _lock_parent(tx: Tx, conversation: ConversationRow, parent: Node) -> None:
    """Check that conversation and parent still exist, and prevent their deletion."""
    rows = tx.rows(
        "SELECT n.length FROM conversations c JOIN nodes n ON n.tree = c.tree "
        "WHERE c.number = ? AND c.id = ? AND c.namespace = ? AND n.id = ? "
        f"{tx.dialect.for_key_share}",
        (conversation.number, conversation.id, tx.namespace, parent.id),
    )
    if rows == [(parent.length,)]:
        return
    require_conversation(tx, conversation)
    if rows:
        raise NotInStore(f"blocks of node {parent.id} were deleted; load the conversation again")
    raise missing_node(parent.id)


def insert_block(tx: Tx, block: StoredBlock) -> int:
    """Store a block that is not stored yet, and return its number."""
    insert = (
        "INSERT INTO blocks (hash, id_hash, body) VALUES (?, ?, ?) ON CONFLICT (hash) DO NOTHING"
    )
    number = tx.insert(insert, (block.hash, block.id_hash, block.body))
    if number:
        return number
    # Without a lock it could be deleted before our link to it is visible.
    query = f"SELECT id FROM blocks WHERE hash = ? {tx.dialect.for_key_share}"
    for (stored_number,) in tx.rows(query, (block.hash,)):
        return stored_number
    return insert_block(tx, block)  # it was deleted meanwhile


def _node_values(node: Node) -> Row:
    """Return the values of a node's row, except for its number."""
    return (*_get_columns(node)[1:], hash_node(node))


def hash_node(node: Node) -> bytes:
    """Return the checksum of a node's columns, except its id, tree and branch.

    `verify` checks those three by the structure of the tree. Ids are not known before the row is written.
    """
    return hash_row(_get_columns(node)[3:])
