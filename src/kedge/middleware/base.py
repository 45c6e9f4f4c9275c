"""What most middlewares are made of: an engine around an engine, with a way in and a way out."""

from collections.abc import Awaitable, Callable
from contextlib import aclosing
from inspect import iscoroutine
from typing import Any

from kedge.engines.base import Engine, Events, Middleware, Request
from kedge.events.run import TurnFinished
from kedge.planning import RequestPlan
from kedge.turns import Turn


class BaseMiddleware(Engine):
    """An engine around another one. Override ``enter``, ``leave`` or ``events``."""

    name = "middleware"

    def __init__(self, inner: Engine) -> None:
        self.inner = inner

    def enter(self, turn: Turn) -> Turn:
        """Change the Turn on its way in."""
        return turn

    def leave(self, turn: Turn) -> Turn:
        """Change the Turn on its way out."""
        return turn

    def plan(self, turn: Turn, **options: Any) -> RequestPlan:
        """What would be sent now, this middleware's way in included."""
        return self.inner.plan(self.enter(turn), **options)

    async def events(self, turn: Turn, request: Request) -> Events:
        """The inner engine's events, with the Turn changed on its way in and out."""
        async with aclosing(self.inner.events(self.enter(turn), request)) as events:
            async for event in events:
                if isinstance(event, TurnFinished):
                    yield TurnFinished(self.leave(event.turn))
                else:
                    yield event

    async def aclose(self) -> None:
        """Close the inner engine."""
        await self.inner.aclose()


TurnTransform = Callable[[Turn], Turn | Awaitable[Turn]]


def two_phase(
    before: TurnTransform | None = None, after: TurnTransform | None = None, *, name: str = ""
) -> Middleware:
    """Change the Turn before it is sent, after it came back, or both. Functions may be async."""
    named = name or getattr(before or after, "__name__", "") or "two_phase"

    def wrap(engine: Engine) -> Engine:
        return _TwoPhaseMiddleware(engine, before or _identity, after or _identity, named)

    return wrap


class _TwoPhaseMiddleware(BaseMiddleware):
    def __init__(
        self, inner: Engine, before: TurnTransform, after: TurnTransform, name: str
    ) -> None:
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
        turn = await _resolve(self.before(turn))
        async with aclosing(self.inner.events(turn, request)) as events:
            async for event in events:
                if isinstance(event, TurnFinished):
                    yield TurnFinished(await _resolve(self.after(event.turn)))
                else:
                    yield event


async def _resolve(turn: Turn | Awaitable[Turn]) -> Turn:
    return turn if isinstance(turn, Turn) else await turn


def _identity(turn: Turn) -> Turn:
    return turn
