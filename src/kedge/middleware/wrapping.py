"""What most middlewares are made of: an engine around an engine, with a way in and a way out."""

from contextlib import aclosing
from typing import Any

from kedge.engines.protocol import Engine, Events, Request
from kedge.events.run import TurnFinished
from kedge.planning import RequestPlan
from kedge.turns import Turn


class Wrapped(Engine):
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
