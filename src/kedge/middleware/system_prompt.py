"""``system_prompt``: fresh instructions at the front of every Turn.

Leading system text is no part of any digest, so it may change with every request at no cost.
"""

from collections.abc import Awaitable, Callable
from contextlib import aclosing

from kedge.engines.base import Engine, Events, Middleware, Request
from kedge.events import ResponseStarted
from kedge.middleware.base import BaseMiddleware
from kedge.turns import Turn, system

ResponseIdCallback = Callable[[str], Awaitable[None] | None]


def on_response_started(callback: ResponseIdCallback) -> Middleware:
    """Call ``hear`` with the id of each response, once, when the server has begun it."""

    def wrap(engine: Engine) -> Engine:
        return _ResponseStartedMiddleware(engine, callback)

    return wrap


class _ResponseStartedMiddleware(BaseMiddleware):
    name = "notice"

    def __init__(self, inner: Engine, callback: ResponseIdCallback) -> None:
        super().__init__(inner)
        self.callback = callback

    async def events(self, turn: Turn, request: Request) -> Events:
        """The inner engine's events; ids are told on the way."""
        async with aclosing(self.inner.events(turn, request)) as events:
            async for event in events:
                if isinstance(event, ResponseStarted) and event.response_id:
                    heard = self.callback(event.response_id)
                    if heard is not None:
                        await heard
                yield event


NAME = "system_prompt"


def system_prompt(text: str | Callable[[Turn], str]) -> Middleware:
    """Put instructions at the front: a text, or a function that makes one from the Turn."""

    def wrap(engine: Engine) -> Engine:
        return _SystemPromptMiddleware(engine, text)

    return wrap


class _SystemPromptMiddleware(BaseMiddleware):
    name = NAME

    def __init__(self, inner: Engine, text: str | Callable[[Turn], str]) -> None:
        super().__init__(inner)
        self.text = text

    def enter(self, turn: Turn) -> Turn:
        """Put the text first, in the place of the one that was put there last time."""
        text = self.text if isinstance(self.text, str) else self.text(turn)
        for block in turn.leading:
            if block.origin == NAME:
                fresh = system(text, origin=NAME, id=block.id)
                return turn if fresh == block else turn.replace(block.id, fresh)
        return turn.insert(0, system(text, origin=NAME))
