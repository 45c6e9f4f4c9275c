"""The statement that adds a node on PostgreSQL in one round trip."""

from collections.abc import Sequence
from typing import Any

from kedge.database.postgres import PostgresTransaction
from kedge.database.transactions import Row
from kedge.store.responses import STORED_COLUMNS
from kedge.text.json_text import encode_text as encode

# Every statement is a round trip, so the node of an exchange is added by a single one. It fails (by a
# division by zero) unless every block is new; the transaction is then run again step by step.
_INSERT_NODE = b"""
WITH alive AS (
    SELECT c.number FROM conversations c JOIN nodes p ON p.tree = c.tree JOIN nodes root ON root.id = c.tree
    WHERE c.number = %(number)s AND c.id = %(id)s AND c.namespace = %(namespace)s
        AND p.id = %(parent)s AND p.length = %(kept)s
    FOR KEY SHARE OF root, c, p
), given AS (
    SELECT decode(block ->> 0, 'hex') AS hash, block ->> 1 AS body, place
    FROM jsonb_array_elements(%(blocks)s::jsonb) WITH ORDINALITY AS blocks (block, place)
), node AS (
    INSERT INTO nodes
        (tree, branch, parent, conversation, kind, kept, length, depth, memory, created_at, checksum)
    SELECT %(tree)s, %(branch)s, %(parent)s, number, %(kind)s, %(kept)s, %(length)s, %(depth)s,
        %(memory)s, %(now)s, %(checksum)s FROM alive
    RETURNING id, branch, conversation, kept
), made AS (
    INSERT INTO blocks (hash, body)
    SELECT given.hash, given.body FROM given, node
    ON CONFLICT (hash) DO NOTHING RETURNING id, hash
), linked AS (
    INSERT INTO links (branch, place, block)
    SELECT node.branch, node.kept + given.place - 1, made.id
    FROM node, given JOIN made ON made.hash = given.hash
), response AS (
    INSERT INTO responses SELECT (jsonb_populate_record(
        NULL::responses, %(response)s::jsonb || jsonb_build_object('node', node.id)
    )).* FROM node WHERE %(answers)s
), moved AS (
    UPDATE conversations SET head = node.id, updated_at = %(now)s FROM node
    WHERE number = node.conversation AND head = %(head)s RETURNING number
)
SELECT node.id, (SELECT COUNT(*) FROM moved),
    1 / (CASE WHEN (SELECT COUNT(*) FROM made) = %(count)s THEN 1 ELSE 0 END)
FROM node
"""
_NODE_COLUMNS = (
    "tree", "branch", "parent", "number", "kind", "kept", "length", "depth", "memory", "now",
    "checksum",
)  # fmt: skip


def add_node(
    tx: PostgresTransaction,
    conversation_id: str,
    node: Row,
    blocks: Sequence[tuple[bytes, str]],
    response: Row | None,
    head: int | None,
    *,
    single_statement: bool,
) -> tuple[int, bool]:
    """Add a node that continues its parent's branch, and move the head.

    Args:
        tx: The transaction; it is run again, without this shortcut, if a block is stored already.
        conversation_id: The id of the conversation that adds it, which must still exist.
        node: The values of its row, starting with the tree.
        blocks: The hashes and texts of its blocks.
        response: The values of `STORED_COLUMNS` of the node's response, if there is one.
        head: The node at which the head must be to be moved; None to leave it.
        single_statement: Whether the transaction does nothing else.

    Returns:
        The number of the node and whether the head moved. A number of 0 means that nothing was added, because
        the conversation or the parent was deleted.
    """
    values: dict[str, Any] = dict(zip(_NODE_COLUMNS, node, strict=True))
    values["id"] = conversation_id
    values["namespace"] = tx.namespace
    values["blocks"] = encode([[name.hex(), body] for name, body in blocks])
    values["count"] = len(blocks)
    values["response"] = _encode_response(response, values["number"]) if response else "{}"
    values["answers"] = response is not None
    values["head"] = -1 if head is None else head
    found = tx.run_named(_INSERT_NODE, values, alone=single_statement)
    return (found[0][0], bool(found[0][1])) if found else (0, False)


def _encode_response(values: Row, number: int) -> str:
    """Return the values of `STORED_COLUMNS` as the JSON of a row."""
    form = {
        name: f"\\x{value.hex()}" if isinstance(value, bytes) else value
        for name, value in zip(STORED_COLUMNS, values, strict=True)
    }
    return encode(form | {"conversation": number})
