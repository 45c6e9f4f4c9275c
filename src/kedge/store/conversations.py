"""The `conversations` and `tags` tables: create, find, change and check conversations.

A conversation's row number never changes and is never reused, but a caller may have the
`ConversationRow` of a conversation that was deleted since. Every method of `Store` for a row therefore starts
with `require_conversation`, in the same transaction: a row with this number and id must still exist.

Every statement here names the namespace of its transaction. A tree belongs to one namespace, because a
conversation joins a tree only as a fork of another one, so rows reached from a checked row are in the
same namespace.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from kedge._internal.arguments import check_times, validate_seconds
from kedge._internal.json_text import decode
from kedge._internal.json_text import encode_text as encode
from kedge.errors import InvalidSetting, NotInStore, UnknownSetting, describe_type
from kedge.planning.anchors import validate_mode
from kedge.store.database.transactions import Row, Tx, join_filters
from kedge.store.records import (
    ConversationRow,
    require_default_namespace,
    validate_page,
    validate_tags,
    validate_title,
)
from kedge.turns.frozen_json import EMPTY, FrozenMap, freeze_map, thaw

_COLUMNS = (
    "c.id, c.title, c.number, c.archived, c.head, c.mode, c.retention, c.data, "
    "COALESCE(c.forked_from, ''), COALESCE(c.forked_at, 0), c.created_at, c.updated_at, c.tree, c.number, "
    "c.ttl, c.delete_at"
)
"""The columns of the fields of a `ConversationRow`, in their order, with the number in place of the tags."""
HAS_TAG = "c.number IN (SELECT conversation FROM tags WHERE tag = ?)"

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


def insert_conversation(tx: Tx, new: ConversationRow, now: float) -> int:
    """Insert a new conversation without its tree and tags, and return its number."""
    number = tx.insert(
        "INSERT INTO conversations (id, title, archived, tree, head, mode, retention, data, created_at, "
        "updated_at, ttl, namespace) VALUES (?, ?, 0, 0, 0, ?, ?, ?, ?, ?, ?, ?) "
        "ON CONFLICT (namespace, id) DO NOTHING",
        (
            new.id,
            new.title,
            new.mode,
            new.retention,
            _encode_data(new.data),
            now,
            now,
            new.ttl,
            tx.namespace,
        ),
        key="number",
    )
    if not number:
        raise InvalidSetting(
            f"there is already a conversation {new.id!r}; open it, or use another id"
        )
    return number


def _encode_data(data: FrozenMap) -> str | None:
    return encode(thaw(data)) if data else None


def require_conversation(tx: Tx, row: ConversationRow, lock: str = "") -> None:
    """Raise `NotInStore` if this conversation was deleted since its row was read."""
    where = "c.number = ? AND c.id = ? AND c.namespace = ?"
    query = f"SELECT 1 FROM conversations c WHERE {where} {lock}"
    if tx.rows(query, (row.number, row.id, tx.namespace)):
        return
    problem = "was deleted; open or create another one"
    if not row.number:
        problem = "is empty and not stored yet; send a message first"
    raise NotInStore(f"the conversation {row.id!r} {problem}")


def lock_tree(tx: Tx, tree: int) -> None:
    """Block changes of a tree by others until the end of the transaction.

    Its root is locked before its conversations and other nodes, in all transactions, which avoids deadlocks.
    """
    tx.lock("SELECT id FROM nodes WHERE id = ? FOR UPDATE", (tree,))


def lock_tree_shared(tx: Tx, tree: int) -> None:
    """Wait for a transaction that blocks changes of a tree, and block new ones."""
    tx.lock("SELECT id FROM nodes WHERE id = ? FOR KEY SHARE", (tree,))


def lock_names(tx: Tx) -> None:
    """Wait for other transactions with this lock, which create the tables or a row that may exist once."""
    tx.lock("SELECT pg_advisory_xact_lock(5461729823)")


def lock_conversation(tx: Tx, row: ConversationRow) -> None:
    """Do the same as `require_conversation`, and prevent the deletion of the conversation meanwhile."""
    lock_tree_shared(tx, row.tree)
    require_conversation(tx, row, tx.dialect.for_key_share)


def _select(
    tx: Tx, condition: str, values: Sequence[Any], end: str = "ORDER BY c.number"
) -> list[ConversationRow]:
    """Return the conversations of the namespace that meet a condition."""
    where = f"WHERE c.namespace = ? AND {condition} {end}"
    return select_conversations(tx, where, (tx.namespace, *values))


def select_conversations(tx: Tx, where: str, values: Sequence[Any]) -> list[ConversationRow]:
    """Return the conversations of a query, from the end of its SQL; ``c`` is the table."""
    rows = tx.rows(f"SELECT {_COLUMNS} FROM conversations c {where}", values)
    tags: dict[int, list[str]] = {}
    query = "SELECT conversation, tag FROM tags WHERE conversation IN ({}) ORDER BY tag"
    for number, tag in tx.rows_among(query, [row[2] for row in rows]):
        tags.setdefault(number, []).append(tag)
    return [_conversation_from_row(row, tags) for row in rows]


def _conversation_from_row(row: Row, tags: Mapping[int, list[str]]) -> ConversationRow:
    name, title, number, archived, head, mode, retention, data, *rest = row
    return ConversationRow(
        name,
        title,
        tuple(tags.get(number, ())),
        bool(archived),
        head,
        mode,
        retention,
        FrozenMap(decode(data)) if data else EMPTY,
        *rest,
    )


def select_conversation(tx: Tx, name: str, lock: str = "") -> ConversationRow:
    """Return the conversation with this id."""
    rows = _select(tx, "c.id = ?", (name,), lock)
    if not rows:
        raise NotInStore(f"there is no conversation {name!r} in this store")
    return rows[0]


def list_conversations(
    tx: Tx,
    *,
    tag: str | None = None,
    archived: bool | None = False,
    limit: int = 100,
    offset: int = 0,
    since: float | None = None,
    before: float | None = None,
) -> list[ConversationRow]:
    """Return conversations, most recently changed first, except those that are about to be deleted."""
    validate_page(limit, offset)
    check_times(since=since, before=before)
    filters = {
        "c.archived = ?": None if archived is None else int(archived),
        HAS_TAG: tag,
        "c.updated_at >= ?": since,
        "c.updated_at < ?": before,
    }
    where, values = join_filters("c.delete_at IS NULL", filters)
    end = "ORDER BY c.updated_at DESC, c.number DESC LIMIT ? OFFSET ?"
    return _select(tx, where, (*values, limit, offset), end)


def select_tree_conversations(tx: Tx, conversation: ConversationRow) -> list[ConversationRow]:
    """Return the conversations on the tree, in the order of their creation: this one, its forks and its origin."""
    return _select(tx, "c.tree = ?", (conversation.tree,))


def select_titled(tx: Tx, title: str) -> ConversationRow | None:
    """Return the first conversation with a title, if there is one."""
    rows = _select(tx, "c.title = ?", (title,), "ORDER BY c.number LIMIT 1")
    return next(iter(rows), None)


def select_old(
    tx: Tx, now: float, *, age: float | None, tag: str | None = None, number: int | None = None
) -> list[ConversationRow]:
    """Return the conversations that did not change for ``age`` seconds.

    Without an age, return the conversations that expired by their ``ttl`` or whose scheduled deletion is due. With a
    number, only that conversation is considered.
    """
    if age is None:
        condition = f"({_IS_EXPIRED} OR c.delete_at <= ?)"
        times = [now, now, now]
    else:
        condition = _IS_OLD
        times = [now - age, now - age]
    where, values = join_filters(condition, {"c.number = ?": number, HAS_TAG: tag})
    return _select(tx, where, [*times, *values])


def list_expired(tx: Tx) -> list[str]:
    """Return the ids of the conversations that would be deleted; see `Store.delete_expired`."""
    return [row.id for row in select_old(tx, tx.clock(), age=None)]


def list_older(tx: Tx, seconds: float, *, tag: str | None = None) -> list[str]:
    """Return the ids of the conversations that would be deleted; see `Store.delete_older`."""
    age = validate_seconds(seconds, "seconds")
    return [row.id for row in select_old(tx, tx.clock(), age=age, tag=tag)]


def read_time(tx: Tx) -> float:
    """Return the time of the database's clock, which all processes share, in seconds since 1970."""
    return tx.rows(f"SELECT {tx.dialect.now}")[0][0]


