"""Rows of conversations: made, found, renamed, tagged, and their heads moved by compare-and-swap."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from kedge.errors import NotInStore
from kedge.planning import Mode
from kedge.store.block_codec import encode
from kedge.store.database import Row, Tx
from kedge.store.nodes import insert_root
from kedge.store.records import ConversationRow

_COLUMNS = (
    "c.id, c.title, c.archived, c.head, c.mode, c.retention, c.data, c.forked_from, c.forked_at, "
    "c.created_at, c.updated_at, c.tree, c.number"
)


def create(
    tx: Tx,
    name: str,
    *,
    title: str,
    tags: Iterable[str],
    mode: Mode | None,
    retention: float | None,
    data: Mapping[str, Any],
    now: float,
) -> ConversationRow:
    """A new conversation, on a tree of its own."""
    number = _insert_conversation(tx, name, title, mode, retention, data, now)
    root = insert_root(tx, number, now)
    tx.run("UPDATE conversations SET tree = ?, head = ? WHERE number = ?", (root, root, number))
    set_tags(tx, number, tags)
    return select_conversation(tx, name)


def fork(
    tx: Tx, name: str, origin: ConversationRow, at: int, title: str, now: float
) -> ConversationRow:
    """A new conversation on the tree of another one, with its head at a node of it."""
    number = _insert_conversation(tx, name, title, origin.mode, origin.retention, origin.data, now)
    tx.run(
        "UPDATE conversations SET tree = ?, head = ?, forked_from = ?, forked_at = ? WHERE number = ?",
        (origin.tree, at, origin.id, at, number),
    )
    set_tags(tx, number, origin.tags)
    return select_conversation(tx, name)


def _insert_conversation(
    tx: Tx,
    name: str,
    title: str,
    mode: Mode | None,
    retention: float | None,
    data: Mapping[str, Any],
    now: float,
) -> int:
    return tx.insert(
        "INSERT INTO conversations (id, title, archived, tree, head, mode, retention, data, created_at, "
        "updated_at) VALUES (?, ?, 0, 0, 0, ?, ?, ?, ?, ?)",
        (name, title, mode, retention, encode(dict(data)) if data else None, now, now),
        key="number",
    )


def select_conversation(tx: Tx, name: str, lock: str = "") -> ConversationRow:
    """The conversation with this id."""
    rows = tx.rows(f"SELECT {_COLUMNS} FROM conversations c WHERE c.id = ? {lock}", (name,))
    if not rows:
        raise NotInStore(f"there is no conversation {name!r} in this store")
    return _conversation_from_row(rows[0], _select_tags(tx, [rows[0][-1]]))


def select_conversations(
    tx: Tx, *, tag: str | None, archived: bool | None, limit: int, before: float | None
) -> list[ConversationRow]:
    """Conversations, the one that changed last first."""
    conditions, values = ["1 = 1"], list[Any]()
    if archived is not None:
        conditions.append("c.archived = ?")
        values.append(int(archived))
    if tag is not None:
        conditions.append("c.number IN (SELECT conversation FROM tags WHERE tag = ?)")
        values.append(tag)
    if before is not None:
        conditions.append("c.updated_at < ?")
        values.append(before)
    rows = tx.rows(
        f"SELECT {_COLUMNS} FROM conversations c WHERE {' AND '.join(conditions)} "
        "ORDER BY c.updated_at DESC, c.number DESC LIMIT ?",
        (*values, limit),
    )
    tags = _select_tags(tx, [row[-1] for row in rows])
    return [_conversation_from_row(row, tags) for row in rows]


def update(tx: Tx, name: str, changes: Mapping[str, Any], now: float) -> ConversationRow:
    """Change a conversation's members."""
    row = select_conversation(tx, name)
    columns = {k: v for k, v in changes.items() if k != "tags"}
    if "data" in columns:
        columns["data"] = encode(dict(columns["data"])) if columns["data"] else None
    if "archived" in columns:
        columns["archived"] = int(columns["archived"])
    columns["updated_at"] = now
    sets = ", ".join(f"{column} = ?" for column in columns)
    tx.run(f"UPDATE conversations SET {sets} WHERE number = ?", (*columns.values(), row.number))
    if "tags" in changes:
        tx.run("DELETE FROM tags WHERE conversation = ?", (row.number,))
        set_tags(tx, row.number, changes["tags"])
    return select_conversation(tx, name)


def set_tags(tx: Tx, number: int, tags: Iterable[str]) -> None:
    """Write the tags of a conversation that has none."""
    rows = [(number, tag) for tag in dict.fromkeys(tags)]
    tx.run_many("INSERT INTO tags (conversation, tag) VALUES (?, ?)", rows)


def select_head(tx: Tx, number: int) -> int:
    """Where the head is."""
    rows = tx.rows("SELECT head FROM conversations WHERE number = ?", (number,))
    if not rows:
        raise NotInStore("the conversation was deleted meanwhile")
    return rows[0][0]


def _select_tags(tx: Tx, numbers: list[int]) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    if numbers:
        marks = ", ".join("?" * len(numbers))
        query = f"SELECT conversation, tag FROM tags WHERE conversation IN ({marks}) ORDER BY tag"
        for number, tag in tx.rows(query, numbers):
            found.setdefault(number, []).append(tag)
    return found


def _conversation_from_row(row: Row, tags: Mapping[int, list[str]]) -> ConversationRow:
    (
        name,
        title,
        archived,
        head,
        mode,
        retention,
        data,
        origin,
        at,
        created,
        updated,
        tree,
        number,
    ) = row
    return ConversationRow(
        name,
        title,
        tuple(tags.get(number, ())),
        bool(archived),
        head,
        mode,
        retention,
        json.loads(data) if data else {},
        origin or "",
        at or 0,
        created,
        updated,
        tree,
        number,
    )
