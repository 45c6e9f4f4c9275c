"""What a large store costs: statistics, lists, deletion, long conversations, and many of them on one PostgreSQL.

The baseline of a large store is a small one with the same kind of conversations, in the same run. CPU is that of this
process. On PostgreSQL the time on the clock is measured, because the server works in other processes: exchanges of
``WRITERS`` conversations at the same time, each a question and an answer in a transaction of its own, against a
store that has a hundred times as many conversations. ``KEDGE_BENCH_CONVERSATIONS`` makes the large store larger.
"""

# ruff: noqa: S608 - the statements are made of constants

import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from pathlib import Path

from benchmarks.bench_store import make_exchange, make_row
from benchmarks.table import Row
from kedge.analytics import analyze
from kedge.conversation import Conversation
from kedge.store import Store, open_store
from kedge.store.database.transactions import Tx
from kedge.store.summaries import list_summaries
from kedge.turns import user

BASELINE = "a store with fewer conversations"
CONVERSATIONS = int(os.environ.get("KEDGE_BENCH_CONVERSATIONS", "4000"))
EXCHANGES = 20
LONG = 200_000
SMALLER = 100
WRITERS, ROUNDS = 32, 10

# Both databases make the rows of all conversations themselves; each node adds one block.
_SERIES = "WITH RECURSIVE {0} (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM {0} WHERE n < {1}) "
_RANDOM = {
    "sqlite": "randomblob(32)",
    "postgresql": "uuid_send(gen_random_uuid()) || uuid_send(gen_random_uuid())",
}


def fill(tx: Tx, conversations: int) -> None:
    """Insert conversations of ``EXCHANGES`` exchanges; the store must be empty."""
    nodes, random = 2 * EXCHANGES + 1, _RANDOM[tx.dialect.name]
    now = time.time()
    body = (
        '\'{{"kind":"user","id":"blk_\' || {0} || \'","parts":[{{"type":"text","text":"Is it cold in city \' || {0} '
        "|| ', and do I need a coat?\"}}]}}'"
    ).format("n")
    first = f"((n - 1) * {nodes} + 1)"
    tx.run(
        "INSERT INTO conversations (number, id, title, archived, tree, head, created_at, updated_at) "
        f"{_SERIES.format('c', conversations)} SELECT n, 'conv_' || n, 'Conversation ' || n, 0, {first}, "
        f"{first} + {nodes - 1}, {now}, {now} + n / 1e6 FROM c"
    )
    index = f"((n - 1) % {nodes})"
    root = f"(n - {index})"
    tx.run(
        "INSERT INTO nodes (id, tree, branch, parent, conversation, kind, kept, length, depth, created_at) "
        f"{_SERIES.format('c', conversations * nodes)} SELECT n, {root}, {root}, "
        f"CASE WHEN {index} = 0 THEN 0 ELSE n - 1 END, (n - 1) / {nodes} + 1, CASE WHEN {index} = 0 THEN 'root' "
        f"WHEN {index} % 2 = 1 THEN 'asked' ELSE 'answered' END, CASE WHEN {index} = 0 THEN 0 ELSE {index} - 1 END, "
        f"{index}, {index}, {now} FROM c"
    )
    tx.run(
        "INSERT INTO blocks (id, hash, body) "
        f"{_SERIES.format('c', conversations * nodes)} SELECT n, {random}, {body} FROM c "
        f"WHERE {index} > 0"
    )
    tx.run(
        f"INSERT INTO links (branch, place, block) {_SERIES.format('c', conversations * nodes)} "
        f"SELECT {root}, {index} - 1, n FROM c WHERE {index} > 0"
    )
    tx.run("INSERT INTO scopes (name) VALUES ('openai')")
    tx.run(
        "INSERT INTO responses (node, conversation, provider, scope, provider_response_id, model, mode, anchor, "
        "reason, sent_blocks, sent_bytes, saved_blocks, saved_bytes, input_tokens, output_tokens, cost, seconds, "
        "status, created_at, stored, digest, block_count, depth) "
        f"{_SERIES.format('c', conversations * nodes)} SELECT n, (n - 1) / {nodes} + 1, 'openai', 1, 'resp_' || n, "
        f"'gpt-5.1', 'chained', CASE WHEN {index} > 2 THEN 'resp_' || (n - 2) END, "
        f"CASE WHEN {index} > 2 THEN NULL ELSE 'new' END, 1, 200, {index}, 400 * {index}, 1000, 100, 0.001, "
        f"(n % 997) / 100.0, 'completed', {now} - (n % 30) * 86400, 1, {random}, {index}, {index} / 2 FROM c "
        f"WHERE {index} > 0 AND {index} % 2 = 0"
    )
    if tx.dialect.name == "postgresql":
        for table, key in (("conversations", "number"), ("nodes", "id"), ("blocks", "id")):
            tx.rows(
                f"SELECT setval(pg_get_serial_sequence('{table}', '{key}'), (SELECT MAX({key}) FROM {table}))"
            )
        tx.run("ANALYZE")


async def measure(work: Callable[[], Awaitable[object]], *, repeat: int = 5) -> tuple[float, float]:
    """CPU seconds and seconds on the clock of one call: the least of some rounds."""
    best = (float("inf"), float("inf"))
    for _ in range(repeat):
        start, clock = time.process_time(), time.perf_counter()
        await work()
        times = time.process_time() - start, time.perf_counter() - clock
        best = min(best[0], times[0]), min(best[1], times[1])
    return best


