"""A DBOS worker of a batch: a process that runs lines from a queue, each prompt as a durable step.

    python -m kedge.batch.worker EXECUTOR  # other settings, which may contain a password, are read from stdin

It ends when its standard input closes. If it dies, another worker with the same executor id resumes its
workflows: finished steps are read, not run again, and an interrupted step finds its answer in the store if
it was already stored.
"""

import json
import sys
from typing import Any

import anyio
from dbos import DBOS, DBOSConfig

from kedge.batch.files import BatchLine
from kedge.batch.run import BatchContext, BatchJob, answer_prompt, run_conversation

APPLICATION_NAME = "kedge-batch"
APPLICATION_VERSION = "1"
WORKFLOW_NAME = "kedge.batch.line"


_config: dict[str, Any] = {}
_lock = anyio.Lock()


async def _get_context() -> BatchContext:
    """Return the batch context of this process, which is opened for the first line."""
    async with _lock:
        if "context" not in _config:
            job = BatchJob(**_config["job"])
            _config["context"] = await BatchContext.open(job, processes=_config["processes"])
    return _config["context"]


@DBOS.step(name="kedge.batch.prompt")
async def run_prompt(line: dict[str, Any], index: int) -> dict[str, Any]:
    """Send one prompt of a line."""
    return await answer_prompt(await _get_context(), BatchLine.from_dict(line), index)


@DBOS.workflow(name=WORKFLOW_NAME)
async def run_line(line: dict[str, Any]) -> dict[str, Any]:
    """Run a line, prompt by prompt."""

    async def run_step(_: BatchContext, __: BatchLine, index: int) -> dict[str, Any]:
        return await run_prompt(line, index)

    parsed = BatchLine.from_dict(line)
    return (await run_conversation(await _get_context(), parsed, run_step)).to_dict()


def main(executor: str) -> None:
    """Run lines until standard input closes."""
    _config.update(json.loads(sys.stdin.readline()))
    DBOS(
        config=DBOSConfig(
            name=APPLICATION_NAME,
            system_database_url=_config["url"],
            executor_id=executor,
            application_version=APPLICATION_VERSION,
            log_level="ERROR",
            run_migrations=False,
        )
    )
    DBOS.listen_queues([_config["queue"]])
    DBOS.launch()
    sys.stdin.read()
    DBOS.destroy(workflow_completion_timeout_sec=0)


if __name__ == "__main__":
    main(sys.argv[1])
