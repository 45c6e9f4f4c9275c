"""``compact``: compact long conversations, outermost in a stack.

The Turn is compacted after a finished answer, never between a tool call and its result: this middleware must be
outside of ``tools``, so that it receives only complete answers. With ``resend_limit`` it also compacts before a
long Turn is sent again, whether the plan requires that (edited, expired) or the server does when the request is
sent (lost).
"""

from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any

from msgspec import structs

from kedge.compaction import Compactor, TurnCompacted, compact_turn
from kedge.compaction.base import check_component, check_engine
from kedge.engines.base import Engine, Events, Middleware, unwrap
from kedge.engines.options import ResendLimit, to_resend_limit
from kedge.engines.request import Request
from kedge.engines.request_engine import MODE_CHANGE_REASON
from kedge.engines.stack import BaseMiddleware
from kedge.errors import ResendTooLong
from kedge.events.run import AnswerFinished, TurnFinished
from kedge.planning import RequestPlan, find_running
from kedge.turns import Turn
from kedge.usage.tokens import DEFAULT_COUNTER, TokenCounter


def compact(
    compactor: Compactor,
    *,
    engine: Engine | None = None,
    counter: TokenCounter = DEFAULT_COUNTER,
    resend_limit: int | ResendLimit | None = None,
) -> Middleware:
    """Compact after each answer, if the compactor decides so.

    Args:
        compactor: The compactor, which decides when and how.
        engine: The engine that the compactor may send requests to; by default the wrapped one, without
            its middleware.
        counter: The token counter to use if the server did not report usage.
        resend_limit: Bytes, or a `ResendLimit` of bytes and blocks, above which history is compacted before it is
            sent in full again.

    Returns:
        A middleware for ``with_middleware``.

    Raises:
        InvalidSetting: The compactor, the engine, the counter or the limit is not one.
    """
    check_component("compactor", compactor, "compact")
    check_component("counter", counter, "count_items")
    check_engine(engine)
    limit = to_resend_limit(resend_limit)

    def wrap(inner: Engine) -> Engine:
        return _CompactMiddleware(inner, compactor, engine or unwrap(inner), counter, limit)

    return wrap


def limit_resends(limit: int | ResendLimit) -> Middleware:
    """Raise ``ResendTooLong`` in place of a full send of a longer conversation that could have been continued.

    Args:
        limit: Bytes, or a `ResendLimit` of bytes and blocks. A limit of one call takes precedence.

    Returns:
        A middleware for ``with_middleware``.
    """
    resend_limit = to_resend_limit(limit)

    def wrap(inner: Engine) -> Engine:
        return _LimitMiddleware(inner, resend_limit)

    return wrap


@dataclass(eq=False, repr=False)
class _LimitMiddleware(BaseMiddleware):
    name = "limit_resends"
    resend_limit: ResendLimit | None

    async def events(self, turn: Turn, request: Request) -> Events:
        """Yield the events of a request with the limit, unless it has one."""
        limit = request.resend_limit or self.resend_limit
        limited = structs.replace(request, resend_limit=limit)
        async with aclosing(self.inner.events(turn, limited)) as events:
            async for event in events:
                yield event


@dataclass(eq=False, repr=False)
class _CompactMiddleware(BaseMiddleware):
    name = "compact"
    compactor: Compactor
    engine: Engine
    counter: TokenCounter
    resend_limit: ResendLimit | None

    def plan(self, turn: Turn, **options: Any) -> RequestPlan:
        """Return the plan of a request with the parameters of the compactor."""
        return self.inner.plan(turn, **{**self._params(), **options})

    async def events(self, turn: Turn, request: Request) -> Events:
        """Yield the inner engine's events, and those of compaction before and after."""
        request = structs.replace(request, params={**self._params(), **request.params})
        shorten = partial(
            compact_turn,
            compactor=self.compactor,
            engine=self.engine,
            counter=self.counter,
            filters=request.filters,
        )
        limits = (request.resend_limit,)
        if self.resend_limit is not None and request.resend_limit is None:
            plan = self.plan(turn, **request.to_options())
            if self._is_long_resend(turn, plan):
                turn, result = await shorten(turn, occasion="resend")
                yield TurnCompacted(result, "resend")
            elif plan.reason != "stateless" and plan.mode_reason != MODE_CHANGE_REASON:
                limits = (self.resend_limit, None)
        answered = False
        usage = None
        for limit in limits:
            limited = structs.replace(request, resend_limit=limit)
            try:
                async with aclosing(self.inner.events(turn, limited)) as events:
                    async for event in events:
                        if isinstance(event, AnswerFinished):
                            answered = True
                            usage = event.outcome.usage
                        if not isinstance(event, TurnFinished) or find_running(event.turn):
                            yield event
                            continue
                        turn, result = await shorten(event.turn, usage=usage)
                        if result.changed or result.notes:
                            yield TurnCompacted(result, "answered")
                        yield TurnFinished(turn)
                    return
            except ResendTooLong as error:
                if request.resend_limit:  # the caller wants the error
                    raise
                turn = error.turn or turn
            if not answered:  # in the middle of a tool loop nothing is compacted
                turn, result = await shorten(turn, occasion="resend")
                yield TurnCompacted(result, "resend")

    def _is_long_resend(self, turn: Turn, plan: RequestPlan) -> bool:
        """Return whether everything would be sent, and is too long.

        Nothing is sent while the server generates the answer to this Turn, whatever its plan says. That answer is paid
        for, and a changed Turn could not be continued with it.
        """
        if self.resend_limit is None or find_running(turn):
            return False
        return plan.is_full and self.resend_limit.is_exceeded(plan)

    def _params(self) -> Mapping[str, Any]:
        """Return the parameters that the compactor adds to every request."""
        return getattr(self.compactor, "params", None) or {}
