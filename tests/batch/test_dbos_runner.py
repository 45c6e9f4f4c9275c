"""Tests of batches with DBOS worker processes, including one that is killed."""

import os
import signal
import sqlite3
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from threading import Barrier
from types import SimpleNamespace
from typing import Any

import pytest

from kedge.batch import BatchJob, BatchLine, Progress, dbos_runner, run_batch
from kedge.batch.dbos_runner import DbosRunner, default_database_url, enqueue_lines, prepare_client
from kedge.errors import BatchFailed, InvalidBatch
from kedge.store import Store, open_store
from kedge.testing import TestServer, serve
from kedge.turns import UserBlock

LINES = 8
PREPARATIONS = 6
TURNS = 2
needs_sqlite = pytest.mark.skipif(
    sqlite3.sqlite_version_info < dbos_runner.MIN_SQLITE,
    reason=f"DBOS needs a newer SQLite than {sqlite3.sqlite_version} with this version of Python",
)


def count_questions(server: TestServer) -> Counter[str]:
    """Return how often the server received each question."""
    return Counter(each.body["input"][-1]["content"] for each in server.requests)


async def answered_questions(store: Store, name: str) -> set[str]:
    """Return the questions that have an answer in the store."""
    texts: set[str] = set()
    for row in await store.conversations(tag=f"batch:{name}", limit=1_000):
        blocks = (await store.load(row)).blocks
        texts |= {block.text for block in blocks if isinstance(block, UserBlock)}
    return texts


async def test_killed_worker_is_replaced(empty_schema: str, tmp_path: Path) -> None:
    """Every conversation is completed in order, and no finished turn is requested twice.

    Ctrl-C on a terminal reaches no worker, because each has a session of its own.
    """
    lines = [
        BatchLine(f"line{i}", tuple(f"Turn {turn} of {i}" for turn in range(TURNS)))
        for i in range(LINES)
    ]
    runner = DbosRunner(2)
    killed: list[int] = []
    sessions: set[int] = set()

    def kill_one(progress: Progress) -> None:
        for pid in runner.pids if progress.completed >= 2 and not killed else ():
            with suppress(ProcessLookupError):  # it already exited and is about to be replaced
                sessions.add(os.getsid(pid))
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)
                break

    with serve() as server:
        server.faults.set("slow_first_byte=0.1")
        summary = await run_batch(
            lines,
            tmp_path / "out.jsonl",
            store_url=empty_schema,
            model=f"responses:{server.base_url}#practice",
            name="killing",
            runner=runner,
            concurrency=4,
            lease=10.0,  # longer than a busy machine may delay a worker
            on_progress=kill_one,
        )
        counts = count_questions(server)
    assert killed
    assert os.getsid(0) not in sessions
    assert (summary.completed, summary.failed) == (LINES, 0)
    async with open_store(empty_schema) as store:
        rows = await store.responses()
        answered = await answered_questions(store, "killing")
    assert len([row for row in rows if row.status == "completed"]) == LINES * TURNS
    assert answered == set(counts) == {text for line in lines for text in line.prompts}
    # Only turns that were pending when the worker was killed can have been requested again: at most
    # one turn of each of its conversations.
    repeated = [text for text, count in counts.items() if count > 1]
    assert len(repeated) <= 2
    assert max(counts.values()) <= 2


@needs_sqlite
async def test_finished_batch_is_not_run_again(tmp_path: Path) -> None:
    """A second run reads the finished results, but not for another prompt with the same line id."""
    store_url = f"sqlite:///{tmp_path}/store.db"
    lines = [
        BatchLine("a", ("Hello", "What did I say first?")),
        BatchLine("b", ("Hi",), model="nobody:x"),
        BatchLine("c", ("What is 2+3?",)),
    ]
    changed = [*lines[:2], BatchLine("c", ("What is 5+5?",))]
    with serve() as server:
        options: dict[str, Any] = {
            "store_url": store_url,
            "model": f"responses:{server.base_url}#practice",
            "name": "twice",
        }
        first = await run_batch(lines, tmp_path / "one.jsonl", runner=DbosRunner(1), **options)
        repeated = await run_batch(changed, tmp_path / "two.jsonl", runner=DbosRunner(1), **options)
        assert len(server.requests) == 3
    assert (first.completed, first.errors) == (2, {"CannotConnect": 1})
    assert (repeated.completed, repeated.errors) == (1, {"CannotConnect": 1, "KeyReused": 1})
    results = (tmp_path / "two.jsonl").read_text()
    assert "You said first" in results
    assert "2+3" not in results


