"""Queries of a tree with ten thousand nodes: paths, ancestors and differences are single statements."""

import sqlite3
from collections.abc import AsyncIterator

import pytest

from kedge import user
from kedge.store import ConversationRow, Store, open_store
from kedge.store.append import insert_node
from kedge.store.database.transactions import Tx
from kedge.store.nodes import get_node
from kedge.store.stored_blocks import to_stored_block

NODES = 10_000
FORK = 4_000


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    """Return one backend for the module, so that the large store is created once."""
    return "asyncio"


@pytest.fixture(scope="module")
async def large(
    tmp_path_factory: pytest.TempPathFactory, anyio_backend: str
) -> AsyncIterator[tuple[Store, ConversationRow, dict[str, int]]]:
    """Yield a tree of ten thousand nodes with one deep fork and many short branches."""
    path = tmp_path_factory.mktemp("large") / "large.db"
    async with open_store(f"sqlite:///{path}") as store:
        row = await store.create("Large")

        def grow(tx: Tx) -> dict[str, int]:
            nodes: dict[str, int] = {}
            node = fork = get_node(tx, row)
            for number in range(NODES):
                if number == NODES - 1_000:
                    nodes["long"] = node.id
                    node = fork
                block = to_stored_block(user(f"step {number}"))
                node, _ = insert_node(
                    tx, node, [block], conversation=row, kind="added", now=float(number)
                )
                if number == FORK:
                    fork, nodes["fork"] = node, node.id
                if number % 100 == 50:
                    side_block = to_stored_block(user(f"twig {number}"))
                    insert_node(tx, node, [side_block], conversation=row, kind="added", now=1.0)
            nodes["short"] = node.id
            return nodes

        yield store, row, await store.database.write(grow)


Large = tuple[Store, ConversationRow, dict[str, int]]


async def test_nodes_of_a_large_tree_are_in_order(large: Large) -> None:
    """All nodes are returned, in the order in which they were added."""
    store, row, _ = large
    tree = await store.tree(row)
    assert len(tree) == NODES + NODES // 100 + 1
    assert [node.id for node in tree] == sorted(node.id for node in tree)


async def test_long_paths_are_complete(large: Large) -> None:
    """A path has all nodes from the root, and its blocks are those of each node."""
    store, row, nodes = large
    long = await store.path(row, nodes["long"])
    assert [node.depth for node in long] == list(range(NODES - 1_000 + 1))
    assert len(await store.path(row, nodes["short"])) == FORK + 1 + 1_000 + 1
    blocks = (await store.load(row, nodes["short"])).blocks
    assert len(blocks) == FORK + 1 + 1_000
    texts = [block.text for block in blocks[FORK : FORK + 2]]  # type: ignore[attr-defined]
    assert texts == [f"step {FORK}", f"step {NODES - 1_000}"]


async def test_long_paths_are_compared(large: Large) -> None:
    """Two long paths have an ancestor in common, and differ after it."""
    store, row, nodes = large
    assert (await store.common_ancestor(row, nodes["long"], nodes["short"])).id == nodes["fork"]
    differences = await store.differences(row, nodes["long"], nodes["short"])
    assert differences.shared == FORK + 1
    lengths = (len(differences.left), len(differences.right))
    assert lengths == (NODES - 1_000 - FORK - 1, 1_000)


async def test_number_of_statements_is_bounded(large: Large) -> None:
    """Each query uses a fixed number of statements, independent of the size of the tree."""
    store, row, nodes = large
    counted: list[str] = []

    def trace(connection: sqlite3.Connection) -> None:
        connection.set_trace_callback(
            lambda sql: counted.append(sql) if "SELECT" in sql[:200] else None
        )

    connections = store.database._connections.opened  # type: ignore[attr-defined]
    for connection in connections:
        trace(connection)
    for call, maximum in (
        (store.tree(row), 2),
        (store.path(row, nodes["long"]), 2),
        (store.common_ancestor(row, nodes["long"], nodes["short"]), 4),
        (store.differences(row, nodes["long"], nodes["short"]), 7),
        (store.load(row, nodes["long"]), 4),
    ):
        counted.clear()
        await call
        assert len(counted) <= maximum
    for connection in connections:
        connection.set_trace_callback(None)
