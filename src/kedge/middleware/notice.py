"""``notice``: hear of a response's id as soon as the server has acknowledged it."""

from collections.abc import Awaitable, Callable
from contextlib import aclosing

from kedge.engines.protocol import Engine, Events, Middleware, Request
from kedge.events import ResponseStarted
from kedge.middleware.wrapping import Wrapped
from kedge.turns import Turn

Hear = Callable[[str], Awaitable[None] | None]


def notice(hear: Hear) -> Middleware:
    """Call ``hear`` with the id of each response, once, when the server has begun it."""

    def wrap(engine: Engine) -> Engine:
        return _Notice(engine, hear)

    return wrap


class _Notice(Wrapped):
    name = "notice"

    def __init__(self, inner: Engine, hear: Hear) -> None:
        super().__init__(inner)
        self.hear = hear

    async def events(self, turn: Turn, request: Request) -> Events:
        """The inner engine's events; ids are told on the way."""
        async with aclosing(self.inner.events(turn, request)) as events:
            async for event in events:
                if isinstance(event, ResponseStarted) and event.response_id:
                    heard = self.hear(event.response_id)
                    if heard is not None:
                        await heard
                yield event
