"""Deletion, for good: the rows are gone, and the blocks that nobody else uses.

Forks share a tree, so what another conversation stands on stays with it: its nodes, cut back to what is
really used. Everything else goes: nodes, links, responses, accounts, keys, words of the index.
"""

from collections.abc import Iterable, Sequence

from kedge.store.conversations import select_conversation
from kedge.store.database import Tx
from kedge.store.nodes import NODE_COLUMNS, node_from_row
from kedge.store.records import ConversationRow, Node

CHUNK_SIZE = 500


def delete_conversation(tx: Tx, name: str) -> None:
    """Delete a conversation."""
    if tx.dialect.lock_links:
        tx.run(tx.dialect.lock_links)
    row = select_conversation(tx, name, tx.dialect.for_update)
    others = tx.rows(
        "SELECT number, head, forked_at FROM conversations WHERE tree = ? AND number <> ? "
        "ORDER BY number",
        (row.tree, row.number),
    )
    tree = [
        node_from_row(each)
        for each in tx.rows(f"SELECT {NODE_COLUMNS} FROM nodes n WHERE n.tree = ?", (row.tree,))
    ]
    used = _find_used_nodes(tree, row.number, [head for _, head, _ in others])
    candidates = _delete_links(tx, tree, used)
    gone = [node.id for node in tree if node.id not in used]
    for table, column in (("responses", "node"), ("nodes", "id")):
        _delete_rows(tx, table, column, gone)
    if others:
        heir = others[0][0]
        for table in ("nodes", "responses", "heard"):
            tx.run(
                f"UPDATE {table} SET conversation = ? WHERE conversation = ?", (heir, row.number)
            )
    for table in ("incidents", "tool_runs", "exchanges", "claims", "tags"):
        tx.run(f"DELETE FROM {table} WHERE conversation = ?", (row.number,))
    _delete_blocks(tx, candidates, row)
    tx.run("DELETE FROM conversations WHERE number = ?", (row.number,))


def _find_used_nodes(tree: Sequence[Node], number: int, heads: Iterable[int]) -> dict[int, int]:
    """The nodes that other conversations stand on, each with how many blocks of its path they use."""
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
    """Delete the links that nobody uses any more; the blocks that they led to."""
    blocks: set[int] = set()
    for node in tree:
        start = max(node.kept, used.get(node.id, -1))
        if start >= node.length:
            continue
        places = (node.branch, start, node.length)
        where = "WHERE branch = ? AND place >= ? AND place < ?"
        blocks.update(block for (block,) in tx.rows(f"SELECT block FROM links {where}", places))
        tx.run(f"DELETE FROM links {where}", places)
        if node.id in used:
            tx.run("UPDATE nodes SET length = ? WHERE id = ?", (start, node.id))
            tx.run("UPDATE responses SET digest = NULL WHERE node = ?", (node.id,))
    return blocks


def _delete_blocks(tx: Tx, candidates: set[int], row: ConversationRow) -> None:
    """Delete those of these blocks to which no link leads."""
    left = {
        block
        for (block,) in tx.rows(
            "SELECT DISTINCT l.block FROM nodes n JOIN links l ON l.branch = n.branch "
            "AND l.place >= n.kept AND l.place < n.length WHERE n.tree = ?",
            (row.tree,),
        )
    }
    disowned = "UPDATE blocks SET owner = NULL WHERE id = ?"  # they have others to use them now
    tx.run_many(disowned, [(block,) for block in left])
    candidates -= left
    for chunk in _split_chunks(sorted(candidates)):
        shared = _find_shared_blocks(tx, chunk)
        gone = [block for block in chunk if block not in shared]
        for table, column in (("texts", "rowid"), ("heard", "block"), ("blocks", "id")):
            _delete_rows(tx, table, column, gone)


def _find_shared_blocks(tx: Tx, blocks: Sequence[int]) -> set[int]:
    """Those of these blocks that are used elsewhere; only blocks without an owner can be."""
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
    """Delete blocks to which no link leads, and words of blocks that are gone; how many blocks."""
    if tx.dialect.lock_links:
        tx.run(tx.dialect.lock_links)
    found = tx.rows("SELECT id FROM blocks WHERE id NOT IN (SELECT block FROM links)")
    orphans = [block for (block,) in found]
    for table, column in (("texts", "rowid"), ("heard", "block"), ("blocks", "id")):
        _delete_rows(tx, table, column, orphans)
    return len(orphans)
