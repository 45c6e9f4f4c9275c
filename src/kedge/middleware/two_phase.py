"""``two_phase``: a middleware from two functions of a Turn."""

from collections.abc import Awaitable, Callable
from contextlib import aclosing
from inspect import iscoroutine
from typing import Any

from kedge.engines.protocol import Engine, Events, Middleware, Request
from kedge.events.run import TurnFinished
from kedge.middleware.wrapping import Wrapped
from kedge.planning import RequestPlan
from kedge.turns import Turn

Phase = Callable[[Turn], Turn | Awaitable[Turn]]


def two_phase(
    before: Phase | None = None, after: Phase | None = None, *, name: str = ""
) -> Middleware:
    """Change the Turn before it is sent, after it came back, or both. Functions may be async."""
    named = name or getattr(before or after, "__name__", "") or "two_phase"

    def wrap(engine: Engine) -> Engine:
        return _TwoPhase(engine, before or _same, after or _same, named)

    return wrap


class _TwoPhase(Wrapped):
    def __init__(self, inner: Engine, before: Phase, after: Phase, name: str) -> None:
        super().__init__(inner)
        self.before, self.after, self.name = before, after, name

    def plan(self, turn: Turn, **options: Any) -> RequestPlan:
        """What would be sent now; an async ``before`` cannot run here and is passed over."""
        changed = self.before(turn)
        if isinstance(changed, Turn):
            return self.inner.plan(changed, **options)
        if iscoroutine(changed):
            changed.close()
        return self.inner.plan(turn, **options)

    async def events(self, turn: Turn, request: Request) -> Events:
        """The inner engine's events between the two phases."""
        turn = await _resolved(self.before(turn))
        async with aclosing(self.inner.events(turn, request)) as events:
            async for event in events:
                if isinstance(event, TurnFinished):
                    yield TurnFinished(await _resolved(self.after(event.turn)))
                else:
                    yield event


async def _resolved(turn: Turn | Awaitable[Turn]) -> Turn:
    return turn if isinstance(turn, Turn) else await turn


def _same(turn: Turn) -> Turn:
    return turn
