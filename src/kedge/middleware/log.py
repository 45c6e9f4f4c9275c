"""``log``: write the events of a run to the log; ``on_response_started``: report response ids.

TRACE has every event, DEBUG the plan of each request and the changes of middleware, INFO the start and end of
answers, WARNING fallbacks and healing, ERROR failures. No record has content.
"""

import logging
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from inspect import isawaitable
from typing import Any

from kedge._internal.argument_types import checked_except
from kedge.engines.base import Events, Middleware
from kedge.engines.request import Request
from kedge.engines.stack import BaseMiddleware
from kedge.errors import KedgeError
from kedge.events import Event, ResponseStarted
from kedge.events import run as run_events
from kedge.observe import TRACE, Logger, get_logger
from kedge.turns import Turn


@checked_except("name")
def log(name: str = "kedge.run") -> Middleware:
    """Log the events of each run.

    Args:
        name: The name of the logger.

    Returns:
        A middleware for ``with_middleware``.
    """
    return lambda engine: _LogMiddleware(engine, get_logger(name))


@dataclass(eq=False, repr=False)
class _LogMiddleware(BaseMiddleware):
    name = "log"
    logger: Logger

    async def events(self, turn: Turn, request: Request) -> Events:
        """Yield the inner engine's events, and log them."""
        self.logger.debug("sending a Turn of %d blocks", len(turn), turn_id=turn.id)
        try:
            async with aclosing(self.inner.events(turn, request)) as events:
                async for event in events:
                    level, message, fields = describe_event(event)
                    self.logger.log(level, message, turn_id=turn.id, **fields)
                    yield event
        except KedgeError as error:
            self.logger.log(logging.ERROR, "failed: %s", type(error).__name__, turn_id=turn.id)
            raise


def describe_event(event: Event) -> tuple[int, str, dict[str, Any]]:
    """Return the level, message and fields of the log record of an event."""
    match event:
        case run_events.RequestPlanned(plan):
            message = f"planned: {plan.delta_blocks} of {plan.full_blocks} blocks, {plan.mode}"
            return logging.DEBUG, message, {"response_id": plan.anchor_id}
        case run_events.TurnEdited(by, diff, phase):
            message = f"{by} changed the Turn on the way {phase}: +{len(diff.added)} "
            message += f"-{len(diff.removed)} ~{len(diff.modified)} >{len(diff.moved)}"
            return logging.DEBUG, message, {}
        case ResponseStarted():
            return logging.INFO, "answering", {"response_id": event.response_id}
        case run_events.AnswerFinished(outcome):
            message = f"answered: {outcome.status}, {len(outcome.blocks)} blocks"
            return logging.INFO, message, {"response_id": outcome.response_id}
        case run_events.ToolFinished(call, _, seconds, outcome):
            message = f"tool {call.name}: {outcome} in {seconds:.3f} s"
            return logging.INFO, message, {"call_id": call.call_id}
        case run_events.FellBack(reason) | run_events.Healed(reason):
            return logging.WARNING, f"{type(event).__name__}: {reason}", {}
        case run_events.ModeChanged(mode, requested, reason):
            return logging.WARNING, f"mode {mode} instead of {requested}: {reason}", {}
        case run_events.ServerForgot(response_id):
            message = "the server answered without the stored context"
            return logging.WARNING, message, {"response_id": response_id}
        case _:
            return TRACE, type(event).__name__, {}


ResponseIdCallback = Callable[[str], Awaitable[object] | object]


@checked_except("name")
def on_response_started(callback: ResponseIdCallback) -> Middleware:
    """Call a function with the id of each response as soon as the server has started it.

    Args:
        callback: A function that is called with the id; may be async.

    Returns:
        A middleware for ``with_middleware``.
    """
    return lambda engine: _ResponseStartedMiddleware(engine, callback)


@dataclass(eq=False, repr=False)
class _ResponseStartedMiddleware(BaseMiddleware):
    name = "notice"
    callback: ResponseIdCallback

    async def events(self, turn: Turn, request: Request) -> Events:
        """Yield the inner engine's events, and report ids."""
        async with aclosing(self.inner.events(turn, request)) as events:
            async for event in events:
                if isinstance(event, ResponseStarted) and event.response_id:
                    result = self.callback(event.response_id)
                    if isawaitable(result):
                        await result
                yield event