def list_namespaces(tx: Tx, *, scheduled: bool = False) -> list[str]:
    """Return the names of the namespaces that have conversations, without the default one."""
    require_default_namespace(tx.namespace, "namespaces")
    query = "SELECT DISTINCT namespace FROM conversations WHERE namespace <> ''"
    if scheduled:
        query += " AND delete_at IS NOT NULL"
    return [name for (name,) in tx.rows(f"{query} ORDER BY namespace")]


def list_scheduled(tx: Tx) -> list[ConversationRow]:
    """Return the conversations that are about to be deleted, the next one first."""
    return _select(tx, "c.delete_at IS NOT NULL", (), "ORDER BY c.delete_at")


def schedule_delete(tx: Tx, name: str | ConversationRow, at: float | None) -> ConversationRow:
    """Hide a conversation from lists and searches, to be deleted later; or undo that.

    `delete_expired` deletes it after that time.
    """
    check_times(at=at)
    row = resolve(tx, name)
    tx.run("UPDATE conversations SET delete_at = ? WHERE number = ?", (at, row.number))
    return select_conversation(tx, row.id)


def reject_scheduled(row: ConversationRow) -> None:
    """Raise ``NotInStore`` if a conversation is about to be deleted, so that it is not continued."""
    if row.delete_at is not None:
        raise NotInStore(
            f"conversation {row.id!r} is about to be deleted; undo that to continue it"
        )


