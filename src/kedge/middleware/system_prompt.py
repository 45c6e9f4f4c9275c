"""``system_prompt``: set the instructions of every Turn; ``on_response_started``: report response ids.

Leading system text is not part of any digest, so it may change with every request without losing anchors.
"""

from collections.abc import Awaitable, Callable
from contextlib import aclosing

from kedge.engines.base import Engine, Events, Middleware, Request
from kedge.events import ResponseStarted
from kedge.middleware.base import BaseMiddleware
from kedge.turns import Turn, system

ResponseIdCallback = Callable[[str], Awaitable[None] | None]


def on_response_started(callback: ResponseIdCallback) -> Middleware:
    """Call a function with the id of each response as soon as the server has started it.

    Args:
        callback: Is called with the id; may be async.

    Returns:
        A middleware for ``with_middleware``.
    """

    def wrap(engine: Engine) -> Engine:
        return _ResponseStartedMiddleware(engine, callback)

    return wrap


class _ResponseStartedMiddleware(BaseMiddleware):
    name = "notice"

    def __init__(self, inner: Engine, callback: ResponseIdCallback) -> None:
        super().__init__(inner)
        self.callback = callback

    async def events(self, turn: Turn, request: Request) -> Events:
        """Yield the inner engine's events, and report ids."""
        async with aclosing(self.inner.events(turn, request)) as events:
            async for event in events:
                if isinstance(event, ResponseStarted) and event.response_id:
                    result = self.callback(event.response_id)
                    if result is not None:
                        await result
                yield event


NAME = "system_prompt"


def system_prompt(text: str | Callable[[Turn], str]) -> Middleware:
    """Put instructions at the start of every Turn.

    Args:
        text: The instructions, or a function that returns them for a Turn.

    Returns:
        A middleware for ``with_middleware``.
    """

    def wrap(engine: Engine) -> Engine:
        return _SystemPromptMiddleware(engine, text)

    return wrap


class _SystemPromptMiddleware(BaseMiddleware):
    name = NAME

    def __init__(self, inner: Engine, text: str | Callable[[Turn], str]) -> None:
        super().__init__(inner)
        self.text = text

    def enter(self, turn: Turn) -> Turn:
        """Return the Turn with the text at its start, replacing that of an earlier request."""
        text = self.text if isinstance(self.text, str) else self.text(turn)
        for block in turn.leading:
            if block.origin == NAME:
                fresh = system(text, origin=NAME, id=block.id)
                return turn if fresh == block else turn.replace(block.id, fresh)
        return turn.insert(0, system(text, origin=NAME))
