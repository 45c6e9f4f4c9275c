"""``DbosRunner``: the lines of a batch spread over worker processes, with DBOS as queue and memory.

The partition key of the queue is the conversation, so one conversation never runs twice at the same
time. What was begun is kept in the database of DBOS: beside the store's file on SQLite, in a schema of
its own on PostgreSQL. A worker that dies is replaced by one with its name, which takes over what it had
begun. If this process dies, the next run finds what its workers finished.
"""

import json
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import anyio
from anyio.abc import Process
from anyio.to_thread import run_sync as in_thread

from kedge.batch.converse import Work
from kedge.batch.lines import Line
from kedge.batch.results import LineResult
from kedge.errors import BatchFailed, InvalidBatch
from kedge.observe import get_logger

if TYPE_CHECKING:
    from dbos import DBOSClient, WorkflowStatus

log = get_logger(__name__)

POLL = 0.1
CHUNK = 200
"""How many lines are looked at, besides those that can run at the same time."""
MOST_DEATHS = 5
"""How often a worker may die in a row, with nothing finished in between, before we give up."""
OVER = ("SUCCESS", "ERROR", "CANCELLED", "MAX_RECOVERY_ATTEMPTS_EXCEEDED")


class DbosRunner:
    """Worker processes on one queue. ``database_url`` is where DBOS keeps its books."""

    def __init__(self, workers: int = 2, *, database_url: str = "") -> None:
        if workers < 1:
            raise InvalidBatch("a batch needs at least one worker")
        self.workers = workers
        self.database_url = database_url
        self.pids: list[int] = []
        """The processes that work right now."""

    async def run(self, lines: Sequence[Line], work: Work) -> AsyncGenerator[LineResult, None]:
        """The results, as they come."""
        url = self.database_url or database_beside(work.store_url)
        client = await in_thread(_prepared, url, work, self.workers)
        try:
            async with AsyncExitStack() as stack:
                crew = _Crew(url, work, self.workers, self.pids)
                stack.push_async_callback(crew.stop)
                await crew.start()
                waiting = await in_thread(_enqueued, client, lines, work)
                while waiting:
                    await crew.look()
                    # Lines are taken in this order, so what is finished is among the first.
                    first = list(islice(waiting, work.concurrency + CHUNK))
                    for status in await in_thread(_finished, client, first):
                        crew.progress()
                        yield _result(status, waiting.pop(status.workflow_id))
                    await anyio.sleep(POLL)
        finally:
            with anyio.CancelScope(shield=True):
                await in_thread(client.destroy)


def database_beside(store_url: str) -> str:
    """Where DBOS keeps its books, if nobody says: a file beside the store's, or the store's database."""
    parts = urlsplit(store_url)
    if parts.scheme.startswith("postgres"):
        return store_url
    if ":memory:" in store_url or not parts.path.strip("/"):
        raise InvalidBatch("worker processes cannot share a store in memory; name a file")
    return f"{store_url.partition('?')[0]}.dbos"


def queue_of(work: Work) -> str:
    """The name of a batch's queue."""
    return f"kedge.{work.name}"