def require_continuable(tx: Tx, conversation: ConversationRow) -> None:
    """Check that a conversation still exists and is not about to be deleted."""
    reject_scheduled(resolve(tx, conversation))


def get_conversation(tx: Tx, name: str | ConversationRow) -> ConversationRow:
    """Return the current row of a conversation."""
    return resolve(tx, name)


def resolve(tx: Tx, conversation: str | ConversationRow, lock: str = "") -> ConversationRow:
    """Return the current row for an id, or for a row that must still be the same conversation."""
    if isinstance(conversation, ConversationRow):
        require_conversation(tx, conversation, lock)
        conversation = conversation.id
    return select_conversation(tx, conversation, lock)


_MEMBER_CHECKS: Mapping[str, Callable[[Any], Any]] = {
    "title": validate_title,
    "tags": validate_tags,
    "archived": bool,
    "data": lambda data: freeze_map(data, "data"),
    "mode": validate_mode,
    "retention": lambda retention: validate_seconds(retention, "retention"),
    "ttl": lambda ttl: validate_seconds(ttl, "ttl"),
}
"""The members of a conversation that can be changed, and what validates each."""
_OPTIONAL_MEMBERS = frozenset({"mode", "retention", "ttl"})
"""The members of which None is a value."""


def validate_members(members: Mapping[str, Any]) -> dict[str, Any]:
    """Check the members of a conversation that are to be changed.

    None is the default of ``mode``, ``retention`` and ``ttl``, and leaves any other member as it is.

    Raises:
        UnknownSetting: A conversation has no such member, or it cannot be changed.
        InvalidSetting: A value is not allowed.
    """
    if not isinstance(members, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidSetting(
            f"the members to change are a mapping of names to values, not {describe_type(members)}"
        )
    changes: dict[str, Any] = {}
    for name, value in members.items():
        if name not in _MEMBER_CHECKS:
            raise UnknownSetting(name, _MEMBER_CHECKS, "a stored conversation")
        if value is not None or name in _OPTIONAL_MEMBERS:
            changes[name] = _MEMBER_CHECKS[name](value)
    return changes


def write_members(tx: Tx, number: int, changes: Mapping[str, Any]) -> None:
    """Change the validated members of a conversation."""
    columns = {name: value for name, value in changes.items() if name != "tags"}
    if "data" in columns:
        columns["data"] = _encode_data(columns["data"])
    if "archived" in columns:
        columns["archived"] = int(columns["archived"])
    columns["updated_at"] = tx.clock()
    sets = ", ".join(f"{column} = ?" for column in columns)
    tx.run(f"UPDATE conversations SET {sets} WHERE number = ?", (*columns.values(), number))
    if "tags" in changes:
        tx.run("DELETE FROM tags WHERE conversation = ?", (number,))
        set_tags(tx, number, changes["tags"])


def set_tags(tx: Tx, number: int, tags: Iterable[str]) -> None:
    """Insert the tags of a conversation that has none."""
    rows = [(number, tag) for tag in dict.fromkeys(tags)]
    tx.run_many("INSERT INTO tags (conversation, tag) VALUES (?, ?)", rows)


def select_head(tx: Tx, number: int) -> int:
    """Return the node that is the head."""
    ((head,),) = tx.rows("SELECT head FROM conversations WHERE number = ?", (number,))
    return head


def swap_head(tx: Tx, number: int, expected: int, head: int, now: float) -> bool:
    """Move the head by compare-and-swap; return whether it was at the expected node."""
    changed = tx.run(
        "UPDATE conversations SET head = ?, updated_at = ? WHERE number = ? AND head = ?",
        (head, now, number, expected),
    )
    return changed > 0
