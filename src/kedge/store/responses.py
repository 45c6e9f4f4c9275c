"""The `responses` and `scopes` tables: responses stored with their nodes, and read back as anchors."""

import hashlib
import json
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import msgspec
from msgspec.structs import replace

from kedge._internal.arguments import check_times, describe_value
from kedge._internal.json_text import decode
from kedge.errors import InvalidSetting
from kedge.events.request_record import RejectedCandidate, RequestRecord
from kedge.planning import AnchorRecord, Status
from kedge.planning.anchors import decode_token_counts, limit_expiry
from kedge.planning.sent_request import decode_sent_request
from kedge.store import response_sums
from kedge.store.database.transactions import Row, Tx, join_filters, marks, split_chunks
from kedge.store.records import ConversationRow, Incident, StoredExchange, Telemetry, ToolRow

DIGEST_PREFIX = "sha256:"
RESPONSE_COLUMNS: tuple[str, ...] = tuple(
    name
    for name in RequestRecord.__struct_fields__
    if name not in ("node", "parent", "conversation")
)
STORED_COLUMNS = (*RESPONSE_COLUMNS, "checksum")
_get_columns = attrgetter(*RESPONSE_COLUMNS)
CHECKSUM_BYTES = 8
_NULLABLE_TEXTS = frozenset(
    {
        "provider_response_id", "anchor", "reason", "healed", "error", "error_code", "lost_reason", "unusable_reason",
        "settings",
    }
)  # fmt: skip
"""Members that are an empty string in Python and NULL in the database."""

INSERT_RESPONSE = (
    f"INSERT INTO responses (node, conversation, {', '.join(STORED_COLUMNS)}) "
    f"VALUES ({', '.join('?' * (len(STORED_COLUMNS) + 2))})"
)
_SELECT = (
    f"SELECT {', '.join(f'r.{name}' for name in RESPONSE_COLUMNS if name != 'scope')}, s.name, "
    "r.node, n.parent, c.id, c.retention FROM responses r JOIN scopes s ON s.number = r.scope "
    "JOIN nodes n ON n.id = r.node JOIN conversations c ON c.number = r.conversation "
)
_READ_COLUMNS = tuple(name for name in RESPONSE_COLUMNS if name != "scope")


def response_values(row: RequestRecord, scope: int) -> Row:
    """Return the values of `STORED_COLUMNS`, with the number of the scope instead of its name."""
    values = [*_get_columns(row)]
    for index, convert in _CONVERTERS.items():
        values[index] = convert(values[index])
    checksum = hash_row(values)
    values[RESPONSE_COLUMNS.index("scope")] = scope
    return (*values, checksum)


def hash_row(values: Sequence[Any]) -> bytes:
    """Return the checksum of the values of some columns; a database may return integers as floats."""
    plain = [float(value) if isinstance(value, int) else value for value in values]
    return hashlib.sha256(msgspec.json.encode(plain)).digest()[:CHECKSUM_BYTES]


def find_wrong_checksums(tx: Tx, where: str, values: Sequence[Any] = ()) -> dict[int, bytes]:
    """Return the responses whose columns do not match their checksum, each with the checksum of its columns."""
    columns = ", ".join("s.name" if name == "scope" else f"r.{name}" for name in RESPONSE_COLUMNS)
    rows = tx.rows(
        f"SELECT r.node, r.checksum, {columns} FROM responses r "
        f"LEFT JOIN scopes s ON s.number = r.scope WHERE {where}",
        values,
    )
    wrong: dict[int, bytes] = {}
    for node, stored, *members in rows:
        computed = hash_row(members)
        if computed != stored:
            wrong[node] = computed
    return wrong


def write_response_checksums(tx: Tx, nodes: Sequence[int]) -> None:
    """Update the checksums of responses whose columns were changed."""
    for chunk in split_chunks(nodes):
        wrong = find_wrong_checksums(tx, f"r.node IN ({marks(chunk)})", chunk)
        update = "UPDATE responses SET checksum = ? WHERE node = ?"
        tx.run_many(update, [(checksum, node) for node, checksum in wrong.items()])