@pytest.mark.parametrize("scheme", [pytest.param("sqlite", marks=needs_sqlite), "postgresql"])
def test_batches_prepare_a_database_at_the_same_time(
    scheme: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Several batches create the tables and queues of one new database at the same time."""
    is_sqlite = scheme == "sqlite"
    url = (
        f"sqlite:///{tmp_path}/x.db.dbos" if is_sqlite else request.getfixturevalue("empty_schema")
    )
    start = Barrier(PREPARATIONS)

    def prepare(number: int) -> None:
        start.wait(300)
        prepare_client(url, BatchJob(f"batch{number % 2}", "unused", "practice"), 1).destroy()

    with ThreadPoolExecutor(PREPARATIONS) as pool:
        list(pool.map(prepare, range(PREPARATIONS)))
    modes = {each.name: each.stat().st_mode & 0o777 for each in tmp_path.glob("x.db.dbos*")}
    assert set(modes.values()) == ({0o600} if is_sqlite else set())  # it has the prompts


def test_preparation_has_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If another process holds the lock of the DBOS database, the batch fails with a message."""
    monkeypatch.setattr(dbos_runner, "LOCK_SECONDS", 0.0)
    monkeypatch.setattr(dbos_runner, "MIN_SQLITE", (0,))
    url = f"sqlite:///{tmp_path}/x.dbos"
    with closing(sqlite3.connect(tmp_path / "x.dbos-lock", isolation_level=None)) as lock:
        lock.execute("BEGIN EXCLUSIVE")
        with pytest.raises(BatchFailed, match="cannot be locked"):
            prepare_client(url, BatchJob("batch", "unused", "practice"), 1)


def test_dbos_database_is_beside_the_store() -> None:
    """It is beside an SQLite file or in the same server; a store in memory and zero workers are rejected."""
    for url in ("sqlite://:memory:", "sqlite://"):
        with pytest.raises(InvalidBatch, match="cannot share an in-memory store"):
            default_database_url(url)
    assert default_database_url("sqlite:///a.db?x=1") == "sqlite:///a.db.dbos"
    assert default_database_url("postgresql://h/d") == "postgresql://h/d"
    with pytest.raises(InvalidBatch):
        DbosRunner(0)


@needs_sqlite
def test_interrupted_run_is_continued_by_fewer_workers(tmp_path: Path) -> None:
    """Lines of a worker that does not exist any more are enqueued again, those of others are not."""
    url = f"sqlite:///{tmp_path}/dbos.db"
    work = BatchJob("fewer", f"sqlite:///{tmp_path}/store.db", "practice")
    lines = [BatchLine("a", ("Hello",)), BatchLine("b.c", ("Hi",))]
    client = prepare_client(url, work, 2)
    try:
        names = list(enqueue_lines(client, lines, work, ["fewer-0", "fewer-1"]))
        with closing(sqlite3.connect(tmp_path / "dbos.db")) as database:
            for number, name in enumerate(names):
                database.execute(
                    "UPDATE workflow_status SET status = 'PENDING', executor_id = ? "
                    "WHERE workflow_uuid = ?",
                    (f"fewer-{number}", name),
                )
            database.commit()
        assert list(enqueue_lines(client, lines, work, ["fewer-0"])) == names
        assert _statuses(client, names) == ["PENDING", "ENQUEUED"]
    finally:
        client.destroy()


@needs_sqlite
def test_changed_line_replaces_what_was_enqueued(tmp_path: Path) -> None:
    """What an earlier run left of a changed or removed line is not run; other batches remain."""
    url = f"sqlite:///{tmp_path}/dbos.db"
    work = BatchJob("changed", f"sqlite:///{tmp_path}/store.db", "practice")
    client = prepare_client(url, work, 1)
    try:
        lines = [BatchLine("a.b", ("Hello",)), BatchLine("a", ("Hi",))]
        old, removed = enqueue_lines(client, lines, work, ["changed-0"])
        longer = prepare_client(url, replace(work, name="changed.a"), 1)
        (other,) = enqueue_lines(longer, lines[:1], replace(work, name="changed.a"), [])
        longer.destroy()
        (new,) = enqueue_lines(client, [BatchLine("a.b", ("Ahoy",))], work, ["changed-0"])
        assert _statuses(client, [old, removed]) == ["CANCELLED", "CANCELLED"]
        assert _statuses(client, [new, other]) == ["ENQUEUED", "ENQUEUED"]
        (again, _) = enqueue_lines(client, lines[::-1], work, ["changed-0"])
        assert (again != removed, _statuses(client, [again])) == (True, ["ENQUEUED"])
    finally:
        client.destroy()


def _statuses(client: Any, names: list[str]) -> list[str]:
    found = {each.workflow_id: each.status for each in client.list_workflows(workflow_ids=names)}
    return [found[name] for name in names]


@needs_sqlite
async def test_exiting_workers_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The batch fails after several worker exits without a finished line, instead of retrying forever."""
    monkeypatch.setattr(dbos_runner.sys, "executable", "/bin/false")
    store_url = f"sqlite:///{tmp_path}/store.db"
    runner = DbosRunner(1)
    with pytest.raises(BatchFailed, match="run the same command again"):
        await run_batch(
            [BatchLine("a", ("Hi",))], tmp_path / "o", store_url=store_url, runner=runner
        )
    assert runner.pids == []


def test_workflow_abandoned_by_dbos_is_a_failed_line() -> None:
    """The result has the status of DBOS, and the next run uses a new workflow id."""
    workflow: Any = SimpleNamespace(
        workflow_id="b.a.1", status="MAX_RECOVERY_ATTEMPTS_EXCEEDED", output=None, error=None
    )
    result = dbos_runner._to_result(workflow, BatchLine("a", ("Hi",)))
    assert (result.id, result.status, result.error_class) == ("a", "failed", workflow.status)
    assert dbos_runner._workflow_id("b.a", {"b.a.1": workflow}) == "b.a.2"
    assert dbos_runner._workflow_id("b.a", {}) == "b.a.1"


def test_old_sqlite_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DBOS would fail with a violated constraint of its own tables."""
    monkeypatch.setattr(dbos_runner, "MIN_SQLITE", (99,))
    work = BatchJob("old", f"sqlite:///{tmp_path}/store.db", "practice")
    with pytest.raises(InvalidBatch, match="DBOS needs SQLite"):
        prepare_client(f"sqlite:///{tmp_path}/dbos.db", work, 1)
