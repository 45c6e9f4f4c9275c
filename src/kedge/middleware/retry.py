"""``retry``: retry failures that may be temporary, as long as no output was shown.

The client retries connections itself; this middleware retries other failures: a stream that broke before its
first output, a response that failed on the server, a persistent rate limit.

No retry library is used, because it cannot know whether output was already shown.
"""

from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass

import anyio

from kedge._internal.argument_types import checked
from kedge._internal.arguments import check_positive_int
from kedge._internal.wait_policy import WaitPolicy
from kedge.engines.base import Events, Middleware
from kedge.engines.request import Request
from kedge.engines.stack import BaseMiddleware
from kedge.errors import EngineError, InvalidSetting
from kedge.events.run import VISIBLE_EVENTS, AttemptFailed, ToolStarted
from kedge.observe import get_logger
from kedge.planning import get_state, set_state
from kedge.turns import Turn

log = get_logger(__name__)

Sleep = Callable[[float], Awaitable[None]]


@checked
def retry(
    attempts: int = 3, *, first: float = 0.5, longest: float = 30.0, sleep: Sleep = anyio.sleep
) -> Middleware:
    """Retry a run that failed before it showed any output.

    Args:
        attempts: The maximum number of attempts.
        first: Seconds before the second attempt; they double with each further one.
        longest: The maximum number of seconds between two attempts. A server's ``Retry-After`` is respected
            up to this limit.
        sleep: A function that waits for a number of seconds.

    Returns:
        A middleware for ``with_middleware``.

    Raises:
        InvalidSetting: The number of attempts is not at least 1, or a wait is not a number of seconds.
    """
    check_positive_int("attempts", attempts)
    for name, seconds in (("first", first), ("longest", longest)):
        if not isinstance(seconds, int | float) or not seconds >= 0:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidSetting(f"{name} must be a number of seconds, not {seconds!r}")

    waits = WaitPolicy(
        "a run that failed for a temporary reason before it showed output",
        first=first,
        longest=longest,
        spread=0.5,
    )
    return lambda engine: _RetryMiddleware(engine, attempts, waits, sleep)


@dataclass(eq=False, repr=False)
class _RetryMiddleware(BaseMiddleware):
    name = "retry"
    attempts: int
    waits: WaitPolicy
    sleep: Sleep

    async def events(self, turn: Turn, request: Request) -> Events:
        """Yield the events of the first attempt that succeeds or shows output."""
        for attempt in range(1, self.attempts + 1):
            shown = False
            try:
                async with aclosing(self.inner.events(turn, request)) as events:
                    async for event in events:
                        streamed = request.streaming and isinstance(event, VISIBLE_EVENTS)
                        shown = shown or streamed or isinstance(event, ToolStarted)
                        yield event
                    return
            except EngineError as error:
                if shown or not error.retryable or attempt == self.attempts:
                    raise
                # The same Turn is sent again, because inner middleware changes it again; only the new state of
                # the server's memory is retained.
                if error.turn is not None:
                    turn = set_state(turn, get_state(error.turn))
                wait = self._find_wait(error, attempt)
                log.warning("attempt %d failed; retrying in %.1f s", attempt, wait)
                failed = AttemptFailed(
                    type(error),
                    wait,
                    error.plan,
                    response_id=error.response_id,
                    usage=error.usage,
                    code=error.reported_code,
                    message=str(error),
                )
            yield failed
            await self.sleep(wait)

    def _find_wait(self, error: EngineError, attempt: int) -> float:
        """Return the seconds to wait after an attempt; the server may ask for more or less."""
        if error.retry_after is not None:
            return min(error.retry_after, self.waits.longest)
        return self.waits.pause(attempt - 1)