def intern_scope(tx: Tx, name: str) -> int:
    """Return the number of a scope, which is stored when it is first used."""
    query = "SELECT number FROM scopes WHERE name = ?"
    rows = tx.rows(query, (name,))
    if not rows:
        tx.run("INSERT INTO scopes (name) VALUES (?) ON CONFLICT DO NOTHING", (name,))
        rows = tx.rows(query, (name,))
    ((number,),) = rows
    return number


def select_responses(tx: Tx, where: str = "", values: Sequence[Any] = ()) -> list[RequestRecord]:
    """Return the responses that meet a condition, in the order of their nodes."""
    return [
        _response_from_row(row) for row in tx.rows(f"{_SELECT} {where} ORDER BY r.node", values)
    ]


def list_responses(
    tx: Tx,
    conversation: ConversationRow | None = None,
    *,
    since: float | None = None,
    until: float | None = None,
) -> list[RequestRecord]:
    """Return responses in the order in which they were stored."""
    check_times(since=since, until=until)
    filters = {
        "r.conversation = ?": conversation and conversation.number,
        "r.created_at >= ?": since,
        "r.created_at < ?": until,
    }
    where, values = join_filters("c.namespace = ?", filters)
    return select_responses(tx, f"WHERE {where}", [tx.namespace, *values])


def _response_from_row(row: Row) -> RequestRecord:
    members = dict(zip(_READ_COLUMNS, row, strict=False))
    for name in _NULLABLE_TEXTS:
        members[name] = members[name] or ""
    scope, node, parent, conversation, retention = row[len(_READ_COLUMNS) :]
    members["expires_at"] = limit_expiry(members["created_at"], members["expires_at"], retention)
    members["digest"] = unpack_digest(members["digest"])
    members["derived"] = _decode_list(members["derived"])
    members["omitted"] = _decode_list(members["omitted"])
    members["counted"] = decode_token_counts(members["counted"])
    members["sent_request"] = decode_sent_request(members["sent_request"])
    rejected = _decode_list(members["rejected"])
    members["rejected"] = tuple(RejectedCandidate(*candidate) for candidate in rejected)
    for name in ("stored", "is_resent"):
        members[name] = bool(members[name])
    return RequestRecord(
        **members, scope=scope, node=node, parent=parent, conversation=conversation
    )


def mark_lost(tx: Tx, record: AnchorRecord, reason: str) -> bool:
    """Record that the provider no longer has a response; return whether that is new."""
    response_sums.lock_position(tx)  # before the responses, as deletions do
    rows = tx.rows(
        "SELECT node FROM responses WHERE digest = ? AND provider_response_id = ? "
        "AND scope = (SELECT number FROM scopes WHERE name = ?) AND status = 'completed' "
        "AND conversation IN (SELECT number FROM conversations WHERE namespace = ?) "
        f"{tx.dialect.for_update}",
        (pack_digest(record.digest), record.response_id, record.scope, tx.namespace),
    )
    nodes = [node for (node,) in rows]
    response_sums.apply_to_nodes(tx, nodes, -1)
    tx.run_many(
        "UPDATE responses SET status = 'lost', lost_reason = ? WHERE node = ?",
        [(reason, node) for node in nodes],
    )
    write_response_checksums(tx, nodes)
    response_sums.apply_to_nodes(tx, nodes, 1)
    return bool(nodes)


def mark_unknown(tx: Tx, node: int, error: str, error_code: str) -> bool:
    """Record why it is unknown what became of a response in the background; return whether that is new."""
    response_sums.lock_position(tx)  # before the responses, as deletions do
    rows = tx.rows(
        "SELECT node FROM responses WHERE node = ? AND status = 'running' "
        "AND conversation IN (SELECT number FROM conversations WHERE namespace = ?) "
        f"{tx.dialect.for_update}",
        (node, tx.namespace),
    )
    if not rows:
        return False
    response_sums.apply_to_nodes(tx, [node], -1)
    tx.run(
        "UPDATE responses SET status = 'unknown', error = ?, error_code = ? WHERE node = ?",
        (error or None, error_code or None, node),
    )
    write_response_checksums(tx, [node])
    response_sums.apply_to_nodes(tx, [node], 1)
    return True


