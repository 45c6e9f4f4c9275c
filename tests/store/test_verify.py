"""`verify` recomputes all stored values and reports damage."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from kedge import user
from kedge.errors import StoreBusy, StoreDamaged, StoreError, StoreUnreachable
from kedge.store import Damage, RequestRecord, Store, open_store, verify
from kedge.store.database.transactions import Database, Row, Tx
from kedge.store.responses import STORED_COLUMNS
from kedge.store.verify import check_references, check_responses, check_store
from store.sample_conversations import SCOPE, create_conversation

CHANGED_BODY = "UPDATE blocks SET body = REPLACE(body, 'question', 'answers!') WHERE id = 1"
CHANGED_DIGEST = (
    "UPDATE responses SET digest = (SELECT hash FROM blocks WHERE id = 1) WHERE block_count = 4"
)
DAMAGE = [
    (CHANGED_BODY, "block 1", "hash"),
    ("UPDATE blocks SET body = 'nothing' WHERE id = 6", "block 6", "not a block"),
    (
        "UPDATE blocks SET id_hash = (SELECT id_hash FROM blocks WHERE id = 2) WHERE id = 1",
        "block 1",
        "the hash of its id",
    ),
    ("DELETE FROM blocks WHERE id = 3", "branch", "its block is missing"),
    ("DELETE FROM links WHERE place = 1", "node", "5 of the 6 blocks"),
    (
        "INSERT INTO links (branch, place, block) SELECT branch, 6, 1 FROM links WHERE place = 5",
        "branch",
        "7 links",
    ),
    ("DELETE FROM nodes WHERE parent = 0", "node", "parent is missing"),
    ("UPDATE nodes SET kept = 4, length = 6 WHERE length = 4", "node", "keeps more"),
    ("UPDATE nodes SET depth = 7 WHERE length = 4", "node", "depth"),
    (CHANGED_DIGEST, "response", "digest"),
    ("UPDATE responses SET block_count = 90 WHERE block_count = 4", "response", "more blocks"),
    ("UPDATE conversations SET head = 999", "conversation", "head"),
    ("UPDATE nodes SET conversation = 999 WHERE length = 4", "node", "conversation is missing"),
    ("UPDATE responses SET node = 999 WHERE block_count = 4", "response 999", "node is missing"),
    ("UPDATE scopes SET name = 'other'", "response", "checksum"),
    ("UPDATE scopes SET number = 999", "response", "scope is missing"),
]


class OpenTransaction:
    """A database that is read within one transaction."""

    def __init__(self, tx: Tx) -> None:
        self.tx = tx

    async def read(self, work: Callable[[Tx], Any]) -> Any:
        """Run work in the transaction."""
        return work(self.tx)


class Undone(Exception):
    """The end of a transaction whose changes are undone, with the damage that was found in it."""


async def verify_change(store: Store, statement: str) -> list[str]:
    """Return the damage that `verify` reports after a change, which is undone."""

    def work(tx: Tx) -> None:
        tx.run(statement)
        raise Undone(*asyncio.run(check_store(cast("Database", OpenTransaction(tx)))))

    with pytest.raises(Undone) as found:
        await store.database.write(work)
    return [str(each) for each in found.value.args]


async def test_damage_is_reported(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kind of damage is reported with the row that contains it, in every batch."""
    monkeypatch.setattr(verify, "BATCH_SIZE", 1)
    await create_conversation(store, 3)
    for statement, table, problem in DAMAGE:
        problems = await verify_change(store, statement)
        assert any(table in line and problem in line for line in problems), (statement, problems)
    assert await store.verify() == []


ORPHANS = {
    "claims k": "INSERT INTO claims (conversation, key, request_hash, owner, lease_until) "
    "VALUES (999, 'k', 'x', '', 0)",
    "tags x": "INSERT INTO tags (conversation, tag) VALUES (999, 'x')",
    "incidents 1": "INSERT INTO incidents (conversation, node, kind, reason, scope, created_at) "
    "VALUES (999, 999, 'healed', 'gone', 1, 1.0)",
    "tool_runs 1": "INSERT INTO tool_runs (conversation, node, name, outcome, seconds, created_at) "
    "VALUES (999, 999, 'add', 'ok', 1.0, 1.0)",
    "exchanges 1": "INSERT INTO exchanges (conversation, node, request, reply, created_at) "
    "VALUES (999, 999, 'x', 'y', 1.0)",
}


async def test_orphaned_rows_are_reported_and_deleted(store: Store) -> None:
    """`verify` reports rows whose conversation is missing, and `gc` deletes them."""
    await create_conversation(store, 1)
    for statement in ORPHANS.values():
        await store.database.write(lambda tx, statement=statement: tx.run(statement))
    missing = "its conversation is missing"
    assert {Damage(table, missing) for table in ORPHANS} <= set(await store.verify())
    await store.gc()
    assert await store.verify() == []


NODE_CHANGES = [
    *("tree = tree + 1", "branch = branch + 1", "parent = 2", "conversation = 2", "kind = 'added'", "kept = 3"),
    *("length = length + 1", "depth = 5", 'memory = \'{"mode":"stateless"}\'', "id = 999"),
    *("created_at = created_at + 1", "checksum = NULL"),
]  # fmt: skip


