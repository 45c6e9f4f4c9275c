"""The `incidents`, `tool_runs` and `exchanges` tables: further records of each node."""

from kedge.database.transactions import Tx
from kedge.store.records import StoredExchange, Telemetry
from kedge.store.responses import intern_scope

TABLES = ("incidents", "tool_runs", "exchanges")

_INSERT_INCIDENT = (
    "INSERT INTO incidents (conversation, node, kind, reason, scope, created_at) "
    "VALUES (?, ?, ?, ?, ?, ?)"
)
_INSERT_TOOL_RUN = (
    "INSERT INTO tool_runs (conversation, node, name, outcome, seconds, created_at) "
    "VALUES (?, ?, ?, ?, ?, ?)"
)
_INSERT_EXCHANGE = (
    "INSERT INTO exchanges (conversation, node, request, reply, status, created_at) "
    "VALUES (?, ?, ?, ?, ?, ?)"
)
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
    for each in telemetry.incidents:
        scope = intern_scope(tx, each.scope)
        values = (conversation, node, each.kind, each.reason, scope, each.created_at)
        tx.run(_INSERT_INCIDENT, values)
    for each in telemetry.tools:
        tx.run(
            _INSERT_TOOL_RUN,
            (conversation, node, each.name, each.outcome, each.seconds, each.created_at),
        )
    for each in telemetry.exchanges if body_bytes else ():
        request, reply = each.request[:body_bytes], each.reply[:body_bytes]
        tx.run(_INSERT_EXCHANGE, (conversation, node, request, reply, each.status, each.created_at))


def move_exchanges(tx: Tx, node: int, to: int) -> None:
    """Move the exchanges of a node to the one that has its response now."""
    tx.run("UPDATE exchanges SET node = ? WHERE node = ?", (to, node))


def select_exchanges(
    tx: Tx, *, conversation: int | None = None, node: int = 0
) -> list[StoredExchange]:
    """Return the stored requests and replies of a conversation or of a node, in order."""
    column = "e.node" if conversation is None else "e.conversation"
    key = node if conversation is None else conversation
    rows = tx.rows(_SELECT_EXCHANGES.format(column=column), (key, tx.namespace))
    return [StoredExchange(bytes(request), bytes(reply), *rest) for request, reply, *rest in rows]
