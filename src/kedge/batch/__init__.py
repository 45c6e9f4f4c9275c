"""Batch: run thousands of conversations from a file, concurrently and within rate limits; resumable.

    summary = await run_batch("prompts.jsonl", "results.jsonl", store_url="sqlite:///batch.db")

A line is a conversation of one or more prompts. They have idempotency keys derived from its id, so an
interrupted batch can be resumed: finished lines are skipped, and in the others no stored answer is requested
again. A ``Runner`` executes the lines: as tasks in this process, or in worker processes with DBOS
(``kedge.batch.dbos_runner``).
"""

from kedge.batch.files import BatchLine, LineResult, ResultsFile, Summary, read_lines
from kedge.batch.rate_limit import RateLimiter
from kedge.batch.run import AsyncioRunner, BatchJob, Progress, Runner, run_batch

__all__ = [
    "AsyncioRunner",
    "BatchJob",
    "BatchLine",
    "LineResult",
    "Progress",
    "RateLimiter",
    "ResultsFile",
    "Runner",
    "Summary",
    "read_lines",
    "run_batch",
]
