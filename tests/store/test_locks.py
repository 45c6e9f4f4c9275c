"""Long transactions on PostgreSQL do not block sends, and what they change together stays consistent."""

import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import psycopg
import pytest

from kedge import user
from kedge.analytics import analyze
from kedge.store import ConversationRow, Node, Store, delete, import_export, open_store
from kedge.store.append import insert_block, insert_node
from kedge.store.database.transactions import Tx
from kedge.store.stored_blocks import to_stored_block
from kedge.turns import Block
from server.waiting import TIMEOUT, wait_until
from store.sample_conversations import create_conversation


@pytest.fixture
def url(empty_schema: str) -> str:
    """Return the address of an empty schema."""
    return empty_schema


@pytest.fixture
async def stores(url: str) -> AsyncIterator[tuple[Store, Store]]:
    """Yield two stores on one database; waits of the second one for locks fail."""
    async with open_store(url) as first, open_store(url, wait_seconds=2.0) as second:
        yield first, second


@asynccontextmanager
async def hold_open(store: Store, work: Callable[[Tx], Any]) -> AsyncIterator[None]:
    """Run a transaction that does not end before the body of the ``with`` statement."""
    done, may_end = threading.Event(), threading.Event()

    def run(tx: Tx) -> None:
        work(tx)
        done.set()
        assert may_end.wait(TIMEOUT)

    async with anyio.create_task_group() as group:
        group.start_soon(store.database.write, run)
        try:
            assert await anyio.to_thread.run_sync(done.wait, TIMEOUT)
            yield
        finally:
            may_end.set()


async def test_nothing_waits_for_an_import(
    stores: tuple[Store, Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    """During an import, others send in the same scope, delete, and read statistics."""
    first, second = stores
    row, added = await create_conversation(first, 3)
    lines = await first.export(row)
    await first.delete(row.id)
    row, added = await create_conversation(second, 1)
    other, _ = await create_conversation(second, 1)
    imported, may_end = threading.Event(), threading.Event()
    run_import = import_export.import_lines

    def import_lines(tx: Tx, lines: Any) -> list[ConversationRow]:
        ids = run_import(tx, lines)
        imported.set()
        assert may_end.wait(TIMEOUT)
        return ids

    monkeypatch.setattr(import_export, "import_lines", import_lines)
    async with anyio.create_task_group() as group:
        group.start_soon(first.import_, lines)
        assert await anyio.to_thread.run_sync(imported.wait, TIMEOUT)
        try:
            await second.append(row, added[-1], [user("not blocked")], head=added[-1].id)
            await create_conversation(second, 2)
            await second.delete(other.id)
            await analyze(second)
        finally:
            may_end.set()
    assert len(await first.conversations()) == 3
    assert await first.verify() == []


async def test_sends_do_not_wait_for_a_deletion(stores: tuple[Store, Store]) -> None:
    """While one conversation is being deleted, others are continued and created."""
    first, second = stores
    deleted, _ = await create_conversation(first, 20)
    row, added = await create_conversation(first, 1)
    async with hold_open(first, lambda tx: delete.delete_conversation(tx, deleted)):
        await second.append(row, added[-1], [user("not blocked")], head=added[-1].id)
        await create_conversation(second, 2)
        assert (await analyze(second)) is not None
    assert await first.verify() == []


def build_append(row: ConversationRow, parent: Node, block: Block) -> Callable[[Tx], Any]:
    """Return a transaction that adds a block to a conversation."""
    stored = to_stored_block(block)
    return lambda tx: insert_node(tx, parent, [stored], conversation=row, kind="added", now=1.0)


async def test_a_deletion_waits_for_its_tree(stores: tuple[Store, Store], url: str) -> None:
    """A node that a fork adds below a node of the deleted conversation keeps its path."""
    store, _ = stores
    row, added = await create_conversation(store, 3)
    fork = await store.fork(row, added[0].id)
    append = build_append(fork, added[-1], user("from the fork"))
    async with anyio.create_task_group() as group, hold_open(store, append):
        group.start_soon(store.delete, row.id)
        await anyio.to_thread.run_sync(wait_for_lock, url)
    assert [each.id for each in await store.conversations()] == [fork.id]
    assert len(await store.tree(fork)) > len(added)
    assert await store.verify() == []


async def test_a_linked_block_is_not_deleted(stores: tuple[Store, Store], url: str) -> None:
    """A deletion waits for a transaction that is about to link one of its blocks, and leaves that block."""
    store, _ = stores
    shared = user("the same for all", id="blk_shared")
    deleted = await store.create(blocks=[shared])
    row = await store.create(blocks=[user("another")])
    append = build_append(row, (await store.load(row)).node, shared)
    async with anyio.create_task_group() as group, hold_open(store, append):
        group.start_soon(store.delete, deleted.id)
        await anyio.to_thread.run_sync(wait_for_lock, url)
    assert await store.verify() == []
    assert await store.gc() == 0


async def test_gc_deletes_no_block_that_others_link(stores: tuple[Store, Store], url: str) -> None:
    """A block without a link is not deleted if another transaction links it meanwhile."""
    store, _ = stores
    orphan = user("left behind", id="blk_orphan")
    row = await store.create()
    await store.database.write(lambda tx: insert_block(tx, to_stored_block(orphan)))
    append = build_append(row, (await store.load(row)).node, orphan)
    async with anyio.create_task_group() as group, hold_open(store, append):
        group.start_soon(store.gc)
        await anyio.to_thread.run_sync(wait_for_lock, url)
    assert await store.verify() == []
    assert await store.gc() == 0


def wait_for_lock(url: str) -> None:
    """Wait until a transaction on this database waits for a lock of another one."""
    query = "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
    with psycopg.connect(url, autocommit=True) as connection:
        wait_until(lambda: connection.execute(query).fetchall())
