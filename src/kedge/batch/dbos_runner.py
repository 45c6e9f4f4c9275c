"""``DbosRunner``: distributes the lines of a batch over worker processes, with DBOS as a durable queue.

The partition key of the queue is the conversation, so one conversation never runs twice at the same time.
Progress is stored in the DBOS database: a file next to the store's on SQLite, a separate schema on PostgreSQL.
A worker that dies is replaced by one with the same name, which resumes its workflows. If this process dies,
the next run uses the finished results of its workers.
"""

import json
import logging
import sqlite3
import sys
from collections import Counter
from collections.abc import AsyncGenerator, Collection, Generator, Sequence
from contextlib import AsyncExitStack, ExitStack, closing, contextmanager, suppress
from itertools import islice
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import anyio
import msgspec
from anyio.abc import Process
from anyio.to_thread import run_sync as in_thread

from kedge._internal.files import ensure_private_file
from kedge.batch.files import BatchLine, LineResult
from kedge.batch.run import BatchJob
from kedge.errors import BatchFailed, InvalidBatch, describe_extra
from kedge.observe import get_logger

if TYPE_CHECKING:
    from dbos import DBOSClient, WorkflowStatus

log = get_logger(__name__)

POLL_INTERVAL = 0.1
CHUNK_SIZE = 200
"""The number of lines that are polled in addition to those that can run at the same time."""
LOCK_SECONDS = 120.0
"""The maximum time to wait for another process that prepares the DBOS database."""
MAX_DEATHS = 5
"""The maximum number of consecutive deaths of a worker without a finished line in between."""
MIN_SQLITE = (3, 42) if sys.version_info >= (3, 12) else (0,)
"""The oldest SQLite that DBOS supports: since Python 3.12 it uses a function of SQLite 3.42."""
FINAL_STATUSES = ("SUCCESS", "ERROR", "CANCELLED", "MAX_RECOVERY_ATTEMPTS_EXCEEDED")


class DbosRunner:
    """Runs lines in worker processes on one queue.

    Args:
        workers: Number of processes.

    Raises:
        InvalidSetting: There are no workers.
    """

    def __init__(self, workers: int = 2) -> None:
        if workers < 1:
            raise InvalidBatch("a batch needs at least one worker")
        self.workers = workers
        self.pids: list[int] = []
        """The running worker processes."""

    async def run(
        self, lines: Sequence[BatchLine], job: BatchJob
    ) -> AsyncGenerator[LineResult, None]:
        """Yield the results as they arrive."""
        url = default_database_url(job.store_url)
        client = await in_thread(prepare_client, url, job, self.workers)
        try:
            async with AsyncExitStack() as stack:
                crew = _WorkerPool(url, job, self.workers, self.pids)
                stack.push_async_callback(crew.stop)
                # Before the workers start, so that they do not run lines that were changed or removed.
                waiting = await in_thread(enqueue_lines, client, lines, job, crew.executors)
                while waiting:
                    await crew.start()
                    # Lines are dequeued in this order, so finished ones are among the first.
                    first = list(islice(waiting, job.concurrency + CHUNK_SIZE))
                    for status in await in_thread(_list_finished, client, first):
                        crew.deaths.clear()
                        yield _to_result(status, waiting.pop(status.workflow_id))
                    await anyio.sleep(POLL_INTERVAL)
        finally:
            with anyio.CancelScope(shield=True):
                await in_thread(client.destroy)


def default_database_url(store_url: str) -> str:
    """Return the default DBOS database: a file next to the store's, or the store's database."""
    parts = urlsplit(store_url)
    if parts.scheme.startswith("postgres"):
        return store_url
    if ":memory:" in store_url or not parts.path.strip("/"):
        raise InvalidBatch("worker processes cannot share an in-memory store; use a file")
    return f"{store_url.partition('?')[0]}.dbos"


def queue_name(job: BatchJob) -> str:
    """Return the name of a batch's queue."""
    return f"kedge.{job.name}"


