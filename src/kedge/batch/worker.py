"""A DBOS worker of a batch: a process that runs lines from a queue, each turn as a durable step.

    python -m kedge.batch.worker EXECUTOR  # other settings, which may contain a password, are read from stdin

It ends when its standard input closes. If it dies, another worker with the same executor id resumes its
workflows: finished steps are read, not run again, and an interrupted step finds its answer in the store if
it was already stored.
"""

import json
import sys
from dataclasses import asdict
from typing import Any

import anyio
from dbos import DBOS, DBOSConfig

from kedge.batch.conversation_task import (
    BatchContext,
    BatchJob,
    TurnResult,
    run_conversation,
    send_turn,
)
from kedge.batch.input_file import BatchLine

APPLICATION_NAME = "kedge-batch"
APPLICATION_VERSION = "1"
WORKFLOW_NAME = "kedge.batch.line"


class _ContextHolder:
    """The batch context of this process, opened for the first line."""

    def __init__(self) -> None:
        self.work: BatchJob | None = None
        self.share = 1
        self._context: BatchContext | None = None
        self._lock = anyio.Lock()

    async def get(self) -> BatchContext:
        """Return the context."""
        assert self.work is not None  # noqa: S101 - set by main
        async with self._lock:
            if self._context is None:
                self._context = await BatchContext.open(self.work, share=self.share)
        return self._context


_holder = _ContextHolder()


@DBOS.step(name="kedge.batch.turn")
async def run_turn(line: dict[str, Any], number: int) -> dict[str, Any]:
    """Run one turn of a line."""
    return asdict(await send_turn(await _holder.get(), BatchLine.from_dict(line), number))


@DBOS.workflow(name=WORKFLOW_NAME)
async def run_line(line: dict[str, Any]) -> dict[str, Any]:
    """Run a line, turn by turn."""

    async def turns(number: int) -> TurnResult:
        return TurnResult(**await run_turn(line, number))

    return (await run_conversation(await _holder.get(), BatchLine.from_dict(line), turns)).to_dict()


def main(executor: str) -> None:
    """Run lines until standard input closes."""
    config = json.loads(sys.stdin.readline())
    _holder.work, _holder.share = BatchJob(**config["work"]), config["share"]
    DBOS(
        config=DBOSConfig(
            name=APPLICATION_NAME,
            system_database_url=config["url"],
            executor_id=executor,
            application_version=APPLICATION_VERSION,
            log_level="ERROR",
            run_migrations=False,
        )
    )
    DBOS.listen_queues([config["queue"]])
    DBOS.launch()
    sys.stdin.read()
    DBOS.destroy(workflow_completion_timeout_sec=0)


if __name__ == "__main__":
    main(sys.argv[1])
