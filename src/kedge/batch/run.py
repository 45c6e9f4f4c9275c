"""``run_batch``: read the lines, skip finished ones, run the others, write each result.

A runner executes the lines. It guarantees that every line ends once, in any order, and that the turns of one
line never run at the same time. The default runner uses tasks of this process.
"""

import asyncio
import hashlib
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import anyio

from kedge.batch.conversation_task import DEFAULT_LEASE, BatchContext, BatchJob, run_conversation
from kedge.batch.files import (
    BatchLine,
    LineResult,
    ResultsFile,
    Summary,
    check_line_params,
    read_lines,
    summarize_results,
)
from kedge.errors import InvalidBatch
from kedge.middleware.compose import Tools
from kedge.tools import Approver


class Runner(Protocol):
    """The interface of a runner."""

    def run(self, lines: Sequence[BatchLine], work: BatchJob) -> AsyncGenerator[LineResult, None]:
        """Yield the results as they arrive."""
        ...


class AsyncioRunner:
    """Runs lines as tasks in this process, at most ``work.concurrency`` at the same time.

    Args:
        tools: Tools that the models of all lines may call: a toolbox, or functions and toolboxes. They are
            not part of a line's fingerprint: a finished line does not run again with other tools.
        approve: A function that is called before each tool call and may deny it or change its arguments.
    """

    tools: Tools = ()
    approve: Approver | None = None

    def __init__(self, *, tools: Tools = (), approve: Approver | None = None) -> None:
        self.tools, self.approve = tools, approve

    async def run(
        self, lines: Sequence[BatchLine], work: BatchJob
    ) -> AsyncGenerator[LineResult, None]:
        """Yield the results as they arrive."""
        context = await BatchContext.open(work)
        context.settings = {"tools": self.tools, "approve": self.approve}
        todo = iter(lines)
        finished: asyncio.Queue[LineResult | BaseException] = asyncio.Queue()

        async def run_lines() -> None:
            try:
                for line in todo:
                    finished.put_nowait(await run_conversation(context, line))
            except (
                BaseException
            ) as error:  # raised below, which would wait for the result without end
                finished.put_nowait(error)
                raise

        # Plain tasks and not a task group, because the consumer may stop iterating at any time, in any task.
        count = min(work.concurrency, len(lines))
        workers = [asyncio.create_task(run_lines()) for _ in range(count)]
        try:
            for _ in lines:
                result = await finished.get()
                if isinstance(result, BaseException):
                    raise result
                yield result
        finally:
            for worker in workers:
                worker.cancel()
            with anyio.CancelScope(shield=True):
                await asyncio.gather(*workers, return_exceptions=True)
                await context.aclose()


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of a batch."""

    total: int
    skipped: int
    completed: int = 0
    failed: int = 0
    last: LineResult | None = None

    @property
    def done(self) -> int:
        """The number of finished lines."""
        return self.skipped + self.completed + self.failed


ProgressCallback = Callable[[Progress], None]


async def run_batch(
    prompts: str | Path | Sequence[BatchLine],
    out: str | Path,
    *,
    store_url: str,
    model: str = "practice",
    name: str = "",
    runner: Runner | None = None,
    concurrency: int = 8,
    requests_per_minute: int = 0,
    tokens_per_minute: int = 0,
    attempts: int = 4,
    lease: float = DEFAULT_LEASE,
    params: dict[str, Any] | None = None,
    on_progress: ProgressCallback | None = None,
) -> Summary:
    """Run the conversations of a file and write a result for each to another file.

    Completed lines are skipped; failed and interrupted ones continue from their last stored answer.

    Args:
        prompts: The file with one conversation per line, or its parsed lines.
        out: The file to which a result is appended for each line.
        store_url: The address of the store in which the conversations are stored.
        model: The model of lines that do not name one.
        name: Distinguishes batches in one store; derived from ``out`` by default.
        runner: Runs the lines; by default tasks in this process.
        concurrency: The maximum number of conversations at the same time.
        requests_per_minute: The maximum number of requests per minute; 0 for no limit.
        tokens_per_minute: The maximum number of tokens per minute; 0 for no limit.
        attempts: Attempts per request, for errors that may be temporary.
        lease: Seconds after which another process may continue the turns of one that died.
        params: Parameters of every request; those of a line override them.
        on_progress: Called with the progress after each line.

    Returns:
        The totals of the batch.

    Raises:
        InvalidBatch: The file, a line or an argument is invalid.
        BatchFailed: The batch stopped; completed work is stored.
    """
    if concurrency < 1 or attempts < 1:
        raise InvalidBatch("concurrency and attempts must be at least 1")
    lines = list(prompts) if not isinstance(prompts, str | Path) else read_lines(prompts)
    if len({line.id for line in lines}) < len(lines):
        raise InvalidBatch("two lines have the same id; ids must be unique")
    work = BatchJob(
        name=name or default_name(out),
        store_url=store_url,
        model=model,
        concurrency=concurrency,
        attempts=attempts,
        requests_per_minute=requests_per_minute,
        tokens_per_minute=tokens_per_minute,
        lease=lease,
        params=check_line_params(params or {}, "params"),
    )
    began = time.perf_counter()
    with ResultsFile(out) as results:
        known = results.load()
        todo = [line for line in lines if not _is_done(known.get(line.id), work.fingerprint(line))]
        skipped = len(lines) - len(todo)
        done = await _run_lines(
            runner or AsyncioRunner(), todo, work, results, len(lines), on_progress
        )
    return summarize_results(
        done, total=len(lines), skipped=skipped, seconds=round(time.perf_counter() - began, 3)
    )


async def _run_lines(
    runner: Runner,
    todo: Sequence[BatchLine],
    work: BatchJob,
    results: ResultsFile,
    total: int,
    on_progress: ProgressCallback | None,
) -> list[LineResult]:
    done: list[LineResult] = []
    skipped, failed = total - len(todo), 0
    if on_progress:
        on_progress(Progress(total, skipped))
    if not todo:
        return done
    async with aclosing(runner.run(todo, work)) as finished:
        async for result in finished:
            results.append(result)
            done.append(result)
            failed += result.status == "failed"
            if on_progress:
                on_progress(Progress(total, skipped, len(done) - failed, failed, result))
    return done


def default_name(out: str | Path) -> str:
    """Return the default name of a batch, derived from its results file."""
    digest = hashlib.sha256(str(Path(out).absolute()).encode()).hexdigest()
    return f"batch_{digest[:16]}"


def _is_done(result: LineResult | None, fingerprint: str) -> bool:
    """Return whether a result is complete and belongs to the same request."""
    return result is not None and (result.status, result.fingerprint) == ("completed", fingerprint)