def prepare_client(url: str, job: BatchJob, workers: int) -> "DBOSClient":
    """Return a client of the migrated database, with the queue registered."""
    try:
        from dbos import DBOS, DBOSClient
    except ImportError as error:
        raise InvalidBatch(describe_extra("dbos")) from error
    from kedge.batch.worker import APPLICATION_NAME

    if url.startswith("sqlite") and sqlite3.sqlite_version_info < MIN_SQLITE:
        raise InvalidBatch(
            f"with Python 3.12 and newer, DBOS needs SQLite 3.42; this Python has {sqlite3.sqlite_version}: "
            "use a store on PostgreSQL, or a Python with a newer SQLite"
        )
    logging.getLogger("dbos").setLevel(logging.ERROR)
    with _lock_preparation(url):
        DBOS.migrate(url)
        client = DBOSClient(system_database_url=url)
        client.register_queue(
            queue_name(job),
            worker_concurrency=-(-job.concurrency // workers),
            partition_concurrency=1,
            polling_interval_sec=POLL_INTERVAL,
            application_name=APPLICATION_NAME,
        )
    return client


@contextmanager
def _lock_preparation(url: str) -> Generator[None]:
    """Let one process at a time prepare a DBOS database on SQLite, whose tables DBOS creates without a transaction.

    Raises:
        BatchFailed: Another process has held the lock for minutes, or the file cannot be written.
    """
    if not url.startswith("sqlite"):
        yield
        return
    database = url.partition("///")[2].partition("?")[0]
    path = f"{database}-lock"
    with ExitStack() as stack:
        try:
            for file in (path, database):  # which DBOS would create with the mode of the umask
                ensure_private_file(file)
            lock = sqlite3.connect(path, timeout=LOCK_SECONDS, isolation_level=None)
            stack.enter_context(closing(lock)).execute("BEGIN EXCLUSIVE")
        except (OSError, sqlite3.OperationalError) as error:
            raise BatchFailed(f"{path} cannot be locked ({error}); run the batch again") from None
        yield


def enqueue_lines(
    client: "DBOSClient", lines: Sequence[BatchLine], job: BatchJob, executors: Collection[str]
) -> dict[str, BatchLine]:
    """Enqueue every line that is not enqueued yet, and return the lines by workflow id.

    Workflows that an interrupted run left are cancelled if their line was changed or removed since. If no worker of
    this run has the name of their worker, they are enqueued again: a worker resumes only those of its own name.
    """
    from kedge.batch.worker import APPLICATION_NAME, APPLICATION_VERSION, WORKFLOW_NAME

    prefix = f"{job.name}."
    existing = {
        status.workflow_id: status
        for status in client.list_workflows(workflow_id_prefix=prefix, load_input=False)
    }
    waiting: dict[str, BatchLine] = {}
    for line in lines:
        # A workflow with a known id returns its old result, so the id also covers the request.
        digest = job.fingerprint(line).rpartition(":")[2]
        name = _workflow_id(f"{prefix}{line.id}.{digest}", existing)
        waiting[name] = line
        if name not in existing:
            client.enqueue(
                {
                    "workflow_name": WORKFLOW_NAME,
                    "queue_name": queue_name(job),
                    "workflow_id": name,
                    "queue_partition_key": f"{prefix}{line.id}",
                    "app_version": APPLICATION_VERSION,
                    "application_name": APPLICATION_NAME,
                },
                line.to_dict(),
            )
        elif existing[name].status == "PENDING" and existing[name].executor_id not in executors:
            client.resume_workflow(name, queue_name=queue_name(job))
    outdated = [
        name
        for name, status in existing.items()
        if name not in waiting
        and status.status not in FINAL_STATUSES
        and status.queue_name == queue_name(job)  # the prefix may be that of another batch
    ]
    if outdated:
        client.cancel_workflows(outdated)
    return waiting


def _workflow_id(line: str, workflows: dict[str, "WorkflowStatus"]) -> str:
    """Return the id of the first attempt that did not fail, or a new id."""
    number = 1
    name = f"{line}.1"
    while name in workflows and _has_failed(workflows[name]):
        number += 1
        name = f"{line}.{number}"
    return name


def _has_failed(status: "WorkflowStatus") -> bool:
    if status.status != "SUCCESS":
        return status.status in FINAL_STATUSES
    return bool(status.output) and status.output.get("status") == "failed"


def _list_finished(client: "DBOSClient", names: list[str]) -> list["WorkflowStatus"]:
    return client.list_workflows(workflow_ids=names, status=list(FINAL_STATUSES), load_input=False)


def _to_result(status: "WorkflowStatus", line: BatchLine) -> LineResult:
    output: dict[str, Any] | None = status.output
    if status.status == "SUCCESS" and output:
        return msgspec.convert(output, LineResult)
    error_class = status.status
    reason: object = "no reason given"
    if status.error:
        error_class = type(status.error).__name__
        reason = status.error
    message = f"the workflow ended as {status.status.lower()}: {reason}"
    return LineResult(line.id, "failed", error=message, error_class=error_class)


class _WorkerPool:
    """The worker processes; one that dies is replaced."""

    def __init__(self, url: str, job: BatchJob, worker_count: int, pids: list[int]) -> None:
        config = {
            "url": url,
            "queue": queue_name(job),
            "job": job.to_dict(),
            "processes": worker_count,
        }
        self.config_line = json.dumps(config).encode() + b"\n"
        self.pids = pids
        self.executors = [f"{job.name}-{number}" for number in range(worker_count)]
        self.processes: dict[str, Process] = {}
        self.deaths = Counter[str]()
        """The deaths of each worker since the last finished line."""

    async def start(self) -> None:
        """Start the workers that do not run, also those that died."""
        for executor in self.executors:
            process = self.processes.get(executor)
            if process is not None:
                if process.returncode is None:
                    continue
                self._record_death(executor, process.returncode)
            self.processes[executor] = await self._spawn(executor)
        self.pids[:] = [process.pid for process in self.processes.values()]

    def _record_death(self, executor: str, code: int) -> None:
        self.deaths[executor] += 1
        log.warning("worker %s died (%d)", executor, code)
        if self.deaths[executor] > MAX_DEATHS:
            raise BatchFailed(
                f"a worker died {self.deaths[executor]} times and nothing was finished; "
                "progress is stored: run the same command again to continue"
            )

    async def stop(self) -> None:
        """Stop the workers."""
        with anyio.CancelScope(shield=True):
            for process in self.processes.values():
                if process.stdin:
                    with suppress(anyio.BrokenResourceError, OSError):
                        await process.stdin.aclose()
            for process in self.processes.values():
                with anyio.move_on_after(10):
                    await process.wait()
                if process.returncode is None:
                    process.kill()
                    await process.wait()
        self.pids.clear()

    async def _spawn(self, executor: str) -> Process:
        command = [sys.executable, "-m", "kedge.batch.worker", executor]
        # In a session of its own, Ctrl-C on a terminal stops only this process, which then stops the workers.
        process = await anyio.open_process(
            command, stdout=None, stderr=None, start_new_session=True
        )
        if process.stdin:
            # One that died at once is noticed by the next check.
            with suppress(anyio.BrokenResourceError, OSError):
                await process.stdin.send(self.config_line)
        return process