async def test_change_of_any_node_column_is_found(store: Store) -> None:
    """A changed column of a node is reported even if the new value is valid by itself."""
    row, nodes = await create_conversation(store, 3)
    await store.fork(row, nodes[1].id)
    leaf = await store.append(row, nodes[3], [user("asked")], kind="asked", kept=4)
    empty = await store.append(row, nodes[1], [], kind="failed")
    assert await store.verify() == []
    for node in (empty.id, (await store.create()).head):  # to a branch with enough blocks
        moved = f"UPDATE nodes SET branch = {leaf.id} WHERE id = {node}"  # noqa: S608
        assert await verify_change(store, moved) != []
    for change in NODE_CHANGES:
        statement = f"UPDATE nodes SET {change} WHERE id = {leaf.id}"  # noqa: S608
        assert await verify_change(store, statement) != [], change


NUMBER_COLUMNS = {
    "conversation", "scope", "sent_blocks", "sent_bytes", "saved_blocks", "saved_bytes", "input_tokens",
    "cached_tokens", "output_tokens", "reasoning_tokens", "stored", "is_resent", "block_count", "depth", "barrier",
    "predicted_cached_tokens", "cache_write_tokens", "more_rejected", "start", "results_by_id",
    "results_by_fallback", "results_unmatched", "cost", "first_token_seconds",
    "seconds", "created_at", "expires_at", "root_created_at", "cache_savings",
}  # fmt: skip


def change_column(tx: Tx, column: str) -> list[Row]:
    """Change a column of every response, and return the old values and the nodes."""
    rows = tx.rows(f"SELECT {column}, node FROM responses")  # noqa: S608
    change = f"COALESCE({column}, '') || '1'"
    if column in ("digest", "checksum"):
        change = "(SELECT hash FROM blocks WHERE id = 1)"
    elif column in NUMBER_COLUMNS:
        change = f"COALESCE({column}, 0) + 1"
    tx.run(f"UPDATE responses SET {column} = {change}")  # noqa: S608
    return rows


async def test_change_of_any_response_column_is_found(store: Store) -> None:
    """Each changed column is reported for a completed response, a failed one and a lost one."""
    row, nodes = await create_conversation(store, 3)
    failed = RequestRecord(provider="openai", scope=SCOPE, status="failed", error="no answer")
    await store.append(row, nodes[-1], [], kind="failed", response=failed)
    (record,) = await store.find_anchors(SCOPE, [(await store.load(row)).state.anchors[0].digest])
    await store.mark_lost(record, "gone")
    responses = await store.responses(row)
    assert {each.status for each in responses} == {"completed", "failed", "lost"}
    for column in ("conversation", *STORED_COLUMNS):
        old = await store.database.write(lambda tx, column=column: change_column(tx, column))
        found = await store.database.read(lambda tx: check_responses(tx, 0) + check_references(tx))
        assert {each.where for each in found} >= {f"response {each.node}" for each in responses}
        restore = f"UPDATE responses SET {column} = ? WHERE node = ?"  # noqa: S608
        await store.database.write(lambda tx, restore=restore, old=old: tx.run_many(restore, old))
    assert await store.verify() == []
    await store.database.write(lambda tx: change_column(tx, "provider_response_id"))
    damaged = {damage.where for damage in await store.verify()}
    assert damaged == {f"response {each.node}" for each in responses}


async def test_path_that_is_not_a_turn_is_reported(store: Store) -> None:
    """Two blocks with one id on a path, and a block that cannot be decoded, are reported."""
    row, nodes = await create_conversation(store, 1)
    await store.append(row, nodes[-1], [user("a", id="twice"), user("b")])
    same = "UPDATE links SET block = (SELECT block FROM links WHERE place = 2) WHERE place = 3"
    await store.database.write(lambda tx: tx.run(same))
    (damage,) = await store.verify()
    assert "two blocks have the id 'twice'" in damage.problem
    row, _ = await create_conversation(store, 3)
    broken = "UPDATE blocks SET body = '{\"kind\":' WHERE id = (SELECT MAX(id) FROM blocks) - 4"
    await store.database.write(lambda tx: tx.run(broken))
    with pytest.raises(StoreDamaged, match="block 1 cannot be read"):
        await store.load(row)


async def test_unreadable_rows_are_damage(tmp_path: Path) -> None:
    """Text that is not valid UTF-8 is reported, and the other checks continue."""
    async with open_store(f"sqlite:///{tmp_path}/s.db") as store:
        await create_conversation(store, 3)
        broken = "UPDATE blocks SET body = CAST(X'ff' AS TEXT) WHERE id = 2"
        await store.database.write(lambda tx: tx.run(broken))
        problems = [str(each) for each in await store.verify()]
        assert any("check_blocks" in line for line in problems)
        assert any("check_tree" in line for line in problems)


@pytest.mark.parametrize("problem", [StoreBusy("busy"), StoreUnreachable("no connection")])
async def test_a_store_that_cannot_be_read_is_not_damaged(
    store: Store, monkeypatch: pytest.MonkeyPatch, problem: StoreError
) -> None:
    """An error that may be temporary is raised, and not reported as damage."""
    read, problems = store.database.read, [problem]

    async def fail_once(work: Any) -> Any:
        if problems:
            raise problems.pop()
        return await read(work)

    monkeypatch.setattr(store.database, "read", fail_once)
    with pytest.raises(type(problem)):
        await store.verify()
