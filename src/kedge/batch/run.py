"""``run_batch``: read the lines, skip finished ones, run the others, write each result.

A line is a stored conversation whose prompts are each sent once. The id of the conversation is derived from the
batch's name and the line's id, and the idempotency keys of its prompts from their indexes. When a line runs again,
also in another process, the stored answers are used.

A runner executes the lines. It guarantees that every line ends once, in any order, and that the prompts of one
line are never sent at the same time. The default runner uses tasks of this process.
"""

import asyncio
import hashlib
import json
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import anyio
from msgspec.structs import replace

from kedge._internal.argument_types import check_fields, checked_except
from kedge._internal.arguments import check_count, check_positive_int, validate_seconds
from kedge._internal.display import make_title
from kedge.batch.files import (
    BatchLine,
    LineResult,
    ResultsFile,
    Summary,
    check_line_params,
    read_lines,
    sum_tokens,
    summarize_results,
)
from kedge.batch.rate_limit import RateLimiter
from kedge.config import check_output_file
from kedge.conversation import Conversation
from kedge.engines import Engine
from kedge.errors import InvalidBatch, InvalidType, KedgeError, KeyReused, describe_type
from kedge.middleware import retry, with_middleware
from kedge.middleware.compose import Tools, resolve_tools
from kedge.planning import find_running
from kedge.providers import connect
from kedge.store import Store, open_store
from kedge.store.open import resolve_address
from kedge.tools import Approver
from kedge.turns.frozen_json import EMPTY, FrozenMap, thaw

BATCH_KEY = "batch"
"""The tag of the conversations of all batches, and the name of what a batch stores with each."""
DEFAULT_LEASE = 20.0
"""Seconds after which another process may continue the lines of one that died."""
CHANGED_LINE_ERROR = (
    "this line was run before with other prompts, instructions, model or params; "
    "give the line a new id, or the batch a new name"
)


@dataclass(frozen=True, slots=True)
class BatchJob:
    """The settings of a batch, serializable as JSON for other processes."""

    name: str
    """The name of the batch: the prefix of its conversation ids and keys."""
    store_url: str
    model: str
    concurrency: int = 8
    attempts: int = 4
    """The maximum number of attempts of a request that fails temporarily."""
    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    lease: float = DEFAULT_LEASE
    params: Mapping[str, Any] = EMPTY

    def __post_init__(self) -> None:
        check_fields(self)
        object.__setattr__(self, "params", FrozenMap(self.params))

    def to_dict(self) -> dict[str, Any]:
        """Return the job as JSON values; ``BatchJob(**values)`` restores it."""
        return {**asdict(self), "params": thaw(self.params)}

    def fingerprint(self, line: BatchLine) -> str:
        """Return a hash of the prompts, the model and the parameters of a line.

        Results, conversations and workflows of a line are reused only under the same fingerprint.
        """
        request: dict[str, Any] = {
            "prompts": line.prompts,
            "system": line.system,
            "model": line.model or self.model,
            "params": {**thaw(self.params), **thaw(line.params)},
        }
        if line.schema is not None:
            request["schema"] = thaw(line.schema)
        encoded = json.dumps(request, sort_keys=True, separators=(",", ":")).encode()
        return f"sha256:{hashlib.sha256(encoded).hexdigest()[:32]}"


