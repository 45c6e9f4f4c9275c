"""``log``: what passes, as log records.

TRACE tells every event, DEBUG the plan of each request and what middlewares changed, INFO the beginning
and end of answers, WARNING fallbacks and healing, ERROR failures. No record holds content.
"""

import logging
from contextlib import aclosing

from kedge.engines.base import Engine, Events, Middleware, Request
from kedge.errors import KedgeError
from kedge.events import Event, ResponseStarted
from kedge.events.run import (
    AnswerFinished,
    FellBack,
    Healed,
    ModeChanged,
    RequestPlanned,
    ServerForgot,
    ToolFinished,
    TurnEdited,
)
from kedge.middleware.base import BaseMiddleware
from kedge.observe import TRACE, Logger, get_logger
from kedge.turns import Turn


def log(name: str = "kedge.run") -> Middleware:
    """Log what passes under this name."""

    def wrap(engine: Engine) -> Engine:
        return _LogMiddleware(engine, get_logger(name))

    return wrap


class _LogMiddleware(BaseMiddleware):
    name = "log"

    def __init__(self, inner: Engine, logger: Logger) -> None:
        super().__init__(inner)
        self.logger = logger

    async def events(self, turn: Turn, request: Request) -> Events:
        """The inner engine's events, told to the log."""
        self.logger.debug("a Turn of %d blocks", len(turn), turn_id=turn.id)
        try:
            async with aclosing(self.inner.events(turn, request)) as events:
                async for event in events:
                    level, words, fields = describe_event(event)
                    self.logger.log(level, words, turn_id=turn.id, **fields)
                    yield event
        except KedgeError as error:
            self.logger.log(logging.ERROR, "failed: %s", type(error).__name__, turn_id=turn.id)
            raise


def describe_event(event: Event) -> tuple[int, str, dict[str, object]]:
    """What a log says of an event: level, words, fields."""
    match event:
        case RequestPlanned(plan):
            words = f"planned: {plan.delta_blocks} of {plan.full_blocks} blocks, {plan.mode}"
            return logging.DEBUG, words, {"response_id": plan.previous_response_id}
        case TurnEdited(by, diff, phase):
            words = f"{by} changed the Turn on the way {phase}: +{len(diff.added)} "
            words += f"-{len(diff.removed)} ~{len(diff.modified)} >{len(diff.moved)}"
            return logging.DEBUG, words, {}
        case ResponseStarted():
            return logging.INFO, "answering", {"response_id": event.response_id}
        case AnswerFinished(outcome):
            words = f"answered: {outcome.status}, {len(outcome.blocks)} blocks"
            return logging.INFO, words, {"response_id": outcome.response_id}
        case ToolFinished(call, _, seconds, outcome):
            words = f"tool {call.name}: {outcome} in {seconds:.3f} s"
            return logging.INFO, words, {"call_id": call.call_id}
        case FellBack(reason) | Healed(reason):
            return logging.WARNING, f"{type(event).__name__}: {reason}", {}
        case ModeChanged(mode, wanted, reason):
            return logging.WARNING, f"mode {mode} instead of {wanted}: {reason}", {}
        case ServerForgot(response_id):
            return logging.WARNING, "the server forgot", {"response_id": response_id}
        case _:
            return TRACE, type(event).__name__, {}
