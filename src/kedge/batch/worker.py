"""A worker of a batch on DBOS: a process that takes lines from a queue, each turn a durable step.

    python -m kedge.batch.worker EXECUTOR  # the rest, which may hold a password, comes by standard input

It ends when its standard input does. If it dies, another one with the same executor id takes over what it
had begun: finished steps are read, not run again, and the step that was cut short finds in the store what
was paid for already.
"""

import json
import sys
from dataclasses import asdict
from typing import Any

import anyio
from dbos import DBOS, DBOSConfig

from kedge.batch.converse import Desk, TurnResult, Work, converse, take_turn
from kedge.batch.lines import Line

APPLICATION = "kedge-batch"
VERSION = "1"
WORKFLOW = "kedge.batch.line"


class _Bureau:
    """The one desk of this process, opened when the first line comes."""

    def __init__(self) -> None:
        self.work: Work | None = None
        self.share = 1
        self._desk: Desk | None = None
        self._opening = anyio.Lock()

    async def desk(self) -> Desk:
        """The desk."""
        assert self.work is not None  # noqa: S101 - main has set it
        async with self._opening:
            if self._desk is None:
                self._desk = await Desk.open(self.work, share=self.share)
        return self._desk


_bureau = _Bureau()


@DBOS.step(name="kedge.batch.turn")
async def run_turn(line: dict[str, Any], number: int) -> dict[str, Any]:
    """One turn of a line."""
    return asdict(await take_turn(await _bureau.desk(), Line.of(line), number))


@DBOS.workflow(name=WORKFLOW)
async def run_line(line: dict[str, Any]) -> dict[str, Any]:
    """A line, turn after turn."""

    async def turns(number: int) -> TurnResult:
        return TurnResult(**await run_turn(line, number))

    return (await converse(await _bureau.desk(), Line.of(line), turns)).plain()


def main(executor: str) -> None:
    """Work until nobody wants it any more."""
    told = json.loads(sys.stdin.readline())
    _bureau.work, _bureau.share = Work(**told["work"]), told["share"]
    DBOS(
        config=DBOSConfig(
            name=APPLICATION,
            system_database_url=told["url"],
            executor_id=executor,
            application_version=VERSION,
            log_level="ERROR",
            run_migrations=False,
        )
    )
    DBOS.listen_queues([told["queue"]])
    DBOS.launch()
    sys.stdin.read()
    DBOS.destroy(workflow_completion_timeout_sec=0)


if __name__ == "__main__":
    main(sys.argv[1])