def _prepared(url: str, work: Work, workers: int) -> "DBOSClient":
    """A client of a database that is ready, with the queue in it."""
    try:
        from dbos import DBOS, DBOSClient
    except ImportError as error:
        raise InvalidBatch("the runner needs the extra dbos: pip install 'kedge[dbos]'") from error
    from kedge.batch.worker import APPLICATION

    _quiet()
    DBOS.migrate(url)
    client = DBOSClient(system_database_url=url)
    client.register_queue(
        queue_of(work),
        worker_concurrency=-(-work.concurrency // workers),
        partition_concurrency=1,
        polling_interval_sec=POLL,
        application_name=APPLICATION,
    )
    return client


def _quiet() -> None:
    """DBOS tells its users what it does; ours did not ask for that."""
    import logging

    logging.getLogger("dbos").setLevel(logging.ERROR)


def _enqueued(client: "DBOSClient", lines: Sequence[Line], work: Work) -> dict[str, Line]:
    """Every line on the queue, or on its way already: by the id of its workflow."""
    from kedge.batch.worker import APPLICATION, VERSION, WORKFLOW

    prefix = f"{work.name}."
    there = {
        status.workflow_id: status
        for status in client.list_workflows(workflow_id_prefix=prefix, load_input=False)
    }
    waiting: dict[str, Line] = {}
    for line in lines:
        name = _name(f"{prefix}{line.id}", there)
        waiting[name] = line
        if name not in there:
            client.enqueue(
                {
                    "workflow_name": WORKFLOW,
                    "queue_name": queue_of(work),
                    "workflow_id": name,
                    "queue_partition_key": f"{prefix}{line.id}",
                    "app_version": VERSION,
                    "application_name": APPLICATION,
                },
                line.plain(),
            )
    return waiting


def _name(line: str, there: dict[str, "WorkflowStatus"]) -> str:
    """The first attempt at a line that did not fail, or a new one."""
    number = 1
    while (known := there.get(f"{line}.{number}")) and _has_failed(known):
        number += 1
    return f"{line}.{number}"


def _has_failed(status: "WorkflowStatus") -> bool:
    if status.status != "SUCCESS":
        return status.status in OVER
    return bool(status.output) and status.output.get("status") == "failed"


def _finished(client: "DBOSClient", names: list[str]) -> list["WorkflowStatus"]:
    return client.list_workflows(workflow_ids=names, status=list(OVER), load_input=False)


def _result(status: "WorkflowStatus", line: Line) -> LineResult:
    output: dict[str, Any] | None = status.output
    if status.status == "SUCCESS" and output:
        return LineResult.of(output)
    told = type(status.error).__name__ if status.error else status.status
    words = f"the workflow ended as {status.status.lower()}: {status.error or 'no reason given'}"
    return LineResult(line.id, "failed", error=words, kind=told)


@dataclass(slots=True)
class _Worker:
    process: Process
    deaths: int = 0


class _Crew:
    """The worker processes, each replaced when it dies."""

    def __init__(self, url: str, work: Work, number: int, pids: list[int]) -> None:
        told = {"url": url, "queue": queue_of(work), "work": work.plain(), "share": number}
        self.told = json.dumps(told).encode() + b"\n"
        self.batch, self.number, self.pids = work.name, number, pids
        self.workers: dict[str, _Worker] = {}

    async def start(self) -> None:
        """Begin."""
        for number in range(self.number):
            executor = f"{self.batch}-{number}"
            self.workers[executor] = _Worker(await self._spawn(executor))
        self._note()

    async def look(self) -> None:
        """Replace the workers that died."""
        for executor, worker in self.workers.items():
            if worker.process.returncode is None:
                continue
            worker.deaths += 1
            log.warning("worker %s died (%d)", executor, worker.process.returncode)
            if worker.deaths > MOST_DEATHS:
                raise BatchFailed(
                    f"a worker died {worker.deaths} times and nothing was finished; "
                    "what was reached is kept, and the same command goes on from there"
                )
            worker.process = await self._spawn(executor)
        self._note()

    def progress(self) -> None:
        """Something was finished: whoever died had at least a reason of its own."""
        for worker in self.workers.values():
            worker.deaths = 0

    async def stop(self) -> None:
        """Let them go."""
        with anyio.CancelScope(shield=True):
            for worker in self.workers.values():
                if worker.process.stdin:
                    with suppress(anyio.BrokenResourceError, OSError):
                        await worker.process.stdin.aclose()
            for worker in self.workers.values():
                with anyio.move_on_after(10):
                    await worker.process.wait()
                if worker.process.returncode is None:
                    worker.process.kill()
                    await worker.process.wait()
        self.pids.clear()

    async def _spawn(self, executor: str) -> Process:
        command = [sys.executable, "-m", "kedge.batch.worker", executor]
        process = await anyio.open_process(command, stdout=None, stderr=None)
        if process.stdin:
            with suppress(anyio.BrokenResourceError, OSError):  # it died at once; look() will see
                await process.stdin.send(self.told)
        return process

    def _note(self) -> None:
        self.pids[:] = [worker.process.pid for worker in self.workers.values()]
