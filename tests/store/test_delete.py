"""Deletion of conversations: no text remains, and other conversations are unaffected."""

import math
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import pytest
from msgspec.structs import replace

from kedge import user
from kedge.errors import InvalidSetting, NotInStore
from kedge.store import Store, open_store
from kedge.store.database.transactions import Tx
from kedge.store.delete import delete_unchanged
from kedge.store.search import list_groups, rewrite_group
from kedge.store.search_query import TEXT_INDEXES
from kedge.store.summaries import list_summaries
from store.sample_conversations import count_rows, create_conversation, read_files

TABLES = ("conversations", "nodes", "links", "blocks", "responses", "claims", "tags", "texts")


async def test_deleted_conversation_leaves_no_rows(store: Store) -> None:
    """After a conversation is deleted, every table is empty and the conversation cannot be used."""
    row, nodes = await create_conversation(store, 3, tags=["a"])
    await store.append(row, nodes[-1], [user("edited")], kept=2, kind="edited")
    await store.claim(row, "k", request_hash=b"x", owner="a", lease=1)
    await store.search("question")
    await store.delete(row.id)
    assert await count_rows(store, *TABLES) == [0] * len(TABLES)
    with pytest.raises(NotInStore):
        await store.conversation(row.id)
    with pytest.raises(NotInStore, match="was deleted; open or create another one"):
        await store.append(row, nodes[-1], [user("too late")], head=nodes[-1].id)
    assert await store.verify() == []


async def test_fork_retains_shared_history_after_delete(store: Store) -> None:
    """A fork retains only its own path when the original is deleted."""
    row, nodes = await create_conversation(store, 4)
    fork = await store.fork(row, nodes[2].id)
    truncated = await store.append(fork, nodes[2], [user("elsewhere")], kept=3, head=nodes[2].id)
    await store.search("question")
    await store.delete(row.id)
    assert await store.verify() == []
    left = await store.load(await store.conversation(fork.id))
    assert len(left.blocks) == 4
    assert [record.block_count for record in left.state.anchors] == [2]
    assert await count_rows(store, "blocks") == [4]
    hits = await store.search("question")
    assert {hit.conversation for hit in hits} == {fork.id}
    assert len(hits) == 2
    await store.append(fork, truncated, [user("and on")], head=truncated.id)
    await store.delete(fork.id)
    assert await count_rows(store, *TABLES) == [0] * len(TABLES)


async def test_fork_that_retains_less_than_its_parent(store: Store) -> None:
    """Of the nodes before it only the blocks that it uses remain, unless another fork uses more of them."""
    for is_shared, count in ((False, 2), (True, 5)):
        row, nodes = await create_conversation(store, 2)
        copy = await store.append(row, nodes[2], [])
        whole = await store.fork(row, nodes[2].id) if is_shared else None
        fork = await store.fork(row, copy.id)
        await store.append(fork, copy, [user("elsewhere")], kept=1, head=copy.id)
        await store.delete(row)
        assert await count_rows(store, "blocks") == [count]
        for each in filter(None, (whole, fork)):
            loaded = await store.load(await store.conversation(each.id))
            assert len(loaded.blocks) == (4 if each is whole else 2)
            await store.delete(each)


async def test_gc_retains_history(store: Store) -> None:
    """`gc` deletes no branches that were undone or lost a race."""
    row, nodes = await create_conversation(store, 3)
    other = await store.append(row, nodes[1], [user("another way")])
    await store.move_head(row, nodes[1], head=nodes[3].id)
    before = await count_rows(store, *TABLES)
    assert await store.gc() == 0
    assert await count_rows(store, *TABLES) == before
    assert (await store.load(row, other.id)).blocks[-1] == user("another way")


def read_text_tables(tx: Tx) -> dict[int, list[Any]]:
    """Return the stored segments of each group of the search index."""
    return {
        group: tx.rows(f"SELECT id, block FROM texts_{group}_data")  # noqa: S608
        for group in list_groups(tx)
    }


SECRET_TEXTS = 18


@pytest.fixture
async def secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Store]:
    """Yield a store in a folder, with six conversations of three blocks, four of which are a group of the index."""
    small = replace(TEXT_INDEXES["sqlite"], texts_per_group=4)
    monkeypatch.setitem(TEXT_INDEXES, "sqlite", small)
    async with open_store(f"sqlite:///{tmp_path}/s.db") as store:
        for number in range(6):
            texts = [f"common secret{number} line{number}x{line}" for line in range(3)]
            await store.create(id=f"c{number}", blocks=[user(text) for text in texts])
        assert len(await store.search("common", limit=50)) == SECRET_TEXTS
        yield store


async def test_deleted_text_is_not_in_the_files(secrets: Store, tmp_path: Path) -> None:
    """A deletion overwrites text in the file and in its journal."""
    assert b"secret2" in read_files(tmp_path)
    await secrets.delete("c2")
    assert b"secret2" not in read_files(tmp_path)
    assert b"line2x1" not in read_files(tmp_path)