def delete_running(tx: Tx, node: int) -> bool:
    """Delete the row of a response in the background that has ended; return whether there was one."""
    response_sums.lock_position(tx)  # before the responses, as deletions do
    running = "FROM responses WHERE node = ? AND status IN ('running', 'unknown')"
    if not tx.rows(f"SELECT node {running}", (node,)):
        return False
    response_sums.apply_to_nodes(tx, [node], -1)
    tx.run(f"DELETE {running}", (node,))
    return True


def find_anchors(
    tx: Tx, scope: str, digests: Sequence[str], *, retention: float | None = None
) -> list[AnchorRecord]:
    """Return the completed responses of a scope whose context has one of the digests.

    The records of the responses are themselves the index of conversations. A row in `response_index` as well would be a
    second copy, which every insertion, deletion, import and verification would have to keep equal. There is no ``add``,
    because a response is inserted with its node, and ``mark_lost`` keeps the row, with the reason.
    """
    for chunk in split_chunks(digests):
        rows = tx.rows(
            f"SELECT {ANCHOR_COLUMNS}, c.retention FROM responses r "
            "JOIN scopes s ON s.number = r.scope JOIN conversations c ON c.number = r.conversation "
            f"WHERE r.digest IN ({marks(chunk)}) AND s.name = ? AND r.status = 'completed' "
            "AND r.unusable_reason IS NULL AND c.namespace = ?",
            (*map(pack_digest, chunk), scope, tx.namespace),
        )
        if rows:
            return [
                anchor_from_row(columns, scope, _shorter(own_retention, retention))
                for *columns, own_retention in rows
            ]
    return []


def _shorter(retention: float | None, other: float | None) -> float | None:
    """Return the shorter of two retentions; None is without a limit."""
    if retention is None:
        return other
    if other is None:
        return retention
    return min(retention, other)


ANCHOR_COLUMNS = (
    "r.provider_response_id, r.scope, r.digest, r.block_count, r.depth, r.root_created_at, r.status, "
    "r.stored, r.created_at, r.expires_at, r.barrier, r.derived, r.counted, r.unusable_reason"
)
"""The columns of a response from which its anchor is built."""
_ANCHOR_STATUS: dict[str, Status] = {"refused": "failed", "cut": "failed"}


def anchor_from_row(row: Sequence[Any], scope: str, retention: float | None) -> AnchorRecord:
    """Return the anchor in a row of `ANCHOR_COLUMNS`, which expires after ``retention`` seconds at the latest."""
    response_id, _, digest, block_count, depth, root_created_at, status, *rest = row
    stored, created_at, expires_at, barrier, derived, counted, unusable_reason = rest
    return AnchorRecord(
        response_id or "",
        scope,
        unpack_digest(digest),
        block_count,
        depth,
        root_created_at,
        unusable_reason or _ANCHOR_STATUS.get(status) or status,
        bool(stored),
        created_at,
        limit_expiry(created_at, expires_at, retention),
        barrier,
        _decode_list(derived),
        decode_token_counts(counted),
    )


def pack_digest(digest: str) -> bytes | None:
    """Return a digest as bytes, to save space; all digests use one algorithm."""
    if not digest:
        return None
    try:
        return bytes.fromhex(digest.removeprefix(DIGEST_PREFIX))
    except ValueError:
        raise InvalidSetting(f"{describe_value(digest)} is not a digest") from None


def unpack_digest(digest: bytes | None) -> str:
    """Return a digest in its text form."""
    if not digest:
        return ""
    return DIGEST_PREFIX + digest.hex()


