"""Delete conversations with all their rows, and the blocks that no other conversation uses.

Forks share a tree, so the nodes that another conversation uses stay, shortened to the blocks that it
uses. Everything else is deleted: nodes, links, responses, telemetry, claims, tags, indexed text, and
what the practice model has stored for it.
"""

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from kedge.errors import NotInStore, StoreError
from kedge.store import response_sums, search
from kedge.store.append import hash_node
from kedge.store.conversations import lock_tree, resolve, select_old
from kedge.store.database import responses as practice_responses
from kedge.store.database.transactions import Database, Tx, Values, split_chunks
from kedge.store.nodes import find_used_nodes, select_tree
from kedge.store.records import ConversationRow, Node
from kedge.store.response_index import disown_objects
from kedge.store.responses import TABLES, write_response_checksums

_CONVERSATION_TABLES = (*TABLES, "claims", "tags")
_SELECT_UNUSED_RESPONSES = """
SELECT n.id FROM kedge_server_nodes n LEFT JOIN responses r ON r.provider_response_id = 'resp_' || n.key
WHERE n.expires_at IS NOT NULL AND n.status NOT IN ('in_progress', 'queued') AND r.node IS NULL
"""


async def delete_old(
    database: Database, now: float, *, age: float | None, tag: str | None = None
) -> list[str]:
    """Delete conversations one by one, except for conversations that change meanwhile; return their ids.

    See `conversations.select_old` for the arguments.
    """
    deleted: list[str] = []
    groups: set[int] = set()

    def work(tx: Tx, row: ConversationRow) -> set[int] | None:
        if not select_old(tx, now, age=age, tag=tag, number=row.number):
            return None
        return delete_unchanged(tx, row)

    for row in await database.read(lambda tx: select_old(tx, now, age=age, tag=tag)):
        changed = await database.write(lambda tx, row=row: work(tx, row))
        if changed is not None:
            deleted.append(row.id)
            groups |= changed
    if deleted:
        await reclaim(database, groups)
    return deleted


async def reclaim(database: Database, groups: set[int], *, vacuum: bool = False) -> None:
    """Overwrite deleted data in groups of the search index, then in the files; see `Database.reclaim`."""
    try:
        for group in sorted(groups):
            await database.write(lambda tx, group=group: search.rewrite_group(tx, group))
        await database.reclaim(vacuum=vacuum)
    except StoreError as error:
        problem = "what was deleted may still be in the files, until 'kedge gc' succeeds"
        raise StoreError(f"{problem}: {error.problem}", error.location) from error


def delete_unchanged(
    tx: Tx, conversation: ConversationRow, members: Sequence[str] = ("updated_at", "delete_at")
) -> set[int] | None:
    """Delete a conversation; return None if a member was changed since its row was read."""
    lock_tree(tx, conversation.tree)
    try:
        row = resolve(tx, conversation, tx.dialect.for_update)
    except NotInStore:
        return None
    if any(getattr(row, name) != getattr(conversation, name) for name in members):
        return None
    return delete_conversation(tx, row)


def delete_conversation(tx: Tx, conversation: str | ConversationRow) -> set[int]:
    """Delete a conversation, given by its id or its row.

    Returns:
        The groups of the search index that must be rewritten; see `search.rewrite_group`.
    """
    lock_tree(tx, resolve(tx, conversation).tree)
    row = resolve(tx, conversation, tx.dialect.for_update)
    others = tx.rows(
        "SELECT number, head FROM conversations WHERE tree = ? AND number <> ? ORDER BY number",
        (row.tree, row.number),
    )
    tree = select_tree(tx, row.tree)
    others_nodes = [node.id for node in tree if node.conversation != row.number]
    used = find_used_nodes(tree, [*others_nodes, *(head for _, head in others)])
    used_nodes = [node for node in tree if node.id in used]
    inherited = [node.id for node in used_nodes if node.conversation == row.number]
    unused_nodes = [node for node in tree if node.id not in used]
    unused = [node.id for node in unused_nodes]

    candidates = _delete_links(tx, tree, used)
    response_sums.apply_to_nodes(tx, [*unused, *inherited], -1)
    _delete_nodes(tx, row.tree, unused)
    disown_objects(tx, (node.memory for node in unused_nodes))
    if others:
        heir, _ = others[0]
        _assign_nodes(tx, used_nodes, used, row.number, heir)
        response_sums.apply_to_nodes(tx, inherited, 1)
    for table in _CONVERSATION_TABLES:
        tx.run(f"DELETE FROM {table} WHERE conversation = ?", (row.number,))
    tx.run("DELETE FROM conversations WHERE number = ?", (row.number,))
    _, groups = _delete_unlinked(tx, sorted(candidates))
    delete_practice_responses(tx)
    return groups


