"""A process that runs a workflow and kills itself with SIGKILL at a given event or answer."""

import os
import signal
import sys
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

from kedge import connect, run_sync
from kedge.engines import Engine
from kedge.engines.base import Events, Request
from kedge.events.run import AnswerFinished
from kedge.middleware import BaseMiddleware
from kedge.store import open_store
from kedge.turns import Turn
from kedge.workflows import Side, Step, Verdict, WorkflowEvent, debate, refine, steps

LEASE = 0.6


def kill_self() -> None:
    """Kill this process with SIGKILL."""
    os.kill(os.getpid(), signal.SIGKILL)


class KillOnAnswer(BaseMiddleware):
    """A middleware that kills the process after an answer was received, before it is stored."""

    name = "dies"

    def __init__(self, inner: Engine, left: list[int]) -> None:
        super().__init__(inner)
        self.remaining = left

    async def events(self, turn: Turn, request: Request) -> Events:
        """Yield the events of the inner engine, and kill the process at the chosen answer."""
        async with aclosing(self.inner.events(turn, request)) as events:
            async for event in events:
                if isinstance(event, AnswerFinished):
                    self.remaining[0] -= 1
                    if not self.remaining[0]:
                        kill_self()
                yield event


def kill_at_event(
    number: int, kill: Callable[[], None] = kill_self
) -> Callable[[WorkflowEvent], None]:
    """Return a watcher that kills the process at the event of this number; 0 for never."""
    events: list[WorkflowEvent] = []

    def on_event(event: WorkflowEvent) -> None:
        events.append(event)
        if len(events) == number:
            kill()

    return on_event


def judge(answer: str) -> Verdict:
    """Accept the third answer."""
    return Verdict(passed="3" in answer, critique=f"More than {answer}")


ANSWERS = (
    {"when": "More than 2", "say": "3"},
    {"when": "More than 1", "say": "2"},
    {"when": "More than 0", "say": "1"},
    {"when": "Count", "say": "0"},
)
EXPECTED_REQUESTS = {"refine": 4, "debate": 4, "steps": 3}


async def run_workflow(kind: str, url: str, servers: list[str], **options: Any) -> dict[str, Any]:
    """Run the workflow of this kind, and return its result."""
    engines = [connect(f"responses:{server}#practice", max_retries=0) for server in servers]
    options |= {"workflow": "wf_crash", "lease": LEASE}
    try:
        async with open_store(url) as store:
            match kind:
                case "refine":
                    result: Any = await refine(
                        "Count", judge=judge, store=store, engine=engines[0], **options
                    )
                    return {"answer": result.answer, "rounds": len(result.rounds)}
                case "debate":
                    sides = [Side("one", engines[0]), Side("two", engines[-1])]
                    result = await debate(
                        "Which?",
                        sides,
                        judge=lambda arguments: "one" if len(arguments) == 4 else None,
                        store=store,
                        **options,
                    )
                    return {"winner": result.winner, "rounds": result.rounds}
                case _:
                    pipeline = [Step("a", "Count"), Step("b", "After {a}"), Step("c", "And {b}")]
                    result = await steps(pipeline, store=store, engine=engines[0], **options)
                    return {"values": [step.value for step in result.steps]}
    finally:
        for engine in engines:
            await engine.aclose()


if __name__ == "__main__":
    kind, url, how, number, *servers = sys.argv[1:]
    at = int(number)
    options: dict[str, Any] = {}
    if how == "event":
        options["on_event"] = kill_at_event(at)
    else:
        left = [at]
        options["middleware"] = [lambda engine: KillOnAnswer(engine, left)]
    run_sync(run_workflow(kind, url, servers, **options))
