"""Delete conversations with all their rows, and the blocks that no other conversation uses.

Forks share a tree, so the nodes that another conversation uses stay, shortened to the blocks that it
uses. Everything else is deleted: nodes, links, responses, telemetry, claims, tags, indexed text.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from kedge.store import telemetry
from kedge.store.conversations import resolve
from kedge.store.database import Tx
from kedge.store.nodes import hash_node, select_tree
from kedge.store.records import ConversationRow, Node

CHUNK_SIZE = 500
_CONVERSATION_TABLES = (*telemetry.TABLES, "claims", "tags")


def delete_conversation(tx: Tx, conversation: str | ConversationRow) -> None:
    """Delete a conversation, given by its id or its row."""
    _lock_links(tx)
    row = resolve(tx, conversation, tx.dialect.for_update)
    others = tx.rows(
        "SELECT number, head FROM conversations WHERE tree = ? AND number <> ? ORDER BY number",
        (row.tree, row.number),
    )
    tree = select_tree(tx, row.tree)
    used = _find_used_nodes(tree, row.number, [head for _, head in others])
    candidates = _delete_links(tx, tree, used)
    unused = [node.id for node in tree if node.id not in used]
    for table in ("responses", *telemetry.TABLES):
        _delete_rows(tx, table, "node", unused)
    for column in ("asked", "answer"):
        _delete_rows(tx, "claims", column, unused)
    _delete_rows(tx, "nodes", "id", unused)
    if others:
        _assign_nodes(
            tx, [node for node in tree if node.id in used], used, row.number, others[0][0]
        )
    for table in _CONVERSATION_TABLES:
        tx.run(f"DELETE FROM {table} WHERE conversation = ?", (row.number,))
    _delete_blocks(tx, candidates, row)
    tx.run("DELETE FROM conversations WHERE number = ?", (row.number,))


def _lock_links(tx: Tx) -> None:
    if tx.dialect.lock_links:
        tx.run(tx.dialect.lock_links)


def _assign_nodes(
    tx: Tx, nodes: Sequence[Node], used: dict[int, int], number: int, heir: int
) -> None:
    """Shorten nodes to the blocks that are used, and give those of a conversation to another one."""
    for node in nodes:
        changed = replace(
            node,
            conversation=heir if node.conversation == number else node.conversation,
            length=min(node.length, max(node.kept, used[node.id])),
        )
        if changed == node:
            continue
        tx.run(
            "UPDATE nodes SET conversation = ?, length = ?, checksum = ? WHERE id = ?",
            (changed.conversation, changed.length, hash_node(changed), node.id),
        )
        if changed.length < node.length:
            tx.run("UPDATE responses SET digest = NULL WHERE node = ?", (node.id,))
    for table in ("responses", "heard"):
        tx.run(f"UPDATE {table} SET conversation = ? WHERE conversation = ?", (heir, number))


def _find_used_nodes(tree: Sequence[Node], number: int, heads: Iterable[int]) -> dict[int, int]:
    """Return the nodes that other conversations use, with how many blocks of each path they use."""
    by_id = {node.id: node for node in tree}
    used: dict[int, int] = {}
    todo = [(node.id, node.length) for node in tree if node.conversation != number]
    todo += [(head, by_id[head].length) for head in heads]
    while todo:
        name, length = todo.pop()
        if used.get(name, -1) >= length:
            continue
        node = by_id[name]
        used[name] = max(length, used.get(name, -1))
        if node.parent:
            todo.append((node.parent, min(node.kept, length)))
    return used


def _delete_links(tx: Tx, tree: Sequence[Node], used: dict[int, int]) -> set[int]:
    """Delete the links that no other conversation uses, and return their blocks."""
    blocks: set[int] = set()
    for node in tree:
        start = max(node.kept, used.get(node.id, -1))
        if start >= node.length:
            continue
        places = (node.branch, start, node.length)
        where = "WHERE branch = ? AND place >= ? AND place < ?"
        blocks.update(block for (block,) in tx.rows(f"SELECT block FROM links {where}", places))
        tx.run(f"DELETE FROM links {where}", places)
    return blocks


def _delete_blocks(tx: Tx, candidates: set[int], row: ConversationRow) -> None:
    """Delete those of these blocks that no link refers to."""
    left = {
        block
        for (block,) in tx.rows(
            "SELECT DISTINCT l.block FROM nodes n JOIN links l ON l.branch = n.branch "
            "AND l.place >= n.kept AND l.place < n.length WHERE n.tree = ?",
            (row.tree,),
        )
    }
    disown = "UPDATE blocks SET owner = NULL WHERE id = ? AND owner = ?"  # others use them now
    tx.run_many(disown, [(block, row.number) for block in left])
    candidates -= left
    for chunk in _split_chunks(sorted(candidates)):
        shared = _find_shared_blocks(tx, chunk)
        gone = [block for block in chunk if block not in shared]
        for table, column in (("texts", "rowid"), ("heard", "block"), ("blocks", "id")):
            _delete_rows(tx, table, column, gone)


def _find_shared_blocks(tx: Tx, blocks: Sequence[int]) -> set[int]:
    """Return those of these blocks that are used elsewhere; only blocks without an owner can be."""
    marks = ", ".join("?" * len(blocks))
    query = f"SELECT id FROM blocks WHERE id IN ({marks}) AND owner IS NULL"
    ownerless = [block for (block,) in tx.rows(query, blocks)]
    if not ownerless:
        return set()
    marks = ", ".join("?" * len(ownerless))
    query = f"SELECT DISTINCT block FROM links WHERE block IN ({marks})"
    return {block for (block,) in tx.rows(query, ownerless)}


def _delete_rows(tx: Tx, table: str, column: str, keys: Sequence[int]) -> None:
    for chunk in _split_chunks(keys):
        marks = ", ".join("?" * len(chunk))
        tx.run(f"DELETE FROM {table} WHERE {column} IN ({marks})", chunk)


def _split_chunks(keys: Sequence[int]) -> list[Sequence[int]]:
    return [keys[start : start + CHUNK_SIZE] for start in range(0, len(keys), CHUNK_SIZE)]


def delete_orphans(tx: Tx) -> int:
    """Delete rows that refer to nothing, and blocks without a link; return how many blocks."""
    _lock_links(tx)
    for table in _CONVERSATION_TABLES:
        tx.run(f"DELETE FROM {table} WHERE conversation NOT IN (SELECT number FROM conversations)")
    for table in telemetry.TABLES:
        tx.run(f"DELETE FROM {table} WHERE node NOT IN (SELECT id FROM nodes)")
    found = tx.rows("SELECT id FROM blocks WHERE id NOT IN (SELECT block FROM links)")
    orphans = [block for (block,) in found]
    for table, column in (("texts", "rowid"), ("heard", "block"), ("blocks", "id")):
        _delete_rows(tx, table, column, orphans)
    return len(orphans)