async def test_text_of_other_conversations_is_found_after_a_deletion(secrets: Store) -> None:
    """The hits are those of the others, in the same order."""
    await secrets.delete("c2")
    newest = [f"line{number}x{line}" for number in (5, 4, 3, 1, 0) for line in (2, 1, 0)]
    hits = await secrets.search("common", limit=50)
    assert [hit.excerpt.split()[-1] for hit in hits] == newest


async def test_deletion_rewrites_only_groups_with_its_blocks(secrets: Store) -> None:
    """The other groups of the search index are not touched."""
    before = await secrets.database.read(read_text_tables)
    assert sorted(before) == [0, 1, 2, 3, 4]
    await secrets.delete("c2")  # blocks 7, 8 and 9
    after = await secrets.database.read(read_text_tables)
    assert [group for group in before if after[group] != before[group]] == [1, 2]


async def test_empty_group_of_the_index_is_deleted(secrets: Store) -> None:
    """A group without blocks is dropped, also if another process rewrites it at the same time."""
    await secrets.delete("c2")
    await secrets.delete("c3")  # blocks 10, 11 and 12: group 2 is empty now
    assert sorted(await secrets.database.read(list_groups)) == [0, 1, 3, 4]
    await secrets.database.write(lambda tx: rewrite_group(tx, 2))  # as another process would
    assert await secrets.gc() == 0
    assert len(await secrets.search("common", limit=50)) == SECRET_TEXTS - 6
    assert await secrets.verify() == []


async def test_deleted_text_leaves_the_journal_after_the_last_reader(tmp_path: Path) -> None:
    """A reader prevents SQLite from emptying the journal; the next operation after it empties it."""
    async with open_store(f"sqlite:///{tmp_path}/s.db", wait_seconds=0.01) as store:
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


async def test_conversations_expire_by_their_time_to_live(store: Store) -> None:
    """Expiry counts from the last change, of a fork as well; conversations without a time to live remain."""
    store.clock = lambda: 1000.0
    short = await store.create("short", ttl=10.0)
    changed = await store.create("changed", ttl=10.0)
    await store.create("forever")
    fork = await store.fork(short, short.head)
    store.clock = lambda: 1009.0
    assert await store.delete_expired() == []
    await store.update(changed, title="later")
    store.clock = lambda: 1010.0
    assert await store.delete_expired() == [short.id, fork.id]
    assert [row.title for row in await store.conversations()] == ["later", "forever"]


async def test_gc_deletes_expired_conversations(store: Store) -> None:
    """`gc` leaves a store without damage."""
    store.clock = lambda: 1000.0
    await store.create("short", ttl=10.0)
    await store.create("forever")
    store.clock = lambda: 1010.0
    assert await store.gc() == 0
    assert [row.title for row in await store.conversations()] == ["forever"]
    assert await store.verify() == []


async def test_time_to_live_is_copied(store: Store) -> None:
    """A fork and an imported conversation have the time to live of their origin."""
    row = await store.create("short", ttl=10.0)
    assert (await store.fork(row, row.head)).ttl == 10.0
    (imported,) = await store.import_(await store.export(row))
    assert imported.ttl == 10.0
    assert '"ttl"' not in await store.export(await store.create("forever"))


