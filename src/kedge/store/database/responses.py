"""The tables of stored responses, which a server fills, and their deletion.

A *node* has what one request added to a chain: its input and output items, encoded once, and its response. Nodes
refer to their parent, so branches share their history. A conversation refers to its newest node. Deleting a
response clears its part of the node; the items are deleted when no child and no conversation needs them.

There are two sets of these tables. Those of a server begin with ``kedge_server_``, so that they can be in the same
database as a store. Those of the practice model are part of every store, and begin with ``practice_``. Statements
are written for the first set, and `use_practice_tables` converts them.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

from kedge._internal.json_text import decode, encode
from kedge.store.database.schema import read_statements
from kedge.store.database.transactions import Dialect, Tx

SERVER_PREFIX = "kedge_server_"
STORE_TABLE = "kedge_schema"
"""The table of every store with the number of its schema."""
PRACTICE_PREFIX = "practice_"
NO_ITEMS = b"[]"

Execute = Callable[..., Any]
"""Runs a statement with its values, and returns a cursor with ``fetchone``, ``fetchall`` and ``rowcount``."""

DELETE_LOCK = 5461729
"""The number of the advisory lock of deletions, which are run one at a time."""

_DETACH = """
UPDATE kedge_server_nodes SET conversation = NULL WHERE id IN (
    WITH RECURSIVE up (id, parent) AS (
        SELECT id, parent FROM kedge_server_nodes WHERE id = ?
        UNION ALL
        SELECT n.id, n.parent FROM up JOIN kedge_server_nodes n ON n.id = up.parent
    )
    SELECT id FROM up
)
"""
_SELECT_UNUSED = """
SELECT parent FROM kedge_server_nodes n WHERE id = ? AND expires_at IS NULL
AND NOT EXISTS (SELECT 1 FROM kedge_server_nodes WHERE parent = n.id)
AND NOT EXISTS (SELECT 1 FROM kedge_server_conversations WHERE node = n.id)
"""
_CLEAR_RESPONSE = """
UPDATE kedge_server_nodes SET status = NULL, expires_at = NULL, request_fields = NULL, result_fields = NULL,
request = NULL, idempotency_key = NULL WHERE id = ? RETURNING conversation, barrier
"""
_SELECT_EMPTY_CONVERSATIONS = """
SELECT id, node FROM kedge_server_conversations c WHERE NOT EXISTS
(SELECT 1 FROM kedge_server_nodes WHERE conversation = c.id AND expires_at IS NOT NULL) LIMIT ?
"""


def has_other_tables(tx: Tx) -> bool:
    """Return whether there are tables of another program: neither of a server nor of a store."""
    names = {name for (name,) in tx.rows(tx.dialect.list_tables)}
    return STORE_TABLE not in names and any(not name.startswith(SERVER_PREFIX) for name in names)


def create_response_tables(tx: Tx, convert: Callable[[str], str] = str) -> None:
    """Create the tables of a server, or with `use_practice_tables` the tables of a store."""
    for statement in read_statements("kedge.store.database", f"responses.{tx.dialect.name}.sql"):
        tx.run(convert(statement))


@cache
def use_practice_tables(sql: str) -> str:
    """Return a statement for the tables of the practice model."""
    return sql.replace(SERVER_PREFIX, PRACTICE_PREFIX)


def lock_deletions(execute: Execute, dialect: Dialect) -> None:
    """Wait for deletions by others, and block them until the end of the transaction."""
    if dialect.has_concurrent_writers:
        execute("SELECT pg_advisory_xact_lock(?, hashtext(current_schema()))", (DELETE_LOCK,))


def delete_responses(execute: Execute, nodes: Iterable[int]) -> list[int]:
    """Delete responses; return the nodes that were deleted with them."""
    deleted: list[int] = []
    for node in nodes:
        row = execute(_CLEAR_RESPONSE, (node,)).fetchone()
        if row is None:  # another process deleted it
            continue
        conversation, barrier = row
        if barrier and conversation is None:
            deleted += _drop_before_compaction(execute, node)
        deleted += delete_unused_nodes(execute, node)
    return deleted


def delete_conversation(execute: Execute, name: str, node: int | None) -> list[int]:
    """Delete a conversation that ends with this node; return the nodes that were deleted with it."""
    execute("DELETE FROM kedge_server_conversations WHERE id = ?", (name,))
    return detach_nodes(execute, node)


def find_empty_conversations(
    execute: Execute, limit: int = 1 << 31
) -> list[tuple[str, int | None]]:
    """Return conversations, in any namespace, without a stored response, each with the node that it ends with."""
    return execute(_SELECT_EMPTY_CONVERSATIONS, (limit,)).fetchall()


def detach_nodes(execute: Execute, node: int | None) -> list[int]:
    """Remove the nodes up to this one from their conversation, which no longer has their items.

    A reference then finds only the items of stored responses; the others are retained for children.

    Returns:
        The nodes that were deleted, because nothing refers to them.
    """
    execute(_DETACH, (node,))
    return delete_unused_nodes(execute, node)


def delete_unused_nodes(execute: Execute, node: int | None) -> list[int]:
    """Delete a node if nothing refers to it, and then each of its parents under the same condition."""
    deleted: list[int] = []
    while node is not None:
        row = execute(_SELECT_UNUSED, (node,)).fetchone()
        if row is None:
            break
        execute("DELETE FROM kedge_server_nodes WHERE id = ?", (node,))
        deleted.append(node)
        (node,) = row
    return deleted


def _drop_before_compaction(execute: Execute, node: int) -> list[int]:
    """Delete the items before the compaction of a node, which its children do not see and no list contains."""
    select = "SELECT parent, input, output FROM kedge_server_nodes WHERE id = ?"
    parent, *content = execute(select, (node,)).fetchone()
    retained = slice_from_compaction([item for part in content for item in decode(part)])
    execute(
        "UPDATE kedge_server_nodes SET parent = NULL, input = ?, output = ? WHERE id = ?",
        (encode(retained), NO_ITEMS, node),
    )
    return delete_unused_nodes(execute, parent)


def slice_from_compaction(items: Sequence[Any]) -> list[Any]:
    """Return the items from the newest compaction item on."""
    for index in range(len(items) - 1, -1, -1):
        if items[index]["type"] == "compaction":
            return list(items[index:])
    return list(items)
