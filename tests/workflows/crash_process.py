"""A process that runs a workflow and kills itself with SIGKILL at a given answer."""

import os
import signal
import sys
from collections.abc import Callable, Sequence
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
                        os.kill(os.getpid(), signal.SIGKILL)
                yield event


def crash_at_event(number: int, crash: Callable[[], None]) -> Callable[[WorkflowEvent], None]:
    """Return a watcher that calls a function at the event of this number."""
    events: list[WorkflowEvent] = []

    def on_event(event: WorkflowEvent) -> None:
        events.append(event)
        if len(events) == number:
            crash()

    return on_event


def judge(answer: str) -> Verdict:
    """Accept the third answer."""
    return Verdict(passed="3" in answer, critique=f"More than {answer}")


def choose_one(arguments: Sequence[object]) -> str | None:
    """Choose the first side after two rounds."""
    return "one" if len(arguments) == 4 else None


ANSWERS = (
    {"when": "More than 2", "say": "3"},
    {"when": "More than 1", "say": "2"},
    {"when": "More than 0", "say": "1"},
    {"when": "Count", "say": "0"},
)
EXPECTED_REQUESTS = {"refine": 4, "debate": 4, "steps": 3}


async def run_workflow(kind: str, url: str, server: str, **options: Any) -> object:
    """Run the workflow of this kind, and return its result."""
    options |= {"workflow": "wf_crash", "lease": LEASE}
    async with (
        open_store(url) as store,
        connect(f"responses:{server}#practice", max_retries=0) as engine,
    ):
        options["store"] = store
        match kind:
            case "refine":
                return (await refine("Count", judge=judge, engine=engine, **options)).answer
            case "debate":
                sides = [Side("one", engine), Side("two", engine)]
                return (await debate("Which?", sides, judge=choose_one, **options)).winner
            case _:
                pipeline = [Step("a", "Count"), Step("b", "After {a}"), Step("c", "And {b}")]
                result = await steps(pipeline, engine=engine, **options)
                return [step.value for step in result.steps]


if __name__ == "__main__":
    kind, url, number, server = sys.argv[1:]
    left = [int(number)]
    run_sync(
        run_workflow(kind, url, server, middleware=[lambda engine: KillOnAnswer(engine, left)])
    )
