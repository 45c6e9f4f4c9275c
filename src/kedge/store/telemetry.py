"""The `incidents`, `tool_runs` and `exchanges` tables: further records of each node."""

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from kedge.database.transactions import Tx, marks
from kedge.store.conversations import check_row
from kedge.store.records import ConversationRow, StoredExchange, Telemetry
from kedge.store.responses import intern_scope

TABLES: dict[str, tuple[str, ...]] = {
    "incidents": ("kind", "reason", "scope", "created_at"),
    "tool_runs": ("name", "outcome", "seconds", "created_at"),
    "exchanges": ("request", "reply", "status", "created_at"),
}
"""The tables of records that belong to a node, with the members of each record."""
_SELECT_EXCHANGES = (
    "SELECT e.request, e.reply, e.status, e.created_at, e.node, c.id FROM exchanges e "
    "JOIN conversations c ON c.number = e.conversation WHERE {column} = ? AND c.namespace = ? "
    "ORDER BY e.id"
)


def insert_telemetry(
    tx: Tx, telemetry: Telemetry, conversation: int, node: int, body_bytes: int
) -> None:
    """Insert the telemetry of a node.

    Bodies are truncated to ``body_bytes``; with 0, no exchange is stored.
    """
    exchanges = [
        replace(each, request=each.request[:body_bytes], reply=each.reply[:body_bytes])
        for each in (telemetry.exchanges if body_bytes else ())
    ]
    for table, found in zip(TABLES, (telemetry.incidents, telemetry.tools, exchanges), strict=True):
        for each in found:
            values = [getattr(each, name) for name in TABLES[table]]
            insert_record(tx, table, conversation, node, values)


def insert_record(tx: Tx, table: str, conversation: int, node: int, values: Sequence[Any]) -> None:
    """Insert a record of a node, from the values of the members in `TABLES`."""
    members = TABLES[table]
    stored = [
        intern_scope(tx, value) if name == "scope" else value
        for name, value in zip(members, values, strict=True)
    ]
    tx.run(
        f"INSERT INTO {table} (conversation, node, {', '.join(members)}) VALUES (?, ?, {marks(members)})",
        (conversation, node, *stored),
    )


def move_exchanges(tx: Tx, node: int, to: int) -> None:
    """Move the exchanges of a node to the one that has its response now."""
    tx.run("UPDATE exchanges SET node = ? WHERE node = ?", (to, node))


@check_row
def list_exchanges(tx: Tx, conversation: ConversationRow) -> list[StoredExchange]:
    """Return the stored requests and replies of a conversation in order; see ``keep_bodies``."""
    return _select_exchanges(tx, "e.conversation", conversation.number)


def select_node_exchanges(tx: Tx, node: int) -> list[StoredExchange]:
    """Return the stored requests and replies for a node, in order."""
    return _select_exchanges(tx, "e.node", node)


def _select_exchanges(tx: Tx, column: str, key: int) -> list[StoredExchange]:
    rows = tx.rows(_SELECT_EXCHANGES.format(column=column), (key, tx.namespace))
    return [StoredExchange(bytes(request), bytes(reply), *rest) for request, reply, *rest in rows]
