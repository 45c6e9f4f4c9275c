"""The store on PostgreSQL: its dialect of SQL, and the statement that adds a node in one round trip."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from kedge.database.postgres import (
    MAX_CONNECTIONS,
    NOW,
    STATEMENT_SECONDS,
    WAIT_SECONDS,
    PostgresPool,
    PostgresTransaction,
)
from kedge.store.database import Database, Dialect, OperationTimer, Row, Tx
from kedge.store.responses import STORED_COLUMNS
from kedge.text.json_text import encode

T = TypeVar("T")

POSTGRESQL = Dialect(
    name="postgresql",
    lock_nodes="LOCK TABLE nodes IN SHARE ROW EXCLUSIVE MODE",
    shorten_lock_wait="SET LOCAL lock_timeout = 200",
    for_update="FOR UPDATE",
    for_key_share="FOR KEY SHARE",
    lock_names="SELECT pg_advisory_xact_lock(5461729823)",
    texts_per_group=1 << 62,
    text_table="texts",
    create_text_table="",
    rewrite_texts="",
    insert_text="INSERT INTO texts (rowid, words) "
    "VALUES (?, array_to_tsvector(string_to_array(?, ' ')))",
    text_match="t.words @@ ?::tsquery",
    quote_term="'{}'",
    quote_prefix="'{}':*",
    term_separator=" & ",
    or_separator=" | ",
    now=NOW,
    floor="FLOOR({})::bigint",
    list_tables="SELECT tablename FROM pg_tables WHERE schemaname = current_schema() "
    "AND left(tablename, 13) <> 'kedge_server_'",
)


# Every statement is a round trip, so the node of an exchange is added by a single one. It fails (by a
# division by zero) unless every block is new; the transaction is then run again step by step.
_INSERT_NODE = b"""
WITH alive AS (
    SELECT c.number FROM conversations c JOIN nodes p ON p.tree = c.tree JOIN nodes root ON root.id = c.tree
    WHERE c.number = %(number)s AND c.id = %(id)s AND c.namespace = %(namespace)s
        AND p.id = %(parent)s AND p.length = %(kept)s
    FOR KEY SHARE OF root, c, p
), given AS (
    SELECT decode(block ->> 0, 'hex') AS hash, block ->> 1 AS body, place
    FROM jsonb_array_elements(%(blocks)s::jsonb) WITH ORDINALITY AS blocks (block, place)
), node AS (
    INSERT INTO nodes
        (tree, branch, parent, conversation, kind, kept, length, depth, memory, created_at, checksum)
    SELECT %(tree)s, %(branch)s, %(parent)s, number, %(kind)s, %(kept)s, %(length)s, %(depth)s,
        %(memory)s, %(now)s, %(checksum)s FROM alive
    RETURNING id, branch, conversation, kept
), made AS (
    INSERT INTO blocks (hash, owner, body)
    SELECT given.hash, node.conversation, given.body FROM given, node
    ON CONFLICT (hash) DO NOTHING RETURNING id, hash
), linked AS (
    INSERT INTO links (branch, place, block)
    SELECT node.branch, node.kept + given.place - 1, made.id
    FROM node, given JOIN made ON made.hash = given.hash
), response AS (
    INSERT INTO responses SELECT (jsonb_populate_record(
        NULL::responses, %(response)s::jsonb || jsonb_build_object('node', node.id)
    )).* FROM node WHERE %(answers)s
), moved AS (
    UPDATE conversations SET head = node.id, updated_at = %(now)s FROM node
    WHERE number = node.conversation AND head = %(head)s RETURNING number
)
SELECT node.id, (SELECT COUNT(*) FROM moved),
    1 / (CASE WHEN (SELECT COUNT(*) FROM made) = %(count)s THEN 1 ELSE 0 END)
FROM node
"""
_NODE_COLUMNS = (
    "tree", "branch", "parent", "number", "kind", "kept", "length", "depth", "memory", "now",
    "checksum",
)  # fmt: skip


class _PostgresTx(PostgresTransaction):
    """A transaction of the store."""

    dialect = POSTGRESQL

    namespace = ""

    def add_node(
        self,
        conversation_id: str,
        node: Row,
        blocks: Sequence[tuple[bytes, str]],
        response: Row | None,
        head: int | None,
        *,
        single_statement: bool,
    ) -> tuple[int, bool] | None:
        if self.is_retry:
            return None
        values: dict[str, Any] = dict(zip(_NODE_COLUMNS, node, strict=True))
        values["id"] = conversation_id
        values["namespace"] = self.namespace
        values["blocks"] = _encode([[name.hex(), body] for name, body in blocks])
        values["count"] = len(blocks)
        values["response"] = _encode_response(response, values["number"]) if response else "{}"
        values["answers"] = response is not None
        values["head"] = -1 if head is None else head
        if single_statement and not self.in_transaction:
            self.single_statement = True
            found = self.run_alone(_INSERT_NODE, values).fetchone()
        else:
            found = self._run(_INSERT_NODE, values).fetchone()
        return (found[0], bool(found[1])) if found else (0, False)


def _encode_response(values: Row, number: int) -> str:
    """Return the values of `STORED_COLUMNS` as the JSON of a row."""
    form = {
        name: f"\\x{value.hex()}" if isinstance(value, bytes) else value
        for name, value in zip(STORED_COLUMNS, values, strict=True)
    }
    form["conversation"] = number
    return _encode(form)


def _encode(value: object) -> str:
    """Return a value as JSON; PostgreSQL reads all forms of floats."""
    return encode(value).decode()


class PostgresDatabase(PostgresPool[_PostgresTx], Database):
    """A PostgreSQL database. The arguments are those of `PostgresPool`."""

    dialect = POSTGRESQL

    def __init__(
        self,
        url: str,
        *,
        connections: int = MAX_CONNECTIONS,
        wait_seconds: float = WAIT_SECONDS,
        statement_seconds: float = STATEMENT_SECONDS,
    ) -> None:
        super().__init__(
            url,
            _PostgresTx,
            connections=connections,
            wait_seconds=wait_seconds,
            statement_seconds=statement_seconds,
        )

    async def read(self, work: Callable[[Tx], T]) -> T:
        """Run queries against one consistent state."""
        with OperationTimer("read"):
            return await self.run_in_thread(self._read_current, work)

    async def write(self, work: Callable[[Tx], T]) -> T:
        """Run a transaction."""
        with OperationTimer("write"):
            return await self.run_in_thread(self._write_current, work)

    def read_sync(self, work: Callable[[Tx], T]) -> T:
        """Run queries in the calling thread."""
        with OperationTimer("read"):
            return self._read_current(work)

    def write_sync(self, work: Callable[[Tx], T]) -> T:
        """Run a transaction in the calling thread."""
        with OperationTimer("write"):
            return self._write_current(work)

    def _read_current(self, work: Callable[[_PostgresTx], T]) -> T:
        self.first_use.ensure()
        return self.run_read(work)

    def _write_current(self, work: Callable[[_PostgresTx], T]) -> T:
        self.first_use.ensure()
        return self.run_write(work)

    async def reclaim(self, *, vacuum: bool = False) -> None:
        """Do nothing, because the server reuses space itself."""
