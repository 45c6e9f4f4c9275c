"""Rate limits: a maximum of requests and tokens per minute.

The requests of the last minute are stored in a list, so no window of sixty seconds exceeds the limit. The tokens
of a request are not known before it ends; until then the average so far is used. If a server requests a
pause (``retry_after``), all requests wait.

No limiter library is used, because those count requests, not tokens that are known only afterwards.
"""

import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager

import anyio
from msgspec import Struct

from kedge._internal.arguments import check_count
from kedge.engines import Engine
from kedge.engines.base import Events, Request
from kedge.errors import RateLimited
from kedge.events.run import AnswerFinished
from kedge.middleware import BaseMiddleware
from kedge.turns import Turn

WINDOW_SECONDS = 60.0
DEFAULT_PAUSE = 1.0
"""Seconds without requests after a rate-limit error without ``retry_after``."""
MAX_SLEEP = 5.0
"""The maximum number of seconds of one sleep, after which the limits are checked again."""


class Permit(Struct, eq=False):
    """One running request; set ``tokens`` when it has ended."""

    started: float
    tokens: int | None = None


class RateLimiter:
    """Limits requests and tokens per minute.

    Args:
        requests: The maximum number of requests per minute; 0 for no limit.
        tokens: The maximum number of tokens per minute; 0 for no limit.
        clock: Returns the time in seconds.
        sleep: Waits for a number of seconds.

    Raises:
        InvalidSetting: A limit is negative.
    """

    def __init__(
        self,
        *,
        requests: int = 0,
        tokens: int = 0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = anyio.sleep,
    ) -> None:
        check_count("requests", requests)
        check_count("tokens", tokens)
        self.requests = requests
        self.tokens = tokens
        self._clock = clock
        self._sleep = sleep
        self._recent: deque[Permit] = deque()
        """The permits of the last minute, oldest first."""
        self._finished = 0
        self._finished_tokens = 0
        self._paused_until = 0.0
        self._lock = anyio.Lock()

    @asynccontextmanager
    async def request(self) -> AsyncGenerator[Permit]:
        """Wait until a request may be sent; set ``tokens`` of the permit when it has ended."""
        # Only the first waiter sleeps, so requests start in order of arrival.
        async with self._lock:
            while (wait := self._wait_seconds()) > 0:
                await self._sleep(min(wait, MAX_SLEEP))
            permit = Permit(self._clock())
            self._recent.append(permit)
        try:
            yield permit
        finally:
            if permit.tokens is None:  # it failed
                permit.tokens = 0
            else:
                self._finished += 1
                self._finished_tokens += permit.tokens

    def pause(self, seconds: float) -> None:
        """Delay all requests for this many seconds."""
        self._paused_until = max(self._paused_until, self._clock() + seconds)

    def __call__(self, engine: Engine) -> Engine:
        """Return the engine with this limit; it must be inside of middleware that retries."""
        return _RateLimitedEngine(engine, self)

    def _wait_seconds(self) -> float:
        """Return the seconds until the next request may be sent."""
        now = self._clock()
        while self._recent and self._recent[0].started <= now - WINDOW_SECONDS:
            self._recent.popleft()
        waits = [self._paused_until - now]
        if self.requests and len(self._recent) >= self.requests:
            waits.append(self._recent[-self.requests].started + WINDOW_SECONDS - now)
        if self.tokens and self._recent:
            waits.append(self._token_wait_seconds(now))
        return max(waits)

    def _token_wait_seconds(self, now: float) -> float:
        """Return the seconds until enough old requests have left the window to allow one more."""
        # A request that is still running, and the next one, are assumed to use as many tokens as the finished ones did.
        typical = self._finished_tokens / max(self._finished, 1)
        used = typical + sum(self._estimate_tokens(permit, typical) for permit in self._recent)
        for permit in self._recent:
            if used <= self.tokens:
                return 0.0
            used -= self._estimate_tokens(permit, typical)
            if used <= self.tokens or permit is self._recent[-1]:
                return permit.started + WINDOW_SECONDS - now
        return 0.0

    @staticmethod
    def _estimate_tokens(permit: Permit, typical: float) -> float:
        """Return the tokens of a request, or the typical number while it is running."""
        return typical if permit.tokens is None else permit.tokens


class _RateLimitedEngine(BaseMiddleware):
    """Waits for a permit and reports the tokens used."""

    name = "pace"

    def __init__(self, inner: Engine, limiter: RateLimiter) -> None:
        super().__init__(inner)
        self.limiter = limiter

    async def events(self, turn: Turn, request: Request) -> Events:
        """Yield the inner engine's events once a permit is available."""
        async with self.limiter.request() as ticket:
            try:
                async with aclosing(self.inner.events(turn, request)) as events:
                    async for event in events:
                        if isinstance(event, AnswerFinished) and event.outcome.usage:
                            usage = event.outcome.usage
                            ticket.tokens = usage.input_tokens + usage.output_tokens
                        yield event
            except RateLimited as error:
                self.limiter.pause(error.retry_after or DEFAULT_PAUSE)
                raise