async def measure_store(store: Store, conversations: int) -> dict[str, tuple[float, float]]:
    """The costs of one store."""
    await store.database.write(lambda tx: fill(tx, conversations))
    await analyze(store)
    doomed = iter(range(1, 100))

    async def delete() -> None:
        await store.delete(f"conv_{next(doomed)}")

    return {
        "analyze": await measure(lambda: analyze(store)),
        "list, newest first": await measure(lambda: list_summaries(store, limit=20)),
        "list, by tokens": await measure(lambda: list_summaries(store, order="tokens", limit=20)),
        "delete a conversation": await measure(delete),
    }


async def measure_sqlite(folder: Path) -> list[Row]:
    """A small and a large store on SQLite."""
    results: list[dict[str, tuple[float, float]]] = []
    for size in (CONVERSATIONS // SMALLER, CONVERSATIONS):
        async with open_store(f"sqlite:///{folder}/{size}.db") as store:
            results.append(await measure_store(store, size))
    few, many = results
    rows = [
        Row(
            f"{label}, {SMALLER} times as many",
            many[label][0] / few[label][0],
            detail=_ms(many[label][0]),
        )
        for label in many
    ]
    return [
        Row(f"analyze {CONVERSATIONS:,} conversations", many["analyze"][0], 0.1, " s"),
        *rows,
    ]


async def measure_long(folder: Path) -> list[Row]:
    """A conversation of many blocks."""
    async with open_store(f"sqlite:///{folder}/long.db") as store:
        blocks = [user(f"Is it cold in city number {number}?") for number in range(LONG)]
        row = await store.create(blocks=blocks)
        conversation = await Conversation.open("practice:", store=store, id=row.id)
        await conversation.append("One more.")

        async def undo() -> None:
            await (await Conversation.open("practice:", store=store, id=row.id)).undo()
            await (await Conversation.open("practice:", store=store, id=row.id)).redo()

        opened = await measure(lambda: Conversation.open("practice:", store=store, id=row.id))
        forked = await measure(conversation.fork)
        undone = await measure(undo, repeat=2)
        loaded = await measure(lambda: store.load(row), repeat=1)
    return [
        Row(f"open {LONG:,} blocks", opened[0], 0.3, " s", f"load them: {loaded[0]:.1f} s"),
        Row("… fork", forked[0], 0.3, " s"),
        Row("… open, undo, open, redo", undone[0], 0.6, " s"),
    ]


async def exchange(store: Store, name: str, number: int) -> float:
    """Store a question and an answer; return how long it took."""
    row = await store.conversation(name)
    question, answer = make_exchange(number)
    start = time.perf_counter()
    head = await store.node(row, row.head)
    node = await store.append(row, head, [question], kind="asked")
    await store.append(
        row, node, [answer], kind="answered", response=make_row(number), head=head.id
    )
    return time.perf_counter() - start


async def simulate(store: Store, conversations: int) -> tuple[float, float]:
    """Exchanges per second of ``WRITERS`` conversations at a time, and the 95th percentile of their seconds."""
    took: list[float] = []
    start = time.perf_counter()
    for number in range(ROUNDS):
        names = [f"conv_{100 + each * (conversations - 100) // WRITERS}" for each in range(WRITERS)]
        took += await asyncio.gather(
            *(exchange(store, name, number * 1_000 + each) for each, name in enumerate(names))
        )
    return len(took) / (time.perf_counter() - start), sorted(took)[len(took) * 95 // 100]


async def measure_postgres(url: str, conversations: int) -> dict[str, tuple[float, float]]:
    """The costs of one store on PostgreSQL, and the simulation."""
    async with open_store(url) as store:
        results = await measure_store(store, conversations)
        await simulate(store, conversations)
        results["simulation"] = await simulate(store, conversations)
        return results


def compare_postgres(
    few: dict[str, tuple[float, float]], many: dict[str, tuple[float, float]]
) -> list[Row]:
    """The rows of a large store on PostgreSQL against a small one."""
    rate, p95 = many.pop("simulation")
    base, _ = few.pop("simulation")
    rows = [
        Row(
            f"PostgreSQL: {label}, 10 times as many",
            many[label][1] / few[label][1],
            detail=_ms(many[label][1]),
        )
        for label in many
    ]
    detail = f"{rate:.0f} a second, p95 {_ms(p95)}"
    return [
        *rows,
        Row("PostgreSQL: exchanges per second, 10 times as many", rate / base, detail=detail),
    ]


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


def run() -> list[Row]:
    """Measure everything; PostgreSQL comes from the tests' own server."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kedge-bench-")))
        rows = asyncio.run(measure_sqlite(folder))
        rows += asyncio.run(measure_long(folder))
        sys.path.insert(0, os.fspath(Path(__file__).parent.parent / "tests"))
        from postgresql import (  # pyright: ignore[reportMissingImports]
            create_schema,
            provide_server_url,
        )

        url = stack.enter_context(provide_server_url())
        few, many = (
            asyncio.run(measure_postgres(stack.enter_context(create_schema(url)), size))
            for size in (CONVERSATIONS // 10, CONVERSATIONS)
        )
        return rows + compare_postgres(few, many)