def _clean_text(value: str) -> str | None:
    """Return text that both databases can store; None for an empty text."""
    return value.replace("\0", "\ufffd") or None


def _encode_list(values: Sequence[Any]) -> str | None:
    return json.dumps(values) if values else None


def _decode_list(text: str | None) -> tuple[Any, ...]:
    return tuple(decode(text)) if text else ()


def _encode_struct(value: object) -> str | None:
    return msgspec.json.encode(value).decode() if value else None


_COLUMN_TYPES: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(_NULLABLE_TEXTS, _clean_text),
    "model": lambda name: _clean_text(name) or "",
    "stored": int,
    "is_resent": int,
    "digest": pack_digest,
    "derived": _encode_list,
    "counted": _encode_struct,
    "sent_request": _encode_struct,
    "rejected": _encode_list,
    "omitted": _encode_list,
}
_CONVERTERS = {RESPONSE_COLUMNS.index(name): convert for name, convert in _COLUMN_TYPES.items()}
"""Converts the value of a member to the value of its column, by the position of the column."""


TABLES: dict[str, tuple[str, ...]] = {
    table: kind.__struct_fields__[:-2]  # the node and the conversation are known
    for table, kind in {
        "incidents": Incident,
        "tool_runs": ToolRow,
        "exchanges": StoredExchange,
    }.items()
}
"""The tables of records that belong to a node, with the members of each record."""
_SELECT_EXCHANGES = (
    "SELECT e.request, e.reply, e.status, e.created_at, e.node, c.id FROM exchanges e "
    "JOIN conversations c ON c.number = e.conversation WHERE {column} = ? AND c.namespace = ? "
    "ORDER BY e.id"
)


def insert_telemetry(tx: Tx, telemetry: Telemetry, conversation: int, node: int) -> None:
    """Insert the telemetry of a node.

    Bodies are truncated to ``tx.body_bytes``; with 0, no exchange is stored.
    """
    for incident in telemetry.incidents:
        insert_record(tx, "incidents", conversation, node, incident)
    for tool_run in telemetry.tools:
        insert_record(tx, "tool_runs", conversation, node, tool_run)
    size = tx.body_bytes
    if size:
        for exchange in telemetry.exchanges:
            truncated = replace(
                exchange, request=exchange.request[:size], reply=exchange.reply[:size]
            )
            insert_record(tx, "exchanges", conversation, node, truncated)


def insert_record(
    tx: Tx, table: str, conversation: int, node: int, record: Incident | ToolRow | StoredExchange
) -> None:
    """Insert a record of a node into one of the `TABLES`."""
    members = TABLES[table]
    values = [getattr(record, name) for name in members]
    if isinstance(record, Incident):
        values[members.index("scope")] = intern_scope(tx, record.scope)
    tx.run(
        f"INSERT INTO {table} (conversation, node, {', '.join(members)}) VALUES (?, ?, {marks(members)})",
        (conversation, node, *values),
    )


def move_exchanges(tx: Tx, node: int, to: int) -> None:
    """Move the exchanges of a node to the node that has its response now."""
    tx.run("UPDATE exchanges SET node = ? WHERE node = ?", (to, node))


def list_exchanges(tx: Tx, conversation: ConversationRow) -> list[StoredExchange]:
    """Return the stored requests and replies of a conversation in order; see ``keep_bodies``."""
    return _select_exchanges(tx, "e.conversation", conversation.number)


def select_node_exchanges(tx: Tx, node: int) -> list[StoredExchange]:
    """Return the stored requests and replies for a node, in order."""
    return _select_exchanges(tx, "e.node", node)


def _select_exchanges(tx: Tx, column: str, key: int) -> list[StoredExchange]:
    rows = tx.rows(_SELECT_EXCHANGES.format(column=column), (key, tx.namespace))
    return [StoredExchange(bytes(request), bytes(reply), *rest) for request, reply, *rest in rows]
