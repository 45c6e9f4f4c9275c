"""An engine that returns scripted answers without a server, for tests of middleware."""

from collections.abc import Callable, Sequence
from typing import Any

from kedge.engines import Engine, Events, Middleware, Request
from kedge.engines.base import Stream
from kedge.events import Event, Outcome, ResponseStarted, TextDelta, Usage
from kedge.events.run import AnswerFinished, RequestPlanned, TurnFinished
from kedge.middleware import with_middleware
from kedge.planning import RequestPlan, plan_request, record_response
from kedge.turns import AssistantBlock, Block, Turn, user


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


ScriptedAnswer = Sequence[Block] | Exception | Callable[[Turn], Sequence[Block]]


class ScriptedEngine(Engine):
    """Returns the given answers in order and records the turns and requests it receives."""

    name = "scripted"
    usage: Usage | None = None

    def __init__(self, *answers: ScriptedAnswer) -> None:
        self.answers = list(answers)
        self.turns: list[Turn] = []
        self.requests: list[Request] = []

    def plan(self, turn: Turn, **options: Any) -> RequestPlan:
        """Return a plan for the scope ``scripted``."""
        return plan_request(turn, scope="scripted", now=0.0)

    async def events(self, turn: Turn, request: Request) -> Events:
        """Yield the events of the next answer."""
        self.turns.append(turn)
        self.requests.append(request)
        plan = self.plan(turn)
        yield RequestPlanned(plan)
        response_id = f"resp_{len(self.turns)}"
        yield ResponseStarted(response_id)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        blocks = tuple(answer(turn) if callable(answer) else answer)
        for block in blocks:
            if isinstance(block, AssistantBlock):
                yield TextDelta(block.text)
        turn = record_response(turn, blocks, response_id=response_id, plan=plan, created_at=0.0)
        outcome = Outcome("completed", blocks, response_id, usage=self.usage)
        yield AnswerFinished(outcome, turn, plan)
        yield TurnFinished(turn)


async def run_stack(
    engine: Engine, *middleware: Middleware, turn: Turn | None = None, **options: Any
) -> tuple[Stream[Any], list[Event]]:
    """Send a Turn through these middleware; return the stream and its events."""
    stack = with_middleware(engine, *middleware)
    async with stack.stream(turn or Turn([user("?")]), **options) as run:
        return run, [event async for event in run]
