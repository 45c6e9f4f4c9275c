"""``verify``: every hash and every digest derived again, every step of every tree walked.

What is found is named, place by place; nothing is mended. A tree is read branch by branch, so that a
digest costs what its block costs.
"""

import json
from collections.abc import Iterator

from kedge.errors import KedgeError
from kedge.planning import covered_count, prefix_digest
from kedge.store.block_codec import hash_block
from kedge.store.database import Tx
from kedge.store.nodes import NODE_COLUMNS, load_bodies, node_from_row
from kedge.store.records import Damage, Node
from kedge.store.responses import unpack_digest
from kedge.turns import Turn, load_block

BATCH_SIZE = 2_000


def check_database(tx: Tx) -> list[Damage]:
    """What the database itself finds."""
    if tx.dialect.name != "sqlite":
        return []
    found = [line for (line,) in tx.rows("PRAGMA integrity_check") if line != "ok"]
    return [Damage("database", line) for line in found]


def check_blocks(tx: Tx, after: int) -> list[Damage]:
    """Whether the next blocks are what their hashes say."""
    rows = tx.rows(
        "SELECT id, hash, body FROM blocks WHERE id > ? AND id <= ?", (after, after + BATCH_SIZE)
    )
    return [
        Damage(f"block {number}", problem)
        for number, name, body in rows
        for problem in _iter_block_problems(bytes(name), body)
    ]


def _iter_block_problems(digest: bytes, body: str) -> Iterator[str]:
    if hash_block(body) != digest:
        yield "its hash is not that of its text"
    try:
        load_block(json.loads(body))
    except (ValueError, TypeError, KedgeError) as error:
        yield f"its text is no block ({type(error).__name__})"


def check_links(tx: Tx) -> list[Damage]:
    """Whether every link leads to a block, and every head and node is where it belongs."""
    queries = {
        "SELECT l.branch, l.place FROM links l LEFT JOIN blocks b ON b.id = l.block "
        "WHERE b.id IS NULL": "place {1} of branch {0}: its block is missing",
        "SELECT l.branch FROM links l LEFT JOIN nodes n ON n.id = l.branch WHERE n.id IS NULL "
        "GROUP BY l.branch": "branch {0}: its first node is missing",
        "SELECT c.id FROM conversations c LEFT JOIN nodes n ON n.id = c.head AND n.tree = c.tree "
        "WHERE n.id IS NULL": "conversation {0}: its head is no node of its tree",
        "SELECT r.node FROM responses r LEFT JOIN nodes n ON n.id = r.node "
        "WHERE n.id IS NULL": "response {0}: its node is missing",
        "SELECT n.id FROM nodes n LEFT JOIN conversations c ON c.number = n.conversation "
        "WHERE c.number IS NULL": "node {0}: its conversation is missing",
    }
    return [
        Damage(*words.format(*row).split(": ", 1))
        for query, words in queries.items()
        for row in tx.rows(query)
    ]


def list_trees(tx: Tx) -> list[int]:
    """Every tree."""
    return [tree for (tree,) in tx.rows("SELECT DISTINCT tree FROM nodes")]


def check_tree(tx: Tx, tree: int) -> list[Damage]:
    """Whether the nodes of a tree fit together, and its digests are those of its blocks."""
    rows = tx.rows(f"SELECT {NODE_COLUMNS} FROM nodes n WHERE n.tree = ? ORDER BY n.id", (tree,))
    nodes = {node.id: node for node in map(node_from_row, rows)}
    damage = [
        Damage(f"node {node.id}", problem)
        for node in nodes.values()
        for problem in _iter_node_problems(node, nodes)
    ]
    branches: dict[int, list[Node]] = {}
    for node in nodes.values():
        branches.setdefault(node.branch, []).append(node)
    if damage:
        return damage  # paths lead nowhere then
    for branch in branches.values():
        damage += _check_branch(tx, branch)
    return damage


def _iter_node_problems(node: Node, nodes: dict[int, Node]) -> Iterator[str]:
    parent = nodes.get(node.parent)
    if node.kind == "root":
        return
    if parent is None:
        yield "its parent is missing"
    elif not 0 <= node.kept <= parent.length or node.length < node.kept:
        yield "it keeps more than its parent has"
    elif node.depth != parent.depth + 1:
        yield "its depth is not that of its parent and one"
    elif node.branch != node.id and node.branch != parent.branch:
        yield "it is on a branch that its parent is not on"


def _check_branch(tx: Tx, branch: list[Node]) -> Iterator[Damage]:
    """Whether the branch holds the blocks that its nodes tell of, and its digests are theirs."""
    tip = max(branch, key=lambda node: node.length)
    bodies = load_bodies(tx, tip)
    if len(bodies) != tip.length:
        yield Damage(f"node {tip.id}", f"{len(bodies)} of the {tip.length} blocks are there")
        return
    try:
        turn = Turn(load_block(json.loads(body)) for body in bodies)
    except (ValueError, TypeError, KedgeError):
        return  # the block itself was named
    lengths = {node.id: node.length for node in branch}
    marks = ", ".join("?" * len(lengths)) if len(lengths) <= BATCH_SIZE else ""
    where = f"node IN ({marks})" if marks else "node >= ? AND node <= ?"
    values = [*lengths] if marks else [min(lengths), max(lengths)]
    rows = tx.rows(
        f"SELECT node, digest, block_count FROM responses WHERE digest IS NOT NULL AND {where}",
        values,
    )
    for node, digest, count in rows:
        if node not in lengths:
            continue
        covered = covered_count(turn.take(lengths[node])) if lengths[node] < tip.length else None
        if count > (covered_count(turn) if covered is None else covered):
            yield Damage(f"response {node}", "it covers more blocks than there are")
        elif prefix_digest(turn, count) != unpack_digest(digest):
            yield Damage(f"response {node}", "its digest is not that of its blocks")
