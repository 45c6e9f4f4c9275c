"""Sums of responses, maintained so that statistics and sorted lists do not read every response.

Responses are added to the sums in batches, in the order of their nodes: `summed` has the number of the last
node whose response is included. A store adds a batch after `BATCH_SIZE` responses, and statistics add the rest
first, so the sums do not slow down an exchange. A response that is included is subtracted before it is
deleted or changed, and added again after a change, in the same transaction.

Why batches are exact with several writers: a batch waits until no transaction is adding nodes and blocks new ones,
so no response with a smaller number can appear later. Sends must not wait for that: a batch is small, and
gives up soon if another transaction, such as an import, is adding nodes for longer.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from kedge.database.transactions import Database, Row, Tx, marks, split_chunks
from kedge.errors import StoreBusy, StoreReadOnly
from kedge.store.records import ANSWERED_STATUSES, Damage

T = TypeVar("T")

BATCH_SIZE = 256
"""The number of responses that a process stores before it adds them to the sums."""
MAX_BATCH = 1_000
"""The number of responses that one transaction adds to the sums."""
SECONDS_PER_DAY = 86_400
ALL_DAYS = -1
"""The day under which `latency_counts` and `conversation_sums` have the sums of all days."""

ANSWERED = f"r.status IN ({', '.join(map(repr, ANSWERED_STATUSES))})"
_IS_PREDICTED = "r.predicted_cached_tokens IS NOT NULL AND r.cached_tokens IS NOT NULL"
_UNCACHED = "COALESCE(r.input_tokens, 0) - COALESCE(r.cached_tokens, 0)"

KEYS: dict[str, str] = {
    "provider": "r.provider",
    "model": "r.model",
    "status": "r.status",
    "mode": "r.mode",
    "is_chained": "CASE WHEN r.anchor IS NULL THEN 0 ELSE 1 END",
    "has_id": "CASE WHEN r.provider_response_id IS NULL THEN 0 ELSE 1 END",
    "reason": "COALESCE(r.reason, '')",
    "healed": "COALESCE(r.healed, '')",
    "pricing": "CASE WHEN r.cost IS NOT NULL THEN 'stored' "
    "WHEN r.input_tokens IS NOT NULL THEN 'unknown' ELSE 'none' END",
}
"""The members that define a group of responses, besides the namespace and the day."""
SUMS: dict[str, str] = {
    "responses": "COUNT(*)",
    "sent_blocks": "SUM(r.sent_blocks)",
    "sent_bytes": "SUM(r.sent_bytes)",
    "saved_blocks": "SUM(r.saved_blocks)",
    "saved_bytes": "SUM(r.saved_bytes)",
    "input_tokens": "SUM(COALESCE(r.input_tokens, 0))",
    "cached_tokens": "SUM(COALESCE(r.cached_tokens, 0))",
    "output_tokens": "SUM(COALESCE(r.output_tokens, 0))",
    "reasoning_tokens": "SUM(COALESCE(r.reasoning_tokens, 0))",
    "predictions": f"SUM(CASE WHEN {_IS_PREDICTED} THEN 1 ELSE 0 END)",
    "predicted_tokens": f"SUM(CASE WHEN {_IS_PREDICTED} THEN r.predicted_cached_tokens ELSE 0 END)",
    "predicted_cached_tokens": f"SUM(CASE WHEN {_IS_PREDICTED} THEN r.cached_tokens ELSE 0 END)",
    "cache_write_tokens": "SUM(COALESCE(r.cache_write_tokens, 0))",
    "uncached_tokens": f"SUM(CASE WHEN {_UNCACHED} > 0 THEN {_UNCACHED} ELSE 0 END)",
    "results_by_id": "SUM(r.results_by_id)",
    "results_by_fallback": "SUM(r.results_by_fallback)",
    "results_unmatched": "SUM(r.results_unmatched)",
    "cache_savings": "SUM(COALESCE(r.cache_savings, 0.0))",
    "cost": "SUM(COALESCE(r.cost, 0.0))",
}
"""The sums of a group."""
_FLOATS = ("cache_savings", "cost")
_CONVERSATION_SUMS = {
    "responses": "COUNT(*)",
    "tokens": "SUM(COALESCE(r.input_tokens, 0) + COALESCE(r.output_tokens, 0))",
    "cost": "SUM(COALESCE(r.cost, 0.0))",
}
_FROM = "FROM responses r JOIN conversations c ON c.number = r.conversation"

# The key columns of each table of sums; its other columns are added up.
_TABLES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "response_sums": (("namespace", "day", *KEYS), tuple(SUMS)),
    "latency_counts": (
        ("namespace", "day", "provider", "model", "is_first_token", "seconds"),
        ("responses",),
    ),
    "conversation_sums": (
        ("namespace", "day", "conversation", "provider", "model"),
        tuple(_CONVERSATION_SUMS),
    ),
    "chain_links": (("namespace", "scope", "response_id"), ("responses", "children")),
}
Totals = dict[tuple[Any, ...], list[Any]]
"""The sums of each key of a table."""


def day_sql(tx: Tx, column: str = "r.created_at") -> str:
    """Return the SQL for the day of a time."""
    return tx.dialect.floor.format(f"{column} / {SECONDS_PER_DAY}")


def round_seconds(seconds: float) -> float:
    """Round a duration to three significant digits, which limits the number of different values."""
    return float(f"{seconds:.2e}")


def get_position(tx: Tx) -> int:
    """Return the number of the last node whose response is in the sums."""
    return tx.rows("SELECT node FROM summed")[0][0]


def has_pending(tx: Tx) -> bool:
    """Return whether there are responses that are not in the sums."""
    return bool(tx.rows("SELECT 1 FROM responses WHERE node > (SELECT node FROM summed) LIMIT 1"))


def lock_position(tx: Tx) -> int:
    """Return the position, and block changes of the sums by others until the end of the transaction."""
    return tx.rows(f"SELECT node FROM summed {tx.dialect.for_update}")[0][0]


def _add_batch(tx: Tx) -> bool:
    """Add the next responses to the sums; return whether there may be more."""
    position = lock_position(tx)
    if tx.dialect.has_concurrent_writers:
        tx.run("LOCK TABLE nodes IN SHARE ROW EXCLUSIVE MODE")
    nodes = tx.rows(
        f"SELECT node FROM responses WHERE node > ? ORDER BY node LIMIT {MAX_BATCH}", (position,)
    )
    if nodes:
        _apply(tx, "r.node > ? AND r.node <= ?", (position, nodes[-1][0]), 1)
        tx.run("UPDATE summed SET node = ?", nodes[-1])
    return len(nodes) == MAX_BATCH


async def add_pending(database: Database) -> None:
    """Add all responses to the sums that are not in them, in short transactions.

    Raises:
        StoreBusy: Another transaction is adding nodes, or changes the sums, for a long time.
    """

    def work(tx: Tx) -> bool:
        if tx.dialect.has_concurrent_writers:
            tx.run("SET LOCAL lock_timeout = 200")
        return _add_batch(tx)

    while await database.write(work):
        pass


async def read_with_sums(database: Database, work: Callable[[Tx], T]) -> T:
    """Run queries that use the sums, after adding all responses to them.

    A read-only store can have responses that are not in the sums, and so can a store during an import.
    """

    def read(tx: Tx) -> tuple[T] | None:
        return None if has_pending(tx) else (work(tx),)

    found = await database.read(read)
    if found is not None:
        return found[0]
    with suppress(StoreReadOnly, StoreBusy):
        await add_pending(database)
    return await database.read(work)


def apply_to_nodes(tx: Tx, nodes: Sequence[int], sign: int) -> None:
    """Subtract (-1) the responses of some nodes before they are deleted or changed, or add (1) them after a change."""
    position = lock_position(tx) if nodes else 0
    included = sorted(node for node in nodes if node <= position)
    for chunk in split_chunks(included):
        _apply(tx, f"r.node IN ({marks(chunk)})", chunk, sign)


def _apply(tx: Tx, where: str, values: Sequence[Any], sign: int) -> None:
    """Add the responses that meet a condition to all tables of sums, or subtract them."""
    for table, totals in _compute_totals(tx, where, values).items():
        keys, sums = _TABLES[table]
        replaced = ("depth", "day") if table == "chain_links" else ()
        columns = (*keys, *replaced, *sums)
        changed = ", ".join(f"{name} = {table}.{name} + excluded.{name}" for name in sums)
        if replaced:  # an id may be known as an anchor before its response is added
            new_value = "CASE WHEN excluded.depth > 0 THEN excluded.{0} ELSE chain_links.{0} END"
            changed += "".join(f", {name} = {new_value.format(name)}" for name in replaced)
        rows = [(*key, *(sign * value for value in totals[key])) for key in sorted(totals)]
        if replaced:
            rows = [(*row[:3], abs(row[3]), abs(row[4]), *row[5:]) for row in rows]
        tx.run_many(
            f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({marks(columns)}) "
            f"ON CONFLICT ({', '.join(keys)}) DO UPDATE SET {changed}",
            rows,
        )
        if sign < 0:
            is_empty = " AND ".join(f"{name} = 0" for name in (sums if replaced else sums[:1]))
            where_key = " AND ".join(f"{name} = ?" for name in keys)
            tx.run_many(
                f"DELETE FROM {table} WHERE {where_key} AND {is_empty}",
                [row[: len(keys)] for row in rows],
            )


def _compute_totals(tx: Tx, where: str, values: Sequence[Any]) -> dict[str, Totals]:
    """Return the sums, for each table, of the responses that meet a condition."""
    day = day_sql(tx)
    return {
        "response_sums": _group(
            tx, f"c.namespace, {day}, {', '.join(KEYS.values())}", SUMS, where, values
        ),
        "latency_counts": _count_latencies(tx, where, values),
        "conversation_sums": _with_all_days(
            _group(
                tx,
                f"c.namespace, {day}, r.conversation, r.provider, r.model",
                _CONVERSATION_SUMS,
                where,
                values,
            )
        ),
        "chain_links": _count_chain_links(tx, where, values),
    }


def _group(
    tx: Tx, columns: str, sums: Mapping[str, str], where: str, values: Sequence[Any]
) -> Totals:
    rows = tx.rows(
        f"SELECT {', '.join(sums.values())}, {columns} {_FROM} WHERE {where} GROUP BY {columns}",
        values,
    )
    count = len(sums)
    return {tuple(row[count:]): to_numbers(sums, row) for row in rows}


def _with_all_days(totals: Totals) -> Totals:
    """Return the sums of each day, and those of all days together."""
    found = dict(totals)
    for (namespace, _, *rest), values in totals.items():
        key = (namespace, ALL_DAYS, *rest)
        known = found.get(key, [0] * len(values))
        found[key] = [one + other for one, other in zip(known, values, strict=True)]
    return found


def to_numbers(names: Iterable[str], row: Row) -> list[Any]:
    """Return the sums in a row as numbers; PostgreSQL returns decimals."""
    return [
        float(value or 0) if name in _FLOATS else int(value or 0)
        for name, value in zip(names, row, strict=False)
    ]


def _count_latencies(tx: Tx, where: str, values: Sequence[Any]) -> Totals:
    rows = tx.rows(
        f"SELECT c.namespace, {day_sql(tx)}, r.provider, r.model, r.seconds, r.first_token_seconds "
        f"{_FROM} WHERE {where} AND {ANSWERED}",
        values,
    )
    counts = Counter(
        (namespace, day, provider, model, is_first, round_seconds(seconds))
        for namespace, own_day, provider, model, *times in rows
        for is_first, seconds in enumerate(times)
        if seconds is not None
        for day in (own_day, ALL_DAYS)
    )
    return {key: [count] for key, count in counts.items()}


def _count_chain_links(tx: Tx, where: str, values: Sequence[Any]) -> Totals:
    rows = tx.rows(
        f"SELECT c.namespace, r.scope, r.provider_response_id, r.anchor, r.depth, {day_sql(tx)} "
        f"{_FROM} WHERE {where} AND (r.provider_response_id IS NOT NULL OR r.anchor IS NOT NULL)",
        values,
    )
    totals: Totals = {}
    for namespace, scope, name, anchor, depth, day in rows:
        if name is not None:
            link = totals.setdefault((namespace, scope, name), [0, 0, 0, 0])
            link[:3] = depth or 0, day, link[2] + 1
        if anchor is not None and depth:  # a rejected or stopped request continues no chain
            totals.setdefault((namespace, scope, anchor), [0, 0, 0, 0])[3] += 1
    return totals


async def rebuild(database: Database) -> None:
    """Compute all sums again."""
    await database.write(_reset)
    with suppress(StoreBusy):  # then the next statistics add the responses
        await add_pending(database)


def _reset(tx: Tx) -> None:
    tx.allow_long_statements()
    lock_position(tx)
    for table in _TABLES:
        tx.run(f"DELETE FROM {table}")
    tx.run("UPDATE summed SET node = 0")


def check_sums(tx: Tx) -> list[Damage]:
    """Return the tables whose sums differ from those of the stored responses."""
    found: list[Damage] = []
    expected = _compute_totals(tx, "r.node <= ?", (get_position(tx),))
    for table, (keys, sums) in _TABLES.items():
        rows = tx.rows(f"SELECT {', '.join((*keys, *sums))} FROM {table}")
        stored = {tuple(row[: len(keys)]): row[len(keys) :] for row in rows}
        computed = {key: totals[-len(sums) :] for key, totals in expected[table].items()}
        if stored.keys() != computed.keys() or not all(
            abs(float(one) - float(other)) < 1e-6
            for key, values in stored.items()
            for one, other in zip(values, computed[key], strict=True)
        ):
            found.append(
                Damage(table, "its sums are not those of the responses; gc() repairs them")
            )
    return found
