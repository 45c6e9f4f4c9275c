"""`verify`: recompute every hash and digest, and check every reference between rows.

Nothing is repaired. A tree is read branch by branch, so that each block is hashed once.
"""

from collections.abc import Callable, Iterator

from kedge._internal.json_text import decode
from kedge.errors import InvalidTurn, KedgeError, StoreBusy, StoreError, StoreUnreachable
from kedge.planning import covered_count, prefix_digest
from kedge.store import response_sums
from kedge.store.append import hash_node
from kedge.store.database.transactions import Database, Tx
from kedge.store.node_paths import load_bodies
from kedge.store.nodes import NODE_COLUMNS
from kedge.store.records import Damage, Node
from kedge.store.responses import TABLES, find_wrong_checksums, unpack_digest
from kedge.store.search import find_unindexed, get_index_position
from kedge.store.stored_blocks import hash_block, hash_block_id
from kedge.turns import Turn, load_block

BATCH_SIZE = 2_000


async def check_store(database: Database) -> list[Damage]:
    """Run all checks, each in transactions of limited size, and return every damaged row."""
    damage = await _run(database, check_database)
    for check, column in (
        (check_blocks, "blocks.id"),
        (check_responses, "responses.node"),
        (check_practice_items, "practice_nodes.id"),
    ):
        for after in await database.read(lambda tx, column=column: list_batches(tx, column)):
            damage += await _run(database, check, after)
    for check in (check_references, check_search_index, response_sums.check_sums):
        damage += await _run(database, check)
    for tree in await database.read(list_trees):
        damage += await _run(database, check_tree, tree)
    return damage


async def _run(
    database: Database, check: Callable[..., list[Damage]], *values: int
) -> list[Damage]:
    """Return the damage that a check finds, including rows that cannot be read."""

    def work(tx: Tx) -> list[Damage]:
        tx.allow_long_statements()
        return check(tx, *values)

    try:
        return await database.read(work)
    except (StoreBusy, StoreUnreachable):
        raise
    except StoreError as error:
        return [Damage(" ".join((check.__name__, *map(str, values))), str(error))]


def check_database(tx: Tx) -> list[Damage]:
    """Return the problems that the database's integrity check finds."""
    if tx.dialect.name != "sqlite":
        return []
    lines = [line for (line,) in tx.rows("PRAGMA integrity_check")]
    return [Damage("database", line) for line in lines if line != "ok"]


def list_batches(tx: Tx, column: str) -> range:
    """Return the number of the row after which each batch of rows begins."""
    ((newest,),) = tx.rows(f"SELECT MAX({column}) FROM {column.partition('.')[0]}")
    return range(0, newest or 0, BATCH_SIZE)


def check_blocks(tx: Tx, after: int) -> list[Damage]:
    """Check the next blocks against their hashes."""
    rows = tx.rows(
        "SELECT id, hash, id_hash, body FROM blocks WHERE id > ? AND id <= ?",
        (after, after + BATCH_SIZE),
    )
    return [
        Damage(f"block {number}", problem)
        for number, digest, id_digest, body in rows
        for problem in _iter_block_problems(bytes(digest), bytes(id_digest), body)
    ]


def _iter_block_problems(digest: bytes, id_digest: bytes, body: str) -> Iterator[str]:
    try:
        block = load_block(decode(body))
    except (ValueError, TypeError, KedgeError) as error:
        yield f"its text is not a block ({type(error).__name__})"
        return
    if hash_block(block.id, body) != digest:
        yield "its hash does not match its text"
    if hash_block_id(block.id) != id_digest:
        yield "the hash of its id does not match its text"


def check_responses(tx: Tx, after: int) -> list[Damage]:
    """Check the responses of the next nodes against their checksums."""
    wrong = find_wrong_checksums(tx, "r.node > ? AND r.node <= ?", (after, after + BATCH_SIZE))
    problem = "its columns do not match its checksum"
    return [Damage(f"response {node}", problem) for node in wrong]


