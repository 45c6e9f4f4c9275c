"""The `conversations` and `tags` tables: create, find, change and check conversations.

A conversation's row number never changes and is never reused, but a caller may have the
`ConversationRow` of a conversation that was deleted since. Every operation on a row therefore starts
with `require_conversation`, in the same transaction: a row with this number and id must still exist.

Every statement here names the namespace of its transaction. A tree belongs to one namespace, because a
conversation joins a tree only as a fork of another one, so rows reached from a checked row are in the
same namespace.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from kedge.database.transactions import Row, Tx, marks, split_chunks
from kedge.errors import InvalidSetting, NotInStore
from kedge.planning import Mode
from kedge.planning.anchors import validate_seconds
from kedge.store.records import ConversationRow, validate_data, validate_tags, validate_text
from kedge.text.json_text import decode
from kedge.text.json_text import encode_text as encode
from kedge.turns.frozen_json import EMPTY, FrozenMap, thaw

T = TypeVar("T")

_COLUMNS = (
    "c.id, c.title, c.archived, c.head, c.mode, c.retention, c.data, c.forked_from, c.forked_at, "
    "c.created_at, c.updated_at, c.ttl, c.delete_at, c.tree, c.number"
)

# A question that is stored before it is sent is a change, too: its answer is not stored yet.
_HAS_NODE_AFTER = (
    "EXISTS (SELECT 1 FROM nodes n WHERE n.tree = c.tree AND n.conversation = c.number "
    "AND n.created_at > {})"
)
_IS_EXPIRED = (
    "(c.ttl IS NOT NULL AND c.updated_at <= ? - c.ttl "
    f"AND NOT {_HAS_NODE_AFTER.format('? - c.ttl')})"
)
_IS_OLD = f"c.updated_at <= ? AND NOT {_HAS_NODE_AFTER.format('?')}"


MOVE_HEAD = "UPDATE conversations SET head = ?, updated_at = ? WHERE number = ? AND head = ?"
"""Moves the head to a node at a time, if the conversation with this number has its head at another node."""


def fork(
    tx: Tx, name: str, origin: ConversationRow, at: int, title: str, now: float
) -> ConversationRow:
    """Create a conversation on the tree of another one, with its head at one of the nodes."""
    number = insert_conversation(
        tx, name, title, origin.mode, origin.retention, origin.data, now, origin.ttl
    )
    tx.run(
        "UPDATE conversations SET tree = ?, head = ?, forked_from = ?, forked_at = ? WHERE number = ?",
        (origin.tree, at, origin.id, at, number),
    )
    set_tags(tx, number, origin.tags)
    return select_conversation(tx, name)


def insert_conversation(
    tx: Tx,
    name: str,
    title: str,
    mode: Mode | None,
    retention: float | None,
    data: FrozenMap,
    now: float,
    ttl: float | None = None,
) -> int:
    """Insert a conversation without a tree, and return its number."""
    number = tx.insert(
        "INSERT INTO conversations (id, title, archived, tree, head, mode, retention, data, created_at, "
        "updated_at, ttl, namespace) VALUES (?, ?, 0, 0, 0, ?, ?, ?, ?, ?, ?, ?) "
        "ON CONFLICT (namespace, id) DO NOTHING",
        (
            *(name, title, mode, retention, encode(thaw(data)) if data else None),
            *(now, now, ttl, tx.namespace),
        ),
        key="number",
    )
    if not number:
        raise InvalidSetting(
            f"there is already a conversation {name!r}; open it, or use another id"
        )
    return number


def require_conversation(tx: Tx, row: ConversationRow, lock: str = "") -> None:
    """Raise `NotInStore` if this conversation was deleted since its row was read."""
    where = "c.number = ? AND c.id = ? AND c.namespace = ?"
    query = f"SELECT 1 FROM conversations c WHERE {where} {lock}"
    if not tx.rows(query, (row.number, row.id, tx.namespace)):
        raise deleted_error(row)


def deleted_error(row: ConversationRow) -> NotInStore:
    """Return the error for the row of a conversation that was deleted, or was not created yet."""
    if not row.number:
        return NotInStore(
            f"the conversation {row.id!r} is empty and not stored yet; send a message first"
        )
    return NotInStore(f"the conversation {row.id!r} was deleted; open or create another one")


def checked(row: ConversationRow, work: Callable[[Tx], T], lock: str = "") -> Callable[[Tx], T]:
    """Return a transaction that checks that the conversation still exists, then does the work."""

    def run(tx: Tx) -> T:
        require_conversation(tx, row, lock)
        return work(tx)

    return run


def select_conversation(tx: Tx, name: str, lock: str = "") -> ConversationRow:
    """Return the conversation with this id."""
    query = f"SELECT {_COLUMNS} FROM conversations c WHERE c.id = ? AND c.namespace = ? {lock}"
    rows = tx.rows(query, (name, tx.namespace))
    if not rows:
        raise NotInStore(f"there is no conversation {name!r} in this store")
    return _conversation_from_row(rows[0], _select_tags(tx, [rows[0][-1]]))


def select_conversations(
    tx: Tx,
    *,
    tag: str | None,
    archived: bool | None,
    limit: int,
    offset: int = 0,
    since: float | None = None,
    before: float | None = None,
) -> list[ConversationRow]:
    """Return conversations that are not about to be deleted, most recently changed first."""
    conditions, values = ["c.namespace = ? AND c.delete_at IS NULL"], list[Any]([tx.namespace])
    if archived is not None:
        conditions.append("c.archived = ?")
        values.append(int(archived))
    if tag is not None:
        conditions.append("c.number IN (SELECT conversation FROM tags WHERE tag = ?)")
        values.append(tag)
    if since is not None:
        conditions.append("c.updated_at >= ?")
        values.append(since)
    if before is not None:
        conditions.append("c.updated_at < ?")
        values.append(before)
    rows = tx.rows(
        f"SELECT {_COLUMNS} FROM conversations c WHERE {' AND '.join(conditions)} "
        "ORDER BY c.updated_at DESC, c.number DESC LIMIT ? OFFSET ?",
        (*values, limit, offset),
    )
    tags = _select_tags(tx, [row[-1] for row in rows])
    return [_conversation_from_row(row, tags) for row in rows]


def select_tree_conversations(tx: Tx, tree: int) -> list[ConversationRow]:
    """Return the conversations on a tree in the order of their creation."""
    rows = tx.rows(
        f"SELECT {_COLUMNS} FROM conversations c WHERE c.tree = ? AND c.namespace = ? ORDER BY c.number",
        (tree, tx.namespace),
    )
    tags = _select_tags(tx, [row[-1] for row in rows])
    return [_conversation_from_row(row, tags) for row in rows]


def select_titled(tx: Tx, title: str) -> ConversationRow | None:
    """Return the first conversation with a title, if there is one."""
    rows = tx.rows(
        f"SELECT {_COLUMNS} FROM conversations c WHERE c.title = ? AND c.namespace = ? "
        "ORDER BY c.number LIMIT 1",
        (title, tx.namespace),
    )
    return _conversation_from_row(rows[0], _select_tags(tx, [rows[0][-1]])) if rows else None


def select_old(
    tx: Tx, now: float, *, age: float | None, tag: str | None = None, number: int | None = None
) -> list[ConversationRow]:
    """Return the conversations, or the one with a number, that did not change for ``age`` seconds.

    Without an age, those that expired by their ``ttl`` or whose scheduled deletion is due.
    """
    limit = _IS_OLD if age is not None else f"({_IS_EXPIRED} OR c.delete_at <= ?)"
    limit = f"c.namespace = ? AND {limit}"
    values: list[Any] = [tx.namespace, *([now] * 3 if age is None else [now - age] * 2)]
    if number is not None:
        limit += " AND c.number = ?"
        values.append(number)
    if tag is not None:
        limit += " AND c.number IN (SELECT conversation FROM tags WHERE tag = ?)"
        values.append(tag)
    rows = tx.rows(
        f"SELECT {_COLUMNS} FROM conversations c WHERE {limit} ORDER BY c.number", values
    )
    return [_conversation_from_row(row, {}) for row in rows]


def select_namespaces(tx: Tx, *, scheduled: bool = False) -> list[str]:
    """Return the names of all namespaces that have (scheduled) conversations, except the default one."""
    condition = "AND delete_at IS NOT NULL" if scheduled else ""
    query = (
        "SELECT DISTINCT namespace FROM conversations "
        f"WHERE namespace <> '' {condition} ORDER BY namespace"
    )
    return [name for (name,) in tx.rows(query)]


def select_scheduled(tx: Tx) -> list[ConversationRow]:
    """Return the conversations that are about to be deleted, the next one first."""
    rows = tx.rows(
        f"SELECT {_COLUMNS} FROM conversations c "
        "WHERE c.namespace = ? AND c.delete_at IS NOT NULL ORDER BY c.delete_at",
        (tx.namespace,),
    )
    return [_conversation_from_row(row, {}) for row in rows]


def schedule_delete(tx: Tx, name: str | ConversationRow, at: float | None) -> ConversationRow:
    """Set or clear the time at which a conversation is deleted."""
    row = resolve(tx, name)
    tx.run("UPDATE conversations SET delete_at = ? WHERE number = ?", (at, row.number))
    return select_conversation(tx, row.id)


def resolve(tx: Tx, conversation: str | ConversationRow, lock: str = "") -> ConversationRow:
    """Return the current row for an id, or for a row that must still be the same conversation."""
    if isinstance(conversation, ConversationRow):
        require_conversation(tx, conversation, lock)
        conversation = conversation.id
    return select_conversation(tx, conversation, lock)


def validate_members(members: Mapping[str, Any]) -> dict[str, Any]:
    """Check the members of a conversation that are to be changed; None leaves a member as it is."""
    checks: dict[str, Callable[[Any], Any]] = {
        "title": lambda title: validate_text(title, "title"),
        "tags": validate_tags,
        "archived": bool,
        "ttl": lambda ttl: validate_seconds(ttl, "ttl"),
        "data": validate_data,
    }
    return {name: checks[name](value) for name, value in members.items() if value is not None}


def update(
    tx: Tx,
    conversation: str | ConversationRow,
    compute: Callable[[ConversationRow], Mapping[str, Any]],
    now: float,
) -> ConversationRow:
    """Change columns and tags of a conversation, as computed from its current row."""
    row = resolve(tx, conversation, tx.dialect.for_update)
    changes = compute(row)
    columns = {k: v for k, v in changes.items() if k != "tags"}
    if "data" in columns:
        columns["data"] = encode(thaw(columns["data"])) if columns["data"] else None
    if "archived" in columns:
        columns["archived"] = int(columns["archived"])
    columns["updated_at"] = now
    sets = ", ".join(f"{column} = ?" for column in columns)
    tx.run(f"UPDATE conversations SET {sets} WHERE number = ?", (*columns.values(), row.number))
    if "tags" in changes:
        tx.run("DELETE FROM tags WHERE conversation = ?", (row.number,))
        set_tags(tx, row.number, changes["tags"])
    return select_conversation(tx, row.id)


def set_tags(tx: Tx, number: int, tags: Iterable[str]) -> None:
    """Insert the tags of a conversation that has none."""
    rows = [(number, tag) for tag in dict.fromkeys(tags)]
    tx.run_many("INSERT INTO tags (conversation, tag) VALUES (?, ?)", rows)


def select_head(tx: Tx, number: int) -> int:
    """Return the node that is the head."""
    return tx.rows("SELECT head FROM conversations WHERE number = ?", (number,))[0][0]


def move_head(tx: Tx, number: int, expected: int, head: int, now: float) -> bool:
    """Move the head by compare-and-swap; return whether it was at the expected node."""
    return tx.run(MOVE_HEAD, (head, now, number, expected)) > 0


def _select_tags(tx: Tx, numbers: list[int]) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    for chunk in split_chunks(numbers):
        among = f"conversation IN ({marks(chunk)})"
        query = f"SELECT conversation, tag FROM tags WHERE {among} ORDER BY tag"
        for number, tag in tx.rows(query, chunk):
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
        ttl,
        delete_at,
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
        FrozenMap(decode(data)) if data else EMPTY,
        origin or "",
        at or 0,
        created,
        updated,
        tree,
        number,
        ttl,
        delete_at,
    )
