"""Runners execute the lines of a batch and return their results.

A runner guarantees that every line ends once, in any order, and that the turns of one line never run at the
same time. The default runner uses tasks of this process.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Protocol

import anyio

from kedge.batch.conversation_task import BatchContext, BatchJob, run_conversation
from kedge.batch.input_file import BatchLine
from kedge.batch.results import LineResult
from kedge.middleware.compose import Tools
from kedge.tools import Approver

__all__ = ["AsyncioRunner", "BatchJob", "Runner"]


class Runner(Protocol):
    """The interface of a runner."""

    def run(self, lines: Sequence[BatchLine], work: BatchJob) -> AsyncGenerator[LineResult, None]:
        """Yield the results as they arrive."""
        ...


class AsyncioRunner:
    """Runs lines as tasks in this process, at most ``work.concurrency`` at the same time.

    Args:
        tools: Tools that the models of all lines may call: a toolbox, or functions and toolboxes. They are
            not part of what identifies a line: a finished line does not run again with other tools.
        approve: Is called before each tool call and may deny it or change its arguments.
    """

    tools: Tools = ()
    approve: Approver | None = None

    def __init__(self, *, tools: Tools = (), approve: Approver | None = None) -> None:
        self.tools, self.approve = tools, approve

    async def run(
        self, lines: Sequence[BatchLine], work: BatchJob
    ) -> AsyncGenerator[LineResult, None]:
        """Yield the results as they arrive."""
        desk = await BatchContext.open(work)
        desk.settings = {"tools": self.tools, "approve": self.approve}
        try:
            async with aclosing(_run_all(desk, lines)) as results:
                async for result in results:
                    yield result
        finally:
            with anyio.CancelScope(shield=True):
                await desk.aclose()


async def _run_all(
    context: BatchContext, lines: Sequence[BatchLine]
) -> AsyncGenerator[LineResult, None]:
    # Plain tasks and no task group: the consumer may stop iterating at any time, in any task.
    todo = iter(lines)
    finished: asyncio.Queue[LineResult | Exception] = asyncio.Queue()

    async def work_off() -> None:
        try:
            for line in todo:
                finished.put_nowait(await run_conversation(context, line))
        except Exception as error:  # noqa: BLE001 - raised again below
            finished.put_nowait(error)

    workers = [
        asyncio.create_task(work_off()) for _ in range(min(context.work.concurrency, len(lines)))
    ]
    try:
        for _ in lines:
            result = await finished.get()
            if isinstance(result, Exception):
                raise result
            yield result
    finally:
        for worker in workers:
            worker.cancel()
        with anyio.CancelScope(shield=True):
            await asyncio.gather(*workers, return_exceptions=True)