_OWNED = {"claims": "t.key", "tags": "t.tag", **dict.fromkeys(TABLES, "t.id")}
# Each column that refers to another one: the column it refers to, what identifies its row, and a description.
_TARGETS = {
    "links.block": ("blocks.id", "t.branch, t.place", "position {1} of branch {0}: its block"),
    "links.branch": ("nodes.id", "t.branch", "branch {0}: its first node"),
    "responses.node": ("nodes.id", "t.node", "response {0}: its node"),
    "responses.conversation": ("conversations.number", "t.node", "response {0}: its conversation"),
    "responses.scope": ("scopes.number", "t.node", "response {0}: its scope"),
    "claims.question": ("nodes.id", "t.key", "claim {0}: the node of its question"),
    "claims.answer": ("nodes.id", "t.key", "claim {0}: the node of its answer"),
    "practice_nodes.parent": ("practice_nodes.id", "t.id", "practice response {0}: its parent"),
    "practice_conversations.node": (
        "practice_nodes.id",
        "t.id",
        "practice conversation {0}: its last node",
    ),
    "texts.rowid": ("blocks.id", "t.rowid", "indexed text {0}: its block"),
    **{
        f"{table}.conversation": ("conversations.number", key, f"{table} {{0}}: its conversation")
        for table, key in _OWNED.items()
    },
    **{f"{table}.node": ("nodes.id", "t.id", f"{table} {{0}}: its node") for table in TABLES},
}


def _find_missing(reference: str, target: str, columns: str) -> str:
    """Return the query for the rows of a table with a reference to a row that does not exist."""
    table, column = reference.split(".")
    other, key = target.split(".")
    return (
        f"SELECT DISTINCT {columns} FROM {table} t LEFT JOIN {other} o ON o.{key} = t.{column} "
        f"WHERE t.{column} IS NOT NULL AND o.{key} IS NULL"
    )


# Queries for rows with a wrong reference, each with its description of the damage.
_REFERENCES = {
    "SELECT c.id FROM conversations c LEFT JOIN nodes n ON n.id = c.head AND n.tree = c.tree "
    "WHERE n.id IS NULL": "conversation {0}: its head is not a node of its tree",
    "SELECT r.node FROM responses r JOIN nodes n ON n.id = r.node "
    "WHERE n.conversation <> r.conversation": "response {0}: its node has another conversation",
    "SELECT n.id FROM nodes n LEFT JOIN conversations c ON c.number = n.conversation "
    "AND c.tree = n.tree WHERE c.number IS NULL": "node {0}: its conversation is missing",
    **{
        _find_missing(reference, target, columns): f"{row} is missing"
        for reference, (target, columns, row) in _TARGETS.items()
    },
}


def check_practice_items(tx: Tx, after: int) -> list[Damage]:
    """Check that the items of the next responses of the practice model can be read."""
    rows = tx.rows(
        "SELECT id, input, output FROM practice_nodes WHERE id > ? AND id <= ?",
        (after, after + BATCH_SIZE),
    )
    return [
        Damage(f"practice response {number}", "its items cannot be read")
        for number, *content in rows
        if not all(map(_is_item_list, content))
    ]


def _is_item_list(content: bytes) -> bool:
    try:
        return isinstance(decode(bytes(content)), list)
    except ValueError:
        return False


def check_references(tx: Tx) -> list[Damage]:
    """Return every row that refers to a missing row."""
    return [
        Damage(*problem.format(*row).rsplit(": ", 1))
        for query, problem in _REFERENCES.items()
        for row in tx.rows(query)
    ]


def check_search_index(tx: Tx) -> list[Damage]:
    """Return the blocks that were indexed and are missing in the search index."""
    missing = find_unindexed(tx, get_index_position(tx))
    return [Damage(f"block {block}", "it is missing in the search index") for block in missing]