def _delete_nodes(tx: Tx, tree: int, nodes: Sequence[int]) -> None:
    """Delete nodes of a tree with their responses, their telemetry and the claims that refer to them."""
    for table in ("responses", *TABLES):
        tx.delete_rows(table, "node", nodes)
    tx.delete_rows("nodes", "id", nodes)
    remaining = "(SELECT id FROM nodes WHERE tree = ?)"
    tx.run(
        "DELETE FROM claims WHERE conversation IN (SELECT number FROM conversations WHERE tree = ?) "
        f"AND (question NOT IN {remaining} OR answer NOT IN {remaining})",
        (tree, tree, tree),
    )


def delete_practice_responses(tx: Tx) -> None:
    """Delete the practice model's responses that no conversation in any namespace has.

    Those that were interrupted, and are therefore in no conversation, are deleted as well.
    """

    def execute(sql: str, values: Values = ()) -> Any:
        return tx.query(practice_responses.use_practice_tables(sql), values)

    practice_responses.lock_deletions(execute, tx.dialect)
    unused = [node for (node,) in execute(_SELECT_UNUSED_RESPONSES).fetchall()]
    practice_responses.delete_responses(execute, unused)
    for row in practice_responses.find_empty_conversations(execute):
        practice_responses.delete_conversation(execute, *row)


def _assign_nodes(
    tx: Tx, nodes: Sequence[Node], used: dict[int, int], number: int, heir: int
) -> None:
    """Shorten nodes to the used blocks, and assign the nodes of a conversation to another one."""
    for node in nodes:
        changed = replace(
            node,
            conversation=heir if node.conversation == number else node.conversation,
            # A path may use fewer blocks than the node shares with its parent, which is shortened too.
            kept=min(node.kept, used[node.id]),
            length=min(node.length, used[node.id]),
        )
        if changed == node:
            continue
        tx.run(
            "UPDATE nodes SET conversation = ?, kept = ?, length = ?, checksum = ? WHERE id = ?",
            (changed.conversation, changed.kept, changed.length, hash_node(changed), node.id),
        )
        update = "UPDATE responses SET conversation = ? WHERE node = ?"
        tx.run(update, (changed.conversation, node.id))
        if changed.length < node.length:
            tx.run("UPDATE responses SET digest = NULL WHERE node = ?", (node.id,))
            write_response_checksums(tx, [node.id])


def _delete_links(tx: Tx, tree: Sequence[Node], used: dict[int, int]) -> set[int]:
    """Delete the links that no other conversation uses, and return their blocks."""
    blocks: set[int] = set()
    for node in tree:
        start = max(node.kept, used.get(node.id, -1))
        if start >= node.length:
            continue
        values = (node.branch, start, node.length)
        where = "WHERE branch = ? AND place >= ? AND place < ?"
        blocks.update(block for (block,) in tx.rows(f"SELECT block FROM links {where}", values))
        tx.run(f"DELETE FROM links {where}", values)
    return blocks


def _delete_unlinked(tx: Tx, blocks: Sequence[int]) -> tuple[int, set[int]]:
    """Delete the blocks that no link refers to; return their number, and their groups in the search index."""
    # Wait for transactions that are about to link these blocks, whose links are visible then.
    search.lock_blocks(tx, blocks, tx.dialect.for_update)
    query = "SELECT DISTINCT block FROM links WHERE block IN ({})"
    linked = {block for (block,) in tx.rows_among(query, blocks)}
    unlinked = [block for block in blocks if block not in linked]
    groups = search.delete_texts(tx, unlinked)
    tx.delete_rows("blocks", "id", unlinked)
    return len(unlinked), groups


def delete_orphans(tx: Tx) -> None:
    """Delete rows of conversations and nodes that do not exist."""
    tx.allow_long_statements()
    for table in _CONVERSATION_TABLES:
        tx.run(f"DELETE FROM {table} WHERE conversation NOT IN (SELECT number FROM conversations)")
    for table in TABLES:
        tx.run(f"DELETE FROM {table} WHERE node NOT IN (SELECT id FROM nodes)")
    delete_practice_responses(tx)


async def delete_unlinked_blocks(database: Database) -> int:
    """Delete blocks without a link, and texts without a block; return the number of blocks.

    They are searched without locks, and deleted in short transactions that check them again.
    """
    blocks = await database.read(_find_unlinked_blocks)
    deleted = 0
    for chunk in split_chunks(blocks):
        deleted += await database.write(lambda tx, chunk=chunk: _delete_unlinked(tx, chunk)[0])
    await database.write(_repair_index)
    return deleted


def _find_unlinked_blocks(tx: Tx) -> list[int]:
    tx.allow_long_statements()
    rows = tx.rows("SELECT id FROM blocks WHERE id NOT IN (SELECT block FROM links) ORDER BY id")
    return [block for (block,) in rows]


def _repair_index(tx: Tx) -> None:
    """Delete texts without a block; if blocks are not indexed, let the next search index them."""
    tx.allow_long_statements()
    rows = tx.rows("SELECT rowid FROM texts WHERE rowid NOT IN (SELECT id FROM blocks)")
    search.delete_texts(tx, [block for (block,) in rows])
    if search.find_unindexed(tx, search.get_index_position(tx)):
        tx.run("UPDATE indexed SET node = 0")
