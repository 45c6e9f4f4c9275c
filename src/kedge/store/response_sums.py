"""Sums of responses, maintained so that statistics and sorted lists do not read every response.

Responses are added to the sums in batches, in the order of their nodes: `summed` has the number of the last
node whose response is included. A store adds a batch after `BATCH_SIZE` responses, and statistics add the rest
first, so the sums do not slow down an exchange. A response that is included is subtracted before it is
deleted or changed, and added again after a change, in the same transaction.

Why batches are exact with several writers: a batch waits until no transaction is adding nodes and blocks new ones,
so no response with a smaller number can appear later. Sends must not wait for that: a batch is small, and
gives up soon if another transaction, such as an import, is adding nodes for longer.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import msgspec

from kedge.errors import StoreError
from kedge.store.database.transactions import Database, Row, Tx, marks, split_chunks
from kedge.store.records import Damage

T = TypeVar("T")

BATCH_SIZE = 256
"""The number of responses that a process stores before it adds them to the sums."""
MAX_BATCH = 1_000
"""The number of responses that one transaction adds to the sums."""
SECONDS_PER_DAY = 86_400
ALL_DAYS = -1
"""The day under which `latency_counts` and `conversation_sums` have the sums of all days."""


class ResponseSums(msgspec.Struct, frozen=True):
    """The sums of responses with equal keys."""

    provider: str
    model: str
    status: str
    is_resent: int
    mode: str
    is_chained: int
    has_id: int
    reason: str
    healed: str
    pricing: str
    day: int
    """The day of responses whose cost was not stored, or 0."""
    responses: int
    sent_blocks: int
    sent_bytes: int
    saved_blocks: int
    saved_bytes: int
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    reasoning_tokens: int
    predictions: int
    predicted_tokens: int
    predicted_cached_tokens: int
    cache_write_tokens: int
    uncached_tokens: int
    results_by_id: int
    results_by_fallback: int
    results_unmatched: int
    cache_savings: float
    cost: float


_COLUMNS = ResponseSums.__struct_fields__
KEYS = _COLUMNS[: _COLUMNS.index("day")]
"""The members that define a group of responses, besides the namespace and the day."""
SUMS = _COLUMNS[_COLUMNS.index("responses") :]
"""The sums of a group."""
_FLOATS = ("cache_savings", "cost")

# The key columns of each table of sums, and the columns that are added up. A view has the part of each response.
_TABLES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "response_sums": (("namespace", "day", *KEYS), SUMS),
    "latency_counts": (
        ("namespace", "day", "provider", "model", "is_first_token", "seconds"),
        ("responses",),
    ),
    "conversation_sums": (
        ("namespace", "day", "conversation", "provider", "model"),
        ("responses", "tokens", "cost"),
    ),
    "chain_links": (("namespace", "scope", "response_id"), ("responses", "children")),
}


def round_seconds(seconds: float) -> float:
    """Round a duration to three significant digits, as the sums do."""
    return float(f"{seconds:.2e}")


def has_pending(tx: Tx) -> bool:
    """Return whether there are responses that are not in the sums."""
    return bool(tx.rows("SELECT 1 FROM responses WHERE node > (SELECT node FROM summed) LIMIT 1"))


def lock_position(tx: Tx) -> int:
    """Return the position, and block changes of the sums by others until the end of the transaction."""
    ((position,),) = tx.rows(f"SELECT node FROM summed {tx.dialect.for_update}")
    return position


def _add_batch(tx: Tx) -> bool:
    """Add the next responses to the sums; return whether there may be more."""
    tx.lock("SET LOCAL lock_timeout = 200")
    position = lock_position(tx)
    tx.lock("LOCK TABLE nodes IN SHARE ROW EXCLUSIVE MODE")
    nodes = tx.rows(
        f"SELECT node FROM responses WHERE node > ? ORDER BY node LIMIT {MAX_BATCH}", (position,)
    )
    if nodes:
        _apply(tx, "node > ? AND node <= ?", (position, nodes[-1][0]), 1)
        tx.run("UPDATE summed SET node = ?", nodes[-1])
    return len(nodes) == MAX_BATCH


async def add_pending(database: Database) -> None:
    """Add all responses to the sums that are not in them, in short transactions.

    Nothing is raised: what fails is done by the next call.
    """
    with suppress(StoreError):
        while await database.write(_add_batch):
            pass


async def read_with_sums(database: Database, work: Callable[[Tx], T]) -> T:
    """Run queries that use the sums, after adding all responses to them.

    A store that is read-only or full can have responses that are not in the sums, and so can a store during an import.
    """

    def read_unless_pending(tx: Tx) -> tuple[T] | None:
        if has_pending(tx):
            return None
        return (work(tx),)  # a tuple, because the result may be None

    complete = await database.read(read_unless_pending)
    if complete is not None:
        (result,) = complete
        return result
    await add_pending(database)
    return await database.read(work)


def apply_to_nodes(tx: Tx, nodes: Sequence[int], sign: int) -> None:
    """Subtract (-1) the responses of some nodes before they are deleted or changed, or add (1) them after a change."""
    if not nodes:
        return
    position = lock_position(tx)
    included = sorted(node for node in nodes if node <= position)
    for chunk in split_chunks(included):
        _apply(tx, f"node IN ({marks(chunk)})", chunk, sign)


def _apply(tx: Tx, where: str, values: Sequence[Any], sign: int) -> None:
    """Add the responses that meet a condition to all tables of sums, or subtract them."""
    for table, (keys, sums) in _TABLES.items():
        parts = f"FROM {table}_parts WHERE {where}"
        tx.run(_build_merge(table, parts, sign), values)
        if sign < 0:
            key = ", ".join(keys)
            counts = [f"{name} = 0" for name in ("responses", "children") if name in sums]
            is_empty = " AND ".join(counts)
            tx.run(
                f"DELETE FROM {table} WHERE {is_empty} AND ({key}) IN (SELECT {key} {parts})",
                values,
            )


def _build_merge(table: str, parts: str, sign: int) -> str:
    """Return the statement that adds parts to the rows of a table of sums, or subtracts them."""
    keys, sums = _TABLES[table]
    replaced: tuple[str, ...] = ()
    if table == "chain_links":
        replaced = ("depth", "day")
    new_values = [
        *(f"MAX({name})" for name in replaced),
        *(f"{sign} * SUM({name})" for name in sums),
    ]
    changes = [f"{name} = {table}.{name} + excluded.{name}" for name in sums]
    changes += [
        f"{name} = CASE WHEN excluded.depth > 0 THEN excluded.{name} ELSE {table}.{name} END"
        for name in replaced
    ]
    key = ", ".join(keys)
    return (
        f"INSERT INTO {table} ({', '.join((*keys, *replaced, *sums))}) "
        f"SELECT {', '.join((*keys, *new_values))} {parts} GROUP BY {key} "
        f"ON CONFLICT ({key}) DO UPDATE SET {', '.join(changes)}"
    )


def to_numbers(names: Iterable[str], row: Row) -> list[Any]:
    """Return the sums in a row as numbers; PostgreSQL returns decimals."""
    numbers: list[Any] = []
    for name, value in zip(names, row, strict=False):
        number_type = float if name in _FLOATS else int
        numbers.append(number_type(value or 0))
    return numbers


async def rebuild(database: Database) -> None:
    """Compute all sums again."""
    await database.write(_reset)
    await add_pending(database)


def _reset(tx: Tx) -> None:
    tx.allow_long_statements()
    lock_position(tx)
    for table in _TABLES:
        tx.run(f"DELETE FROM {table}")
    tx.run("UPDATE summed SET node = 0")


def check_sums(tx: Tx) -> list[Damage]:
    """Return the tables whose sums differ from the sums of the stored responses."""
    problem = "its sums are not those of the responses; gc() repairs them"
    return [Damage(table, problem) for table in _TABLES if _has_difference(tx, table)]


def _has_difference(tx: Tx, table: str) -> bool:
    keys, sums = (", ".join(names) for names in _TABLES[table])
    expected = ", ".join(f"-{name}" for name in _TABLES[table][1])
    differs = " OR ".join(f"ABS(SUM({name})) > 1e-6" for name in _TABLES[table][1])
    query = (
        f"SELECT 1 FROM (SELECT {keys}, {sums} FROM {table} UNION ALL "
        f"SELECT {keys}, {expected} FROM {table}_parts WHERE node <= (SELECT node FROM summed)) AS parts "
        f"GROUP BY {keys} HAVING {differs} LIMIT 1"
    )
    return bool(tx.rows(query))