class BatchContext:
    """The store, the engines, the tools and the rate limiter, which the lines of one process share."""

    def __init__(self, job: BatchJob, store: Store, rate_limiter: RateLimiter) -> None:
        self.job = job
        self.store = store
        self.rate_limiter = rate_limiter
        self.tools: Tools = ()
        self.approve: Approver | None = None
        self._engines: dict[str, Engine] = {}

    @classmethod
    async def open(cls, job: BatchJob, *, processes: int = 1) -> "BatchContext":
        """Open a context; the rate limits are divided among ``processes`` processes."""
        store = await open_store(job.store_url)
        rate_limiter = RateLimiter(
            requests=_divide_limit(job.requests_per_minute, processes),
            tokens=_divide_limit(job.tokens_per_minute, processes),
        )
        return cls(job, store, rate_limiter)

    async def aclose(self) -> None:
        """Close the connections."""
        for engine in self._engines.values():
            await engine.aclose()
        await self.store.aclose()

    def conversation_id(self, line: BatchLine) -> str:
        """Return the conversation id of a line."""
        return f"{self.job.name}.{line.id}"

    async def open_conversation(self, line: BatchLine) -> Conversation:
        """Open the conversation of a line, or create it."""
        fingerprint = self.job.fingerprint(line)
        data = {"name": self.job.name, "line": line.id, "fingerprint": fingerprint}
        conversation = Conversation(
            self._get_engine(line.model or self.job.model),
            store=self.store,
            id=self.conversation_id(line),
            title=make_title(line.prompts[0]),
            tags=(BATCH_KEY, f"{BATCH_KEY}:{self.job.name}"),
            data={BATCH_KEY: data},
            system=line.system,
            lease=self.job.lease,
            tools=self.tools,
            approve=self.approve,
        )
        row = await conversation.require_row()
        stored_data: Mapping[str, Any] = row.data.get(BATCH_KEY) or {}
        if stored_data.get("fingerprint") != fingerprint:
            raise KeyReused(CHANGED_LINE_ERROR)
        return conversation

    async def send_prompt(self, conversation: Conversation, line: BatchLine, index: int) -> str:
        """Send one prompt of a line and return the answer; JSON if the line has a schema."""
        key = f"{self.job.name}/{line.id}/{index}"
        options: dict[str, Any] = {**thaw(self.job.params), **thaw(line.params)}
        if line.schema is not None:
            options["output"] = thaw(line.schema)
        reply = await conversation.send(line.prompts[index], key=key, **options)
        # A background response is waited for, because the result of a line is its answer.
        if find_running(reply.turn):
            options["background"] = False
            reply = await conversation.resume(**options)
        if line.schema is None:
            return reply.text
        return json.dumps(reply.output, ensure_ascii=False)

    def _get_engine(self, model: str) -> Engine:
        """Return the engine of a model; attempts and limits apply to each request, also after tool calls."""
        if model not in self._engines:
            self._engines[model] = with_middleware(
                connect(model), retry(self.job.attempts), self.rate_limiter
            )
        return self._engines[model]


