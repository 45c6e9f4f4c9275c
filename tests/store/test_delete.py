"""Deletion is real, and takes nothing from anyone else."""

import sqlite3
from pathlib import Path

import pytest

from kedge import user
from kedge.errors import NotInStore
from kedge.store import Store, open_store
from store.sample_conversations import append_exchange, count_rows, create_conversation

TABLES = (
    "conversations",
    "nodes",
    "links",
    "blocks",
    "responses",
    "claims",
    "tags",
    "texts",
)


async def test_nothing_is_left_of_a_deleted_conversation(store: Store) -> None:
    """Every table is empty again."""
    row, nodes = await create_conversation(store, 3, tags=["a"])
    await store.append(row, nodes[-1], [user("edited")], kept=2, kind="edited")
    await store.claim(row, "k", about=b"x", owner="a", lease=1)
    await store.search("question")
    await store.delete(row.id)
    assert await count_rows(store, *TABLES) == [0] * len(TABLES)
    with pytest.raises(NotInStore):
        await store.conversation(row.id)
    with pytest.raises(NotInStore):
        await store.append(row, nodes[-1], [user("too late")], head=nodes[-1].id)
    assert await store.verify() == []


async def test_blocks_that_others_use_stay(store: Store) -> None:
    """A block that stands in two conversations outlives the first."""
    one, _ = await create_conversation(store, 1, title="one")
    two, others = await create_conversation(store, 1, title="two")
    blocks = (await store.load(one)).blocks
    await store.append(two, others[-1], blocks)
    await store.delete(one.id)
    tip = (await store.tree(two))[-1]
    assert (await store.load(two, tip.id)).blocks[2:] == blocks
    assert len(await store.search("question")) == 2
    assert await store.verify() == []
    await store.delete(two.id)
    assert await count_rows(store, "blocks", "links", "nodes") == [0, 0, 0]


async def test_a_fork_keeps_what_it_stands_on(store: Store) -> None:
    """And nothing more: what the deleted one said later, and what was cut off, is gone."""
    row, nodes = await create_conversation(store, 4)
    fork = await store.fork(row, nodes[2].id)
    cut = await store.append(fork, nodes[2], [user("elsewhere")], kept=3, head=nodes[2].id)
    await store.search("question")
    await store.delete(row.id)
    assert await store.verify() == []
    left = await store.load(await store.conversation(fork.id))
    assert len(left.blocks) == 4
    assert [record.block_count for record in left.state.anchors] == [2]
    assert await count_rows(store, "blocks") == [4]
    found = await store.search("question")
    assert {hit.conversation for hit in found} == {fork.id}
    assert len(found) == 2
    await store.append(fork, cut, [user("and on")], head=cut.id)
    await store.delete(fork.id)
    assert await count_rows(store, *TABLES) == [0] * len(TABLES)


async def test_a_deleted_fork_takes_nothing_with_it(store: Store) -> None:
    """The conversation that it came from is as it was."""
    row, nodes = await create_conversation(store, 3)
    fork = await store.fork(row, nodes[1].id)
    turn = (await store.load(fork)).turn()
    await append_exchange(store, fork, nodes[1], turn, "fork")
    before = await store.export(row)
    await store.delete(fork.id)
    assert await store.export(row) == before
    assert await store.verify() == []


async def test_history_is_no_garbage(store: Store) -> None:
    """Branches that were undone or lost a race are still there after gc."""
    row, nodes = await create_conversation(store, 3)
    other = await store.append(row, nodes[1], [user("another way")])
    await store.move_head(row, nodes[1], head=nodes[3].id)
    before = await count_rows(store, *TABLES)
    assert await store.gc() == 0
    assert await count_rows(store, *TABLES) == before
    assert (await store.load(row, other.id)).blocks[-1] == user("another way")


def read_files(folder: Path) -> bytes:
    """Every byte of every file."""
    return b"".join(path.read_bytes() for path in folder.iterdir())


async def test_a_deleted_word_is_not_in_the_files(tmp_path: Path) -> None:
    """What was said is overwritten: in the database, in its journal and in its index."""
    async with await open_store(f"sqlite:///{tmp_path}/s.db") as store:
        row, nodes = await create_conversation(store, 2)
        await store.append(row, nodes[-1], [user("xyzzyplugh is the word")])
        assert len(await store.search("xyzzyplugh")) == 1
        assert b"xyzzyplugh" in read_files(tmp_path)
        await store.delete(row.id)
        assert b"xyzzyplugh" not in read_files(tmp_path)
        await store.gc()


async def test_deleted_text_leaves_the_journal_when_the_reader_is_done(tmp_path: Path) -> None:
    """A reader keeps SQLite from emptying the journal; the next operation after it does."""
    async with await open_store(f"sqlite:///{tmp_path}/s.db", wait_seconds=0.01) as store:
        row, nodes = await create_conversation(store, 2)
        await store.append(row, nodes[-1], [user("xyzzyplugh is the word")])
        reader = sqlite3.connect(tmp_path / "s.db", isolation_level=None)
        reader.execute("BEGIN")
        reader.execute("SELECT * FROM nodes").fetchall()
        await store.delete(row.id)
        assert b"xyzzyplugh" in read_files(tmp_path)
        await store.conversations()
        reader.execute("COMMIT")
        reader.close()
        await store.conversations()
        assert b"xyzzyplugh" not in read_files(tmp_path)
