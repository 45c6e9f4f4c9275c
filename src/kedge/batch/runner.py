"""Runner: what carries the lines of a batch to where they run, and their results back.

A runner promises that every line comes to its end once, in whatever order, and that the turns of one
line never run at the same time. The default one runs them as tasks of this process.
"""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Protocol

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from kedge.batch.converse import Desk, Work, converse
from kedge.batch.lines import Line
from kedge.batch.results import LineResult

__all__ = ["AsyncioRunner", "Runner", "Work"]


class Runner(Protocol):
    """Runs the lines of a batch."""

    def run(self, lines: Sequence[Line], work: Work) -> AsyncGenerator[LineResult, None]:
        """The results, as they come."""
        ...


class AsyncioRunner:
    """Tasks in this process, at most ``work.concurrency`` at the same time."""

    async def run(self, lines: Sequence[Line], work: Work) -> AsyncGenerator[LineResult, None]:
        """The results, as they come."""
        desk = await Desk.open(work)
        try:
            async with aclosing(_all(desk, lines)) as results:
                async for result in results:
                    yield result
        finally:
            with anyio.CancelScope(shield=True):
                await desk.aclose()


async def _all(desk: Desk, lines: Sequence[Line]) -> AsyncGenerator[LineResult, None]:
    todo = iter(lines)
    results: MemoryObjectSendStream[LineResult]
    finished: MemoryObjectReceiveStream[LineResult]
    results, finished = anyio.create_memory_object_stream[LineResult](len(lines) or 1)

    async def work_off(mine: MemoryObjectSendStream[LineResult]) -> None:
        async with mine:
            for line in todo:
                await mine.send(await converse(desk, line))

    async with anyio.create_task_group() as group, finished:
        async with results:
            for _ in range(min(desk.work.concurrency, len(lines))):
                group.start_soon(work_off, results.clone())
        async for result in finished:
            yield result