def list_trees(tx: Tx) -> list[int]:
    """Return the number of every tree."""
    return [tree for (tree,) in tx.rows("SELECT DISTINCT tree FROM nodes")]


def check_tree(tx: Tx, tree: int) -> list[Damage]:
    """Check that the nodes of a tree are consistent, and that its digests match its blocks."""
    query = f"SELECT n.checksum, {NODE_COLUMNS} FROM nodes n WHERE n.tree = ? ORDER BY n.id"
    rows = [(row[0], Node(*row[1:])) for row in tx.rows(query, (tree,))]
    nodes = {node.id: node for _, node in rows}
    damage = [
        Damage(f"node {node.id}", problem)
        for checksum, node in rows
        for problem in _iter_node_problems(node, nodes, checksum)
    ]
    branches: dict[int, list[Node]] = {}
    for node in nodes.values():
        branches.setdefault(node.branch, []).append(node)
    if damage:
        return damage  # paths cannot be followed
    damage += _check_link_counts(tx, tree, branches)
    for branch in branches.values():
        damage += _check_branch(tx, branch)
    return damage


def _iter_node_problems(
    node: Node, nodes: dict[int, Node], checksum: bytes | None
) -> Iterator[str]:
    """Yield the problems of a node: its position in the tree, or any other column."""
    parent = nodes.get(node.parent)
    if node.kind == "root":
        if (node.tree, node.branch, node.parent) != (node.id, node.id, 0):
            yield "it is not the root of its tree"
    elif parent is None:
        yield "its parent is missing"
    elif not 0 <= node.kept <= parent.length or node.length < node.kept:
        yield "it keeps more than its parent has"
    elif node.depth != parent.depth + 1:
        yield "its depth is not its parent's depth and one"
    elif node.branch != node.id and node.branch != parent.branch:
        yield "it is on a branch that its parent is not on"
    if checksum is None or bytes(checksum) != hash_node(node):
        yield "its columns do not match its checksum"


def _check_link_counts(tx: Tx, tree: int, branches: dict[int, list[Node]]) -> Iterator[Damage]:
    """Yield branches with links at positions that no node of the branch covers."""
    rows = tx.rows(
        "SELECT l.branch, COUNT(*) FROM links l JOIN nodes n ON n.id = l.branch WHERE n.tree = ? "
        "GROUP BY l.branch",
        (tree,),
    )
    for branch, count in rows:
        nodes = branches.get(branch, ())
        first = min((node.kept for node in nodes), default=0)
        expected = max((node.length for node in nodes), default=0) - first
        if count > expected:
            yield Damage(f"branch {branch}", f"it has {count} links; its nodes use {expected}")


def _check_branch(tx: Tx, branch: list[Node]) -> Iterator[Damage]:
    """Yield the damage of a branch: missing blocks, and digests that do not match."""
    tip = max(branch, key=lambda node: node.length)
    bodies = load_bodies(tx, tip, 0, tip.length)
    if len(bodies) != tip.length:
        yield Damage(f"node {tip.id}", f"{len(bodies)} of the {tip.length} blocks exist")
        return
    try:
        blocks = [load_block(decode(body)) for body in bodies]
    except (ValueError, TypeError, KedgeError):
        return  # the block itself was reported
    try:
        turn = Turn(blocks)
    except InvalidTurn as error:
        yield Damage(f"node {tip.id}", f"its path is not a valid Turn ({error})")
        return
    rows = tx.rows(
        "SELECT r.node, n.length, r.digest, r.block_count FROM nodes n JOIN responses r ON r.node = n.id "
        "WHERE n.tree = ? AND n.branch = ? AND r.digest IS NOT NULL",
        (tip.tree, tip.branch),
    )
    for node, length, digest, count in rows:
        if count > covered_count(turn.take(length)):
            yield Damage(f"response {node}", "it covers more blocks than there are")
        elif prefix_digest(turn, count) != unpack_digest(digest):
            yield Damage(f"response {node}", "its digest does not match its blocks")