def _divide_limit(limit: int, processes: int) -> int:
    """Return the part of a limit for one of several processes: at least 1, because 0 means no limit."""
    if not limit:
        return 0
    return max(limit // processes, 1)


async def answer_prompt(context: BatchContext, line: BatchLine, index: int) -> dict[str, Any]:
    """Send one prompt of a line, and return its answer or its error as JSON values, which DBOS can store as a step."""
    try:
        conversation = await context.open_conversation(line)
        return {"answer": await context.send_prompt(conversation, line, index)}
    except KedgeError as error:
        message = str(error)
        if isinstance(error, KeyReused):
            message = CHANGED_LINE_ERROR
        retryable = bool(getattr(error, "retryable", False))
        return {"error": message, "error_class": type(error).__name__, "retryable": retryable}


PromptFunction = Callable[[BatchContext, BatchLine, int], Awaitable[dict[str, Any]]]


async def run_conversation(
    context: BatchContext, line: BatchLine, prompt_function: PromptFunction = answer_prompt
) -> LineResult:
    """Run the conversation of a line; an error ends the line, but not the batch.

    Args:
        context: The shared store, engines and limits.
        line: The line to run.
        prompt_function: A function that sends the prompt with an index and returns what ``answer_prompt`` does; a
            DBOS worker passes one that stores each answer as a step.
    """
    began = time.perf_counter()
    answers: list[str] = []
    failure: dict[str, Any] = {}
    for index in range(len(line.prompts)):
        step = await prompt_function(context, line, index)
        if "answer" not in step:
            failure = step
            break
        answers.append(step["answer"])

    conversation_id = context.conversation_id(line)
    try:
        conversation = await context.store.conversation(conversation_id)
        records = await context.store.responses(conversation)
    except KedgeError:  # it never started, or the store is not available: nothing is added up
        records = []
    result = LineResult(
        id=line.id,
        status="failed" if failure else "completed",
        answers=tuple(answers),
        model=line.model or context.job.model,
        seconds=round(time.perf_counter() - began, 3),
        fingerprint=context.job.fingerprint(line),
        **failure,
    )
    if not records:
        return result
    costs = [record.cost for record in records if record.cost is not None]
    return replace(
        result,
        conversation=conversation_id,
        provider_response_id=records[-1].provider_response_id,
        **sum_tokens(records),
        cost=sum(costs) if costs else None,
    )


class Runner(Protocol):
    """Runs the lines of a batch: every line ends once, in any order."""

    def run(self, lines: Sequence[BatchLine], job: BatchJob) -> AsyncGenerator[LineResult, None]:
        """Yield the results as they arrive."""
        ...


class AsyncioRunner:
    """Runs lines as tasks in this process, at most ``job.concurrency`` at the same time.

    Args:
        tools: Tools that the models of all lines may call, as for ``Conversation``. They are not part of a line's
            fingerprint: a finished line does not run again with other tools.
        approve: A function that is called before each tool call and may deny it or change its arguments.
    """

    def __init__(self, *, tools: Tools = (), approve: Approver | None = None) -> None:
        self.tools = resolve_tools(tools)
        self.approve = approve

    async def run(
        self, lines: Sequence[BatchLine], job: BatchJob
    ) -> AsyncGenerator[LineResult, None]:
        """Yield the results as they arrive."""
        context = await BatchContext.open(job)
        context.tools = self.tools
        context.approve = self.approve
        remaining = iter(lines)
        finished: asyncio.Queue[LineResult | BaseException] = asyncio.Queue()

        async def run_lines() -> None:
            try:
                for line in remaining:  # which the workers share
                    finished.put_nowait(await run_conversation(context, line))
            except (
                BaseException
            ) as error:  # raised again below, which would otherwise wait without end
                finished.put_nowait(error)
                raise

        # Plain tasks and not a task group, because the consumer may stop iterating at any time, in any task.
        count = min(job.concurrency, len(lines))
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
    """The numbers of lines of a batch, and the newest result."""

    total: int
    skipped: int
    """The lines that earlier runs completed."""
    completed: int = 0
    failed: int = 0
    last: LineResult | None = None
    """The result of the line that finished last; None before the first one."""

    @property
    def done(self) -> int:
        """The number of finished lines."""
        return self.skipped + self.completed + self.failed


ProgressCallback = Callable[[Progress], None]


@checked_except("prompts")
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
        attempts: The maximum number of attempts of a request that fails temporarily.
        lease: Seconds after which another process may continue the lines of one that died.
        params: Parameters of every request; those of a line override them.
        on_progress: Called with the progress after each line.

    Returns:
        The totals of the batch.

    Raises:
        InvalidBatch: The file or a line is invalid.
        InvalidSetting: An argument is invalid, or ``out`` is a database.
        BatchFailed: The batch stopped; completed work is stored.
    """
    check_positive_int("concurrency", concurrency)
    check_positive_int("attempts", attempts)
    check_count("requests_per_minute", requests_per_minute)
    check_count("tokens_per_minute", tokens_per_minute)
    validate_seconds(lease, "lease")
    if runner is not None and not hasattr(runner, "run"):
        raise InvalidType(f"runner must have the method run, not {describe_type(runner)}")
    check_output_file(Path(out), resolve_address(store_url))
    if isinstance(prompts, str | Path):
        lines = read_lines(prompts)
    else:
        lines = list(prompts)
    if not all(isinstance(line, BatchLine) for line in lines):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidBatch("prompts must be a file or a list of BatchLine, not of other values")
    if len({line.id for line in lines}) < len(lines):
        raise InvalidBatch("two lines have the same id; ids must be unique")
    job = BatchJob(
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
    report: ProgressCallback = on_progress or (lambda _: None)
    began = time.perf_counter()
    done: list[LineResult] = []
    with ResultsFile(out) as results:
        earlier = results.load()
        todo = [line for line in lines if not _is_done(earlier.get(line.id), job.fingerprint(line))]
        skipped = len(lines) - len(todo)
        failed = 0
        report(Progress(len(lines), skipped))
        if todo:
            async with aclosing((runner or AsyncioRunner()).run(todo, job)) as finished:
                async for result in finished:
                    results.append(result)
                    done.append(result)
                    failed += result.status == "failed"
                    report(Progress(len(lines), skipped, len(done) - failed, failed, result))
    return summarize_results(
        done, total=len(lines), skipped=skipped, seconds=round(time.perf_counter() - began, 3)
    )


def default_name(out: str | Path) -> str:
    """Return the default name of a batch, derived from its results file."""
    digest = hashlib.sha256(str(Path(out).absolute()).encode()).hexdigest()
    return f"batch_{digest[:16]}"


def _is_done(result: LineResult | None, fingerprint: str) -> bool:
    """Return whether a result is complete and belongs to the same request."""
    if result is None or result.status != "completed":
        return False
    return result.fingerprint == fingerprint
