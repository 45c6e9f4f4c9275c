"""Run one line of a batch: a stored conversation whose turns are each requested once.

The id of the conversation is derived from the batch's name and the line's id, and the keys of its turns from
their numbers. When a line runs again, also in another process, the stored answers are used.
"""

import hashlib
import json
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from kedge.batch.files import BatchLine, LineResult, sum_tokens
from kedge.batch.rate_limit import RateLimiter
from kedge.conversation import Conversation, ConversationSettings
from kedge.engines import Engine
from kedge.errors import KedgeError, KeyReused
from kedge.middleware import retry, with_middleware
from kedge.planning import find_running
from kedge.providers import connect
from kedge.store import Store, open_store
from kedge.turns.frozen_json import EMPTY, FrozenMap, thaw

BATCH_KEY = "batch"
DEFAULT_LEASE = 20.0
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
        object.__setattr__(self, "params", FrozenMap(self.params))

    def to_dict(self) -> dict[str, Any]:
        """Return the job as JSON values; ``BatchJob(**values)`` restores it."""
        return {**asdict(self), "params": thaw(self.params)}

    def fingerprint(self, line: BatchLine) -> str:
        """Return a hash of the prompts, the model and the parameters of a line.

        Results, conversations and workflows of a line are reused only under the same fingerprint.
        """
        request = {
            "prompts": line.prompts,
            "system": line.system,
            "model": line.model or self.model,
            "params": {**thaw(self.params), **thaw(line.params)},
            **({} if line.schema is None else {"schema": thaw(line.schema)}),
        }
        encoded = json.dumps(request, sort_keys=True, separators=(",", ":")).encode()
        return f"sha256:{hashlib.sha256(encoded).hexdigest()[:32]}"


class BatchContext:
    """The store, the engines and the rate limiter shared by the lines of one process."""

    def __init__(self, work: BatchJob, store: Store, rate_limiter: RateLimiter) -> None:
        self.work = work
        self.store = store
        self.rate_limiter = rate_limiter
        self.settings: ConversationSettings = {}
        """Settings of every conversation, such as its tools."""
        self._engines: dict[str, Engine] = {}

    @classmethod
    async def open(cls, work: BatchJob, *, share: int = 1) -> "BatchContext":
        """Open a context; the rate limits are divided among ``share`` contexts."""
        store = await open_store(work.store_url)
        # At least 1, because 0 means no limit.
        requests, tokens = (
            max(limit // share, 1) if limit else 0
            for limit in (work.requests_per_minute, work.tokens_per_minute)
        )
        return cls(work, store, RateLimiter(requests=requests, tokens=tokens))

    async def aclose(self) -> None:
        """Close the connections."""
        for engine in self._engines.values():
            await engine.aclose()
        await self.store.aclose()

    def conversation_id(self, line: BatchLine) -> str:
        """Return the conversation id of a line."""
        return f"{self.work.name}.{line.id}"

    async def open_conversation(self, line: BatchLine) -> Conversation:
        """Open the conversation of a line, or create it."""
        name = self.conversation_id(line)
        settings: ConversationSettings = {
            **self.settings,
            "system": line.system,
            "lease": self.work.lease,
        }
        engine = self._get_engine(line.model or self.work.model)
        fingerprint = self.work.fingerprint(line)
        data = {"name": self.work.name, "line": line.id, "fingerprint": fingerprint}
        conversation = Conversation(
            engine,
            store=self.store,
            id=name,
            title=line.prompts[0][:80],
            tags=(BATCH_KEY, f"{BATCH_KEY}:{self.work.name}"),
            data={BATCH_KEY: data},
            **settings,
        )
        row = await conversation.require_row()
        recorded: Mapping[str, Any] = row.data.get(BATCH_KEY) or {}
        if recorded.get("fingerprint") != fingerprint:
            raise KeyReused(CHANGED_LINE_ERROR)
        return conversation

    async def send_prompt(self, conversation: Conversation, line: BatchLine, number: int) -> str:
        """Send one turn of a line and return the answer; JSON if the line has a schema."""
        key = f"{self.work.name}/{line.id}/{number}"
        options: dict[str, Any] = {**thaw(self.work.params), **thaw(line.params)}
        typed: dict[str, Any] = {} if line.schema is None else {"output": thaw(line.schema)}
        reply = await conversation.send(line.prompts[number], key=key, **typed, **options)
        if find_running(reply.turn):  # the result of a line is its answer
            options["background"] = False
            reply = await conversation.resume(**typed, **options)
        return json.dumps(reply.output, ensure_ascii=False) if typed else reply.text

    def _get_engine(self, model: str) -> Engine:
        """Return the engine of a model; attempts and limits apply to each request, also after tool calls."""
        if model not in self._engines:
            layers = (retry(self.work.attempts), self.rate_limiter)
            self._engines[model] = with_middleware(connect(model), *layers)
        return self._engines[model]


async def send_turn(context: BatchContext, line: BatchLine, number: int) -> dict[str, Any]:
    """Run one turn of a line, and return its answer or its error as JSON values, which DBOS can store as a step."""
    try:
        conversation = await context.open_conversation(line)
        return {"answer": await context.send_prompt(conversation, line, number)}
    except KedgeError as error:
        text = CHANGED_LINE_ERROR if isinstance(error, KeyReused) else str(error)
        retryable = bool(getattr(error, "retryable", False))
        return {"error": text, "kind": type(error).__name__, "retryable": retryable}


TurnFunction = Callable[[BatchContext, BatchLine, int], Awaitable[dict[str, Any]]]


async def run_conversation(
    context: BatchContext, line: BatchLine, turn_function: TurnFunction = send_turn
) -> LineResult:
    """Run the conversation of a line; an error ends the line, but not the batch.

    Args:
        context: The shared store, engines and limits.
        line: The line to run.
        turn_function: A function that runs the turn with a number; a DBOS worker passes one that stores each
            turn as a step.
    """
    began = time.perf_counter()
    answers: list[str] = []
    failure: dict[str, Any] = {}
    for number in range(len(line.prompts)):
        result = await turn_function(context, line, number)
        if "answer" not in result:
            failure = result
            break
        answers.append(result["answer"])
    name = context.conversation_id(line)
    try:
        rows = await context.store.responses(await context.store.conversation(name))
    except KedgeError:  # it never started, or the store is not available: nothing is added up
        rows = []
    costs = [row.cost for row in rows if row.cost is not None]
    return LineResult(
        id=line.id,
        status="failed" if failure else "completed",
        answers=tuple(answers),
        conversation=name if rows else "",
        provider_response_id=rows[-1].provider_response_id if rows else "",
        model=line.model or context.work.model,
        **sum_tokens(rows),
        cost=sum(costs) if costs else None,
        seconds=round(time.perf_counter() - began, 3),
        fingerprint=context.work.fingerprint(line),
        **failure,
    )