async def test_question_without_an_answer_delays_expiry(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A conversation is not deleted while the answer to a new question is awaited, also of one asked meanwhile."""
    store.clock = lambda: 1000.0
    row = await store.create(ttl=10.0)
    store.clock = lambda: 1009.0
    await store.append(row, await store.node(row, row.head), [user("Hello")], kind="asked")
    store.clock = lambda: 1010.0
    assert await store.delete_expired() == []
    store.clock = lambda: 1019.0
    read, head = store.database.read, await store.node(row, row.head)

    async def read_and_ask(work: Any) -> Any:
        found = await read(work)
        await store.append(row, head, [user("And now?")], kind="asked")
        return found

    with monkeypatch.context() as patch:
        patch.setattr(store.database, "read", read_and_ask)
        assert await store.delete_expired() == []
    store.clock = lambda: 1029.0
    assert await store.delete_expired() == [row.id]


async def test_scheduled_conversation_is_hidden(store: Store) -> None:
    """Lists, summaries and searches are without it, and it is listed on request."""
    row = await store.create("secret", blocks=[user("a harbour")])
    other = await store.create("other")
    scheduled = await store.schedule_delete(row, store.clock() + 10)
    assert [each.id for each in await store.conversations()] == [other.id]
    assert (await list_summaries(store))[1] == 1
    assert (await list_summaries(store, scheduled=True))[1] == 2
    assert await store.search("harbour") == []
    assert await store.list_scheduled() == [scheduled]


async def test_scheduled_deletion_can_be_undone(store: Store) -> None:
    """The conversation is listed and found as before, and not deleted at the time that it had."""
    row = await store.create("secret", blocks=[user("a harbour")])
    scheduled = await store.schedule_delete(row, store.clock() + 10)
    assert (await store.schedule_delete(row.id, None)).delete_at is None
    assert await store.delete_scheduled(scheduled) is False
    assert len(await store.search("harbour")) == 1
    assert [each.id for each in await store.conversations()] == [row.id]


async def test_scheduled_conversations_are_deleted_at_their_time(store: Store) -> None:
    """They are listed and deleted in the order of their times, each of which may be changed."""
    store.clock = lambda: 1000.0
    first = await store.create("first")
    second = await store.create("second")
    await store.schedule_delete(first, 1010.0)
    await store.schedule_delete(second, 1005.0)
    assert [row.id for row in await store.list_scheduled()] == [second.id, first.id]
    await store.schedule_delete(second, 1020.0)
    assert await store.delete_expired() == []
    store.clock = lambda: 1010.0
    assert await store.delete_expired() == [first.id]
    assert [row.id for row in await store.list_scheduled()] == [second.id]


async def test_scheduled_deletion_is_executed_once(store: Store) -> None:
    """`delete_scheduled` deletes with the newest schedule only, also if the conversation was changed meanwhile."""
    row = await store.create("secret")
    earlier = await store.schedule_delete(row, store.clock() + 10)
    scheduled = await store.schedule_delete(row, store.clock() + 20)
    assert await store.delete_scheduled(earlier) is False
    await store.update(row, title="changed meanwhile")
    assert await store.delete_scheduled(scheduled) is True
    assert await store.delete_scheduled(scheduled) is False


async def test_time_of_a_deletion_is_finite(store: Store) -> None:
    """A conversation cannot be deleted at no time."""
    row = await store.create("secret")
    for never in (math.nan, math.inf, 10**400):
        with pytest.raises(InvalidSetting, match="finite time"):
            await store.schedule_delete(row, never)


async def test_conversations_are_deleted_by_age(store: Store) -> None:
    """Conversations that were not changed for a time are listed and deleted, by their tag."""
    store.clock = lambda: 1000.0
    tagged = await store.create("tagged", tags=["sea"])
    other = await store.create("other")
    store.clock = lambda: 1100.0
    new = await store.create("new")
    assert await store.list_older(100.0, tag="sea") == [tagged.id]
    assert await store.list_older(100.0) == [tagged.id, other.id]
    assert await store.delete_older(100.0, tag="sea") == [tagged.id]
    assert await store.delete_older(100.0) == [other.id]
    assert [row.id for row in await store.conversations()] == [new.id]


async def test_old_conversation_with_a_new_question_is_not_deleted(store: Store) -> None:
    """A question without an answer is a use of the conversation, although it changes nothing yet."""
    store.clock = lambda: 1000.0
    row = await store.create("asked")
    store.clock = lambda: 1100.0
    root = await store.node(row, row.head)
    await store.append(row, root, [user("A question without an answer")], kind="asked")
    assert await store.list_older(100.0) == []
    assert await store.delete_older(100.0) == []
    assert (await store.conversation(row.id)).updated_at == 1000.0


async def test_wrong_ages_are_rejected(store: Store) -> None:
    """An age and a time to live are seconds above 0."""
    with pytest.raises(InvalidSetting, match="seconds must be a finite number of seconds above 0"):
        await store.delete_older(0)
    with pytest.raises(InvalidSetting, match="ttl must be"):
        await store.create(ttl=cast("Any", "soon"))


async def test_conversation_that_is_used_meanwhile_is_not_deleted(store: Store) -> None:
    """The age is checked again in the transaction of the deletion."""
    store.clock = lambda: 1000.0
    row = await store.create("used")
    store.clock = lambda: 2000.0
    await store.update(row, title="used again")
    assert await store.write(lambda tx: delete_unchanged(tx, row)) is None
    assert (await store.conversation(row.id)).title == "used again"
    await store.delete(row)
    assert await store.write(lambda tx: delete_unchanged(tx, row)) is None


async def test_last_blocks_are_loaded(store: Store) -> None:
    """The last blocks of the head or another node are loaded, across branches."""
    row, nodes = await create_conversation(store, 3)
    blocks = (await store.load(row)).blocks
    assert await store.last_blocks(row, 2) == blocks[-2:]
    assert await store.last_blocks(row, 99) == blocks
    edit = await store.append(row, nodes[-1], [user("new")], kept=3, kind="edited")
    assert await store.last_blocks(row, 2, edit.id) == (blocks[2], user("new"))
    assert await store.last_blocks(row, 0) == ()
    with pytest.raises(InvalidSetting, match="count must be an integer of at least 0"):
        await store.last_blocks(row, -(10**30))
